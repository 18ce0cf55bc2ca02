"""Every configuration of the kernels fits into the GPU's shared memory: the tables' tiles, or smaller ones."""

from __future__ import annotations

import datetime
import os
from functools import partial
from typing import Any

import pytest
import torch
import triton
from helpers import stub_gpu
from helpers.attention_calls import ROUNDINGS, assert_correct, draw, plainly
from helpers.fit import Compiling, compile_call, compile_case, draw_case, memory_of, pretend_gpu
from helpers.modes import needs_kernels, on_gpu
from helpers.norm_launches import KERNELS as NORM_KERNELS
from helpers.norm_launches import specialise_norm
from helpers.targets import GPUS, SHARED_MEMORY
from torch.nn.attention.flex_attention import create_block_mask
from triton.runtime.errors import OutOfResources

from ropewalk import ReRope, Rope, SelfExtend, T5Bias, attention
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.triton import config, decode_launch
from ropewalk.ops.attention.triton.launch_common import launch_fitting
from ropewalk.ops.launch import kinds
from ropewalk.ops.launch.steps import AT_ONCE, AtOnce
from ropewalk.testing import assert_close_to_truth

# Others each day; `tools/fit.py` compiles any of them again.
SEED = os.environ.get("ROPEWALK_FIT_SEED") or datetime.date.today().isoformat()
KERNELS = ["forward_kernel", "backward_dq_kernel", "backward_dkdv_kernel"]


def features(queries: int = 200, keys: int = 200, device: str = "cpu") -> list[torch.Tensor]:
    """Return q, k and v of MLA's head dims, 192 and 128, which take the most memory."""
    shapes = ((queries, 4, 192), (keys, 2, 192), (keys, 2, 128))
    return [torch.zeros(1, *shape, dtype=torch.bfloat16, device=device, requires_grad=True) for shape in shapes]


def ones(*shape: int, device: str = "cpu") -> torch.Tensor:
    return torch.ones(1, *shape, dtype=torch.bool, device=device)


def far_call(device: str = "cpu") -> dict[str, Any]:
    """Return a call with all that adds to a forward's memory: it asked for 245,784 bytes of 232,448."""
    return {
        "position": SelfExtend(33, group=8, log_n=8, rope=Rope(interleaved=True)),
        "deterministic": True,
        "mask": ones(1, 300, 5, device=device),
        "window": (130, -1),
        "key_starts": torch.zeros(1, dtype=torch.int32, device=device),
    }


# With numbers of keys that no vector divides, so that a mask is not copied asynchronously.
TIGHT = {
    "mask": {"mask": ones(1, 200, 200)},
    "masks-dropout": {"mask": ones(4, 200, 200), "dropout_p": 0.1, "softcap": 30.0},
    "bits": {"blocks": create_block_mask(lambda b, h, m, n: m >= n, None, None, 200, 200, device="cpu")},
    "t5-lengths": {"position": T5Bias(torch.zeros(32, 4)), "key_lengths": torch.tensor([100])},
    "t5-learned": {"position": T5Bias(torch.zeros(32, 4, requires_grad=True)), "mask": ones(4, 200, 200)},
}


def compile_by_triton(call: Any, target: str = "sm_90", limit: int | None = None) -> Compiling:
    with pytest.MonkeyPatch.context() as patch:
        pretend_gpu(patch, target)
        on = Compiling(target, limit)
        compile_call(call, "triton", on)
    return on


@pytest.mark.compile
def test_the_largest_call_fits() -> None:
    call = make_call(*features(300, 5), **far_call())
    on = compile_by_triton(call)
    assert on.over == []
    assert [used.kernel for used in on.fit] == KERNELS


@pytest.mark.compile
@pytest.mark.parametrize("name", TIGHT)
def test_tables_have_tiles_for_what_takes_most(name: str) -> None:
    call = make_call(*features(), **TIGHT[name])
    if call.dropout_p > 0:
        call = call._replace(seed=torch.zeros(1, dtype=torch.int64))
    on = compile_by_triton(call)
    assert on.over == []
    assert [used.kernel for used in on.fit if used.kernel in KERNELS] == KERNELS


