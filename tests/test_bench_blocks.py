"""The masks that tools/bench_blocks.py gives FlexAttention are the lists that it gives ours."""

import sys
from pathlib import Path

import pytest
import torch
from helpers.block_lists import expand_marks

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import bench_blocks

from ropewalk import attention


@pytest.mark.parametrize("heads", [1, 2])
def test_block_masks_are_the_lists(heads):
    """Rows with few blocks too: torch reads a row of N entries, and asserts on a GPU where there are fewer."""
    mask = torch.zeros(1, heads, 4, 4, dtype=torch.bool)
    mask[0, 0, 0, 3] = mask[0, -1, 2, 1] = mask[0, 0, 3, 2] = True
    lists, block_mask = bench_blocks.to_lists(mask), bench_blocks.to_block_mask(mask)
    assert lists.indices.shape[3] < 4
    assert torch.equal(block_mask.to_dense().bool(), mask)
    assert torch.equal(block_mask.q_num_blocks + block_mask.full_q_num_blocks, mask.sum(2).int())
    q, k, v = (torch.randn(1, 2, 512, 16) for _ in range(3))
    expected = attention(q, k, v, mask=expand_marks(mask, (128, 128), 512, 512), layout="bhtd")
    for blocks in (lists, block_mask):
        torch.testing.assert_close(attention(q, k, v, blocks=blocks, layout="bhtd"), expected)
