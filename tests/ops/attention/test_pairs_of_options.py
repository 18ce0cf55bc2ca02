"""Options of the kernels two by two and more: each is right alone, and shares arguments and registers with others."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.hopper_calls import on_hopper
from helpers.modes import INTERPRETED, ON_GPU, needs_kernels
from helpers.written_attention import attend_plainly, compute
from torch import Tensor

from ropewalk import Alibi, BlockLists, ExpoSB, PositionScheme, ReRope, Rope, T5Bias, attention, explain_choice
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.call import token_positions
from ropewalk.testing import assert_close_to_truth, poisoned_memory

ROUNDINGS = 6
IMPLS = [pytest.param("triton", marks=needs_kernels), pytest.param("gluon", marks=on_hopper)]
DTYPE = torch.bfloat16 if ON_GPU else torch.float32


def numbers(device, *values):
    return torch.tensor(values, device=device)


def check(function, define, tensors, weights, of_lse):
    """A function's output, log-sum-exp and gradients, against a definition in float64."""
    truths = compute(define, [x.double() for x in tensors], weights, of_lse)
    plain = compute(define, tensors, weights, of_lse)
    with poisoned_memory():
        found = compute(function, tensors, weights, of_lse)
    for mine, exact, baseline in zip(found, truths, plain, strict=True):
        assert_close_to_truth(mine.to(baseline.dtype), exact, baseline, ROUNDINGS)


# Sinks and a gate


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("per_feature", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128, 256] if ON_GPU else [16])
def test_sinks_with_a_gate(device, head_dim, per_feature, is_causal, impl):
    tokens, heads = 300 if ON_GPU else 19, 4
    q, k, v = (torch.randn(tokens, h, head_dim, device=device).to(DTYPE) for h in (heads, 2, 2))
    gate = torch.randn(tokens, heads, *([head_dim] if per_feature else []), device=device).to(DTYPE)
    sinks = torch.randn(heads, device=device)
    attends = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
    attends = attends.tril() if is_causal else attends

    def attend(q, k, v, sinks, gate):
        rows = (x[None] for x in (q, k, v))
        out, lse = attention(*rows, causal=is_causal, sinks=sinks, gate=gate[None], impl=impl, return_lse=True)
        return out[0], lse[0]

    def define(q, k, v, sinks, gate):
        return attend_plainly(q, k, v, attends, sinks=sinks.to(q.dtype), gate=gate)

    weights, of_lse = torch.randn_like(q, dtype=torch.float32), torch.randn(heads, tokens, device=device)
    check(attend, define, [q, k, v, sinks, gate], weights, of_lse)


# Positions of queries or of keys alone

LENGTHS = {"few": [(1, 200)], "no keys": [(130, 17)], "several": [(130, 17), (1, 200), (0, 3), (40, 40)]}


