"""Plans of eager calls in Triton's interpreter: they give the bits and the strides of calls without a plan."""

from __future__ import annotations

import functools
import math
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from helpers.modes import ON_GPU, needs_kernels
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from triton.runtime.interpreter import InterpretedFunction

from ropewalk import QKNorm, attention
from ropewalk.ops.attention import plans
from ropewalk.ops.attention import tables as tables_module
from ropewalk.ops.attention.backend import AtOnce, UnplannableError
from ropewalk.ops.attention.backends import ORDER
from ropewalk.ops.attention.libraries.sdpa import Sdpa
from ropewalk.ops.attention.triton import plan as plan_module
from ropewalk.ops.attention.triton.bind import load_kernel
from ropewalk.ops.attention.triton.plan import Builder, Plan
from ropewalk.schemes import Alibi, ExpoSB, NoPosition, PositionScheme, ReRope, Rope, T5Bias

pytestmark = needs_kernels
B, T, H, K, D = 2, 18, 2, 1, 16
CALLS = 4  # of one kind: the second makes the plan of the whole call, the rest run by it
Made = tuple[list[Tensor], dict[str, Any]]


@pytest.fixture(autouse=True)
def plan_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plan calls of CPU tensors, and begin and end without plans."""
    monkeypatch.setattr(plans.cache, "on_cpu", True)
    clear()
    yield
    clear()


def clear() -> None:
    plans.FORWARDS.clear()
    plans.CALLS.clear()
    plans.NORMS.clear()


def draw(device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, device=device) for shape in shapes]


def qkv(device: torch.device, *, heads: int = H, tokens: int = T, v_dim: int = D) -> list[Tensor]:
    return draw(device, (B, tokens, heads, D), (B, tokens, K, D), (B, tokens, K, v_dim))


def dense(**keywords: Any) -> Callable[[torch.device], Made]:
    """Return a function that draws q, k and v of layout "bthd", and places keyword tensors on their device."""

    def make(device: torch.device) -> Made:
        placed = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in keywords.items()}
        return qkv(device), {"position": Rope(), **placed}

    return make


def integers(*numbers: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


def in_bhtd(device: torch.device) -> Made:
    return draw(device, (B, 4, T, D), (B, 2, T, D), (B, 2, T, D)), {
        "position": Rope(interleaved=True),
        "layout": "bhtd",
    }


def packed(device: torch.device) -> Made:
    bounds = torch.tensor([0, 7, T], device=device)
    tensors = draw(device, (T, H, D), (T, K, D), (T, K, 24))
    return tensors, {"cu_seqlens_q": bounds, "layout": "thd", "causal": True, "return_lse": True}


def packed_and_rotated(device: torch.device) -> Made:
    tensors, keywords = packed(device)
    return tensors, {**keywords, "position": Rope()}


def of_other_v(device: torch.device) -> Made:
    return qkv(device, v_dim=24), {"position": Alibi(), "causal": True}


def fused(device: torch.device) -> Made:
    return list(torch.randn(B, T, 3, H, D, device=device).unbind(2)), {"position": Rope()}


def expanded(device: torch.device) -> Made:
    q, k, v = draw(device, (B, T, H, D), (1, T, K, D), (1, T, K, D))
    return [q, k.expand(B, -1, -1, -1), v.expand(B, -1, -1, -1)], {"causal": True}


def of_one_token(device: torch.device) -> Made:
    return draw(device, (1, 1, 1, D), (1, 3, 1, D), (1, 3, 1, D)), {"position": Rope()}


def of_one_tensor(device: torch.device) -> Made:
    (x,) = draw(device, (B, T, H, D))
    return [x, x, x], {"position": Rope()}


def with_learned_table(device: torch.device) -> Made:
    table = torch.randn(32, H, device=device, requires_grad=True)
    return qkv(device), {"position": T5Bias(table), "causal": True}


def with_learned_sinks(device: torch.device) -> Made:
    return qkv(device), {"sinks": torch.randn(H, device=device, requires_grad=True), "window": 7, "return_lse": True}


def far(causal: bool) -> Callable[[torch.device], Made]:
    return lambda device: (qkv(device), {"position": ReRope(6), "causal": causal})


def with_positions(layout: str = "bthd", **keywords: Any) -> Callable[[torch.device], Made]:
    """Return a function that draws a call of two batch rows whose tokens have positions of their own."""

    def make(device: torch.device) -> Made:
        generator = torch.Generator().manual_seed(0)
        positions = torch.randint(-500, 100_000, (2, B, T), generator=generator).to(device)
        given = {"positions_q": positions[0], "positions_k": positions[1], "position": Rope(), **keywords}
        if layout == "thd":
            tensors, packing = packed(device)
            return tensors, {**packing, **given, "positions_q": positions[0, 0], "positions_k": positions[1, 1]}
        return qkv(device), given

    return make


def of_one_position(device: torch.device) -> Made:
    positions = torch.randint(0, 100, (1, T), dtype=torch.int32).to(device)
    return qkv(device), {"positions_q": positions, "positions_k": positions, "position": Rope(attention_factor=1.2)}


def packed_over_longer_keys(device: torch.device) -> Made:
    """Sequences with more keys than queries, one of neither, and tokens of none."""
    of_q, of_k = (torch.tensor(bounds, device=device) for bounds in ([0, 5, 5, 9, T - 2], [0, 7, 7, 20, 33]))
    tensors = draw(device, (T, H, D), (36, K, D), (36, K, D))
    return tensors, {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k, "layout": "thd", "position": Rope(), "causal": True}


def with_learned_slopes(device: torch.device) -> Made:
    return qkv(device), {"position": Alibi(torch.rand(B, H, device=device, requires_grad=True)), "causal": True}


def with_learned_bands(**keywords: Any) -> Callable[[torch.device], Made]:
    def make(device: torch.device) -> Made:
        weights = torch.rand(H, device=device, requires_grad=True)
        placed = {name: x.to(device) for name, x in keywords.items()}
        return qkv(device), {"position": ExpoSB(distance_decay=True, band_weights=weights), **placed}

    return make


def with_sinks_of_halves(device: torch.device) -> Made:
    return qkv(device), {"sinks": torch.randn(H, device=device).half().requires_grad_(), "position": Rope()}


# The plan of a kind: of the whole call, of the whole call with so many launches that make rows of tables before it, or
# none.
WHOLE, NONE = 0, -1
MASK = torch.rand(B, 1, T, T, generator=torch.Generator().manual_seed(0)) > 0.4
KINDS: dict[str, tuple[int, Callable[[torch.device], Made]]] = {
    "plain": (WHOLE, lambda device: (qkv(device), {})),
    "rope": (WHOLE, dense()),
    "rope-partial": (WHOLE, dense(position=Rope(rotary_dim=8))),
    "rope-blocks": (WHOLE, dense(position=Rope(pair_block=8))),
    "rope-scaled": (WHOLE, dense(position=Rope(rotary_dim=8, attention_factor=1.2))),
    "lengths-causal": (WHOLE, dense(key_lengths=integers(T, 11), causal=True)),
    "lengths-int64": (WHOLE, dense(key_lengths=integers(T, 11, dtype=torch.int64), window=(5, 2))),
    "no-keys": (WHOLE, dense(key_lengths=integers(0, 1))),
    "gqa-bhtd": (WHOLE, in_bhtd),
    "packed": (WHOLE, packed),
    "packed-rope": (1, packed_and_rotated),
    "packed-rope-of-longer-keys": (2, packed_over_longer_keys),
    "rope-positions": (2, with_positions()),
    "rope-positions-packed": (2, with_positions("thd")),
    "rope-positions-of-queries": (2, with_positions(positions_k=None)),
    "rope-one-position": (1, of_one_position),
    "learned-slopes": (WHOLE, with_learned_slopes),
    "learned-bands": (WHOLE, with_learned_bands()),
    "learned-bands-key-starts": (1, with_learned_bands(key_starts=integers(3, 0))),
    "sinks-of-halves": (WHOLE, with_sinks_of_halves),
    "alibi": (WHOLE, of_other_v),
    "exposb": (WHOLE, dense(position=ExpoSB(distance_decay=True))),
    "learned-table": (WHOLE, with_learned_table),
    "rerope": (WHOLE, far(True)),
    "rerope-full": (WHOLE, far(False)),
    "learned-sinks": (WHOLE, with_learned_sinks),
    "mask": (WHOLE, dense(mask=MASK)),
    "mask-of-two-dimensions": (WHOLE, dense(mask=MASK[0, 0])),
    "softcap": (WHOLE, dense(softcap=3.0, scale=0.5)),
    "return-lse": (WHOLE, dense(return_lse=True, causal=True)),
    "dropout": (WHOLE, dense(dropout_p=0.3)),
    "key-starts": (1, dense(key_starts=integers(3, 0))),
    "key-starts-query-starts": (2, dense(key_starts=integers(3, 0), query_starts=integers(-2, 0), causal=True)),
    "query-starts-keys-rotated": (1, dense(query_starts=integers(-2, 0), keys_rotated=True)),
    "positions": (WHOLE, dense(position=Alibi(), positions_q=torch.arange(T)[None], positions_k=torch.arange(T)[None])),
    "fused": (WHOLE, fused),
    "expanded": (NONE, expanded),
    "one-token": (WHOLE, of_one_token),
    "one-tensor": (WHOLE, of_one_tensor),
}


def train(tensors: list[Tensor], keywords: dict[str, Any], function: Callable[..., Any] = attention) -> list[Tensor]:
    """Return the results of a call, and the gradients of all that requires one."""
    torch.manual_seed(1)
    leaves = [x.detach().requires_grad_() for x in tensors]
    results = function(*leaves, impl="triton", **keywords)
    results = results if isinstance(results, tuple) else (results,)
    loss = sum((x.nan_to_num(neginf=0) * torch.rand_like(x)).sum() for x in results)
    of_scheme = [getattr(keywords.get("position"), name, None) for name in ("table", "slopes", "band_weights")]
    learned = [keywords.get("sinks"), *of_scheme]
    wanted = [*leaves, *(x for x in learned if isinstance(x, Tensor) and x.requires_grad)]
    return [*results, *torch.autograd.grad(loss, wanted)]


def infer(tensors: list[Tensor], keywords: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(1)
    with torch.no_grad():
        results = attention(*tensors, impl="triton", **keywords)
    return list(results) if isinstance(results, tuple) else [results]


def without_plans(function: Callable[..., Any], *arguments: Any) -> Any:
    where = "on_gpu" if ON_GPU else "on_cpu"
    setattr(plans.cache, where, False)
    try:
        return function(*arguments)
    finally:
        setattr(plans.cache, where, True)


def assert_same(mine: list[Tensor], theirs: list[Tensor]) -> None:
    """They have the same bits, shapes, dtypes and strides, but for those of dimensions of one element."""
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert (a.dtype, a.shape, strides_of(a)) == (b.dtype, b.shape, strides_of(b))
        assert torch.equal(a, b)


def strides_of(x: Tensor) -> list[int]:
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def assert_as_without(function: Callable[..., Any], *arguments: Any, calls: int = CALLS) -> None:
    """Each of some calls gives what a call without plans gives."""
    expected = without_plans(function, *arguments)
    for _ in range(calls):
        assert_same(function(*arguments), expected)


def found(cache: plans.Cache) -> list[Any]:
    return [plan for plan in cache.found.values() if plan is not None and plan is not plans.FIXED]


class Runs:
    """Counts the runs of plans, whole calls, and backwards."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans = self.whole = self.backwards = 0
        run, run_at = Plan.run, plans.BackwardPlan.run_at

        def count_run(plan: Any, *arguments: Any) -> Any:
            self.plans += 1
            return run(plan, *arguments)

        def count_whole(kind: type[plans.PlannedCall], name: str) -> Callable[..., Any]:
            inputs_of = getattr(kind, name)

            def count(*arguments: Any) -> Any:
                inputs = inputs_of(*arguments)
                self.whole += inputs is not None
                return inputs

            return count

        def count_backward(plan: Any, *arguments: Any) -> Any:
            self.backwards += 1
            return run_at(plan, *arguments)

        monkeypatch.setattr(Plan, "run", count_run)
        for kind in (plans.PlannedCall, plans.GrowingCall):
            monkeypatch.setattr(kind, "inputs_of", count_whole(kind, "inputs_of"))
        monkeypatch.setattr(plans.MadeCall, "make_inputs", count_whole(plans.MadeCall, "make_inputs"))
        monkeypatch.setattr(plans.BackwardPlan, "run_at", count_backward)

    def of(self, function: Callable[[], Any]) -> tuple[int, int, int]:
        """Return the runs of plans that a function does, of whole calls, and of backwards."""
        before = self.plans, self.whole, self.backwards
        function()
        return self.plans - before[0], self.whole - before[1], self.backwards - before[2]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_gives_the_same_bits_and_strides(device: torch.device, runs: Runs, kind: str) -> None:
    level, make = KINDS[kind]
    tensors, keywords = make(device)
    is_planned = level != NONE
    for function, directions in ((train, 2), (infer, 1)):
        assert_as_without(function, tensors, keywords, calls=2)
        expected = (directions + level) * is_planned, is_planned, (directions - 1) * is_planned
        assert runs.of(lambda function=function: assert_as_without(function, tensors, keywords, calls=1)) == expected
    assert len(found(plans.CALLS)) == 2 * is_planned
    of_rows = kind == "query-starts-keys-rotated"  # its forward without a gradient takes rows that a plan makes
    assert len(found(plans.FORWARDS)) == 2 * is_planned - of_rows


