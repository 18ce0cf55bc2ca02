"""`TritonRotary` against its definition: −θ, half-split pairs, half of them at rest."""

import pytest
import torch

from ropewalk import TritonRotary


def angles_of(rows, dim):
    """R/4 frequencies from 1 to 1/10000, both included, then R/4 zeros."""
    frequencies = [(1 / 10_000) ** (i / (dim // 4 - 1)) for i in range(dim // 4)] + [0.0] * (dim // 4)
    return rows.double()[:, None] * torch.tensor(frequencies, dtype=torch.float64)


def definition(x, rows):
    """−θ on half-split pairs, in float64."""
    angles = angles_of(rows, x.shape[-1]).to(x.device)
    x1, x2 = x.double().chunk(2, dim=-1)
    return torch.cat([x1 * angles.cos() + x2 * angles.sin(), -x1 * angles.sin() + x2 * angles.cos()], dim=-1)


# Of |x1| + |x2|: a table entry, a product and their sum are each rounded to float32.
ROTATION_ERROR = 2.5 * 2.0**-24


def is_within_rounding(rotated, x, expected):
    x1, x2 = x.double().abs().chunk(2, dim=-1)
    error_in_float32 = ROTATION_ERROR * torch.cat([x1 + x2, x1 + x2], dim=-1)
    info = torch.finfo(rotated.dtype)
    rounding = info.eps / 2 * torch.clamp(expected.abs() + error_in_float32, min=info.smallest_normal)
    return (rotated.double() - expected).abs() <= error_in_float32 + rounding


def assert_matches_the_definition(rotated, x):
    assert rotated.dtype == x.dtype
    assert is_within_rounding(rotated, x, definition(x, torch.arange(x.shape[-2]))).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "max_seq_len"), [(64, 64), (63, 64), (40, 64), (1, 64), (64, 65)])
def test_is_the_definition_in_every_row(tokens, max_seq_len, dtype, device):
    rotary = TritonRotary(64, max_seq_len).to(device)
    q, k = (torch.randn(2, heads, tokens, 64, device=device).to(dtype) for heads in (4, 2))
    rotated_q, rotated_k = rotary(q, k)
    assert_matches_the_definition(rotated_q, q)
    assert_matches_the_definition(rotated_k, k)


def test_a_table_read_at_twice_the_row_is_not_within_rounding(device):
    q = torch.randn(1, 1, 64, 64, device=device)
    rotated, _ = TritonRotary(64, 64).to(device)(q, q)
    wrong = definition(q, 2 * torch.arange(64))
    fits = is_within_rounding(rotated, q, wrong)[0, 0].all(-1)
    assert fits.tolist() == [True] + [False] * 63  # row 0 is row 0 twice over


def test_the_slow_half_passes_through(device):
    q = torch.randn(1, 2, 30, 64, device=device)
    rotated, _ = TritonRotary(64, 30).to(device)(q, q)
    for start in (16, 48):
        assert torch.equal(rotated[..., start : start + 16], q[..., start : start + 16])


@pytest.mark.parametrize("batch", [1, 2])
def test_leaves_its_inputs_alone_whatever_their_strides(batch, device):
    rotary = TritonRotary(64, 32).to(device)
    q, k = (torch.randn(batch, 20, 3, 64, device=device) for _ in range(2))
    before = q.clone(), k.clone()
    views = q.transpose(1, 2), k.transpose(1, 2)
    for rotated, x in zip(rotary(*views), views, strict=True):
        assert_matches_the_definition(rotated, x)
    for rotated, x in zip(rotary(*(x.contiguous() for x in views)), views, strict=True):
        assert_matches_the_definition(rotated, x)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


def test_the_gradient_turns_back(device):
    rotary = TritonRotary(64, 32).to(device)
    q, k = (torch.randn(2, 3, 20, 64, device=device, requires_grad=True) for _ in range(2))
    rotated = rotary(q, k)
    torch.autograd.backward(rotated, rotated)  # the transpose of a rotation undoes it
    for x in (q, k):
        # Both ways |a| + |b| is at most 2·√2·max|x|, and turning the first error back adds at most √2 of it.
        bound = ROTATION_ERROR * (2 * 2**0.5 + 2 * 2**0.5) * x.detach().abs().max()
        torch.testing.assert_close(x.grad, x.detach(), rtol=0, atol=bound.item())


def test_tables(device):
    rotary = TritonRotary(64, 32).to(device)
    assert rotary.dim == 64
    assert rotary.cos.shape == rotary.sin.shape == (32, 32)
    angles = angles_of(torch.arange(32), 64)
    for table, expected in ((rotary.cos, angles.cos()), (rotary.sin, angles.sin())):
        assert table.dtype == torch.float32
        assert table.device.type == device.type
        # Half a unit in the last place of a value up to 1, and what float64 adds at angles up to 31.
        torch.testing.assert_close(table.cpu().double(), expected, rtol=0, atol=2.0**-25 + 2.0**-46)
    assert rotary.state_dict() == {}


@pytest.mark.parametrize("dim", [0, 2, 6, 7, -4])
def test_dim_must_be_a_multiple_of_four(dim):
    with pytest.raises(ValueError, match=f"rotary_dim is {dim}, but "):
        TritonRotary(dim, 32)


def test_shapes_that_do_not_fit_are_refused():
    rotary = TritonRotary(64, 32)
    x = torch.randn(2, 3, 20, 64)
    long = torch.randn(2, 3, 33, 64)
    with pytest.raises(ValueError, match="q has 33 tokens, but must have at most max_seq_len, 32"):
        rotary(long, long)
    with pytest.raises(ValueError, match=r"k has shape \(2, 3, 20, 32\), but must be \(B, H, T, D\) with D = 64"):
        rotary(x, x[..., :32])
    with pytest.raises(ValueError, match=r"q has shape \(3, 20, 64\), but must be \(B, H, T, D\)"):
        rotary(x[0], x[0])
    with pytest.raises(ValueError, match="max_seq_len is -1, but must not be negative"):
        TritonRotary(64, -1)
