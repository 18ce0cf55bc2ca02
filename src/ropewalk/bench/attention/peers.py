"""Other attentions, found by import and called by their own documentation.

All take and return tensors as `AttentionInputs` has them, as views of the same memory. A model makes masks
and tables once for all layers: they are computed outside the timed call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ropewalk.bench.attention.cases import AttentionCase, AttentionInputs
from ropewalk.bench.attention.cudnn_graph import CudnnGraphs, Float8Graph
from ropewalk.bench.attention.gate import Attend
from ropewalk.bench.rope.gate import rotate_plainly
from ropewalk.bench.rope.peers import compile_whole, peers_of

# GiB of whole matrices of scores: past the first, hundreds of milliseconds a call would say nothing new.
SLOW_GIB, MOST_GIB = 16, 64
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa_flash": SDPBackend.FLASH_ATTENTION}
_PAGE = 16  # tokens


def compile_rope(case: AttentionCase, inputs: AttentionInputs) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Compile PyTorch's RoPE, half-split, with the tables computed before."""
    cos, sin = inputs.cos[..., None, :], inputs.sin[..., None, :]  # over heads
    cached = case.form == "cache"

    # A cache's keys are rotated already.
    return compile_whole(
        lambda q, k: (rotate_plainly(q, cos, sin, False), k if cached else rotate_plainly(k, cos, sin, False))
    )


