"""Other attentions, found by import and called as their own documentation says.

All take and return (B, T, H, D) views of the same memory. What a user would make once for all layers (masks, tables)
is made outside the timed call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ropewalk.bench.attention_cases import AttentionCase, AttentionInputs
from ropewalk.bench.attention_gate import Attend
from ropewalk.bench.gate import rotate_plainly
from ropewalk.bench.peers import Library

# The rotation of q and k, both (B, T, H, D).
Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa_flash": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True)
class AttentionPeer(Library):
    """One other implementation of attention; it knows no positions."""

    why_not: Callable[[AttentionCase], str | None]
    build: Callable[[AttentionCase, AttentionInputs], Attend]


def compile_rope(inputs: AttentionInputs) -> Rotate:
    """RoPE as compiled PyTorch, half-split, with the tables made before."""
    cos, sin = inputs.cos[:, None], inputs.sin[:, None]  # over heads

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotate_plainly(q, cos, sin, False), rotate_plainly(k, cos, sin, False)

    return torch.compile(rotate, fullgraph=True, dynamic=False)


def _serves(case: AttentionCase) -> str | None:
    return None


def _dense_why_not(case: AttentionCase) -> str | None:
    return "no key lengths for dense tensors" if case.padded else None


def _flash_attn_4_why_not(case: AttentionCase) -> str | None:
    return _dense_why_not(case) or (None if case.dtype in ("float16", "bfloat16") else "float16 and bfloat16 alone")


def _build_flex(case: AttentionCase, inputs: AttentionInputs) -> Attend:
    """Compiled FlexAttention, with its block mask; every case has its own, past Dynamo's limit it would run eagerly."""
    import torch._functorch.config
    from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention

    # A backward that is timed runs many times over one graph, so it must not give its buffers away.
    torch._functorch.config.donated_buffer = False
    lengths, attends = inputs.key_lengths, []
    if case.causal:
        attends.append(lambda b, h, query, key: query >= key)
    if lengths is not None:
        attends.append(lambda b, h, query, key: key < lengths[b])
    mask = None
    if attends:
        attended = attends[0] if len(attends) == 1 else and_masks(*attends)
        batch = None if lengths is None else case.batch
        mask = create_block_mask(attended, batch, None, case.tokens, case.tokens, device=inputs.q.device)
    compiled: Callable[..., Any] = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    grouped = case.group > 1

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = compiled(q, k, v, block_mask=mask, enable_gqa=grouped)
        return out.transpose(1, 2)

    return call


def _build_sdpa(name: str) -> Callable[[AttentionCase, AttentionInputs], Attend]:
    def build(case: AttentionCase, inputs: AttentionInputs) -> Attend:
        backend, causal, grouped, mask = BACKENDS[name], case.causal, case.group > 1, None
        if inputs.key_lengths is not None:
            index = torch.arange(case.tokens, device=inputs.q.device)
            mask = (index < inputs.key_lengths[:, None])[:, None, None]  # (B, 1, 1, T)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
            return out.transpose(1, 2)

        return call

    return build


def _build_flash_attn_4(case: AttentionCase, inputs: AttentionInputs) -> Attend:
    from flash_attn.cute import flash_attn_func

    causal = case.causal

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = flash_attn_func(q, k, v, causal=causal)
        out: Tensor = result[0] if isinstance(result, tuple) else result  # some versions add the log-sum-exp
        return out

    return call


ATTENTION_PEERS: dict[str, AttentionPeer] = {
    peer.name: peer
    for peer in (
        AttentionPeer("flex", "torch.nn.attention.flex_attention", "torch", True, _serves, _build_flex),
        AttentionPeer("cudnn", "torch", "torch", True, _serves, _build_sdpa("cudnn")),
        AttentionPeer(
            "flash_attn_4", "flash_attn.cute", "flash-attn-4", True, _flash_attn_4_why_not, _build_flash_attn_4
        ),
        AttentionPeer("sdpa_flash", "torch", "torch", False, _dense_why_not, _build_sdpa("sdpa_flash")),
    )
}
