"""The launches of RMS norm and rotation: one forward; one backward, and a sum of the weights' gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.launch.kernel import WIDEST_ACCESS, Kernel, compute_dtype, division_by
from ropewalk.ops.launch.steps import Steps
from ropewalk.ops.rope.arguments import (
    Tiles,
    are_dense,
    are_near,
    contiguous,
    copy_to,
    head_args,
    pair_args,
    position_args,
    table_args,
    with_dense_tables,
)
from ropewalk.ops.rope.norm import NormCall, Normed, NormGradients, is_per_head
from ropewalk.ops.rope.norm.kernel import norm_backward_kernel, norm_kernel, weight_sum_kernel
from ropewalk.ops.rope.validate import as_bthd

# A thread of the backward may have as many. With fewer, ptxas loads x only after it has used dy (note 054).
BACKWARD_REGISTERS = 128
SUM_BLOCK_ROWS, SUM_BLOCK_D, SUM_WARPS = 1024, 8, 8  # 32 bytes of a row: many programs read the few partial sums
_SM_REGISTERS = 65536
_FEW_TOKENS = 256  # latency limits calls of so many, bandwidth those of more

FORWARD, BACKWARD = (
    Kernel(function, unaligned=("positions_ptr", "cu_seqlens_ptr"), unsigned=("row_multiplier",))
    for function in (norm_kernel, norm_backward_kernel)
)
SUM = Kernel(weight_sum_kernel)


class Side(NamedTuple):
    """q, or k, and what belongs to it: the result of a forward; or a gradient, and the gradients to compute."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    out: Tensor | None = None
    grad: Tensor | None = None
    dx: Tensor | None = None
    dw: Tensor | None = None
    db: Tensor | None = None

    def kind(self) -> Any:
        """Return what q and k have in common where one launch does both."""
        weight_kinds = [None if x is None else (x.dtype, x.ndim) for x in (self.weight, self.bias)]
        return weight_kinds, [x is None for x in (self.dx, self.dw, self.db)]


NO_SIDE = Side(*[None] * 3)  # type: ignore[arg-type]


def row_pairs(head_dim: int, half: int, rotary_offset: int, interleaved: bool) -> int:
    """Return the pairs of a tile's row: a power of two."""
    pairs = (head_dim + rotary_offset % 2 + 1) // 2 if interleaved else half + (head_dim - 2 * half + 1) // 2
    return int(triton.next_power_of_2(max(1, pairs)))


