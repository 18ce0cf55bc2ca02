"""`apply_rope` over a block table: pages of cached keys rotated in place, against float64 and the plain rotation."""

import sys

import pytest
import torch
from helpers.compile import Recorder, compile_launch
from helpers.modes import KERNEL_DTYPES, needs_kernels
from helpers.onlooker import Onlooker
from helpers.targets import TARGETS, resources, spilled_bytes

from ropewalk import append_kv, apply_rope, inverse_frequencies, mrope_axes, rope_table
from ropewalk.ops.launch.steps import AT_ONCE
from ropewalk.ops.rope.pages import launch as page_launch
from ropewalk.ops.rope.pages import operation as rope_pages
from ropewalk.ops.rope.pages.call import PageRotation
from ropewalk.testing import assert_close_to_truth, unchanged

PAGES, H, B, N = 9, 3, 2, 3


def draw(device, dtype=torch.float32, page_size=4, head_dim=16, rotary_dim=16):
    """Pages, a table that leaves one page of a row alone, and tables of 64 positions."""
    pages = torch.randn(PAGES, page_size, H, head_dim, device=device).to(dtype)
    table = torch.tensor([[7, 1, 4], [0, -1, 5]], device=device, dtype=torch.int32)
    inv_freq = inverse_frequencies("default", rotary_dim=rotary_dim, base=10000.0)[0]
    cos, sin = (x.to(device) for x in rope_table(64, inv_freq))
    return pages, table, cos, sin


def expect(pages, table, cos, sin, positions, dtype, **keywords):
    """Gather rows, rotate them as (B, T, H, D) tensors by the reference, and put them back, in a dtype."""
    rows = pages[table.clamp(min=0).long()].flatten(1, 2).to(dtype)
    rotated = apply_rope(rows, None, cos, sin, positions=positions, impl="reference", **keywords)
    expected = pages.to(dtype)
    for row, column in (table >= 0).nonzero().tolist():
        size = pages.shape[1]
        expected[table[row, column]] = rotated[row, column * size : (column + 1) * size]
    return expected


CASES = {
    "half": {},
    "interleaved": {"interleaved": True},
    "inverse": {"inverse": True},
    "partial": {"rotary_offset": 4},
    "blocks": {"pair_block": 4},
}


