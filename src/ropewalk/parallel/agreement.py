"""An error of one rank, raised by all: none may wait for others that never come."""

from __future__ import annotations

import zlib
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ropewalk.parallel.layout import SequenceLayout

# What ranks must have alike in a call: names, for errors, and values.
Kind = tuple[tuple[str, Any], ...]


def kind_of_layout(layout: SequenceLayout) -> Kind:
    """Return what the layouts of all ranks must have alike."""
    return ("layout.n_tokens", layout.n_tokens), ("layout.kind", layout.kind), ("layout.cu_seqlens", layout.bounds)


def refuse_tokens(layout: SequenceLayout, name: str, n_tokens: int) -> NoReturn:
    """Raise for a tensor that has not as many tokens as a shard."""
    raise ValueError(
        f"{name} has {n_tokens} tokens, but must have the {layout.n_local} of a shard, for {layout}: pass the "
        f"whole sequence to shard_sequence once, before the model; there is no generation within context_parallel"
    )


def needs_agreement(layout: SequenceLayout, kind: Kind | None, agreed: set[Any] | None = None) -> bool:
    """Say whether ranks compare a call of a kind."""
    return not (
        torch.compiler.is_compiling() or layout.size == 1 or kind in (layout.agreed if agreed is None else agreed)
    )


def agree(
    layout: SequenceLayout,
    kind: Kind | None,
    error: Exception | None,
    agreed: set[Any] | None = None,
) -> None:
    """Raise on the other ranks if one has an error, or if calls differ; the caller raises its own error.

    agreed: the kinds that were compared, of calls of one function; those of attention by default.

    It waits for the device, so on GPUs each kind of call is compared once. After that an error is raised alone: the
    other ranks may be in another exchange, which ends by its timeout.
    """
    agreed = layout.agreed if agreed is None else agreed
    if error is not None and agreed:
        return
    if not needs_agreement(layout, kind, agreed):
        return
    number = 0 if kind is None else zlib.crc32(repr(kind).encode()) + 1
    mine = torch.tensor([number], device=layout.device)
    every = [torch.empty_like(mine) for _ in range(layout.size)]
    dist.all_gather(every, mine, group=layout.group)
    numbers = [int(x) for x in every]
    if min(numbers) == max(numbers) != 0:
        if layout.device.type != "cpu":
            agreed.add(kind)
        return
    text = None if error is None else f"{type(error).__name__}: {error}"
    values = {name: repr(value) for name, value in kind or ()}
    texts_and_values: list[Any] = [None] * layout.size
    dist.all_gather_object(texts_and_values, (text, values), group=layout.group)
    if error is not None:
        return  # the caller raises it
    for rank, (other_text, _) in enumerate(texts_and_values):
        if other_text is not None:
            raise ValueError(f"the call cannot run on rank {layout.rank}, because rank {rank} raised {other_text}")
    others = [rank for rank, other in enumerate(numbers) if other != number]
    other = min(others)
    _, values_there = texts_and_values[other]
    names = [name for name in (*values, *values_there) if values.get(name) != values_there.get(name)]
    differences = (
        f"{name} is {values.get(name)} on rank {layout.rank} and {values_there.get(name)} on rank {other}"
        for name in dict.fromkeys(names)
    )
    raise ValueError(
        f"the call has other shapes or keywords on ranks {others} than on rank {layout.rank}, but must have the same "
        f"on all: {'; '.join(differences)}"
    )


def refuse(layout: SequenceLayout, error: Exception, agreed: set[Any] | None = None) -> NoReturn:
    """Raise an error of this rank, on the others too."""
    agree(layout, None, error, agreed)
    raise error
