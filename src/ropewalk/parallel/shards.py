"""Exchanges of ranks: whole sequences and heads. All differentiable.

A gradient that several ranks have parts of is summed at its owner in float32, whatever its dtype.

Letters: B batch, T tokens, H heads, D head dim, n ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ropewalk.ops.tracing import is_dtensor
from ropewalk.parallel.agreement import agree, kind_of_layout, refuse
from ropewalk.parallel.layout import SequenceLayout, Within


def shard_sequence(x: Tensor, layout: SequenceLayout, dim: int = 1) -> Tensor:
    """Take this rank's tokens of a whole sequence; padding tokens are zeros.

    The same in PyTorch::

        x_local = x.index_select(dim, layout.indices)

    Its gradient is zero outside of the rank's tokens. Shift labels before you shard them.

    Args:
        x: a tensor of any dtype with layout.n_tokens tokens, on the layout's device.
        layout: which tokens this rank holds.
        dim: the dimension of the tokens.

    Returns:
        x with layout.n_local tokens.

    Raises:
        TypeError: an x or a layout of another type.
        ValueError: another number of tokens, or another device.

    Source: the layouts of `SequenceLayout`.

    Example:
        >>> import torch.distributed as dist
        >>> from ropewalk.parallel import SequenceLayout, shard_sequence
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> shard_sequence(torch.randn(2, 7, 16), SequenceLayout(dist.group.WORLD, 7)).shape
        torch.Size([2, 8, 16])
        >>> dist.destroy_process_group()
    """
    dim = _check(x, layout, dim, layout.n_tokens if isinstance(layout, SequenceLayout) else 0)
    local = x.index_select(dim, layout.indices.clamp(min=0))
    missing = ~layout.valid.view(-1, *(1,) * (x.ndim - 1 - dim))
    return local.masked_fill(missing, 0)


def unshard_sequence(x: Tensor, layout: SequenceLayout, dim: int = 1) -> Tensor:
    """Gather all ranks' tokens in the order of the sequence, without padding.

    The same in PyTorch, for all ranks' shards `parts`::

        x = torch.empty(...)  # like x_local, with layout.n_tokens tokens
        for indices, part in zip(all_indices, parts):
            x.index_copy_(dim, indices, part)

    Each rank's gradient of the result reaches the shards: their sum is reduced and scattered. Every rank has to take
    part in the backward.

    Args:
        x: a tensor of any dtype with layout.n_local tokens, on the layout's device.
        layout: which tokens each rank holds.
        dim: the dimension of the tokens.

    Returns:
        x with layout.n_tokens tokens, the same on each rank.

    Raises:
        TypeError: an x or a layout of another type.
        ValueError: another number of tokens, or another device; ranks whose calls differ. All ranks raise; on GPUs
            they compare each kind of call once.

    Source: the layouts of `SequenceLayout`.

    Example:
        >>> import torch.distributed as dist
        >>> from ropewalk.parallel import SequenceLayout, shard_sequence, unshard_sequence
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> layout, x = SequenceLayout(dist.group.WORLD, 7), torch.randn(2, 7, 16)
        >>> torch.equal(unshard_sequence(shard_sequence(x, layout), layout), x)
        True
        >>> dist.destroy_process_group()
    """
    if not isinstance(layout, SequenceLayout):
        raise TypeError(f"layout is {type(layout).__name__}, but must be a SequenceLayout")
    try:
        dim = _check(x, layout, dim, layout.n_local)
    except (TypeError, ValueError) as error:
        refuse(layout, error, layout.agreed_gathers)
    needs_grad = x.requires_grad and torch.is_grad_enabled()
    kind = (
        *(("the shape of x", tuple(x.shape)), ("the dtype of x", str(x.dtype)), ("dim", dim)),
        *(("x.requires_grad", needs_grad), *kind_of_layout(layout)),
    )
    agree(layout, kind, None, layout.agreed_gathers)
    whole: Tensor = _Gather.apply(layout, x.movedim(dim, 0))[0]
    return whole.movedim(0, dim)


def _check(x: Tensor, layout: SequenceLayout, dim: int, tokens: int) -> int:
    """Raise unless x has so many tokens; return their dimension, counted from the first."""
    if not isinstance(layout, SequenceLayout):
        raise TypeError(f"layout is {type(layout).__name__}, but must be a SequenceLayout")
    if not isinstance(x, Tensor):
        raise TypeError(f"x is {type(x).__name__}, but must be a tensor")
    if is_dtensor(x):
        raise TypeError("x is a DTensor, but must be a plain tensor: pass x.to_local()")
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim is {dim!r}, but must be an int")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim is {dim}, but x has {x.ndim} dimensions")
    if x.shape[dim] != tokens:
        raise ValueError(f"x has {x.shape[dim]} tokens in dimension {dim}, but must have {tokens} for {layout}")
    if x.device != layout.device:
        raise ValueError(f"x is on {x.device}, but must be on the layout's device, {layout.device}")
    return dim % x.ndim


def gather(layout: SequenceLayout, *xs: Tensor) -> tuple[Tensor, ...]:
    """Gather shards (B, H, T_local, D) to whole sequences (B, H, T, D)."""
    wholes = _Gather.apply(layout, *(x.movedim(2, 0) for x in xs))
    return tuple(x.movedim(0, 2) for x in wholes)


def split_heads(layout: SequenceLayout | Within, *xs: Tensor) -> tuple[Tensor, ...]:
    """Exchange each (B, H, T_local, D) for (B, H/n, T, D): all tokens of this rank's heads, or its node's."""
    exchanged: tuple[Tensor, ...] = _Exchange.apply(layout, True, *xs)
    return exchanged


def join_heads(layout: SequenceLayout | Within, x: Tensor) -> Tensor:
    """Undo `split_heads`; padding tokens are zeros."""
    exchanged: Tensor = _Exchange.apply(layout, False, x)[0]
    return exchanged


def tie(out: Tensor, *inputs: Tensor) -> Tensor:
    """Return `out`, recorded so that its backward gives zeros to the inputs.

    Where a rank has no query that attends, nothing else would: the others would wait for it. Eager calls alone: equal
    zeros are one to torch.compile, and so are their exchanges.
    """
    tied: Tensor = _Tie.apply(out, *inputs)
    return tied


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before PyTorch 2.14


def all_to_all(
    x: Tensor, received: list[int] | None, sent: list[int] | None, layout: SequenceLayout | Within
) -> Tensor:
    """Exchange rows of x: so many to each rank, so many from each; equal parts by default."""
    rows = x.shape[0] if received is None else sum(received)
    result = x.new_empty(rows, *x.shape[1:])
    dist.all_to_all_single(result, x.contiguous(), received, sent, group=layout.group)
    return result


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums of a floating-point dtype."""
    return torch.promote_types(dtype, torch.float32)


