"""Calls of each operation and kind: planned, they have the bits of calls without a plan, and no plan is another's."""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import math
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.kinds import without_plans
from helpers.modes import ON_GPU, needs_kernels, on_gpu
from torch import Tensor
from torch.autograd import forward_ad

pytest.importorskip("triton")
from helpers.kinds import kinds_of
from products import calls, compare, sequences
from products.sequences import CHANGES, ROWS, TINY, Step, World, on_device, replay
from products.table import NEUTRAL
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from triton.runtime.interpreter import InterpretedFunction

from ropewalk import BlockLists, QKNorm, append_kv, apply_rope, attention
from ropewalk.ops.attention.backends import ORDER
from ropewalk.ops.attention.gate.operation import apply_gate
from ropewalk.ops.attention.plans import find, norms
from ropewalk.ops.attention.triton import launch_common
from ropewalk.ops.launch import kinds, remembered
from ropewalk.ops.launch import plan as plan_module
from ropewalk.ops.launch.kinds import KINDS, Cache
from ropewalk.ops.launch.plan import Plan
from ropewalk.ops.launch.steps import AtOnce
from ropewalk.ops.rope.api import normalize
from ropewalk.ops.rope.call import RopeCall, RopeFlags
from ropewalk.ops.rope.repeat import Repeater
from ropewalk.schemes import Alibi, NoPosition, Rope, T5Bias

pytestmark = needs_kernels
B, T, H, K, D = 2, 12, 4, 2, 16
IMPLS = ["triton", *(["gluon", None] if ON_GPU else [])]
N_CALLS = 4  # of one kind: its plan is made at the second one, and found by a matcher from the third one on
Results = list[Tensor]
Run = Callable[[torch.device], Results]


@pytest.fixture(autouse=True)
def plan_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plan calls of CPU tensors, and begin and end without plans."""
    monkeypatch.setattr(kinds, "on_cpu", True)
    KINDS.clear()
    yield
    KINDS.clear()


def draw(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def integers(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def placed(keywords: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in keywords.items()}


def as_list(results: Any) -> Results:
    return [x for x in (results if isinstance(results, tuple) else (results,)) if x is not None]


# === calls ===


def attend(impl: str = "triton", **features: str) -> Run:
    """Return the function that runs a row of the products' table, and differentiates."""

    def run(device: torch.device) -> Results:
        row = on_device({**NEUTRAL, **features}, device)
        row["heads"] = sequences._FEW_HEADS[row["heads"]]
        return list(compare.attend_by(calls.build(row, 7, device, TINY), impl).values())

    return run