def check_sample(first: int, n: int) -> None:
    for target in GPUS:
        for index in range(first, first + n):
            again = f"python tools/fit.py --gpu {target} --seed {SEED} --start {index} --n 1"
            case = draw_case(SEED, index)
            try:
                over = {name: on.over for name, on in compile_case(case, target).items() if on.over}
            except Exception as error:
                raise AssertionError(f"{case.shown}\nTo see it again: {again}") from error
            assert not over, f"{over} of {SHARED_MEMORY[target]} bytes: {case.shown}\nTo see it again: {again}"
            first += 1  # other calls for each GPU


@pytest.mark.compile
def test_a_sample_of_calls_fits() -> None:
    check_sample(0, 1)


@pytest.mark.compile
@pytest.mark.slow
def test_more_calls_fit() -> None:
    check_sample(len(GPUS), 6)


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
def test_widest_rows_of_norms_fit(monkeypatch: pytest.MonkeyPatch, gpu: str) -> None:
    """A row of all heads in float64 is exchanged between threads, 8 numbers of each of 1024 at a time."""
    found: list[int] = []
    compile_source = lambda source, target, options: found.append(memory_of(source, target, options)[0])  # noqa: E731
    monkeypatch.setattr(triton, "compile", compile_source)
    keywords = {"heads": (64, 8), "weight": "across", "norm": {"across_heads": True}, "interleaved": True}
    for name in NORM_KERNELS:
        specialise_norm(name, dtype="fp64", weight_dtype="fp64", **keywords).compile(GPUS[gpu])
    assert max(found) <= SHARED_MEMORY[gpu]


