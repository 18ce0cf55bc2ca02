"""The truth against the reference in float64, and against loops, complex numbers and numbers by hand."""

from __future__ import annotations

import ast
import inspect
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers import plain_philox
from torch.nn.attention.flex_attention import create_block_mask

from products import foreign, truth
from ropewalk import (
    Alibi,
    BlockLists,
    ExpoSB,
    NoPosition,
    PositionScheme,
    QKNorm,
    QuantizedProducts,
    ReRope,
    Rope,
    SelfExtend,
    T5Bias,
    append_kv,
    attention,
)
from ropewalk.schemes import alibi_slopes
from ropewalk.testing import assert_close_to_truth

D, DV = 16, 8


@dataclass(frozen=True, eq=False)
class Recency(PositionScheme):
    """A user's scheme: scores fall with distance, and pairs far apart are not attended."""

    def score_mod(self, scores, distance):
        return (scores - 0.1 * distance.abs()).masked_fill(distance.abs() > 4, -torch.inf)


class Draw:
    """Random tensors on a device; those of `learn` get gradients."""

    def __init__(self, device):
        self.device, self.learned = device, []

    def learn(self, *shape, dtype=torch.float64):
        x = torch.randn(*shape, dtype=dtype, device=self.device).requires_grad_()
        self.learned.append(x)
        return x

    def whole(self, *numbers, dtype=torch.int64):
        return torch.tensor(numbers, dtype=dtype, device=self.device)

    def mask(self, *shape):
        return torch.rand(*shape, device=self.device) < 0.6


# Dense calls, of B rows, Tq queries and Tk keys, H query heads and K key heads.
B, TQ, TK, H, K = 2, 7, 9, 4, 2


def positions(draw, batch, tokens):
    return torch.randint(0, 30, (batch, tokens), device=draw.device, dtype=torch.int32)


def lists(draw, **spans):
    """Lists of blocks of 64 for 130 queries and 200 keys: unsorted, with a block named twice, and garbage at ends."""
    counts = draw.whole(2, 0, 3).view(1, 1, 3).expand(B, 1, 3).clone()
    counts[1, 0] = draw.whole(1, 4, 2)
    indices = draw.whole([3, 0, -1, -1], [-1, -1, -1, -1], [1, 2, 1, 99]).expand(B, 1, 3, 4).clone()
    indices[1, 0] = draw.whole([2, 7, 7, 7], [3, 1, 0, 2], [0, 3, -5, -5])
    full = draw.whole([[1, 1, 0]]), draw.whole([[[1], [0], [0]]])
    return BlockLists(counts, indices, *full, block_q=64, block_k=64, **spans)


def flex_mask(draw):
    documents = torch.arange(200, device=draw.device) // 70
    return create_block_mask(
        lambda b, h, m, n: (documents[m] == documents[n]) | (n < 3 + b),
        *(B, None, 130, 200),
        device=draw.device,
        BLOCK_SIZE=64,
    )