def over_a_cache(device: torch.device, keys: int = 256, **keywords: Any) -> Made:
    lengths = integers(40, 23).to(device)
    bounds = {"key_lengths": lengths, "query_starts": lengths - 1, "causal": True, "keys_rotated": True}
    tensors = draw(device, (B, 1, 4, D), (B, keys, 2, D), (B, keys, 2, D))
    return tensors, {"position": Rope(), **bounds, **keywords}


def over_pages(device: torch.device) -> Made:
    _, keywords = over_a_cache(device)
    table = torch.randperm(2 * 16, dtype=torch.int32).reshape(2, 16).to(device)
    return draw(device, (B, 1, 4, D), (32, 16, 2, D), (32, 16, 2, D)), {**keywords, "block_table": table}


@pytest.mark.parametrize("make", [over_a_cache, over_pages])
def test_decoding(device: torch.device, runs: Runs, make: Callable[..., Made]) -> None:
    tensors, keywords = make(device)
    assert_as_without(infer, tensors, keywords, calls=2)
    for _ in range(2):  # the lengths of a cache grow in place
        keywords["key_lengths"] += 1
        keywords["query_starts"] += 1
        assert runs.of(lambda: assert_as_without(infer, tensors, keywords, calls=1)) == (1, 1, 0)


PACKED_OVER_PAGES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True, "return_lse": True},
    "alibi": {"position": Alibi(), "causal": True, "window": (5, 0)},
    "sinks": {"sinks": torch.randn(H, generator=torch.Generator().manual_seed(0)), "softcap": 2.0},
    "rope": {"position": Rope(), "keys_rotated": True, "causal": True},
    "rope-of-its-frequencies": {"position": Rope(inv_freq=torch.rand(8)), "keys_rotated": True, "causal": True},
    "rope-positions": {"position": Rope(interleaved=True), "keys_rotated": True, "positions_q": True},
    "gate": {"gate": True, "causal": True},
    "learned": {"position": Alibi(torch.linspace(0.1, 0.5, H)), "causal": True},
}


