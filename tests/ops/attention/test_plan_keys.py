"""All that a plan reads is in its key, or read in each call: after calls of one kind, one change is followed."""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from helpers.modes import ON_GPU, needs_kernels, on_gpu
from torch import Tensor

from ropewalk import BlockLists, QKNorm, append_kv, apply_rope, attention
from ropewalk.ops.attention import api, plans
from ropewalk.ops.attention.backend import AtOnce
from ropewalk.ops.attention.plans import leaves
from ropewalk.ops.attention.tables import identity_of, signature_of
from ropewalk.ops.attention.triton import plan as plan_module
from ropewalk.ops.cache import operator as append_operator
from ropewalk.ops.rope import autograd as rope_autograd
from ropewalk.ops.rope import norm_autograd
from ropewalk.ops.rope.call import RopeCall, RopeFlags
from ropewalk.ops.rope.repeat import Repeater
from ropewalk.schemes import Alibi, NoPosition, PositionScheme, Rope, T5Bias
from ropewalk.testing import assert_close_to_truth

pytestmark = needs_kernels
B, T, H, D = 2, 8, 2, 16
IMPLS = ["triton", *(["gluon", None] if ON_GPU else [])]
Call = dict[str, Any]


@pytest.fixture(autouse=True)
def plan_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plan calls of CPU tensors, and begin and end without plans."""
    monkeypatch.setattr(plans.cache, "on_cpu", True)
    forget()
    yield
    forget()


def forget() -> None:
    for cache in (plans.FORWARDS, plans.CALLS, plans.NORMS):
        cache.clear()
    rope_autograd._PLANS.clear()
    rope_autograd._GRADIENT_PLANS.clear()
    norm_autograd._PLANS.clear()
    append_operator._PLANS.clear()
    append_operator._recent = ()


def without_plans(function: Callable[[], Any]) -> Any:
    """Call a function as the first call of a process would run."""
    where = "on_gpu" if ON_GPU else "on_cpu"
    setattr(plans.cache, where, False)
    try:
        return function()
    finally:
        setattr(plans.cache, where, True)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def integers(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def positions(start: int, step: int) -> Tensor:
    return (torch.arange(T) * step + start)[None]


def norms(**keywords: Any) -> QKNorm:
    return QKNorm(draw(D, seed=5), draw(D, seed=6), **keywords)


def place(call: Call, device: torch.device) -> Call:
    """Put a call's tensors on a device, each once: what is one object stays one."""
    placed: dict[int, Any] = {}

    def put(x: Any) -> Any:
        return placed.setdefault(id(x), x.to(device)) if isinstance(x, Tensor) else x

    call = {name: put(x) for name, x in call.items()}
    norm = call.get("norm")
    if norm is not None:
        fields = (norm.eps, norm.offset, norm.after, norm.across_heads)
        call["norm"] = QKNorm(put(norm.q_weight), put(norm.k_weight), *fields)
    return call


def train(call: Call) -> list[Tensor]:
    """Return the results of a call, and the gradients of q, k and v."""
    torch.manual_seed(1)
    tensors = [call[name].detach().requires_grad_() for name in ("q", "k", "v")]
    results = attention(*tensors, **{name: x for name, x in call.items() if name not in "qkv"})
    results = results if isinstance(results, tuple) else (results,)
    loss = sum((x.nan_to_num(neginf=0.0) * torch.linspace(0, 1, x.shape[-1], device=x.device)).sum() for x in results)
    return [*results, *torch.autograd.grad(loss, tensors)]


def infer(call: Call) -> list[Tensor]:
    torch.manual_seed(1)
    with torch.no_grad():
        results = attention(**call)
    return list(results) if isinstance(results, tuple) else [results]


