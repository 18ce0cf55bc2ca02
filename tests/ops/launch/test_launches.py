"""Plans on the stub of a GPU: they launch what calls without a plan launch, by few functions of Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import stub_gpu
from helpers.kinds import kinds_of
from torch import Tensor

from ropewalk import Alibi, BlockLists, ExpoSB, QKNorm, Rope, T5Bias, append_kv, apply_rope, attention
from ropewalk.ops.launch import kinds, launcher
from ropewalk.ops.launch.kinds import KINDS

pytestmark = pytest.mark.compile
# Functions of Python that a planned call enters. Sinks' gradient is a step of PyTorch's, and so is that of the natural
# log-sum-exp.
MOST_FORWARD, MOST_RECORDING, MOST_BACKWARD, MOST_DECODING = 22, 29, 42, 23
MOST_BACKWARD_WITH_STEPS = 75
T = 256


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def make(kind: str, impl: str) -> tuple[list[Tensor], dict[str, Any]]:
    """Make q, k, v and the other arguments of a kind of call."""
    lengths = torch.full((2,), T - 10, dtype=torch.int32)
    heads, key_heads, dim = (8, 2, 128) if kind.startswith("gqa") else (4, 4, 64)
    shapes = (2, T, heads, dim), (2, T, key_heads, dim), (2, T, key_heads, dim)
    keywords: dict[str, Any] = {
        "plain": {},
        "rope-lengths": {"position": Rope(), "key_lengths": lengths},
        "gqa-rope-causal": {"position": Rope(), "causal": True},
        "window": {"window": (60, 20)},
        "softcap": {"softcap": 20.0, "causal": True},
        "alibi": {"position": Alibi(), "causal": True},
        "sinks": {"sinks": torch.zeros(heads, requires_grad=True), "window": 64},
        "packed": {"cu_seqlens_q": torch.tensor([0, 100, 2 * T]), "causal": True, "layout": "thd"},
        "packed-window": {"cu_seqlens_q": torch.tensor([0, 100, 2 * T]), "window": (63, 0), "layout": "thd"},
        "mask": {"mask": torch.ones(T, T, dtype=torch.bool), "causal": True},
        "return-lse": {"return_lse": True},
        "dropout": {"dropout_p": 0.1, "causal": True},
        "deterministic": {"deterministic": True, "causal": True},
        **make_kinds_with_steps(heads, dim),
    }[kind]
    if "cu_seqlens_q" in keywords:
        shapes = tuple((2 * T, *shape[2:]) for shape in shapes)  # type: ignore[assignment]
    return [zeros(*shape).requires_grad_() for shape in shapes], {**keywords, "impl": impl}


def make_kinds_with_steps(heads: int, dim: int) -> dict[str, dict[str, Any]]:
    """Make the arguments of calls that make tables, parameters or normed features before they attend."""
    packing = {"cu_seqlens_q": torch.tensor([0, 100, 2 * T]), "causal": True, "layout": "thd", "position": Rope()}
    positions, of_packed = torch.arange(2 * T).reshape(2, T), torch.arange(2 * T)
    weights = [torch.zeros(dim, requires_grad=True) for _ in range(2)]
    return {
        "packed-rope": packing,
        "packed-rope-positions": {**packing, "positions_q": of_packed, "positions_k": of_packed},
        "rope-positions": {"position": Rope(), "positions_q": positions, "positions_k": positions.clone()},
        "rope-key-starts": {"position": Rope(), "key_starts": torch.tensor([3, 0])},
        "learned-alibi": {"position": Alibi(torch.zeros(heads, requires_grad=True)), "causal": True},
        "learned-t5": {"position": T5Bias(torch.zeros(32, heads, requires_grad=True))},
        "learned-exposb": {"position": ExpoSB(band_weights=torch.zeros(heads, requires_grad=True))},
        "sinks-of-halves": {"sinks": torch.zeros(heads, dtype=torch.bfloat16, requires_grad=True)},
        "norm-rope": {"position": Rope(), "norm": QKNorm(*weights)},
        "norm-rope-packed": {**packing, "norm": QKNorm(*weights)},
    }


def leaves_of(tensors: list[Tensor], keywords: dict[str, Any]) -> list[Tensor]:
    """Return all that a call differentiates."""
    owners = [keywords, *(vars(keywords[name]) for name in ("position", "norm") if name in keywords)]
    names = ("sinks", "slopes", "table", "band_weights", "q_weight", "k_weight")
    return [*tensors, *(owner[name] for owner in owners for name in names if owner.get(name) is not None)]


def make_decoding(kind: str) -> tuple[list[Tensor], dict[str, Any]]:
    """Make q, a cache or its pages, and the other arguments of a step of decoding."""
    lengths = torch.full((4,), 1000, dtype=torch.int32)
    keywords = {"causal": True, "keys_rotated": True, "position": Rope(), "impl": "triton"}
    bounds = {"key_lengths": lengths, "query_starts": lengths - 1}
    if kind == "cache":
        return [zeros(4, 1, 8, 128), zeros(4, 4096, 2, 128), zeros(4, 4096, 2, 128)], {**keywords, **bounds}
    table = torch.zeros(4, 16, dtype=torch.int32)
    if kind == "packed":
        where = {"key_lengths": lengths, "cu_seqlens_q": torch.arange(5, dtype=torch.int32), "block_table": table}
        tensors = [zeros(4, 8, 128), zeros(64, 256, 2, 128), zeros(64, 256, 2, 128)]
        return tensors, {"causal": True, "layout": "thd", "impl": "triton", **where}
    return [zeros(4, 1, 8, 128), zeros(64, 256, 2, 128), zeros(64, 256, 2, 128)], {
        **keywords,
        **bounds,
        "block_table": table,
    }


def record(calls: list[Callable[[], Any]]) -> dict[str, Any]:
    """Record the launches of some calls, each without plans and with them."""
    import triton

    binaries: dict[int, str] = {}  # by a function's handle: a rotation's plan loads its kernel once more
    triton.knobs.runtime.kernel_load_end_hook.add(
        lambda module, function, name, metadata, digest: binaries.update({function: digest})
    )
    launches: dict[str, list[Any]] = {}
    for name, on_cpu, is_enabled in (("without", False, True), ("with", True, True), ("by Triton", True, False)):
        kinds.on_cpu, launcher.is_enabled = on_cpu, is_enabled
        KINDS.clear()
        for _ in range(4):
            for call in calls:
                call()
        launches[name] = []
        for call in calls:
            stub_gpu.clear()
            call()
            launches[name].append([(*launch, binaries[launch.function]) for launch in stub_gpu.launches()])
    kinds.on_cpu, launcher.is_enabled = True, True
    KINDS.clear()
    for call in calls * 4:
        call()
    return {"launches": launches, "plans": len(kinds_of())}


def train(kind: str, impl: str) -> dict[str, Any]:
    """Record a forward without a gradient, one that records, and its backward."""
    tensors, keywords = make(kind, impl)
    leaves = leaves_of(tensors, keywords)
    graph: list[Any] = []

    def forward_alone() -> Any:
        return attention(*tensors, **keywords)

    def forward() -> Any:
        with torch.no_grad():
            return forward_alone()

    def remember() -> None:
        graph[:] = [forward_alone()]

    def backward() -> None:
        (results,) = graph
        results = results if isinstance(results, tuple) else (results,)
        torch.autograd.grad(results, leaves, [torch.zeros_like(x) for x in results], retain_graph=True)

    recorded = record([forward, remember, backward])
    # The functions of the calls alone, without the test's own.
    with torch.no_grad():
        n_forward = stub_gpu.python_calls(forward_alone)
    n_recording = stub_gpu.python_calls(forward_alone)
    (results,) = graph
    results = results if isinstance(results, tuple) else (results,)
    grads = [torch.zeros_like(x) for x in results]
    torch.autograd.grad(results, leaves, grads, retain_graph=True)
    n_backward = stub_gpu.python_calls(lambda: torch.autograd.grad(results, leaves, grads, retain_graph=True))
    return {**recorded, "counts": [n_forward, n_recording, n_backward]}


def decode(kind: str) -> dict[str, Any]:
    """Record a step of decoding."""
    tensors, keywords = make_decoding(kind)

    def step() -> Any:
        return attention(*tensors, **keywords)

    recorded = record([step])
    return {**recorded, "count": stub_gpu.python_calls(step)}


def decode_growing(rows: int, layout: str, rotates: bool) -> dict[str, Any]:
    """Record steps of decoding, each with one key more and memory of its own."""
    keywords: dict[str, Any] = {"layout": layout, "impl": "triton"}
    if rotates:
        keywords |= {"position": Rope(), "keys_rotated": True, "causal": True}

    def step(keys: int) -> Callable[[], Any]:
        shapes = (rows, 1, 8, 128), (rows, keys, 2, 128), (rows, keys, 2, 128)
        q, k, v = (zeros(*shape) if layout == "bthd" else zeros(shape[0], shape[2], shape[1], 128) for shape in shapes)
        return lambda: attention(q, k, v, **keywords)

    recorded = record([step(keys) for keys in (513, 514, 515, 700, 1001, 1023)])
    last = step(1022)
    last()
    return {**recorded, "count": stub_gpu.python_calls(last)}


def count_calls_with_lists() -> dict[str, list[int]]:
    """Count the functions of Python that planned calls enter, without lists and with them."""
    kinds.on_cpu = True
    tensors = [zeros(2, T, 4, 64) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in tensors]
    chosen = BlockLists(torch.ones(1, 4, 2, dtype=torch.int32), torch.zeros(1, 4, 2, 1, dtype=torch.int32))
    window = BlockLists(*[getattr(chosen, x) for x in ("counts", "indices")], spans=torch.zeros(1, 1, T, 2).int())
    found = {}
    for name, lists in (("none", None), ("chosen", chosen), ("window", window)):
        counts = []
        for given in (tensors, leaves):

            def call(given: list[Tensor] = given, lists: BlockLists | None = lists) -> Any:
                return attention(*given, causal=True, blocks=lists, impl="triton")

            for _ in range(4):
                call()
            # A result at an address that no earlier one had takes a descriptor more.
            counts.append(min(stub_gpu.python_calls(call) for _ in range(20)))
        found[name] = counts
    return found


def renamed(records: list[Any]) -> list[Any]:
    """Return launches with binaries for handles, and addresses numbered as they first appear.

    A kernel's last two parameters are memory that Triton allocates: none of these kernels reads it.
    """
    numbers = {0: 0}
    launches = []
    for *record, binary in records:
        launch = stub_gpu.Launch(*record)
        *args, scratch, profile = launch.args
        assert (scratch[0], profile[0]) == ("address", "address")
        args = [[x[0], numbers.setdefault(x[1], len(numbers)), *x[2:]] if isinstance(x, list) else x for x in args]
        launches.append(launch._replace(function=binary, args=args))
    return launches


def assert_same_launches(recorded: dict[str, Any]) -> None:
    for name in ("with", "by Triton"):
        for mine, theirs in zip(recorded["launches"][name], recorded["launches"]["without"], strict=True):
            assert mine
            assert renamed(mine) == renamed(theirs)


TRAINING = [
    (kind, impl)
    for kind in (
        *("rope-lengths", "gqa-rope-causal", "plain", "window", "softcap", "alibi", "sinks"),
        *("packed", "packed-window", "mask", "return-lse", "dropout", "deterministic"),
    )
    for impl in ("triton", "gluon")
]


@pytest.mark.parametrize(
    ("kind", "impl"), [*TRAINING[:2], *(pytest.param(*case, marks=pytest.mark.slow) for case in TRAINING[2:])]
)
def test_training_launches_the_same(kind: str, impl: str) -> None:
    recorded = stub_gpu.run(train, kind, impl)
    assert recorded["plans"] == 2
    assert_same_launches(recorded)
    n_forward, n_recording, n_backward = recorded["counts"]
    assert n_forward <= MOST_FORWARD
    assert n_recording <= MOST_RECORDING
    assert n_backward <= (MOST_BACKWARD_WITH_STEPS if kind in ("sinks", "return-lse") else MOST_BACKWARD)
    if kind == "mask" and impl == "gluon":  # it is read in each forward and backward
        for launches in recorded["launches"]["with"]:
            names = [launch[0] for launch in launches]
            assert names[:2] == ["pack_kernel", "compact_kernel"]
            assert names.count("pack_kernel") == names.count("compact_kernel") == 1


def count_backwards(layout: str) -> list[Any]:
    """Count the functions that backwards enter, and what they launch: of a first call's graph, and of a later one's."""
    kinds.on_cpu = True
    shape = (2, 4, T, 64) if layout == "bhtd" else (2, T, 4, 64)
    tensors = [zeros(*shape).requires_grad_() for _ in range(3)]
    grad = zeros(*shape)
    found: list[Any] = []
    for out in [attention(*tensors, position=Rope(), layout=layout, impl="triton") for _ in range(4)][::3]:

        def backward(out: Tensor = out) -> Any:
            return torch.autograd.grad(out, tensors, grad, retain_graph=True)

        for _ in range(3):
            backward()
        stub_gpu.clear()
        backward()
        found.append([stub_gpu.python_calls(backward), [launch.name for launch in stub_gpu.launches()][:8]])
    return found


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_a_first_calls_backward_costs_what_a_later_ones_does(layout: str) -> None:
    (n_first, first), (n_later, later) = stub_gpu.run(count_backwards, layout)
    assert n_first <= n_later + 4
    assert sorted(set(first)) == sorted(set(later))


# By kind: the launches that make rows of tables, and limits of a forward, a forward that records, and a backward.
WITH_STEPS = {
    "packed-rope": (1, 45, 60, 50),
    "packed-rope-positions": (1, 45, 60, 50),
    "rope-positions": (2, 60, 75, 50),
    "rope-key-starts": (1, 45, 60, 50),
    "learned-alibi": (0, 35, 50, 75),
    "learned-t5": (0, 40, 50, 75),
    "learned-exposb": (0, 45, 50, 75),
    "sinks-of-halves": (0, 30, 45, 75),
    "norm-rope": (0, 75, 85, 95),
    "norm-rope-packed": (1, 95, 105, 95),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_STEPS)
def test_kinds_with_steps_before_launch_the_same(kind: str) -> None:
    n_rows, *limits = WITH_STEPS[kind]
    recorded = stub_gpu.run(train, kind, "triton")
    planned = recorded["launches"]["with"]
    for launches in planned[:2]:
        assert [launch[0] for launch in launches].count("table_rows_kernel") == n_rows
    for launches in (recorded["launches"][name] for name in ("with", "by Triton")):
        launches[:] = [[x for x in every if x[0] != "table_rows_kernel"] for every in launches]
    assert_same_launches(recorded)
    for count, limit in zip(recorded["counts"], limits, strict=True):
        assert count <= limit, (kind, recorded["counts"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "last"),
    [
        ("learned-t5", ["bias_grad_kernel", "sum_parts_kernel"]),
        ("learned-alibi", ["bwd_postprocess_kernel", "sum_parts_kernel"]),
        ("learned-exposb", ["bwd_postprocess_kernel", "sum_parts_kernel"]),
    ],
)
def test_learned_scores_on_hopper_launch_the_same(kind: str, last: list[str]) -> None:
    recorded = stub_gpu.run(train, kind, "gluon")
    assert recorded["plans"] == 2
    names = [launch[0] for launches in recorded["launches"]["with"] for launch in launches]
    assert "backward_dq_kernel" not in names
    assert [name for name in names if name in last][-2:] == last
    assert_same_launches(recorded)


@pytest.mark.parametrize("kind", ["cache", "pages", "packed"])
def test_decoding_launches_the_same(kind: str) -> None:
    recorded = stub_gpu.run(decode, kind)
    assert recorded["plans"] == 1
    assert_same_launches(recorded)
    assert recorded["count"] <= MOST_DECODING


@pytest.mark.parametrize(("rows", "layout", "rotates"), [(1, "bhtd", False), (8, "bthd", True)])
def test_decoding_from_a_cache_that_grows_launches_the_same(rows: int, layout: str, rotates: bool) -> None:
    recorded = stub_gpu.run(decode_growing, rows, layout, rotates)
    assert recorded["plans"] == 1
    assert_same_launches(recorded)
    binaries = {launch[-1] for launches in recorded["launches"]["with"] for launch in launches}
    assert len(binaries) == 2  # no length has binaries of its own
    assert recorded["count"] <= MOST_DECODING


def test_a_planned_call_with_lists_enters_few_functions_more():
    """Lists that were seen are found by one function, asked for q's extents by another, and put in place by four."""
    counts = stub_gpu.run(count_calls_with_lists)
    assert counts["none"][0] <= MOST_FORWARD
    for lists in ("chosen", "window"):
        assert all(x - y <= 6 for x, y in zip(counts[lists], counts["none"], strict=True)), counts