@pytest.mark.parametrize("queries", [(1, 1, 1, 1), (1, 0, 9, 2)], ids=["one", "several"])
@pytest.mark.parametrize("kind", PACKED_OVER_PAGES)
def test_packed_queries_over_pages(device: torch.device, runs: Runs, kind: str, queries: tuple[int, ...]) -> None:
    """As an engine's steps: bounds, lengths and the table are written to in place."""
    keywords = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in PACKED_OVER_PAGES[kind].items()}
    bounds, lengths = integers(0, *queries).cumsum(0, dtype=torch.int32).to(device), integers(9, 21, 30, 40).to(device)
    table = torch.randperm(16, dtype=torch.int32).reshape(4, 4).to(device)
    tensors = draw(device, (int(bounds[-1]) + 1, H, D), (16, 16, K, D), (16, 16, K, D))
    where = {"layout": "thd", "cu_seqlens_q": bounds, "key_lengths": lengths, "block_table": table}
    if kind == "gate":
        keywords["gate"] = torch.randn_like(tensors[0])
    if kind == "rope-positions":
        keywords["positions_q"] = torch.arange(len(tensors[0]), device=device) * 3
    keywords |= where
    assert_as_without(infer, tensors, keywords, calls=2)
    for _ in range(2):
        lengths += 1
        table.copy_(table.flip(0))
        bounds[1:-1] += 1 if queries[2] > 1 else 0
        n_plans = 2 if "rope" in kind else 1  # one makes the rows of queries
        assert runs.of(lambda: assert_as_without(infer, tensors, keywords, calls=1)) == (n_plans, 1, 0)
        (got, *_), (expected, *_) = infer(tensors, keywords), [attention(*tensors, **keywords, impl="reference")]
        expected = expected[0] if isinstance(expected, tuple) else expected
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_packed_queries_over_pages_of_other_kinds(device: torch.device, runs: Runs) -> None:
    """A plan is for one shape of the table and of the pages, dtype of the lengths and the bounds, and alignment."""
    bounds, lengths = integers(0, 1, 2).to(device), integers(9, 21).to(device)
    table = torch.arange(8, dtype=torch.int32).reshape(2, 4).to(device)
    q, k, v = draw(device, (2, H, D), (16, 16, K, D), (16, 16, K, D))
    where = {"layout": "thd", "cu_seqlens_q": bounds, "key_lengths": lengths, "block_table": table, "causal": True}
    assert_as_without(infer, [q, k, v], where, calls=3)
    others: list[tuple[list[Tensor], dict[str, Any]]] = [
        ([q, k, v], where | {"block_table": table[:, :3].contiguous()}),
        ([q, k, v], where | {"block_table": table.long()}),
        ([q, k, v], where | {"block_table": torch.cat((table, table), 1)[:, ::2]}),
        ([q, k, v], where | {"key_lengths": lengths.long()}),
        ([q, k[:8], v[:8]], where),
        ([q, k.view(32, 8, K, D), v.view(32, 8, K, D)], where),
        ([q, k.transpose(1, 2).contiguous().transpose(1, 2), v], where),
        ([q.double(), k.double(), v.double()], where),
        ([q, k, v], where | {"scale": 0.3}),
    ]
    for tensors, keywords in others:
        impl = "reference" if tensors[0].dtype == torch.float64 else "triton"
        call = functools.partial(attention, *tensors, **keywords, impl=impl)
        expected = attention(*tensors, **keywords, impl="reference")
        for _ in range(3):
            torch.testing.assert_close(call(), expected, rtol=1e-4, atol=1e-4)
    unaligned = torch.zeros(9, dtype=torch.int32, device=device)
    unaligned[1:] = table.flatten()
    keywords = where | {"block_table": unaligned[1:].view(2, 4)}
    assert runs.of(lambda: assert_as_without(infer, [q, k, v], keywords, calls=1)) == (0, 0, 0)
    with pytest.raises(ValueError, match="grad"):
        attention(q.clone().requires_grad_(), k, v, **where, impl="triton")