def assert_same(mine: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(mine) == len(theirs)
    for x, y in zip(mine, theirs, strict=True):
        assert x.shape == y.shape
        tolerance = 2e-2 if ON_GPU else 1e-5  # gradients of q are summed in any order there, and cuDNN's all
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def follows(run: Callable[[Call], list[Tensor]], before: Call, after: Call) -> None:
    """Run calls of one kind until they are planned; then the other kind, and the first again, are right."""
    expected = [without_plans(functools.partial(run, call)) for call in (before, after)]
    for _ in range(3):
        assert_same(run(before), expected[0])
    assert_same(run(after), expected[1])
    assert_same(run(before), expected[0])
    for _ in range(2):
        assert_same(run(after), expected[1])


QKV: Call = {"q": draw(B, T, H, D), "k": draw(B, T, H, D, seed=1), "v": draw(B, T, H, D, seed=2)}
PACKED: Call = {"q": draw(T, H, D), "k": draw(T, H, D, seed=1), "v": draw(T, H, D, seed=2), "layout": "thd"}
P, P2, C, C2 = positions(3, 2), positions(0, 5), integers(0, 3, T), integers(0, 5, T)
ROPE, LISTS = Rope(), BlockLists(torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32))
PAGES: Call = {
    "q": draw(B, 1, H, D),
    "k": draw(6, 4, H, D, seed=1),
    "v": draw(6, 4, H, D, seed=2),
    "key_lengths": integers(7, 5),
    "query_starts": integers(6, 4),
    "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
}
MASK = draw(B, 1, T, T, seed=9) > -0.5
# What one call gives, and what another one gives instead. None: nothing.
CHANGES: dict[str, tuple[Call, Call]] = {
    "positions-of-one-tensor": ({**QKV, "position": ROPE, "positions_q": P, "positions_k": P}, {"positions_k": P2}),
    "positions-of-two": ({**QKV, "position": ROPE, "positions_q": P, "positions_k": P2}, {"positions_k": P}),
    "positions-for-scores": ({**QKV, "position": Alibi(), "positions_q": P, "positions_k": P}, {"positions_k": P2}),
    "positions-of-queries": ({**QKV, "position": ROPE, "positions_q": P}, {"positions_q": None, "positions_k": P2}),
    "bounds-of-one-tensor": ({**PACKED, "position": ROPE, "cu_seqlens_q": C}, {"cu_seqlens_k": C2}),
    "bounds-of-queries": ({**PACKED, "position": ROPE, "cu_seqlens_q": C}, {"cu_seqlens_q": integers(0, 2, 4, T)}),
    "bounds-of-two": ({**PACKED, "position": ROPE, "cu_seqlens_q": C, "cu_seqlens_k": C2}, {"cu_seqlens_k": C}),
    "norm-positions": (
        {**QKV, "position": ROPE, "norm": norms(), "positions_q": P, "positions_k": P},
        {"positions_k": P2},
    ),
    "norm-bounds": ({**PACKED, "position": ROPE, "norm": norms(), "cu_seqlens_q": C}, {"cu_seqlens_k": C2}),
    "norm-eps": ({**QKV, "position": ROPE, "norm": norms()}, {"norm": norms(eps=0.5)}),
    "norm-after": ({**QKV, "position": ROPE, "norm": norms()}, {"norm": norms(after=True)}),
    "norm-offset": ({**QKV, "position": ROPE, "norm": norms()}, {"norm": norms(offset=1.0)}),
    "q": ({**QKV}, {"q": draw(B, T, 2 * H, D)}),
    "k": ({**QKV, "position": ROPE}, {"k": draw(B, H, T, D).transpose(1, 2)}),
    "v": ({**QKV}, {"v": QKV["k"]}),
    "mask": ({**QKV}, {"mask": MASK}),
    "mask-of-one-row": ({**QKV, "mask": MASK}, {"mask": MASK[:, :, :1]}),
    "key-lengths": ({**QKV, "position": ROPE}, {"key_lengths": integers(T, 3)}),
    "key-starts": ({**QKV, "position": ROPE}, {"key_starts": integers(0, 3)}),
    "key-lengths-as-starts": (
        {**QKV, "key_lengths": integers(2, 5)},
        {"key_lengths": None, "key_starts": integers(2, 5)},
    ),
    "query-starts": ({**QKV, "causal": True}, {"query_starts": integers(-2, 0)}),
    "blocks": ({**QKV, "causal": True}, {"blocks": LISTS}),
    "sinks": ({**QKV}, {"sinks": draw(H)}),
    "gate": ({**QKV}, {"gate": draw(B, T, H, D)}),
    "gate-of-heads": ({**QKV, "gate": draw(B, T, H, D)}, {"gate": draw(B, T, H)}),
    "block-table": (PAGES, {"block_table": torch.tensor([[4, 1, 5], [2, 3, 0]], dtype=torch.int32)}),
    "scales-of-pages": (
        {
            **PAGES,
            "k": torch.full((6, 4, H, D), 3, dtype=torch.int8),
            "v": torch.full((6, 4, H, D), 5, dtype=torch.int8),
            "k_scale": draw(6, 4, H),
            "v_scale": draw(6, 4, H, seed=1),
        },
        {"k_scale": draw(6, H, 4).transpose(1, 2), "v_scale": draw(6, 4, H)},
    ),
    "position": ({**QKV, "position": ROPE}, {"position": Rope(base=50.0)}),
    "causal": ({**QKV}, {"causal": True}),
    "window": ({**QKV}, {"window": (2, 1)}),
    "scale": ({**QKV}, {"scale": 0.9}),
    "softcap": ({**QKV}, {"softcap": 0.7}),
    "dropout_p": ({**QKV}, {"dropout_p": 0.5}),
    "keys_rotated": ({**QKV, "position": ROPE}, {"keys_rotated": True}),
    "return_lse": ({**QKV}, {"return_lse": True}),
    "layout": ({**QKV, "q": draw(B, T, T, D), "k": draw(B, T, T, D), "v": draw(B, T, T, D)}, {"layout": "bhtd"}),
    "deterministic": ({**QKV}, {"deterministic": True}),
    "impl": ({**QKV, "position": ROPE}, {"impl": "reference"}),
}
CHANGED = {"blocks": ("rows", "columns", "slots", "bits", "spans")}  # by their signature


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", CHANGES)
def test_attention_follows_a_change(device: torch.device, kind: str, impl: str | None) -> None:
    before, change = CHANGES[kind]
    before = {"impl": impl, **before}
    if ON_GPU:
        before = {
            name: x.half() if isinstance(x, Tensor) and x.dtype == torch.float32 else x for name, x in before.items()
        }
        change = {name: x.half() if name in ("q", "k", "v", "gate") else x for name, x in change.items()}
    after = {name: x for name, x in {**before, **change}.items() if x is not None or name == "impl"}
    before, after = place(before, device), place(after, device)
    run = infer if "block_table" in before else train
    follows(run, before, after)
    if run is train:
        follows(infer, before, after)


