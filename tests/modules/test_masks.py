"""Masks of transformers' models, and writes to them."""

import pytest
import torch
from helpers.writes import WRITES

from ropewalk.modules.masks import drop_equal_rows, find_key_bounds, masks_only, read_mask

ROWS = [[0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 1]]
STARTS, ENDS = [0, 0, 1, 1, 3], [0, 4, 4, 2, 4]


@pytest.fixture
def rows(device):
    return torch.tensor(ROWS, dtype=torch.bool, device=device)


def as_lists(bounds):
    starts, ends = bounds
    assert starts.dtype == ends.dtype == torch.int32
    return starts.tolist(), ends.tolist()


def test_the_bounds_of_a_mask_of_keys(rows):
    of_keys = rows[:, None, None]
    marker = rows.to(torch.uint8)[:, None, None]
    for mask in (rows, of_keys, of_keys.expand(-1, 3, 4, -1), marker, marker.expand(-1, 7, -1, -1)):
        assert as_lists(find_key_bounds(mask)) == (STARTS, ENDS)


def test_the_bounds_are_those_of_any_head_and_query(device):
    mask = torch.zeros(2, 3, 5, 8, dtype=torch.bool, device=device)
    mask[0, 2, 4, 3] = mask[0, 0, 1, 5] = mask[1, 1, 0, 7] = True
    assert as_lists(find_key_bounds(mask)) == ([3, 7], [6, 8])
    assert as_lists(find_key_bounds(mask[:, :, :, :0])) == ([0, 0], [0, 0])
    assert as_lists(find_key_bounds(torch.ones(2, 0, dtype=torch.bool, device=device))) == ([0, 0], [0, 0])


def test_the_bounds_compile_for_every_length(rows):
    """On a GPU by Inductor: with torch 2.11 reductions of int32 did not."""
    torch._dynamo.reset()
    backend = "inductor" if rows.is_cuda else "aot_eager"
    compiled = torch.compile(find_key_bounds, backend=backend, fullgraph=True, dynamic=True)
    for keys in (4, 3, 2):
        expected = as_lists(find_key_bounds(rows[:, :keys].clone()))
        assert as_lists(compiled(rows[:, :keys].clone())) == expected


def test_rows_that_are_equal_in_memory_are_one(rows):
    square = rows[:, None, None].expand(-1, 3, 4, -1)
    assert drop_equal_rows(square).shape == (5, 1, 1, 4)
    assert torch.equal(drop_equal_rows(square)[:, 0, 0], rows)
    for mask in (square.contiguous(), rows, rows[:, None], rows[:, None, None]):
        assert drop_equal_rows(mask) is mask
    queries = rows[:, None, :, None].expand(-1, 3, -1, 4)
    assert drop_equal_rows(queries).shape == (5, 1, 4, 4)


def test_what_an_additive_mask_may_hold():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        lowest = torch.finfo(dtype).min
        assert masks_only(torch.tensor([0.0, lowest, lowest / 2, -torch.inf], dtype=dtype))
        for other in (1.0, -1.0, lowest / 4, torch.inf, torch.nan):
            assert not masks_only(torch.tensor([0.0, other], dtype=dtype))


def test_one_mask_is_read_for_one_and_all(rows, device):
    allowed, starts, ends = read_mask(rows, 5, 2, 4)
    assert allowed.shape == (5, 1, 1, 4)
    assert (starts.tolist(), ends.tolist()) == (STARTS, ENDS)
    allowed, starts, ends = read_mask(rows[1:2, None, None], 5, 2, 4)
    assert allowed.shape == (1, 1, 1, 4)
    assert (starts.tolist(), ends.tolist()) == ([0] * 5, [4] * 5)
    allowed, starts, ends = read_mask(rows[:, None, :, None], 5, 2, 4)  # queries that attend all, or nothing
    assert allowed.shape == (5, 1, 4, 4)
    assert (starts.tolist(), ends.tolist()) == ([0] * 5, [0, 4, 4, 4, 4])


def test_a_mask_that_comes_to_be_learned_is_refused(device):
    mask = torch.zeros(5, 1, 1, 4, device=device)
    read_mask(mask, 5, 2, 4)
    with pytest.raises(ValueError, match="and not require grad"):
        read_mask(mask.requires_grad_(), 5, 2, 4)


@pytest.mark.parametrize("kind", ["bool", "int", "square", "additive"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_by_any_way_is_seen(rows, write, kind):
    as_kind = {
        "bool": torch.clone,
        "int": torch.Tensor.long,
        "square": lambda x: x[:, None, None].repeat(1, 1, 4, 1),
        "additive": lambda x: torch.where(x, 0.0, -torch.inf)[:, None, None],
    }[kind]
    mask = as_kind(rows)
    before = read_mask(mask, 5, 2, 4)
    WRITES[write](mask, as_kind(rows.flip(0)))
    after, expected = read_mask(mask, 5, 2, 4), read_mask(as_kind(rows.flip(0)), 5, 2, 4)
    assert all(torch.equal(new, defined) for new, defined in zip(after, expected, strict=True))
    assert not torch.equal(before.key_lengths, after.key_lengths)


def test_a_write_through_numpy_is_seen():
    pytest.importorskip("numpy")
    mask = torch.tensor(ROWS)
    read_mask(mask, 5, 2, 4)
    mask.numpy()[:] = 1
    allowed, starts, ends = read_mask(mask, 5, 2, 4)
    assert allowed.all()
    assert (starts.tolist(), ends.tolist()) == ([0] * 5, [4] * 5)


def test_a_cuda_graph_reads_the_mask_of_each_replay(device):
    if device.type != "cuda":
        pytest.skip("needs CUDA")
    mask = torch.full((2, 1, 1, 4), -torch.inf, device=device)
    read_mask(mask, 2, 1, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bounds = read_mask(mask, 2, 1, 4)[1:]
    mask[0, :, :, 1:3] = 0
    graph.replay()
    assert as_lists(bounds) == ([1, 0], [3, 0])