def _flex(lib: Any, case: AttentionCase, inputs: AttentionInputs) -> Attend:
    device, lengths, window, attends = inputs.q.device, inputs.key_lengths, case.window, []
    if case.causal and case.form != "cache":
        attends.append(lambda b, h, query, key: query >= key)
    if window is not None:
        attends.append(lambda b, h, query, key: query - key < window)
    if lengths is not None:
        attends.append(lambda b, h, query, key: key < lengths[b])
    if inputs.cu_seqlens is not None:
        sequences = torch.arange(case.batch, device=device).repeat_interleave(inputs.cu_seqlens.diff())
        attends.append(lambda b, h, query, key: sequences[query] == sequences[key])
    mask, grouped, packed = None, case.group > 1, case.form == "packed"
    if attends:
        attended = attends[0] if len(attends) == 1 else lib.and_masks(*attends)
        rows, sizes = None if lengths is None else case.batch, (inputs.q.shape[-3], inputs.k.shape[-3])
        mask = lib.create_block_mask(attended, rows, None, *sizes, device=device)
    compiled = compile_whole(lib.flex_attention, again=True)  # past Dynamo's limit it would run eagerly

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x[None] if x.ndim == 3 else x for x in (q, k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = compiled(q, k, v, block_mask=mask, enable_gqa=grouped)
        out = out.transpose(1, 2)
        return out[0] if packed else out

    return call


def _attended(case: AttentionCase, inputs: AttentionInputs) -> Tensor | None:
    """Return whether a key is there, (B, 1, 1, T)."""
    lengths = inputs.key_lengths
    return (
        None
        if lengths is None
        else (torch.arange(case.tokens, device=lengths.device) < lengths[:, None])[:, None, None]
    )


def _sdpa(name: str, lib: Any, case: AttentionCase, inputs: AttentionInputs) -> Attend:
    backend, grouped, mask = BACKENDS.get(name), case.group > 1, _attended(case, inputs)  # None: PyTorch chooses
    causal = case.causal and case.form != "cache"

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with nullcontext() if backend is None else sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    return call


def _flash(cache_function: str, lengths: str, lib: Any, case: AttentionCase, inputs: AttentionInputs) -> Attend:
    """Build FlashAttention's call, for a cache by one of its functions, and its argument of lengths."""
    starts, longest = inputs.cu_seqlens, case.tokens
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
    name, more = {
        "dense": ("flash_attn_func", _window(case)),
        "packed": ("flash_attn_varlen_func", packed),
        "cache": (cache_function, {lengths: inputs.key_lengths}),
    }[case.form]
    plan = getattr(lib, "get_scheduler_metadata", None)  # FlashAttention-3's, once for all layers, as servers do
    if case.form == "cache" and plan is not None:
        sizes = case.batch, 1, case.tokens, case.q_heads, case.k_heads, case.head_dim, inputs.key_lengths
        options = {"qkv_dtype": case.torch_dtype, "headdim_v": case.out_head_dim, "causal": True}
        more["scheduler_metadata"] = plan(*sizes, **options)
    attend, keywords = getattr(lib, name), {"causal": case.causal or case.form == "cache", **more}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = attend(q, k, v, **keywords)
        return result[0] if isinstance(result, tuple) else result  # some versions add the log-sum-exp

    return call


def _window(case: AttentionCase) -> dict[str, Any]:
    """Return the keys to the left and to the right of a query's own, where there is a window."""
    return {} if case.window is None else {"window_size": (case.window - 1, 0)}


def _te(lib: Any, case: AttentionCase, inputs: AttentionInputs) -> Attend:
    dims = case.head_dim if case.v_head_dim is None else (case.head_dim, case.v_head_dim)
    options = {"qkv_format": "bshd", "attn_mask_type": "causal" if case.causal else "no_mask", **_window(case)}
    attend = lib.DotProductAttention(case.q_heads, dims, num_gqa_groups=case.k_heads, **options)

    return lambda q, k, v: attend(q, k, v).view(*q.shape[:3], -1)  # (B, T, H·D)


def _xformers(lib: Any, case: AttentionCase, inputs: AttentionInputs) -> Attend:
    attend, bias = lib.memory_efficient_attention, lib.LowerTriangularMask() if case.causal else None
    return lambda q, k, v: attend(q, k, v, attn_bias=bias)


def _flashinfer(lib: Any, case: AttentionCase, inputs: AttentionInputs) -> Attend:
    """Plan once, as a model does for all its layers, and build the call."""
    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=inputs.q.device)  # as its documentation has it
    dtypes = {"q_data_type": case.torch_dtype, "kv_data_type": case.torch_dtype}
    heads = case.q_heads, case.k_heads, case.head_dim
    if case.form == "cache":
        wrapper = lib.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=case.group >= 4)
        wrapper.plan(*_pages_in_order(case, inputs), *heads, _PAGE, **dtypes)
    else:
        starts = inputs.cu_seqlens
        if starts is None:
            starts = torch.arange(case.batch + 1, dtype=torch.int32, device=inputs.q.device) * case.tokens
        wrapper = lib.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        before = {} if case.window is None else {"window_left": case.window - 1}
        wrapper.plan(starts, starts, *heads, causal=case.causal, **before, **dtypes)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if case.form == "cache":
            keys, values = (x.unflatten(1, (-1, _PAGE)).flatten(0, 1) for x in (k, v))
            return wrapper.run(q[:, 0], (keys, values))[:, None]
        out: Tensor = wrapper.run(*(x.flatten(0, -3) for x in (q, k, v)))
        return out.view(q.shape)

    return call


