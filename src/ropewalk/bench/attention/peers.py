"""Other attentions, found by import and called by their own documentation.

All take and return tensors as `AttentionInputs` has them, as views of the same memory. A model makes masks
and tables once for all layers: they are made outside the timed call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ropewalk.bench.attention.cases import AttentionCase, AttentionInputs
from ropewalk.bench.attention.gate import Attend
from ropewalk.bench.rope.gate import rotate_plainly
from ropewalk.bench.rope.peers import Peers, compile_whole, keep_buffers

# GiB of whole matrices of scores: past the first, hundreds of milliseconds a call would say nothing new.
SLOW_GIB, MOST_GIB = 16, 64
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa_flash": SDPBackend.FLASH_ATTENTION}
_PAGE = 16  # tokens
_WORKSPACE = 128 << 20  # bytes, as FlashInfer's documentation has it

ATTENTION_PEERS = Peers(
    dense=("dense tensors alone", lambda case: case.form != "dense"),
    unpacked=("packed sequences are not dense tensors", lambda case: case.form == "packed"),
    whole=("dense tensors without lengths alone", lambda case: case.form != "dense" or case.padded),
    plain=(
        "dense tensors without lengths or a window alone",
        lambda case: case.form != "dense" or case.padded or case.window is not None,
    ),
    caches=("caches alone: it has no backward", lambda case: case.form != "cache"),
    default=("caches alone: elsewhere it takes one of the others", lambda case: case.form != "cache"),
    paged=(f"a cache that is cut into pages of {_PAGE} tokens", lambda case: case.tokens % _PAGE),
    unpadded=("no key lengths for dense tensors", lambda case: case.padded),
    windowless=("no window", lambda case: case.window is not None),
    masked=("a window is a mask of its own to it", lambda case: case.window is not None),
    dtype=("float16 and bfloat16 alone", lambda case: case.dtype not in ("float16", "bfloat16")),
    square=("one head dim for keys and values", lambda case: case.out_head_dim != case.head_dim),
    dims=(
        "one head dim for keys and values, of 64, 128 and 256",
        lambda case: case.out_head_dim != case.head_dim or case.head_dim not in (64, 128, 256),
    ),
    grouped=("heads that share keys are supported forward alone", lambda case: case.group > 1),
    slow=(
        f"its whole matrices take {{0.score_gib:.0f}} GiB, of {SLOW_GIB} that it may take",
        lambda case: case.score_gib > SLOW_GIB,
    ),
    fits=(
        f"its whole matrices do not fit: {{0.score_gib:.0f}} GiB, of {MOST_GIB} that it may take",
        lambda case: case.score_gib > MOST_GIB,
    ),
    rerope=(
        "ReRoPE of dense causal tensors alone",
        lambda case: case.far_window is None or not case.causal or case.padded or case.form != "dense",
    ),
)


def compile_rope(case: AttentionCase, inputs: AttentionInputs) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Compile PyTorch's RoPE, half-split, with the tables made before. A cache's keys are rotated already."""
    cos, sin = inputs.cos[..., None, :], inputs.sin[..., None, :]  # over heads
    cached = case.form == "cache"

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotate_plainly(q, cos, sin, False), k if cached else rotate_plainly(k, cos, sin, False)

    return compile_whole(rotate)