class _Gather(torch.autograd.Function):
    """Shards (T_local, …) to whole sequences (T, …)."""

    @staticmethod
    def forward(ctx: Any, layout: SequenceLayout, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.layout = layout
        wholes = []
        for x in xs:
            every = x.new_empty(layout.size * layout.n_local, *x.shape[1:])
            _all_gather(every, x.contiguous(), group=layout.group)
            wholes.append(every.index_select(0, layout.order))
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layout: SequenceLayout = ctx.layout
        results: list[Tensor | None] = []
        for grad in grads:
            padded = torch.cat((grad, grad.new_zeros(1, *grad.shape[1:])))
            parts = all_to_all(padded.index_select(0, layout.places), None, None, layout)
            total = parts.unflatten(0, (layout.size, layout.n_local)).sum(0, dtype=accumulator(grad.dtype))
            results.append(total.to(grad.dtype))
        return None, *results


def _to_heads(layout: SequenceLayout | Within, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    n, batch = layout.size, xs[0].shape[0]
    parts = _side_by_side([x.unflatten(1, (n, x.shape[1] // n)).permute(1, 3, 0, 2, 4) for x in xs])
    every = all_to_all(parts, None, None, layout).flatten(0, 1)  # (T, B, numbers)
    if isinstance(layout, SequenceLayout):  # a node's tokens are in their order, padding among them
        every = every.index_select(0, layout.order)
    shapes = [(every.shape[0], batch, x.shape[1] // n, x.shape[3]) for x in xs]
    return tuple(x.permute(1, 2, 0, 3) for x in _apart(every, shapes))


def _to_tokens(layout: SequenceLayout | Within, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    n, batch = layout.size, xs[0].shape[0]
    tokens = _side_by_side([x.permute(2, 0, 1, 3) for x in xs])  # (T, B, numbers)
    if isinstance(layout, SequenceLayout):
        if layout.n_tokens < layout.size * layout.n_local:
            tokens = torch.cat((tokens, tokens.new_zeros(1, *tokens.shape[1:])))
        tokens = tokens.index_select(0, layout.places)
    every = all_to_all(tokens.unflatten(0, (n, -1)), None, None, layout)  # (n, T_local, B, numbers)
    shapes = [(*every.shape[:2], batch, x.shape[1], x.shape[3]) for x in xs]
    return tuple(x.permute(2, 0, 3, 1, 4).flatten(1, 2) for x in _apart(every, shapes))


def _side_by_side(xs: Sequence[Tensor]) -> Tensor:
    """Return tensors (…, H, D) as one, (…, numbers): one exchange moves all."""
    if len(xs) == 1:
        return xs[0].flatten(-2)
    widths = [x.shape[-2] * x.shape[-1] for x in xs]
    joined = xs[0].new_empty(*xs[0].shape[:-2], sum(widths))
    for part, x in zip(joined.split(widths, -1), xs, strict=True):
        part.view(x.shape).copy_(x)
    return joined


def _apart(x: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return the tensors of these shapes that `_side_by_side` joined."""
    parts = x.split([shape[-2] * shape[-1] for shape in shapes], -1)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class _Exchange(torch.autograd.Function):
    """Tokens for heads, or heads for tokens; each is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, layout: SequenceLayout | Within, to_heads: bool, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.layout, ctx.to_heads = layout, to_heads
        return (_to_heads if to_heads else _to_tokens)(layout, xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(_to_tokens if ctx.to_heads else _to_heads)(ctx.layout, grads)


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(torch.zeros_like(x) for x in ctx.saved_tensors)


class SumGradients(torch.autograd.Function):
    """The identity on what every rank holds; its gradient is the sum of all ranks'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: SequenceLayout) -> Tensor:
        ctx.layout = layout
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.to(accumulator(grad.dtype), copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.layout.group)
        return total.to(grad.dtype), None