@pytest.mark.compile
def test_smaller_tiles_follow_where_kernels_do_not_fit() -> None:
    q, k, v = (torch.zeros(200, 2, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    bounds = torch.tensor([0, 70, 200], dtype=torch.int32)
    call = make_call(q, k, v, layout="thd", causal=True, cu_seqlens_q=bounds)
    on = compile_by_triton(call, limit=80_000)
    assert {used.kernel for used in on.over} == set(KERNELS)
    assert [used.kernel for used in on.fit if used.kernel in KERNELS] == KERNELS


def test_what_fits_with_no_tiles_is_an_error() -> None:
    tried = []

    def launch(tiles: config.Tiles) -> None:
        tried.append(tiles)
        raise OutOfResources(2**20, 2**16, "shared memory")

    with pytest.raises(OutOfResources):
        launch_fitting(config.Tiles(32, 32, 4, 2), launch, AT_ONCE)
    assert tried[-1] == config.Tiles(16, 16, 4, 1)
    assert len(set(tried)) == len(tried) == 4


@pytest.mark.parametrize("inner", ["block_m", "block_n"])
def test_tiles_shrink_to_the_smallest_that_products_have(inner: str) -> None:
    every = {
        tiles
        for table in (config._HOPPER, config._BLACKWELL, config._OTHERS, config._AMD)
        for entries in table.values()
        for tiles in entries.values()
    }
    for tiles in [*every, *decode_launch._TILES.values(), *decode_launch._QUANTIZED_TILES.values()]:
        smaller: Any = tiles
        while (after := config.shrink(smaller, inner)) is not None:
            assert sum(x != y for x, y in zip(smaller, after, strict=True)) == 1
            smaller = after
        assert smaller.num_stages == 1
        assert smaller.block_n <= 16
        assert getattr(smaller, "block_m", 16) <= 16
    assert config.shrink(config.Tiles(128, 64, 8, 3), "block_n") == config.Tiles(128, 64, 8, 2)
    assert config.shrink(config.Tiles(128, 64, 8, 2, 224), "block_n") == config.Tiles(128, 32, 8, 2, 224)
    assert config.shrink(config.Tiles(64, 128, 4, 2), "block_m") == config.Tiles(32, 128, 4, 2)


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Refuse launches with tiles of more than 16 rows, and return the names of the kernels that were refused."""
    launch, refused = AtOnce.launch, []

    def launch_small(on: AtOnce, kernel: Any, n_programs: int, /, **arguments: Any) -> None:
        sizes = arguments["CONFIG"]._asdict() if "CONFIG" in arguments else arguments
        if sizes.get("BLOCK_M", 0) > 16 or sizes.get("BLOCK_N", 0) > 16:
            refused.append(kernel.__name__)
            raise OutOfResources(2**20, 2**16, "shared memory")
        launch(on, kernel, n_programs, **arguments)

    monkeypatch.setattr(AtOnce, "launch", launch_small)
    return refused


@needs_kernels
def test_smaller_tiles_compute_the_same(little_memory: list[str], device: torch.device) -> None:
    tensors = draw(device, torch.float16, queries=37, keys=37)
    assert_correct(partial(attention, impl="triton"), tensors, causal=True, position=ReRope(9))
    assert set(little_memory) >= {"forward_kernel", "backward_dq_kernel"}


@needs_kernels
def test_packed_tiles_are_scheduled_anew(little_memory: list[str], device: torch.device) -> None:
    tensors = draw(device, torch.float16, batch=1, queries=70, keys=70)
    bounds = torch.tensor([0, 20, 70], device=device)
    mask = torch.block_diag(torch.ones(20, 20), torch.ones(50, 50)).bool()[None, None].to(device)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        packed = (x.flatten(0, 1) for x in (q, k, v))
        return attention(*packed, layout="thd", cu_seqlens_q=bounds, impl="triton")[None]

    assert_correct(attend, tensors, mask=mask)
    assert little_memory


@needs_kernels
def test_decoding_with_smaller_tiles_is_right(
    little_memory: list[str], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(decode_launch, "_TILES_TO_INTERPRET", decode_launch.DecodeTiles(64, 1, 2))
    tensors = draw(device, torch.float16, queries=1, keys=300)
    actual = attention(*tensors, impl="triton")
    truth = plainly(torch.float64)(*(x.double() for x in tensors))
    assert_close_to_truth(actual, truth, plainly(torch.float16)(*tensors), ROUNDINGS)
    assert set(little_memory) == {"decode_kernel"}


def attend_within(limit: int, is_packed: bool) -> list[Any]:
    """Record the launches of five equal calls on a GPU with so much shared memory."""
    triton.compiler.compiler.max_shared_mem = lambda device: limit
    kinds.on_cpu = True
    queries = 200 if is_packed else 1
    q, k, v = (torch.zeros(1, tokens, 4, 128, dtype=torch.bfloat16) for tokens in (queries, 4096, 4096))
    keywords: dict[str, Any] = {"impl": "triton"}
    if is_packed:
        q, k, v = q[0], k[0, :200], v[0, :200]
        keywords |= {"layout": "thd", "cu_seqlens_q": torch.tensor([0, 70, 200], dtype=torch.int32)}
    records = []
    for _ in range(5):
        stub_gpu.clear()
        attention(q, k, v, **keywords)
        records.append([(launch.name, launch.shared) for launch in stub_gpu.launches()])
    return records


@pytest.mark.compile
@pytest.mark.parametrize(
    ("limit", "kernels"),
    [(100_000, ["schedule_kernel", "forward_kernel"]), (60_000, ["decode_kernel", "combine_kernel"])],
)
def test_plans_have_tiles_that_fit(limit: int, kernels: list[str]) -> None:
    records = stub_gpu.run(attend_within, limit, "schedule_kernel" in kernels)
    for launches in records:
        assert max(shared for _, shared in launches) <= limit
        assert [name for name, _ in launches][-2:] == kernels
    planned = records[-1]
    assert [name for name, _ in planned] == kernels
    assert planned == records[0][-2:]


@on_gpu
@pytest.mark.parametrize("impl", [None, "triton"])
def test_the_largest_call_runs(device: torch.device, impl: str | None) -> None:
    tensors = draw(
        device, torch.bfloat16, batch=1, queries=300, keys=5, heads=4, key_heads=2, head_dim=192, v_head_dim=128
    )
    assert_correct(partial(attention, impl=impl), tensors, **far_call("cuda"))