def test_the_list_above_has_all_that_a_caller_gives() -> None:
    changed = {name for _, change in CHANGES.values() for name in change}
    blocks = {f"blocks_{name}" for name in CHANGED["blocks"]}
    assert {*leaves.Given._fields, *leaves.Flags._fields} <= changed | blocks


def test_the_api_gives_tensors_and_flags_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """`attention` passes plain tuples in the order of named ones."""
    tensors = [name for name in leaves.Given._fields if not name.startswith("blocks_")]
    call = {name: torch.zeros(1, 1, 1, 1) for name in tensors}
    call |= {name: f"a {name}" for name in leaves.Flags._fields}
    passed = []

    def find(given: Any, position: Any, flags: Any, of_blocks: Any) -> Any:
        passed.append((leaves.Given._make(given), leaves.Flags._make(flags)))
        raise KeyError

    monkeypatch.setattr(api.plans, "find_call", find)
    with pytest.raises(KeyError):
        attention(**call)
    ((given, flags),) = passed
    assert all(getattr(given, name) is call[name] for name in tensors)
    assert all(getattr(flags, name) == call[name] for name in leaves.Flags._fields)


# === switches ===


def collect_precisions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that grows by how each launch's products are computed."""
    found: list[Any] = []
    at_once, planned = AtOnce.launch, plan_module._launch_kernel

    def note(arguments: Any) -> None:
        found.extend(x for x in arguments.values() if x in ("tf32", "ieee") and isinstance(x, str))

    def launch(steps: Any, kernel: Any, n_programs: int, /, **arguments: Any) -> None:
        note({name: x for name, x in arguments.items() if isinstance(x, str)})
        at_once(steps, kernel, n_programs, **arguments)

    def launch_planned(kernel: Any, n_programs: int, arguments: dict[str, Any]) -> None:
        note({name: x for name, x in arguments.items() if isinstance(x, str)})
        planned(kernel, n_programs, arguments)

    monkeypatch.setattr(AtOnce, "launch", launch)
    monkeypatch.setattr(plan_module, "_launch_kernel", launch_planned)
    return found


@pytest.fixture
def tf32() -> Iterator[Callable[[bool], None]]:
    before = torch.backends.cuda.matmul.allow_tf32

    def switch(is_on: bool) -> None:
        torch.backends.cuda.matmul.allow_tf32 = is_on

    yield switch
    switch(before)


@pytest.mark.skipif(ON_GPU, reason="plans launch by Triton's launcher there")
def test_a_backward_follows_the_switch_of_tf32(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, tf32: Callable[[bool], None]
) -> None:
    q, k, v = (QKV[name].clone().to(device).requires_grad_() for name in "qkv")
    precisions = collect_precisions(monkeypatch)
    for number in range(5):  # a first call's graph, too
        tf32(False)
        out = attention(q, k, v, impl="triton")
        for is_on in (True, False, True, False):
            tf32(is_on)
            precisions.clear()
            torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
            assert set(precisions) == {"tf32" if is_on else "ieee"}, number


@on_gpu
@pytest.mark.parametrize("impl", ["triton"])
def test_a_backward_is_exact_without_tf32(device: torch.device, impl: str, tf32: Callable[[bool], None]) -> None:
    q, k, v = (draw(2, 200, 2, 64, seed=seed).to(device).requires_grad_() for seed in range(3))
    for is_on in (False, True, False):
        tf32(False)
        out = attention(q, k, v, impl=impl)
        tf32(is_on)
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    tf32(False)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact, baseline = (
        torch.autograd.grad(attention(*leaves, impl="reference").square().sum(), leaves) for leaves in (wide, [q, k, v])
    )
    for mine, truth, by_reference in zip(grads, exact, baseline, strict=True):
        assert_close_to_truth(mine, truth, by_reference, roundings=4)