def test_decoding_short_caches(device: torch.device, runs: Runs) -> None:
    tensors, keywords = over_a_cache(device, keys=64)
    assert_as_without(infer, tensors, keywords, calls=2)
    for _ in range(2):
        keywords["key_lengths"] += 1
        keywords["query_starts"] += 1
        assert runs.of(lambda: assert_as_without(infer, tensors, keywords, calls=1)) == (1, 1, 0)


def test_chunks_of_short_prompts(device: torch.device, runs: Runs) -> None:
    """A launch makes the rows of tables, which depend on values on the device."""
    tensors, keywords = over_a_cache(device, keys=64)
    tensors[0] = tensors[0].expand(-1, 2, -1, -1).contiguous()
    assert_as_without(infer, tensors, keywords, calls=2)
    for _ in range(2):
        keywords["key_lengths"] += 1
        keywords["query_starts"] += 1
        assert runs.of(lambda: assert_as_without(infer, tensors, keywords, calls=1)) == (2, 1, 0)


GROWING: dict[str, dict[str, Any]] = {
    "rope": {"position": Rope(), "keys_rotated": True, "causal": True},
    "left-padding": {"key_starts": integers(1, 0), "position": Alibi()},
    "rope-and-left-padding": {"key_starts": integers(1, 0), "position": Rope(), "keys_rotated": True},
    "window": {"window": (40, 0), "causal": True, "return_lse": True},
    "lengths": {"key_lengths": integers(20, 140), "position": Rope(), "keys_rotated": True, "softcap": 2.0},
    "sinks": {"sinks": torch.randn(4, generator=torch.Generator().manual_seed(0))},
    "mask": {"mask": True},
}


@pytest.mark.parametrize("lengths", [(257, 258, 390), (2, 100, 255)], ids=["long", "short"])
@pytest.mark.parametrize(("kind", "layout"), [*zip(GROWING, ["bhtd", "bthd"] * len(GROWING), strict=False)])
def test_decoding_from_a_cache_that_grows(
    device: torch.device, runs: Runs, kind: str, layout: str, lengths: tuple[int, ...]
) -> None:
    """One plan is for all lengths between two powers of two; the numbers of splits follow the length."""
    given = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in GROWING[kind].items()}
    counts = []
    for keys in lengths:
        shapes = [(B, 4, 1, D), *[(B, 2, keys, D)] * 2] if layout == "bhtd" else [(B, 1, 4, D), *[(B, keys, 2, D)] * 2]
        tensors, keywords = draw(device, *shapes), {**given, "layout": layout}
        if kind == "mask":
            mask = torch.rand(B, 1, 1, keys, generator=torch.Generator().manual_seed(keys)) > 0.4
            keywords["mask"] = mask.to(device)
        if kind == "lengths":
            keywords["key_lengths"] = (keywords["key_lengths"] * keys) // 200
        counts.append(runs.of(functools.partial(assert_as_without, infer, tensors, keywords, calls=1)))
        expected, got = (attention(*tensors, **keywords, impl=impl) for impl in ("reference", "triton"))
        first = [x[0] if isinstance(x, tuple) else x for x in (got, expected)]
        torch.testing.assert_close(*first, rtol=1e-4, atol=1e-4)
    assert counts == [(0, 0, 0), (1, 1, 0), (1, 1, 0)]
    assert len(found(plans.CALLS)) == 1


def test_rules_of_choice_are_by_powers_of_two() -> None:
    """A plan of caches of all lengths between two of them is for one backend."""
    for rules in ORDER.values():
        for rule in rules:
            for limit in (rule.tokens, rule.below):
                assert limit in (0, math.inf) or 256 <= limit == 1 << (int(limit).bit_length() - 1)


# === what differs from the call that made a plan ===


def frequencies() -> Tensor:
    return torch.tensor([1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001])


@pytest.mark.parametrize("through", ["in place", "data", "numpy"])
def test_frequencies_that_are_written(device: torch.device, through: str) -> None:
    position = Rope(inv_freq=frequencies())
    tensors = qkv(device)
    assert_as_without(infer, tensors, {"position": position}, calls=3)
    before = infer(tensors, {"position": position})
    inv_freq = position.inv_freq
    assert isinstance(inv_freq, Tensor)
    if through == "in place":
        inv_freq.mul_(3)
    elif through == "data":
        inv_freq.data.mul_(3)
    else:
        inv_freq.numpy()[:] *= 3
    expected = without_plans(infer, tensors, {"position": Rope(inv_freq=frequencies() * 3)})
    assert_same(infer(tensors, {"position": position}), expected)
    assert not torch.equal(expected[0], before[0])


def test_lengths_and_sinks_that_are_written(device: torch.device) -> None:
    tensors, (lengths, sinks) = qkv(device), (integers(T, 4).to(device), torch.randn(H, device=device))
    keywords = {"key_lengths": lengths, "sinks": sinks}
    assert_as_without(infer, tensors, keywords, calls=3)
    lengths.copy_(integers(3, T))
    sinks.data.add_(1)
    assert len(found(plans.CALLS)) == 1
    assert_as_without(infer, tensors, keywords, calls=1)


def test_a_learned_table_that_an_optimiser_steps(device: torch.device) -> None:
    tensors, keywords = with_learned_table(device)
    table = keywords["position"].table
    optimiser = torch.optim.SGD([table], lr=10.0)
    before = train(tensors, keywords)
    for _ in range(3):
        assert_as_without(train, tensors, keywords, calls=1)
        table.grad = torch.ones_like(table) * torch.arange(32, device=device)[:, None]
        optimiser.step()
    assert not torch.equal(train(tensors, keywords)[0], before[0])


@pytest.mark.parametrize("kind", ["rope-positions", "packed-rope", "key-starts", "learned-slopes", "sinks-of-halves"])
def test_values_that_a_call_reads_are_written(device: torch.device, runs: Runs, kind: str) -> None:
    """Positions, bounds, starts, slopes and sinks: a plan follows what lies at their addresses."""
    tensors, keywords = KINDS[kind][1](device)
    assert_as_without(train, tensors, keywords, calls=3)
    before = train(tensors, keywords)
    names = ("positions_q", "cu_seqlens_q", "key_starts", "sinks")
    written = [*(keywords.get(name) for name in names), getattr(keywords["position"], "slopes", None)]
    for x in written:
        if x is not None:
            x.data[1:2] += 2  # raises no version
    expected = without_plans(train, tensors, keywords)
    n_whole = runs.of(lambda: assert_same(train(tensors, keywords), expected))[1]
    assert n_whole == 1
    assert not torch.equal(before[0], expected[0])


