"""`attention` over fp8, int8 and 4-bit pages, against attention of the numbers that they mean, in float64."""

from __future__ import annotations

import pytest
import torch
from helpers.kinds import kinds_of
from helpers.modes import INTERPRETED, KERNEL_DTYPES, needs_kernels

from ropewalk import Alibi, NoPosition, ReRope, Rope, append_kv, attention, inverse_frequencies, rope_table
from ropewalk.ops.attention.reference import read_pages
from ropewalk.ops.launch import kinds

KINDS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}
IMPLS = ["reference", pytest.param("triton", marks=needs_kernels)]
# Relative to the largest output; and for the log-sum-exp.
BUDGETS = {torch.float32: (2e-5, 2e-5), torch.float16: (3e-3, 5e-3), torch.bfloat16: (1.5e-2, 2e-2)}


def fill(kind, dtype, device, *, d=64, dv=32, page_size=16, pages=12, batch=2, n_kv_heads=2):
    """Append random keys with a feature that outweighs others; what is not written is NaN. Return a call's keywords."""
    per_row = pages // batch
    table = torch.randperm(pages).view(batch, per_row).to(device)
    table[1, 0] = table[0, 0]  # a prefix of both rows
    lengths = torch.tensor([per_row * page_size - 3, per_row * page_size // 2 + 1], device=device)
    slots = [int(table[b, i // page_size]) * page_size + i % page_size for b in range(batch) for i in range(lengths[b])]
    slots = torch.tensor(sorted(set(slots)), device=device)
    k, v = (torch.randn(len(slots), n_kv_heads, width, device=device).to(dtype) for width in (d, dv))
    k[..., 3] *= 6
    halves = 2 if kind == "int4" else 1
    caches = [
        torch.full((pages, page_size, n_kv_heads, width // halves), 0x7F, dtype=torch.uint8, device=device)
        for width in (d, dv)
    ]
    k_cache, v_cache = (x.view(KINDS[kind]) for x in caches)
    if kind == "fp8":
        scales = [torch.rand(n_kv_heads, device=device) * 0.05 + 0.03, torch.tensor(0.02, device=device)]
    else:
        shape, of = (pages, page_size, n_kv_heads), torch.float32 if kind == "int8" else torch.float16
        scales = [
            torch.full(shape if kind == "int8" else (*shape, width // 32), torch.nan, dtype=of, device=device)
            for width in (d, dv)
        ]
    one, zero = torch.ones(len(slots), d // 2, device=device), torch.zeros(len(slots), d // 2, device=device)
    append_kv(k, v, k_cache, v_cache, slots, cos=one, sin=zero, k_scale=scales[0], v_scale=scales[1], impl="reference")
    keywords = {"block_table": table, "key_lengths": lengths, "k_scale": scales[0], "v_scale": scales[1]}
    return k_cache, v_cache, keywords


def dequantised(k_cache, v_cache, keywords):
    """Return pages of float64, and the keywords without scales."""
    plain = {name: x for name, x in keywords.items() if name not in ("k_scale", "v_scale")}
    pages = [
        read_pages(x.transpose(1, 2), scale, torch.float64).transpose(1, 2)
        for x, scale in ((k_cache, keywords["k_scale"]), (v_cache, keywords["v_scale"]))
    ]
    return *pages, plain


CALLS = {
    "one": {},
    "chunk": {"queries": 5, "page_size": 48, "layout": "bhtd"},
    "rope-raw": {"position": Rope(), "page_size": 1, "pages": 60},
    "rope-rotated": {"position": Rope(interleaved=True), "keys_rotated": True, "window": 9, "page_size": 32},
    "alibi": {"position": Alibi(), "softcap": 20.0, "sinks": True, "page_size": 8},
    "rerope": {"position": ReRope(20), "d": 96, "dv": 96, "queries": 2},
    "wide": {"d": 128, "dv": 256, "heads": 8, "not_causal": True},
    "one-head": {"heads": 2, "queries": 3, "page_size": 512, "pages": 2},
}


def make(case, kind, dtype, device):
    """Return q, the pages, the keywords of a call, and its layout."""
    options = dict(CALLS[case])
    queries, heads, layout = options.pop("queries", 1), options.pop("heads", 4), options.pop("layout", "bthd")
    fills = {name: options.pop(name) for name in ("d", "dv", "page_size", "pages") if name in options}
    k_cache, v_cache, keywords = fill(kind, dtype, device, **fills)
    q = torch.randn(2, queries, heads, fills.get("d", 64), device=device).to(dtype)
    if options.pop("sinks", False):
        keywords["sinks"] = torch.randn(heads, device=device)
    if not options.pop("not_causal", False):
        keywords |= {"causal": True, "query_starts": keywords["key_lengths"] - queries}
    return q, k_cache, v_cache, keywords | options, layout


@pytest.mark.both_modes
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CALLS)
def test_pages_are_attended_as_the_numbers_that_they_mean(case, kind, impl, device):
    for dtype in KERNEL_DTYPES if impl == "triton" else BUDGETS:
        q, k_cache, v_cache, keywords, layout = make(case, kind, dtype, device)
        k, v, plain = dequantised(k_cache, v_cache, keywords)
        if "sinks" in plain:
            plain["sinks"] = plain["sinks"].double()
        expected, expected_lse = attention(q.double(), k, v, impl="reference", return_lse=True, **plain)
        given = (q, k_cache, v_cache)
        if layout == "bhtd":
            given = tuple(x.transpose(1, 2) for x in given)
        out, lse = attention(*given, impl=impl, layout=layout, return_lse=True, **keywords)
        out = out.transpose(1, 2) if layout == "bhtd" else out
        assert out.dtype == dtype
        budget, lse_budget = BUDGETS[dtype]
        assert (out.double() - expected).abs().max() <= budget * expected.abs().max()
        assert (lse.double() - expected_lse).abs().max() <= lse_budget


@needs_kernels
@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_without_masks(kind, case, device, monkeypatch):
    """Tiles that all rows attend have a loop of their own, as on a GPU; also with the keys cut into three."""
    from ropewalk.ops.attention.triton import decode_launch

    choose_tiles = decode_launch.choose_tiles
    monkeypatch.setattr(
        decode_launch, "choose_tiles", lambda *arguments: choose_tiles(*arguments)._replace(split_masked_loop=True)
    )
    q, k_cache, v_cache, keywords, layout = make(case, kind, torch.float16, device)
    k, v, plain = dequantised(k_cache, v_cache, keywords)
    given = (q, k_cache, v_cache)
    if layout == "bhtd":
        given = tuple(x.transpose(1, 2) for x in given)
    if "sinks" in plain:
        plain["sinks"] = plain["sinks"].double()
    expected = attention(q.double(), k, v, impl="reference", **plain)
    for splits in (1, 3):
        monkeypatch.setattr(decode_launch, "count_splits", lambda *arguments, n=splits: n)
        monkeypatch.setattr(decode_launch, "MIN_SPLIT", 16)
        monkeypatch.setattr(decode_launch, "MIN_KEYS", 16)
        kinds.KINDS.clear()
        out = attention(*given, impl="triton", layout=layout, **keywords)
        out = out.transpose(1, 2) if layout == "bhtd" else out
        assert (out.double() - expected).abs().max() <= BUDGETS[torch.float16][0] * expected.abs().max()
    kinds.KINDS.clear()


@needs_kernels
@pytest.mark.parametrize("case", ["rope-rotated", "rope-raw"])
@pytest.mark.parametrize("kind", KINDS)
def test_plans_give_the_same_bits(kind, case, device, monkeypatch):
    monkeypatch.setattr(kinds, "on_cpu", INTERPRETED)
    q, k_cache, v_cache, keywords, _ = make(case, kind, torch.float16, device)
    kinds.KINDS.clear()
    outs = [attention(q, k_cache, v_cache, impl="triton", **keywords) for _ in range(4)]
    assert len(kinds_of()) == 1
    assert all(torch.equal(outs[0], x) for x in outs[1:])
    other_q, k_cache, v_cache, keywords, _ = make(case, kind, torch.float16, device)
    by_plan = attention(other_q, k_cache, v_cache, impl="triton", **keywords)
    kinds.KINDS.clear()
    assert torch.equal(by_plan, attention(other_q, k_cache, v_cache, impl="triton", **keywords))


@pytest.mark.parametrize("kind", KINDS)
def test_the_quantisers_error_bounds_that_of_the_output(kind):
    """Keys with outlier features: the scores' error bounds that of the weights, and so the output's."""
    torch.manual_seed(3)
    n, d = 64, 64
    k, v = torch.randn(2, n, 1, d)
    k[..., [3, 40]] *= 10
    q = torch.randn(1, 1, 1, d)
    halves = 2 if kind == "int4" else 1
    k_cache, v_cache = (torch.zeros(4, 16, 1, d // halves, dtype=torch.uint8).view(KINDS[kind]) for _ in range(2))
    shapes = {"fp8": (), "int8": (4, 16, 1), "int4": (4, 16, 1, d // 32)}
    scales = {"k_scale": torch.zeros(shapes[kind]), "v_scale": torch.zeros(shapes[kind])}
    if kind == "fp8":
        scales = {"k_scale": k.abs().amax() / 448, "v_scale": v.abs().amax() / 448}
    if kind == "int4":
        scales = {name: x.half() for name, x in scales.items()}
    one, zero = torch.ones(n, d // 2), torch.zeros(n, d // 2)
    append_kv(k, v, k_cache, v_cache, torch.arange(n), cos=one, sin=zero, **scales)
    table, lengths = torch.arange(4)[None], torch.tensor([n])
    out = attention(q, k_cache, v_cache, block_table=table, key_lengths=lengths, **scales)
    k, v, q = k[:, 0].double(), v[:, 0].double(), q[0, 0].double()
    expected = torch.softmax(q @ k.mT * d**-0.5, -1) @ v
    # Half a step of each number.
    if kind == "fp8":
        k_error = (k.abs() * 2**-4).clamp(min=float(scales["k_scale"]) * 2**-10)
        v_error = (v.abs() * 2**-4).clamp(min=float(scales["v_scale"]) * 2**-10)
    else:
        width, steps = (d, 254) if kind == "int8" else (32, 14)
        k_error, v_error = (
            (x.unflatten(-1, (-1, width)).abs().amax(-1, keepdim=True) / steps * 1.01).expand(-1, -1, width).flatten(-2)
            for x in (k, v)
        )
    score_error = (q.abs() @ k_error.mT).max() * d**-0.5
    p = torch.softmax(q @ k.mT * d**-0.5, -1)
    bound = torch.expm1(2 * score_error) * (p @ v.abs()) + torch.exp(2 * score_error) * (p @ v_error)
    error = (out[0, 0].double() - expected).abs()
    assert (error <= bound).all()
    assert error.max() > 0


def test_append_then_attend_is_attention_of_rotated_tensors():
    """A prefill, then single steps, by the cache of k's own type."""
    d, n = 32, 20
    cos, sin = rope_table(64, inverse_frequencies("default", rotary_dim=d, base=10000.0)[0])
    k, v, q = torch.randn(n, 2, d), torch.randn(n, 2, d), torch.randn(n, 4, d)
    k_cache, v_cache = torch.full((2, 3, 16, 2, d), torch.nan)
    table = torch.tensor([[2, 0]])
    expected = attention(q[None], k[None], v[None], position=Rope(), causal=True)[0]
    for start, stop in ((0, 7), (7, 8), (8, 20)):
        tokens = torch.arange(start, stop)
        slots = table[0, tokens // 16] * 16 + tokens % 16
        rotated = append_kv(
            *(k[tokens], v[tokens], k_cache, v_cache, slots), cos=cos, sin=sin, q=q[tokens], positions=tokens
        )
        bounds = {"key_lengths": torch.tensor([stop]), "query_starts": torch.tensor([start])}
        for position, query in ((NoPosition(), rotated), (Rope(), q[tokens])):
            out = attention(
                *(query[None], k_cache, v_cache), position=position, keys_rotated=True, causal=True, block_table=table,
                **bounds,
            )  # fmt: skip
            torch.testing.assert_close(out[0], expected[tokens])


def test_bytes_of_fp8_pages_name_the_view():
    """vLLM's fp8 pages are of uint8."""
    pages, q, one = torch.zeros(3, 16, 2, 64, dtype=torch.uint8), torch.randn(1, 1, 4, 64), torch.tensor(1.0)
    where = {"block_table": torch.tensor([[0, 1, 2]]), "key_lengths": torch.tensor([40])}
    for scales in ({}, {"k_scale": one, "v_scale": one}):
        with pytest.raises(ValueError, match=r"for fp8 pages pass k_cache\.view\(torch\.float8_e4m3fn\)"):
            attention(q, pages, pages, **where, **scales)
    view = pages.view(torch.float8_e4m3fn)
    assert not attention(q, view, view, **where, k_scale=one, v_scale=one).any()


@pytest.mark.parametrize("kind", KINDS)
def test_refusals(kind):
    k_cache, v_cache, keywords = fill(kind, torch.float32, "cpu")
    q = torch.randn(2, 1, 4, 64)
    for name in ("k_scale", "v_scale"):
        with pytest.raises(ValueError, match=f"{name} is None"):
            attention(q, k_cache, v_cache, **keywords | {name: None})
        with pytest.raises(TypeError, match=rf"{name} has dtype torch\.bfloat16"):
            attention(q, k_cache, v_cache, **keywords | {name: keywords[name].bfloat16()})
    with pytest.raises(ValueError, match="block_table is None"):
        attention(q, k_cache[:2], v_cache[:2], k_scale=keywords["k_scale"], v_scale=keywords["v_scale"])
    with pytest.raises(ValueError, match="q requires grad"):
        attention(q.clone().requires_grad_(), k_cache, v_cache, **keywords)
    for name in ("k_scale", "v_scale"):
        with pytest.raises(ValueError, match=f"{name} requires grad"):
            attention(q, k_cache, v_cache, **keywords | {name: keywords[name].clone().requires_grad_()})
    with pytest.raises(TypeError, match=r"q has dtype torch\.float64"):
        attention(q.double(), k_cache, v_cache, **keywords)
    with pytest.raises(TypeError, match="v has dtype"):
        attention(q, k_cache, v_cache.view(torch.uint8).to(torch.int16).to(torch.float32), **keywords)
    plain = torch.zeros(12, 16, 2, 64)
    with pytest.raises(ValueError, match="k_scale was given"):
        attention(q, plain, plain, **keywords)