# === streams ===


def tensors_kept_by(plan: Any) -> list[Tensor]:
    """Return the tensors with memory that a plan reaches by its own objects."""
    found, seen, waiting = [], set(), [plan]
    while waiting:
        x = waiting.pop()
        if id(x) in seen or isinstance(x, (type, types.ModuleType, str, int, float, torch.device, torch.dtype)):
            continue
        seen.add(id(x))
        if isinstance(x, Tensor):
            if x.device.type != "meta" and x.untyped_storage().nbytes():
                found.append(x)
        elif isinstance(x, types.FunctionType):
            waiting += [*(x.__closure__ or ()), *(x.__defaults__ or ())]
        elif isinstance(x, (dict, list, tuple, types.CellType, functools.partial, types.MethodType)) or (
            type(x).__module__.startswith("ropewalk.ops.attention.plans")
        ):
            waiting += [y for y in gc.get_referents(x) if y is not None]
    return found


KEEPS: dict[str, Call] = {
    "rope": {**QKV, "position": ROPE},
    "positions": {**QKV, "position": Rope(attention_factor=1.2), "positions_q": P, "positions_k": P2},
    "alibi": {**QKV, "position": Alibi()},
    "t5": {**QKV, "position": T5Bias(torch.randn(32, H, requires_grad=True))},
    "norm": {**QKV, "position": ROPE, "norm": norms()},
    "library": {**QKV, "position": ROPE, "impl": "sdpa"},
}


@pytest.mark.skipif(ON_GPU, reason="gradients of a table that was placed there")
@pytest.mark.parametrize("kind", KEEPS)
def test_a_plan_lists_the_tensors_that_it_keeps(kind: str) -> None:
    """`Cache.find` waits for these: the first reader's stream makes them, and another one reads them."""
    for _ in range(3):
        train({"impl": "triton", **KEEPS[kind]})
    made = [plan for cache in (plans.CALLS, plans.NORMS) for plan in cache.found.values() if plan is not None]
    assert made
    for plan in made:
        kept = {x.untyped_storage().data_ptr() for x in plan.constants}
        assert {x.untyped_storage().data_ptr() for x in tensors_kept_by(plan)} <= kept


@on_gpu
@pytest.mark.parametrize("impl", ["triton", "gluon"])
@pytest.mark.parametrize("kind", ["blocks", "t5"])
def test_what_one_stream_makes_another_one_waits_for(device: torch.device, kind: str, impl: str) -> None:
    q, k, v = (draw(1, 512, 4, 64, seed=seed).half().to(device) for seed in range(3))

    def given() -> Call:
        if kind == "t5":
            return {"position": T5Bias(draw(32, 4).to(device).requires_grad_())}
        return {"blocks": BlockLists(*(x.to(device) for x in (counts, indices)))}

    counts = torch.tensor([[[1, 2, 1, 3]]], dtype=torch.int32)
    indices = torch.tensor([[[[3, 0, 0], [0, 2, 0], [1, 0, 0], [0, 1, 3]]]], dtype=torch.int32)
    expected = without_plans(lambda: attention(q, k, v, impl=impl, **given()))
    for _ in range(3):
        keywords, streams = given(), [torch.cuda.Stream() for _ in range(3)]
        plans.CALLS.clear()
        torch.cuda.synchronize()
        for stream in (*streams, *streams[:1]):
            with torch.cuda.stream(stream):
                if stream is streams[0]:
                    torch.cuda._sleep(100_000_000)
                out = attention(q, k, v, impl=impl, **keywords)
                stream.synchronize()
            torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)


# === tensors whose address says nothing ===


def negated(x: Tensor) -> Tensor:
    return torch._neg_view(-x)


def zero(x: Tensor) -> Tensor:
    return torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device)


ODD = {"negated": (negated, lambda x: x), "zero": (zero, torch.zeros_like)}