# === other operations ===


def make_others() -> dict[str, Callable[[], Any]]:
    """Return calls of other operations, each for its own tensors, which stay at their addresses."""
    q, k, (cos, sin) = zeros(2, 64, 8, 64), zeros(2, 64, 2, 64), torch.zeros(2, 128, 32)
    odd, other_q = zeros(q.numel() + 1)[1:].view(q.shape), q.clone()
    odd_leaves = [odd.detach().requires_grad_(), k.clone().requires_grad_()]
    leaves, weights = [x.clone().requires_grad_() for x in (q, k)], [torch.zeros(64, requires_grad=True) for _ in "qk"]
    pages, table, of_heads = zeros(9, 16, 8, 64), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 1, 64, 8, 32)
    cache, slots, mask = zeros(2, 3, 16, 2, 64), torch.arange(4), torch.ones(2, 64, dtype=torch.bool)
    out, gate = zeros(2, 64, 8, 64).requires_grad_(), zeros(2, 64, 8).requires_grad_()

    def rotate(*xs: Any, tables: Any = (cos, sin), **keywords: Any) -> Any:
        return apply_rope(*xs, *tables, impl="triton", **keywords)

    def train(leaves: list[Tensor] = leaves, **keywords: Any) -> Any:
        outs = rotate(*leaves, **keywords)
        return outs, torch.autograd.grad(
            outs, [*leaves, *(weights if keywords else ())], [*map(torch.zeros_like, outs)]
        )

    def apply_gate() -> Any:
        from ropewalk.ops.attention.gate import operation

        gated = operation.apply_gate(out, gate)
        return gated, torch.autograd.grad(gated, (out, gate), torch.zeros_like(gated))

    def read_mask() -> Any:
        from ropewalk.modules import mask_kernel

        return mask_kernel.read(mask, 2, 64, False, True)

    return {
        "rope": lambda: rotate(q, k),
        "rope in place": lambda: rotate(q, k, inplace=True),
        "rope, misaligned": lambda: rotate(odd, k),
        "rope, offset": lambda: rotate(q, None, positions=7),
        "rope of heads": lambda: rotate(q, other_q, tables=of_heads),
        "rope of pages": lambda: rotate(pages, None, block_table=table, inplace=True),
        "rope, training": train,
        "norm, training": lambda: train(norm=QKNorm(*weights)),
        "norm, misaligned": lambda: train(odd_leaves, norm=QKNorm(*weights)),
        "append": lambda: append_kv(k[0, :4], k[1, :4], *cache, slots, cos=cos, sin=sin, q=q[0, :4], impl="triton"),
        "gate": apply_gate,
        "mask": read_mask,
    }


