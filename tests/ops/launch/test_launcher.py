"""The launcher in C on the stub of a GPU: the same launches as by Triton's launchers, and its refusals."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import stub_gpu
from helpers.kinds import kinds_of
from torch import Tensor

from ropewalk import Rope, attention
from ropewalk import device as gpu
from ropewalk.ops import tracing
from ropewalk.ops.launch import kinds
from ropewalk.ops.launch.bind import load_kernel
from ropewalk.ops.launch.kinds import KINDS
from ropewalk.ops.launch.plan import Builder
from ropewalk.ops.launch.steps import UnplannableError

pytestmark = pytest.mark.compile
T = 256
launcher = pytest.importorskip("ropewalk.ops.launch.launcher", reason="Triton is missing")


def draw(heads: int = 4, key_heads: int = 4, dim: int = 64) -> list[Tensor]:
    shapes = ((2, T, n, dim) for n in (heads, key_heads, key_heads))
    return [torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]


def train(impl: str) -> dict[str, Any]:
    """Record the launches of training by planned calls, by Triton's launchers and by ours."""
    kinds.on_cpu = True
    tensors, lengths = draw(), torch.full((2,), T - 10, dtype=torch.int32)
    records: dict[str, Any] = {}
    for name, is_enabled in (("Triton's", False), ("ours", True)):
        launcher.is_enabled = is_enabled
        KINDS.clear()
        for _ in range(4):
            stub_gpu.clear()
            out = attention(*tensors, impl=impl, position=Rope(), key_lengths=lengths)
            torch.autograd.grad(out, tensors, torch.zeros_like(out))
            del out
        records[name] = stub_gpu.launches()
        records[f"functions, {name}"] = len(kinds_of()[0].plan.launches)
    return {**records, "missing": launcher.why_missing(), "imports Dynamo": "torch._dynamo" in sys.modules}


def without_addresses(records: list[Any]) -> list[Any]:
    """Return launches with addresses numbered as they first appear; a function's handle differs between plans."""
    numbers, launches = {0: 0}, []
    for record in records:
        launch = stub_gpu.Launch(*record)
        args = [
            [x[0], numbers.setdefault(x[1], len(numbers)), *x[2:]] if isinstance(x, list) else x for x in launch.args
        ]
        launches.append(launch._replace(function=0, args=args))
    return launches


@pytest.mark.parametrize("impl", ["triton", "gluon"])
def test_it_launches_as_triton_does(impl: str) -> None:
    recorded = stub_gpu.run(train, impl)
    assert recorded["missing"] is None
    assert not recorded["imports Dynamo"]  # which takes seconds
    assert without_addresses(recorded["ours"]) == without_addresses(recorded["Triton's"])
    assert len(recorded["ours"]) > 3
    assert (recorded["functions, Triton's"], recorded["functions, ours"]) == (2, 1)


def change_addresses() -> dict[str, Any]:
    """Count encoded descriptors while more tensors come than are kept, and compare the launches' addresses."""
    kinds.on_cpu = True
    count = 3 * 64
    many = [draw() for _ in range(count)]
    wrong = 0
    with torch.no_grad():
        kept = [attention(*many[0], impl="triton") for _ in range(8)]  # else malloc says which outputs are new
        stub_gpu.clear()
        kept += [attention(*many[0], impl="triton") for _ in range(4)]
        encoded = stub_gpu.counts().descriptors
        for tensors in many + many:
            stub_gpu.clear()
            out = attention(*tensors, impl="triton")
            (launch,) = stub_gpu.launches()
            found = {x[1] for x in launch.args if isinstance(x, (list, tuple))}
            wrong += not {x.data_ptr() for x in (*tensors, out)} <= found
    return {"encoded": encoded, "wrong": wrong}


def test_descriptors_follow_the_addresses() -> None:
    """Four new outputs are encoded, and q, k and v are not encoded again."""
    assert stub_gpu.run(change_addresses) == {"encoded": 4, "wrong": 0}


def refuse() -> dict[str, Any]:
    """Let the driver refuse a launch, call with wrong arguments, and then again with right ones."""
    kinds.on_cpu = True
    tensors = draw()
    messages = []
    with torch.no_grad():
        for _ in range(3):
            attention(*tensors, impl="triton")
        (run,) = kinds_of()[0].plan.launches
        driver = stub_gpu._driver()
        driver.stub_refuse(400)
        try:
            attention(*tensors, impl="triton")
        except RuntimeError as error:
            messages.append(str(error))
        driver.stub_refuse(0)
        for arguments in (([], 0), ((1, 2, 3), 0), ([0] * 9, "stream"), ([0] * 9,), ([None] * 9, 0), ([-1] * 9, 0)):
            try:
                run(*arguments)
            except (TypeError, OverflowError) as error:
                messages.append(type(error).__name__)
        stub_gpu.clear()
        attention(*tensors, impl="triton")
    return {"messages": messages, "launches": stub_gpu.counts().launches}