SPANS = torch.stack((torch.arange(130) // 2, torch.arange(130) + 60), dim=-1)[None, None]
DENSE = {
    "plain": lambda draw: {},
    "causal": lambda draw: {"causal": True, "scale": 0.3},
    "window": lambda draw: {"window": 3},
    "window-causal": lambda draw: {"window": (2, 5), "causal": True},
    "window-left": lambda draw: {"window": (2, -1)},
    "window-right": lambda draw: {"window": (-1, 0), "position": Rope()},
    "mask-2d": lambda draw: {"mask": draw.mask(TQ, TK)},
    "mask-3d": lambda draw: {"mask": draw.mask(B, TQ, TK)},
    "mask-heads": lambda draw: {"mask": draw.mask(1, H, TQ, TK) & draw.whole(1, 1, 1, 0).bool().view(H, 1, 1)},
    "mask-padding": lambda draw: {"mask": draw.mask(B, 1, 1, TK), "sinks": draw.learn(H)},
    "mask-queries": lambda draw: {"mask": draw.mask(1, H, TQ, 1), "position": Rope()},
    "key-lengths": lambda draw: {"key_lengths": draw.whole(9, 5), "causal": True, "position": Alibi()},
    "no-keys": lambda draw: {"key_lengths": draw.whole(0, 3, dtype=torch.int32), "sinks": draw.learn(H)},
    "key-starts": lambda draw: {"key_starts": draw.whole(4, 0), "causal": True, "position": ExpoSB()},
    "key-range": lambda draw: {"key_starts": draw.whole(4, 1), "key_lengths": draw.whole(8, 8), "position": ReRope(3)},
    "query-starts": lambda draw: {"query_starts": draw.whole(-3, 1), "causal": True, "position": Rope()},
    "query-starts-bias": lambda draw: {
        "query_starts": draw.whole(-7, 2), "key_starts": draw.whole(0, 3), "position": ExpoSB(distance_decay=True)
    },
    "positions": lambda draw: {
        "positions_q": positions(draw, B, TQ), "positions_k": positions(draw, 1, TK), "causal": True,
        "position": Alibi(draw.learn(B, H)),
    },
    "positions-q": lambda draw: {
        "positions_q": positions(draw, 1, TQ), "key_starts": draw.whole(2, 0), "position": ReRope(4, leak=3.0)
    },
    "positions-k": lambda draw: {"positions_k": positions(draw, B, TK), "position": T5Bias(draw.learn(32, H))},
    "rope-interleaved": lambda draw: {"position": Rope(500.0, interleaved=True, rotary_dim=8, rotary_offset=3)},
    "rope-offset": lambda draw: {"position": Rope(rotary_offset=6, attention_factor=1.2), "causal": True},
    "rope-blocks": lambda draw: {"position": Rope(rotary_dim=12, pair_block=4)},
    "rope-frequencies": lambda draw: {"position": Rope(inv_freq=torch.rand(5), rotary_offset=1)},
    "rope-axes": lambda draw: {
        "position": Rope(axes=draw.whole(0, 2, 1, 0, 1, 2, 2, 0)), "causal": True,
        "positions_q": positions(draw, 3 * B, TQ).view(3, B, TQ),
    },
    "rope-axes-blocks": lambda draw: {
        "position": Rope(axes=draw.whole(0, 0, 0, 0, 1, 1, 1, 1, dtype=torch.int32), pair_block=8),
        "positions_q": positions(draw, 2, TQ)[:, None], "positions_k": positions(draw, 2 * B, TK).view(2, B, TK),
    },
    "rope-keys-rotated": lambda draw: {"position": Rope(), "keys_rotated": True},
    "exposb-keys-rotated": lambda draw: {"position": ExpoSB(), "keys_rotated": True, "causal": True},
    "exposb-bands": lambda draw: {
        "position": ExpoSB(distance_decay=True, band_weights=draw.learn(H)), "softcap": 2.0, "causal": True
    },
    "alibi-capped": lambda draw: {"position": Alibi(draw.learn(H)), "softcap": 1.5, "sinks": draw.learn(H)},
    "t5-one-way": lambda draw: {
        "position": T5Bias(draw.learn(9, H), bidirectional=False, max_distance=6), "scale": 1.0
    },
    "t5": lambda draw: {"position": T5Bias(draw.learn(10, H), max_distance=5), "causal": True},
    "rerope": lambda draw: {"position": ReRope(3, rope=Rope(300.0, attention_factor=1.3, rotary_dim=12))},
    "rerope-log": lambda draw: {
        "causal": True, "position": ReRope(2, log_n=3, rope=Rope(rotary_dim=8, rotary_offset=4))
    },
    "rerope-leak": lambda draw: {"position": ReRope(3, leak=2.5, log_n=4, rope=Rope(attention_factor=1.1))},
    "self-extend": lambda draw: {"position": SelfExtend(3, 2), "query_starts": draw.whole(-6, 0)},
    "self-extend-log": lambda draw: {
        "position": SelfExtend(5, 3, log_n=2, rope=Rope(interleaved=True)), "positions_q": positions(draw, B, TQ)
    },
    "own-scheme": lambda draw: {"position": Recency(), "query_starts": draw.whole(-7, 2), "sinks": draw.learn(H)},
    "norm": lambda draw: {"norm": QKNorm(draw.learn(D), draw.learn(D), offset=1.0), "position": Rope()},
    "norm-heads": lambda draw: {
        "norm": QKNorm(draw.learn(H, D), draw.learn(K, D), eps=0.1, after=True), "position": Rope(rotary_dim=8)
    },
    "norm-across": lambda draw: {
        "norm": QKNorm(draw.learn(H * D), draw.learn(K * D), across_heads=True), "position": ReRope(3)
    },
    "norm-across-after": lambda draw: {"norm": QKNorm(across_heads=True, after=True), "position": Rope()},
    "norm-alone": lambda draw: {"norm": QKNorm(k_weight=draw.learn(D)), "position": ExpoSB()},
    "norm-after-bias": lambda draw: {"norm": QKNorm(draw.learn(D), after=True), "position": Alibi()},
    "gate": lambda draw: {"gate": draw.learn(B, TQ, H, DV), "causal": True},
    "gate-heads": lambda draw: {"gate": draw.learn(B, TQ, H), "sinks": draw.learn(H)},
    "dropout": lambda draw: {"dropout_p": 0.2001, "causal": True, "sinks": draw.learn(H)},
    "dropout-most": lambda draw: {"dropout_p": 0.999},
}  # fmt: skip
LISTED = {
    "lists": lambda draw: {"blocks": lists(draw)},
    "lists-causal": lambda draw: {"blocks": lists(draw), "causal": True, "position": Rope(), "sinks": draw.learn(2)},
    "lists-spans": lambda draw: {"blocks": lists(draw, spans=SPANS.to(draw.device, torch.int32)), "window": 90},
    "lists-dropout": lambda draw: {"blocks": BlockLists.causal(130, 200, device=draw.device), "dropout_p": 0.5},
    "block-mask": lambda draw: {"blocks": flex_mask(draw), "position": ReRope(40)},
}
# Packed calls of sequences of 3, 0, 5 and 2 queries, and one query past the last bound.
BOUNDS, BOUNDS_K, TOTAL_K = (0, 3, 3, 8, 10), (0, 6, 8, 8, 11), 12
PACKED = {
    "packed": lambda draw: {"position": Rope(), "causal": True},
    "packed-bias": lambda draw: {"position": T5Bias(draw.learn(8, H)), "sinks": draw.learn(H), "window": (1, 2)},
    "packed-keys": lambda draw: {"cu_seqlens_k": draw.whole(*BOUNDS_K), "causal": True, "position": Alibi()},
    "packed-keys-far": lambda draw: {"cu_seqlens_k": draw.whole(*BOUNDS_K), "position": SelfExtend(2, 2)},
    "packed-decay": lambda draw: {"cu_seqlens_k": draw.whole(*BOUNDS_K), "position": ExpoSB(distance_decay=True)},
    "packed-positions": lambda draw: {
        "positions_q": positions(draw, 11, 1)[:, 0], "causal": True, "position": ReRope(3, log_n=5)
    },
    "packed-axes": lambda draw: {
        "positions_q": positions(draw, 2, 11), "positions_k": positions(draw, 2, 11),
        "position": Rope(axes=draw.whole(0, 1).repeat(4)), "gate": draw.learn(11, H, DV),
    },
    "packed-norm": lambda draw: {
        "norm": QKNorm(draw.learn(D), draw.learn(D)), "position": Rope(), "gate": draw.learn(11, H)
    },
    "packed-dropout": lambda draw: {"cu_seqlens_k": draw.whole(*BOUNDS_K), "dropout_p": 0.3, "causal": True},
    "packed-none": lambda draw: {"cu_seqlens_q": draw.whole(0), "sinks": draw.learn(H)},
}  # fmt: skip
# Pages of 4 keys, rows of 3 pages; and packed queries over pages or over a dense cache.
PAGED = {
    "pages": lambda draw: {"key_lengths": draw.whole(11, 6), "query_starts": draw.whole(4, -1), "causal": True},
    "pages-end": lambda draw: {"key_lengths": draw.whole(12, 7), "position": Alibi(), "window": 5},
    "pages-bhtd": lambda draw: {"key_lengths": draw.whole(9, 0), "layout": "bhtd", "position": ReRope(4)},
    "pages-starts": lambda draw: {
        "key_lengths": draw.whole(9, 8), "key_starts": draw.whole(0, 5), "position": Rope(), "keys_rotated": True
    },
    "pages-thd": lambda draw: {"key_lengths": draw.whole(9, 2), "layout": "thd", "position": Rope(), "causal": True},
    "pages-thd-bias": lambda draw: {
        "key_lengths": draw.whole(12, 5), "layout": "thd", "position": T5Bias(torch.randn(8, H)), "dropout_p": 0.4
    },
    "cache-thd": lambda draw: {
        "key_lengths": draw.whole(9, 12), "layout": "thd", "position": SelfExtend(3, 2), "block_table": None
    },
    "cache-thd-window": lambda draw: {
        "key_lengths": draw.whole(3, 0), "layout": "thd", "window": (4, 1), "block_table": None,
        "positions_q": positions(draw, 8, 1)[:, 0], "position": Alibi(),
    },
}  # fmt: skip
CALLS = {**DENSE, **LISTED, **PACKED, **PAGED}


def make(name, draw):
    """Return q, k, v and the keywords of a call; odd ones in layout "bhtd"."""
    if name in PACKED:
        keywords = {"cu_seqlens_q": draw.whole(*BOUNDS), "layout": "thd", **PACKED[name](draw)}
        total_k = TOTAL_K if "cu_seqlens_k" in keywords else 11
        return [draw.learn(11, H, D), draw.learn(total_k, K, D), draw.learn(total_k, K, DV)], keywords
    if name in PAGED:
        table = draw.whole([3, 0, 5], [1, 3, 2], dtype=torch.int32)
        keywords = {"block_table": table, **PAGED[name](draw)}
        layout = keywords.get("layout", "bthd")
        pages = [draw.learn(*((6, 4) if keywords["block_table"] is not None else (2, 12)), K, n) for n in (D, DV)]
        if layout == "thd":
            return [draw.learn(8, H, D), *pages], {"cu_seqlens_q": draw.whole(0, 5, 7), **keywords}
        if layout == "bhtd":
            return [draw.learn(B, H, 5, D), *(x.transpose(1, 2) for x in pages)], keywords
        return [draw.learn(B, 5, H, D), *pages], keywords
    if name in LISTED:
        return [draw.learn(B, 130, 2, D), draw.learn(B, 200, 2, D), draw.learn(B, 200, 2, DV)], LISTED[name](draw)
    tensors = [draw.learn(B, TQ, H, D), draw.learn(B, TK, K, D), draw.learn(B, TK, K, DV)]
    keywords = DENSE[name](draw)
    if len(name) % 2 and "gate" not in keywords:
        return [x.transpose(1, 2) for x in tensors], {**keywords, "layout": "bhtd"}
    return tensors, keywords


@pytest.mark.parametrize("name", CALLS)
def test_the_truth_is_the_reference_in_float64(name, device):
    draw = Draw(device)
    tensors, keywords = make(name, draw)
    with torch.set_grad_enabled(name not in PAGED):
        torch.manual_seed(1)
        expected = attention(*tensors, impl="reference", return_lse=True, return_max_logits=True, **keywords)
        torch.manual_seed(1)
        seed = int(torch.randint(2**63 - 1, (1,), device=device))
        found = truth.attend(*tensors, seed=seed, return_lse=True, impl=None, **keywords)
        torch.testing.assert_close(found.max_logits.float(), expected[2], rtol=1e-6, atol=1e-6)
        close = {"rtol": 1e-9, "atol": 1e-9}
        for mine, theirs in zip(found[:2], expected[:2], strict=True):
            torch.testing.assert_close(mine, theirs, **close)
    if name in PAGED:
        return
    weights = torch.randn_like(found.out), torch.randn_like(found.lse)
    of_mine, of_theirs = (
        torch.autograd.grad(
            (out * weights[0]).sum() + torch.where(lse > -torch.inf, lse * weights[1], 0.0).sum(),
            draw.learned,
            allow_unused=True,
            materialize_grads=True,
        )
        for out, lse in (found[:2], expected[:2])
    )
    for mine, theirs in zip(of_mine, of_theirs, strict=True):
        torch.testing.assert_close(mine, theirs, **close)


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"block-mask"}))
def test_the_host_waits_for_no_number(name):
    """Tensors of "meta" have none, and mix with those of no other device."""
    tensors, keywords = make(name, Draw(torch.device("meta")))
    found = truth.attend(*tensors, seed=torch.ones(1, dtype=torch.int64, device="meta"), **keywords)
    assert {x.device.type for x in found} == {"meta"}


