"""Masks of transformers' models, and writes to them. With Triton's interpreter the kernel reads masks of keys."""

import copy
import gc
import io
import weakref

import pytest
import torch
from helpers.modes import INTERPRETED, needs_kernels
from helpers.writes import WRITES

from ropewalk.modules import masks
from ropewalk.modules.masks import drop_equal_rows, find_key_bounds, keep, masks_only, read_keys, read_mask, recall
from ropewalk.ops.launch import kinds

pytestmark = pytest.mark.both_modes

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


LENGTHS = (1, 5, 511, 513, 5000)  # the kernel reads 512 keys in one step, and more in steps of 2048
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def rows_of_keys(keys):
    """An empty row, a full one, and rows with holes whose ends are anywhere: (6, keys), bool."""
    rows = torch.rand(6, keys, generator=torch.Generator().manual_seed(1)) < 0.5
    rows[0], rows[1] = False, True
    for row, start, end in (
        (2, keys // 2, keys),
        (3, 0, keys // 2),
        (4, keys - 1, keys),
        (5, keys // 3, 2 * keys // 3),
    ):
        rows[row, :start], rows[row, end:] = False, False
    return rows


def as_additive(rows, dtype):
    """0 to attend, and else −inf, the lowest number and half of it in turns."""
    lowest = torch.finfo(dtype).min
    others = torch.tensor([-torch.inf, lowest, lowest / 2], dtype=dtype).repeat(rows.shape[-1])[: rows.shape[-1]]
    return torch.where(rows, torch.zeros((), dtype=dtype), others)[:, None, None]


def spread(mask):
    """The same values with other strides, none of them 1."""
    memory = mask.new_ones((*mask.shape[:-1], 2 * mask.shape[-1] + 1)).transpose(0, -1).contiguous().transpose(0, -1)
    memory[..., 1::2] = mask
    return memory[..., 1::2]


def assert_reads(read, rows):
    """Compare with the definition, row by row."""
    assert read.allowed.dtype == torch.bool
    assert torch.equal(read.allowed.expand(len(rows), -1, -1, -1)[:, 0, 0].cpu(), rows)
    indices = [row.nonzero()[:, 0].tolist() for row in rows]
    expected = [index[0] if index else 0 for index in indices], [index[-1] + 1 if index else 0 for index in indices]
    assert as_lists(read[1:]) == expected


@pytest.mark.parametrize("arrange", [torch.clone, spread], ids=["dense", "strided"])
@pytest.mark.parametrize("keys", LENGTHS)
def test_padding_of_any_dtype_is_read(keys, arrange, device):
    rows = rows_of_keys(keys)
    for dtype in (*INTEGERS, *FLOATS):
        mask = arrange(rows.to(dtype).to(device))
        assert_reads(read_mask(mask, 6, 2, keys), rows)
        copied = read_keys(mask, 6, keys, copy=True)
        assert_reads(copied, rows)
        assert copied.allowed.untyped_storage().data_ptr() != mask.untyped_storage().data_ptr()


@pytest.mark.parametrize("arrange", [torch.clone, spread], ids=["dense", "strided"])
@pytest.mark.parametrize("keys", LENGTHS)
def test_masks_of_keys_with_four_dimensions_are_read(keys, arrange, device):
    rows = rows_of_keys(keys)
    for mask in (rows[:, None, None], *(as_additive(rows, dtype) for dtype in FLOATS)):
        mask = arrange(mask.to(device))
        assert_reads(read_mask(mask, 6, 2, keys), rows)
        assert_reads(read_mask(mask.expand(-1, 2, keys, -1), 6, 2, keys), rows)
        for row in (0, 1, 3):  # one mask for all batch rows
            assert_reads(read_mask(mask[row : row + 1], 6, 2, keys), rows[row].expand(6, -1))
        everything = rows[:, -1:].expand(-1, keys)  # one value for all keys
        assert_reads(read_mask(mask[..., -1:], 6, 2, keys), everything)


def test_masks_without_rows_or_keys_are_read(device):
    for batch, keys in ((0, 4), (3, 0), (0, 0)):
        for dtype in (torch.bool, torch.long):
            read = read_mask(torch.ones(batch, keys, dtype=dtype, device=device), batch, 2, keys)
            assert read.allowed.shape == (batch, 1, 1, keys)
            assert as_lists(read[1:]) == ([0] * batch, [0] * batch)


def test_a_mask_is_read_by_a_plan_as_without(rows, monkeypatch):
    monkeypatch.setattr(kinds, "on_cpu", INTERPRETED)
    for mask in (rows, rows.long(), torch.where(rows[:, None, None], 0.0, -torch.inf)):
        read = [read_mask(mask, 5, 2, 4) for _ in range(3)]
        other = read_mask(mask.flip(0), 5, 2, 4)
        for results in read:
            assert_reads(results, rows.cpu())
        assert_reads(other, rows.flip(0).cpu())


def test_nan_is_none_of_zero(device):
    mask = torch.tensor([0.0, torch.nan, 0.0], device=device)[None, None, None]
    assert read_keys(mask, 1, 3).allowed.flatten().tolist() == [True, False, True]
    assert read_keys(mask[0, 0], 1, 3).allowed.flatten().tolist() == [False, True, False]


@needs_kernels
def test_the_kernel_is_launched_once_and_no_operator_computes(rows, monkeypatch, device):
    """And reads what PyTorch's operators read."""
    launches = []
    load = masks._load_kernel

    def load_and_note(*key):
        read = load(*key)
        return lambda *given: launches.append(given) or read(*given)

    monkeypatch.setattr(masks, "_load_kernel", load_and_note)
    monkeypatch.setattr(masks, "is_readable", lambda x: False)  # a CPU's values are checked by operators
    of_keys = rows[:, None, None]
    additive = torch.where(of_keys, 0.0, -torch.inf)
    for mask in (rows, rows.long(), of_keys, of_keys.expand(5, 2, 4, 4), additive, additive.expand(5, 2, 4, 4)):
        with torch.autograd.profiler.profile() as profile:
            read = read_mask(mask, 5, 2, 4)
        assert len(launches) == 1
        # The interpreter's own copies have a parent, or are named aten::to and the like.
        assert not {event.name for event in profile.function_events} & COMPUTING
        launches.clear()
        with monkeypatch.context() as without:
            without.setattr(masks, "_find_kernel", lambda mask: None)
            expected = read_mask(mask, 5, 2, 4)
        assert all(torch.equal(x, y) for x, y in zip(read, expected, strict=True))


COMPUTING = {f"aten::{name}" for name in ("arange", "where", "amax", "amin", "minimum", "add", "eq", "ne", "any")}


def test_the_operators_of_the_other_form_are_those_that_the_kernel_spares(rows, monkeypatch):
    monkeypatch.setattr(masks, "_find_kernel", lambda mask: None)
    with torch.autograd.profiler.profile() as profile:
        read_mask(rows.long(), 5, 2, 4)
    spared = COMPUTING - {"aten::any", "aten::eq"}
    assert spared <= {event.name for event in profile.function_events}


def kept_mask(rows):
    read = read_keys(rows, 5, 4, copy=True)
    return keep(read.allowed, read), read


def test_a_mask_keeps_its_conversion(rows):
    mask, read = kept_mask(rows)
    assert recall(mask, 5, 4) is read
    assert read_mask(mask, 5, 2, 4) is read
    assert recall(mask, 4, 4) is None
    assert recall(mask, 5, 3) is None
    assert recall(rows, 5, 4) is None


def test_a_mask_is_freed_with_what_it_keeps(rows):
    read = read_keys(rows, 5, 4, copy=True)
    for mask in (keep(read.allowed, read), keep(read.allowed.view(torch.uint8), read)):
        assert recall(mask, 5, 4) is read
    freed = weakref.ref(mask), weakref.ref(read.allowed), weakref.ref(read.key_starts)
    gc.disable()
    try:
        del mask, read
        assert [reference() for reference in freed] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("write", [name for name in WRITES if name in ("in-place", "other-data")])
def test_a_mask_that_was_written_to_is_converted_anew(rows, write):
    mask, _ = kept_mask(rows)
    WRITES[write](mask, rows.flip(0)[:, None, None].clone())
    assert recall(mask, 5, 4) is None
    assert_reads(read_mask(mask, 5, 2, 4), rows.flip(0).cpu())


def test_a_write_to_the_mask_that_was_copied_changes_nothing(rows):
    mask, _ = kept_mask(rows)
    expected = rows.cpu().clone()
    rows.data.zero_()
    assert_reads(read_mask(mask, 5, 2, 4), expected)


def saved_and_loaded(mask):
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


COPIES = {
    "clone": torch.clone,
    "view": lambda x: x.view(5, 1, 1, 4),
    "detach": torch.Tensor.detach,
    "cast": lambda x: x.float().bool(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "saved": saved_and_loaded,
}


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_a_copy_of_a_mask_keeps_nothing(rows, make_copy):
    """It may have the same version and be written to since."""
    mask, _ = kept_mask(rows)
    assert recall(make_copy(mask), 5, 4) is None


def test_a_mask_of_inference_keeps_nothing(rows):
    """PyTorch counts no writes to it."""
    with torch.inference_mode():
        mask, _ = kept_mask(rows)
        assert recall(mask, 5, 4) is None
        mask.copy_(rows.flip(0)[:, None, None])
        assert_reads(read_mask(mask, 5, 2, 4), rows.flip(0).cpu())
    mask, read = kept_mask(rows)
    with torch.inference_mode():
        assert recall(mask, 5, 4) is read


def test_a_compiled_call_reads_the_mask_itself(rows):
    torch._dynamo.reset()
    compiled = torch.compile(lambda mask: read_mask(mask, 5, 2, 4)[1:], backend="aot_eager", fullgraph=True)
    mask, _ = kept_mask(rows)
    assert as_lists(compiled(mask)) == (STARTS, ENDS)
    mask.data.copy_(rows.flip(0)[:, None, None])
    assert as_lists(compiled(mask)) == (STARTS[::-1], ENDS[::-1])


def test_vmap_and_fake_tensors_are_read_by_operators(rows):
    batched = torch.stack((rows, rows.flip(0)))
    starts, ends = torch.vmap(lambda mask: tuple(read_mask(mask, 5, 2, 4)[1:]))(batched)
    assert (starts[0].tolist(), ends[1].tolist()) == (STARTS, ENDS[::-1])
    with torch._subclasses.FakeTensorMode() as mode:
        read = read_mask(mode.from_tensor(rows), 5, 2, 4)
        assert keep(read.allowed, read) is read.allowed
        assert recall(read.allowed, 5, 4) is None


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


def test_a_cuda_graph_reads_a_mask_from_outside_itself(rows, device):
    if device.type != "cuda":
        pytest.skip("needs CUDA")
    mask, read = kept_mask(rows)
    find_key_bounds(mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert recall(mask, 5, 4) is None
        bounds = read_mask(mask, 5, 2, 4)[1:]
        inside, made = kept_mask(rows)
        assert recall(inside, 5, 4) is made
    assert recall(mask, 5, 4) is read
    mask.copy_(rows.flip(0)[:, None, None])
    graph.replay()
    assert as_lists(bounds) == (STARTS[::-1], ENDS[::-1])
