"""Pairs that are half-split inside blocks: each block turns by columns of its own, against float64."""

import pytest
import torch
from helpers.modes import ON_GPU
from helpers.rope_definition import check_rotation, pair_features, random_tables, random_tensor, rotate

from ropewalk import apply_rope
from ropewalk.ops.rope import backends
from ropewalk.ops.rope.call import RopeCall, RopeFlags

B, T, HQ, HK, ROWS = 2, 5, 3, 1, 12
LAYOUTS = ("bthd", "bhtd", "thd")
# Head dim, rotary dim, first rotated feature and pair_block; blocks of 18 are those of Gemma 4's vision tower.
WIDTHS = [(16, 16, 0, 8), (16, 16, 0, 2), (32, 24, 4, 8), (72, 72, 0, 36), (15, 12, 3, 6), (16, 16, 0, 16)]


def make(layout, device, head_dim, dtype=torch.float32, tokens=T):
    shapes = {"bthd": lambda h: (B, tokens, h), "bhtd": lambda h: (B, h, tokens), "thd": lambda h: (tokens, h)}
    return tuple(random_tensor(*shapes[layout](n), head_dim, dtype=dtype, device=device) for n in (HQ, HK))


def two_axes(layout, device, rows=B):
    """Positions whose two axes differ in each token."""
    first = torch.stack([torch.randperm(ROWS)[:T] for _ in range(rows)])
    first = first[0] if layout == "thd" else first
    return torch.stack((first, (first + 5) % ROWS)).to(device)


def test_features_of_pairs():
    assert pair_features(4, False) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert pair_features(4, False, 4) == ([0, 1, 4, 5], [2, 3, 6, 7])
    assert pair_features(4, False, 2) == pair_features(4, True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("head_dim", "rotary_dim", "rotary_offset", "pair_block"), WIDTHS)
def test_each_block_is_split_by_itself(blocks_impl, device, layout, head_dim, rotary_dim, rotary_offset, pair_block):
    q, k = make(layout, device, head_dim)
    cos, sin = random_tables(ROWS, rotary_dim // 2, device=device)
    call = {"layout": layout, "rotary_offset": rotary_offset, "pair_block": pair_block, "impl": blocks_impl}
    positions = {"cu_seqlens": torch.tensor([0, 2, T], device=device)} if layout == "thd" else {"positions": 3}
    check_rotation(q, k, cos, sin, **positions, **call)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rotary_offset", [0, 3])
def test_blocks_with_an_axis_each(blocks_impl, device, layout, rotary_offset):
    q, k = make(layout, device, 27)
    cos, sin = random_tables(ROWS, 12, device=device)
    axes = torch.arange(2, device=device).repeat_interleave(6)
    positions = two_axes(layout, device)
    call = {"layout": layout, "rotary_offset": rotary_offset, "pair_block": 12, "impl": blocks_impl, "axes": axes}
    check_rotation(q, k, cos, sin, positions=positions, **call)
    # An axis moves the features of its own block, and no other.
    before = rotate(q, k, cos, sin, positions=positions, **call)
    for axis in range(2):
        moved = positions.clone()
        moved[axis] = (moved[axis] + 1) % ROWS
        for x, y in zip(before, rotate(q, k, cos, sin, positions=moved, **call), strict=True):
            changed = (x != y).flatten(0, -2).any(dim=0)
            first = rotary_offset + 12 * axis
            assert changed.nonzero().flatten().tolist() == list(range(first, first + 12))


@pytest.mark.parametrize(
    "call",
    [
        {"positions": [[3, 1, -1, 0, 12]]},
        {"offsets": [2, 9]},
        {"inverse": True},
        {"positions": [[0, 3, 2, 1, 4], [9, 9, 8, 1, 0]]},
    ],
    ids=["outside", "offsets", "inverse", "tokens"],
)
def test_positions_of_other_kinds(blocks_impl, device, call):
    q, k = make("bthd", device, 20)
    call = {name: x if x is True else torch.tensor(x, device=device) for name, x in call.items()}
    check_rotation(q, k, *random_tables(ROWS, 8, device=device), pair_block=8, impl=blocks_impl, **call)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_dtypes_and_tables_per_token(blocks_impl, device, dtype):
    q, k = make("bthd", device, 16, dtype)
    check_rotation(q, k, *random_tables(B, T, 8, device=device), pair_block=4, impl=blocks_impl)


def test_strided_features_and_no_tokens(blocks_impl, device):
    tables = random_tables(ROWS, 8, device=device)
    q, k = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in make("bthd", device, 16))
    check_rotation(q, k, *tables, pair_block=8, impl=blocks_impl)
    check_rotation(*make("bthd", device, 16, tokens=0), *tables, pair_block=8, impl=blocks_impl)