# By loops, by hand, and by other arithmetic


def test_the_truth_imports_nothing_of_what_it_judges():
    tree = ast.parse(Path(truth.__file__).read_text(encoding="utf-8"))
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    assert {name.split(".")[0] for name in names} == {"__future__", "math", "typing", "torch", "ropewalk"}
    public = (Alibi, ExpoSB, NoPosition, PositionScheme, QKNorm, QuantizedProducts, ReRope, Rope, SelfExtend, T5Bias)
    records = {f"ropewalk.{record.__name__}" for record in public}
    assert {name for name in names if name.startswith("ropewalk")} == {"ropewalk", *records}


def test_keywords_are_those_of_attention():
    parameters = inspect.signature(attention).parameters.values()
    defaults = {x.name: x.default for x in parameters if x.kind is x.KEYWORD_ONLY}
    assert defaults == truth.Arguments()._asdict()


def test_a_keyword_that_attention_lacks_is_refused():
    q = torch.randn(1, 3, 1, 8)
    with pytest.raises(TypeError, match="is_causal"):
        truth.attend(q, q, q, is_causal=True)


def test_attention_by_numbers_of_hand():
    """Two keys of scores 0 and ln 3 have probabilities 1/4 and 3/4; with a sink of ln 4 half of that."""
    q, k = torch.ones(1, 1, 1, 1).double(), torch.tensor([0.0, math.log(3)]).double().view(1, 2, 1, 1)
    v = torch.tensor([8.0, 16.0]).double().view(1, 2, 1, 1)
    out, lse, largest = truth.attend(q, k, v)
    assert [x.item() for x in (out, lse, largest)] == pytest.approx([14, math.log(4), math.log(3)])
    out, lse, largest = truth.attend(q, k, v, sinks=torch.tensor([math.log(4)]), gate=torch.zeros_like(q))
    assert [x.item() for x in (out, lse, largest)] == pytest.approx([3.5, math.log(8), math.log(3)])


