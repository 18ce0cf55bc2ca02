"""The order in which programs for Hopper take tiles: in Triton's interpreter, or on a GPU."""

import pytest
import torch
import triton
import triton.language as tl
from helpers.modes import needs_kernels

from ropewalk.ops.attention.hopper import support
from ropewalk.ops.attention.triton.arguments import Schedule

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(support.why_missing() is not None, reason=str(support.why_missing())),
]
if support.why_missing() is None:
    from ropewalk.ops.attention.hopper.scheduler import work_to_tile


@triton.jit
def _write_tiles(tiles, schedule, LAST_FIRST: tl.constexpr):
    work_idx = tl.program_id(0)
    tile, batch, head, _ = work_to_tile(work_idx, None, schedule, LAST_FIRST)
    tl.store(tiles + 2 * work_idx, batch * schedule.n_heads + head)
    tl.store(tiles + 2 * work_idx + 1, tile)


def tiles_of(device, n_tiles, n_rows, heads_per_l2_section, last_first=False):
    """The row and the tile of each work item."""
    tiles = torch.full((n_tiles * n_rows, 2), -1, dtype=torch.int32, device=device)
    schedule = Schedule(n_tiles, n_rows, n_heads=2, heads_per_key=1, heads_per_l2_section=heads_per_l2_section)
    _write_tiles[(n_tiles * n_rows,)](tiles, schedule, last_first)
    return tiles.tolist()


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize(("n_tiles", "n_rows", "section"), [(3, 6, 2), (5, 8, 3), (1, 4, 4), (4, 2, 7), (3, 12, 5)])
def test_every_tile_has_one_work_index(device, n_tiles, n_rows, section, last_first):
    tiles = tiles_of(device, n_tiles, n_rows, section, last_first)
    assert sorted(tiles) == [[row, tile] for row in range(n_rows) for tile in range(n_tiles)]


def test_sections_go_through_the_tiles_of_their_heads(device):
    """In each the longest tiles of all heads come first."""
    first, second = [0, 1, 2], [3, 4, 5]
    expected = [[row, tile] for section in (first, second) for tile in range(4) for row in section]
    assert tiles_of(device, 4, 6, 3) == expected
    assert tiles_of(device, 4, 6, 3, last_first=True) == [[row, 3 - tile] for row, tile in expected]


def test_the_last_section_takes_what_is_left_over(device):
    expected = [[row, tile] for section in ([0, 1, 2], [3, 4, 5, 6, 7]) for tile in range(4) for row in section]
    assert tiles_of(device, 4, 8, 3) == expected