def differentiate_attention(device: torch.device, odd: Callable[[Tensor], Tensor], where: str) -> list[Tensor]:
    q, k, v, g = (draw(B, T, H, D, seed=seed).to(device) for seed in range(4))
    of_lse, gate = draw(B, H, T, seed=7).to(device), draw(B, T, H, D, seed=8).to(device)
    keywords: Call = {"impl": "triton", "position": ROPE}
    if where == "gate":
        keywords["gate"] = odd(gate)
    if where in ("sdpa", "gate-after"):
        keywords["impl"] = "sdpa"
    if where == "gate-after":
        keywords["gate"] = gate.requires_grad_()
    if where == "norm":
        keywords["norm"] = QKNorm(odd(draw(D).to(device)), draw(D).to(device))
    if where == "slopes":
        keywords["position"] = Alibi(odd(draw(H).abs().to(device)))
    if where == "q":
        q = odd(q)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, return_lse=True, **keywords) if "impl" != keywords["impl"] != "sdpa" else (None, None)
    if out is None:
        out = attention(*leaves, **keywords)
        return [out, *torch.autograd.grad(out, leaves, odd(g) if where in ("sdpa", "gate-after") else g)]
    grads = odd(g) if where == "grad_out" else g, odd(of_lse) if where == "grad_lse" else of_lse
    return [out, lse, *torch.autograd.grad((out, lse), leaves, grads)]


def differentiate_rotation(device: torch.device, odd: Callable[[Tensor], Tensor], where: str) -> list[Tensor]:
    q, k, g = (draw(B, T, H, D, seed=seed).to(device) for seed in range(3))
    table, weight = draw(T, D // 2).to(device), draw(D).to(device)
    norm = QKNorm(odd(weight) if where == "rope-norm-weight" else weight, weight) if "norm" in where else None
    leaves = [(odd(q) if where == "rope-q" else q).detach().requires_grad_(), k.requires_grad_()]
    outs = apply_rope(*leaves, odd(table) if where == "rope-cos" else table, table, norm=norm, impl="triton")
    return [*outs, *torch.autograd.grad(outs, leaves, [odd(g) if "grad" in where else g, g])]


def append(device: torch.device, odd: Callable[[Tensor], Tensor], where: str) -> list[Tensor]:
    q, k, v = (draw(3, H, D, seed=seed).to(device) for seed in range(3))
    caches = [torch.zeros(2, 4, H, D, device=device) for _ in range(2)]
    tables, weight = draw(T, D // 2).to(device), draw(D).to(device)
    numbers = torch.tensor([1, 2, 3], device=device)
    norm = QKNorm(weight, odd(weight) if where == "append-weight" else weight)
    where_to = odd(numbers) if where == "append-positions" else numbers
    out = append_kv(k, v, *caches, numbers, cos=tables, sin=tables, q=q, positions=where_to, norm=norm, impl="triton")
    assert out is not None
    return [out, *caches]


ENTRIES: dict[str, Callable[..., list[Tensor]]] = {
    **dict.fromkeys(
        ("grad_out", "grad_lse", "q", "gate", "norm", "slopes", "sdpa", "gate-after"), differentiate_attention
    ),
    **dict.fromkeys(("rope-grad", "rope-q", "rope-cos", "rope-norm-grad", "rope-norm-weight"), differentiate_rotation),
    **dict.fromkeys(("append-weight", "append-positions"), append),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("where", ENTRIES)
def test_tensors_whose_address_says_nothing(device: torch.device, where: str, kind: str) -> None:
    """Lazily negated ones hold the opposite values; what is known to be zero has no memory."""
    if where == "slopes" and kind == "zero":
        pytest.skip("the values of slopes on a CPU are read")
    if ON_GPU and where in ("sdpa", "gate-after"):
        pytest.skip("cuDNN takes halves")
    odd, plain = ODD[kind]
    run = ENTRIES[where]
    expected = without_plans(lambda: run(device, plain, where))
    assert_same(run(device, odd, where), expected)
    for _ in range(3):
        run(device, lambda x: x, where)
    for _ in range(2):
        assert_same(run(device, odd, where), expected)


# === calls that launch little ===


@pytest.mark.parametrize("bounds", [(0, 0), (0,), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("position", [ROPE, Alibi(), NoPosition()], ids=lambda x: type(x).__name__)
def test_no_token_in_all(device: torch.device, position: PositionScheme, bounds: tuple[int, ...]) -> None:
    q, k, v = (torch.zeros(0, H, D, device=device, requires_grad=True) for _ in range(3))
    gate = torch.zeros(0, H, device=device)
    given: Call = {"layout": "thd", "position": position, "cu_seqlens_q": integers(*bounds).to(device)}
    for _ in range(4):
        for keywords in ({}, {"gate": gate}):
            out = attention(q, k, v, impl="triton", **given, **keywords)
            assert out.shape == (0, H, D)
            assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k, v))] == [(0, H, D)] * 3


@pytest.mark.parametrize("bounds", [(0, 0), (0,)], ids=str)
def test_tokens_of_no_sequence(device: torch.device, bounds: tuple[int, ...]) -> None:
    tensors = [PACKED[name].to(device) for name in "qkv"]
    call = {**dict(zip("qkv", tensors, strict=True)), "layout": "thd", "position": ROPE, "impl": "triton"}
    for _ in range(4):
        for x in train({**call, "cu_seqlens_q": integers(*bounds).to(device)}):
            assert not x.any()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", ["slopes", "table"])
@pytest.mark.parametrize("has_other_keys", [False, True])
def test_packed_calls_that_learn_scores_by_positions(
    device: torch.device, kind: str, impl: str | None, has_other_keys: bool
) -> None:
    dtype = torch.float16 if ON_GPU else torch.float32
    keys = T + 4 if has_other_keys else T
    of_k = integers(0, 5, keys).to(device) if has_other_keys else None
    bounds = {"cu_seqlens_q": C.to(device), "cu_seqlens_k": of_k, "layout": "thd"}
    bounds |= {"positions_q": P.flatten().to(device), "positions_k": torch.arange(keys, device=device)}
    learned = (draw(H).abs() if kind == "slopes" else draw(32, H)).to(device)

    def run(dtype: torch.dtype, impl: str | None) -> list[Tensor]:
        shapes = (T, H, D), (keys, H, D), (keys, H, D)
        tensors = [draw(*shape, seed=seed).to(device, dtype).requires_grad_() for seed, shape in enumerate(shapes)]
        leaf = learned.to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
        position = Alibi(leaf) if kind == "slopes" else T5Bias(leaf)
        out = attention(*tensors, position=position, impl=impl, **bounds)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [*tensors, leaf])]

    exact = without_plans(lambda: run(torch.float64, "reference"))
    # In 16 bits a kernel's gradient of the slopes has other roundings than the reference's: its own is the measure.
    baseline = without_plans(lambda: run(dtype, impl if ON_GPU else "reference"))
    for _ in range(4):
        for mine, truth, by_reference in zip(run(dtype, impl), exact, baseline, strict=True):
            assert_close_to_truth(mine, truth, by_reference, roundings=4)