def test_slopes_of_twelve_heads():
    """The eight of 8 heads, and every second of the first 8 of 16 heads: 2^−0.5, 2^−1.5, 2^−2.5, 2^−3.5."""
    exponents = [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]
    slopes = truth._alibi_slopes(12, torch.device("cpu")).tolist()
    assert slopes == pytest.approx([2**-x for x in exponents], rel=1e-7)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_by_a_loop(bidirectional):
    """T5's rule: a bucket for each short distance, then as many in even steps of the logarithm."""

    def bucket(distance, n, furthest=128):
        base = 0
        if bidirectional:
            n //= 2
            base = n if distance < 0 else 0
            distance = abs(distance)
        distance = max(distance, 0)
        exact = n // 2
        if distance < exact:
            return base + distance
        steps = math.log(distance / exact) / math.log(furthest / exact) * (n - exact)
        return base + min(exact + int(steps + 1e-6), n - 1)

    distances = range(-300, 300)
    found = truth._t5_buckets(torch.tensor(distances), 32, bidirectional, 128).tolist()
    assert found == [bucket(distance, 32) for distance in distances]


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotations_are_products_of_complex_numbers(interleaved):
    x, at = torch.randn(1, 2, 5, 12).double(), torch.tensor([[0, 3, -7, 100, 10**6]])
    rope = Rope(500.0, rotary_dim=8, rotary_offset=2, interleaved=interleaved, attention_factor=1.5)
    y = truth._rotate(x, rope, at)
    for pair in range(4):
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 4)
        angle = at[0].double() * 500.0 ** (-pair / 4)
        before, after = (torch.complex(z[..., 2 + first], z[..., 2 + second]) for z in (x, y))
        torch.testing.assert_close(after, before * torch.polar(torch.full_like(angle, 1.5), angle), rtol=0, atol=1e-6)
    assert torch.equal(y[..., [0, 1, 10, 11]], x[..., [0, 1, 10, 11]])


