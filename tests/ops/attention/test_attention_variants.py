"""What real models ask of the Triton kernels: packed and padded batches, caches, dropout, sinks, learned biases."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from helpers import attention_calls
from helpers.kernel_checks import check, launch_backward
from helpers.modes import needs_kernels, on_gpu

from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.backends import TRITON
from ropewalk.ops.attention.call import as_bhtd
from ropewalk.schemes import Alibi, ExpoSB, NoPosition, Rope, T5Bias

pytestmark = needs_kernels

B, H, K, TQ, TK, D = 2, 4, 2, 45, 37, 16
SCHEMES = {
    "none": NoPosition(),
    "rope": Rope(),
    "rope-interleaved": Rope(interleaved=True, attention_factor=1.1),
    "alibi": Alibi(),
    "exposb": ExpoSB(),
    "exposb-decay": ExpoSB(distance_decay=True),
}


@pytest.fixture(scope="module")
def kernels():
    return TRITON


draw = partial(attention_calls.draw, layout="bhtd", batch=B, queries=TQ, keys=TK, heads=H, key_heads=K)


def pack(device, lengths_q, lengths_k, dtype=torch.float32, head_dim=D, v_head_dim=None, rest=3):
    """q, k and v of packed sequences, some rows that belong to none, and cu_seqlens."""
    total_q, total_k = sum(lengths_q) + rest, sum(lengths_k) + 2 * rest
    shapes = [(total_q, H, head_dim), (total_k, K, head_dim), (total_k, K, v_head_dim or head_dim)]
    starts = {
        f"cu_seqlens_{name}": torch.tensor([0, *lengths], device=device).cumsum(0).int()
        for name, lengths in (("q", lengths_q), ("k", lengths_k))
    }
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes], starts


LENGTHS = {
    "equal": ([33, 5, 1, 16, 32], [33, 5, 1, 16, 32]),
    "different": ([5, 0, 33, 1, 17, 0, 3], [9, 4, 40, 1, 0, 0, 70]),
    "one": ([20], [64]),
    "empty": ([0, 0], [0, 0]),
}
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": 6},
    "causal-window": {"causal": True, "window": 6},
}


# Packed sequences


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("lengths", ["equal", "different"])
def test_packed_sequences(kernels, device, lengths, scheme, mask):
    tensors, starts = pack(device, *LENGTHS[lengths])
    check(kernels, tensors, layout="thd", position=SCHEMES[scheme], **starts, **MASKS[mask])


@pytest.mark.parametrize("lengths", ["one", "empty"])
@pytest.mark.parametrize("rest", [0, 40])
def test_packed_sequences_few_or_empty(kernels, device, lengths, rest):
    tensors, starts = pack(device, *LENGTHS[lengths], rest=rest)
    check(kernels, tensors, layout="thd", position=Rope(), causal=True, **starts)


@pytest.mark.slow
def test_packed_positions_are_the_callers(kernels, device):
    tensors, starts = pack(device, *LENGTHS["different"])
    positions = {
        name: torch.randint(0, 200, (x.shape[0],), device=device)
        for name, x in zip(("positions_q", "positions_k"), tensors, strict=False)
    }
    for given in (positions, {"positions_k": positions["positions_k"]}, {"positions_q": positions["positions_q"]}):
        check(kernels, tensors, layout="thd", position=Alibi(), causal=True, **starts, **given)
        check(kernels, tensors, layout="thd", position=ExpoSB(), **starts, **given)


def test_packed_is_one_call_for_each_sequence(kernels, device):
    (q, k, v), starts = pack(device, *LENGTHS["different"], rest=0)

    def run(q, k, v, layout, **keywords):
        call = make_call(q, k, v, layout=layout, position=Rope(), causal=True, **keywords)
        out, saved = kernels.forward(call, True)
        grads = launch_backward(kernels, call, out, saved, torch.ones_like(out))
        return [x[0].transpose(0, 1) for x in (out, *grads[:3])]

    out, grad_q, grad_k, grad_v = run(q, k, v, "thd", **starts)
    slices = [[slice(*bounds) for bounds in pairwise(x.tolist())] for x in starts.values()]
    for of_q, of_k in zip(*slices, strict=True):
        alone = run(q[None, of_q], k[None, of_k], v[None, of_k], "bthd")
        together = (out[of_q], grad_q[of_q], grad_k[of_k], grad_v[of_k])
        for mine, expected in zip(together, alone, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


def test_sequences_see_nothing_of_each_other(kernels, device):
    """NaN in one sequence, and in what belongs to none, stays there: in values and in all gradients."""
    lengths = LENGTHS["different"]
    (q, k, v), starts = pack(device, *lengths)
    call = make_call(q, k, v, layout="thd", position=Rope(), **starts)
    spoilt = 2
    rows_q = slice(*starts["cu_seqlens_q"].tolist()[spoilt : spoilt + 2])
    rows_k = slice(*starts["cu_seqlens_k"].tolist()[spoilt : spoilt + 2])

    def run(grad_out):
        out, saved = kernels.forward(call, True)
        grads = launch_backward(kernels, call, out, saved, as_bhtd(grad_out, "thd"))[:3]
        return [x[0].transpose(0, 1) for x in (out, *grads)]

    grad_out = torch.randn_like(q)
    expected = run(grad_out)
    for x, rows in ((q, rows_q), (k, rows_k), (v, rows_k), (grad_out, rows_q)):
        x[rows] = torch.nan
        x[x.shape[0] - 3 :] = torch.nan
    for mine, clean, rows in zip(run(grad_out), expected, (rows_q, rows_q, rows_k, rows_k), strict=True):
        mine[rows] = clean[rows] = 0
        assert torch.equal(mine[: -3 if rows is rows_q else -6], clean[: -3 if rows is rows_q else -6])


@pytest.mark.parametrize(
    "offsets", [[0, 20, 10, 45], [-5, 10, 20, 45], [0, 10, 20, 900], [30, 20, 10, 0], [2**31 - 1, 0, -(2**31), 45]]
)
def test_offsets_that_are_wrong_read_nothing_out_of_bounds(kernels, device, offsets):
    """What comes out is of no account; on a device nobody checks them, and nothing past the tensors may be touched."""
    (q, k, v), _ = pack(device, [45], [45], rest=0)
    right = torch.tensor([0, 10, 20, 45], device=device, dtype=torch.int32)
    call = make_call(q, k, v, layout="thd", causal=True, cu_seqlens_q=right, cu_seqlens_k=right)
    wrong = torch.tensor(offsets, device=device, dtype=torch.int32)
    call = call._replace(cu_seqlens_q=wrong, cu_seqlens_k=wrong)
    out, saved = kernels.forward(call, True)
    launch_backward(kernels, call, out, saved, torch.randn_like(out))
    if device.type == "cuda":
        torch.cuda.synchronize()


# Padding on the left, and caches


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_keys_that_start_late(kernels, device, scheme, mask):
    starts = torch.tensor([0, 17], device=device)
    check(kernels, draw(device), position=SCHEMES[scheme], key_starts=starts, **MASKS[mask])


@pytest.mark.parametrize("scheme", ["none", "alibi", "exposb"])
def test_queries_that_start_anywhere(kernels, device, scheme):
    tensors = draw(device, queries=5)
    starts = torch.tensor([0, 29], device=device)
    lengths = torch.tensor([5, 34], device=device)
    for keywords in ({"causal": True}, {"causal": True, "window": 4}, {"window": 4}, {"key_lengths": lengths}):
        check(kernels, tensors, position=SCHEMES[scheme], query_starts=starts, **keywords)
    check(
        kernels, tensors, position=SCHEMES[scheme], query_starts=starts, key_lengths=lengths,
        key_starts=torch.tensor([3, 29], device=device), causal=True,
    )  # fmt: skip


def test_nothing_is_left_between_start_and_length(kernels, device):
    starts, lengths = torch.tensor([30, 9], device=device), torch.tensor([20, 9], device=device)
    check(kernels, draw(device), position=Rope(), key_starts=starts, key_lengths=lengths)


def test_what_lies_before_the_starts_is_not_read(kernels, device):
    q, k, v = draw(device)
    k[1, :, :20] = v[1, :, :20] = torch.nan
    call = make_call(q, k, v, position=Rope(), key_starts=torch.tensor([0, 20], device=device), layout="bhtd")
    out, saved = kernels.forward(call, True)
    grads = launch_backward(kernels, call, out, saved, torch.randn_like(out))[:3]
    assert all(bool(x.isfinite().all()) for x in (out, *grads))
    assert not grads[1][1, :, :20].any()
    assert not grads[2][1, :, :20].any()


# Scores and probabilities


CHANGES = {
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.tensor([0.3, -1.0, 4.0, -20.0])},
    "dropout": {"dropout_p": 0.3},
    "dropout-softcap-sinks": {"dropout_p": 0.1, "softcap": 3.0, "sinks": torch.tensor([0.3, -1.0, 4.0, 1.0])},
}


def changes(name, device):
    return {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in CHANGES[name].items()}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scheme", ["none", "rope", "alibi", "exposb-decay"])
@pytest.mark.parametrize("change", CHANGES)
def test_scores_and_probabilities_that_change(kernels, device, change, scheme, mask):
    check(kernels, draw(device), position=SCHEMES[scheme], **changes(change, device), **MASKS[mask])


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_packed_sequences(kernels, device, change):
    tensors, starts = pack(device, *LENGTHS["different"])
    check(kernels, tensors, layout="thd", position=Alibi(), causal=True, **starts, **changes(change, device))


@pytest.mark.parametrize("change", CHANGES)
def test_changes_under_a_mask_that_leaves_rows_empty(kernels, device, change):
    mask = torch.rand(B, H, TQ, TK, device=device) > 0.5
    mask[:, :, 3:9] = False
    check(kernels, draw(device), position=Rope(), mask=mask, **changes(change, device))


@pytest.mark.parametrize("p", [2**-16, 17 / 256, 0.9, 1 - 2**-30])
def test_dropout_at_any_rate(kernels, device, p):
    check(kernels, draw(device), dropout_p=p, causal=True)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_softcap_takes_any_scale(kernels, device, scale):
    check(kernels, draw(device), softcap=2.0, scale=scale)


def test_a_sink_that_takes_no_part(kernels, device):
    mask = torch.ones(TQ, TK, dtype=torch.bool, device=device)
    mask[3:7] = False
    *_, grads = check(kernels, draw(device), mask=mask, sinks=torch.tensor([0.0, -torch.inf, 1.0, -1.0], device=device))
    assert grads.sinks[1] == 0


def test_sinks_where_there_are_no_keys(kernels, device):
    check(kernels, draw(device, keys=0), sinks=torch.randn(H, device=device))


def test_the_seed_decides_what_is_dropped(kernels, device):
    q, k, v = draw(device)
    call = make_call(q, k, v, dropout_p=0.5, layout="bhtd")

    def run(seed):
        return kernels.forward(call._replace(seed=torch.tensor([seed], device=device)), True)[0]

    assert torch.equal(run(3), run(3))
    assert not torch.equal(run(3), run(4))
    assert not torch.equal(run(3), run(3 + 2**32))


# Head dims


@pytest.mark.parametrize("dims", [(16, 40), (40, 16), (24, 8), (192, 128), (160, 160), (136, 1)], ids=str)
@pytest.mark.parametrize("scheme", ["none", "rope", "exposb"])
def test_values_of_another_head_dim(kernels, device, scheme, dims):
    check(kernels, draw(device, head_dim=dims[0], v_head_dim=dims[1]), position=SCHEMES[scheme], causal=True)


@pytest.mark.parametrize("interleaved", [False, True])
def test_features_that_turn_from_an_offset_on(kernels, device, interleaved):
    position = Rope(rotary_dim=8, rotary_offset=16, interleaved=interleaved)
    check(kernels, draw(device, head_dim=32), position=position, causal=True)
    tensors, starts = pack(device, *LENGTHS["different"], head_dim=24, v_head_dim=16)
    check(kernels, tensors, layout="thd", position=position, **starts)


# What is learned


def learned_schemes(device):
    table = torch.randn(32, H, device=device).requires_grad_()
    return {
        "alibi": Alibi(torch.rand(H, device=device).requires_grad_()),
        "bands": ExpoSB(band_weights=torch.rand(H, device=device).requires_grad_()),
        "bands-decay": ExpoSB(distance_decay=True, band_weights=torch.rand(H, device=device).requires_grad_()),
        "t5": T5Bias(table, max_distance=20),
        "t5-past": T5Bias(table, bidirectional=False, max_distance=40),
    }


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize("scheme", ["alibi", "bands", "bands-decay", "t5", "t5-past"])
def test_learned_schemes(kernels, device, scheme, mask):
    check(kernels, draw(device, keys=70), position=learned_schemes(device)[scheme], **MASKS[mask])


@pytest.mark.parametrize("scheme", ["alibi", "bands-decay", "t5"])
def test_learned_schemes_of_packed_sequences(kernels, device, scheme):
    tensors, starts = pack(device, *LENGTHS["different"])
    position = learned_schemes(device)[scheme]
    sinks = torch.randn(H, device=device)
    check(kernels, tensors, layout="thd", position=position, causal=True, softcap=4.0, sinks=sinks, **starts)


@pytest.mark.parametrize("scheme", ["alibi", "t5"])
def test_learned_schemes_at_positions_of_the_callers(kernels, device, scheme):
    positions = torch.randint(0, 60, (B, TQ), device=device)
    check(kernels, draw(device), position=learned_schemes(device)[scheme], positions_q=positions)


# Every configuration, on a GPU


@on_gpu
@pytest.mark.parametrize("kind", ["packed", "starts", *CHANGES, "alibi", "bands-decay", "t5"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, (192, 128), 256], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_configuration(kernels, device, dtype, head_dim, kind):
    head_dim, v_head_dim = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    if dtype == torch.float32 and (head_dim, kind) not in ((64, "dropout-softcap-sinks"), (192, "packed"), (128, "t5")):
        pytest.skip("the tiles of float32 are the same for all kinds")
    if kind == "packed":
        lengths = [300, 64, 65, 0, 1, 129]
        tensors, starts = pack(device, lengths, lengths[::-1], dtype, head_dim, v_head_dim)
        check(kernels, tensors, layout="thd", position=Rope(), causal=True, **starts)
        return
    tensors = draw(device, dtype, queries=200, keys=333, head_dim=head_dim, v_head_dim=v_head_dim)
    if kind == "starts":
        starts = torch.tensor([0, 100], device=device)
        check(kernels, tensors, position=Rope(), causal=True, key_starts=starts, query_starts=starts)
    elif kind in CHANGES:
        check(kernels, tensors, position=Rope(), causal=True, **changes(kind, device))
    else:
        check(kernels, tensors, position=learned_schemes(device)[kind], causal=True)


@on_gpu
def test_a_graph_drops_others_at_each_replay(device):
    from ropewalk import attention

    q, k, v = draw(device, torch.bfloat16, layout="bthd", queries=64, keys=64, head_dim=64)
    attention(q, k, v, dropout_p=0.5, impl="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, dropout_p=0.5, impl="triton")
    runs = []
    for _ in range(2):
        graph.replay()
        runs.append(out.clone())
    assert not torch.equal(*runs)
