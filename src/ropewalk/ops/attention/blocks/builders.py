"""The work of the constructors of `BlockLists`: one launch each on a GPU, and PyTorch's operators elsewhere.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, M blocks of queries, N blocks of keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.launch.kinds import Operation
from ropewalk.ops.tracing import is_intercepted

CAUSAL, WINDOW, DOCUMENTS, FRAMES = range(4)  # as in `build_kernel`, which loads Triton
SCORES, RANDOM, DILATED = range(3)
_NEVER, _ALWAYS = -(2**31), 2**31 - 1
MAX_BLOCKS = 1 << 14  # of keys, that a program chooses from


class Sizes(NamedTuple):
    """The extents of a call and of blocks."""

    queries: int
    keys: int
    block_q: int
    block_k: int


class Choice(NamedTuple):
    """The numbers of a choice of blocks, as its kernel has them."""

    chosen: int
    near: int
    first: int
    seed: int
    width: int


def check_sizes(n_queries: Any, n_keys: Any, block_q: Any, block_k: Any) -> Sizes:
    """Return the extents of a call, or raise."""
    check_integer("n_queries", n_queries, 1)
    if n_keys is not None:
        check_integer("n_keys", n_keys, 1)
    for name, size in (("block_q", block_q), ("block_k", block_k)):
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} is {size!r}, but must be 64 or 128")
        if size not in (64, 128):
            raise ValueError(f"{name} is {size}, but must be 64 or 128")
    return Sizes(n_queries, n_queries if n_keys is None else n_keys, block_q, block_k)


def check_integer(name: str, x: Any, least: int, most: int = 2**30) -> None:
    """Raise unless x is an int within bounds."""
    if isinstance(x, bool) or not isinstance(x, int):
        raise TypeError(f"{name} is {x!r}, but must be an int")
    if not least <= x <= most:
        raise ValueError(f"{name} is {x}, but must be from {least} to {most}")


def _runs_kernel(device: torch.device) -> bool:
    return not (torch.compiler.is_compiling() or is_intercepted()) and gpu.why_no_triton(device) is None


def _run(operation: Operation[Any], call: Any, device: torch.device) -> list[Any]:
    """Run a kernel on a device, which a call without tensors does not have."""
    with torch.cuda.device(device if device.type == "cuda" else -1):
        return list(operation.run(call))


def make_spans(
    rule: int, bounds: Tensor | None, sizes: Sizes, numbers: tuple[int, int, int], causal: bool, device: torch.device
) -> list[Tensor]:
    """Return counts and indices of blocks that spans of keys cut, those of full ones, and the spans."""
    if _runs_kernel(device):
        from ropewalk.ops.attention.blocks import build_kernel

        call = build_kernel.SpansCall(rule, bounds, sizes, numbers, causal, device)
        return _run(build_kernel.SPANS, call, device)
    index = torch.arange(sizes.queries, device=device) + (sizes.keys - sizes.queries)
    start, stop = torch.zeros_like(index), torch.full_like(index, sizes.keys)
    if rule == WINDOW:
        before, _, n_first = numbers
        start = torch.where(index - before <= n_first, 0, index - before)
    elif rule == FRAMES:
        behind, per_frame, ahead = numbers
        frame = index.div(per_frame, rounding_mode="floor")
        start, stop = (frame - behind) * per_frame, (frame + ahead + 1) * per_frame
    elif rule == DOCUMENTS:
        assert bounds is not None
        clamped = bounds.long().clamp(0, sizes.keys)
        begun = clamped <= index[:, None]
        start = torch.where(begun, clamped, -1).amax(1)
        stop = torch.where(begun, 2**30, clamped).amin(1)
        stop = torch.where((stop == 2**30) | (start < 0), 0, stop)
    if causal:
        stop = torch.minimum(stop, index + 1)
    start = start.clamp(0, sizes.keys)
    stop = torch.maximum(stop.clamp(0, sizes.keys), start)
    n_first = numbers[2] if rule == WINDOW else 0
    return [*_lists_of_spans(start, stop, sizes, n_first), torch.stack((start, stop), -1).int()[None, None]]


def _lists_of_spans(start: Tensor, stop: Tensor, sizes: Sizes, n_first: int) -> list[Tensor]:
    """Return the lists of spans (Tq,): blocks that are cut, and full ones."""
    rows, n_blocks = -(-sizes.queries // sizes.block_q), -(-sizes.keys // sizes.block_k)
    device, missing = start.device, rows * sizes.block_q - sizes.queries
    start, stop = (torch.nn.functional.pad(x, (0, missing)).view(rows, -1) for x in (start, stop))
    m = torch.arange(rows * sizes.block_q, device=device).view(rows, -1)
    exists = m < sizes.queries
    attends = exists & (start < stop)
    least_start = torch.where(attends, start, sizes.keys).amin(1)
    most_stop = torch.where(attends, stop, 0).amax(1)
    most_start = torch.where(exists, start, 0).amax(1)
    least_stop = torch.where(exists, stop, sizes.keys).amin(1)
    block = torch.arange(n_blocks, device=device)
    begin, end = block * sizes.block_k, ((block + 1) * sizes.block_k).clamp(max=sizes.keys)
    listed = (end > least_start[:, None]) & (begin < most_stop[:, None])
    full = listed & (begin >= most_start[:, None]) & (end <= least_stop[:, None])
    first_index = m[:, :1] + (sizes.keys - sizes.queries)
    first = (end <= n_first) & (end <= first_index + 1)
    return [*sorted_lists(listed & ~full), *sorted_lists(full | first)]


def sorted_lists(marks: Tensor) -> tuple[Tensor, Tensor]:
    """Return counts and indices of a map (…, M, N) of blocks; with two dimensions, for one row and head."""
    marks = marks[None, None] if marks.ndim == 2 else marks
    order = torch.argsort(marks.byte(), dim=-1, descending=True, stable=True)
    return marks.sum(-1).int(), order.int()


def choose(
    rule: int,
    scores: Tensor | None,
    shape: tuple[int, int],
    sizes: Sizes,
    numbers: Choice,
    causal: bool,
    own: bool,
    device: torch.device,
) -> list[Tensor]:
    """Return counts and indices of chosen blocks, (B, H, M) and (B, H, M, width), sorted."""
    if _runs_kernel(device):
        from ropewalk.ops.attention.blocks import build_kernel

        call = build_kernel.ChoiceCall(rule, scores, shape, sizes, numbers, causal, own, device)
        return _run(build_kernel.CHOICE, call, device)
    rows, n_blocks = -(-sizes.queries // sizes.block_q), -(-sizes.keys // sizes.block_k)
    row, block = torch.arange(rows, device=device)[:, None], torch.arange(n_blocks, device=device)
    offset = sizes.keys - sizes.queries
    last = ((row + 1) * sizes.block_q).clamp(max=sizes.queries) - 1 + offset
    first_block, last_block = (x.clamp(min=0) // sizes.block_k for x in (row * sizes.block_q + offset, last))
    exists = (block * sizes.block_k <= last) if causal else torch.ones_like(row * block, dtype=torch.bool)
    reached = exists
    if rule == SCORES:
        assert scores is not None
        score = scores.float()
        key = (score + 0.0).view(torch.int32)
        key = torch.where(key < 0, key ^ 0x7FFFFFFF, key).clamp(max=2**31 - 2)
        exists = exists & (score > -torch.inf)
        always = (block >= first_block) & (block <= last_block) & (last >= 0) if own else torch.zeros_like(exists)
    elif rule == RANDOM:
        head = torch.arange(shape[1], device=device)[:, None, None]
        key = _hash(_hash(_hash(numbers.seed + head * 0x3C6EF372) + row) + block)
        distance = torch.maximum(first_block - block, block - last_block)
        always = (distance <= numbers.near) | (block < numbers.first) | (row < numbers.first)
    else:
        key = torch.zeros_like(row * block)
        distance = (first_block - block).clamp(min=0)
        if not causal:
            distance = torch.maximum(distance, block - last_block)
        always = (distance % numbers.first == 0) & (distance // numbers.first <= numbers.near)
    always = always & reached
    key = torch.where(always, _ALWAYS, torch.where(exists, key.long(), _NEVER)).expand(*shape, rows, n_blocks)
    n_wanted = torch.full((*shape, rows), numbers.chosen, device=device)
    if rule != SCORES:
        n_always = always.expand_as(key).sum(-1)
        n_wanted = n_always + numbers.chosen if rule == RANDOM else n_always
    n_wanted = torch.minimum(n_wanted, (key > _NEVER).sum(-1)).clamp(max=numbers.width)
    rank = torch.argsort(torch.argsort(key, dim=-1, descending=True, stable=True), dim=-1)
    counts, indices = sorted_lists(rank < n_wanted[..., None])
    return [counts, indices[..., : numbers.width]]


def _hash(x: Tensor) -> Tensor:
    """Return a hash of integers, from 0 to 2**31 − 2, the kernel's."""
    x = x & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = x ^ (x >> shift)
        low, high = (x & 0xFFFF) * factor, ((x >> 16) * factor & 0xFFFF) << 16
        x = (low + high) & 0xFFFFFFFF
    return ((x ^ (x >> 16)) >> 1).clamp(max=2**31 - 2)


def read_mask(mask: Tensor, block_q: int, block_k: int) -> list[Tensor]:
    """Return counts and indices of the blocks in which a bool mask (B, H, Tq, Tk) has a pair."""
    if _runs_kernel(mask.device):
        from ropewalk.ops.attention.blocks import build_kernel

        return _run(build_kernel.MASK, build_kernel.MaskCall(mask, block_q, block_k), mask.device)
    *_, n_queries, n_keys = mask.shape
    padded = torch.nn.functional.pad(mask, (0, -n_keys % block_k, 0, -n_queries % block_q))
    marks = padded.unflatten(3, (-1, block_k)).unflatten(2, (-1, block_q)).any(-1).any(3)
    return list(sorted_lists(marks))