def test_the_drivers_refusal_is_an_error_with_its_name() -> None:
    recorded = stub_gpu.run(refuse)
    first, *others = recorded["messages"]
    assert "CUDA_ERROR_INVALID_HANDLE" in first
    assert others == ["TypeError"] * 5 + ["OverflowError"]
    assert recorded["launches"] == 1


def run_threads() -> dict[str, Any]:
    """Run one plan in several threads with tensors of their own, and compare all launches' addresses."""
    kinds.on_cpu = True
    sets = [[x.detach() for x in draw()] for _ in range(4)]
    for _ in range(3):
        attention(*sets[0], impl="triton")
    stub_gpu.clear()
    sys.setswitchinterval(1e-6)
    threads = [
        threading.Thread(target=lambda tensors=tensors: [attention(*tensors, impl="triton") for _ in range(100)])
        for tensors in sets
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [{x.data_ptr() for x in tensors} for tensors in sets]
    launches = stub_gpu.launches()
    found = [{x[1] for x in launch.args if isinstance(x, (list, tuple))} for launch in launches]
    return {"launches": len(launches), "wrong": sum(not any(e <= f for e in expected) for f in found)}


def test_threads_do_not_mix_their_addresses() -> None:
    assert stub_gpu.run(run_threads) == {"launches": 400, "wrong": 0}


def drop() -> int:
    """Return how many functions that encode descriptors outlive a plan."""
    kinds.on_cpu = True
    from ropewalk.ops.launch import bind

    with torch.no_grad():
        for _ in range(3):
            attention(*draw(), impl="triton")
    KINDS.clear()
    gc.collect()
    return sum(isinstance(x, bind._Descriptors) for x in gc.get_objects())


def test_a_dropped_plan_leaves_nothing() -> None:
    assert stub_gpu.run(drop) == 0


@pytest.fixture
def unknown() -> Iterator[None]:
    """Forget the module that is loaded, before and after a test."""
    launcher._load.cache_clear()
    yield
    launcher._load.cache_clear()


@pytest.mark.usefixtures("unknown")
@pytest.mark.parametrize("version", ["4.0.1", "main", "v3.7", "3.x+git", ""])
def test_an_unknown_triton_is_a_reason(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    import triton

    monkeypatch.setattr(triton, "__version__", version)
    assert launcher.why_missing() == f"Triton {version} is not one that it was tested with"


@pytest.mark.usefixtures("unknown")
def test_a_module_without_the_function_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.runtime.build.compile_module_from_src", lambda *given, **keywords: sys)
    assert launcher.why_missing() == "what was built has no function make"


@pytest.mark.usefixtures("unknown")
def test_a_failed_build_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = tmp_path / "launcher.c"
    wrong.write_text("int main(")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launcher, "_SOURCE", wrong)
    assert str(launcher.why_missing()).startswith("it cannot be built: ")


@pytest.mark.parametrize(
    ("version", "release"), [("2.13.0a0+git1", (2, 13)), ("3.7", (3, 7)), ("2", ()), ("main", ()), ("", ())]
)
def test_a_version_may_be_no_number(monkeypatch: pytest.MonkeyPatch, version: str, release: tuple[int, ...]) -> None:
    assert gpu.release_of(version) == release
    monkeypatch.setattr(torch, "__version__", version)
    assert tracing.has_guards() == (release == (2, 13))


@pytest.mark.usefixtures("unknown")
def test_python_without_the_gil_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert launcher.why_missing() == "Python runs without the GIL"


def test_other_launches_are_left_to_triton() -> None:
    class Compiled:
        packed_metadata = (4, 2, 0)  # clusters

    assert launcher.pack(Compiled, 1, []) is None
    Compiled.packed_metadata = (4, 1, 229 << 10)
    assert launcher.pack(Compiled, 1, []) is None


# === plans, and what no plan repeats ===


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


def test_other_views_results_and_numbers_have_no_plan() -> None:
    builder, twin = builder_and_input()
    assert builder.address_of(twin[:, 4:]) == (0, 16)
    with pytest.raises(UnplannableError, match="a view is misaligned"):
        builder.address_of(twin[:, 1:])
    with pytest.raises(UnplannableError, match="a result is an input"):
        builder.finish([twin[1:]])
    builder.number(3)
    with pytest.raises(UnplannableError, match="a number that varies was computed with"):
        builder.finish([])


def test_a_kernel_that_another_thread_is_loading() -> None:
    class Loading:
        run, function = "the launcher", None

        def _init_handles(self) -> None:
            self.function = 7

    kernel = Loading()
    assert (load_kernel(kernel), kernel.function) == ("the launcher", 7)