def choose_tiles(
    batch: int,
    tokens: int,
    n_heads: Sequence[int],
    pairs: int,
    itemsize: int,
    *,
    across_heads: bool,
    heads_are_near: bool,
    backward: bool,
) -> Tiles:
    """Return tiles of 64 accesses of 16 bytes to each half of its rows, with which a GPU was fastest (note 054).

    n_heads is of q and of k; heads_are_near says that a token's heads lie nearer to each
    other in memory than a head's tokens do.
    """
    per_row = max(1, pairs * itemsize // WIDEST_ACCESS)
    most_heads = triton.next_power_of_2(max(n_heads))
    if across_heads:
        return Tiles(1, most_heads, min(1024, max(32, most_heads * per_row)))
    rows = max(1, 64 // per_row)
    block_heads = min(rows, most_heads)
    common = math.gcd(*n_heads)
    if backward and (whole := common & -common) >= 4:  # groups of so many heads leave no row of a tile without one
        block_heads = min(block_heads, whole)
    if not heads_are_near:
        block_heads = min(block_heads, 4)
    block_tokens = min(max(1, rows // block_heads), triton.next_power_of_2(max(1, tokens)))
    if batch * tokens <= _FEW_TOKENS and not backward:
        # One row of each head: narrower accesses, by more threads, take less time.
        return Tiles(1, block_heads, max(32, 2 * block_heads * per_row))
    threads = max(per_row, 32 if heads_are_near and not backward else 64)
    return Tiles(block_tokens, block_heads, min(threads, max(32, block_tokens * block_heads * per_row)))


def _pair(q: Side, k: Side | None) -> list[tuple[Side, Side]]:
    """Return q and k of each launch: together if one launch can do both."""
    if k is None:
        return [(q, NO_SIDE)]
    return [(q, k)] if q.kind() == k.kind() else [(q, NO_SIDE), (k, NO_SIDE)]


def _or(x: Tensor | None, *others: Tensor | None) -> Tensor:
    """Return the first tensor that is not None, as a kernel's argument that it does not read has a type, too."""
    return next(x for x in (x, *others) if x is not None)


def describe(q: Side, k: Side, call: NormCall) -> tuple[int, int, dict[str, Any]]:
    """Return the numbers of groups of heads and of blocks of tokens, and what both kernels read."""
    rope, flags = call.rope, call.flags
    layout, half = rope.flags.layout, rope.cos.shape[-1]
    batch, tokens, n_q_heads, head_dim = as_bthd(q.x, layout).shape
    n_k_heads = 0 if k is NO_SIDE else as_bthd(k.x, layout).shape[2]
    pairs = row_pairs(head_dim, half, rope.flags.rotary_offset, rope.flags.interleaved)
    is_backward = q.out is None
    backward_tensors = {"q_grad": q.grad, "k_grad": k.grad, "dq": q.dx, "dk": k.dx}
    heads = head_args(layout, q=q.x, k=k.x, **(backward_tensors if is_backward else {"q_out": q.out, "k_out": k.out}))
    tiles = choose_tiles(
        batch,
        tokens,
        (n_q_heads, n_k_heads),
        pairs,
        q.x.element_size(),
        across_heads=flags.across_heads,
        heads_are_near=are_near(heads, tokens, n_q_heads),
        backward=is_backward,
    )
    row_blocks = math.ceil(tokens / tiles.block_tokens)
    row_multiplier, row_shift = division_by(row_blocks)
    n_groups = math.ceil(n_q_heads / tiles.block_heads) + math.ceil(n_k_heads / tiles.block_heads)
    return (
        n_groups,
        batch * row_blocks,
        {
            **heads,
            **table_args(rope.cos, rope.sin),
            **position_args(rope, q.x),
            **pair_args(rope),
            "q_weight_ptr": _or(q.weight, q.x),
            "k_weight_ptr": _or(k.weight, q.weight, q.x),
            "q_bias_ptr": _or(q.bias, q.x),
            "k_bias_ptr": _or(k.bias, q.bias, q.x),
            "row_blocks": row_blocks,
            "row_multiplier": row_multiplier,
            "row_shift": row_shift,
            "n_tokens": tokens,
            "HQ": n_q_heads,
            "HK": n_k_heads,
            "D": head_dim,
            "BLOCK_PAIRS": pairs,
            "EPS": float(flags.eps),
            "WEIGHT_OFFSET": float(flags.offset),
            "HAS_WEIGHT": q.weight is not None,
            "HAS_BIAS": q.bias is not None,
            "PER_HEAD": q.weight is not None and is_per_head(q.weight, flags),
            "AFTER": flags.after,
            "ACROSS": flags.across_heads,
            "COMPUTE_DTYPE": compute_dtype(q.x),
            "BLOCK_TOKENS": tiles.block_tokens,
            "BLOCK_HEADS": tiles.block_heads,
            "threads": tiles.threads,
        },
    )


def _are_readable(xs: Sequence[Tensor | None], parameters: Sequence[Tensor | None], call: NormCall) -> bool:
    """Say whether the kernels can read tensors without copies of them."""
    rope = call.rope
    are_whole = all(x is None or x.is_contiguous() for x in parameters)
    return are_whole and are_dense(*xs, rope.cos, rope.sin, rope.cu_seqlens, rope.axes)


def _with_copies(normed: Normed, on: Steps) -> Normed:
    """Return a call with dense copies of what the kernels cannot read."""
    *tensors, call = normed
    call = call._replace(rope=with_dense_tables(call.rope, on))
    return Normed._make((*[contiguous(x, on) for x in tensors], call))


def forward(normed: Normed, on: Steps) -> Sequence[Tensor]:
    """Normalise and rotate q and k; in one launch if their weights and biases are alike."""
    q, k, q_weight, k_weight, q_bias, k_bias, call = normed
    outs = [torch.empty_like(x) for x in (q, k) if x is not None]
    if not _are_readable((q, k, *outs), (q_weight, k_weight, q_bias, k_bias), call):
        for out, copy in zip(outs, forward(_with_copies(normed, on), on), strict=True):
            on.operate(copy_to, out, copy)
        return outs
    q_out, k_out = (*outs, None)[:2]
    sides = _pair(Side(q, q_weight, q_bias, q_out), None if k is None else Side(k, k_weight, k_bias, k_out))
    for first, second in sides:
        n_groups, n_blocks, arguments = describe(first, second, call)
        if n_groups * n_blocks and q.shape[-1]:
            on.launch(FORWARD, n_groups * n_blocks, **arguments)
    return outs


def backward(gradients: NormGradients, on: Steps) -> Sequence[Tensor | None]:
    """Return the needed gradients of q and k, their weights and biases; q and k share a launch as in the forward."""
    q_grad, k_grad, normed, needed = gradients
    q, k, q_weight, k_weight, q_bias, k_bias, call = normed
    if not _are_readable((q_grad, k_grad, q, k), (q_weight, k_weight, q_bias, k_bias), call):
        grads = contiguous(q_grad, on), contiguous(k_grad, on)
        return backward(NormGradients(*grads, _with_copies(normed, on), needed), on)
    *inputs, _ = normed
    found = [
        torch.empty_like(x) if is_needed and x is not None else None
        for x, is_needed in zip(inputs, needed, strict=True)
    ]
    dq, dk, dqw, dkw, dqb, dkb = found
    q_side = Side(q, q_weight, q_bias, None, q_grad, dq, dqw, dqb)
    k_side = None if k is None else Side(k, k_weight, k_bias, None, k_grad, dk, dkw, dkb)
    for first, second in _pair(q_side, k_side):
        if q.shape[-1] and any(x is not None for x in (first.dx, first.dw, first.db)):
            _differentiate(first, second, call, on)
    return found


def _differentiate(q: Side, k: Side, call: NormCall, on: Steps) -> None:
    """Launch the kernel of gradients, and sum those of weights and biases."""
    n_groups, n_blocks, arguments = describe(q, k, call)
    threads, block_heads, per_head = (arguments[name] for name in ("threads", "BLOCK_HEADS", "PER_HEAD"))
    # All programs run at a time: one more would run alone, after them.
    programs_per_sm = max(1, _SM_REGISTERS // (BACKWARD_REGISTERS * threads))
    n_sms = gpu.num_sms(on.device_of(q.x))
    n_slots = min(n_blocks, max(1, n_sms * programs_per_sm // max(1, n_groups)))
    dtype = torch.float64 if q.x.dtype == torch.float64 else torch.float32  # `promote_types` is an operator

    def partial(by_head: bool) -> Tensor:
        rows = n_slots * n_groups * (block_heads if by_head else 1)
        return q.x.new_empty(rows, q.x.shape[-1], dtype=dtype)

    dw_partial = None if q.dw is None else partial(per_head)
    db_partial = None if q.db is None else partial(True)  # each head has a bias of its own
    if n_blocks * n_groups:
        limits = {} if call.flags.across_heads else {"maxnreg": BACKWARD_REGISTERS}
        on.launch(
            BACKWARD,
            n_slots * n_groups,
            **arguments,
            dw_partial_ptr=_or(dw_partial, q.x),
            db_partial_ptr=_or(db_partial, q.x),
            n_blocks=n_blocks,
            n_slots=n_slots,
            NEEDS_DX=q.dx is not None,
            NEEDS_DW=q.dw is not None,
            NEEDS_DB=q.db is not None,
            **limits,
        )
    if dw_partial is not None and q.dw is not None:
        _sum(dw_partial, q.dw, k.dw, n_slots, arguments, on)
    if db_partial is not None and q.db is not None:
        _sum(db_partial, q.db, k.db, n_slots, {**arguments, "PER_HEAD": True}, on)


def _sum(
    partials: Tensor, q_sum: Tensor, k_sum: Tensor | None, n_slots: int, arguments: dict[str, Any], on: Steps
) -> None:
    """Sum the programs' parts of the gradients of weights, or of biases."""
    n_q_heads, n_k_heads, head_dim, per_head = (arguments[name] for name in ("HQ", "HK", "D", "PER_HEAD"))
    device = on.device_of(q_sum)
    # A programmatic dependent launch: its latency hides behind the kernel before.
    overlaps = gpu.is_nvidia(device) and gpu.capability(device) >= (9, 0)
    on.launch(
        SUM,
        (math.ceil(head_dim / SUM_BLOCK_D), n_q_heads + n_k_heads if per_head else 1 + (n_k_heads > 0)),
        dw_partial_ptr=partials,
        q_dw_ptr=q_sum,
        k_dw_ptr=_or(k_sum, q_sum),
        n_slots=n_slots,
        HQ=n_q_heads,
        HK=n_k_heads,
        D=head_dim,
        PER_HEAD=per_head,
        BLOCK_HEADS=arguments["BLOCK_HEADS"],
        BLOCK_ROWS=SUM_BLOCK_ROWS,
        BLOCK_D=SUM_BLOCK_D,
        OVERLAPS=overlaps,
        num_warps=SUM_WARPS,
        **({"launch_pdl": True} if overlaps else {}),
    )
