"""Refusals that the libraries share: features that none of them is called for."""

from __future__ import annotations

import torch
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.attention.backend import Refusal, why_unread
from ropewalk.ops.attention.call import SCORE_SENTENCES, AttentionCall, rope_tables

HALF = (torch.float16, torch.bfloat16)

# Fields that every library reads.
READS = (
    *("q", "k", "v", "scheme", "causal", "window_left", "window_right", "positions_q", "positions_k", "scale"),
    *("keys_rotated", "tables", "deterministic", "needs_backward"),
)
# Reasons for others, which some libraries have a form of.
_SENTENCES = {
    "far": "a two-range encoding is not supported: no log-sum-exp to merge its ranges by",
    "cu_seqlens_q": "packed sequences (cu_seqlens_q) are not supported",
    "block_table": "paged keys (block_table) are not supported",
    "blocks": "lists of blocks (blocks) are not supported",
    "key_starts": "key_starts, which may leave rows without a key, are not supported",
    "query_starts": "query_starts, a key index of the first query per batch row, are not supported",
    **SCORE_SENTENCES,
    "dropout_p": "dropout (dropout_p) is not supported: its seed would mean another mask",
    "mask": "mask, which may leave rows without a key, is not supported",
    "key_lengths": "key_lengths, which may leave rows without a key, is not supported",
    "return_lse": "a differentiable log-sum-exp is not supported",
    "return_max_logits": "max logits (return_max_logits) are not supported",
}

# Fields that a mask of pairs can stand for.
MASKS = ("mask", "key_lengths", "key_starts", "query_starts")


def why_no_library(call: AttentionCall, reads: tuple[str, ...]) -> Refusal | None:
    """Say why a library that reads these fields does not run a call; None if it may."""
    if call.scheme is not None and call.scheme.has_score_mod():
        return Refusal("score_mod", f"the score mod of {type(call.scheme).__name__} is not supported")
    refusal = why_unread(call, reads, _SENTENCES)
    if refusal is not None:
        return refusal
    if call.q.numel() == 0 or call.k.numel() == 0:
        return Refusal("empty", "empty tensors are not supported")
    if not call.scale > 0:
        return Refusal("scale", f"scale is {call.scale}, but must be above 0")
    if torch.is_grad_enabled() and any(x.requires_grad for x in rope_tables(call)):
        return Refusal("learned_tables", "gradients of the scheme's tables are not supported")
    if call.q.device.type == "cuda" and call.deterministic and call.needs_backward:
        return Refusal("deterministic", "a deterministic backward is not supported")
    return None


def refuse_values(call: AttentionCall) -> Refusal:
    """Refuse a head dim of v that is not q's."""
    q, v = call.q, call.v
    return Refusal("v_head_dim", f"v's head dim is {v.shape[3]}, but must be q's, {q.shape[3]}")


def why_misaligned(call: AttentionCall) -> Refusal | None:
    """Say why kernels that read 16 bytes at a time cannot read the tensors; None if they can."""
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        steps = (stride % 8 == 0 for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1)
        placed = torch.compiler.is_compiling() or gpu.is_fake(x) or x.data_ptr() % 16 == 0
        if x.stride(3) != 1 or not placed or not all(steps):
            return Refusal("alignment", f"rows of {name} must begin at multiples of 16 bytes")
    return None


def refuse_dtype(kernels: str, x: Tensor) -> Refusal:
    """Refuse a dtype that is no half."""
    dtype = str(x.dtype).removeprefix("torch.")
    return Refusal("dtype", f"{dtype} is not supported: {kernels} needs float16 or bfloat16")