def _pages_in_order(case: AttentionCase, inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return where each row's pages begin, their numbers, and the tokens of each row's last one."""
    lengths, device, pages_of_row = inputs.key_lengths, inputs.q.device, case.tokens // _PAGE
    assert lengths is not None
    counts, page_idx = (lengths + _PAGE - 1) // _PAGE, torch.arange(pages_of_row, device=device)
    pages = torch.arange(case.batch, device=device)[:, None] * pages_of_row + page_idx
    indices, last_lengths = pages[page_idx < counts[:, None]].int(), (lengths - (counts - 1) * _PAGE).int()
    return F.pad(counts.cumsum(0), (1, 0)).int(), indices, last_lengths


def _cudnn_graph(lib: Any, case: AttentionCase, inputs: AttentionInputs) -> Attend:
    return CudnnGraphs(lib, case, inputs, _PAGE).attend


def _cudnn_float8(lib: Any, case: AttentionCase, inputs: AttentionInputs) -> Attend:
    """Build a product of e4m3 numbers, with all that turns 16-bit tensors into them and back."""
    graph, float8 = Float8Graph(lib, case, inputs), torch.float8_e4m3fn
    largest = torch.finfo(float8).max

    def quantise(*x: Tensor) -> tuple[Tensor, ...]:
        scaled = (one.float() * scale for one, scale in zip(x, graph.scales, strict=True))
        return tuple(one.clamp(-largest, largest).to(float8) for one in scaled)

    first: Callable[..., tuple[Tensor, ...]] = compile_whole(quantise)
    last: Callable[..., Tensor] = compile_whole(lambda out: (out.float() * graph.out_unit).to(case.torch_dtype))
    return lambda q, k, v: last(graph.attend(*first(q, k, v)))


def _sage(lib: Any, case: AttentionCase, inputs: AttentionInputs) -> Attend:
    """Build SageAttention's call, with its own quantisation.

    Version 1 takes the mean of keys off in place: here that is done before, by the same operations.
    """
    attend = import_module(lib.__name__.partition(".")[0]).sageattn
    options = {"tensor_layout": "NHD", "is_causal": case.causal}
    if lib.__name__ == "sageattention_1":
        return lambda q, k, v: attend(q, k - k.mean(1, keepdim=True), v, smooth_k=False, **options)
    return lambda q, k, v: attend(q, k, v, **options)


def _huggingface(lib: Any, case: AttentionCase, inputs: AttentionInputs) -> Attend:
    """Build the call of attn_implementation="eager"; its mask is added to the scores."""
    module = SimpleNamespace(num_key_value_groups=case.group, training=False)
    scale, attend, attended, mask = case.head_dim**-0.5, lib.eager_attention_forward, _attended(case, inputs), None
    if case.causal and case.form != "cache":
        attended = torch.ones(case.tokens, case.tokens, dtype=torch.bool, device=inputs.q.device).tril()[None, None]
        attended = attended if case.window is None else attended.triu(1 - case.window)
    if attended is not None:
        mask = torch.zeros(attended.shape, dtype=case.torch_dtype, device=attended.device)
        mask = mask.masked_fill(~attended, torch.finfo(case.torch_dtype).min)

    return lambda q, k, v: attend(module, *(x.transpose(1, 2) for x in (q, k, v)), mask, scaling=scale)[0]


def _eager(lib: Any, case: AttentionCase, inputs: AttentionInputs) -> Attend:
    """Build ReRoPE as models' own code has it: two whole matrices of scores, one of them for far pairs."""
    window, scale = case.far_window, case.head_dim**-0.5
    assert window is not None
    positions = torch.arange(case.tokens, device=inputs.q.device)
    distance = positions[:, None] - positions
    is_near, is_ahead = distance < window, distance < 0
    cos, sin = inputs.cos[:, None], inputs.sin[:, None]  # over heads

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat_interleave(case.group, 2), v.repeat_interleave(case.group, 2)
        near_q, near_k = rotate_plainly(q, cos, sin, False), rotate_plainly(k, cos, sin, False)
        far_q = rotate_plainly(q, cos[window], sin[window], False)
        near_q, far_q, near_k, k, v = (x.transpose(1, 2) for x in (near_q, far_q, near_k, k, v))
        scores = torch.where(is_near, near_q @ near_k.mT, far_q @ k.mT) * scale
        scores = scores.masked_fill(is_ahead, -math.inf)
        probabilities = F.softmax(scores, -1, dtype=torch.float32).to(v.dtype)
        return (probabilities @ v).transpose(1, 2)

    return call


def _limits(case: AttentionCase, backward: bool = False) -> dict[str, Any]:
    gib, padded, windowed = f"{case.score_gib:.0f} GiB", case.padded, case.window is not None
    dense, caches, dims = case.form == "dense", case.form == "cache", {case.head_dim, case.out_head_dim}
    far = case.far_window is not None and case.causal and not padded and dense
    return {
        "dense": not dense and "dense tensors alone",
        "unpacked": case.form == "packed" and "packed sequences are not dense tensors",
        "whole": (not dense or padded) and "dense tensors without lengths alone",
        "plain": (not dense or padded or windowed) and "dense tensors without lengths or a window alone",
        "forward": backward and "no backward",
        "default": not caches and "caches alone: elsewhere it takes one of the others",
        "paged": caches and case.tokens % _PAGE and f"a cache that is cut into pages of {_PAGE} tokens",
        "unpadded": padded and "no key lengths for dense tensors",
        "windowless": windowed and "no window",
        "masked": windowed and "a window is a mask of its own to it",
        "dtype": case.dtype not in ("float16", "bfloat16") and "float16 and bfloat16 alone",
        "square": len(dims) > 1 and "one head dim for keys and values",
        "dims": dims not in ({64}, {128}, {256}) and "one head dim for keys and values, of 64, 128 and 256",
        "narrow": case.head_dim > 128 and "head dims up to 128 alone",
        "grouped": case.group > 1 and "heads that share keys are supported forward alone",
        "slow": case.score_gib > SLOW_GIB and f"its whole matrices take {gib}, of {SLOW_GIB} that it may take",
        "fits": case.score_gib > MOST_GIB and f"its whole matrices do not fit: {gib}, of {MOST_GIB} that it may take",
        "rerope": not far and "ReRoPE of dense causal tensors alone",
    }


_8_BIT = "forward whole dtype square narrow windowless"
_FLASH_2, _LLAMA = "flash_attn.flash_attn_interface", "transformers.models.llama.modeling_llama"
_flash_4 = partial(_flash, "flash_attn_varlen_func", "seqused_k")
_flash_2 = partial(_flash, "flash_attn_with_kvcache", "cache_seqlens")
ATTENTION_PEERS = peers_of(
    _limits,
    ("flex", "torch.nn.attention.flex_attention", "torch", True, "", _flex),
    ("cudnn", "torch", "torch", True, "masked unpacked", partial(_sdpa, "cudnn")),
    ("cudnn_frontend", "cudnn", "nvidia-cudnn-frontend", True, "paged dtype", _cudnn_graph),
    ("flash_attn_4", "flash_attn.cute", "flash-attn-4", True, "unpadded dtype", _flash_4),
    ("flash_attn_3", "flash_attn_interface", "flash_attn_3", True, "unpadded dtype", _flash_2),
    ("flash_attn_2", _FLASH_2, "flash-attn", True, "square unpadded dtype", _flash_2),
    ("transformer_engine", "transformer_engine.pytorch", "transformer-engine", True, "whole dtype", _te),
    ("xformers", "xformers.ops", "xformers", True, "plain grouped square", _xformers),
    ("flashinfer", "flashinfer", "flashinfer-python", True, "forward dims paged dtype unpadded", _flashinfer),
    ("huggingface", _LLAMA, "transformers", False, "unpacked slow", _huggingface),
    ("sdpa_flash", "torch", "torch", False, "dense square windowless unpadded", partial(_sdpa, "sdpa_flash")),
    ("sdpa_default", "torch", "torch", False, "default", partial(_sdpa, "sdpa_default")),
    # Both versions of SageAttention have one module: the older one is looked for under a name of its own.
    ("sageattention_2", "sageattention.sm90_compile", "sageattention", True, _8_BIT, _sage, "8-bit"),
    ("sageattention_1", "sageattention_1", "sageattention_1", True, _8_BIT, _sage, "8-bit"),
    ("cudnn_fp8", "cudnn", "nvidia-cudnn-frontend", True, _8_BIT, _cudnn_float8, "8-bit"),
    ("eager", "torch", "torch", False, "rerope fits", _eager, "rerope"),
)
