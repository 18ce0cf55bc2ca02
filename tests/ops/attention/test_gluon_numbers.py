"""The order in which programs for Hopper take tiles: in Triton's interpreter, or on a GPU."""

import os

import pytest
import torch
import triton
import triton.language as tl

from ropewalk.ops.attention import gluon_support

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = os.environ.get("ROPEWALK_TEST_DEVICE") == "cuda"
pytestmark = [
    pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="needs a GPU, or Triton's interpreter"),
    pytest.mark.skipif(gluon_support.why_missing() is not None, reason=str(gluon_support.why_missing())),
]
if gluon_support.why_missing() is None:
    from ropewalk.ops.attention.gluon_hopper_pipeline import locate_number


@triton.jit
def _write_places(places, n_tiles, n_rows, n_heads, heads_together, LAST_FIRST: tl.constexpr):
    number = tl.program_id(0)
    tile, batch, head, _ = locate_number(number, None, n_tiles, n_rows, n_heads, heads_together, LAST_FIRST)
    tl.store(places + 2 * number, batch * n_heads + head)
    tl.store(places + 2 * number + 1, tile)


def places_of(device, n_tiles, n_rows, heads_together, last_first=False):
    """The row and the tile of each number."""
    places = torch.full((n_tiles * n_rows, 2), -1, dtype=torch.int32, device=device)
    _write_places[(n_tiles * n_rows,)](places, n_tiles, n_rows, 2, heads_together, last_first)
    return places.tolist()


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize(("n_tiles", "n_rows", "together"), [(3, 6, 2), (5, 8, 3), (1, 4, 4), (4, 2, 7), (3, 12, 5)])
def test_every_tile_has_one_number(device, n_tiles, n_rows, together, last_first):
    places = places_of(device, n_tiles, n_rows, together, last_first)
    assert sorted(places) == [[row, tile] for row in range(n_rows) for tile in range(n_tiles)]


def test_sections_go_through_the_tiles_of_their_heads(device):
    """In each the longest tiles of all heads come first."""
    first, second = [0, 1, 2], [3, 4, 5]
    expected = [[row, tile] for section in (first, second) for tile in range(4) for row in section]
    assert places_of(device, 4, 6, 3) == expected
    assert places_of(device, 4, 6, 3, last_first=True) == [[row, 3 - tile] for row, tile in expected]


def test_the_last_section_takes_what_is_left_over(device):
    expected = [[row, tile] for section in ([0, 1, 2], [3, 4, 5, 6, 7]) for tile in range(4) for row in section]
    assert places_of(device, 4, 8, 3) == expected
