"""One launch that weighs the features of keys, in place: PyTorch's operator takes several times as long.

Shape letters: B batch, H heads, T tokens, D head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ropewalk.ops.attention.call import AttentionCall
from ropewalk.ops.attention.tables import map_features, with_dense_features
from ropewalk.ops.attention.triton.arguments import RowTarget
from ropewalk.ops.attention.triton.tiles import wide
from ropewalk.ops.launch.steps import Steps

_TILE = 4096  # features of a program: 8 KiB of 16-bit numbers


@triton.jit(do_not_specialize=("n_heads", "n_tokens"))
def weigh_kernel(
    x,  # RowTarget
    weights_ptr,  # (D,), float32
    n_heads,
    n_tokens,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Multiply some tokens of one head."""
    blocks = tl.cdiv(n_tokens, BLOCK_T)
    row = tl.program_id(0) // blocks
    token = tl.program_id(0) % blocks * BLOCK_T + tl.arange(0, BLOCK_T)
    feature = tl.arange(0, BLOCK_D)
    first = x.ptr + wide(row // n_heads) * x.stride_batch + wide(row % n_heads) * x.stride_head
    ptrs = first + wide(token)[:, None] * x.stride_token + feature[None, :]
    exists = (token < n_tokens)[:, None] & (feature < x.head_dim)[None, :]
    weights = tl.load(weights_ptr + feature, feature < x.head_dim, other=0.0)
    tl.store(ptrs, (tl.load(ptrs, exists, other=0.0) * weights[None, :]).to(x.ptr.dtype.element_ty), exists)


def map_and_weigh(call: AttentionCall, on: Steps) -> tuple[Tensor, Tensor]:
    """Return q and k as `map_features` does, with the features of k weighed."""
    q, k = map_features(call, on)
    tables = call.tables
    if tables.q is not None and tables.k is not None and tables.feature_weights is not None:
        k = with_dense_features(k)  # those of an input may lie in any order, and map_features keeps it
        weigh_features(k, tables.feature_weights, on)
    return q, k


def weigh_features(x: Tensor, weights: Tensor, on: Steps) -> None:
    """Multiply x (B, H, T, D), of dense features, by weights (D,)."""
    assert x.stride(3) == 1, "the features of x are not dense"
    batch, heads, tokens, head_dim = x.shape
    stride_batch, stride_head, stride_token, _ = x.stride()
    block_d = triton.next_power_of_2(head_dim)
    block_t = max(1, _TILE // block_d)
    if x.numel():
        on.launch(
            weigh_kernel,
            batch * heads * triton.cdiv(tokens, block_t),
            x=RowTarget(x, stride_batch, stride_head, stride_token, head_dim),
            weights_ptr=weights.contiguous(),
            n_heads=heads,
            n_tokens=tokens,
            BLOCK_T=block_t,
            BLOCK_D=block_d,
            num_warps=4,
        )
