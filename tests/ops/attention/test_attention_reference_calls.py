"""The reference as real models call it: packed, padded, cached and paged, capped, with sinks and with dropout.

Each call is held against plainer calls, or against formulas over a whole matrix that share no code with it.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import NamedTuple

import pytest
import torch
from helpers import attention_calls
from helpers.attention_calls import SCHEMES
from helpers.plain_philox import stays
from torch import Tensor

from ropewalk.ops.attention import reference
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.backends import REFERENCE
from ropewalk.ops.attention.call import as_bhtd, from_bhtd
from ropewalk.ops.rope.api import apply_rope
from ropewalk.schemes import Alibi, ExpoSB, Rope
from ropewalk.testing import unchanged

H, K, D = 4, 2, 16
MASKS = {
    "all": {},
    "causal": {"causal": True},
    "window": {"window": 3},
    "causal-window": {"causal": True, "window": 2},
}
SEED = 0x1234567890ABCDEF
NAN = math.nan


def normal(device, *shape):
    return torch.randn(*shape, dtype=torch.float64).to(device)


draw = partial(attention_calls.draw, dtype=torch.float64)


def attend(q: Tensor, k: Tensor, v: Tensor, *, layout="bthd", seed=SEED, **keywords) -> tuple[Tensor, Tensor]:
    """The output in the layout of q, and the log-sum-exp, (B, H, T) or (H, total)."""
    call = make_call(q, k, v, layout=layout, **keywords)
    if call.dropout_p > 0:
        call = call._replace(seed=torch.tensor([seed], device=q.device))
    tensors = [x for x in (q, k, v, *keywords.values()) if isinstance(x, Tensor)]
    with unchanged(tensors):
        out, lse = REFERENCE.attend(call)
    return from_bhtd(out, layout), lse[0] if layout == "thd" else lse


def total(out: Tensor, lse: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
    """A number whose gradient is to be looked at; log-sum-exps of −inf do not count."""
    return (out * weights[0]).sum() + (torch.where(lse.isinf(), 0.0, lse) * weights[1]).sum()


def same(results, expected) -> None:
    for x, y in zip(results, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


def bounds(lengths, device, dtype=torch.int32):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype, device=device)


# Lengths of queries and keys of each sequence; then how many rows of each follow that belong to none.
PACKED = {
    "alike": ([3, 5, 1], [3, 5, 1], 0, 0),
    "one": ([6], [6], 0, 0),
    "empty-sequences": ([0, 4, 0, 0, 2, 0], [0, 4, 0, 0, 2, 0], 0, 0),
    "unlike": ([3, 0, 5, 1, 2, 0], [5, 2, 3, 0, 1, 0], 0, 0),
    "with-a-tail": ([2, 4, 0], [4, 3, 1], 3, 2),
    "tail-of-queries": ([2, 4], [4, 3], 5, 0),
    "nothing-but-a-tail": ([0, 0], [0, 0], 3, 4),
    "no-sequences": ([], [], 3, 4),
}


def packed_and_alone(device, lengths_q, lengths_k, tail_q, tail_k, *, same_bounds=False, sinks=None, **keywords):
    """Outputs, log-sum-exps and gradients of one packed call; and those of one call for each sequence.

    Rows of no sequence hold NaN.
    """
    queries, keys = sum(lengths_q), sum(lengths_k)
    tensors = draw(device, queries=queries + tail_q, keys=keys + tail_k, batch=None)
    tensors[0][queries:] = NAN
    for x in tensors[1:]:
        x[keys:] = NAN
    weights = normal(device, queries + tail_q, H, D), normal(device, H, queries + tail_q)
    if sinks is not None:
        tensors.append(sinks)
    leaves = [x.clone().requires_grad_() for x in tensors]
    cu_seqlens = {"cu_seqlens_q": bounds(lengths_q, device), "cu_seqlens_k": bounds(lengths_k, device, torch.int64)}
    if same_bounds:
        del cu_seqlens["cu_seqlens_k"]
    given = {} if sinks is None else {"sinks": leaves[3]}
    out, lse = attend(*leaves[:3], layout="thd", **cu_seqlens, **given, **keywords)
    packed = (out, lse, *torch.autograd.grad(total(out, lse, weights), leaves))

    leaves = [x.clone().requires_grad_() for x in tensors]
    given = {} if sinks is None else {"sinks": leaves[3]}
    empty = torch.full((1, H), -math.inf) if sinks is None else leaves[3][None]
    outs, lses = [], []
    for (start_q, stop_q), (start_k, stop_k) in zip(
        *(itertools.pairwise([0, *itertools.accumulate(lengths)]) for lengths in (lengths_q, lengths_k)), strict=True
    ):
        rows = [leaves[0][None, start_q:stop_q], *(x[None, start_k:stop_k] for x in leaves[1:3])]
        out, lse = attend(*rows, **given, **keywords)
        outs.append(out[0])
        lses.append(lse[0])
    out = torch.cat([leaves[0][:0], *outs, torch.zeros_like(leaves[0][:tail_q])])
    lse = torch.cat([*lses, empty.to(out).mT.expand(H, tail_q)], dim=1)
    gradients = torch.autograd.grad(total(out, lse, weights), leaves, allow_unused=True)
    gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True)]
    return packed, (out, lse, *gradients)


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("lengths", PACKED)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_packed_sequences_are_calls_of_their_own(device, scheme, lengths, masks):
    same(*packed_and_alone(device, *PACKED[lengths], position=SCHEMES[scheme], **MASKS[masks]))


@pytest.mark.parametrize("lengths", PACKED)
@pytest.mark.parametrize("masks", MASKS)
def test_packed_sequences_with_sinks_and_a_cap_are_calls_of_their_own(device, masks, lengths):
    options = {"sinks": normal(device, H), "softcap": 1.5, "scale": 0.7}
    same(*packed_and_alone(device, *PACKED[lengths], position=ExpoSB(distance_decay=True), **options, **MASKS[masks]))


def test_packed_sequences_of_one_set_of_bounds(device):
    results = packed_and_alone(device, [3, 0, 4], [3, 0, 4], 2, 2, same_bounds=True, position=Rope(), causal=True)
    same(*results)


@pytest.mark.parametrize("given", [("positions_q",), ("positions_k",), ("positions_q", "positions_k")])
def test_positions_of_packed_tokens_override_the_defaults(device, given):
    lengths_q, lengths_k = [3, 2], [4, 5]
    q, k, v = draw(device, queries=5, keys=9, batch=None)
    positions = {"positions_q": torch.randint(99, (5,)), "positions_k": torch.randint(99, (9,))}
    positions = {name: positions[name].to(device) for name in given}
    cu_seqlens = {"cu_seqlens_q": bounds(lengths_q, device), "cu_seqlens_k": bounds(lengths_k, device)}
    out, _ = attend(q, k, v, layout="thd", position=Rope(), causal=True, **cu_seqlens, **positions)
    for rows, columns in ((slice(0, 3), slice(0, 4)), (slice(3, 5), slice(4, 9))):
        mine = {name: x[None, rows if name == "positions_q" else columns] for name, x in positions.items()}
        alone, _ = attend(q[None, rows], k[None, columns], v[None, columns], position=Rope(), causal=True, **mine)
        same([out[rows]], [alone[0]])


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("queries", [4, 9, 12])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_padding_on_the_left_changes_nothing(device, scheme, queries, masks):
    """Alignment is at the bottom right, so it stays; positions count from the first key."""
    keys, starts, ends = 9, [0, 3, 9, 4], [9, 9, 9, 7]
    tensors = draw(device, queries=queries, keys=keys, batch=4)
    for x in tensors[1:]:
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            x[row, :start] = x[row, end:] = NAN
    weights = normal(device, 4, queries, H, D), normal(device, 4, H, queries)
    leaves = [x.requires_grad_() for x in tensors]
    key_starts = torch.tensor(starts, device=device)
    padded = {"key_starts": key_starts, "key_lengths": torch.tensor(ends, dtype=torch.int32, device=device)}
    out, lse = attend(*leaves, position=SCHEMES[scheme], **padded, **MASKS[masks])
    grads = torch.autograd.grad(total(out, lse, weights), leaves)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        alone = [x.detach()[row : row + 1, start * (x is not leaves[0]) :].requires_grad_() for x in leaves]
        length = torch.tensor([end - start], device=device)
        results = attend(*alone, position=SCHEMES[scheme], key_lengths=length, **MASKS[masks])
        same((out[row], lse[row]), (results[0][0], results[1][0]))
        mine = torch.autograd.grad(total(*results, tuple(x[row : row + 1] for x in weights)), alone)
        same([x[row] for x in grads], [mine[0][0], *(pad(x[0], start) for x in mine[1:])])


def pad(x: Tensor, start: int) -> Tensor:
    return torch.cat((x.new_zeros(start, *x.shape[1:]), x))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_padded_batch_is_its_sequences_and_padding_may_be_nan(device, scheme):
    """What stands in the padding, queries too, reaches neither outputs nor gradients where attention is causal."""
    tokens, starts = 8, [0, 3, 7, 8]
    tensors = draw(device, queries=tokens, keys=tokens, batch=4)
    for x in tensors:
        for row, start in enumerate(starts):
            x[row, :start] = NAN
    leaves = [x.requires_grad_() for x in tensors]
    weights = normal(device, 4, tokens, H, D), normal(device, 4, H, tokens)
    options = {"position": SCHEMES[scheme], "causal": True}
    out, lse = attend(*leaves, key_starts=torch.tensor(starts, device=device), **options)
    grads = torch.autograd.grad(total(out, lse, weights), leaves)
    for row, start in enumerate(starts):
        assert not out[row, :start].any()
        assert (lse[row, :, :start] == -math.inf).all()
        alone = [x.detach()[row : row + 1, start:].requires_grad_() for x in leaves]
        results = attend(*alone, **options)
        same((out[row, start:], lse[row, :, start:]), (results[0][0], results[1][0]))
        cotangents = weights[0][row : row + 1, start:], weights[1][row : row + 1, :, start:]
        mine = torch.autograd.grad(total(*results, cotangents), alone)
        same([x[row] for x in grads], [pad(x[0], start) for x in mine])


CHUNKS = {"prefill": [13], "chunks": [5, 1, 7], "decode": [1] * 13, "prefill-and-decode": [9, 1, 1, 1, 1]}


@pytest.mark.parametrize("masks", ["causal", "causal-window"])
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_cache_filled_in_steps_gives_what_one_prefill_gives(device, scheme, chunks, masks):
    """Rows of the batch stand at different places in a cache that is not full, one of them after padding."""
    tokens, room, starts = 13, 20, [0, 4, 2]
    tensors = draw(device, queries=tokens, keys=tokens, batch=3)
    whole = attend(*tensors, position=SCHEMES[scheme], **MASKS[masks])
    caches = [torch.full((3, room, K, D), NAN, dtype=torch.float64, device=device) for _ in range(2)]
    first, done = torch.tensor(starts, dtype=torch.int32, device=device), 0
    outs, lses = [], []
    for count in CHUNKS[chunks]:
        for cache, x in zip(caches, tensors[1:], strict=True):
            for row, start in enumerate(starts):
                cache[row, start + done : start + done + count] = x[row, done : done + count]
        where = {"key_starts": first, "query_starts": first + done, "key_lengths": first + done + count}
        chunk = tensors[0][:, done : done + count]
        out, lse = attend(chunk, *caches, position=SCHEMES[scheme], **where, **MASKS[masks])
        outs.append(out)
        lses.append(lse)
        done += count
    same((torch.cat(outs, 1), torch.cat(lses, 2)), whole)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_queries_that_start_early_in_a_cache_have_gradients(device, scheme):
    q, k, v = (x.requires_grad_() for x in draw(device, queries=3, keys=10, batch=2))
    starts = torch.tensor([0, 6], device=device)
    options = {"position": SCHEMES[scheme], "causal": True, "window": 4}
    weights = normal(device, 2, 3, H, D), normal(device, 2, H, 3)
    out, lse = attend(q, k, v, query_starts=starts, **options)
    grads = torch.autograd.grad(total(out, lse, weights), (q, k, v))
    places = starts[:, None] + torch.arange(3, device=device)
    ahead = torch.arange(10, device=device) - places[..., None]
    options = {"position": SCHEMES[scheme], "mask": (ahead <= 0) & (ahead > -4), "positions_q": places}
    expected = attend(q, k, v, **options)
    same((out, lse, *grads), (*expected, *torch.autograd.grad(total(*expected, weights), (q, k, v))))


def paged(x: Tensor, page_size: int, table: Tensor, pages: int) -> Tensor:
    """x (B, T, K, D) in pages; all else is NaN."""
    memory = x.new_full((pages, page_size, *x.shape[2:]), NAN)
    for row, n in itertools.product(range(table.shape[0]), range(table.shape[1])):
        memory[table[row, n]] = x[row, n * page_size : (n + 1) * page_size]
    return memory


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
@pytest.mark.parametrize("page_size", [1, 16, 24, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_pages_in_any_order_are_one_cache(device, scheme, page_size, layout):
    n_pages, queries = max(3, 8 // page_size), 4
    room = n_pages * page_size
    lengths = torch.tensor([room, page_size + 3, queries, max(queries, 2 * page_size)], device=device).int()
    q, k, v = draw(device, queries=queries, keys=room, batch=4, v_head_dim=8)
    for row, length in enumerate(lengths.tolist()):
        k[row, length:] = v[row, length:] = NAN
    table = (torch.randperm(4 * n_pages + 5)[: 4 * n_pages]).view(4, n_pages).to(device)
    pages = [paged(x, page_size, table, 4 * n_pages + 5) for x in (k, v)]
    for row, length in enumerate(lengths.tolist()):  # what is not filled has no page
        table[row, -(-length // page_size) :] = [-1, 10**6, -(2**31), 7][row]
    options = {"position": SCHEMES[scheme], "causal": True, "key_lengths": lengths}
    options |= {"query_starts": lengths - queries, "layout": layout}
    tensors = [q, k, v] if layout == "bthd" else [x.transpose(1, 2) for x in (q, k, v)]
    pages = pages if layout == "bthd" else [x.transpose(1, 2) for x in pages]
    dtype = torch.int32 if page_size < 64 else torch.int64
    same(attend(tensors[0], *pages, block_table=table.to(dtype), **options), attend(*tensors, **options))


def test_pages_behind_the_first_key_are_never_read(device):
    q, k, v = draw(device, queries=2, keys=48, batch=2)
    where = {"key_starts": torch.tensor([17, 40], device=device), "key_lengths": torch.tensor([48, 45], device=device)}
    table = torch.tensor([[0, 1, 2], [3, 4, 5]], device=device)
    pages = [paged(x, 16, table, 6) for x in (k, v)]
    expected = attend(q, k, v, position=Rope(), window=9, **where)
    for x in pages:
        x[0] = x[3] = x[4] = x[1, :1] = x[5, :8] = x[5, 13:] = NAN
    table[0, 0], table[1, :2] = -7, 99
    same(attend(q, *pages, position=Rope(), window=9, block_table=table, **where), expected)


def test_a_table_that_lies_is_read_within_the_pages(device):
    """On a device values are not checked: whatever they are, nothing outside is read."""
    q, k, v = (as_bhtd(x, "bthd") for x in draw(device, queries=2, keys=32, batch=2))
    lengths = torch.tensor([32, 20], device=device)
    table = torch.tensor([[0, 1], [1, 0]], device=device)
    pages = [x.reshape(2, K, 2, 16, D).transpose(1, 2).flatten(0, 1) for x in (k, v)]
    call = make_call(q, *pages, layout="bhtd", key_lengths=lengths, block_table=table)
    wild = torch.tensor([[-(2**40), 2**40], [3, -1]], device=device)
    out, _ = REFERENCE.attend(call._replace(block_table=wild))
    expected, _ = REFERENCE.attend(call._replace(block_table=wild.clamp(0, 3)))
    assert torch.equal(out, expected)
    nothing = [x[:0] for x in pages]
    out, _ = REFERENCE.attend(call._replace(k=nothing[0], v=nothing[1], key_lengths=torch.zeros_like(lengths)))
    assert not out.any()


class Case(NamedTuple):
    """A call, and what it means for a whole matrix of scores."""

    softcap: float | None = None
    sinks: bool = False
    dropout_p: float = 0.0
    value_dim: int = D
    slopes: bool = False
    masked: bool = False


CASES = {
    "softcap": Case(softcap=0.8),
    "sinks": Case(sinks=True),
    "sinks-masked": Case(sinks=True, masked=True),
    "dropout": Case(dropout_p=0.3),
    "dropout-masked": Case(dropout_p=0.6, masked=True),
    "narrow-values": Case(value_dim=5),
    "wide-values": Case(value_dim=40),
    "alibi-softcap": Case(softcap=0.8, slopes=True),
    "everything": Case(0.8, True, 0.45, 24, True, True),
}
BATCH, QUERIES, KEYS = 2, 5, 11
SLOPES = [0.5, 0.25, 1.5, -0.125]


def kept(p: float, batch: int, queries: int, keys: int, device) -> Tensor:
    indices = itertools.product(range(batch * H), range(queries), range(keys))
    keep = [stays(SEED, p, row, 0, query, key) for row, query, key in indices]
    return torch.tensor(keep, device=device).view(batch, H, queries, keys)


def dense(q, k, v, sinks, slopes, may, case: Case) -> tuple[Tensor, Tensor]:
    """The same over a whole matrix; a row that attends nothing, without sinks, is left as NaN."""
    k, v = (x.repeat_interleave(H // K, dim=2) for x in (k, v))
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) / math.sqrt(D)
    if case.softcap is not None:
        scores = case.softcap * (scores / case.softcap).tanh()
    if case.slopes:
        m = torch.arange(KEYS - QUERIES, KEYS, device=q.device)[:, None]
        scores = scores - slopes[:, None, None] * (m - torch.arange(KEYS, device=q.device)).abs()
    scores = scores.masked_fill(~may, -math.inf)
    if case.sinks:
        scores = torch.cat((scores, sinks[:, None, None].expand(BATCH, H, QUERIES, 1)), dim=-1)
    p = scores.softmax(dim=-1)[..., :KEYS]
    if case.dropout_p:
        p = p * kept(case.dropout_p, BATCH, QUERIES, KEYS, q.device) / (1 - round(case.dropout_p * 65536) / 65536)
    return torch.einsum("bhmn,bnhd->bmhd", p, v), scores.logsumexp(dim=-1)


def case_inputs(device, case: Case):
    """q, k, v, sinks and slopes that require grad, and which keys are attended: query 2 of row 1 attends none."""
    tensors = draw(device, queries=QUERIES, keys=KEYS, batch=BATCH, v_head_dim=case.value_dim)
    may = torch.ones(BATCH, 1, QUERIES, KEYS, dtype=torch.bool, device=device)
    if case.masked:
        may = torch.rand(BATCH, 1, QUERIES, KEYS, device=device) < 0.6
        may[..., 3] = True
        may[1, :, 2] = not case.sinks
    sinks, slopes = normal(device, H), torch.tensor(SLOPES, dtype=torch.float64, device=device)
    return [x.requires_grad_() for x in (*tensors, sinks, slopes)], may


def case_keywords(case: Case, sinks, slopes, may):
    return {
        "softcap": case.softcap,
        "sinks": sinks if case.sinks else None,
        "dropout_p": case.dropout_p,
        "position": Alibi(slopes) if case.slopes else SCHEMES["none"],
        "mask": may if case.masked else None,
    }


def gradients(results, leaves, weights):
    found = torch.autograd.grad(total(*results, weights), leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_every_option_is_as_its_formula_says(device, monkeypatch, case, blocked):
    case = CASES[case]
    if blocked:
        monkeypatch.setattr(reference, "BLOCK_SCORES", 2 * BATCH * H * KEYS)
    leaves, may = case_inputs(device, case)
    weights = normal(device, BATCH, QUERIES, H, case.value_dim), normal(device, BATCH, H, QUERIES)
    results = attend(*leaves[:3], **case_keywords(case, *leaves[3:], may))
    expected = dense(*leaves, may, case)
    assert results[0].shape == (BATCH, QUERIES, H, case.value_dim)
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if case.slopes else {"rtol": 1e-9, "atol": 1e-11}  # float32 slopes
    mine, theirs = ((*x, *gradients(x, leaves, weights)) for x in (results, expected))
    for x, y in zip(mine, theirs, strict=True):
        torch.testing.assert_close(x, y, **tolerance)


@pytest.mark.parametrize("case", ["softcap", "sinks-masked", "dropout-masked", "everything"])
def test_gradients_of_options_are_the_derivatives(device, monkeypatch, case):
    case = CASES[case]._replace(slopes=False)  # whose numbers are rounded to float32
    monkeypatch.setattr(reference, "BLOCK_SCORES", 2 * BATCH * H * KEYS)
    leaves, may = case_inputs(device, case)

    def call(q, k, v, sinks):
        out, lse = attend(q, k, v, **case_keywords(case, sinks, None, may))
        return out, lse

    torch.autograd.gradcheck(call, leaves[:4], fast_mode=True)


@pytest.mark.parametrize("name", ["rope-interleaved", "exposb-decay"])
def test_gradients_of_packed_calls_with_everything_are_the_derivatives(device, name):
    q, k, v = (x.requires_grad_() for x in draw(device, queries=7, keys=9, batch=None, v_head_dim=6))
    sinks = normal(device, H).requires_grad_()
    options = {"cu_seqlens_q": bounds([3, 0, 2, 1], device), "cu_seqlens_k": bounds([4, 1, 0, 3], device)}
    options |= {"position": SCHEMES[name], "causal": True, "softcap": 2.0, "dropout_p": 0.4, "layout": "thd"}

    def call(q, k, v, sinks):
        return attend(q, k, v, sinks=sinks, **options)

    torch.autograd.gradcheck(call, (q, k, v, sinks), fast_mode=True)
    torch.autograd.gradgradcheck(call, (q, k, v, sinks), fast_mode=True)


@pytest.mark.parametrize("what", ["mask", "no-keys", "lengths"])
def test_a_row_with_sinks_that_attends_nothing_is_its_sink(device, what):
    keys = 0 if what == "no-keys" else 6
    leaves = [x.requires_grad_() for x in (*draw(device, queries=3, keys=keys), normal(device, H))]
    nothing = {
        "mask": {"mask": torch.zeros(3, keys, dtype=torch.bool, device=device)},
        "no-keys": {},
        "lengths": {"key_lengths": torch.zeros(2, dtype=torch.int32, device=device)},
    }
    out, lse = attend(*leaves[:3], sinks=leaves[3], **nothing[what])
    assert not out.any()
    assert torch.equal(lse, leaves[3][:, None].expand(2, H, 3))
    weights = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad(total(out, lse, weights), leaves)
    assert not any(x.any() for x in grads[:3])
    torch.testing.assert_close(grads[3], weights[1].sum(dim=(0, 2)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_sink_of_minus_infinity_is_none(device, dtype):
    q, k, v = (x.to(dtype).requires_grad_() for x in draw(device, queries=5, keys=5))
    options = {"causal": True, "key_starts": torch.tensor([0, 2], device=device)}
    sinks = torch.full((H,), -math.inf, dtype=torch.bfloat16, device=device)
    weights = torch.randn(2, 5, H, D, device=device), torch.randn(2, H, 5, device=device)
    results = attend(q, k, v, sinks=sinks, **options)
    expected = attend(q, k, v, **options)
    mine, theirs = ((*x, *gradients(x, [q, k, v], weights)) for x in (results, expected))
    for x, y in zip(mine, theirs, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_blocks_of_queries_drop_the_same(device, monkeypatch, packed, rows):
    queries, keys = 7, 10
    batch, layout = (None, "thd") if packed else (2, "bthd")
    leaves = [x.requires_grad_() for x in (*draw(device, queries=queries, keys=keys, batch=batch), normal(device, H))]
    slopes = torch.rand(H, device=device, requires_grad=True)
    options = {"position": Alibi(slopes), "causal": True, "softcap": 3.0, "dropout_p": 0.5, "layout": layout}
    if packed:
        options |= {"cu_seqlens_q": bounds([2, 4], device), "cu_seqlens_k": bounds([3, 5], device)}
    else:
        options |= {"key_starts": torch.tensor([0, 2], device=device)}

    def call():
        results = attend(*leaves[:3], sinks=leaves[3], **options)
        weight = torch.arange(results[0].numel(), device=device).view(results[0].shape).sin()
        lse_weight = torch.arange(results[1].numel(), device=device).view(results[1].shape).cos()
        return (*results, *torch.autograd.grad(total(*results, (weight, lse_weight)), [*leaves, slopes]))

    expected = call()
    monkeypatch.setattr(reference, "BLOCK_SCORES", rows * (1 if packed else 2) * H * keys)
    torch.testing.assert_close(call(), expected)


@pytest.mark.parametrize("what", ["sinks", "slopes"])
def test_what_is_learned_alone_is_computed_in_blocks(device, monkeypatch, what):
    """Nor do sinks and slopes, where nothing else needs a gradient, keep a matrix for the backward."""
    q, k, v = draw(device, queries=64, keys=64, batch=1)
    learned = torch.rand(H, device=device).requires_grad_()
    options = {"sinks": learned} if what == "sinks" else {"position": Alibi(learned)}
    sizes, gradients = [], []
    for block_scores in (4 * H * 64, 1 << 24):
        monkeypatch.setattr(reference, "BLOCK_SCORES", block_scores)
        saved: dict[int, int] = {}
        sizes.append(saved)

        def save(x, saved=saved):
            saved[x.untyped_storage().data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
            out, _ = attend(q, k, v, **options)
        gradients.append(torch.autograd.grad((out * out.sin()).sum(), learned))
    blocked, whole = (sum(x.values()) for x in sizes)
    assert blocked < H * 64 * 64 < whole
    torch.testing.assert_close(*gradients)


def test_packed_tokens_are_dropped_by_their_indices_in_the_sequence(device):
    p, lengths_q, lengths_k = 0.5, [2, 6], [7, 13]
    q, k, _ = draw(device, queries=sum(lengths_q), keys=sum(lengths_k), batch=None)
    v = torch.eye(max(lengths_k), dtype=q.dtype, device=device)  # the output: probabilities
    v = torch.cat([v[:length] for length in lengths_k])[:, None].repeat(1, K, 1)
    starts = {"cu_seqlens_q": bounds(lengths_q, device), "cu_seqlens_k": bounds(lengths_k, device)}
    out, _ = attend(q, k, v, layout="thd", dropout_p=p, **starts)
    for sequence, (queries, keys) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        found = out[sum(lengths_q[:sequence]) :][:queries, :, :keys] != 0
        indices = itertools.product(range(queries), range(H), range(keys))
        expected = [stays(SEED, p, head, sequence, query, key) for query, head, key in indices]
        assert found.flatten().tolist() == expected


def test_dropout_needs_a_seed_and_follows_it(device):
    q, k, v = draw(device, queries=6, keys=20)
    call = make_call(q, k, v, dropout_p=0.5)
    with pytest.raises(ValueError, match="seed is None, but dropout_p is above 0"):
        REFERENCE.attend(call)
    one, other = (attend(q, k, v, dropout_p=0.5, seed=seed)[0] for seed in (1, 2))
    assert torch.equal(one, attend(q, k, v, dropout_p=0.5, seed=1)[0])
    assert not torch.isclose(one, other).all(dim=-1).any()


def test_dropout_keeps_the_mean_and_the_log_sum_exp(device):
    q, k, v = draw(device, queries=3, keys=200, batch=1)
    truth, lse = attend(q, k, v)
    sum_of_outs = torch.zeros_like(truth)
    for seed in range(200):
        out, other_lse = attend(q, k, v, dropout_p=0.5, seed=seed)
        assert torch.equal(lse, other_lse)
        sum_of_outs += out
    # One output deviates by √(p/(1 − p) · Σ probability² · value²), here about √(1/200 · e).
    assert (sum_of_outs / 200 - truth).abs().max() < 5 * math.sqrt(math.e / 200 / 200)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_once(device, dtype):
    case = CASES["everything"]
    leaves, may = case_inputs(device, case)
    leaves = [x.detach().to(dtype) for x in leaves]
    results = attend(*leaves[:3], **case_keywords(case, *leaves[3:], may))
    assert (results[0].dtype, results[1].dtype) == (dtype, torch.float32)
    expected = dense(*(x.double() for x in leaves), may, case)
    torch.testing.assert_close(results[0], expected[0].to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(results[1], expected[1].float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["rope", "rope-interleaved"])
def test_keys_that_were_rotated_before_are_left_alone(device, name):
    q, k, v = draw(device, queries=4, keys=9)
    scheme = SCHEMES[name]
    table = scheme.rotation(torch.arange(9, device=device), D)
    rotated = apply_rope(k, None, table.cos, table.sin, interleaved=scheme.interleaved)
    same(
        attend(q, rotated, v, position=scheme, keys_rotated=True, causal=True),
        attend(q, k, v, position=scheme, causal=True),
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_keys_rotated_maps_queries_alone(device, scheme):
    q, k, v = draw(device, queries=4, keys=9)
    scheme = SCHEMES[scheme]
    where = torch.arange(9, device=device)[None]
    call = make_call(q, k, v, position=scheme)
    _, mapped = reference.map_features(call, where[:, 5:], where)
    mapped = from_bhtd(mapped, "bthd")
    same(attend(q, mapped, v, position=scheme, keys_rotated=True), attend(q, k, v, position=scheme))
    assert torch.equal(mapped, k) == (scheme.rotation(where, D) is None)


@pytest.mark.parametrize("interleaved", [False, True])
def test_features_turn_from_the_offset_on(device, interleaved):
    q, k, v = draw(device, queries=4, keys=9)
    options = {"rotary_dim": 6, "interleaved": interleaved}
    found = attend(q, k, v, position=Rope(rotary_offset=7, **options))
    q, k = (torch.cat((x[..., 7:], x[..., :7]), dim=-1) for x in (q, k))
    same(found, attend(q, k, v, position=Rope(**options)))


COMPILED = {
    "packed": {"layout": "thd", "dropout_p": 0.3},
    "padded": {"key_starts": [0, 2], "key_lengths": [9, 7]},
    "cached": {"query_starts": [0, 3], "key_lengths": [9, 9], "softcap": 2.0},
    "paged": {"key_lengths": [20, 9], "block_table": [[1, 0], [2, -1]]},
}


@pytest.mark.parametrize("case", COMPILED)
def test_checks_and_reference_are_one_graph(device, case):
    options = {name: torch.tensor(x, device=device) if isinstance(x, list) else x for name, x in COMPILED[case].items()}
    options |= {"position": Rope(), "causal": True, "sinks": normal(device, H)}
    q, k, v = draw(device, queries=4, keys=9, batch=None if case == "packed" else 2)
    if case == "packed":
        options |= {"cu_seqlens_q": bounds([1, 3], device), "cu_seqlens_k": bounds([4, 4], device)}
    if case == "paged":
        k, v = normal(device, 3, 16, K, D), normal(device, 3, 16, K, D)
    seed = torch.tensor([SEED], device=device)

    def call(q, k, v):
        call = make_call(q, k, v, **options)._replace(seed=seed)
        return REFERENCE.attend(call)

    same(torch.compile(call, fullgraph=True, backend="eager")(q, k, v), call(q, k, v))
