"""Plans of launchers that are no part of `attention`'s kernels, such as the gate after a library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ropewalk.ops.attention.plans.cache import Cache, addresses_of, existing, may_plan, plan_or_none
from ropewalk.ops.attention.plans.leaves import describe


def run_launcher(
    cache: Cache, launcher: Callable[..., list[Tensor | None]], tensors: Sequence[Tensor], *flags: bool
) -> list[Tensor | None]:
    """Run a launcher of tensors, flags and `Steps`, by a plan where there is one."""
    like, *_ = tensors
    if may_plan(like):
        key = (describe(tensors), flags)
        found = cache.find(key, lambda: plan_or_none(_plan_launcher, launcher, tensors, flags))
        addresses = None if found is None else addresses_of(tensors)
        if addresses is not None:
            plan, wanted = found
            made = iter(plan.run(tensors, addresses, plan.results))
            return [next(made) if is_wanted else None for is_wanted in wanted]
    return launcher(*tensors, *flags)


def _plan_launcher(
    launcher: Callable[..., list[Tensor | None]], tensors: Sequence[Tensor], flags: tuple[bool, ...]
) -> tuple[Any, list[bool]]:
    """Return the plan of a launcher, and which of its results it makes."""
    from ropewalk.ops.attention.triton.plan import Builder

    like, *_ = tensors
    builder = Builder(like.device)
    results = builder.follow(launcher, *map(builder.input, tensors), *flags)
    return builder.finish(existing(results)), [x is not None for x in results]
