"""Adapters of other packages' attentions, called by their own documentation.

Each has the reason why a case is not supported. Tensors are as `AttentionInputs` has them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ropewalk.bench.attention.cases import AttentionCase, AttentionInputs
from ropewalk.bench.attention.gate import Attend

EAGER_BYTES = 16 << 30  # of whole matrices of scores: past it, hundreds of milliseconds a call would say nothing new
_PAGE = 16  # tokens
_WORKSPACE = 128 << 20  # bytes, as FlashInfer's documentation has it


def half_why_not(case: AttentionCase) -> str | None:
    """Refuse dtypes other than float16 and bfloat16."""
    return None if case.dtype in ("float16", "bfloat16") else "float16 and bfloat16 alone"


def score_bytes(case: AttentionCase) -> int:
    """Count the peak of whole matrices, in the backward: two in float32, and one in the dtype."""
    queries = 1 if case.form == "cache" else case.tokens
    return case.batch * case.q_heads * queries * case.tokens * (2 * 4 + case.torch_dtype.itemsize)


# FlashAttention 2, 3 and 4: the same arguments


def flash_why_not(case: AttentionCase) -> str | None:
    """Refuse cases that FlashAttention 3 and 4 do not support."""
    if case.padded:
        return "no key lengths for dense tensors"
    return half_why_not(case)


def flash_2_why_not(case: AttentionCase) -> str | None:
    """Refuse cases that FlashAttention 2 does not support."""
    if case.out_head_dim != case.head_dim:
        return "one head dim for keys and values"
    return flash_why_not(case)


def build_flash_2(case: AttentionCase, inputs: AttentionInputs) -> Attend:
    """Build the call of the package flash-attn."""
    from flash_attn import flash_attn_interface

    return _build_flash(flash_attn_interface, case, inputs)


def build_flash_3(case: AttentionCase, inputs: AttentionInputs) -> Attend:
    """Build the call of the package in flash-attention's folder hopper."""
    return _build_flash(importlib.import_module("flash_attn_interface"), case, inputs)


def build_flash_4(case: AttentionCase, inputs: AttentionInputs) -> Attend:
    """Build the call of flash-attn-4, which takes a cache's lengths in its call for packed sequences."""
    from flash_attn import cute

    if case.form != "cache":
        return _build_flash(cute, case, inputs)
    return _first_result(cute.flash_attn_varlen_func, {"causal": True, "seqused_k": inputs.key_lengths})


def _build_flash(module: Any, case: AttentionCase, inputs: AttentionInputs) -> Attend:
    if case.form == "cache":
        return _first_result(module.flash_attn_with_kvcache, {"causal": True, "cache_seqlens": inputs.key_lengths})
    if case.form == "dense":
        return _first_result(module.flash_attn_func, {"causal": case.causal, **_window(case)})
    starts, longest = inputs.cu_seqlens, case.tokens
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return _first_result(module.flash_attn_varlen_func, {"causal": case.causal, **lengths})


def _window(case: AttentionCase) -> dict[str, Any]:
    """Return the keys to the left and to the right of a query's own, where there is a window."""
    return {} if case.window is None else {"window_size": (case.window - 1, 0)}


def _first_result(attend: Callable[..., Any], keywords: dict[str, Any]) -> Attend:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = attend(q, k, v, **keywords)
        return result[0] if isinstance(result, tuple) else result  # some versions add the log-sum-exp

    return call


# transformers


def huggingface_why_not(case: AttentionCase) -> str | None:
    """Refuse cases that the attention of attn_implementation="eager" does not support."""
    if case.form == "packed":
        return "packed sequences are not dense tensors"
    if score_bytes(case) > EAGER_BYTES:
        return f"its whole matrices take {score_bytes(case) / 2**30:.0f} GiB, of {EAGER_BYTES >> 30} that it may take"
    return None


def build_huggingface(case: AttentionCase, inputs: AttentionInputs) -> Attend:
    """Build Llama's call; its mask is added to the scores."""
    from transformers.models.llama.modeling_llama import eager_attention_forward

    module = SimpleNamespace(num_key_value_groups=case.group, training=False)
    device, attended = inputs.q.device, None
    if case.causal and case.form != "cache":
        attended = torch.ones(case.tokens, case.tokens, dtype=torch.bool, device=device).tril()
        if case.window is not None:
            attended = attended.triu(1 - case.window)
        attended = attended[None, None]
    elif inputs.key_lengths is not None:
        index = torch.arange(case.tokens, device=device)
        attended = (index < inputs.key_lengths[:, None])[:, None, None]
    mask = None
    if attended is not None:
        least = torch.finfo(case.torch_dtype).min
        mask = torch.zeros(attended.shape, dtype=case.torch_dtype, device=device).masked_fill(~attended, least)
    scale = case.head_dim**-0.5

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return eager_attention_forward(module, q, k, v, mask, scaling=scale)[0]

    return call


# xFormers


def xformers_why_not(case: AttentionCase) -> str | None:
    """Refuse cases that memory_efficient_attention does not support."""
    if case.form != "dense" or case.padded or case.window is not None:
        return "dense tensors without lengths or a window alone"
    if case.group > 1:
        return "heads that share keys are supported forward alone"
    return "one head dim for keys and values" if case.out_head_dim != case.head_dim else None


def build_xformers(case: AttentionCase, inputs: AttentionInputs) -> Attend:
    """Build the call that lets xFormers choose its kernels."""
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    bias = LowerTriangularMask() if case.causal else None

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return memory_efficient_attention(q, k, v, attn_bias=bias)

    return call


# Transformer Engine


def te_why_not(case: AttentionCase) -> str | None:
    """Refuse cases that DotProductAttention does not support."""
    if case.form != "dense" or case.padded:
        return "dense tensors without lengths alone"
    return half_why_not(case)


def build_te(case: AttentionCase, inputs: AttentionInputs) -> Attend:
    """Build the call that lets Transformer Engine choose its backend."""
    from transformer_engine.pytorch import DotProductAttention

    attend = DotProductAttention(
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


# FlashInfer


def flashinfer_why_not(case: AttentionCase) -> str | None:
    """Refuse cases that FlashInfer's decoding from a paged cache does not support."""
    if case.form != "cache":
        return "caches alone: it has no backward"
    if case.out_head_dim != case.head_dim or case.head_dim not in (64, 128, 256):
        return "one head dim for keys and values, of 64, 128 and 256"
    if case.tokens % _PAGE:
        return f"a cache that is cut into pages of {_PAGE} tokens"
    return half_why_not(case)


def build_flashinfer(case: AttentionCase, inputs: AttentionInputs) -> Attend:
    """Plan once, as a model does for all its layers, and build the call; each row's pages are in their order."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    lengths = inputs.key_lengths
    assert lengths is not None
    device = inputs.q.device
    counts = (lengths + _PAGE - 1) // _PAGE
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()
    page_idx = torch.arange(case.tokens // _PAGE, device=device)
    pages = torch.arange(case.batch, device=device)[:, None] * (case.tokens // _PAGE) + page_idx
    indices = pages[page_idx < counts[:, None]].int()
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=case.group >= 4)
    wrapper.plan(
        starts,
        indices,
        (lengths - (counts - 1) * _PAGE).int(),
        case.q_heads,
        case.k_heads,
        case.head_dim,
        _PAGE,
        q_data_type=case.torch_dtype,
        kv_data_type=case.torch_dtype,
    )

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (x.unflatten(1, (-1, _PAGE)).flatten(0, 1) for x in (k, v))
        out: Tensor = wrapper.run(q[:, 0], (keys, values))
        return out[:, None]

    return call