@needs_kernels
@pytest.mark.parametrize("page_size", [1, 4, 48])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [*KERNEL_DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("by", ["triton", "reference"])
def test_pages_are_rotated_where_they_are(device, by, dtype, name, page_size):
    rotary_dim = 8 if name in ("partial", "blocks") else 16
    pages, table, cos, sin = draw(device, dtype, page_size, 16, rotary_dim)
    positions = torch.randint(0, 64, (B, N * page_size), device=device)
    truth = expect(pages, table, cos, sin, positions, torch.float64, **CASES[name])
    baseline = expect(pages, table, cos, sin, positions, dtype, **CASES[name])
    before, version = pages.clone(), pages._version
    with unchanged([table, cos, sin, positions]):
        out = apply_rope(
            pages, None, cos, sin, positions=positions, block_table=table, inplace=True, impl=by, **CASES[name]
        )
    assert out is pages
    assert pages._version > version
    assert_close_to_truth(pages, truth, baseline)
    assert torch.equal(pages[[2, 3, 6, 8]], before[[2, 3, 6, 8]])


@needs_kernels
@pytest.mark.parametrize("by", ["triton", "reference"])
def test_any_strides_and_layout(device, by):
    pages, table, cos, sin = draw(device)
    where = {"block_table": table, "positions": torch.randint(0, 64, (B, 12), device=device), "impl": by}
    expected = apply_rope(pages.clone(), None, cos, sin, inplace=True, **where)
    both = torch.stack((pages, pages), dim=1).transpose(2, 3).contiguous()  # HND, K beside V of a page
    other = both[:, 1].clone()
    apply_rope(both[:, 0], None, cos, sin, layout="bhtd", inplace=True, **where)
    assert torch.equal(both[:, 0].transpose(1, 2), expected)
    assert torch.equal(both[:, 1], other)


@needs_kernels
@pytest.mark.parametrize("by", ["triton", "reference"])
def test_positions_outside_and_axes(device, by):
    pages, table, cos, sin = draw(device, head_dim=20)
    before = pages.clone()
    positions = torch.zeros(B, 12, dtype=torch.int64, device=device)
    positions[0, 1], positions[1, 9] = 64, -1
    where = {"block_table": table, "inplace": True, "impl": by}
    apply_rope(pages, None, cos, sin, positions=positions, **where)
    assert bool(pages[7, 1].isnan().all())
    assert bool(pages[5, 1].isnan().all())
    pages[7, 1], pages[5, 1] = before[7, 1], before[5, 1]
    assert torch.equal(pages, before)  # a rotation by 0 is exact
    axes = mrope_axes([4, 2, 2]).to(device)
    positions = torch.randint(0, 64, (3, B, 12), device=device)
    truth = expect(pages, table, cos, sin, positions, torch.float64, axes=axes)
    baseline = expect(pages, table, cos, sin, positions, torch.float32, axes=axes)
    apply_rope(pages, None, cos, sin, positions=positions, axes=axes, **where)
    assert_close_to_truth(pages, truth, baseline)


@needs_kernels
@pytest.mark.parametrize("by", ["triton", "reference"])
@pytest.mark.parametrize("shift", [-5, 7])
def test_shifted_keys_are_those_of_the_other_positions(device, by, shift):
    """One rotation by the difference leaves the keys that `append_kv` writes at the new positions."""
    pages, table, cos, sin = draw(device)
    v, k = torch.zeros_like(pages), torch.randn(4, H, 16, device=device)
    slots, old = torch.tensor([28, 29, 30, 4], device=device), torch.arange(10, 14, device=device)
    append_kv(k, v[0, :, :H], pages, v, slots, cos=cos, sin=sin, positions=old)
    shifts = torch.zeros(B, 12, dtype=torch.int64, device=device)
    shifts[0, [0, 1, 2, 4]] = abs(shift)
    apply_rope(pages, None, cos, sin, positions=shifts, block_table=table, inverse=shift < 0, inplace=True, impl=by)
    expected = torch.zeros_like(pages)
    append_kv(k, v[0, :, :H], expected, v.clone(), slots, cos=cos, sin=sin, positions=old + shift)
    moved = pages.flatten(0, 1)[slots]
    torch.testing.assert_close(moved, expected.flatten(0, 1)[slots], rtol=0, atol=4 * moved.abs().max().item() * 2**-23)


def test_compiled(device):
    pages, table, cos, sin = draw(device)
    positions = torch.randint(0, 64, (B, 12), device=device)

    def move(pages):
        apply_rope(pages, None, cos, sin, positions=positions, block_table=table, inplace=True)

    compiled = pages.clone()
    torch.compile(move, fullgraph=True, backend="aot_eager")(compiled)
    move(pages)
    assert torch.equal(compiled, pages)


def good():
    pages, table, cos, sin = draw("cpu")
    return {"q": pages, "k": None, "cos": cos, "sin": sin, "block_table": table, "inplace": True}


BAD = {
    "out-of-place": (ValueError, "inplace is False", {"inplace": False}),
    "k": (ValueError, "k was given, but must be None with block_table", {"k": torch.zeros(1)}),
    "thd": (ValueError, "layout is 'thd'", {"layout": "thd"}),
    "native": (ValueError, "impl is 'native'", {"impl": "native"}),
    "quantised": (
        TypeError,
        r"q is torch\.int8, but pages must be of",
        {"q": torch.zeros(9, 4, 3, 16, dtype=torch.int8)},
    ),
    "shape": (ValueError, r"q has shape \(9, 4, 16\)", {"q": torch.zeros(9, 4, 16)}),
    "grad": (ValueError, "q requires grad", {"q": torch.zeros(9, 4, 3, 16, requires_grad=True)}),
    "shared": (ValueError, "q has elements that share memory", {"q": torch.zeros(1, 4, 3, 16).expand(9, 4, 3, 16)}),
    "table": (TypeError, "block_table is torch.float32", {"block_table": torch.zeros(2, 3)}),
    "table-shape": (ValueError, r"block_table has shape \(3,\)", {"block_table": torch.zeros(3, dtype=torch.int64)}),
    "no-page": (ValueError, "block_table holds 9, but", {"block_table": torch.full((2, 3), 9)}),
    "positions": (ValueError, "positions", {"positions": torch.zeros(2, 13, dtype=torch.int64)}),
    "rotary": (ValueError, "rotary_offset", {"rotary_offset": 2}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name):
    error, message, change = BAD[name]
    arguments = good() | change
    before = arguments["q"].detach().clone()
    with pytest.raises(error, match=message):
        apply_rope(arguments.pop("q"), arguments.pop("k"), arguments.pop("cos"), arguments.pop("sin"), **arguments)
    assert torch.equal((good() | change)["q"].detach() * 0, before * 0)


@pytest.mark.compile
@pytest.mark.parametrize("keywords", [{}, {"interleaved": True}], ids=["half", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kernel_compiles_for_hopper(monkeypatch, tmp_path, dtype, keywords):
    launches = []
    monkeypatch.setattr(page_launch, "rotate_pages_kernel", Recorder(page_launch.rotate_pages_kernel, launches))
    pages = torch.zeros(9, 16, 8, 128, dtype=dtype)
    cos, sin = torch.zeros(2, 64, 64)
    table, positions = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 48, dtype=torch.int64)
    pair_block = 2 if keywords else 128
    page_launch.rotate(PageRotation(pages, table, positions, cos, sin, None, pair_block, 0, False), AT_ONCE)
    compiled = compile_launch(*launches[0], TARGETS["sm_90"])
    assert spilled_bytes(resources(compiled, tmp_path), "sm_90") == 0


def test_plain_calls_go_around_the_dispatcher(monkeypatch):
    """Modes see the operator, and plain calls do as it does: tables may be trained, pages made in inference mode."""
    callers, run = [], rope_pages._run

    def note(*arguments):
        callers.append(sys._getframe(1).f_code.co_name)
        run(*arguments)

    monkeypatch.setattr(rope_pages, "_run", note)
    pages, table, cos, sin = draw("cpu")
    expected, version = pages.clone(), pages._version
    positions = torch.full((B, N * 4), 3)
    call = {"positions": positions, "block_table": table, "inplace": True, "impl": "reference"}
    with Onlooker() as onlooker:
        apply_rope(expected, None, cos, sin, **call)
    assert torch.ops.ropewalk.rope_pages.default in onlooker.seen
    assert callers == ["_rotate"]  # the operator's
    with torch.inference_mode():
        inferred = apply_rope(pages.clone(), None, cos, sin, **call)
    apply_rope(pages, None, cos.requires_grad_(), sin, **call)
    assert torch.equal(pages, expected)
    assert torch.equal(inferred, expected)
    assert not pages.requires_grad
    assert pages._version > version
    assert callers == ["_rotate", "rotate_pages", "rotate_pages"]