@pytest.mark.parametrize("position", ["index", "given"])
def test_frequencies_that_are_read_in_each_call(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, runs: Runs, position: str
) -> None:
    """Those on a GPU; here, values on a CPU stand for them."""
    monkeypatch.setattr(tables_module, "_is_readable", lambda x: False)
    inv_freq = frequencies().to(device)
    keywords: dict[str, Any] = {"position": Rope(inv_freq=inv_freq, attention_factor=1.5)}
    if position == "given":
        keywords["positions_q"] = keywords["positions_k"] = torch.randint(0, 1000, (B, T), device=device)
    tensors = qkv(device)
    assert_as_without(train, tensors, keywords, calls=3)
    before = train(tensors, keywords)
    inv_freq.data.mul_(3)
    assert runs.of(lambda: assert_as_without(train, tensors, keywords, calls=1))[:2] == (3, 1)
    other = {**keywords, "position": Rope(inv_freq=inv_freq * 2, attention_factor=1.5)}
    assert_as_without(train, tensors, other, calls=1)
    assert not torch.equal(before[0], train(tensors, keywords)[0])
    assert len(found(plans.CALLS)) == 1


def test_slopes_are_learned_and_frozen_in_turns(device: torch.device) -> None:
    tensors, keywords = with_learned_slopes(device)
    slopes = keywords["position"].slopes
    for learns in (True, False) * 3:
        slopes.requires_grad_(learns)
        assert_as_without(train, tensors, keywords, calls=1)
        q, k, v = tensors
        assert attention(q, k, v, impl="triton", **keywords).requires_grad == learns
    assert len(found(plans.CALLS)) >= 2


def test_other_schemes_that_learn_are_resolved_anew(device: torch.device) -> None:
    """No key knows whether another package's scheme has tensors that decide more than numbers."""

    class Slopes(Alibi):
        pass

    slopes = torch.rand(H, device=device, requires_grad=True)
    assert_as_without(train, qkv(device), {"position": Slopes(slopes)})
    assert not found(plans.CALLS)


# === a norm beside a rotation ===


def train_with_norm(device: torch.device, norm: QKNorm, layout: str, **keywords: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = {"bthd": (B, T, H, D), "bhtd": (B, H, T, D), "thd": (T, H, D)}[layout]
    leaves = [torch.randn(shape, generator=generator).to(device).requires_grad_() for _ in range(3)]
    out = attention(*leaves, norm=norm, layout=layout, **keywords)
    weights = [x for x in (norm.q_weight, norm.k_weight) if x is not None and x.requires_grad]
    return [out, *torch.autograd.grad((out * torch.linspace(0, 1, D, device=device)).sum(), [*leaves, *weights])]


NORMED: dict[str, dict[str, Any]] = {
    "bthd": {"layout": "bthd", "causal": True, "position": Rope()},
    "bhtd-partial": {"layout": "bhtd", "position": Rope(rotary_dim=8), "key_lengths": integers(T, 11)},
    "packed": {"layout": "thd", "cu_seqlens_q": integers(0, 7, T), "position": Rope()},
    "key-starts": {"layout": "bthd", "key_starts": integers(3, 0), "position": Rope(interleaved=True)},
    "positions": {"layout": "bthd", "position": Rope(), "positions_q": torch.arange(2 * T).reshape(B, T)},
}


@pytest.mark.parametrize("kind", NORMED)
def test_a_norm_beside_a_rotation(device: torch.device, kind: str) -> None:
    after = kind == "bhtd-partial"
    given = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in NORMED[kind].items()}
    norm = QKNorm(*(torch.rand(D, device=device, requires_grad=True) for _ in range(2)), after=after)

    def train() -> list[Tensor]:
        return train_with_norm(device, norm, **given, impl="triton")

    assert_as_without(train, calls=5)
    assert len(found(plans.NORMS)) == len(found(plans.CALLS)) == 1
    before = train()
    for weight in (norm.q_weight, norm.k_weight):
        assert weight is not None
        weight.data.mul_(2)
    assert_as_without(train, calls=1)
    assert not torch.equal(train()[0], before[0])
    assert len(found(plans.NORMS)) == 1


def test_a_norm_by_a_library_and_by_autocast(device: torch.device) -> None:
    norm = QKNorm(torch.rand(D, device=device, requires_grad=True))

    def train() -> list[Tensor]:
        made = train_with_norm(device, norm, "bthd", position=Rope(), impl="reference")
        with torch.autocast(device.type, torch.float16):
            return made + train_with_norm(device, norm, "bthd", position=Rope(), impl="triton")

    assert_as_without(train, calls=5)
    assert len(found(plans.NORMS)) == 2


def test_norms_that_are_refused_stay_refused(device: torch.device) -> None:
    right, wrong = (QKNorm(torch.rand(width, device=device)) for width in (D, D + 1))
    for _ in range(3):
        train_with_norm(device, right, "bthd", position=Rope(), impl="triton")
    for _ in range(3):
        with pytest.raises(ValueError, match=r"norm\.q_weight has shape"):
            train_with_norm(device, wrong, "bthd", position=Rope(), impl="triton")
    with pytest.raises(ValueError, match="norm was passed with keys_rotated"):
        train_with_norm(device, right, "bthd", position=Rope(), impl="triton", keys_rotated=True)


def test_memory_that_is_used_again(device: torch.device) -> None:
    memory = torch.randn(3, B, T, H, D, device=device)
    for _ in range(3):  # at each round other values lie at the addresses
        tensors = [torch.empty(0, device=device).set_(x.untyped_storage(), x.storage_offset(), x.shape) for x in memory]
        assert_as_without(train, tensors, {"position": Rope()}, calls=2)
        memory.normal_()
    assert len(found(plans.CALLS)) == 1


def test_requires_grad_is_switched(device: torch.device, runs: Runs) -> None:
    q, k, v = qkv(device)
    calls = [(True, False, False), (False, True, False), (False, False, True), (False, False, False)]
    for _ in range(3):
        for wanted in calls:
            leaves = [x.detach().requires_grad_(wants) for x, wants in zip((q, k, v), wanted, strict=True)]
            out = attention(*leaves, impl="triton", causal=True)
            assert out.requires_grad == any(wanted)
            if out.requires_grad:
                out.backward(torch.ones_like(out))
            expected = without_plans(train_sum, [q, k, v], {"causal": True})
            assert torch.equal(out, expected[0])
            for x, wants, grad in zip(leaves, wanted, expected[1:], strict=True):
                assert torch.equal(x.grad, grad) if wants else x.grad is None
    assert len(found(plans.CALLS)) == len(calls)