def test_a_plan_that_is_given_up_draws_no_seed(device: torch.device) -> None:
    q, k, v = (QKV[name].to(device) for name in "qkv")
    sinks = draw(H).half().to(device)

    def run(v: Tensor) -> Tensor:
        torch.manual_seed(3)
        out: Tensor = attention(q, k, v, sinks=sinks, dropout_p=0.5, impl="triton")
        return out

    misaligned = torch.zeros(v.numel() + 1, device=device)[1:].view(v.shape).copy_(v)
    expected = without_plans(lambda: run(v))
    for _ in range(3):
        assert torch.equal(run(v), expected)
    assert torch.equal(run(misaligned), expected)


@pytest.mark.parametrize("name", ["k_scale", "v_scale", "blocks", "cu_seqlens_q", "positions_k", "block_table"])
def test_what_is_refused_beside_a_cache_stays_refused(device: torch.device, name: str) -> None:
    q, k, v = draw(1, 1, H, D).to(device), *(draw(1, 300, H, D, seed=seed).to(device) for seed in (1, 2))
    for _ in range(3):
        attention(q, k, v, impl="triton")
    with pytest.raises((ValueError, TypeError), match=name):
        attention(q, k, v, impl="triton", **{name: torch.zeros(1, 7, device=device)})


# === a backward that runs again ===


