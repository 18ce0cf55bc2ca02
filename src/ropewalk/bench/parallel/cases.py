"""Cases of the benchmark of context parallelism, their tensors, and the gate: correctness before speed.

Outputs and gradients of a short case are compared whole, and sampled rows of the output and of q's gradient of the case
itself: those depend on the keys before them alone, so that they are cheap at any length. The truth is the reference in
float64; the budget is twice the error of the reference in the case's dtype.

Letters: T tokens, H query heads, K key heads, D head dim, n ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.bench.attention.cases import AttentionCase
from ropewalk.bench.attention.settings import SETTINGS
from ropewalk.bench.core.gate import Verdict, max_error
from ropewalk.ops.attention.api import attention
from ropewalk.parallel import SequenceLayout
from ropewalk.schemes import NoPosition
from ropewalk.testing import error_budget

MODES = {"train": "forward and backward on all processes"}
LLAMA = "llama"  # the setting of a case that trains layers of a model
_ROUNDINGS = 4  # of intermediate results to the case's dtype
_ROWS = 8  # sampled beside each other
_NAMES = ("the output", "the gradient of q", "the gradient of k", "the gradient of v")
_K = 1 << 10


@dataclass(frozen=True)
class ParallelCase:
    """One causal call over a whole sequence, B = 1, and how it is sharded; or training steps of a model."""

    name: str
    tokens: int
    q_heads: int = 32
    k_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    setting: str = "rope"  # of attention's benchmark, or `LLAMA`
    window: int | None = None
    far_window: int | None = None  # of ReRoPE
    shortest: int | None = None  # packed documents have seeded lengths, uniform from here …
    longest: int | None = None  # … to here
    kind: str = "zigzag"  # of the layout
    method: str | None = None
    peers: bool = True  # whether others are timed beside
    modes: ClassVar[tuple[str, ...]] = tuple(MODES)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def description(self) -> str:
        parts = [f"T{self.tokens} H{self.q_heads}/{self.k_heads} D{self.head_dim}, {self.dtype}, {self.setting}"]
        parts += [f"window {self.window}"] if self.window else []
        parts += [f"documents of {self.shortest} to {self.longest}"] if self.shortest else []
        return ", ".join([*parts, self.kind, *([self.method] if self.method else [])])

    def shrink(self, tokens: int) -> ParallelCase:
        """Return the case with fewer tokens, and windows and documents in proportion."""
        if self.tokens <= tokens:
            return self
        sizes = {name: getattr(self, name) for name in ("window", "far_window", "shortest", "longest")}
        scaled = {name: max(1, size * tokens // self.tokens) for name, size in sizes.items() if size is not None}
        return replace(self, tokens=tokens, **scaled)

    def quick(self, device: torch.device) -> ParallelCase:
        """Return the case at a size that takes seconds, also on a CPU. GPUs build the kernels of the whole case."""
        if device.type == "cuda":
            return self.shrink(16 * _K)
        k_heads = 4 if self.q_heads == self.k_heads else 2
        return replace(self.shrink(96), q_heads=4, k_heads=k_heads, head_dim=16, dtype="float32")


# The most important ones first: a run may be stopped.
CASES: tuple[ParallelCase, ...] = (
    ParallelCase("gqa-16k", 16 * _K),
    ParallelCase("gqa-64k", 64 * _K),
    ParallelCase("gqa-128k", 128 * _K),
    ParallelCase("mha-16k", 16 * _K, k_heads=32),
    ParallelCase("packed-256k", 256 * _K, shortest=_K, longest=64 * _K, kind="balanced"),
    ParallelCase("window-128k", 128 * _K, window=4096),
    ParallelCase("alibi-64k", 64 * _K, setting="alibi"),
    ParallelCase("rerope-64k", 64 * _K, setting="rerope", far_window=4096),
    ParallelCase("exposb-64k", 64 * _K, setting="exposb-bands-learned"),
    ParallelCase("llama-64k", 64 * _K, setting=LLAMA),
    ParallelCase("mha-64k", 64 * _K, k_heads=32),
    ParallelCase("ulysses-64k", 64 * _K, method="ulysses", peers=False),
    ParallelCase("ring-128k", 128 * _K, method="ring", peers=False),
    ParallelCase("d64-64k", 64 * _K, head_dim=64),
    ParallelCase("packed-short", 128 * _K, shortest=128, longest=4096, kind="balanced"),
    ParallelCase("gqa-256k", 256 * _K, peers=False),
)


class Inputs(NamedTuple):
    """The whole tensors of a case, the same on each rank, and how they are sharded. (1, T, heads, D)."""

    case: ParallelCase
    layout: SequenceLayout
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor  # of the output
    parameters: tuple[Tensor, ...]  # of the setting, float32; those that it learns require gradients
    learned: tuple[Tensor, ...]

    def keywords(self, *parameters: Tensor) -> dict[str, Any]:
        """Return the call's keywords for one process."""
        case: Any = self.case
        own = SETTINGS[case.setting].keywords_of(case, *parameters)
        return {**own, "causal": True, "window": case.window}

    def whole(self, *qkv: Tensor, run: Any = attention, **keywords: Any) -> Any:
        """Run a call of the whole sequence, packed where it has documents."""
        if self.layout.cu_seqlens is None:
            return run(*qkv, **keywords)
        bounds = self.layout.cu_seqlens.int()
        packed = {"layout": "thd", "cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
        result = run(*(x[0] for x in qkv), **keywords, **packed)
        return result[None] if isinstance(result, Tensor) else result


def make_inputs(case: ParallelCase, mesh: Any, device: torch.device, seed: int) -> Inputs:
    """Draw the tensors of a case, and the bounds of its documents, of which the last one ends with the sequence."""
    bounds = None
    if case.shortest is not None and case.longest is not None:
        shape, drawn = (case.tokens // case.shortest + 1,), torch.Generator().manual_seed(seed)
        ends = torch.randint(case.shortest, case.longest + 1, shape, generator=drawn).cumsum(0)
        bounds = F.pad(ends.clamp(max=case.tokens).unique(), (1, 0)).int()
    layout, generator = SequenceLayout(mesh, case.tokens, case.kind, bounds), torch.Generator(device).manual_seed(seed)
    q, k, v, grad = (
        torch.randn(1, case.tokens, heads, case.head_dim, generator=generator, device=device, dtype=case.torch_dtype)
        for heads in (case.q_heads, case.k_heads, case.k_heads, case.q_heads)
    )
    setting = SETTINGS[case.setting]
    whole = AttentionCase(case.name, 1, case.tokens, case.q_heads, case.k_heads, case.head_dim, True, dtype=case.dtype)
    parameters = tuple(x.to(device).requires_grad_(setting.learned) for x in setting.draw(whole))
    return Inputs(case, layout, q, k, v, grad, parameters, parameters if setting.learned else ())


class Truth(NamedTuple):
    """A right result, the budget of its errors, and where it is: in a whole result, in a shard, and of it in shards."""

    number: int  # of the result
    value: Tensor
    budget: float
    at: Sequence[Any]


def check_results(results: Sequence[Tensor], truths: Sequence[Truth], whole: bool) -> Verdict:
    """Compare an output and its gradients, whole tensors or shards; errors are multiples of their budgets."""
    worst = Verdict(0.0, 1.0, None)
    for number, truth, budget, (in_whole, in_shard, sharded) in truths:
        found = (results[number][in_whole], truth) if whole else (results[number][in_shard], truth[sharded])
        error = max_error(found[:1], found[1:])
        share = error / budget if budget > 0 else (0.0 if error == 0 else float("inf"))
        if share > worst.error:
            name = _NAMES[number] if number < len(_NAMES) else "a parameter's gradient"
            worst = Verdict(share, 1.0, f"the error of {name} is past the budget" if share > 1 else None)
    return worst


def truths_of(inputs: Inputs, is_short: bool, bare: bool) -> list[Truth]:
    """Compute what is right with the case's positions or without any: all of a short case, or sampled rows."""
    plainly, found = inputs.case.torch_dtype, []
    for run, qkv, parameters, grad, at in _all(inputs) if is_short else _rows(inputs):
        keywords = inputs.keywords(*parameters) | ({"position": NoPosition()} if bare else {})
        both = []
        for dtype in (torch.float64, plainly):
            own = [x.to(dtype).detach().requires_grad_(is_short or x is qkv[0]) for x in qkv]
            out = run(*own, impl="reference", **keywords)
            wanted = [x for x in (*own, *parameters) if x.requires_grad]
            both.append([out.detach(), *torch.autograd.grad(out, wanted, grad.to(dtype))])
        for number, (truth, plain) in enumerate(zip(*both, strict=True)):
            budget = error_budget(truth, plain.to(plainly), _ROUNDINGS)
            found.append(Truth(number, truth, budget, at if number < len(_NAMES) else (..., ..., ...)))
    return found


Sample = tuple[Callable[..., Tensor], Sequence[Tensor], Sequence[Tensor], Tensor, Sequence[Any]]  # and a truth's `at`


def _all(inputs: Inputs) -> Iterator[Sample]:
    valid, indices, every = inputs.layout.valid, inputs.layout.indices, slice(None)
    parameters = [x.detach().requires_grad_(x.requires_grad) for x in inputs.parameters]
    at = (..., (every, valid), (every, indices[valid]))  # without rows of padding
    yield inputs.whole, (inputs.q, inputs.k, inputs.v), parameters, inputs.grad, at


def _rows(inputs: Inputs) -> Iterator[Sample]:
    """Yield a few tokens of a few places, in some heads: of the output and of q's gradient."""
    layout, case = inputs.layout, inputs.case
    n, group, indices = layout.n_local, case.q_heads // case.k_heads, layout.indices.tolist()
    places = dict.fromkeys((0, n // 2 - _ROWS, n // 2, n - _ROWS))
    for number, local in enumerate(place for place in places if place >= 0):
        found = indices[local : local + _ROWS]
        if found[0] < 0 or found != list(range(found[0], found[0] + len(found))):
            continue  # no run of real tokens
        start, stop, first = found[0], found[0] + len(found), 0
        if layout.bounds is not None:
            first = max(bound for bound in layout.bounds if bound < stop)
            local, start = local + max(0, first - start), max(start, first)
        if stop - start < 2:
            continue  # a document's first token alone: q's gradient is 0, and no scale for errors
        head = number % case.k_heads
        heads = slice(head * group, (head + 1) * group)
        # From these tokens to the keys up to them: `causal` ends where the rows end.
        q, grad = (x[:, start:stop, heads] for x in (inputs.q, inputs.grad))
        k, v = (x[:, first:stop, head : head + 1] for x in (inputs.k, inputs.v))
        parameters = [x.detach()[..., heads] for x in inputs.parameters]
        in_whole, in_shard = ((slice(None), slice(at, at + stop - start), heads) for at in (start, local))
        yield attention, (q, k, v), parameters, grad, (in_whole, in_shard, ...)