def train_sum(tensors: list[Tensor], keywords: dict[str, Any]) -> list[Tensor]:
    """Differentiate a sum, whose gradient is expanded."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = attention(*leaves, impl="triton", **keywords)
    return [out, *torch.autograd.grad(out.sum(), leaves)]


@pytest.mark.slow
def test_autocast_is_nested(device: torch.device) -> None:
    tensors = qkv(device)

    def nested(tensors: list[Tensor], keywords: dict[str, Any]) -> list[Tensor]:
        every = train(tensors, keywords)
        with torch.autocast(device.type, torch.float16):
            every += train(tensors, keywords)
            with torch.autocast(device.type, enabled=False):
                every += train(tensors, keywords)
        return every

    assert_as_without(nested, tensors, {"position": Rope()})
    assert {x.dtype for x in nested(tensors, {})} == {torch.float16, torch.float32}


@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "key_lengths"])
def test_misaligned_tensors_run_without_the_plan(device: torch.device, runs: Runs, which: int) -> None:
    *tensors, lengths = *qkv(device), integers(T, 11).to(device)
    assert_as_without(train, tensors, {"key_lengths": lengths}, calls=3)
    every = [*tensors, lengths]
    x = every[which]
    every[which] = torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
    assert every[which].data_ptr() % 16
    *tensors, lengths = every
    counts = runs.of(lambda: assert_as_without(train, tensors, {"key_lengths": lengths}, calls=2))
    assert counts == (0, 0, 0)


# === the backward ===


@pytest.mark.parametrize("position", [None, Rope()], ids=["none", "rope"])
def test_gradients_of_every_layout(device: torch.device, runs: Runs, position: Rope | None) -> None:
    """Gradients that are expanded, transposed or misaligned."""
    tensors, keywords = qkv(device), {} if position is None else {"position": position}
    dense = torch.randn(B, T, H, D, device=device)
    misaligned = torch.cat((dense.new_zeros(1), dense.flatten()))[1:].view(dense.shape)
    gradients = {
        "dense": (dense, 1),
        "expanded": (dense[:1, :1, :1, :1].expand_as(dense), 1),
        "transposed": (dense.transpose(1, 2).contiguous().transpose(1, 2), 1),
        "of a longer one": (torch.cat((dense, dense), 1)[:, :T], 1),
        "misaligned": (misaligned, 0),
    }
    for name, (grad, n_planned) in gradients.items():

        def backward(grad: Tensor = grad) -> list[Tensor]:
            leaves = [x.detach().requires_grad_() for x in tensors]
            return list(torch.autograd.grad(attention(*leaves, impl="triton", **keywords), leaves, grad))

        assert_as_without(backward, calls=2)
        assert runs.of(backward)[2] == n_planned, name


def test_the_gradient_of_the_log_sum_exp_alone(device: torch.device) -> None:
    tensors = qkv(device)

    def backward() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        _, lse = attention(*leaves, impl="triton", return_lse=True)
        grads = torch.autograd.grad(lse, leaves, torch.ones_like(lse), allow_unused=True)
        assert grads[2] is None
        return list(grads[:2])

    assert_as_without(backward)


def test_a_second_derivative_is_refused_as_without_a_plan(device: torch.device) -> None:
    tensors = qkv(device)

    def differentiate_twice() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = attention(*leaves, impl="triton", causal=True)
        grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiable once"):
            grads[0].sum().backward()
        return [out, *grads]

    assert_as_without(differentiate_twice)


def test_a_graph_is_retained_and_freed(device: torch.device) -> None:
    leaves = [x.requires_grad_() for x in qkv(device)]
    for _ in range(CALLS):
        out = attention(*leaves, impl="triton")
        first, second = (torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=x) for x in (True, False))
        assert_same(list(first), list(second))
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(out, leaves, torch.ones_like(out))


@pytest.mark.parametrize("n_earlier", [0, 1, 3])  # with 1, a plan would first run as a checkpoint recomputes
def test_checkpoints_and_hooks_of_saved_tensors(device: torch.device, n_earlier: int) -> None:
    tensors, keywords = qkv(device), {"position": Rope(), "key_lengths": integers(T, 5).to(device)}
    n_packed = 0

    def note(x: Tensor) -> Tensor:
        nonlocal n_packed
        n_packed += 1
        return x

    def hooked(*tensors: Tensor, **keywords: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            return attention(*tensors, **keywords)

    def checkpointed(*tensors: Tensor, **keywords: Any) -> Any:
        return checkpoint(attention, *tensors, use_reentrant=False, **keywords)

    expected = without_plans(train, tensors, keywords)
    for _ in range(n_earlier):
        train(tensors, keywords)
    for function in (checkpointed, hooked):
        for _ in range(3):
            assert_same(train(tensors, keywords, function), expected)
    assert n_packed >= 3 * 5


@pytest.mark.parametrize("written", ["out", "v", "key_lengths"])
def test_writes_before_the_backward_are_told(device: torch.device, written: str) -> None:
    lengths = integers(T, 5).to(device)
    for _ in range(CALLS):
        q, k, v = leaves = [x.requires_grad_() for x in qkv(device)]
        others = [x * 1 for x in leaves]
        out = attention(*others, impl="triton", key_lengths=lengths)
        {"out": out, "v": others[2], "key_lengths": lengths}[written].mul_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out.sum(), (q, k, v))
    assert len(found(plans.CALLS)) == 1


# === what follows or transforms calls ===


@pytest.fixture
def planned(device: torch.device) -> list[Tensor]:
    """Tensors of a kind of call, causal, that has its plans."""
    tensors = qkv(device)
    for _ in range(3):
        train(tensors, {"causal": True})
        infer(tensors, {"causal": True})
    assert len(found(plans.CALLS)) == 2
    return tensors


class Operators(TorchDispatchMode):
    """Notes the operators that a call dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def test_dispatch_modes_follow_the_operator(planned: list[Tensor]) -> None:
    expected = without_plans(train, planned, {"causal": True})
    with Operators() as mode:
        assert_same(train(planned, {"causal": True}), expected)
    assert {"ropewalk::attend", "ropewalk::attend_backward"} <= set(mode.names)


