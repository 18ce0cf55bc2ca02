"""The passes around the backward kernel for Hopper, against PyTorch: in Triton's interpreter, or on a GPU."""

import math
from typing import NamedTuple

import pytest
import torch
from helpers.modes import needs_kernels

from ropewalk import ExpoSB
from ropewalk import device as gpu
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.autograd import without_inputs
from ropewalk.ops.attention.call import RopeTable
from ropewalk.ops.attention.validate import Arguments, validate
from ropewalk.testing import assert_close_to_truth, poisoned_memory, unchanged

pytestmark = needs_kernels

B, H = 2, 3
SEQUENCES = [0, 5, 5, 197, 261, 270]  # and three tokens that belong to none
TOKENS = 273
N_SUMS = 20_001  # a program has more than one block of them, and the last one fewer


class Shape(NamedTuple):
    """How many queries are in a tile, and how many features they have, in chunks, and values."""

    tile: int
    features: int
    chunks: int
    values: int


NARROW = [Shape(64, 128, 1, 128), Shape(128, 64, 1, 64)]
WIDE = [Shape(64, 192, 3, 128), Shape(64, 256, 1, 256)]


def name_of(shape):
    return f"{shape.tile}-queries-{shape.features}"


@pytest.fixture(params=NARROW + WIDE, ids=name_of)
def shape(request):
    return request.param


