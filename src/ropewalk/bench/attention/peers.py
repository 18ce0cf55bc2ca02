"""Other attentions, found by import: PyTorch's are here, other packages' in `libraries`.

All take and return tensors as `AttentionInputs` has them, as views of the same memory. A model makes masks
and tables once for all layers: they are made outside the timed call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ropewalk.bench.attention.cases import AttentionCase, AttentionInputs
from ropewalk.bench.attention.gate import Attend
from ropewalk.bench.attention.libraries import (
    build_flash_2,
    build_flash_3,
    build_flash_4,
    build_flashinfer,
    build_huggingface,
    build_te,
    build_xformers,
    flash_2_why_not,
    flash_why_not,
    flashinfer_why_not,
    huggingface_why_not,
    score_bytes,
    te_why_not,
    xformers_why_not,
)
from ropewalk.bench.core.peers import Library
from ropewalk.bench.rope.gate import rotate_plainly

# The rotation of q and k, both as `AttentionInputs` has them.
Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
MOST_BYTES = 64 << 30  # of whole matrices of scores that an implementation may hold
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa_flash": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True)
class AttentionPeer(Library):
    """One other implementation of attention; it supports no positions, or ReRoPE alone."""

    why_not: Callable[[AttentionCase], str | None]
    build: Callable[[AttentionCase, AttentionInputs], Attend]
    rerope: bool = False  # whether it supports ReRoPE


def compile_rope(case: AttentionCase, inputs: AttentionInputs) -> Rotate:
    """Compile PyTorch's RoPE, half-split, with the tables made before. A cache's keys are rotated already."""
    cos, sin = inputs.cos[..., None, :], inputs.sin[..., None, :]  # over heads
    cached = case.form == "cache"

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotate_plainly(q, cos, sin, False), k if cached else rotate_plainly(k, cos, sin, False)

    return torch.compile(rotate, fullgraph=True, dynamic=False)


def _cudnn_why_not(case: AttentionCase) -> str | None:
    if case.window is not None:
        return "a window is a mask of its own to it"
    return "packed sequences are not dense tensors" if case.form == "packed" else None


def _dense_why_not(case: AttentionCase) -> str | None:
    if case.form != "dense":
        return "dense tensors alone"
    if case.out_head_dim != case.head_dim:
        return "one head dim for keys and values"
    if case.window is not None:
        return "no window"
    return "no key lengths for dense tensors" if case.padded else None


def _default_why_not(case: AttentionCase) -> str | None:
    return None if case.form == "cache" else "caches alone: elsewhere it takes one of the others"


def _eager_why_not(case: AttentionCase) -> str | None:
    if case.far_window is None or not case.causal or case.padded or case.form != "dense":
        return "ReRoPE of dense causal tensors alone"
    needed = score_bytes(case)
    if needed > MOST_BYTES:
        return f"its whole matrices do not fit: {needed / 2**30:.0f} GiB, of {MOST_BYTES >> 30} that it may take"
    return None


def _build_flex(case: AttentionCase, inputs: AttentionInputs) -> Attend:
    """Compile FlexAttention with a case's own block mask; past Dynamo's limit it would run eagerly."""
    import torch._functorch.config
    from torch.nn.attention.flex_attention import flex_attention

    # A backward that is timed runs many times over one graph, so it must not give its buffers away.
    torch._functorch.config.donated_buffer = False
    mask = _block_mask(case, inputs)
    compiled: Callable[..., Any] = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    grouped = case.group > 1

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x[None] if x.ndim == 3 else x for x in (q, k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = compiled(q, k, v, block_mask=mask, enable_gqa=grouped)
        out = out.transpose(1, 2)
        return out if case.form != "packed" else out[0]

    return call


def _block_mask(case: AttentionCase, inputs: AttentionInputs) -> Any:
    """Make FlexAttention's block mask; None where every query attends all."""
    from torch.nn.attention.flex_attention import and_masks, create_block_mask

    device, lengths, attends = inputs.q.device, inputs.key_lengths, []
    queries, keys = inputs.q.shape[-3], inputs.k.shape[-3]
    if case.causal and case.form != "cache":
        attends.append(lambda b, h, query, key: query >= key)
    if case.window is not None:
        window = case.window
        attends.append(lambda b, h, query, key: query - key < window)
    if lengths is not None:
        attends.append(lambda b, h, query, key: key < lengths[b])
    if inputs.cu_seqlens is not None:
        sizes = inputs.cu_seqlens.diff()
        sequences = torch.arange(case.batch, device=device).repeat_interleave(sizes)
        attends.append(lambda b, h, query, key: sequences[query] == sequences[key])
    if not attends:
        return None
    attended = attends[0] if len(attends) == 1 else and_masks(*attends)
    return create_block_mask(attended, None if lengths is None else case.batch, None, queries, keys, device=device)


def _build_sdpa(name: str) -> Callable[[AttentionCase, AttentionInputs], Attend]:
    def build(case: AttentionCase, inputs: AttentionInputs) -> Attend:
        backend, grouped, mask = BACKENDS.get(name), case.group > 1, None  # no backend: PyTorch chooses
        causal = case.causal and case.form != "cache"
        if inputs.key_lengths is not None:
            index = torch.arange(case.tokens, device=inputs.q.device)
            mask = (index < inputs.key_lengths[:, None])[:, None, None]  # (B, 1, 1, T)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            with nullcontext() if backend is None else sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
            return out.transpose(1, 2)

        return call

    return build


def _build_eager(case: AttentionCase, inputs: AttentionInputs) -> Attend:
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


_LLAMA = "transformers.models.llama.modeling_llama"
_FLASH_2, _TE = "flash_attn.flash_attn_interface", "transformer_engine.pytorch"
ATTENTION_PEERS: dict[str, AttentionPeer] = {
    peer.name: peer
    for peer in (
        AttentionPeer("flex", "torch.nn.attention.flex_attention", "torch", True, lambda case: None, _build_flex),
        AttentionPeer("cudnn", "torch", "torch", True, _cudnn_why_not, _build_sdpa("cudnn")),
        AttentionPeer("flash_attn_4", "flash_attn.cute", "flash-attn-4", True, flash_why_not, build_flash_4),
        AttentionPeer("flash_attn_3", "flash_attn_interface", "flash_attn_3", True, flash_why_not, build_flash_3),
        AttentionPeer("flash_attn_2", _FLASH_2, "flash-attn", True, flash_2_why_not, build_flash_2),
        AttentionPeer("transformer_engine", _TE, "transformer-engine", True, te_why_not, build_te),
        AttentionPeer("xformers", "xformers.ops", "xformers", True, xformers_why_not, build_xformers),
        AttentionPeer("flashinfer", "flashinfer", "flashinfer-python", True, flashinfer_why_not, build_flashinfer),
        AttentionPeer("huggingface", _LLAMA, "transformers", False, huggingface_why_not, build_huggingface),
        AttentionPeer("sdpa_flash", "torch", "torch", False, _dense_why_not, _build_sdpa("sdpa_flash")),
        AttentionPeer("sdpa_default", "torch", "torch", False, _default_why_not, _build_sdpa("sdpa_default")),
        AttentionPeer("eager", "torch", "torch", False, _eager_why_not, _build_eager, rerope=True),
    )
}
