"""Tokens with positions on several axes: each pair turns by its own axis, against float64 and in plain Python."""

import pytest
import torch
from helpers.modes import ON_GPU
from helpers.rope_definition import check_rotation, random_tables, random_tensor, rotate

from ropewalk import apply_rope, mrope_axes
from ropewalk.ops.rope import backends
from ropewalk.ops.rope.call import RopeCall

B, T, HQ, HK, D, ROWS = 2, 5, 3, 1, 16, 12
LAYOUTS = ("bthd", "bhtd", "thd")
INDEX_DTYPES = (torch.int32, torch.int64)


def make(layout, device, dtype=torch.float32, tokens=T):
    shape = {"bthd": (B, tokens, -1), "bhtd": (B, -1, tokens), "thd": (tokens, -1)}[layout]
    return tuple(
        random_tensor(*(heads if n == -1 else n for n in shape), D, dtype=dtype, device=device) for heads in (HQ, HK)
    )


def several(layout, device, dtype=torch.int64, n_axes=3, rows=B):
    """Positions whose axes differ from each other and from token to token."""
    shape = (n_axes, T) if layout == "thd" else (n_axes, rows, T)
    return torch.stack([torch.randperm(ROWS)[:T] for _ in range(n_axes * (1 if layout == "thd" else rows))]).view(
        shape
    ).to(device, dtype)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize(("rotary_dim", "rotary_offset"), [(16, 0), (12, 0), (6, 4)])