@pytest.fixture(params=["dense", "packed"])
def batch(request, device, shape):
    """The batch's rows; of a packed one, where sequences lie; each token's row in the workspace; its rows; tiles."""
    TILE = shape.tile
    from ropewalk.ops.attention.triton.launch_common import schedule_tiles
    from ropewalk.ops.launch.steps import AT_ONCE

    if request.param == "dense":
        tiles = math.ceil(TOKENS / TILE)
        return B, None, torch.arange(TOKENS, device=device), tiles * TILE, tiles * B
    cu_seqlens = torch.tensor(SEQUENCES, device=device)
    q = torch.empty(TOKENS, H, 8, device=device)
    call = validate(q, q, q, Arguments(causal=True, cu_seqlens_q=cu_seqlens, layout="thd"))
    packed, n_tiles = schedule_tiles(call, "q", 1, TOKENS, TILE, AT_ONCE)
    rows = [
        (start // TILE + sequence) * TILE + token
        for sequence, (start, stop) in enumerate(zip(SEQUENCES, [*SEQUENCES[1:], TOKENS], strict=True))
        for token in range(stop - start)
    ]
    assert len(set(rows)) == TOKENS
    return 1, packed, torch.tensor(rows, device=device), n_tiles * TILE, n_tiles


def place(row, feature, features):
    """Where an element of one head lies in the workspace.

    Parts have 64 rows and 64 features. In one, a warp has 16 rows, and a thread of it two that are eight apart, of
    every eight features two neighbours: those four elements lie together, then the threads', then features, then warps.
    Above 128 features a part has all of them, and warps come before features.
    """
    part = row // 64
    if features <= 128:
        part = part * (features // 64) + feature // 64
        feature = feature % 64
    row = row % 64
    warp, half, thread_row = row // 16, row % 16 // 8, row % 8
    eighth, thread_column, side = feature // 8, feature % 8 // 2, feature % 2
    if features > 128:
        of_warp = ((eighth * 4 + warp) * 8 + thread_row) * 4 + thread_column
        return part * 64 * features + of_warp * 4 + half * 2 + side
    within = (((warp * 8 + eighth) * 8 + thread_row) * 4 + thread_column) * 4 + half * 2 + side
    return part * 4096 + within


def arguments_of(batch, shape):
    from ropewalk.ops.attention.triton.arguments import Bounds

    size, packed, _, n_rows, _ = batch
    return {
        "packed": packed,
        "bounds": Bounds(None, None, None),
        "n_heads": H,
        "n_queries": TOKENS,
        "n_keys": TOKENS,
        "workspace_rows": n_rows,
        "n_elements": size * H * n_rows * shape.features,
        "BLOCK_M": shape.tile,
        "BLOCK_D": shape.features // shape.chunks,
        "D_CHUNKS": shape.chunks,
        "BLOCK_DV": shape.values,
    }


@pytest.mark.parametrize(("with_lse", "workspaces"), [(False, 1), (True, 3)], ids=["out", "out-and-lse"])
@pytest.mark.parametrize("gated", [None, "feature", "head"])
def test_rows(device, batch, shape, with_lse, workspaces, gated):
    from ropewalk.ops.attention.hopper.prepost import bwd_preprocess_kernel
    from ropewalk.ops.attention.triton.launch_common import gate_args, store_target, tiled

    size, packed, rows, n_rows, n_tiles = batch
    TILE, FEATURES, _, D = shape
    out, grad_out = (torch.randn(size, TOKENS, H, D, device=device).half().transpose(1, 2) for _ in range(2))
    lse, grad_lse = (torch.randn(size, H, TOKENS, device=device) for _ in range(2))
    lse[:, 1, ::7] = -math.inf
    grad_lse[:, 1, ::7] = math.nan  # of rows that attend nothing
    gate = None
    if gated is not None:
        gate = torch.randn(size, TOKENS, H, 2 * D, device=device).half().transpose(1, 2)[..., D:]
        gate = gate if gated == "feature" else gate[..., 0]
    given = [x for x in (out, grad_out, lse, grad_lse, gate) if x is not None]
    with unchanged(given), poisoned_memory():
        delta = torch.empty_like(lse)
        sums = torch.empty(workspaces * size * H, n_rows * FEATURES, device=device)
        param_sums = torch.full((N_SUMS + 1,), 7.0, device=device)
        order = torch.full((workspaces * size * H, n_rows // TILE), 7, dtype=torch.int32, device=device)
        do_ungated, grad_gate = (None, None) if gate is None else (torch.empty_like(grad_out), torch.empty_like(gate))
        bwd_preprocess_kernel[(n_tiles * H,)](
            out=tiled(out, TILE, D),
            do=tiled(grad_out, TILE, D),
            lse_ptr=lse,
            grad_lse_ptr=grad_lse if with_lse else None,
            delta_ptr=delta,
            dq_accum_ptr=sums,
            dq_order_ptr=order if with_lse else None,
            gate=gate_args(gate, D),
            grad_gate=gate_args(grad_gate, D),
            do_ungated=None if do_ungated is None else store_target(do_ungated, TILE, D, packed),
            **arguments_of(batch, shape),
            param_sums_ptr=param_sums if with_lse else None,
            n_sums=N_SUMS,
            WORKSPACES=workspaces,
            OVERLAPS=False,
        )
    truth = (out.double() * grad_out.double()).sum(3)
    plain = (out.float() * grad_out.float()).sum(3)
    if with_lse:
        taken = torch.where(lse == -math.inf, 0, grad_lse)
        truth, plain = truth - taken.double(), plain - taken
    assert_close_to_truth(delta, truth, plain)
    assert (sums[:, place(rows[:, None], torch.arange(FEATURES, device=device), FEATURES)] == 0).all()
    assert param_sums.unique().tolist() == ([0, 7] if with_lse else [7])
    assert (param_sums[:N_SUMS] == (0 if with_lse else 7)).all()
    assert (order[:, (rows // TILE).unique()] == (0 if with_lse else 7)).all()
    if gate is not None:
        for mine, exact, plain in zip(
            (do_ungated, grad_gate),
            differentiate_gate(out.double(), grad_out.double(), gate.double()),
            differentiate_gate(out.float(), grad_out.float(), gate.float()),
            strict=True,
        ):
            assert_close_to_truth(mine, exact, plain.half())


def differentiate_gate(gated, grad, gate):
    """The gradients of the output before the gate, and of the gate, of the gated output."""
    sigma = torch.sigmoid(gate)
    if gate.ndim == 3:
        return grad * sigma[..., None], (grad * gated).sum(3) * (1 - sigma)
    return grad * sigma, grad * gated * (1 - sigma)


@pytest.mark.parametrize("shape", NARROW, ids=name_of)
@pytest.mark.parametrize("far", [0, 1, 2], ids=["near", "past", "past-and-future"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_finish(device, batch, shape, interleaved, far):
    """The gradient is of all workspaces: each is turned back by a table of its own."""
    from ropewalk.ops.attention.triton.launch_common import rope_table_args
    from ropewalk.ops.rope.api import apply_rope

    sums, whole = draw_sums(device, batch, shape, 1 + far)
    angles = torch.randn(1 + far, batch[0], TOKENS, shape.features // 2, device=device)
    tables = [rope_table_args(RopeTable(x.cos(), x.sin())) for x in angles]
    with unchanged((sums, angles)):
        grad_q = finish(
            batch, shape, sums, *(table for table, _ in tables), *[None] * (2 - far), R=tables[0][1],
            INTERLEAVED=interleaved,
        )  # fmt: skip

    def turn(x, angles):
        return apply_rope(
            x, None, angles.cos().to(x), angles.sin().to(x), layout="bhtd", interleaved=interleaved, inverse=True,
            impl="reference",
        )  # fmt: skip

    truth, plain = (sum(turn(x, y) for x, y in zip(of, angles, strict=True)) * 0.3 for of in (whole.double(), whole))
    assert_close_to_truth(grad_q, truth, plain.half())


@pytest.mark.parametrize("workspace", [0, 2])
def test_finish_of_one_workspace(device, batch, shape, workspace):
    sums, whole = draw_sums(device, batch, shape, 3)
    grad_q = finish(batch, shape, sums, None, None, None, workspace=workspace, R=0, INTERLEAVED=False)
    whole = whole[workspace]
    assert_close_to_truth(grad_q, whole.double() * 0.3, (whole * 0.3).half())


@pytest.mark.parametrize("of_rows", [False, True], ids=["of-heads", "of-rows"])
def test_the_gradient_of_a_factor(device, batch, shape, of_rows):
    """Queries that attend nothing may be NaN. A head whose factor is 0 has no gradient."""
    from ropewalk.ops.attention.triton.arguments import Scores
    from ropewalk.ops.attention.triton.launch_common import sum_param_grads, tiled
    from ropewalk.ops.launch.steps import AT_ONCE

    size, packed, _, _, n_tiles = batch
    if of_rows and packed is not None:
        pytest.skip("packed sequences are one batch row")
    sums, whole = draw_sums(device, batch, shape, 1)
    q = torch.randn(size, H, TOKENS, shape.features, device=device).half()
    factors = torch.rand(*([size] if of_rows else []), H, 1, device=device) + 0.2
    factors[..., 1, :] = 0
    unattended = torch.arange(TOKENS, device=device) % 7 == 3
    whole[..., unattended, :] = 0
    sums[..., place(batch[2][:, None], torch.arange(shape.features, device=device), shape.features)] = whole
    products = torch.where(factors == 0, 0, (q * whole[0].double()).sum((2, 3))[..., None] * 0.3 / factors.double())
    truth = products if of_rows else products.sum(0)
    q[:, :, unattended] = torch.nan
    with unchanged((q, factors)), poisoned_memory():
        parts = torch.empty(n_tiles * H, 1, device=device)
        of_factor = {
            "q": tiled(q, shape.tile, shape.features // shape.chunks),
            "scores": Scores(factors, 1, H if of_rows else None, 1.0, 1.0, 1.0),
            "factor_grads_ptr": parts,
        }
        finish(batch, shape, sums, None, None, None, of_factor=of_factor, R=0, INTERLEAVED=False)
        grad = sum_param_grads(factors, parts, size, H, packed is not None, AT_ONCE)
    torch.testing.assert_close(grad.double(), truth, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("features", "causal"), [(64, True), (128, False)])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_the_launcher_takes_the_gradient_of_band_weights(monkeypatch, device, features, causal, packed):
    """Given what the backward kernel would add to the workspace, from the definition in float64."""
    launch = pytest.importorskip("ropewalk.ops.attention.hopper.launch")
    from ropewalk.ops.attention.backend import Wanted
    from ropewalk.ops.attention.triton.launch_common import begin_forward
    from ropewalk.ops.launch.steps import AT_ONCE

    weights = torch.tensor([0.5, 0.0, -2.0, 1.3], device=device).requires_grad_()
    cu_seqlens = torch.tensor(SEQUENCES[:-1], device=device)
    call = {"layout": "thd", "cu_seqlens_q": cu_seqlens} if packed else {"layout": "bhtd"}
    n_tokens = SEQUENCES[-2]
    shapes = [(n_tokens, heads, features) if packed else (B, heads, n_tokens, features) for heads in (4, 2, 2)]
    q, k, v = (torch.randn(shape, device=device).half() for shape in shapes)
    position = ExpoSB(band_weights=weights, distance_decay=True)
    call = make_call(q, k, v, position=position, causal=causal, **call)
    out, v, saved, _ = begin_forward(call, AT_ONCE)

    q, k, v = saved.q.double(), *(x.double().repeat_interleave(2, 1) for x in (saved.k, v))
    token = torch.arange(n_tokens, device=device)
    distance = (token[:, None] - token[None]).double()
    sequence = torch.bucketize(token, cu_seqlens[1:], right=True) if packed else token * 0
    attends = (sequence[:, None] == sequence[None]) & ((distance >= 0) | (not causal))
    factors = weights.detach().double().square().requires_grad_()
    decay = 0.7 + 0.3 * torch.exp(-0.005 * distance.abs())
    q.requires_grad_()
    scores = (call.scale * q @ k.mT * factors[:, None, None] * decay).masked_fill(~attends, -math.inf)
    whole, grad_out = scores.softmax(-1) @ v, torch.randn_like(q)
    grad_q, truth = torch.autograd.grad(whole, (q, factors), grad_out)
    out.copy_(whole)
    saved.lse.copy_(scores.logsumexp(-1) / math.log(2))

    class Kernel:
        """Writes dQ before the scale, where the backward kernel adds it."""

        def __getitem__(self, grid):
            return self.run

        def run(self, *, dq_accum, workspace_rows, **rest):
            tile, rows = launch.BACKWARD[features].BLOCK_M, token
            if packed:
                start = torch.tensor(SEQUENCES, device=device)[sequence]
                rows = (start // tile + sequence) * tile + token - start
            sums = dq_accum.base.view(*q.shape[:2], workspace_rows * features)
            places = place(rows[:, None], torch.arange(features, device=device), features)
            sums[..., places] = (grad_q / call.scale).float()

    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    monkeypatch.setattr(launch, "backward_kernel", Kernel())
    wanted = Wanted(score_mod_params=True)
    grads = launch.backward(without_inputs(call, saved), out, saved, grad_out.half(), None, wanted)
    expected = torch.where(factors == 0, 0, truth)
    torch.testing.assert_close(grads.score_mod_params[:, 0].double(), expected, rtol=1e-4, atol=1e-4)


def draw_sums(device, batch, shape, workspaces):
    """Workspaces, and what they hold of each token, (workspaces, B, H, T, D)."""
    size, _, rows, n_rows, _ = batch
    D = shape.features
    places = place(rows[:, None], torch.arange(D, device=device), D)
    assert len(places.unique()) == TOKENS * D
    with poisoned_memory():
        sums = torch.empty(workspaces, size, H, n_rows * D, device=device)
    whole = torch.randn(workspaces, size, H, TOKENS, D, device=device)
    sums[..., places] = whole
    return sums, whole


def finish(batch, shape, sums, *tables, workspace=0, of_factor=None, **keywords):
    from ropewalk.ops.attention.hopper.prepost import bwd_postprocess_kernel
    from ropewalk.ops.attention.triton.launch_common import store_target

    size, packed, _, _, n_tiles = batch
    TILE, D, CHUNKS, _ = shape
    table, past_table, future_table = tables
    with poisoned_memory():
        grad_q = torch.empty(size, TOKENS, H, D, dtype=torch.float16, device=sums.device).transpose(1, 2)
    bwd_postprocess_kernel[(n_tiles * H,)](
        dq_accum_ptr=sums,
        **{"q": None, "scores": None, "factor_grads_ptr": None, **(of_factor or {})},
        dq=store_target(grad_q, TILE, D // CHUNKS, packed),
        table=table,
        past_table=past_table,
        future_table=future_table,
        grad_scale=0.3,
        workspace=workspace,
        **arguments_of(batch, shape),
        OVERLAPS=False,
        **keywords,
    )
    return grad_q