@ATTENTION_PEERS.add("flex", "torch.nn.attention.flex_attention", "torch", True)
def _flex(lib: Any, case: AttentionCase, inputs: AttentionInputs) -> Attend:
    keep_buffers()
    mask, grouped, packed = _block_mask(lib, case, inputs), case.group > 1, case.form == "packed"
    compiled = compile_whole(lib.flex_attention)  # past Dynamo's limit it would run eagerly

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x[None] if x.ndim == 3 else x for x in (q, k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = compiled(q, k, v, block_mask=mask, enable_gqa=grouped)
        out = out.transpose(1, 2)
        return out[0] if packed else out

    return call


def _block_mask(lib: Any, case: AttentionCase, inputs: AttentionInputs) -> Any:
    """Make FlexAttention's block mask; None where every query attends all."""
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
    if not attends:
        return None
    attended = attends[0] if len(attends) == 1 else lib.and_masks(*attends)
    rows, sizes = None if lengths is None else case.batch, (inputs.q.shape[-3], inputs.k.shape[-3])
    return lib.create_block_mask(attended, rows, None, *sizes, device=device)


def _sdpa(name: str, lib: Any, case: AttentionCase, inputs: AttentionInputs) -> Attend:
    backend, grouped, mask = BACKENDS.get(name), case.group > 1, None  # no backend: PyTorch chooses
    causal = case.causal and case.form != "cache"
    if inputs.key_lengths is not None:
        mask = _attended(case, inputs.key_lengths)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with nullcontext() if backend is None else sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    return call


def _attended(case: AttentionCase, lengths: Tensor) -> Tensor:
    """Return whether a key is there, (B, 1, 1, T)."""
    return (torch.arange(case.tokens, device=lengths.device) < lengths[:, None])[:, None, None]


ATTENTION_PEERS.add("cudnn", "torch", "torch", True, limits="masked unpacked")(functools.partial(_sdpa, "cudnn"))


@ATTENTION_PEERS.add("flash_attn_4", "flash_attn.cute", "flash-attn-4", True, limits="unpadded dtype")
def _flash_4(lib: Any, case: AttentionCase, inputs: AttentionInputs) -> Attend:
    """Build its call, which takes a cache's lengths in the one for packed sequences."""
    if case.form == "cache":
        return _first_result(lib.flash_attn_varlen_func, causal=True, seqused_k=inputs.key_lengths)
    return _flash(lib, case, inputs)


@ATTENTION_PEERS.add(
    "flash_attn_2", "flash_attn.flash_attn_interface", "flash-attn", True, limits="square unpadded dtype"
)
@ATTENTION_PEERS.add("flash_attn_3", "flash_attn_interface", "flash_attn_3", True, limits="unpadded dtype")
def _flash(lib: Any, case: AttentionCase, inputs: AttentionInputs) -> Attend:
    if case.form == "cache":
        return _first_result(lib.flash_attn_with_kvcache, causal=True, cache_seqlens=inputs.key_lengths)
    if case.form == "dense":
        return _first_result(lib.flash_attn_func, causal=case.causal, **_window(case))
    starts, longest = inputs.cu_seqlens, case.tokens
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return _first_result(lib.flash_attn_varlen_func, causal=case.causal, **lengths)


def _window(case: AttentionCase) -> dict[str, Any]:
    """Return the keys to the left and to the right of a query's own, where there is a window."""
    return {} if case.window is None else {"window_size": (case.window - 1, 0)}


def _first_result(attend: Callable[..., Any], **keywords: Any) -> Attend:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = attend(q, k, v, **keywords)
        return result[0] if isinstance(result, tuple) else result  # some versions add the log-sum-exp

    return call


@ATTENTION_PEERS.add(
    "transformer_engine", "transformer_engine.pytorch", "transformer-engine", True, limits="whole dtype"
)
def _te(lib: Any, case: AttentionCase, inputs: AttentionInputs) -> Attend:
    attend = lib.DotProductAttention(
        case.q_heads,
        case.head_dim if case.v_head_dim is None else (case.head_dim, case.v_head_dim),
        num_gqa_groups=case.k_heads,
        qkv_format="bshd",
        attn_mask_type="causal" if case.causal else "no_mask",
        **_window(case),
    )

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flat: Tensor = attend(q, k, v)  # (B, T, H·D)
        return flat.view(*flat.shape[:-1], case.q_heads, -1)

    return call


@ATTENTION_PEERS.add("xformers", "xformers.ops", "xformers", True, limits="plain grouped square")
def _xformers(lib: Any, case: AttentionCase, inputs: AttentionInputs) -> Attend:
    attend, bias = lib.memory_efficient_attention, lib.LowerTriangularMask() if case.causal else None
    return lambda q, k, v: attend(q, k, v, attn_bias=bias)


@ATTENTION_PEERS.add("flashinfer", "flashinfer", "flashinfer-python", True, limits="caches dims paged dtype")
def _flashinfer(lib: Any, case: AttentionCase, inputs: AttentionInputs) -> Attend:
    """Plan once, as a model does for all its layers, and build the call; each row's pages are in their order."""
    lengths, device, pages_of_row = inputs.key_lengths, inputs.q.device, case.tokens // _PAGE
    assert lengths is not None
    counts = (lengths + _PAGE - 1) // _PAGE
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()
    page_idx = torch.arange(pages_of_row, device=device)
    pages = torch.arange(case.batch, device=device)[:, None] * pages_of_row + page_idx
    indices, last_lengths = pages[page_idx < counts[:, None]].int(), (lengths - (counts - 1) * _PAGE).int()
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)
    wrapper = lib.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=case.group >= 4)
    sizes = case.q_heads, case.k_heads, case.head_dim, _PAGE
    dtypes = {"q_data_type": case.torch_dtype, "kv_data_type": case.torch_dtype}
    wrapper.plan(starts, indices, last_lengths, *sizes, **dtypes)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (x.unflatten(1, (-1, _PAGE)).flatten(0, 1) for x in (k, v))
        out: Tensor = wrapper.run(q[:, 0], (keys, values))
        return out[:, None]

    return call


_LLAMA = "transformers.models.llama.modeling_llama"


@ATTENTION_PEERS.add("huggingface", _LLAMA, "transformers", False, limits="unpacked slow")
def _huggingface(lib: Any, case: AttentionCase, inputs: AttentionInputs) -> Attend:
    """Build the call of attn_implementation="eager"; its mask is added to the scores."""
    module = SimpleNamespace(num_key_value_groups=case.group, training=False)
    device, attended, mask = inputs.q.device, None, None
    if case.causal and case.form != "cache":
        attended = torch.ones(case.tokens, case.tokens, dtype=torch.bool, device=device).tril()[None, None]
        attended = attended if case.window is None else attended.triu(1 - case.window)
    elif inputs.key_lengths is not None:
        attended = _attended(case, inputs.key_lengths)
    if attended is not None:
        least = torch.finfo(case.torch_dtype).min
        mask = torch.zeros(attended.shape, dtype=case.torch_dtype, device=device).masked_fill(~attended, least)
    scale, attend = case.head_dim**-0.5, lib.eager_attention_forward

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attend(module, q, k, v, mask, scaling=scale)[0]

    return call


for _name, _limits in (("sdpa_flash", "dense square windowless unpadded"), ("sdpa_default", "default")):
    ATTENTION_PEERS.add(_name, "torch", "torch", False, limits=_limits)(functools.partial(_sdpa, _name))


@ATTENTION_PEERS.add("eager", "torch", "torch", False, limits="rerope fits", rerope=True)
def _eager(lib: Any, case: AttentionCase, inputs: AttentionInputs) -> Attend:
    """Build ReRoPE as models' own code has it: two whole matrices of scores, one of them for far pairs."""
    window = case.far_window
    assert window is not None
    positions = torch.arange(case.tokens, device=inputs.q.device)
    distance = positions[:, None] - positions
    is_near, is_ahead = distance < window, distance < 0
    cos, sin = inputs.cos[:, None], inputs.sin[:, None]  # over heads
    scale = case.head_dim**-0.5

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