def test_a_block_of_all_rotated_features_is_half_split(blocks_impl, device):
    q, k = make("bthd", device, 16)
    tables = random_tables(ROWS, 8, device=device)
    expected = rotate(q, k, *tables, impl=blocks_impl)
    for x, y in zip(expected, rotate(q, k, *tables, impl=blocks_impl, pair_block=16), strict=True):
        assert torch.equal(x, y)


def test_blocks_are_half_split_rotations_side_by_side(blocks_impl, device):
    q, _ = make("bthd", device, 16)
    cos, sin = random_tables(ROWS, 8, device=device)
    (actual,) = rotate(q, None, cos, sin, pair_block=8, impl=blocks_impl)
    halves = [
        rotate(q[..., 8 * b : 8 * b + 8], None, *(x[:, 4 * b : 4 * b + 4] for x in (cos, sin)), impl=blocks_impl)[0]
        for b in range(2)
    ]
    assert torch.equal(actual, torch.cat(halves, dim=-1))


def test_gradients_are_the_inverse_rotation(blocks_impl, device):
    dtype = torch.float64 if blocks_impl == "reference" else torch.float32
    q, k = (x.requires_grad_() for x in make("bthd", device, 16, dtype))
    cos, sin = random_tables(ROWS, 6, dtype=dtype, device=device)
    axes = torch.arange(2, device=device).repeat_interleave(3)
    call = {"positions": two_axes("bthd", device), "axes": axes, "pair_block": 6, "rotary_offset": 1}

    def function(q, k):
        return apply_rope(q, k, cos, sin, impl=blocks_impl, **call)

    outs = function(q, k)
    cotangents = [random_tensor(*x.shape, dtype=dtype, device=device) for x in outs]
    grads = torch.autograd.grad(outs, (q, k), cotangents)
    expected = rotate(*cotangents, cos, sin, impl=blocks_impl, inverse=True, **call)
    assert all(torch.equal(x, y) for x, y in zip(grads, expected, strict=True))
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(function, (q, k), fast_mode=True)
        assert torch.autograd.gradgradcheck(function, (q, k), fast_mode=True)


def test_in_place_with_gradients(blocks_impl, device):
    q, _ = make("bthd", device, 16)
    tables = random_tables(ROWS, 8, device=device)
    leaves = [q.clone().requires_grad_() for _ in range(2)]
    for leaf, inplace in zip(leaves, (False, True), strict=True):
        apply_rope(leaf * 1, None, *tables, pair_block=4, inplace=inplace, impl=blocks_impl).square().sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


def test_the_cuda_extension_refuses_blocks_and_triton_is_next():
    call = RopeCall(*random_tables(ROWS, 8), None, None, 0, RopeFlags(pair_block=4))
    assert backends.why_not("native", torch.device("cuda"), call) == "pair_block is not supported"


@pytest.mark.skipif(ON_GPU, reason="the CPU has no CUDA extension")
def test_a_named_implementation_that_lacks_blocks_is_refused(device):
    with pytest.raises(ValueError, match="impl is 'native', but it cannot run this call: pair_block is not supported"):
        apply_rope(*make("bthd", device, 16), *random_tables(ROWS, 8), pair_block=4, impl="native")


def test_large_tensors_are_rotated_in_chunks(device):
    q, k = make("bthd", device, 64, tokens=3000)
    call = {"pair_block": 16, "rotary_offset": 8}
    tables = random_tables(3000, 24, device=device)
    truth = rotate(q.double(), k.double(), *tables, impl="reference", **call)
    for actual, right in zip(rotate(q, k, *tables, **call), truth, strict=True):
        torch.testing.assert_close(actual, right.float(), rtol=1e-6, atol=1e-6)
