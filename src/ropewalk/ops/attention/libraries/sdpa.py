"""Attention by PyTorch's scaled_dot_product_attention after our rotation: cuDNN's kernels on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.attention.backend import LibraryBackend, Refusal
from ropewalk.ops.attention.call import NO_TABLES, AttentionCall, allowed, is_wide, zero_unattended
from ropewalk.ops.attention.libraries.common import (
    HALF,
    MASKS,
    READS,
    refuse_dtype,
    refuse_values,
    why_misaligned,
    why_no_library,
)
from ropewalk.ops.attention.tables import bind_map, map_features
from ropewalk.ops.tracing import is_plain_eager, is_transformed

MASK_BLOCK = 1 << 24  # pairs of one mask
MAX_ROTATED = 512  # features of a head that `apply_rope` takes


class Sdpa(LibraryBackend):
    """The backend "sdpa"."""

    name = "sdpa"
    reads: tuple[str, ...] = (*READS, *MASKS, "cu_seqlens_q", "cu_seqlens_k")  # on a CPU

    def why_not(self, call: AttentionCall) -> Refusal | None:
        """Say why PyTorch's kernels do not run a call; None if they do."""
        q, k, v = call.q, call.k, call.v
        is_cpu = q.device.type == "cpu"
        if call.has_window and not is_cpu:
            return Refusal("window", "window is not supported")
        refusal = why_no_library(call, _read_on_a_cpu(call) if is_cpu else READS)
        if refusal is not None:
            return refusal
        if call.tables.q is not None and q.shape[3] > MAX_ROTATED:
            return Refusal(
                "head_dim", f"head dim {q.shape[3]} is not supported: our rotation takes up to {MAX_ROTATED}"
            )
        if is_cpu and call.cu_seqlens_q is not None and not _sequences(call):
            return Refusal("empty", "packed sequences without a query and a key are not supported")
        if is_cpu:
            return None
        if call.causal and q.shape[2] != k.shape[2]:
            return Refusal("causal_lengths", "causal attention is aligned at the top left")
        if v.shape[3] != q.shape[3]:
            return refuse_values(call)
        if not gpu.is_nvidia(q.device) or is_wide(call):
            return None
        if not may_use_cudnn():
            return Refusal("cudnn", "cuDNN's attention is missing or switched off")
        if gpu.capability(q.device) < (8, 0):
            return Refusal("capability", "cuDNN's attention needs compute capability 8.0")
        if q.dtype not in HALF:
            return refuse_dtype("cuDNN's attention", q)
        if q.shape[3] % 8 or q.shape[3] > 128:
            return Refusal(
                "head_dim", f"head dim {q.shape[3]} is not supported: cuDNN's needs a multiple of 8 up to 128"
            )
        if k.shape[2] == 1:
            return Refusal("one_key", "cuDNN's attention needs more than one key")
        if max(q.shape[:2]) > 65535:
            return Refusal("grid", "cuDNN's attention takes up to 65535 batch rows and heads")
        return why_misaligned(call)

    def attend(self, call: AttentionCall) -> tuple[Tensor, None]:
        """Attend by cuDNN on NVIDIA GPUs, by whatever PyTorch chooses elsewhere and for more than 256 features."""
        q, k = map_features(call)
        v = call.v
        if call.cu_seqlens_q is not None:
            return _attend_packed(q, k, call), None
        if _needs_mask(call):
            return _attend_masked(q, k, call), None
        if gpu.is_nvidia(q.device) and not is_wide(call):
            # The operator itself: choosing a backend through torch.nn.attention.sdpa_kernel costs the host more.
            out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, call.needs_backward, 0.0, call.causal, False, scale=call.scale
            )[0]
            return out, None
        grouped = bool(q.shape[1] != k.shape[1])
        out = F.scaled_dot_product_attention(q, k, v, is_causal=call.causal, scale=call.scale, enable_gqa=grouped)
        return out, None

    def bind(self, call: AttentionCall) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return the output as a function of q, k and v, which asks nothing again that `attend` asks in each call."""
        if not gpu.is_nvidia(call.q.device) or is_wide(call):
            return super().bind(call)
        needs_backward, causal, scale = call.needs_backward, call.causal, call.scale

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # The same operator by PyTorch's own binding, which costs the host less; torch.compile cannot trace it.
            out: Tensor = torch._scaled_dot_product_cudnn_attention(
                q, k, v, None, needs_backward, 0.0, causal, False, scale=scale
            )[0]
            return out

        if call.tables.q is None:
            return attend
        map_qk = bind_map(call)

        def map_and_attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = map_qk(q, k)
            return attend(q, k, v)

        return map_and_attend


def _read_on_a_cpu(call: AttentionCall) -> tuple[str, ...]:
    """Return the fields that are read on a CPU; a GPU reads fewer.

    Where sequences end is a value, which a traced call cannot read.
    """
    bounds = (call.cu_seqlens_q, call.cu_seqlens_k)
    may_read = call.cu_seqlens_q is None or (is_plain_eager(call.q, *bounds) and not is_transformed())
    return Sdpa.reads if may_read else (*READS, *MASKS)


def _needs_mask(call: AttentionCall) -> bool:
    """Say whether some pairs are not attended, other than by causality between as many queries as keys."""
    masks = (call.mask, call.key_lengths, call.key_starts, call.query_starts)
    return call.has_window or any(x is not None for x in masks) or (call.causal and call.q.shape[2] != call.k.shape[2])


def _attend_packed(q: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
    """Attend within each sequence of a packed batch on a CPU; a token without keys gives 0."""
    outs, done = [], 0
    for queries, keys in _sequences(call):
        if queries.start > done:  # those of sequences without a key
            outs.append(_zeros(q, call.v, queries.start - done))
        one = call._replace(
            q=q[:, :, queries],
            k=k[:, :, keys],
            v=call.v[:, :, keys],
            cu_seqlens_q=None,
            cu_seqlens_k=None,
            tables=NO_TABLES,
        )
        outs.append(Sdpa().attend(one)[0])
        done = queries.stop
    if done < q.shape[2]:
        outs.append(_zeros(q, call.v, q.shape[2] - done))
    return torch.cat(outs, dim=2)


def _sequences(call: AttentionCall) -> list[tuple[slice, slice]]:
    """Return the queries and the keys of each sequence that has both."""
    assert call.cu_seqlens_q is not None
    assert call.cu_seqlens_k is not None
    spans_q, spans_k = (
        [slice(*pair) for pair in pairwise(bounds.tolist())] for bounds in (call.cu_seqlens_q, call.cu_seqlens_k)
    )
    pairs = zip(spans_q, spans_k, strict=True)
    return [(queries, keys) for queries, keys in pairs if queries.start < queries.stop and keys.start < keys.stop]


def _zeros(q: Tensor, v: Tensor, tokens: int) -> Tensor:
    return q.new_zeros(*q.shape[:2], tokens, v.shape[3])


def _attend_masked(q: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
    """Attend by masks, in blocks of queries: no mask (Tq, Tk) is ever whole. q and k have their features mapped."""
    v, queries = call.v, q.shape[2]
    if torch.compiler.is_compiling():  # a compiled program is not to depend on lengths
        return _attend_block(q, k, v, slice(None), call)
    rows = max(1, MASK_BLOCK // (q.shape[0] * k.shape[2]))
    if queries <= rows:
        return _attend_block(q, k, v, slice(None), call)
    blocks = [slice(start, start + rows) for start in range(0, queries, rows)]
    return torch.cat([_attend_block(q[:, :, block], k, v, block, call) for block in blocks], dim=2)


def _attend_block(q: Tensor, k: Tensor, v: Tensor, block: slice, call: AttentionCall) -> Tensor:
    """Attend from a block of queries."""
    grouped, may = bool(q.shape[1] != k.shape[1]), allowed(block, call)
    if may is None:
        return F.scaled_dot_product_attention(q, k, v, scale=call.scale, enable_gqa=grouped)
    # A row that attends nothing attends all keys, as zeros, and its output is dropped: no NaN, and no gradient.
    attends_nothing = ~may.any(dim=-1, keepdim=True)
    k, v = zero_unattended(may, k, v)
    q, may = q.masked_fill(attends_nothing, 0), may | attends_nothing
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=may, scale=call.scale, enable_gqa=grouped)
    return out.masked_fill(attends_nothing, 0)


@gpu.assume_constant
def may_use_cudnn() -> bool:
    """Say whether cuDNN's attention is there, and not switched off; torch.compile calls it once, while it traces."""
    return bool(torch.backends.cudnn.is_available() and torch.backends.cuda.cudnn_sdp_enabled())