def rotate(
    layout: str = "bthd", heads: tuple[int, int | None] = (H, K), tables: tuple[int, ...] = (T + 3, D // 4),
    change: Callable[[Tensor], Tensor] = lambda x: x, learned: bool = False, trains: bool = True, **keywords: Any,
) -> Run:  # fmt: skip
    """Return the function that rotates, and differentiates."""

    def run(device: torch.device) -> Results:
        shape = {"bthd": (B, T, 0, D), "bhtd": (B, 0, T, D), "thd": (T, 0, D)}[layout]
        xs = [draw(*[size or n for size in shape], device=device, seed=i) for i, n in enumerate(heads) if n]
        leaves = [change(x).detach().requires_grad_(trains) for x in xs]
        cos, sin = (draw(*tables, device=device, seed=i).requires_grad_(learned) for i in (5, 6))
        given = placed(keywords, device)
        flags = given.pop("norm", {})
        if width := given.pop("weights", None):
            weights = [draw(*width, device=device, seed=i).requires_grad_() for i in (7, 8)]
            given["norm"] = QKNorm(*weights, **flags)
            leaves += weights
        inputs = [x.clone() for x in leaves[: len(xs)]] if given.get("inplace") else leaves[: len(xs)]
        sin = cos if given.pop("one_table", False) else sin
        outs = as_list(apply_rope(*inputs, *[None] * (2 - len(xs)), cos, sin, layout=layout, impl="triton", **given))
        if not trains:
            return outs
        leaves += [cos, sin] if learned else []
        grads = [draw(*x.shape, device=device, seed=9 + i) for i, x in enumerate(outs)]
        return [*outs, *torch.autograd.grad(outs, leaves, grads)]

    return run


def norm_alone(device: torch.device) -> Results:
    q, k = (draw(B, T, n, D, device=device) for n in (H, K))
    return list(normalize((q, k), QKNorm(draw(D, device=device), draw(D, device=device)), "bthd", "triton"))


def rotate_pages(device: torch.device) -> Results:
    pages, cos, sin = draw(6, 4, K, D, device=device), *(draw(9, D // 2, device=device, seed=i) for i in (1, 2))
    table = torch.tensor([[2, 0], [5, -1]], dtype=torch.int32, device=device)
    return as_list(apply_rope(pages, None, cos, sin, block_table=table, inplace=True, impl="triton"))


def append(change: Callable[[dict[str, Any]], dict[str, Any]] = lambda call: {}, **keywords: Any) -> Run:
    """Return the function that appends to pages. change: what a call has instead, by names."""

    def run(device: torch.device) -> Results:
        k, v, q = (draw(3, K, D, device=device, seed=seed) for seed in range(3))
        caches = {name: torch.zeros(2, 4, K, D, device=device) for name in ("k_cache", "v_cache")}
        cos, sin = (draw(T, D // 4, device=device, seed=seed) for seed in (5, 6))
        slots = torch.tensor((1, 2, 6), device=device)
        call = {"k": k, "v": v, "q": q, "slots": slots, "cos": cos, "sin": sin, **caches, **placed(keywords, device)}
        call |= change(call)
        return [*as_list(append_kv(**call, impl="triton")), *(call[name].view(torch.uint8) for name in caches)]

    return run


def quantized(*shape: int) -> Callable[[Any], dict[str, Any]]:
    def change(call: Any) -> dict[str, Any]:
        pages = [torch.zeros_like(call["k_cache"], dtype=torch.float8_e4m3fn) for _ in range(2)]
        scales = [torch.full(shape, 0.5, device=call["k"].device)] * 2  # one tensor, for both
        return dict(zip(("k_cache", "v_cache", "k_scale", "v_scale"), (*pages, *scales), strict=True))

    return change


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def gate(*wanted: bool) -> Run:
    def run(device: torch.device) -> Results:
        tensors = [draw(B, T, H, D, device=device), draw(B, T, H, 2 * D, device=device, seed=1)[..., :D]]
        leaves = [x.detach().requires_grad_(wants) for x, wants in zip(tensors, wanted, strict=True)]
        out = apply_gate(*leaves)
        return [out, *torch.autograd.grad(out.square().sum(), [x for x in leaves if x.requires_grad])]

    return run


def read_mask(device: torch.device) -> Results:
    from ropewalk.modules import mask_kernel

    return as_list(mask_kernel.read(draw(B, T, device=device) > 0, B, T, False, True))


def spread(x: Tensor) -> Tensor:
    """Return a tensor whose last dimension is not dense in memory."""
    return torch.stack((x, x), dim=-1)[..., 0]


def shifted(x: Tensor) -> Tensor:
    """Return a tensor at an address that no kernel's widest access reads."""
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


# Beside the rows of sequences.
MORE: dict[str, dict[str, str]] = {
    "plain": {"gradients": "all"},
    "rope blocks": {"scheme": "rope blocks", "gradients": "all"},
    "rope partial": {"scheme": "rope partial", "layout": "bhtd", "gradients": "all"},
    "packed alibi": {"scheme": "alibi learned", "layout": "thd", "bounds": "with empty", "gradients": "all"},
    "bands from starts": {"scheme": "exposb bands", "key_starts": "given", "gradients": "all"},
    "no keys": {"key_lengths": "with zero", "window": "pair", "gradients": "all"},
    "query starts": {"scheme": "rope", "query_starts": "given", "keys_rotated": "yes", "gradients": "all"},
    "mask": {"mask": "rows", "gradients": "all"},
    "lse": {"results": "lse", "causal": "yes"},
}
NAMED = {" ".join(row.values()): row for row in ROWS} | MORE
POSITIONS = torch.arange(2 * T).reshape(2, T).flip(0) % (T + 2)
AXES = POSITIONS[None].expand(2, -1, -1)
RUNS: dict[str, dict[str, Run]] = {
    "attention": {
        **{name: attend(**row) for name, row in NAMED.items()},
        **{f"{x}-alone": attend(**y | {"gradients": "none", "results": "out"}) for x, y in NAMED.items()},
        "library-rope": attend("sdpa", scheme="rope", gradients="all"),
        "library-rope-bhtd": attend("sdpa", scheme="rope", layout="bhtd"),
    },
    "rope": {
        "plain": rotate(),
        "q-alone": rotate(heads=(H, None)),
        "more-heads": rotate(heads=(2 * H, K)),
        "bhtd": rotate("bhtd", interleaved=True),
        "interleaved": rotate(interleaved=True),
        "inverse": rotate(inverse=True),
        "one-table": rotate(one_table=True),
        "features-after": rotate(rotary_offset=4),
        "inplace": rotate(inplace=True, trains=False),
        "inplace-training": rotate(inplace=True),
        "offset": rotate(positions=2),
        "another-offset": rotate(positions=3),
        "positions": rotate(positions=POSITIONS),
        "positions-int32": rotate(positions=POSITIONS.int()),
        "packed": rotate("thd", cu_seqlens=integers(0, 2, T)),
        "axes": rotate(positions=AXES, axes=torch.tensor([0, 1, 0, 1])),
        "blocks": rotate(pair_block=4),
        "spread": rotate(change=spread),
        "spread-inplace": rotate(change=spread, inplace=True, trains=False),
        "shifted": rotate(change=shifted),
        "heads": rotate(heads=(H, H), tables=(T + 3, H, D // 4), positions=POSITIONS, learned=True),
        "heads-per-token": rotate(heads=(H, H), tables=(1, T, H, D // 4), learned=True),
        "heads-spread": rotate(heads=(H, None), tables=(1, T, H, D // 4), change=spread, learned=True),
        "norm": rotate(weights=(D,)),
        "norm-eps": rotate(weights=(D,), norm={"eps": 0.5}),
        "norm-offset": rotate(weights=(D,), norm={"offset": 1.0}),
        "norm-after": rotate(weights=(D,), norm={"after": True}),
        "norm-positions": rotate(weights=(D,), positions=POSITIONS),
        "norm-spread": rotate(weights=(D,), change=spread),
        "norm-across": rotate(heads=(H, H), weights=(H, D), q_bias=torch.ones(H, D), k_bias=torch.ones(H, D)),
        "norm-alone": norm_alone,
        "pages": rotate_pages,
    },
    "others": {
        "append": append(),
        "append-strides": append(lambda call: {name: heads_first(call[name]) for name in ("k", "k_cache")}),
        "append-copied": append(lambda call: {name: call[name].mT.contiguous().mT for name in "kq"}),
        "append-elsewhere": append(slots=torch.tensor([7, 0, -1])),
        "append-int32": append(lambda call: {"slots": call["slots"].int()}),
        "append-fewer": append(slots=torch.tensor([5, 3])),
        "append-without-q": append(q=None),
        "append-twice": append(lambda call: {"v": call["k"]}),
        "append-interleaved": append(interleaved=True),
        "append-offset": append(rotary_offset=4),
        "append-positions": append(positions=torch.tensor([4, 1, 6])),
        "append-tables": append(lambda call: {name: call[name].half() for name in ("cos", "sin")}),
        "append-norm": append(lambda call: {"norm": QKNorm(call["v"][0, 0].clone(), call["v"][0, 1].clone())}),
        "append-one-weight": append(lambda call: {"norm": QKNorm(*[call["v"][0, 0].clone()] * 2)}),
        "append-norm-of-k": append(lambda call: {"norm": QKNorm(None, call["v"][0].clone())}),
        "append-eps": append(lambda call: {"norm": QKNorm(eps=0.5)}),
        "append-scale": append(quantized()),
        "append-scales": append(quantized(K)),
        "gate": gate(True, True),
        "gate-of-output": gate(True, False),
        "gate-alone": gate(False, True),
        "mask": read_mask,
    },
}
CASES = [(operation, name) for operation, runs in RUNS.items() for name in runs]


def assert_same(mine: Results, theirs: Results) -> None:
    """They have the same bits, shapes, dtypes and strides, but for those of dimensions of one element."""
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert (a.dtype, a.shape, strides_of(a)) == (b.dtype, b.shape, strides_of(b))
        assert torch.equal(a.detach().nan_to_num(7.0), b.detach().nan_to_num(7.0))


def strides_of(x: Tensor) -> list[int]:
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def unplanned(function: Callable[..., Any], *arguments: Any) -> Any:
    with without_plans():
        return function(*arguments)


def assert_as_without(function: Callable[..., Any], *arguments: Any, calls: int = N_CALLS) -> None:
    """Each of some calls gives what a call without plans gives."""
    expected = unplanned(function, *arguments)
    for _ in range(calls):
        assert_same(function(*arguments), expected)


class Launches:
    """Counts what runs at once, and the runs of plans."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at_once = self.plans = 0
        for owner, name, counter in ((AtOnce, "launch", "at_once"), (Plan, "run", "plans")):
            monkeypatch.setattr(owner, name, self._counting(getattr(owner, name), counter))

    def _counting(self, function: Any, counter: str) -> Any:
        def count(*arguments: Any, **keywords: Any) -> Any:
            setattr(self, counter, getattr(self, counter) + 1)
            return function(*arguments, **keywords)

        return count

    def of(self, function: Callable[..., Any], *arguments: Any) -> tuple[int, int]:
        """Return how many launches a function does at once, and how many plans it runs."""
        before = self.at_once, self.plans
        function(*arguments)
        return self.at_once - before[0], self.plans - before[1]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


# === every operation ===


@pytest.mark.parametrize(("operation", "name"), CASES)
def test_a_plan_gives_the_same_bits_and_strides(
    device: torch.device, launches: Launches, operation: str, name: str
) -> None:
    run = RUNS[operation][name]
    expected = unplanned(run, device)
    for _ in range(N_CALLS):
        counts = launches.of(lambda: assert_same(run(device), expected))
    if name.startswith("library"):
        return
    # Lists of blocks that are made anew are read anew, and no plan returns largest scores.
    assert counts[0] == 0 or "sliding" in name or name == "all fixed head all yes"
    assert counts[1] > 0 or name == "all fixed head all yes"


@pytest.mark.parametrize("operation", RUNS)
def test_kinds_take_turns(device: torch.device, operation: str) -> None:
    """In any order, among all kinds of an operation, and where the last kinds are found by their keys alone."""
    names = [name for name in RUNS[operation] if operation != "attention" or name.endswith("-alone")]
    expected = {name: unplanned(RUNS[operation][name], device) for name in names}
    rng = random.Random(0)
    for turn in range(2):
        rng.shuffle(names)
        with pytest.MonkeyPatch.context() as patch:
            if turn:
                patch.setattr(kinds, "has_guards", lambda: False)
                for x in kinds._OPERATIONS:
                    x.forget()
            for name in names:
                for chosen in (name, rng.choice(names)):
                    assert_same(RUNS[operation][chosen](device), expected[chosen])


def memory_alive() -> dict[int, Tensor]:
    """Return the tensors with memory that are alive, by their memory's address."""
    gc.collect()
    found = [x for x in gc.get_objects() if isinstance(x, Tensor) and type(x) in (Tensor, torch.nn.Parameter)]
    return {x.untyped_storage().data_ptr(): x for x in found if not x.is_meta and x.untyped_storage().nbytes()}


@pytest.mark.parametrize("operation", RUNS)
def test_no_plan_keeps_memory_that_it_does_not_list(device: torch.device, operation: str) -> None:
    """No input is alive after a call; `Cache.find` waits for the streams of the tables that a kind lists."""
    remembered._remembered.clear()
    before = memory_alive()
    for run in RUNS[operation].values():
        for _ in range(N_CALLS):
            run(device)
    listed = [x for kind in KINDS.found.values() for x in getattr(kind, "constants", ())]
    for entry in remembered._remembered.values():
        listed += entry if isinstance(entry, tuple) else (entry,)
    listed += launch_common._counters.values()
    known = {x.untyped_storage().data_ptr() for x in listed if isinstance(x, Tensor)} | before.keys()
    assert {address: x.shape for address, x in memory_alive().items() if address not in known} == {}


def one_at_a_time(function: Callable[..., Any], lock: Any) -> Callable[..., Any]:
    """Return a function that one thread enters at a time, as Triton's interpreter needs it."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        with lock:
            return function(*arguments, **keywords)

    return call


def test_threads(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds are found, made and run in several threads."""
    monkeypatch.setattr(InterpretedFunction, "run", one_at_a_time(InterpretedFunction.run, threading.Lock()))
    names = [("attention", f"{name}-alone") for name in ("plain", "mask", "rope blocks", "no keys")]
    names += [("attention", "lse"), ("rope", "offset"), ("rope", "norm-alone"), ("others", "append-positions")]
    expected = {key: unplanned(RUNS[key[0]][key[1]], device) for key in names}
    interval, wrong = sys.getswitchinterval(), []

    def work(index: int) -> None:
        for turn in range(2 * len(names)):
            key = names[(index + turn) % len(names)]
            wrong.extend(not torch.equal(*x) for x in zip(RUNS[key[0]][key[1]](device), expected[key], strict=True))

    sys.setswitchinterval(1e-5)
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
    finally:
        sys.setswitchinterval(interval)
    assert wrong
    assert not any(wrong)


@on_gpu
def test_a_planned_kind_is_captured(device: torch.device) -> None:
    q, k, v = (torch.randn(1, 64, 4, 64, device=device, dtype=torch.float16) for _ in range(3))
    expected = [attention(q, k, v, causal=True, impl="triton") for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, causal=True, impl="triton")
    graph.replay()
    assert all(torch.equal(out, x) for x in expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one() -> None:
    for run in (RUNS["attention"]["rope blocks"], RUNS["rope"]["norm"], RUNS["others"]["append-norm"]):
        first = [x.cpu() for x in unplanned(run, torch.device("cuda", 0))]
        for _ in range(N_CALLS):
            assert_same([x.cpu() for x in run(torch.device("cuda", 1))], first)


def test_what_requires_grad_and_grad_modes_are_kinds(device: torch.device) -> None:
    q, k, v = draw_qkv(device)
    for _ in range(3):
        for wanted in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)):
            for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
                leaves = [x.detach().requires_grad_(bool(wants)) for x, wants in zip((q, k, v), wanted, strict=True)]
                with mode():
                    out = attention(*leaves, impl="triton")
                assert out.requires_grad == (any(wanted) and mode is torch.enable_grad)
                assert out.is_inference() == (mode is torch.inference_mode)
    assert len(kinds_of()) == 4 * 2


# === one change after calls of a kind ===


@functools.cache
def world_of(index: int, gradients: bool) -> World:
    row = {**ROWS[index], **({} if gradients else {"gradients": "none"})}
    device = sequences.device_here()
    return World(on_device({**NEUTRAL, **row}, device), "triton", device, TINY)


@pytest.mark.skipif(ON_GPU, reason="its changes compile kernels there")
@pytest.mark.parametrize("change", [name for name, x in CHANGES.items() if x.place == "anywhere"])
def test_attention_follows_a_change(change: str) -> None:
    """In the first row of sequences of which it says something; then the kind of before is right again."""
    of_gradients = change.startswith(("grad", "requires grad", "under"))
    for gradients in (True,) if of_gradients else (False, True):
        for index in range(len(ROWS)):
            world = world_of(index, gradients)
            if world.state((change,)) is not None:
                changed = Step((change,))
                steps = [Step(), Step(), Step(), changed, Step(), changed, changed]
                failure = replay(world.row, steps, "triton")
                assert failure is None, failure.text
                return
    missing = ("inv_freq: ", "key_starts: as key_lengths", "positions_k: as positions_q", "under: autocast")
    assert change.startswith(missing)


@pytest.mark.skipif(ON_GPU, reason="its changes compile kernels there")
@pytest.mark.parametrize("index", range(len(ROWS)), ids=lambda index: " ".join(ROWS[index].values()))
def test_what_a_call_reads_is_written(index: int) -> None:
    """In place, and by `data`, which raises no version: lengths, tables, weights, slopes, and all else."""
    world = next(world for world in (world_of(index, False), world_of(index, True)) if world.state(()) is not None)
    state = world.state(())
    assert state is not None
    writes = [(Step((), f"{how} {name}"), Step()) for name in state.cells for how in ("write", "write data of")]
    failure = replay(world.row, [Step(), Step(), Step(), *(step for pair in writes for step in pair)], "triton")
    assert failure is None, failure.text


REFUSED: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "key_lengths-dtype": ({"key_lengths": torch.zeros(B)}, TypeError),
    "key_lengths-shape": ({"key_lengths": torch.zeros(1, dtype=torch.int32)}, ValueError),
    "key_lengths-list": ({"key_lengths": [T, 5]}, TypeError),
    "position": ({"position": "rope"}, TypeError),
    "layout": ({"layout": "tbhd"}, ValueError),
    "v-dtype": ({"v": torch.zeros(B, T, H, D).half()}, TypeError),
    "v-shape": ({"v": torch.zeros(B, T - 1, H, D)}, ValueError),
    "q-list": ({"q": [1.0]}, TypeError),
    "q-sparse": ({"q": torch.zeros(B, T, H, D).to_sparse()}, TypeError),
    "mask": ({"mask": torch.ones(T, T + 1, dtype=torch.bool)}, ValueError),
    "window": ({"window": 0}, ValueError),
    "dropout_p": ({"dropout_p": 1.0}, ValueError),
    "deterministic": ({"deterministic": 1}, TypeError),
    "impl": ({"impl": "fast"}, ValueError),
    "window-bool": ({"window": True}, ValueError),
    "window-float": ({"window": 5.0}, ValueError),
    "window-of-bools": ({"window": (True, 0)}, ValueError),
    "softcap": ({"softcap": True}, ValueError),
    "norm": ({"norm": QKNorm(torch.ones(D + 1))}, ValueError),
    "norm-keys_rotated": ({"norm": QKNorm(torch.ones(D)), "keys_rotated": True}, ValueError),
}


@pytest.mark.skipif(ON_GPU, reason="its tensors are on the CPU")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_stays_refused(name: str) -> None:
    wrong, error = REFUSED[name]
    q, k, v = (draw(B, T, H, D, device=torch.device("cpu"), seed=seed) for seed in range(3))
    right = {"q": q, "k": k, "v": v, "position": Rope(), "key_lengths": integers(T, 5), "impl": "triton"}
    norm = QKNorm(torch.ones(D))
    for equal in ({}, {"window": 1}, {"window": 5}, {"window": (1, 0)}, {"softcap": 1.0}, {"norm": norm}):
        for _ in range(3):
            attention(**{**right, **equal})
    with pytest.raises(error) as without:
        unplanned(lambda: attention(**{**right, **wrong}))
    n_kinds = len(KINDS.found)
    for _ in range(3):
        with pytest.raises(error) as again:
            attention(**{**right, **wrong})
        assert str(again.value) == str(without.value)
    assert len(KINDS.found) == n_kinds or "norm" in wrong  # whose weights the norm itself refuses


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"rotary_offset": 0}, {"rotary_offset": 0.0}),
        ({"rotary_dim": D}, {"rotary_dim": float(D)}),
        ({"norm": QKNorm(eps=1.0)}, {"norm": QKNorm(eps=True)}),
        ({"norm": QKNorm(after=True)}, {"norm": QKNorm(after=1)}),  # type: ignore[arg-type]
    ],
)
def test_equal_numbers_of_another_type_are_refused(device: torch.device, right: Any, wrong: Any) -> None:
    q, k = (draw(B, T, H, D, device=device, seed=seed) for seed in range(2))
    table = draw(T, D // 2, device=device)
    for _ in range(3):
        apply_rope(q, k, table, table, **right)
        append(rotary_offset=0)(device)
    with pytest.raises(TypeError):
        apply_rope(q, k, table, table, **wrong)
    if "rotary_offset" in wrong:
        with pytest.raises(TypeError):
            append(**wrong)(device)


@pytest.mark.parametrize("name", ["k_scale", "v_scale", "blocks", "cu_seqlens_q", "positions_k", "block_table"])
def test_what_is_refused_beside_a_cache_stays_refused(device: torch.device, name: str) -> None:
    q, k, v = (draw(1, 300 if seed else 1, H, D, device=device, seed=seed) for seed in range(3))
    for _ in range(3):
        attention(q, k, v, impl="triton")
    with pytest.raises((ValueError, TypeError), match=name):
        attention(q, k, v, impl="triton", **{name: torch.zeros(1, 7, device=device)})


def rotate_flagged(device: torch.device, norm: QKNorm | None = None, **flags: Any) -> Any:
    q, k = (draw(1, T, n, D, device=device, seed=n) for n in (H, K))
    table = torch.rand(T, D // 2, device=device)
    return apply_rope(q, k, table, table, norm=norm, **flags)


def attend_flagged(device: torch.device, norm: QKNorm | None = None, **flags: Any) -> Any:
    q, k, v = (draw(1, T, H, D, device=device, seed=seed) for seed in range(3))
    return attention(q, k, v, position=Rope(), norm=norm, **flags)


FLAGGED = {
    rotate_flagged: ("interleaved", "inverse", "inplace", "impl"),
    attend_flagged: ("causal", "keys_rotated", "return_lse", "return_max_logits", "deterministic", "impl"),
}


@pytest.mark.parametrize("wrong", [[0], [], {"x": False}, "yes", 0.5], ids=str)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("call", "name"), [(call, name) for call, names in FLAGGED.items() for name in names])
def test_a_flag_that_is_none_is_refused_by_name(
    device: torch.device, call: Any, name: str, has_norm: bool, wrong: Any
) -> None:
    """In the first call, and after calls that were planned."""
    norm = QKNorm(torch.ones(D, device=device)) if has_norm and name not in ("inverse", "inplace") else None
    for times in (0, 3):
        for _ in range(times):
            call(device, norm)
        with pytest.raises((ValueError, TypeError), match=name):
            call(device, norm, **{name: wrong})


def test_a_tensor_for_a_flag_is_refused_after_planned_norms(device: torch.device) -> None:
    norm = QKNorm(torch.ones(D, device=device))
    for _ in range(3):
        attend_flagged(device, norm)
    for name in ("causal", "dropout_p", "scale"):
        with pytest.raises((ValueError, TypeError), match=name):
            attend_flagged(device, norm, **{name: torch.ones(2)})


@pytest.mark.parametrize("kind", [RuntimeError, AttributeError, TypeError])
@pytest.mark.parametrize(("call", "made"), [("dense", "_choose"), ("cache", "_choose"), ("norm", "plan_or_none")])
def test_an_error_in_making_a_plan_is_raised(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, call: str, made: str, kind: type[Exception]
) -> None:
    queries, keys = (1, 300) if call == "cache" else (T, T)
    q, k, v = (draw(1, keys if seed else queries, H, D, device=device, seed=seed) for seed in range(3))
    keywords = {"position": Rope(), "norm": QKNorm(torch.ones(D, device=device))} if call == "norm" else {}
    attention(q, k, v, impl="triton", **keywords)

    def fail(*arguments: Any) -> Any:
        raise kind("a fault of a plan")

    monkeypatch.setattr(norms if call == "norm" else find, made, fail)
    with pytest.raises(kind, match="a fault of a plan"):
        attention(q, k, v, impl="triton", **keywords)


# === where tensors lie, and what they hold ===


def train(tensors: Results, keywords: dict[str, Any], function: Callable[..., Any] = attention) -> Results:
    torch.manual_seed(1)
    leaves = [x.detach().requires_grad_() for x in tensors]
    results = as_list(function(*leaves, impl="triton", **keywords))
    loss = sum((x.nan_to_num(neginf=0) * torch.linspace(0, 1, x.shape[-1], device=x.device)).sum() for x in results)
    scheme = keywords.get("position")
    learned = [x for name in ("slopes", "table") if (x := getattr(scheme, name, None)) is not None and x.requires_grad]
    return [*results, *torch.autograd.grad(loss, [*leaves, *learned])]


def draw_qkv(device: torch.device, *, tokens: int = T) -> Results:
    return [draw(B, tokens, n, D, device=device, seed=seed) for seed, n in enumerate((H, K, K))]


@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "key_lengths"])
def test_misaligned_tensors_run_at_once(device: torch.device, launches: Launches, which: int) -> None:
    every = [*draw_qkv(device), integers(T, 11).to(device)]
    for index in (None, which):
        if index is not None:
            every[index] = shifted(every[index])
            assert every[index].data_ptr() % 16
        *tensors, lengths = every
        assert_as_without(train, tensors, {"key_lengths": lengths}, calls=3)
    assert launches.of(lambda: attention(*tensors, key_lengths=lengths, impl="triton"))[1] == 0


def test_a_rotation_has_a_plan_for_each_alignment(device: torch.device, launches: Launches) -> None:
    q, table = draw(B, T, H, D, device=device), draw(T, D // 2, device=device)
    for _ in range(3):
        for x in (q, shifted(q)):
            assert_as_without(lambda x=x: as_list(apply_rope(x, None, table, table, impl="triton")), calls=2)
    at_once, plans = launches.of(lambda: apply_rope(shifted(q), None, table, table, impl="triton"))
    assert at_once == 0
    assert plans == 1 or ON_GPU  # where a kind's function launches what a plan's only launch is


def test_a_call_that_its_plan_gives_up_draws_no_seed(device: torch.device) -> None:
    q, k, v = draw_qkv(device)
    sinks = draw(H, device=device).half()

    def run(v: Tensor) -> Tensor:
        torch.manual_seed(3)
        out: Tensor = attention(q, k, v, sinks=sinks, dropout_p=0.5, impl="triton")
        return out

    expected = unplanned(run, v)
    for _ in range(3):
        assert torch.equal(run(v), expected)
    assert torch.equal(run(shifted(v)), expected)


def negated(x: Tensor) -> Tensor:
    return torch._neg_view(-x)


def zero(x: Tensor) -> Tensor:
    return torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device)


ODD: dict[str, tuple[Any, Any]] = {"negated": (negated, lambda x: x), "zero": (zero, torch.zeros_like)}


def rotate_oddly(device: torch.device, odd: Callable[[Tensor], Tensor], where: str) -> Results:
    q, k, g = (draw(B, T, H, D, device=device, seed=seed) for seed in range(3))
    table, weight = draw(T, D // 2, device=device), draw(D, device=device)
    norm = QKNorm(odd(weight) if where == "rope-norm-weight" else weight, weight) if "norm" in where else None
    leaves = [(odd(q) if where == "rope-q" else q).detach().requires_grad_(), k.requires_grad_()]
    outs = apply_rope(*leaves, odd(table) if where == "rope-cos" else table, table, norm=norm, impl="triton")
    return [*outs, *torch.autograd.grad(outs, leaves, [odd(g) if "grad" in where else g, g])]


def append_oddly(device: torch.device, odd: Callable[[Tensor], Tensor], where: str) -> Results:
    weight, numbers = draw(D, device=device), torch.tensor([1, 2, 3], device=device)
    norm = QKNorm(weight, odd(weight) if where == "append-weight" else weight)
    return append(norm=norm, positions=odd(numbers) if where == "append-positions" else numbers)(device)


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize(
    "where",
    [
        *("rope-grad", "rope-q", "rope-cos", "rope-norm-grad", "rope-norm-weight", "append-weight", "append-positions"),
    ],
)
def test_tensors_whose_address_says_nothing(device: torch.device, where: str, kind: str) -> None:
    """Lazily negated ones hold the opposite values; what is known to be zero has no memory."""
    odd, plain = ODD[kind]
    run = append_oddly if where.startswith("append") else rotate_oddly
    expected = unplanned(run, device, plain, where)
    for number in range(6):
        found = run(device, odd if number in (0, 4, 5) else lambda x: x, where)
        if number in (0, 4, 5):
            for x, y in zip(found, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bounds", [(0, 0), (0,), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("position", [Rope(), Alibi(), NoPosition()], ids=lambda x: type(x).__name__)
def test_no_token_in_all(device: torch.device, position: Any, bounds: tuple[int, ...]) -> None:
    q, k, v = (torch.zeros(0, H, D, device=device, requires_grad=True) for _ in range(3))
    given: dict[str, Any] = {"layout": "thd", "position": position, "cu_seqlens_q": integers(*bounds).to(device)}
    for _ in range(N_CALLS):
        for keywords in ({}, {"gate": torch.zeros(0, H, device=device)}):
            out = attention(q, k, v, impl="triton", **given, **keywords)
            assert out.shape == (0, H, D)
            assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k, v))] == [(0, H, D)] * 3
    tensors = [draw(T, H, D, device=device) for _ in range(3)]  # tokens of no sequence
    if len(bounds) < 3:
        for _ in range(N_CALLS):
            assert not any(x.any() for x in train(tensors, {**given, "position": Rope()}))


# === caches ===


def infer(tensors: Results, keywords: dict[str, Any]) -> Results:
    with torch.no_grad():
        return as_list(attention(*tensors, impl="triton", **keywords))


GROWING: dict[str, dict[str, Any]] = {
    "rope": {"position": Rope(), "keys_rotated": True, "causal": True},
    "left-padding": {"key_starts": integers(1, 0), "position": Alibi()},
    "rope-and-left-padding": {"key_starts": integers(1, 0), "position": Rope(), "keys_rotated": True},
    "window": {"window": (40, 0), "causal": True, "return_lse": True},
    "lengths": {"key_lengths": integers(20, 140), "position": Rope(), "keys_rotated": True, "softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-1, 1, 4)},
    "mask": {},
}


@pytest.mark.parametrize("lengths", [(257, 258, 390), (2, 100, 255)], ids=["long", "short"])
@pytest.mark.parametrize(("kind", "layout"), [*zip(GROWING, ["bhtd", "bthd"] * len(GROWING), strict=False)])
def test_decoding_from_a_cache_that_grows(
    device: torch.device, launches: Launches, kind: str, layout: str, lengths: tuple[int, ...]
) -> None:
    """One plan is for all lengths between two powers of two; the numbers of splits follow the length."""
    given, counts = placed(GROWING[kind], device), []
    for keys in lengths:
        shapes = [(B, 4, 1, D), *[(B, 2, keys, D)] * 2] if layout == "bhtd" else [(B, 1, 4, D), *[(B, keys, 2, D)] * 2]
        tensors, keywords = [draw(*shape, device=device, seed=keys) for shape in shapes], {**given, "layout": layout}
        if kind == "mask":
            keywords["mask"] = draw(B, 1, 1, keys, device=device, seed=keys) > -0.5
        if kind == "lengths":
            keywords["key_lengths"] = (keywords["key_lengths"] * keys) // 200
        expected = unplanned(infer, tensors, keywords)
        counts.append(launches.of(lambda e=expected: assert_same(infer(tensors, keywords), e))[1])  # noqa: B023
        truth = as_list(attention(*tensors, **keywords, impl="reference"))
        torch.testing.assert_close(expected[0], truth[0], rtol=1e-4, atol=1e-4)
    assert counts[1:] == [1, 1]
    assert len(kinds_of()) == 1


def test_forward_mode_over_a_cache_that_grows_is_refused(device: torch.device, launches: Launches) -> None:
    for keys in (300, 301, 302, 303):
        q, k, v = (draw(B, n, H, D, device=device, seed=n) for n in (1, keys, keys))
        count = launches.of(lambda: infer([q, k, v], {}))[1]  # noqa: B023
    assert count == 1  # by the plan of all lengths
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(ValueError, match="forward-mode"):
            infer([dual, k, v], {})


@pytest.mark.parametrize("plans", [False, True])
@pytest.mark.parametrize("operation", ["attention", "norm", "gate", "rope", "in-place"])
def test_a_backward_refuses_tangents(device: torch.device, operation: str, plans: bool) -> None:
    """A launch loses them: the tangent of a gradient would silently be zero."""
    q, k, v = draw_qkv(device)
    cos, sin = torch.ones(2, T, D // 2, device=device)
    scale = torch.ones(D, device=device)

    def run() -> tuple[Results, Results]:
        leaf = q.detach().requires_grad_()
        if operation == "attention":
            outs = attention(leaf, k, v, impl="triton")
        elif operation == "gate":
            outs = attention(leaf, k, v, impl="triton", gate=q)
        elif operation == "norm":
            outs = apply_rope(leaf, k, cos, sin, norm=QKNorm(scale, scale))
        else:
            x = leaf * 1 if operation == "in-place" else leaf
            outs = apply_rope(x, k, cos, sin, inplace=operation == "in-place")
        return [leaf], [x for x in as_list(outs) if x.requires_grad]

    for _ in range(3 if plans else 0):
        leaves, outs = run()
        torch.autograd.grad(outs, leaves, [*map(torch.ones_like, outs)])
    leaves, outs = run()
    with forward_ad.dual_level():
        torch.autograd.grad(outs, leaves, [*map(torch.ones_like, outs)], retain_graph=True)
        grads = [forward_ad.make_dual(x.detach(), torch.ones_like(x)) for x in outs]
        with pytest.raises(ValueError, match="has a tangent"):
            torch.autograd.grad(outs, leaves, grads)


def test_rules_of_choice_are_by_powers_of_two() -> None:
    """A plan of caches of all lengths between two of them is for one backend."""
    for rules in ORDER.values():
        for rule in rules:
            for limit in (rule.tokens, rule.below):
                assert limit in (0, math.inf) or 256 <= limit == 1 << (int(limit).bit_length() - 1)


# === values that are written, which no key holds ===


@pytest.mark.parametrize("position", ["index", "given"])
def test_frequencies_that_are_read_in_each_call(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, launches: Launches, position: str
) -> None:
    """Those on a GPU; here, values on a CPU stand for them."""
    from ropewalk.ops.attention import tables

    monkeypatch.setattr(tables, "_is_readable", lambda x: False)
    tensors, inv_freq = draw_qkv(device), torch.logspace(0, -3, 8).to(device)
    keywords: dict[str, Any] = {"position": Rope(inv_freq=inv_freq, attention_factor=1.5)}
    if position == "given":
        keywords["positions_q"] = keywords["positions_k"] = torch.arange(2 * T, device=device).view(2, T)
    assert_as_without(train, tensors, keywords, calls=3)
    before = train(tensors, keywords)
    inv_freq.data.mul_(3)
    expected = unplanned(train, tensors, keywords)
    assert launches.of(lambda: assert_same(train(tensors, keywords), expected)) == (0, 2)
    other = {**keywords, "position": Rope(inv_freq=inv_freq * 2, attention_factor=1.5)}
    assert_as_without(train, tensors, other, calls=1)
    assert not torch.equal(before[0], expected[0])
    assert len(kinds_of()) == 1


def test_other_schemes_that_learn_are_resolved_anew(device: torch.device) -> None:
    """No key knows whether another package's scheme has tensors that decide more than numbers."""

    class Slopes(Alibi):
        pass

    assert_as_without(train, draw_qkv(device), {"position": Slopes(draw(H, device=device).abs().requires_grad_())})
    assert not kinds_of()


# === autograd ===


def test_the_gradient_of_the_log_sum_exp_alone(device: torch.device) -> None:
    def backward() -> Results:
        leaves = [x.requires_grad_() for x in draw_qkv(device)]
        _, lse = attention(*leaves, impl="triton", return_lse=True)
        grads = torch.autograd.grad(lse, leaves, torch.ones_like(lse), allow_unused=True)
        assert grads[2] is None
        return list(grads[:2])

    assert_as_without(backward)


def test_a_second_derivative_is_refused_as_without_a_plan(device: torch.device) -> None:
    def differentiate_twice() -> Results:
        leaves = [x.requires_grad_() for x in draw_qkv(device)]
        out = attention(*leaves, impl="triton", causal=True)
        grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiable once"):
            grads[0].sum().backward()
        return [out, *grads]

    assert_as_without(differentiate_twice)


@pytest.mark.parametrize("layout", ["bthd", "bhtd", "thd"])
def test_a_first_calls_backward_is_planned_when_it_runs_again(
    device: torch.device, launches: Launches, layout: str
) -> None:
    """And a graph is retained, freed, and refuses what was written since."""
    shape = {"bthd": (B, T, H, D), "bhtd": (B, H, T, D), "thd": (T, H, D)}[layout]
    packing = {"cu_seqlens_q": integers(0, 3, T).to(device)} if layout == "thd" else {}
    *leaves, g = (draw(*shape, device=device, seed=seed).requires_grad_(seed < 4) for seed in range(5))
    q, k, v, gate = leaves
    for number in range(3):
        out = attention(q, k, v, gate=gate, position=Rope(), layout=layout, impl="triton", **packing)
        differentiate = functools.partial(torch.autograd.grad, out, leaves, retain_graph=True)
        first = differentiate(g)
        for _ in range(2):
            counts = launches.of(lambda: assert_same(list(differentiate(g)), list(first)))  # noqa: B023
            assert counts == (0, 1), number
        transposed = differentiate(g.mT.contiguous().mT)
        for x, y in zip(transposed, first, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
        if number:
            torch.autograd.grad(out, leaves, g)
        else:
            out.mul_(2)  # it is no view that refuses to be written
        with pytest.raises(RuntimeError, match="a second time" if number else "modified by an inplace operation"):
            torch.autograd.grad(out, leaves, g)


@pytest.mark.parametrize("n_earlier", [0, 1, 3])  # with 1, a plan would first run as a checkpoint recomputes
def test_checkpoints_and_hooks_of_saved_tensors(device: torch.device, n_earlier: int) -> None:
    """Hooks give back dense copies, of other strides than a mask had that is read where it lies."""
    tensors = draw_qkv(device)
    mask = draw(B, 1, 1, T, device=device) > -1.0
    keywords = {"position": Alibi(), "mask": mask.expand(B, 1, T, T), "key_lengths": integers(T, 5).to(device)}
    packed: list[Tensor] = []

    def hooked(*tensors: Tensor, **keywords: Any) -> Any:
        with saved_tensors_hooks(lambda x: (packed.append(x), x.detach().clone())[1], lambda x: x):
            return attention(*tensors, **keywords)

    def on_cpu(*tensors: Tensor, **keywords: Any) -> Any:
        with save_on_cpu():
            return attention(*tensors, **keywords)

    expected = unplanned(train, tensors, keywords)
    for _ in range(n_earlier):
        train(tensors, keywords)
    for function in (functools.partial(checkpoint, attention, use_reentrant=False), hooked, on_cpu, attention):
        for _ in range(3):
            assert_same(train(tensors, keywords, function), expected)
    assert len(packed) >= 3 * 5


@pytest.mark.parametrize("written", ["out", "v", "key_lengths"])
def test_writes_before_the_backward_are_told(device: torch.device, written: str) -> None:
    lengths = integers(T, 5).to(device)
    for _ in range(N_CALLS):
        leaves = [x.requires_grad_() for x in draw_qkv(device)]
        others = [x * 1 for x in leaves]
        out = attention(*others, impl="triton", key_lengths=lengths)
        {"out": out, "v": others[2], "key_lengths": lengths}[written].mul_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out.sum(), leaves)


def test_a_rotation_and_an_append_count_what_they_write(device: torch.device) -> None:
    q, table = draw(B, T, H, D, device=device), draw(T, D // 2, device=device)
    k, cache = draw(3, K, D, device=device), torch.zeros(2, 2, 4, K, D, device=device)
    for _ in range(N_CALLS):
        before = q._version, cache[0]._version
        apply_rope(q, None, table, table, inplace=True, impl="triton")
        append_kv(k, k, *cache, torch.tensor([1, 2, 6], device=device), cos=table, sin=table, impl="triton")
        assert q._version > before[0]
        assert cache[0]._version > before[1]


def test_a_repeated_rotation_is_differentiated_by_its_own_flags(device: torch.device) -> None:
    """Also after its caller repeats another kind, and that one's backward has run."""
    q, k, g = (draw(B, T, H, D, device=device, seed=seed) for seed in range(3))
    q, k = q.requires_grad_(), k.requires_grad_()
    tables = [draw(T, D // 2, device=device, seed=seed) for seed in range(2)]
    repeater, graphs = Repeater(), []
    for interleaved in (False, True):
        call = RopeCall(*tables, None, None, 0, RopeFlags("bthd", interleaved, impl="triton"))
        repeater.learn(q, k, call)
        outs = repeater.rotate(q, k, call)
        assert outs is not None
        graphs.append((interleaved, outs))
    for interleaved, outs in (*graphs, *graphs[::-1], *graphs):
        expected = apply_rope(q, k, *tables, interleaved=interleaved, impl="triton")
        mine, theirs = (torch.autograd.grad(x, (q, k), (g, g), retain_graph=True) for x in (outs, expected))
        assert_same(list(mine), list(theirs))


# === what follows, transforms or intercepts calls ===


@pytest.fixture
def planned(device: torch.device) -> Results:
    """Tensors of a kind of call, causal, that has its plans."""
    tensors = draw_qkv(device)
    for _ in range(3):
        train(tensors, {"causal": True})
        infer(tensors, {"causal": True})
    assert len(kinds_of()) == 2
    return tensors


class Operators(TorchDispatchMode):
    """Notes the operators that a call dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def test_dispatch_modes_follow_the_operator(planned: Results) -> None:
    expected = unplanned(train, planned, {"causal": True})
    with Operators() as mode:
        assert_same(train(planned, {"causal": True}), expected)
    assert {"ropewalk::attend", "ropewalk::attend_backward"} <= set(mode.names)


def test_torch_func(planned: Results) -> None:
    q, k, v = planned

    def loss(q: Tensor) -> Tensor:
        return attention(q, k, v, causal=True).square().sum()

    leaf = q.detach().requires_grad_()
    out = attention(leaf, k, v, causal=True, impl="reference").square().sum()
    torch.testing.assert_close(torch.func.grad(loss)(q), torch.autograd.grad(out, leaf)[0])
    stacked = torch.stack((q, q + 1))
    torch.testing.assert_close(torch.func.vmap(loss)(stacked), torch.stack([loss(x) for x in stacked]))
    _, tangent = torch.func.jvp(loss, (q,), (torch.ones_like(q),))
    torch.testing.assert_close(tangent, torch.func.grad(loss)(q).sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("norm", [False, True])
def test_autocast_is_nested(device: torch.device, norm: bool) -> None:
    tensors = draw_qkv(device)
    keywords: dict[str, Any] = {"position": Rope(), **({"norm": QKNorm(draw(D, device=device))} if norm else {})}

    def nested() -> Results:
        every = train(tensors, keywords)
        with torch.autocast(device.type, torch.float16):
            every += train(tensors, keywords)
            with torch.autocast(device.type, enabled=False):
                every += train(tensors, keywords)
        return every

    assert_as_without(nested)
    assert {x.dtype for x in nested()} == {torch.float16, torch.float32}


@pytest.mark.parametrize("impl", ["triton", *([] if ON_GPU else ["sdpa"])])
def test_a_tensor_that_outlived_its_transform_runs_without_a_plan(device: torch.device, impl: str) -> None:
    q, k, v = (draw(B, T, H, D, device=device, seed=seed).requires_grad_() for seed in range(3))
    leaked: Results = []
    torch.func.grad(lambda x: (leaked.append(x), x.sum())[1])(q.detach())
    with pytest.raises(RuntimeError, match="storage"):
        leaked[0].data_ptr()
    for _ in range(N_CALLS):
        expected = attention(q, k, v, impl=impl)
    for _ in range(N_CALLS):
        assert torch.equal(attention(leaked[0], k, v, impl=impl), expected)


@pytest.fixture
def tf32() -> Iterator[Callable[[bool], None]]:
    before = torch.backends.cuda.matmul.allow_tf32
    yield lambda is_on: setattr(torch.backends.cuda.matmul, "allow_tf32", is_on)
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.skipif(ON_GPU, reason="plans launch by Triton's launcher there")
def test_a_backward_follows_the_switch_of_tf32(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, tf32: Callable[[bool], None]
) -> None:
    precisions: list[Any] = []

    def noting(function: Any) -> Any:
        def launch(*given: Any, **arguments: Any) -> None:
            values = [*arguments.values(), *(given[-1].values() if isinstance(given[-1], dict) else ())]
            precisions.extend(x for x in values if isinstance(x, str) and x in ("tf32", "ieee"))
            function(*given, **arguments)

        return launch

    monkeypatch.setattr(AtOnce, "launch", noting(AtOnce.launch))
    monkeypatch.setattr(plan_module, "_launch_kernel", noting(plan_module._launch_kernel))
    leaves = [x.requires_grad_() for x in draw_qkv(device)]
    for number in range(5):  # a first call's graph, too
        tf32(False)
        out = attention(*leaves, impl="triton")
        for is_on in (True, False, True, False):
            tf32(is_on)
            precisions.clear()
            torch.autograd.grad(out.sum(), leaves, retain_graph=True)
            assert set(precisions) == {"tf32" if is_on else "ieee"}, number


@on_gpu
@pytest.mark.parametrize("impl", ["triton", "gluon"])
@pytest.mark.parametrize("kind", ["blocks", "t5"])
def test_what_one_stream_makes_another_one_waits_for(device: torch.device, kind: str, impl: str) -> None:
    q, k, v = (draw(1, 512, 4, 64, device=device, seed=seed).half() for seed in range(3))
    counts = torch.tensor([[[1, 2, 1, 3]]], dtype=torch.int32)
    indices = torch.tensor([[[[3, 0, 0], [0, 2, 0], [1, 0, 0], [0, 1, 3]]]], dtype=torch.int32)

    def given() -> dict[str, Any]:
        if kind == "t5":
            return {"position": T5Bias(draw(32, 4, device=device).requires_grad_())}
        return {"blocks": BlockLists(*(x.to(device) for x in (counts, indices)))}

    expected = unplanned(lambda: attention(q, k, v, impl=impl, **given()))
    for _ in range(3):
        keywords, streams = given(), [torch.cuda.Stream() for _ in range(3)]
        KINDS.clear()
        torch.cuda.synchronize()
        for stream in (*streams, *streams[:1]):
            with torch.cuda.stream(stream):
                if stream is streams[0]:
                    torch.cuda._sleep(100_000_000)
                out = attention(q, k, v, impl=impl, **keywords)
                stream.synchronize()
            torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)


@on_gpu
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("calls", [0, 3])
def test_a_new_thread_launches(device: torch.device, calls: int, learns: bool, impl: str | None) -> None:
    """A new thread has no CUDA context, which descriptors need: neither for its first call nor for a planned one."""
    tensors = [draw(2, 128, 4, 64, device=device, seed=seed).half() for seed in range(3)]

    def run() -> Results:
        leaves = [x.detach().requires_grad_(learns) for x in tensors]
        results = as_list(attention(*leaves, causal=True, impl=impl, return_lse=calls == 3))
        return [*results, *(torch.autograd.grad(results[0].square().sum(), leaves) if learns else ())]

    expected = unplanned(run)
    for _ in range(calls):
        run()
    for _ in range(4):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            for x, y in zip(pool.submit(run).result(), expected, strict=True):
                torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


# === bounds ===


def test_a_cache_is_bounded() -> None:
    cache, rng = Cache(), random.Random(0)
    most_plans = most_seen = made = 0

    def make() -> object:
        nonlocal made
        made += 1
        return object()

    for _ in range(10_000):
        n_made, plan = made, cache.find((rng.randrange(1, 4000), 16, "triton"), make)
        assert (made > n_made) <= (plan is not None)
        most_plans, most_seen = max(most_plans, len(cache.found)), max(most_seen, len(cache.seen))
    assert made > kinds.MAX_PLANS == most_plans
    for number in range(9 * kinds.MAX_PLANS):
        assert cache.find(("new", number), make) is None
        most_seen = max(most_seen, len(cache.seen))
    assert most_seen == 8 * kinds.MAX_PLANS


@pytest.mark.parametrize("limit", ["MAX_PLANS", "MAX_TABLE_BYTES"])
def test_calls_of_random_shapes_are_bounded(device: torch.device, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(kinds, limit, {"MAX_PLANS": 4, "MAX_TABLE_BYTES": 2000}[limit])
    monkeypatch.setattr(plan_module, "_launch_kernel", lambda *arguments: None)
    monkeypatch.setattr(AtOnce, "launch", lambda *arguments, **keywords: None)
    rng = random.Random(0)
    for _ in range(200):
        leaf = torch.randn(1, rng.randrange(1, 12), 1, D, device=device, requires_grad=True)
        attention(leaf, leaf, leaf, impl="triton", position=Rope()).sum().backward()
        if limit == "MAX_PLANS":
            assert len(KINDS.found) <= 4
            assert len(KINDS.seen) <= 32
        assert sum(KINDS.tables.values()) <= kinds.MAX_TABLE_BYTES or len(KINDS.found) == 1
        assert all(len(operation.recent) <= kinds.MAX_RECENT for operation in kinds._OPERATIONS)
    for tokens in range(4, 104):
        leaf = torch.randn(2, 4, 1, D, device=device, requires_grad=True)
        out = attention(leaf, leaf, leaf, impl="triton")
        torch.autograd.grad(out, leaf, torch.ones(2, tokens, 1, D, device=device)[:, :4])
    found = [len(kind.backwards.found) for kind in kinds_of() if kind.needs_backward]
    assert found
    assert max(found) <= kinds.MAX_BACKWARDS
