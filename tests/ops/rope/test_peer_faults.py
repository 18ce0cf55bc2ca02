"""Faults that published rotary kernels have or had, each as a test that this one passes."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from helpers.rope_definition import (
    assert_rotated,
    check_in_place,
    check_rotation,
    plain,
    random_tables,
    random_tensor,
    rotate,
)

from ropewalk import apply_rope, rope_table
from ropewalk.ops.rope import api, backends
from ropewalk.testing import assert_close_to_truth, unchanged


def test_one_more_consumer_of_the_unrotated_q_has_its_gradient(impl, device):
    """Liger overwrites the caller's q without a version bump: the other consumer's gradient is wrong, silently."""
    cos, sin = random_tables(3, 4, device=device)
    leaf = random_tensor(1, 3, 2, 8, device=device).requires_grad_()
    q = leaf * 1
    other = q * q
    version = q._version
    out = apply_rope(q, None, cos, sin, impl=impl)
    assert q._version == version
    (out.sum() + other.sum()).backward()
    turned = torch.ones_like(leaf)
    assert_close_to_truth(
        leaf.grad.cpu(),
        plain(turned.double(), cos, sin, inverse=True) + 2 * leaf.detach().cpu().double(),
        plain(turned, cos, sin, inverse=True) + 2 * leaf.detach().cpu(),
    )
    q = leaf * 1
    other = q * q
    apply_rope(q, None, cos, sin, impl=impl, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.sum().backward()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_a_table_of_another_width_rotates_no_other_features(impl, device, width, inplace):
    """Liger takes tables of half the width, and rotates the wrong features."""
    q, k = (random_tensor(1, 3, heads, 8, device=device) for heads in (2, 1))
    cos, sin = random_tables(3, width, device=device)
    if width == 4:
        check_rotation(q, k, cos, sin, impl=impl, rotary_dim=8)
        return
    with unchanged([q, k]), pytest.raises(ValueError, match="rotary"):
        apply_rope(q, k, cos, sin, impl=impl, rotary_dim=8, inplace=inplace)


def test_duplicated_tables_of_a_partially_rotary_model_are_refused(impl, device):
    q, k = (random_tensor(1, 3, heads, 8, device=device) for heads in (2, 1))
    cos, sin = (torch.cat((x, x), dim=-1) for x in random_tables(3, 2, device=device))
    with pytest.raises(ValueError, match="holds every angle once, not twice"):
        apply_rope(q, k, cos, sin, impl=impl, rotary_dim=4)


def test_an_eager_call_passes_no_dispatcher_and_is_worked_out_once(impl, device):
    """flash-attn pays 90 µs of host time and more for a kernel of 2.5 µs, because it goes through a wrapper."""
    q, k = (random_tensor(1, 3, heads, 8, device=device) for heads in (2, 1))
    cos, sin = random_tables(3, 4, device=device)
    with mock.patch.object(api, "rotate_traced", side_effect=AssertionError("the dispatcher")):
        for _ in range(2):  # the second call makes what the others find
            apply_rope(q, k, cos, sin, impl=impl)
        with mock.patch.object(backends, "choose_launcher", side_effect=AssertionError("worked out again")):
            check_rotated = apply_rope(q + 1, k + 1, cos + 1, sin + 1, impl=impl)
    assert_rotated(check_rotated[0], q + 1, cos + 1, sin + 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_dtype_of_q_does_not_round_positions(impl, device, dtype):
    """With bfloat16 positions, 641 of 2048 are distinct (lucidrains)."""
    inv_freq = torch.tensor([2 * torch.pi / 2048], dtype=torch.float64, device=device)
    cos, sin = rope_table(2048, inv_freq)
    q = torch.tensor([1.0, 0.0], dtype=dtype, device=device).expand(1, 2048, 1, 2).contiguous()
    (result,) = rotate(q, None, cos, sin, impl=impl)
    assert_rotated(result, q, cos, sin)
    with pytest.raises(TypeError, match="positions has dtype"):
        apply_rope(q, None, cos, sin, impl=impl, positions=torch.zeros(1, 2048, dtype=dtype, device=device))


@pytest.mark.parametrize("inplace", [False, True])
def test_the_gradient_is_not_the_identity(impl, device, inplace):
    """A kernel without an autograd formula lets the cotangent through as it is (kernels-community rotary)."""
    cos, sin = random_tables(3, 4, device=device)
    leaf = random_tensor(1, 3, 2, 8, device=device).requires_grad_()
    cotangent = random_tensor(*leaf.shape, device=device)
    apply_rope(leaf * 1, None, cos, sin, impl=impl, inplace=inplace).backward(cotangent)
    assert not torch.equal(leaf.grad, cotangent)
    assert_rotated(leaf.grad, cotangent, cos, sin, inverse=True)


def test_slices_are_read_and_written_by_their_own_strides(impl, device):
    """Wrong results on slices of a fused projection, then slow copies of them (vLLM 17091, 18046)."""
    fused = random_tensor(7, 4 + 2 * 2, 8, device=device)
    cos, sin = random_tables(9, 4, device=device)
    positions = torch.tensor([3, 1, 4, 1, 5, 8, 2], device=device)
    q, k = fused[:, :4], fused[:, 4:6]
    check_rotation(q, k, cos, sin, impl=impl, layout="thd", positions=positions)
    with mock.patch.object(torch.Tensor, "contiguous", side_effect=AssertionError("a copy")):
        apply_rope(q, k, cos, sin, impl=impl, layout="thd", positions=positions, inplace=True)


@pytest.mark.parametrize("interleaved", [False, True])
def test_q_and_k_have_strides_of_their_own(impl, device, interleaved):
    """One head stride for q and k alike (SGLang 20559)."""
    cos, sin = random_tables(3, 4, device=device)
    q = random_tensor(2, 4, 3, 16, device=device)[..., :8].transpose(1, 2)
    k = random_tensor(2, 3, 2, 11, device=device)[..., 1:9]
    check_rotation(q, k, cos, sin, impl=impl, interleaved=interleaved)
    check_rotation(k, q, cos, sin, impl=impl, interleaved=interleaved)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("case", ["token stride", "head stride", "batch stride", "storage offset"])
@pytest.mark.parametrize("far", [2**30 + 64, 2**30 + 65])  # twice that is past 2³¹; strides with and without a factor
def test_addresses_past_two_to_the_31(impl, device, far, case, inplace):
    """Products of index and stride overflow int32 on packed views, silently (vLLM 43166, SGLang 29603, Liger 804)."""
    strides = {"batch stride": (far, 24, 8, 1), "token stride": (24, far, 8, 1), "head stride": (24, 8, far, 1)}
    strides = strides.get(case, (72, 24, 8, 1))
    offset = 2**31 + 16 if case == "storage offset" else 0
    try:
        memory = torch.empty(2**31 + 1024, dtype=torch.float16, device=device)  # on a CPU only what is touched is taken
    except RuntimeError as error:
        pytest.skip(f"no 4 GiB for one tensor: {error}")
    values = random_tensor(3, 3, 3, 8, dtype=torch.float16, device=device)
    q = memory.as_strided((3, 3, 3, 8), strides, offset)
    q.copy_(values)
    cos, sin = random_tables(3, 3, device=device)
    (result,) = rotate(q, None, cos, sin, impl=impl, inplace=inplace)
    assert_rotated(result, values, cos, sin)
    if not inplace:
        assert torch.equal(q, values)


def test_table_addresses_past_two_to_the_31(impl, device):
    try:
        memory = torch.empty(2**31 + 1024, dtype=torch.float16, device=device)
    except RuntimeError as error:
        pytest.skip(f"no 4 GiB for one tensor: {error}")
    values, sin = random_tables(3, 4, dtype=torch.float16, device=device)
    cos = memory.as_strided((3, 4), (2**30 + 64, 1))
    cos.copy_(values)
    q = random_tensor(1, 3, 2, 8, device=device)
    (result,) = rotate(q, None, cos, sin, impl=impl)
    assert_rotated(result, q, values, sin)


@pytest.mark.parametrize("position", [131_071, 1_048_575, 16_777_215])
def test_angles_far_along_are_as_good_as_near(impl, device, position):
    """Fast sines in the kernel are off by 1e-2 at position 131071, in a project whose tests stopped at 40."""
    inv_freq = torch.tensor([10000.0 ** (-i / 32) for i in range(32)], dtype=torch.float64)
    positions = torch.tensor([[position, position - 1, 0, position // 2]])
    angles = positions[..., None].double() * inv_freq
    cos, sin = rope_table(positions, inv_freq, device=device)
    q = random_tensor(1, 4, 2, 64, device=device)
    (result,) = rotate(q, None, cos, sin, impl=impl)
    # Not the definition on our own tables: the truth has tables in float64, which we round to float32 once.
    exact = angles.cos(), angles.sin()
    truth = plain(q.double(), *exact)
    assert_close_to_truth(result.cpu(), truth, plain(q, *(x.float() for x in exact)))


def test_a_transposed_batch_of_one_is_written_where_it_lies(impl, device):
    """A reshape is a view for B = 1 and a copy for B > 1: a kernel behind it writes to the wrong place."""
    cos, sin = random_tables(5, 4, device=device)
    for batch in (1, 2):
        q = random_tensor(batch, 3, 5, 8, device=device).transpose(1, 2)
        check_in_place(q, None, cos, sin, impl=impl)


@pytest.mark.parametrize("tokens", [1, 9])
def test_the_tables_row_is_the_tokens_row(impl, device, tokens):
    """Norms and relative shifts survive a kernel that reads rows 2s and 2s + 1: only the definition tells."""
    q = random_tensor(1, tokens, 1, 8, device=device)
    cos, sin = random_tables(2 * tokens, 4, device=device)
    check_rotation(q, None, cos, sin, impl=impl)