# The functions that a planned call of each enters at most, its test's own among them.
OTHERS = dict(zip(
    ("rope", "rope in place", "rope, misaligned", "rope, offset", "rope of heads", "rope of pages"),
    (17, 16, 17, 17, 17, 53), strict=True,
)) | {
    "rope, training": 67, "norm, training": 82, "norm, misaligned": 82, "append": 9, "gate": 61, "mask": 7,
}  # fmt: skip


def record_others() -> dict[str, Any]:
    found, calls = record(list(make_others().values())), make_others()
    for call in [*calls.values()] * 4:
        call()
    found["counts"] = {name: min(stub_gpu.python_calls(call) for _ in range(4)) for name, call in calls.items()}
    q, table = zeros(2, 64, 8, 64), torch.zeros(128, 32)
    for positions in (7, 7, 7, 11):  # another offset than that of the plan
        stub_gpu.clear()
        apply_rope(q, None, table, table, positions=positions, impl="triton")
        found[f"offset {positions}"] = stub_gpu.launches()
    return found


def test_other_operations_launch_the_same() -> None:
    recorded = stub_gpu.run(record_others)
    assert_same_launches(recorded)
    for name, most in OTHERS.items():
        assert recorded["counts"][name] <= most, recorded["counts"]
    (before,), (after,) = ([launch[-1] for launch in recorded[f"offset {offset}"]] for offset in (7, 11))
    assert [(x, y) for x, y in zip(before, after, strict=True) if x != y and isinstance(x, int)] == [(7, 11)]
