"""What masks say, and that it is worked out once for a mask, and anew where it must be."""

import gc

import pytest
import torch
from torch._subclasses import FakeTensorMode

from ropewalk.modules import masks
from ropewalk.modules.masks import drop_equal_rows, find_key_bounds, masks_only, read_mask, remember

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


MADE = []


def make(mask):
    MADE.append(mask)
    return mask + 0


def make_another(mask):
    MADE.append(mask)
    return mask + 1


@pytest.fixture
def made():
    """The masks that something was made of."""
    yield MADE
    MADE.clear()


def test_made_once(made, device):
    mask = torch.zeros(3, device=device)
    assert remember(mask, make) is remember(mask, make)
    assert len(made) == 1
    assert remember(mask, make_another).tolist() == [1, 1, 1]
    assert remember(mask.clone(), make) is not remember(mask, make)
    assert len(made) == 3


@pytest.mark.parametrize("part", [slice(None), slice(1, 2)])
def test_made_anew_when_written_to(made, device, part):
    mask = torch.zeros(3, device=device)
    remember(mask, make)
    mask[part] = 5  # of all, or through a view
    assert torch.equal(remember(mask, make), mask)
    assert len(made) == 2


def test_nothing_is_kept_alive(rows, device):
    gc.collect()  # of what other tests left
    before = len(masks._MADE)
    kept = [rows.clone(), rows.long(), rows[:, None, None].expand(-1, 2, 4, -1), torch.zeros(5, 1, 4, 4, device=device)]
    for mask in kept:
        read_mask(mask, 5, 2, 4)
    assert len(masks._MADE) >= before + len(kept)
    kept.clear()
    del mask
    gc.collect()
    assert len(masks._MADE) == before


def test_made_in_inference_for_training(made, device):
    mask = torch.zeros(3, device=device)
    with torch.inference_mode():
        assert not remember(mask, make).is_inference()
        of_inference = torch.zeros(3, device=device)
        remember(of_inference, make)
        remember(of_inference, make)  # which has no version, by which one could tell that it was written to
    assert not remember(mask, make).is_inference()
    assert len(made) == 3


def test_made_anew_where_it_is_traced(made, device):
    gc.collect()  # of what other tests left
    before = len(masks._MADE)
    mask = torch.zeros(3, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: remember(x, torch.abs) + 1, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert compiled(mask).tolist() == [1, 1, 1]
    with FakeTensorMode():
        fake = torch.zeros(3)
        remember(fake, make)
        remember(fake, make)
    assert torch.func.vmap(lambda x: x * remember(mask, make_another))(mask[:, None]).shape == (3, 3)
    assert torch.func.grad(lambda x: (x * remember(mask, make_another)).sum())(mask).tolist() == [1, 1, 1]
    assert len(made) == 4
    assert len(masks._MADE) == before
    assert remember(mask, make_another).tolist() == [1, 1, 1]


def test_made_anew_in_a_cuda_graph(made, device):
    """So that a replay reads the mask as it is then."""
    if device.type != "cuda":
        pytest.skip("needs CUDA")
    mask = torch.zeros(3, device=device)
    remember(mask, make)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = remember(mask, make)
    mask.fill_(5)
    graph.replay()
    assert y.tolist() == [5, 5, 5]