def test_each_pair_turns_by_its_own_axis(
    axes_impl, device, layout, interleaved, index_dtype, rotary_dim, rotary_offset
):
    q, k = make(layout, device)
    cos, sin = random_tables(ROWS, rotary_dim // 2, device=device)
    axes = torch.tensor([2, 0, 0, 1, 2, 1, 1, 0], dtype=index_dtype, device=device)[: rotary_dim // 2]
    check_rotation(
        q, k, cos, sin, impl=axes_impl, positions=several(layout, device, index_dtype), axes=axes, layout=layout,
        interleaved=interleaved, rotary_offset=rotary_offset,
    )  # fmt: skip


@pytest.mark.parametrize("n_axes", [1, 2, 4])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("axes_dtype", INDEX_DTYPES, ids=str)
def test_counts_of_axes_and_one_row_for_the_batch(axes_impl, device, n_axes, inverse, axes_dtype):
    q, _ = make("bthd", device)
    cos, sin = random_tables(ROWS, D // 2, device=device)
    axes = (torch.arange(D // 2, device=device) * 5 % n_axes).to(axes_dtype)
    positions = several("bthd", device, n_axes=n_axes, rows=1)
    check_rotation(q, None, cos, sin, impl=axes_impl, positions=positions, axes=axes, inverse=inverse)


@pytest.mark.parametrize("axis", range(3))
def test_the_result_changes_with_each_axis_in_its_own_pairs_alone(axes_impl, device, axis):
    q, k = make("bthd", device)
    cos, sin = random_tables(ROWS, D // 2, device=device)
    axes = mrope_axes([2, 3, 3]).to(device)
    positions = several("bthd", device)
    moved = positions.clone()
    moved[axis] = (moved[axis] + 1) % ROWS
    before, after = (rotate(q, k, cos, sin, impl=axes_impl, positions=p, axes=axes) for p in (positions, moved))
    for x, y in zip(before, after, strict=True):
        changed = (x != y).unflatten(-1, (2, -1)).any(dim=-2)
        assert bool((changed == (axes == axis)).all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_equal_rows_give_the_result_of_one_axis_bit_for_bit(axes_impl, device, layout, interleaved, dtype):
    q, k = make(layout, device, dtype)
    cos, sin = random_tables(ROWS, D // 2, device=device)
    positions = several(layout, device)
    positions[:] = positions[:1].clone()
    positions[..., 3] = ROWS  # NaN, too
    flags = {"impl": axes_impl, "layout": layout, "interleaved": interleaved}
    expected = rotate(q, k, cos, sin, positions=positions[0], **flags)
    actual = rotate(q, k, cos, sin, positions=positions, axes=mrope_axes([3, 3, 2], interleaved).to(device), **flags)
    for x, y in zip(actual, expected, strict=True):
        # A GPU's compiler contracts products and sums, and not the same ones in each binary.
        contracted = axes_impl == "triton" and ON_GPU and dtype == torch.float32
        atol = torch.finfo(dtype).eps * float(y.nan_to_num().abs().max()) if contracted else 0
        torch.testing.assert_close(x, y, rtol=0, atol=atol, equal_nan=True, check_stride=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("outside", [-1, ROWS, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("rotary_offset", [0, 4])
def test_a_position_outside_the_table_on_any_axis_makes_its_token_nan(
    axes_impl, device, layout, outside, rotary_offset
):
    q, k = make(layout, device)
    cos, sin = random_tables(ROWS, D // 2 - rotary_offset, device=device)
    axes = mrope_axes([2, 1, 1]).to(device) if rotary_offset else mrope_axes([6, 1, 1]).to(device)
    positions = several(layout, device, torch.int32)
    for axis in range(3):
        positions[axis, ..., axis] = outside
    flags = {"impl": axes_impl, "positions": positions, "axes": axes, "layout": layout, "rotary_offset": rotary_offset}
    check_rotation(q, k, cos, sin, **flags)
    token_axis = 1 if layout == "bthd" else -2 if layout == "bhtd" else 0
    for x in rotate(q, k, cos, sin, **flags):
        x = x.movedim(token_axis, 0)
        assert bool(x[:3].isnan().all())
        assert not bool(x[3:].isnan().any())


def test_an_axis_of_no_pair_may_be_outside_the_table(axes_impl, device):
    q, k = make("bthd", device)
    cos, sin = random_tables(ROWS, D // 2, device=device)
    positions = several("bthd", device)
    positions[1] = ROWS
    axes = torch.tensor([0, 2] * (D // 4), device=device)
    check_rotation(q, k, cos, sin, impl=axes_impl, positions=positions, axes=axes)
    assert not any(x.isnan().any() for x in rotate(q, k, cos, sin, impl=axes_impl, positions=positions, axes=axes))


def test_strided_positions_and_axes(axes_impl, device):
    q, k = make("bthd", device)
    cos, sin = random_tables(ROWS, D // 2, device=device)
    wide = torch.randint(0, ROWS, (T, 2 * B, 6), device=device)
    axes = torch.tensor([0, 9, 1, 9, 2, 9, 2, 9, 1, 9, 0, 9, 0, 9, 1, 9], device=device)[::2]
    for positions in (wide.permute(2, 1, 0)[::2, ::2], wide[:, :1, :3].permute(2, 1, 0).expand(3, B, T)):
        check_rotation(q, k, cos, sin, impl=axes_impl, positions=positions, axes=axes)
    check_rotation(
        *make("thd", device), cos, sin, impl=axes_impl, positions=wide[:, 0, ::2].T, axes=axes, layout="thd"
    )  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_tokens(axes_impl, device, layout):
    q, k = make(layout, device, tokens=0)
    cos, sin = random_tables(ROWS, D // 2, device=device)
    positions = torch.zeros((3, 0) if layout == "thd" else (3, B, 0), dtype=torch.int64, device=device)
    rotated = rotate(
        q, k, cos, sin, impl=axes_impl, positions=positions, axes=mrope_axes([4, 2, 2]).to(device), layout=layout
    )
    assert [x.shape for x in rotated] == [q.shape, k.shape]


def test_a_table_without_rows(axes_impl, device):
    q, k = make("bthd", device)
    cos, sin = random_tables(0, D // 2, device=device)
    positions = several("bthd", device)
    check_rotation(q, k, cos, sin, impl=axes_impl, positions=positions, axes=mrope_axes([4, 2, 2]).to(device))


@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
def test_gradients_are_the_inverse_rotation(axes_impl, device, interleaved):
    q, k = make("bthd", device, torch.float64)
    cos, sin = random_tables(ROWS, D // 2, dtype=torch.float64, device=device)
    call = {"positions": several("bthd", device), "axes": mrope_axes([4, 2, 2]).to(device), "interleaved": interleaved}

    def function(q, k):
        return apply_rope(q, k, cos, sin, impl=axes_impl, **call)

    leaves = q.requires_grad_(), k.requires_grad_()
    cotangents = (
        random_tensor(*q.shape, dtype=q.dtype, device=device),
        random_tensor(*k.shape, dtype=q.dtype).to(device),
    )
    grads = torch.autograd.grad(function(*leaves), leaves, cotangents)
    expected = rotate(*cotangents, cos, sin, impl=axes_impl, inverse=True, **call)
    for grad, x in zip(grads, expected, strict=True):
        assert torch.equal(grad, x)
    if axes_impl == "reference":
        assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


def test_new_values_of_axes_are_read_in_each_call(axes_impl, device):
    q, k = make("bthd", device)
    cos, sin = random_tables(ROWS, D // 2, device=device)
    positions = several("bthd", device)
    for sections in ([8, 0, 0], [0, 8, 0], [2, 2, 4]):
        check_rotation(q, k, cos, sin, impl=axes_impl, positions=positions, axes=mrope_axes(sections).to(device))
    if device.type == "cpu":
        with pytest.raises(ValueError, match="axes is 3 for pair 7, but must be from 0 to 2"):
            rotate(q, k, cos, sin, impl=axes_impl, positions=positions, axes=mrope_axes([2, 2, 3, 1]))


def test_an_axis_that_positions_lack_makes_tokens_nan_where_values_are_not_checked(axes_impl, device, monkeypatch):
    from ropewalk.ops.rope import autograd

    monkeypatch.setattr(autograd, "check_axes", lambda axes, n_axes: None)
    q, k = make("bthd", device)
    cos, sin = random_tables(ROWS, D // 2, device=device)
    for wrong in (-1, 3):
        axes = torch.tensor([0, 1, 2, 0, 1, wrong, 0, 1], device=device)
        for x in rotate(q, k, cos, sin, impl=axes_impl, positions=several("bthd", device), axes=axes):
            assert bool(x.isnan().all())


def test_the_cuda_extension_refuses_axes_and_triton_is_next():
    call = RopeCall(*random_tables(ROWS, D // 2), several("bthd", "cpu"), None, 0, None, mrope_axes([4, 2, 2]))
    assert backends.why_not("native", torch.device("cuda"), call) == "axes are not supported"


def test_mrope_axes_are_those_of_the_models():
    assert mrope_axes([2, 3]).tolist() == [0, 0, 1, 1, 1]
    assert mrope_axes([1, 0, 2]).dtype == torch.int64
    # transformers' Qwen3-VL: time everywhere, then height and width at every third pair up to three times their section
    for sections in ([24, 20, 20], [11, 11, 10], [8, 12, 12]):
        expected = [0] * sum(sections)
        for axis in (1, 2):
            for p in range(axis, min(3 * sections[axis], len(expected)), 3):
                expected[p] = axis
        assert mrope_axes(sections, interleaved=True).tolist() == expected


@pytest.mark.parametrize(
    ("sections", "interleaved", "error", "pattern"),
    [
        ([], False, ValueError, "sections is empty"),
        (3, False, TypeError, "sections is int, but must be a sequence of ints"),
        ([2, -1], False, ValueError, "sections holds -1, but must hold no number below 0"),
        ([2.0], False, TypeError, "sections holds 2.0, but must hold ints"),
        ([2, True], False, TypeError, "sections holds True"),
        ([2, 2], True, ValueError, "sections holds 2 numbers, but must hold 3 where interleaved is True"),
    ],
)
def test_mrope_axes_refuses(sections, interleaved, error, pattern):
    with pytest.raises(error, match=pattern):
        mrope_axes(sections, interleaved)