def test_torch_func(planned: list[Tensor]) -> None:
    q, k, v = planned

    def loss(q: Tensor) -> Tensor:
        return attention(q, k, v, causal=True).square().sum()

    leaf = q.detach().requires_grad_()
    out = attention(leaf, k, v, causal=True, impl="reference").square().sum()
    torch.testing.assert_close(torch.func.grad(loss)(q), torch.autograd.grad(out, leaf)[0])
    stacked = torch.stack((q, q + 1))
    expected = torch.stack([loss(x) for x in stacked])
    torch.testing.assert_close(torch.func.vmap(loss)(stacked), expected)
    _, tangent = torch.func.jvp(loss, (q,), (torch.ones_like(q),))
    torch.testing.assert_close(tangent, torch.func.grad(loss)(q).sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_torch_compile(planned: list[Tensor]) -> None:
    expected = without_plans(train, planned, {"causal": True})
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    for _ in range(2):
        assert_same(train(planned, {"causal": True}, compiled), expected)


def one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that one thread enters at a time, as Triton's interpreter needs it."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        with INTERPRETER:
            return function(*arguments, **keywords)

    return call


INTERPRETER = threading.Lock()


def test_a_kernel_that_another_thread_is_loading() -> None:
    class Loading:
        run, function = "the launcher", None

        def _init_handles(self) -> None:
            self.function = 7

    kernel = Loading()
    assert (load_kernel(kernel), kernel.function) == ("the launcher", 7)


def test_threads(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterpretedFunction, "run", one_at_a_time(InterpretedFunction.run))
    kinds = [KINDS[name][1](device) for name in ("plain", "lengths-causal", "alibi", "softcap")]
    expected = [without_plans(infer, *kind) for kind in kinds]
    right: list[bool] = []

    def attend(index: int) -> None:
        for turn in range(2 * len(kinds)):
            chosen = (index + turn) % len(kinds)
            right.append(all(map(torch.equal, infer(*kinds[chosen]), expected[chosen])))

    threads = [threading.Thread(target=attend, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 8 * len(kinds)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda x: {"key_lengths": x["key_lengths"].float()}, TypeError),
        (lambda x: {"key_lengths": x["key_lengths"][:1]}, ValueError),
        (lambda x: {"key_lengths": [T, 5]}, TypeError),
        (lambda x: {"position": "rope"}, TypeError),
        (lambda x: {"layout": "tbhd"}, ValueError),
        (lambda x: {"v": x["v"].half()}, TypeError),
        (lambda x: {"v": x["v"][:, 1:]}, ValueError),
        (lambda x: {"q": x["q"].tolist()}, TypeError),
        (lambda x: {"q": x["q"].to_sparse()}, TypeError),
        (lambda x: {"mask": torch.ones(T, T + 1, dtype=torch.bool)}, ValueError),
        (lambda x: {"window": 0}, ValueError),
        (lambda x: {"dropout_p": 1.0}, ValueError),
        (lambda x: {"deterministic": 1}, TypeError),
        (lambda x: {"impl": "fast"}, ValueError),
    ],
)
def test_what_is_refused_stays_refused(device: torch.device, wrong: Any, error: type[Exception]) -> None:
    q, k, v = qkv(device)
    right = {"q": q, "k": k, "v": v, "position": Rope(), "key_lengths": integers(T, 5).to(device), "impl": "triton"}
    bad = {**right, **wrong(right)}
    with pytest.raises(error) as without:
        without_plans(lambda: attention(**bad))
    for _ in range(3):
        attention(**right)
    assert len(found(plans.CALLS)) == 1
    for _ in range(3):
        with pytest.raises(error) as again:
            attention(**bad)
        assert str(again.value) == str(without.value)


@pytest.mark.parametrize("position", [NoPosition(), Rope()])
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_a_library_is_found_again(device: torch.device, position: PositionScheme, layout: str) -> None:
    dtype = torch.float16 if device.type == "cuda" else torch.float32  # what cuDNN runs
    shape = (B, T, H, D) if layout == "bthd" else (B, H, T, D)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

    def train() -> list[Tensor]:
        out = attention(q, k, v, position=position, layout=layout, causal=True, impl="sdpa")
        return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]

    expected = without_plans(train)
    for _ in range(CALLS):
        made = train()
    assert isinstance(next(iter(plans.CALLS.found.values())), plans.LibraryCall)
    for x, y in zip(made, expected, strict=True):
        assert x.stride() == y.stride()
        # On a GPU cuDNN's gradients differ from run to run; on a CPU a planned rotation is the interpreter's.
        tolerance = 1e-2 if device.type == "cuda" else 0.0 if type(position) is NoPosition else 1e-5
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(ON_GPU, reason="the operator here stands for cuDNN's")
def test_a_rotation_before_a_library_takes_plans(
    device: torch.device, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (torch.randn(B, T, H, D, requires_grad=True) for _ in range(3))
    monkeypatch.setattr(Sdpa, "bind", lambda backend, call: lambda q, k, v: q * q * k + k * v)

    def call() -> Tensor:
        out: Tensor = attention(q, k, v, position=Rope(interleaved=False), impl="sdpa")
        return out

    for _ in range(3):
        call()
    angles = torch.outer(torch.arange(T), 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D))

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    turned = rotate(exact[0]), rotate(exact[1])
    expected = turned[0] * turned[0] * turned[1] + turned[1] * exact[2]
    torch.testing.assert_close(call().double(), expected, rtol=1e-5, atol=1e-5)
    expanded = torch.ones(()).expand(expected.shape)  # gradients of other strides take plans of their own
    for grad_out in (torch.randn(B, T, H, D), torch.randn(B, H, T, D).transpose(1, 2), expanded):
        found_grads = torch.autograd.grad(call(), (q, k, v), grad_out)
        expected_grads = torch.autograd.grad(expected, exact, grad_out.double(), retain_graph=True)
        for x, y in zip(found_grads, expected_grads, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)
    assert runs.of(call)[0] == 1
    assert runs.of(lambda: torch.autograd.grad(call(), (q, k, v), torch.ones(B, T, H, D)))[0] == 2

    # It is linear: its backward is differentiated by the rotation itself.
    (grad_q,) = torch.autograd.grad(call().sum(), q, create_graph=True)
    (again,) = torch.autograd.grad(grad_q.square().sum(), k)
    (exact_grad,) = torch.autograd.grad(expected.sum(), exact[0], create_graph=True)
    (exact_again,) = torch.autograd.grad(exact_grad.square().sum(), exact[1])
    torch.testing.assert_close(again.double(), exact_again, rtol=1e-3, atol=1e-3)

    k.requires_grad_(False)  # a kind of its own
    for _ in range(3):
        out = call()
    (alone,) = torch.autograd.grad(out.sum(), q)
    (exact_alone,) = torch.autograd.grad(expected.sum(), exact[0])
    torch.testing.assert_close(alone.double(), exact_alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("impl", ["triton", *([] if ON_GPU else ["sdpa"])])
def test_a_tensor_that_outlived_its_transform_runs_without_a_plan(device: torch.device, impl: str) -> None:
    q, k, v = (x.requires_grad_() for x in draw(device, *[(B, T, H, D)] * 3))
    leaked = []

    def leak(x: Tensor) -> Tensor:
        leaked.append(x)
        return x.sum()

    torch.func.grad(leak)(q.detach())
    with pytest.raises(RuntimeError, match="storage"):
        leaked[0].data_ptr()
    for _ in range(CALLS):
        expected = attention(q, k, v, impl=impl)
    for _ in range(CALLS):
        assert torch.equal(attention(leaked[0], k, v, impl=impl), expected)


# === bounds ===


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"window": 1}, {"window": True}),
        ({"window": 5}, {"window": 5.0}),
        ({"window": (1, 0)}, {"window": (True, 0)}),
        ({"softcap": 1.0}, {"softcap": True}),
    ],
)
def test_equal_numbers_of_another_type_are_another_kind(
    device: torch.device, right: dict[str, Any], wrong: dict[str, Any]
) -> None:
    q, k, v = qkv(device)
    for _ in range(3):
        attention(q, k, v, **right, impl="triton")
    with pytest.raises(ValueError, match=next(iter(wrong))):
        attention(q, k, v, **wrong, impl="triton")


