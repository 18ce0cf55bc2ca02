"""The check of compiled kernels for reductions that some Tritons compile wrong."""

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl
from helpers.compile import compile_launch
from helpers.modes import INTERPRETED
from helpers.targets import TARGETS

pytestmark = pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")


@triton.jit
def sum_rows(x_ptr, start, out_ptr, SCATTERED: tl.constexpr):
    """Sum the rows of a tile, (128, 64), which lies in memory by threads of a warp group."""
    x = tl.load(x_ptr + start + tl.arange(0, 8192))  # a lane has one number: the address is not aligned
    if SCATTERED:
        x = tl.permute(tl.reshape(x, (2, 1, 4, 8, 8, 4, 2, 2)), (0, 2, 6, 4, 1, 3, 5, 7))
    x = tl.reshape(x, (128, 64))
    tl.store(out_ptr + tl.arange(0, 128), tl.sum(x, 1))


@pytest.mark.parametrize("scattered", [False, True])
def test_lanes_that_are_no_neighbours_are_found(scattered):
    launch = (sum_rows, (torch.zeros(1), 7, torch.zeros(1), scattered), {"num_warps": 4}, TARGETS["sm_90"])
    if not scattered:
        compile_launch(*launch)
        return
    with pytest.raises(AssertionError, match="axis 1 of #linear"):
        compile_launch(*launch)