def test_far_pairs_of_self_extend_by_a_loop():
    """Ones of one pair of features have the score 2·cos(relative position), by groups of 3 from a distance of 4 on."""
    x, window, group = torch.ones(1, 20, 1, 2).double(), 4, 3
    at_q, at_k = torch.arange(-6, 14), torch.arange(20)
    position = SelfExtend(window, group)
    v = torch.zeros_like(x)
    for n in range(20):
        out = truth.attend(
            x, x, v, position=position, scale=1.0, positions_q=at_q[None], positions_k=at_k[None],
            mask=(torch.arange(20) == n).expand(1, 1, 20, 20),
        )  # fmt: skip
        for m in range(20):
            a, b = m - 6, n
            relative = a - b
            if abs(relative) >= window:
                sign = 1 if relative > 0 else -1
                relative = math.floor(a / group) - math.floor(b / group) + sign * (window - window // group)
            assert out.lse[0, 0, m].item() == pytest.approx(2 * math.cos(relative), abs=1e-6)


def test_leaks_and_steps_past_the_window():
    """At the window's edge and beyond it, relative positions are w + (d − w)/c, or w."""
    x, v = torch.ones(1, 30, 1, 2).double(), torch.zeros(1, 30, 1, 2).double()
    for leak in (None, 4.0):
        position = ReRope(5, leak=leak, rope=Rope(attention_factor=2.0))
        for n in (0, 15, 29):
            mask = (torch.arange(30) == n).expand(1, 1, 30, 30)
            lse = truth.attend(x, x, v, position=position, scale=1.0, mask=mask).lse
            for m in range(30):
                far = abs(m - n)
                if far >= 5:
                    far = 5 if leak is None else 5 + (far - 5) / leak
                assert lse[0, 0, m].item() == pytest.approx(8 * math.cos(far), abs=1e-5)


def test_dropout_drops_by_the_definition():
    """Values that tell keys apart: each survives where the plain generator says so, in packed sequences and rows."""
    seed, steps, bounds = 2**62 + 12345678901, 77 * 256 + 140, [0, 30, 30, 47, 120]
    p = steps / 2**16
    q, v = torch.zeros(120, 2, 8).double(), torch.eye(120).double()[:, None].expand(-1, 2, -1)
    cu_seqlens = torch.tensor(bounds)
    out = truth.attend(q, q, v, seed=seed, dropout_p=p, cu_seqlens_q=cu_seqlens, layout="thd").out
    for sequence, (start, end) in enumerate(pairwise(bounds)):
        keys, survivor = range(end - start), 1 / max(end - start, 1) / (1 - p)
        for head in range(2):
            stays = [[plain_philox.stays(seed, p, head, sequence, m, n) for n in keys] for m in keys]
            expected = torch.tensor(stays, dtype=torch.float64).view(len(keys), len(keys)) * survivor
            torch.testing.assert_close(out[start:end, head, start:end], expected)
    dense = truth.attend(q.view(3, 40, 2, 8), q.view(3, 40, 2, 8), v[:40].expand(3, 40, 2, 120), seed=seed, dropout_p=p)
    for row in range(6):
        stays = [[plain_philox.stays(seed, p, row, 0, m, n) for n in range(40)] for m in (0, 39)]
        assert (dense.out[row // 2, [0, 39], row % 2, :40] > 0).tolist() == stays


# What is not read, and other dtypes


UNREAD = {
    "lengths": {"key_lengths": torch.tensor([6, 6])},
    "starts": {"key_starts": torch.tensor([3, 3]), "causal": True},
    "norm": {
        "key_lengths": torch.tensor([6, 6]), "position": Rope(),
        "norm": QKNorm(torch.ones(D).requires_grad_(), torch.ones(D).requires_grad_()),
    },
    "far": {"key_lengths": torch.tensor([6, 6]), "position": ReRope(3)},
}  # fmt: skip


@pytest.mark.parametrize("name", UNREAD)
def test_keys_that_no_query_attends_may_hold_anything(name):
    keywords = UNREAD[name]
    unread = slice(6, None) if "key_lengths" in keywords else slice(0, 3)
    q, k, v = (torch.randn(2, 9, 2, n).double() for n in (D, D, DV))
    weights = [] if "norm" not in keywords else [keywords["norm"].q_weight, keywords["norm"].k_weight]
    results = []
    for garbage in (0.5, torch.nan, torch.inf):
        k[:, unread], v[:, unread] = garbage, garbage
        xs = [x.clone().requires_grad_() for x in (q, k, v)]
        found = truth.attend(*xs, **keywords)
        grads = torch.autograd.grad(found.out.sum() + found.lse.nan_to_num(neginf=0).sum(), [*xs, *weights])
        assert not any(grad[:, unread].any() for grad in grads[1:3])
        results.append((*found, *grads))
    for finite, *others in zip(*results, strict=True):
        assert all(torch.equal(finite, other) for other in others)


def test_padding_beside_a_norm_reaches_no_gradient_of_the_reference():
    """`key_lengths` says that what follows is never read; the truth gives zeros, as the test above shows."""
    weight = torch.ones(D).double().requires_grad_()
    q, k, v = (torch.randn(1, 4, 1, n).double() for n in (D, D, DV))
    k[:, 3], v[:, 3] = torch.nan, torch.nan
    k.requires_grad_()
    out = attention(q, k, v, norm=QKNorm(weight, weight), key_lengths=torch.tensor([3]), impl="reference")
    assert not any(grad.isnan().any() for grad in torch.autograd.grad(out.sum(), [k, weight]))


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["norm", "rerope-leak", "exposb-bands", "gate", "packed-dropout", "key-lengths"])
def test_other_dtypes_are_baselines(name, dtype, device):
    """Views of expanded, strided memory, too: the reference stays within the budget that the baseline gives."""
    draw = Draw(device)
    tensors, keywords = make(name, draw)
    if "gate" in keywords:
        keywords["gate"] = keywords["gate"].to(dtype)
    low = [torch.stack((x, x), dim=-1).to(dtype)[..., 1] for x in tensors]
    low[1] = low[1][..., :1].expand_as(low[1])
    torch.manual_seed(3)
    seed = torch.randint(2**63 - 1, (1,), device=device)
    exact = {**keywords, "gate": keywords["gate"].double()} if "gate" in keywords else keywords
    expected = truth.attend(*(x.double() for x in low), seed=seed, **exact)
    baseline = truth.attend(*low, seed=seed, **keywords)
    assert [x.dtype for x in baseline] == [dtype, torch.float32, torch.float32]
    torch.manual_seed(3)
    found = attention(*low, impl="reference", return_lse=True, return_max_logits=True, **keywords)
    for mine, exactly, plain in zip(found, expected, baseline, strict=True):
        finite = exactly > -torch.inf
        assert_close_to_truth(mine[finite], exactly[finite], plain[finite], roundings=4)
        assert (mine[~finite] == -torch.inf).all()


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8, torch.uint8])
@pytest.mark.parametrize("layout", ["bthd", "bhtd", "thd"])
def test_quantised_pages(kind, layout):
    """Numbers that `append_kv` stored are near what they were, and mean to attention what they mean here."""
    pages, size, heads, dim = 5, 4, 2, 32
    width = dim // 2 if kind == torch.uint8 else dim
    caches = [torch.zeros(pages, size, heads, width, dtype=torch.uint8).view(kind) for _ in "kv"]
    if kind == torch.float8_e4m3fn:
        scales = [torch.tensor([0.01, 0.02]), torch.tensor(0.015)]
    else:
        shape = (pages, size, heads) if kind == torch.int8 else (pages, size, heads, 1)
        scales = [torch.zeros(shape, dtype=torch.float32 if kind == torch.int8 else torch.float16) for _ in "kv"]
    k, v = torch.randn(2, pages * size, heads, dim)
    still = {"cos": torch.ones(20, 16), "sin": torch.zeros(20, 16)}
    append_kv(k, v, *caches, torch.arange(pages * size), k_scale=scales[0], v_scale=scales[1], **still)
    table = torch.tensor([[4, 0, 99], [2, 3, 1]])
    keywords = {"block_table": table, "key_lengths": torch.tensor([7, 11]), "layout": layout}
    of_scales = {"k_scale": scales[0], "v_scale": scales[1]}
    plain = [x.view(pages, size, heads, dim) for x in (k, v)]
    q = torch.randn(2, 3, 4, dim)
    if layout == "bhtd":
        q, caches, plain = q.transpose(1, 2), *([x.transpose(1, 2) for x in xs] for xs in (caches, plain))
    elif layout == "thd":
        q, keywords["cu_seqlens_q"] = q.flatten(0, 1), torch.tensor([0, 2, 6])
    exact = truth.attend(q.double(), *caches, **keywords, **of_scales)
    baseline = truth.attend(q, *caches, **keywords, **of_scales)
    found = attention(q, *caches, return_lse=True, impl="reference", **keywords, **of_scales)
    for mine, exactly, low in zip(found, exact[:2], baseline[:2], strict=True):
        assert_close_to_truth(mine, exactly, low, roundings=4)
    unquantised = truth.attend(q.double(), *plain, **keywords).out
    assert (exact.out - unquantised).abs().max() < (0.3 if kind == torch.uint8 else 0.08)


@pytest.mark.parametrize("causal", [False, True])
def test_a_users_rotations_are_those_that_they_restate(device, causal):
    """Schemes of a user's own that turn as Rope and ReRope do have their truth, and gradients of their frequencies."""
    shapes = ((B, TQ, H, D), (B, TK, K, D), (B, TK, K, DV))
    qkv = [torch.randn(shape, device=device) for shape in shapes]
    frequencies = torch.logspace(0, -2, D // 2)
    learned = frequencies.to(device, copy=True).requires_grad_()
    for own, known in (
        (foreign.OwnRotation(learned), Rope(inv_freq=frequencies)),
        (foreign.OwnTwoRanges(learned, 4), ReRope(4, rope=Rope(inv_freq=frequencies))),
        (foreign.OwnAlibi(), Alibi(alibi_slopes(H, device) / 2)),
    ):
        found = truth.attend(*qkv, position=own, causal=causal).out
        exact = truth.attend(*(x.double() for x in qkv), position=known, causal=causal).out
        assert_close_to_truth(found, exact, truth.attend(*qkv, position=known, causal=causal).out)
        if found.requires_grad:
            (grad,) = torch.autograd.grad(found.sum(), [learned])
            assert grad.abs().max() > 0