def test_a_cache_is_bounded() -> None:
    cache, rng = plans.Cache(), random.Random(0)
    most_plans = most_seen = made = 0
    for _ in range(10_000):
        key = (rng.randrange(1, 4000), 16, "triton")
        n_made = made

        def make() -> object:
            nonlocal made
            made += 1
            return object()

        plan = cache.find(key, make)
        assert (made > n_made) <= (plan is not None)
        most_plans, most_seen = max(most_plans, len(cache.found)), max(most_seen, len(cache.seen))
    assert made > plans.cache.MAX_PLANS
    assert most_plans == plans.cache.MAX_PLANS
    for number in range(9 * plans.cache.MAX_PLANS):
        assert cache.find(("new", number), make) is None
        most_seen = max(most_seen, len(cache.seen))
    assert most_seen == 8 * plans.cache.MAX_PLANS


def launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "_launch_kernel", lambda *arguments: None)
    monkeypatch.setattr(AtOnce, "launch", lambda *arguments, **keywords: None)


def test_calls_of_random_shapes_are_bounded(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans.cache, "MAX_PLANS", 4)
    launch_nothing(monkeypatch)
    rng = random.Random(0)
    for _ in range(300):
        tokens = rng.randrange(1, 12)
        leaf = torch.randn(1, tokens, 1, D, device=device, requires_grad=True)
        attention(leaf, leaf, leaf, impl="triton").sum().backward()
        for cache in (plans.CALLS, plans.FORWARDS):
            assert len(cache.found) <= 4
            assert len(cache.seen) <= 32


def test_backwards_of_random_strides_are_bounded(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_nothing(monkeypatch)
    for tokens in range(4, 104):
        leaf = torch.randn(2, 4, 1, D, device=device, requires_grad=True)
        out = attention(leaf, leaf, leaf, impl="triton")
        torch.autograd.grad(out, leaf, torch.ones(2, tokens, 1, D, device=device)[:, :4])
    for plan in (*found(plans.CALLS), *found(plans.FORWARDS)):
        assert 0 < len(plan.backwards) <= plans.cache.MAX_BACKWARDS


# === the builder ===


def builder_and_input() -> tuple[Builder, Tensor]:
    builder = Builder(torch.device("cpu"))
    twin = builder.input(torch.zeros(4, 8))
    assert twin is not None
    return builder, twin


@pytest.mark.parametrize(
    "step",
    [lambda x: x.mul_(2), lambda x: x + 1, lambda x: x.clone(), lambda x: x.t().contiguous(), lambda x: x.zero_()],
    ids=["write", "compute", "clone", "copy", "fill"],
)
def test_a_launcher_that_computes_has_no_plan(step: Callable[[Tensor], Any]) -> None:
    builder, twin = builder_and_input()
    with pytest.raises(UnplannableError, match="neither an allocation nor a view"):
        builder.follow(lambda x, on: step(x), twin)


def test_views_and_allocations_are_followed() -> None:
    builder, twin = builder_and_input()

    def launcher(x: Tensor, on: Builder) -> Tensor:
        out, scratch = torch.empty_like(x), x.new_empty(3, 5)
        on.operate(torch.Tensor.copy_, scratch[:, :4], x[1:, 4:])
        on.operate(torch.Tensor.copy_, out[1:, :4], scratch[:, :4])
        on.operate(torch.Tensor.zero_, out[:1])
        on.operate(torch.Tensor.zero_, out[1:, 4:])
        return out

    plan = builder.finish([builder.follow(launcher, twin)])
    x = torch.randn(4, 8)
    (out, workspace) = plan.run([x], [x.data_ptr()], plan.results)
    expected = torch.zeros(4, 8)
    expected[1:, :4] = x[1:, 4:]
    assert torch.equal(out, expected)
    assert workspace.numel() == plan.workspace == 256
    assert (builder.slot_of(twin), builder.address_of(twin[1:, 4:])) == (0, (0, 4 * (8 + 4)))


def test_two_tensors_in_the_workspace_lie_apart() -> None:
    builder, _ = builder_and_input()
    first, second = torch.empty(65, device="meta"), torch.empty(1, device="meta")
    builder.finish([])
    assert builder.address_of(first) == (1, 0)
    assert builder.address_of(second) == (1, 512)
    assert builder.workspace == 512 + 256


def test_a_misaligned_view_has_no_plan() -> None:
    builder, twin = builder_and_input()
    assert builder.address_of(twin[:, 4:]) == (0, 16)
    with pytest.raises(UnplannableError, match="a view is misaligned"):
        builder.address_of(twin[:, 1:])


def test_a_result_has_memory_of_its_own() -> None:
    builder, twin = builder_and_input()
    with pytest.raises(UnplannableError, match="a result is an input"):
        builder.finish([twin[1:]])