@pytest.mark.parametrize("layout", ["bthd", "bhtd", "thd"])
def test_a_first_calls_backward_is_planned_when_it_runs_again(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    shape = {"bthd": (B, T, H, D), "bhtd": (B, H, T, D), "thd": (T, H, D)}[layout]
    packing = {"cu_seqlens_q": C.to(device)} if layout == "thd" else {}
    q, k, v, g = (draw(*shape, seed=seed).to(device) for seed in range(4))
    gate = draw(*shape, seed=5).to(device).requires_grad_()
    leaves = [x.requires_grad_() for x in (q, k, v)] + [gate]
    runs, run_at = [], plans.BackwardPlan.run_at

    def count(plan: Any, *arguments: Any) -> Any:
        runs.append(plan)
        return run_at(plan, *arguments)

    monkeypatch.setattr(plans.BackwardPlan, "run_at", count)
    out = attention(q, k, v, gate=gate, position=ROPE, layout=layout, impl="triton", **packing)
    first = torch.autograd.grad(out, leaves, g, retain_graph=True)
    assert not runs
    for number in range(1, 4):
        again = torch.autograd.grad(out, leaves, g, retain_graph=True)
        assert len(runs) == number
        for x, y in zip(again, first, strict=True):
            assert torch.equal(x, y)
            assert x.stride() == y.stride()
    transposed = torch.autograd.grad(out, leaves, g.mT.contiguous().mT, retain_graph=True)
    for x, y in zip(transposed, first, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    out.mul_(2)  # it is no view that refuses to be written
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, leaves, g)


# === schemes by value ===


class _Custom(PositionScheme):
    def __init__(self, value: Any) -> None:
        self.value = value


def test_schemes_are_known_by_exact_values() -> None:
    values = [True, 1, 1.0, 0, False, 0.0, -0.0, "1", None]
    values += [torch.tensor([x]) for x in (0.0, -0.0, 1.0)] + [torch.tensor([1]), torch.tensor([True])]
    for key_of in (identity_of, signature_of):
        assert len({key_of(_Custom(value)) for value in values}) == len(values)
        nan = torch.tensor([float("nan"), 2.0])
        assert key_of(_Custom(nan)) == key_of(_Custom(nan.clone()))
        assert key_of(_Custom(negated(nan[1:]))) is not None
    assert identity_of(_Custom(negated(torch.ones(2)))) == identity_of(_Custom(torch.ones(2)))


# === the rotation and the cache ===

TABLE, TABLE2 = draw(T, D // 2), draw(T, D // 2, seed=1)
ROTATIONS: dict[str, tuple[Call, Call]] = {
    "k": ({}, {"k": None}),
    "q": ({}, {"q": draw(B, T, 4, D)}),
    "cos": ({}, {"cos": TABLE2}),
    "one-table": ({"sin": TABLE}, {"sin": TABLE2}),
    "positions": ({}, {"positions": P.flip(1) % T}),
    "offset": ({"positions": 0, "q": draw(B, 4, H, D), "k": draw(B, 4, H, D)}, {"positions": 3}),
    "axes": ({"positions": P % T}, {"positions": torch.stack((P % T, P2 % T)), "axes": integers(*[0, 1] * (D // 4))}),
    "interleaved": ({}, {"interleaved": True}),
    "inverse": ({}, {"inverse": True}),
    "rotary_offset": ({"cos": TABLE[:, :4].contiguous(), "sin": TABLE2[:, :4].contiguous()}, {"rotary_offset": 4}),
    "pair_block": ({}, {"pair_block": 8}),
    "norm": ({}, {"norm": norms()}),
    "norm-eps": ({"norm": norms()}, {"norm": norms(eps=0.5)}),
    "norm-offset": ({"norm": norms()}, {"norm": norms(offset=1.0)}),
    "norm-after": ({"norm": norms()}, {"norm": norms(after=True)}),
    "norm-without-a-weight": ({"norm": norms()}, {"norm": QKNorm(None, None)}),
    "norm-of-positions": ({"norm": norms(), "positions": P % T}, {"positions": P2 % T}),
}


def rotate(call: Call) -> list[Tensor]:
    leaves = [call[name].detach().requires_grad_() for name in "qk" if call[name] is not None]
    q, k = (*leaves, None) if len(leaves) == 1 else leaves
    outs = apply_rope(q, k, **{name: x for name, x in call.items() if name not in "qk"})
    outs = outs if isinstance(outs, tuple) else (outs,)
    return [*outs, *torch.autograd.grad(sum(x.square().sum() for x in outs), leaves)]


def follows_anew(run: Callable[[Call], list[Tensor]], before: Call, after: Call) -> None:
    """As `follows`, where plans can be forgotten and not switched off."""
    expected = []
    for call in (before, after):
        forget()
        expected.append(run(call))
    forget()
    for call, theirs in ((before, 0), (before, 0), (before, 0), (after, 1), (before, 0), (after, 1)):
        assert_same(run(call), expected[theirs])


@pytest.mark.parametrize("kind", ROTATIONS)
def test_a_rotation_follows_a_change(device: torch.device, kind: str) -> None:
    before, change = ROTATIONS[kind]
    before = {"q": QKV["q"], "k": QKV["k"], "cos": TABLE, "sin": TABLE2, "impl": "triton", **before}
    follows_anew(rotate, place(before, device), place({**before, **change}, device))


APPENDS: dict[str, tuple[Call, Call]] = {
    "slots": ({}, {"slots": torch.tensor([7, 0])}),
    "positions": ({}, {"positions": torch.tensor([4, 1, 6])}),
    "positions-of-others": ({"positions": torch.tensor([0, 1, 2])}, {"positions": torch.tensor([4, 1, 6])}),
    "interleaved": ({}, {"interleaved": True}),
    "rotary_offset": ({"cos": TABLE[:, :4].contiguous(), "sin": TABLE2[:, :4].contiguous()}, {"rotary_offset": 4}),
    "q": ({}, {"q": None}),
    "norm": ({}, {"norm": norms()}),
    "norm-eps": ({"norm": norms()}, {"norm": norms(eps=0.5)}),
    "norm-after": ({"norm": norms()}, {"norm": norms(after=True)}),
    "one-weight": ({"norm": QKNorm(TABLE.flatten()[:D], TABLE.flatten()[:D])}, {"norm": norms()}),
    "one-table": ({"sin": TABLE}, {"sin": TABLE2}),
}


def write(call: Call) -> list[Tensor]:
    caches = [torch.zeros(2, 4, H, D, device=call["k"].device) for _ in range(2)]
    out = append_kv(call["k"], call["v"], *caches, **{name: x for name, x in call.items() if name not in ("k", "v")})
    return [*caches, *([] if out is None else [out])]


@pytest.mark.parametrize("kind", APPENDS)
def test_appending_follows_a_change(device: torch.device, kind: str) -> None:
    before, change = APPENDS[kind]
    given = {name: draw(3, H, D, seed=seed) for seed, name in enumerate("kvq")}
    before = {**given, "slots": torch.tensor([1, 2, 6]), "cos": TABLE, "sin": TABLE2, "impl": "triton", **before}
    after = {name: x for name, x in {**before, **change}.items() if x is not None}
    follows_anew(write, place(before, device), place(after, device))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"rotary_offset": 0}, {"rotary_offset": 0.0}),
        ({"rotary_dim": D}, {"rotary_dim": float(D)}),
        ({"norm": QKNorm(eps=1.0)}, {"norm": QKNorm(eps=True)}),
        ({"norm": QKNorm(after=True)}, {"norm": QKNorm(after=1)}),  # type: ignore[arg-type]
    ],
)
def test_a_rotation_refuses_equal_numbers_of_another_type(device: torch.device, right: Call, wrong: Call) -> None:
    q, k = (QKV[name].to(device) for name in "qk")
    table = TABLE.to(device)
    for _ in range(3):
        apply_rope(q, k, table, table, **right)
    with pytest.raises(TypeError):
        apply_rope(q, k, table, table, **wrong)


def test_a_repeated_rotation_is_differentiated_by_its_own_flags(device: torch.device) -> None:
    """Also after its caller repeats another kind, and that one's backward has run."""
    q, k, g = (draw(B, T, H, D, seed=seed).to(device) for seed in range(3))
    q, k = q.requires_grad_(), k.requires_grad_()
    table, table2 = TABLE.to(device), TABLE2.to(device)
    repeater = Repeater()
    graphs = []
    for interleaved in (False, True):
        call = RopeCall(table, table2, None, None, 0, RopeFlags("bthd", interleaved, impl="triton"))
        repeater.learn(q, k, call)
        outs = repeater.rotate(q, k, call)
        assert outs is not None
        graphs.append((interleaved, outs))
    for interleaved, outs in (*graphs, *graphs[::-1], *graphs):
        expected = apply_rope(q, k, table, table2, interleaved=interleaved, impl="triton")
        mine, theirs = (torch.autograd.grad(x, (q, k), (g, g), retain_graph=True) for x in (outs, expected))
        assert_same(list(mine), list(theirs))


def test_each_device_has_its_own_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled kernel holds the function of the device that it was loaded onto."""
    monkeypatch.setattr(plan_module, "compile_kernel", lambda spec: object())
    plan_module._compile_rope.cache_clear()
    spec: Any = "a specialisation"
    compiled = [plan_module._compile_rope(spec, device) for device in (0, 1, 0)]
    assert compiled[0] is compiled[2] is not compiled[1]
    plan_module._compile_rope.cache_clear()


# === saved tensors ===


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("hooks", ["clone", "save_on_cpu"])
def test_a_backward_reads_what_hooks_give_back(device: torch.device, hooks: str, impl: str | None) -> None:
    """Hooks give back dense copies, of other strides than the mask had that is read where it lies."""
    call = {**QKV, "position": Alibi(), "causal": True, "mask": draw(B, 1, 1, T, seed=9) > -1.0, "impl": impl}
    if ON_GPU:
        call = {name: x.half() if name in "qkv" else x for name, x in call.items()}
    call = place(call, device)
    packing = {
        "clone": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x),
        "save_on_cpu": torch.autograd.graph.save_on_cpu,
    }[hooks]
    expected = without_plans(functools.partial(train, call))
    for _ in range(3):
        for _ in range(2):
            assert_same(train(call), expected)
        with packing():
            found = train(call)
        assert_same(found, expected)


# === threads ===


@on_gpu
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("calls", [0, 3])
def test_a_new_thread_launches(device: torch.device, calls: int, learns: bool, impl: str | None) -> None:
    """A new thread has no CUDA context, which descriptors need: neither for its first call nor for a planned one."""
    run = train if learns else infer
    tensors = {name: draw(2, 128, 4, 64, seed=seed).half() for seed, name in enumerate("qkv")}
    call = place({**tensors, "causal": True, "impl": impl, "return_lse": calls == 3}, device)
    expected = without_plans(functools.partial(run, call))
    for _ in range(calls):
        run(call)
    for _ in range(4):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            assert_same(pool.submit(run, call).result(), expected)
