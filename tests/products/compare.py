"""Run a call, and compare all that it returns, and all its gradients, with the truth.

A *truth* is `truth.attend` in float64, of which the *baseline* is the same in the dtype under test: the error of a call
may be twice the baseline's, and some units in the last place (`ropewalk.testing.error_budget`), by the largest number
and by the root of the mean square.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from products import truth
from products.calls import Call
from ropewalk import attention, explain_choice
from ropewalk.ops.attention.dropout import make_seed

ROUNDINGS = 6
FEW = 1024  # numbers, whose largest baseline's error is one draw of few
IN_FLOAT64 = 64  # there the truth has roundings of its own
# Beyond so many budgets a call is wrong. Below, others of its kind are asked: a parameter sums over all tokens in few
# numbers, whose errors of a single draw say little.
CLEAR = 8.0
Results = dict[str, Tensor]  # "out", "lse", "max_logits", and the gradient of each leaf by its name


class Expected(NamedTuple):
    """The truth of a call, and the baseline."""

    exact: Results
    baseline: Results


def run(call: Call, attend: Callable[..., Any], leaves: dict[str, Tensor] | None = None) -> Results:
    """Return the results of a call, and the gradients of its leaves, by a function like `attention`."""
    tensors = call.leaves if leaves is None else leaves
    given = {name: x.detach().requires_grad_(name in call.learned) for name, x in tensors.items()}
    needs_grad = bool(call.learned)
    with torch.set_grad_enabled(needs_grad):
        keywords = call.keywords(given)
        results = attend(**keywords)
    return finish(call, given, keywords, results)


def finish(call: Call, given: dict[str, Tensor], keywords: dict[str, Any], results: Any) -> Results:
    """Name what a call returned, and compute the gradients of the leaves."""
    results = list(results) if isinstance(results, tuple) else [results]
    named = dict(zip(names_of(keywords), results, strict=True))
    found = {name: x.detach() for name, x in named.items()}
    if not call.learned or not named["out"].requires_grad:
        return found
    outputs, weights = [named["out"]], [call.weights(named["out"].detach())]
    if call.has_lse_gradient and named["lse"].requires_grad:
        lse = named["lse"]
        outputs.append(lse)
        weights.append(call.lse_weights(lse.detach()).masked_fill(lse.detach() == -torch.inf, 0))
    leaves = [given[name] for name in call.learned]
    grads = torch.autograd.grad(outputs, leaves, weights, allow_unused=True)
    for name, leaf, grad in zip(call.learned, leaves, grads, strict=True):
        found[f"grad of {name}"] = torch.zeros_like(leaf) if grad is None else grad
    return found


def names_of(keywords: dict[str, Any]) -> list[str]:
    """Return the names of what `attention` returns."""
    names = ["out"]
    if keywords.get("return_lse"):
        names.append("lse")
    if keywords.get("return_max_logits"):
        names.append("max_logits")
    return names


def expect(call: Call) -> Expected:
    """Return the truth of a call, and the baseline."""
    seed = seed_of(call)

    def attend(**keywords: Any) -> Any:
        found = truth.attend(seed=seed, **keywords)
        return tuple(getattr(found, name) for name in names_of(keywords))

    wide = {name: widen(x) for name, x in call.leaves.items()}
    return Expected(run(call, attend, wide), run(call, attend))


def widen(x: Tensor) -> Tensor:
    """Return floating-point numbers in float64, but for stored ones of 8 bits, which the truth reads."""
    return x.double() if x.is_floating_point() and x.dtype.itemsize > 1 else x


def seed_of(call: Call) -> int | None:
    """Return the seed of dropout that `attention` draws after `torch.manual_seed(call.seed)`."""
    if call.row["dropout"] == "none":
        return None
    with kept_generators(call):
        return int(make_seed(call.leaves["q"]))


@contextmanager
def kept_generators(call: Call) -> Iterator[None]:
    """Seed torch's generators, and leave them as they were."""
    device = call.leaves["q"].device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(call.seed)
        yield


def attend_by(call: Call, impl: str | None) -> Results:
    """Run a call by a backend."""
    if call.row["dropout"] != "none":
        torch.manual_seed(call.seed)
    return run(call, lambda **keywords: attention(**keywords, impl=impl))


def backend_of(call: Call, impl: str | None) -> str | None:
    """Return the backend that runs a call here; None if it is one that refuses it."""
    leaves = {name: x.detach().requires_grad_(name in call.learned) for name, x in call.leaves.items()}
    with torch.set_grad_enabled(bool(call.learned)):
        try:
            return explain_choice(**call.keywords(leaves), impl=impl).name
        except ValueError:
            return None


def faults(found: Results, expected: Expected, slack: float = 1.0) -> list[str]:
    """Say in which results a call differs from the truth. slack: multiplies all budgets."""
    wrong, pending = [], []
    for name, exact in expected.exact.items():
        mine, baseline = found.get(name), expected.baseline[name]
        if mine is None or mine.shape != exact.shape:
            wrong.append(f"{name} has shape {None if mine is None else tuple(mine.shape)}, not {tuple(exact.shape)}")
        elif mine.dtype != (torch.float32 if name == "max_logits" else baseline.dtype):
            wrong.append(f"{name} has dtype {mine.dtype}, not {baseline.dtype}")
        elif mine.numel():
            pending.append((name, _measure(mine, exact, baseline, slack)))
    measured = torch.stack([x for _, x in pending]).tolist() if pending else []
    for (name, _), numbers in zip(pending, measured, strict=True):
        differs, largest, most, mean, most_mean = numbers
        if differs:
            wrong.append(f"{name}: {int(differs)} numbers are finite where the truth is not, or not where it is")
        elif largest > most:
            wrong.append(f"{name}: the largest error is {largest:.3g} of {most:.3g}")
        elif mean > most_mean:
            wrong.append(f"{name}: the mean error is {mean:.3g} of {most_mean:.3g}")
    return wrong


def _measure(mine: Tensor, exact: Tensor, baseline: Tensor, slack: float) -> Tensor:
    """Return how many numbers are not finite elsewhere, the largest error, its budget, the mean one and its budget."""
    wide, narrow = mine.detach().double(), baseline.detach().double()
    exact = exact.detach().double()
    finite = exact.isfinite()
    differs = (wide.isfinite() != finite).sum() + ((wide != exact) & ~finite & ~(wide.isnan() & exact.isnan())).sum()
    error, allowed, size = (
        torch.where(finite, x, 0.0).nan_to_num(0.0, 0.0, 0.0).abs() for x in (wide - exact, narrow - exact, exact)
    )
    factor = slack * (2 if exact.numel() > FEW else 4)
    unit = slack * ROUNDINGS * torch.finfo(mine.dtype).eps * (1 if mine.dtype != torch.float64 else IN_FLOAT64)
    largest = factor * allowed.max() + unit * size.max()
    mean = factor * allowed.square().mean().sqrt() + unit * size.square().mean().sqrt()
    return torch.stack([differs.double(), error.max(), largest, error.square().mean().sqrt(), mean])


def differing_bits(found: Results, other: Results) -> list[str]:
    """Name the results of two runs that are not the same bits."""
    return [name for name, x in found.items() if not torch.equal(x.nan_to_num(7.25), other[name].nan_to_num(7.25))]
