"""Positions: every way to give them, outside the table, and far along the axis."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.rope_definition import (
    check_in_place,
    check_out_of_place,
    check_rotation,
    random_tables,
    random_tensor,
    rotate,
)

from ropewalk import rope_table
from ropewalk.testing import assert_close_to_truth, unchanged

BATCH, TOKENS, ROWS = 2, 5, 12
INDEX_DTYPES = (torch.int32, torch.int64)
# What a careless cast to int32, an addition in int32 or an index that counts from the end would bring inside.
OUTSIDE = {
    torch.int32: [-1, ROWS, -ROWS, -(2**31), 2**31 - 1],
    torch.int64: [-1, ROWS, -ROWS, -(2**31), 2**31, 2**32, 2**32 + 3, -(2**32) + 3, 2**63 - 1, -(2**63)],
}
IN_TABLE = {
    "every token": [[3, 1, 4, 1, 11], [9, 2, 0, 5, 3]],
    "all the same": [[7] * TOKENS] * BATCH,
    "backwards": [[4, 3, 2, 1, 0], [11, 10, 9, 8, 7]],
    "one row for all": [[3, 1, 4, 1, 11]],
    "offsets": [7, 0],
}


def make(layout, device, dtype=torch.float32, tokens=TOKENS, head_dim=8):
    shapes = {
        "bthd": lambda h: (BATCH, tokens, h, head_dim),
        "bhtd": lambda h: (BATCH, h, tokens, head_dim),
        "thd": lambda h: (tokens, h, head_dim),
    }
    return [random_tensor(*shapes[layout](heads), dtype=dtype, device=device) for heads in (3, 1)]


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
@pytest.mark.parametrize("values", IN_TABLE.values(), ids=IN_TABLE)
def test_positions_in_the_table(impl, device, values, layout, index_dtype):
    q, k = make(layout, device)
    cos, sin = random_tables(ROWS, 4, device=device)
    where = {
        "positions" if isinstance(values[0], list) else "offsets": torch.tensor(
            values, dtype=index_dtype, device=device
        )
    }
    check_out_of_place(q, k, cos, sin, impl=impl, layout=layout, interleaved=True, **where)
    check_in_place(q, k, cos, sin, impl=impl, layout=layout, inverse=True, **where)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("with_lengths", [False, True])
def test_packed_positions_win_over_the_lengths(impl, device, with_lengths, index_dtype):
    q, k = make("thd", device)
    cos, sin = random_tables(ROWS, 4, device=device)
    positions = torch.tensor([3, 1, 4, 1, 11], dtype=index_dtype, device=device)
    more = {"cu_seqlens": torch.tensor([0, 2, TOKENS], dtype=index_dtype, device=device)} if with_lengths else {}
    check_rotation(q, k, cos, sin, impl=impl, layout="thd", positions=positions, **more)


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
@pytest.mark.parametrize("offset", [0, 1, ROWS - TOKENS])
def test_offset_of_all_tokens(impl, device, offset, layout):
    q, k = make(layout, device)
    cos, sin = random_tables(ROWS, 4, device=device)
    check_rotation(q, k, cos, sin, impl=impl, layout=layout, positions=offset)


@pytest.mark.parametrize("offset", [0, 2, ROWS - 3, ROWS - 1])
def test_offset_of_packed_sequences_may_leave_the_table(impl, device, offset):
    q, k = make("thd", device)
    cos, sin = random_tables(ROWS, 4, device=device)
    cu_seqlens = torch.tensor([0, 1, 1, TOKENS], device=device)
    check_rotation(q, k, cos, sin, impl=impl, layout="thd", positions=offset, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("offset", [-1, ROWS - TOKENS + 1, ROWS, 2**31, 2**32, 2**63, -(2**63)])
def test_offset_that_cannot_fit_raises_before_anything_is_written(impl, device, offset):
    q, k = make("bthd", device)
    cos, sin = random_tables(ROWS, 4, device=device)
    for inplace in (False, True):
        with unchanged([q, k]), pytest.raises(ValueError, match="positions start at"):
            rotate(q, k, cos, sin, impl=impl, positions=offset, inplace=inplace)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("layout", ["bthd", "bhtd", "thd"])
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
def test_tokens_outside_the_table_become_nan_and_no_others(impl, device, index_dtype, layout, partial):
    outside = OUTSIDE[index_dtype]
    values = [v for pair in zip(outside, [0, ROWS - 1, 5, 2, 9, 1, 3, 4, 6, 7], strict=False) for v in pair]
    positions = torch.tensor(values, dtype=index_dtype, device=device)
    inside = torch.tensor([0 <= v < ROWS for v in values], device=device)
    cos, sin = random_tables(ROWS, 3 if partial else 4, device=device)
    q, k = make(layout, device, tokens=len(values))
    if layout != "thd":
        positions, inside = positions[None], inside[None]
    flags = {"layout": layout, "rotary_offset": 1 if partial else 0}
    check_rotation(q, k, cos, sin, impl=impl, positions=positions, **flags)
    # The others come out as if all of their neighbours were inside, too.
    clean = rotate(q, k, cos, sin, impl=impl, positions=torch.where(inside, positions, 0), **flags)
    for result, expected in zip(rotate(q, k, cos, sin, impl=impl, positions=positions, **flags), clean, strict=True):
        token_axis = {"bthd": 1, "bhtd": 2, "thd": 0}[layout]
        result, expected = result.movedim(token_axis, 0), expected.movedim(token_axis, 0)
        assert torch.equal(result[inside.flatten()], expected[inside.flatten()])
        assert bool(result[~inside.flatten()].isnan().all())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("index_dtype", "starts"),
    [
        (torch.int32, [ROWS - 2, 2**31 - 1]),
        (torch.int32, [-2, -(2**31)]),
        (torch.int64, [2**31 - 2, 2**32 - 1]),
        (torch.int64, [2**32, -(2**32)]),
        (torch.int64, [2**63 - 1, -(2**63)]),
    ],
)
def test_offsets_per_row_that_leave_the_table(impl, device, index_dtype, starts, interleaved):
    q, k = make("bthd", device)
    cos, sin = random_tables(ROWS, 3, device=device)
    offsets = torch.tensor(starts, dtype=index_dtype, device=device)
    check_rotation(q, k, cos, sin, impl=impl, offsets=offsets, interleaved=interleaved, rotary_offset=2)


def test_table_without_rows(impl, device):
    q, k = make("bthd", device)
    cos, sin = random_tables(0, 4, device=device)
    check_rotation(q, k, cos, sin, impl=impl, offsets=torch.tensor([0, 1], device=device))
    positions = torch.zeros(BATCH, TOKENS, dtype=torch.int64, device=device)
    check_rotation(q, k, cos, sin, impl=impl, positions=positions)


def strided_positions(device, index_dtype):
    wide = torch.tensor([[3, 1, 4, 1, 11, 9, 2, 6, 5, 3], [5, 8, 9, 7, 9, 3, 2, 3, 8, 4]], dtype=index_dtype)
    wide = wide.to(device)
    yield "every second", wide[:, ::2]
    yield "later half", wide[:, TOKENS:]
    yield "transposed", wide[:, :TOKENS].t().contiguous().t()
    yield "one row, expanded", wide[:1, :TOKENS].expand(BATCH, TOKENS)
    yield "one column, expanded", wide[:, :1].expand(BATCH, TOKENS)
    yield "one number, expanded", wide[:1, :1].expand(BATCH, TOKENS)
    yield "one row of every second", wide[1:, ::2]
    yield "offsets, strided", wide[:, 1]
    yield "offsets, expanded", wide[0, :1].expand(BATCH)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("name", [name for name, _ in strided_positions("cpu", torch.int64)])
def test_strides_of_positions(impl, device, name, index_dtype):
    positions = dict(strided_positions(device, index_dtype))[name]
    q, k = make("bthd", device)
    cos, sin = random_tables(ROWS + 4, 4, device=device)
    where = {"positions" if positions.ndim == 2 else "offsets": positions}
    check_rotation(q, k, cos, sin, impl=impl, **where)


def test_one_row_of_positions_is_refused_where_there_are_as_many_rows_as_tokens(impl, device):
    q = random_tensor(TOKENS, TOKENS, 3, 8, device=device)
    cos, sin = random_tables(ROWS, 4, device=device)
    index = torch.arange(TOKENS, device=device)
    for layout in ("bthd", "bhtd"):
        with unchanged([q]), pytest.raises(ValueError, match=r"positions has shape \(5,\).*offsets="):
            rotate(q, None, cos, sin, impl=impl, layout=layout, positions=index, inplace=True)
    by_row, by_token = (rotate(q, None, cos, sin, impl=impl, **{name: x})[0] for name, x in
                        (("offsets", index), ("positions", index[None])))  # fmt: skip
    assert not torch.equal(by_row, by_token)


@pytest.mark.parametrize("stride", [0, 2])
def test_strides_of_packed_positions(impl, device, stride):
    values = torch.tensor([3, 1, 4, 1, 11, 9, 2, 6, 5, 3], device=device)
    positions = values[:1].expand(TOKENS) if stride == 0 else values[::stride]
    q, k = make("thd", device)
    cos, sin = random_tables(ROWS, 4, device=device)
    check_rotation(q, k, cos, sin, impl=impl, layout="thd", positions=positions)


@pytest.mark.parametrize("stride", [2, 3])
def test_strides_of_sequence_lengths(impl, device, stride):
    ends = torch.tensor([0, 2, 2, TOKENS], device=device)
    buffer = torch.full((stride * len(ends),), -7, device=device)
    buffer[::stride] = ends
    q, k = make("thd", device)
    cos, sin = random_tables(ROWS, 4, device=device)
    check_rotation(q, k, cos, sin, impl=impl, layout="thd", cu_seqlens=buffer[::stride])


@pytest.mark.parametrize("layout", ["bthd", "bhtd", "thd"])
@pytest.mark.parametrize("rows_for", ["each", "all"])
def test_tables_per_token(impl, device, layout, rows_for):
    q, k = make(layout, device)
    batch = 1 if layout == "thd" or rows_for == "all" else BATCH
    cos, sin = random_tables(batch, TOKENS, 4, device=device)
    check_rotation(q, k, cos, sin, impl=impl, layout=layout)
    if layout == "thd":
        check_rotation(q, k, cos, sin, impl=impl, layout=layout, cu_seqlens=torch.tensor([0, 2, 5], device=device))


@pytest.mark.parametrize("layout", ["bthd", "bhtd", "thd"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_positions_up_to_16_million(impl, device, layout, interleaved):
    values = [[0, 131_071, 1_048_577, 9_999_999, 16_000_000], [16_777_217, 3, 2, 1, 15_999_999]]
    values = values[:1] if layout == "thd" else values
    inv_freq = torch.tensor([10000.0 ** (-i / 4) for i in range(4)], dtype=torch.float64)
    cos, sin = rope_table(torch.tensor(values), inv_freq, device=device)
    angles = [[[p * w for w in inv_freq.tolist()] for p in row] for row in values]
    for table, function in ((cos, math.cos), (sin, math.sin)):
        truth = torch.tensor([[[function(a) for a in angle] for angle in row] for row in angles], dtype=torch.float64)
        assert_close_to_truth(table.cpu(), truth, truth.float())
    q, k = make(layout, device)
    check_rotation(q, k, cos, sin, impl=impl, layout=layout, interleaved=interleaved)