def distances_of(lengths, positions_q, positions_k, device):
    """Each pair's distance, and whether it is of one sequence, by positions, or by indices from a sequence's last."""
    n_q, n_k = (sum(side) for side in zip(*lengths, strict=True))
    at_q, at_k, row_q, row_k = [], [], [], []
    for row, (m, n) in enumerate(lengths):
        at_q.append(torch.arange(m, device=device) + n - m)
        at_k.append(torch.arange(n, device=device))
        row_q.append(torch.full((m,), row, device=device))
        row_k.append(torch.full((n,), row, device=device))
    index_q, index_k = torch.cat(at_q), torch.cat(at_k)
    assert (len(index_q), len(index_k)) == (n_q, n_k)
    at_q, at_k = (
        given if given is not None else index for given, index in ((positions_q, index_q), (positions_k, index_k))
    )
    same = torch.cat(row_q)[:, None] == torch.cat(row_k)
    return at_q[:, None] - at_k, same, index_q[:, None] >= index_k


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16] if ON_GPU else [torch.float32], ids=str)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("given", ["k", "q", "qk"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("head_dim", [64, 128] if ON_GPU else [16])
def test_positions_of_one_side(device, head_dim, lengths, given, learned, is_causal, dtype, impl):
    lengths, heads = LENGTHS[lengths], 3
    if not ON_GPU:
        lengths = [(-(-m // 4), -(-n // 4)) for m, n in lengths]
    n_q, n_k = (sum(side) for side in zip(*lengths, strict=True))
    q, k, v = (torch.randn(n, heads, head_dim, device=device).to(dtype) for n in (n_q, n_k, n_k))
    slopes = numbers(device, 0.25, 0.1, 0.02)
    places = {"q": torch.arange(n_q, device=device) * 2 + 5, "k": torch.arange(n_k, device=device) + 3}
    places = {f"positions_{side}": x for side, x in places.items() if side in given}
    bounds = {
        f"cu_seqlens_{side}": torch.tensor([0, *ends], device=device).cumsum(0).int()
        for side, ends in zip("qk", zip(*lengths, strict=True), strict=True)
    }
    distance, same, behind = distances_of(lengths, places.get("positions_q"), places.get("positions_k"), device)
    attends = same & behind if is_causal else same

    def attend(q, k, v, *of_scheme):
        scheme = Alibi(of_scheme[0] if learned else slopes)
        call = {"layout": "thd", "position": scheme, "causal": is_causal, "impl": impl, "return_lse": True}
        return attention(q, k, v, **call, **bounds, **places)

    def define(q, k, v, *of_scheme):
        numbers = (of_scheme[0] if learned else slopes).to(q.dtype)
        return attend_plainly(q, k, v, attends, -numbers[:, None, None] * distance.abs().to(q.dtype))

    weights, of_lse = torch.randn_like(q, dtype=torch.float32), torch.randn(heads, n_q, device=device)
    check(attend, define, [q, k, v, *([slopes] if learned else [])], weights, of_lse)


@needs_kernels
@pytest.mark.parametrize("given", ["k", "q", "qk"])
@pytest.mark.parametrize("kind", ["dense", "starts", "packed"])
def test_relative_positions_are_those_of_the_definition(device, kind, given):
    """What the kernels for Hopper read of positions is made by a kernel that the interpreter runs too."""
    from ropewalk.ops.attention.hopper.launch import _relative_positions
    from ropewalk.ops.attention.triton.launch_common import schedule_tiles
    from ropewalk.ops.launch.steps import AT_ONCE

    batch, queries, keys = 2, 21, 34
    shape = () if kind == "packed" else (batch,)
    q, k = (torch.randn(*shape, n, 2, 8, device=device) for n in (queries, keys))
    places = {"positions_q": torch.randint(0, 90, (queries,)), "positions_k": torch.randint(0, 90, (keys,))}
    places = {n: (x if kind == "packed" else x[None]).to(device) for n, x in places.items() if n[-1] in given}
    call = {"layout": "thd" if kind == "packed" else "bthd", "position": Alibi(), **places}
    if kind == "starts":
        call["query_starts"] = numbers(device, 3, -5)
    elif kind == "packed":
        call |= {"cu_seqlens_q": numbers(device, 0, 15, 18, 21), "cu_seqlens_k": numbers(device, 0, 4, 34, 34)}
    call = make_call(q, k, k, **call)
    packed, _ = schedule_tiles(call, "q", call.q.shape[0], queries, 16, AT_ONCE)
    with poisoned_memory():
        made = _relative_positions(call, packed, AT_ONCE)
    exact_q, exact_k = (x.expand(call.q.shape[0], -1) for x in token_positions(call))
    distances = (made["q_pos"][:, :, None] - made["k_pos"][:, None]).double()
    exact = (exact_q[:, :, None] - exact_k[:, None]).double()
    same = torch.ones_like(exact, dtype=torch.bool)
    if kind == "packed":
        same[:] = False
        for m, n in ((slice(0, 15), slice(0, 4)), (slice(15, 18), slice(4, 34))):
            same[:, m, n] = True
    assert torch.equal(distances[same], exact[same])


# Rows without a score


if ON_GPU or INTERPRETED:
    import triton
    import triton.language as tl

    from ropewalk.ops.attention.triton.score_mods import ScoreMod

    @triton.jit
    def hide_near(scores, query_position, key_position, parameters_ptr, PAST: tl.constexpr):
        return tl.where(query_position - key_position >= 3, scores, float("-inf"))

    @triton.jit
    def hide_near_backward(gradient, scores, query_position, key_position, parameters_ptr, PAST: tl.constexpr):
        return tl.where(query_position - key_position >= 3, gradient, 0.0)

    HIDE_NEAR = ScoreMod(hide_near, hide_near_backward)


class HideNear(PositionScheme):
    """Queries attend keys that are 3 or more behind them: the first ones attend nothing."""

    def kernel_score_mod(self):
        return f"{__name__}:HIDE_NEAR"

    def score_mod(self, scores: Tensor, distance: Tensor) -> Tensor:
        return torch.where(distance >= 3, scores, -torch.inf)


@needs_kernels
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(70, 70), (64, 256), (3, 300)] if ON_GPU else [(20, 48), (3, 260)])
@pytest.mark.parametrize("head_dim", [64, 256] if ON_GPU else [16])
def test_a_score_mod_may_hide_all_keys_of_a_row(device, head_dim, queries, keys, needs_grad, is_causal):
    q, k, v = (torch.randn(n, 2, head_dim, device=device).to(DTYPE) for n in (queries, keys, keys))
    attends = torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device) >= 3

    def attend(q, k, v):
        rows = [x[None] if needs_grad else x[None].detach() for x in (q, k, v)]
        call = {"position": HideNear(), "causal": is_causal, "query_starts": numbers(device, 0), "impl": "triton"}
        out, lse = attention(*rows, return_lse=True, **call)
        assert torch.equal(lse[0, 0] == -torch.inf, ~attends.any(1))
        assert not out[0, ~attends.any(1)].any()
        return out[0], lse[0]

    def define(q, k, v):
        return attend_plainly(q, k, v, attends)

    weights, of_lse = torch.randn_like(q, dtype=torch.float32), torch.randn(2, queries, device=device)
    if needs_grad:
        check(attend, define, [q, k, v], weights, of_lse)
    else:
        assert_close_to_truth(attend(q, k, v)[0], define(*(x.double() for x in (q, k, v)))[0], define(q, k, v)[0], 6)


# Options drawn at random


def draw_options(seed: int, device: torch.device) -> tuple[dict, list[Tensor], dict[str, Tensor]]:
    """Keywords, q, k and v, and what else may have a gradient."""
    choose = random.Random(seed).choice
    batch, heads, (queries, keys) = 2, 4, choose([(150, 150), (70, 210), (210, 70)] if ON_GPU else [(18, 18), (7, 35)])
    head_dim = choose([(64, 64), (128, 128), (128, 64), (192, 128), (256, 256)] if ON_GPU else [(16, 16), (16, 8)])
    is_packed = choose([True, False, False])
    q, k, v = (
        torch.randn(batch, n, h, d, device=device).to(DTYPE)
        for n, h, d in ((queries, heads, head_dim[0]), (keys, 2, head_dim[0]), (keys, 2, head_dim[1]))
    )
    more: dict[str, Tensor] = {}
    name = choose(["none", "rope", "alibi", "learned", "t5", "exposb", "bands", "rerope"])
    if name == "learned":
        more["numbers"] = torch.rand(heads, device=device) * 0.2
    elif name == "bands":
        more["numbers"] = torch.rand(heads, device=device) + 0.5
    table = torch.randn(8, heads, device=device)
    scheme = {
        "none": lambda: None,
        "rope": lambda: Rope(interleaved=choose([True, False])),
        "alibi": lambda: Alibi(),
        "learned": lambda: Alibi(more["numbers"]),
        "t5": lambda: T5Bias(table, max_distance=20),
        "exposb": lambda: ExpoSB(distance_decay=True),
        "bands": lambda: ExpoSB(band_weights=more["numbers"], distance_decay=True),
        "rerope": lambda: ReRope(12),
    }[name]
    keywords = {"causal": choose([True, False]), "window": choose([None, None, 25, (9, 6)]), "return_lse": True}
    keywords["softcap"] = choose([None, None, 3.0])
    if choose([True, False]):
        more["sinks"] = torch.randn(heads, device=device)
    gate = choose(["none", "feature", "head"])
    if gate != "none":
        more["gate"] = torch.randn(
            batch, queries, heads, *([head_dim[1]] if gate == "feature" else []), device=device
        ).to(DTYPE)
    for side, n in (("q", queries), ("k", keys)):
        if choose([True, False, False]):
            keywords[f"positions_{side}"] = torch.arange(n, device=device)[None] * 2 + 3
    if is_packed:
        keywords["layout"] = "thd"
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        more |= {n: x.flatten(0, 1) for n, x in more.items() if n == "gate"}
        for side, n in (("q", queries), ("k", keys)):
            keywords[f"cu_seqlens_{side}"] = numbers(device, 0, n // 2, n, 2 * n)
            if f"positions_{side}" in keywords:
                keywords[f"positions_{side}"] = keywords[f"positions_{side}"].expand(2, -1).flatten()
    else:
        if choose([True, False]):
            keywords["key_lengths"] = numbers(device, keys, keys // 2 + 1)
        if choose([True, False, False]):
            keywords["key_starts"] = numbers(device, 2, 0)
        if choose([True, False, False]):
            keywords["query_starts"] = numbers(device, 0, keys - queries)
        if choose([True, False, False]):
            keywords["mask"] = torch.rand(1, heads, queries, keys, device=device) < 0.8
        elif choose([True, False, False]) and queries == keys:
            keywords["blocks"] = BlockLists.sliding_window(queries, window=130, device=device)
    keywords["deterministic"] = choose([True, False])
    keywords["scheme"] = scheme
    return {n: x for n, x in keywords.items() if x is not None}, [q, k, v], more


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("seed", range(48 if ON_GPU else 24))
def test_options_drawn_at_random(device, seed, impl):
    keywords, tensors, more = draw_options(seed, device)
    scheme = keywords.pop("scheme")
    names = list(more)

    def attend_by(impl):
        def attend(*leaves):
            q, k, v, *rest = leaves
            given = dict(zip(names, rest, strict=True))
            # The scheme takes the leaf of its own numbers.
            learned = given.pop("numbers", None)
            if learned is not None:
                more["numbers"] = learned
            position = scheme()
            where = {} if position is None else {"position": position}
            gate, sinks = given.get("gate"), given.get("sinks")
            own = {"sinks": sinks.to(torch.promote_types(q.dtype, torch.float32))} if sinks is not None else {}
            if gate is not None:
                own["gate"] = gate.to(q.dtype)
            return attention(q, k, v, impl=impl, **where, **keywords, **own)

        return attend

    leaves = [*tensors, *more.values()]
    try:
        position = scheme()
        where = {} if position is None else {"position": position}
        explain_choice(*tensors, impl=impl, **where, **{n: more[n] for n in ("sinks", "gate") if n in more}, **keywords)
    except ValueError as refusal:
        pytest.skip(str(refusal))
    out = attend_by("reference")(*leaves)[0]
    lse_shape = (*out.shape[:1], 4, out.shape[1]) if out.ndim == 4 else (4, out.shape[0])
    weights, of_lse = torch.randn(out.shape, device=device), torch.randn(lse_shape, device=device) * 0.3
    check(attend_by(impl), attend_by("reference"), leaves, weights, of_lse)
