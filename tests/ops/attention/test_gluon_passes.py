"""The passes around the backward kernel for Hopper, against PyTorch: in Triton's interpreter, or on a GPU."""

import math
import os

import pytest
import torch

from ropewalk.testing import assert_close_to_truth, poisoned_memory, unchanged

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = os.environ.get("ROPEWALK_TEST_DEVICE") == "cuda"
pytestmark = pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="needs a GPU, or Triton's interpreter")

B, H = 2, 3
SEQUENCES = [0, 5, 5, 197, 261, 270]  # and three tokens that belong to none
TOKENS = 273


@pytest.fixture(params=[(64, 128), (128, 64)], ids=["64-queries", "128-queries"])
def shape(request):
    """How many queries are in a tile, and how many features they have."""
    return request.param


@pytest.fixture(params=["dense", "packed"])
def batch(request, device, shape):
    """The batch's rows; of a packed one, where sequences lie; each token's row in the workspace; its rows; tiles."""
    TILE = shape[0]
    from ropewalk.ops.attention import triton_launch
    from ropewalk.ops.attention.prepare import Prepared

    if request.param == "dense":
        tiles = math.ceil(TOKENS / TILE)
        return B, None, torch.arange(TOKENS, device=device), tiles * TILE, tiles * B
    cu_seqlens = torch.tensor(SEQUENCES, device=device)
    nothing = dict.fromkeys(Prepared._fields)
    prepared = Prepared(**{**nothing, "causal": True, "cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens})
    sequences, n_tiles = triton_launch.schedule_tiles(prepared, "q", 1, TOKENS, TILE)
    rows = [
        (start // TILE + sequence) * TILE + token
        for sequence, (start, stop) in enumerate(zip(SEQUENCES, [*SEQUENCES[1:], TOKENS], strict=True))
        for token in range(stop - start)
    ]
    assert len(set(rows)) == TOKENS
    return 1, sequences, torch.tensor(rows, device=device), n_tiles * TILE, n_tiles


def place(row, feature, features):
    """Where an element of one head lies in the workspace.

    Parts have 64 rows and 64 features. In one, a warp has 16 rows, and a thread of it two that are eight apart, of
    every eight features two neighbours: those four elements lie together, then the threads', then features, then warps.
    """
    part = row // 64 * (features // 64) + feature // 64
    row, feature = row % 64, feature % 64
    warp, half, thread_row = row // 16, row % 16 // 8, row % 8
    eighth, thread_column, side = feature // 8, feature % 8 // 2, feature % 2
    within = (((warp * 8 + eighth) * 8 + thread_row) * 4 + thread_column) * 4 + half * 2 + side
    return part * 4096 + within


def arguments_of(batch, shape):
    _, sequences, _, n_rows, _ = batch
    return {
        "sequences": sequences, "bounds": (None, None, None), "n_heads": H, "n_queries": TOKENS, "n_keys": TOKENS,
        "rows_of_head": n_rows, "BLOCK_M": shape[0], "BLOCK_D": shape[1],
    }  # fmt: skip


@pytest.mark.parametrize("with_lse", [False, True], ids=["out", "out-and-lse"])
def test_rows(device, batch, shape, with_lse):
    from ropewalk.ops.attention.gluon_passes import rows_kernel
    from ropewalk.ops.attention.triton_launch import tiled

    size, _, rows, n_rows, n_tiles = batch
    TILE, D = shape
    out, grad_out = (torch.randn(size, TOKENS, H, D, device=device).half().transpose(1, 2) for _ in range(2))
    lse, grad_lse = (torch.randn(size, H, TOKENS, device=device) for _ in range(2))
    lse[:, 1, ::7] = -math.inf
    grad_lse[:, 1, ::7] = math.nan  # of rows that attend nothing
    with unchanged((out, grad_out, lse, grad_lse)), poisoned_memory():
        delta = torch.empty_like(lse)
        sums = torch.empty(size * H, n_rows * D, device=device)
        rows_kernel[(n_tiles * H,)](
            tiled(out, TILE, D), tiled(grad_out, TILE, D), lse, grad_lse if with_lse else None, delta, sums,
            **arguments_of(batch, shape),
        )  # fmt: skip
    truth = (out.double() * grad_out.double()).sum(3)
    plain = (out.float() * grad_out.float()).sum(3)
    if with_lse:
        taken = torch.where(lse == -math.inf, 0, grad_lse)
        truth, plain = truth - taken.double(), plain - taken
    assert_close_to_truth(delta, truth, plain)
    assert (sums[:, place(rows[:, None], torch.arange(D, device=device), D)] == 0).all()


@pytest.mark.parametrize("interleaved", [None, False, True], ids=["unturned", "half", "interleaved"])
def test_finish(device, batch, shape, interleaved):
    from ropewalk.ops.attention.gluon_passes import finish_kernel
    from ropewalk.ops.attention.triton_arguments import place_table
    from ropewalk.ops.attention.triton_launch import place as place_in_memory
    from ropewalk.ops.rope.api import apply_rope

    size, sequences, rows, n_rows, n_tiles = batch
    TILE, D = shape
    places = place(rows[:, None], torch.arange(D, device=device), D)
    assert len(places.unique()) == TOKENS * D
    with poisoned_memory():
        sums = torch.empty(size, H, n_rows * D, device=device)
        grad_q = torch.empty(size, TOKENS, H, D, dtype=torch.float16, device=device).transpose(1, 2)
    sums[:, :, places] = torch.randn(size, H, TOKENS, D, device=device)
    angles = torch.randn(size, TOKENS, D // 2, device=device)
    cos, sin = angles.cos(), angles.sin()
    table, width = (None, 0) if interleaved is None else place_table(cos, sin)
    with unchanged((sums, cos, sin)):
        finish_kernel[(n_tiles * H,)](
            sums, place_in_memory(grad_q, TILE, D, sequences), table, grad_factor=0.3, R=width,
            INTERLEAVED=interleaved is True, **arguments_of(batch, shape),
        )  # fmt: skip

    def finish(x):
        if interleaved is None:
            return x * 0.3
        return apply_rope(
            x, None, cos.to(x), sin.to(x), layout="bhtd", interleaved=interleaved, inverse=True, impl="reference"
        ).mul(0.3)

    whole = sums[:, :, places]
    assert_close_to_truth(grad_q, finish(whole.double()), finish(whole).half())
