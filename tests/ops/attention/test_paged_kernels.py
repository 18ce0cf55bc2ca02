"""The kernels that decode from pages on Hopper, against attention of what the pages mean, in float64."""

from __future__ import annotations

import pytest
import torch
from helpers.hopper_calls import on_hopper
from helpers.modes import on_gpu
from helpers.paged_calls import STORED, exact_rows, fill_pages

from ropewalk import Alibi, ReRope, Rope, apply_rope, attention, explain_choice, inverse_frequencies, rope_table
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.hopper import support
from ropewalk.ops.launch import kinds
from ropewalk.testing import assert_close_to_truth

KINDS = list(STORED)
ROWS = {
    "lengths": [700, 1, 0, 77, 1500, 64],
    "one": [3000],
    "equal": [512, 512],
    "many": [5 * row % 97 for row in range(150)],
}
CASES = {
    "heads of 8": {"heads": 1, "group": 8, "dim": 128},
    "heads of 1": {"heads": 3, "group": 1, "page_size": 64},
    "two queries": {"heads": 2, "group": 8, "dim": 128, "queries": 2, "page_size": 256},
    "chunk": {"heads": 2, "queries": 3, "page_size": 48, "dim": 128},
    "window": {"window": 100, "sinks": True, "dim": 128},
    "sides": {"causal": False, "window": (50, 7), "queries": 2},
    "starts": {"key_starts": True, "dim": 128},
    "scale": {"scale": -0.3, "sinks": True},
    "rope": {"position": Rope(), "keys_rotated": True, "dim": 128},
    "rope, part": {"position": Rope(rotary_dim=32, interleaved=True), "keys_rotated": True, "key_starts": True},
    "gate": {"gate": True, "dim": 128},
    "heads first": {"layout": "bhtd", "dim": 128, "heads": 4},
}


def make(kind, rows, device, dtype=torch.bfloat16, *, heads=2, group=4, dim=64, queries=1, page_size=16, **keywords):
    """Return q, pages, the keywords of a call, and exact keys and values of each row."""
    lengths = [length if length == 0 else max(length, queries) for length in ROWS[rows]]
    k, v, scales, table, lengths = fill_pages(kind, dtype, lengths, device, page_size=page_size, heads=heads, dim=dim)
    exact = exact_rows(k, v, scales, table, lengths)
    q = torch.randn(len(lengths), queries, heads * group, dim, device=device).to(dtype)
    layout = keywords.pop("layout", "bthd")
    if layout == "bhtd":
        q, *exact = (x.transpose(1, 2) for x in (q, *exact))
        k, v = (x.transpose(1, 2).contiguous() for x in (k, v))
        scales = {
            name: x if x.ndim < 2 else x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in scales.items()
        }
    words = {"causal": True, "key_lengths": lengths, "query_starts": lengths - queries, "layout": layout, **keywords}
    if words.pop("sinks", False):
        words["sinks"] = torch.randn(heads * group, device=device)
    if words.pop("gate", False):
        words["gate"] = torch.randn_like(q)
    if words.pop("key_starts", False):
        words["key_starts"] = lengths // 3
    return q, k, v, words, {"block_table": table, **scales}, exact


def check(kind, rows, device, dtype=torch.bfloat16, **options):
    q, k, v, words, pages, exact = make(kind, rows, device, dtype, **options)
    out, lse = attention(q, k, v, impl="gluon", return_lse=True, **words, **pages)
    plain = {name: value for name, value in words.items() if name != "keys_rotated"}
    position = plain.pop("position", None)
    truth, lse_truth = _attend(_rotate(q.double(), position, plain), *exact, plain)
    baseline, lse_baseline = _attend(_rotate(q, position, plain), *(x.to(dtype) for x in exact), plain)
    assert_close_to_truth(out, truth, baseline)
    attends = lse_truth.isfinite()
    assert torch.equal(lse.isfinite(), attends)
    assert_close_to_truth(lse[attends], lse_truth[attends], lse_baseline[attends])
    assert not out[~out.isfinite()].numel()


def _rotate(q, position, words):
    """Return queries (B, Tq, H, D) as a scheme rotates them, rounded once; None rotates nothing."""
    if position is None:
        return q
    frequencies, _ = inverse_frequencies("default", rotary_dim=position.rotary_dim or q.shape[3], base=position.base)
    cos, sin = (x.to(q.device) for x in rope_table(4096, frequencies))
    first = words["query_starts"] - words.get("key_starts", 0)
    positions = (first[:, None] + torch.arange(q.shape[1], device=q.device)).clamp(min=0)
    keywords = {"interleaved": position.interleaved, "positions": positions, "impl": "reference"}
    return apply_rope(q, None, cos, sin, **keywords)


def _attend(q, k, v, words):
    """Attend by the definition."""
    given = {name: words[name].to(q.dtype) for name in ("sinks", "gate") if name in words}
    return attention(q, k, v, impl="reference", return_lse=True, **{**words, **given})


@on_gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_length(kind, rows, dtype, device):
    check(kind, rows, device, dtype, heads=8, dim=128)


@on_gpu
@on_hopper
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_calls(kind, case, device):
    check(kind, "lengths", device, **CASES[case])


@on_gpu
@on_hopper
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_replays_with_other_lengths_and_tables(kind, device):
    q, k, v, words, pages, _ = make(kind, "lengths", device, dim=128)
    words = {**words, "query_starts": words["key_lengths"] - 1}
    other = words["key_lengths"].flip(0), words["key_lengths"].flip(0) - 1, pages["block_table"].flip(0)
    expected = attention(
        q, k, v, **{**words, "key_lengths": other[0], "query_starts": other[1]}, **{**pages, "block_table": other[2]}
    )
    attention(q, k, v, **words, **pages)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, **words, **pages)
    for x, y in zip((words["key_lengths"], words["query_starts"], pages["block_table"]), other, strict=True):
        x.copy_(y.clone())
    graph.replay()
    assert torch.equal(out, expected)


@on_gpu
@on_hopper
@pytest.mark.parametrize("kind", KINDS)
def test_plans_give_the_same_bits(kind, device):
    q, k, v, words, pages, _ = make(kind, "lengths", device, dim=128, sinks=True)
    kinds.KINDS.clear()
    runs = [attention(q, k, v, impl="gluon", **words, **pages) for _ in range(4)]
    assert all(torch.equal(runs[0], run) for run in runs)


@on_gpu
@on_hopper
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_chosen(kind, device):
    q, k, v, words, pages, _ = make(kind, "lengths", device, dim=128)
    choice = explain_choice(q, k, v, **words, **pages)
    assert (choice.name, choice.pages) == ("gluon", "in place")


@on_gpu
@on_hopper
@pytest.mark.parametrize("kind", KINDS)
def test_no_binary_is_compiled_as_a_cache_grows(kind, device):
    from ropewalk.ops.attention.hopper import decode

    def count():
        kernels = (decode.decode_pages_kernel, decode.combine_shares_kernel)
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    compiled = []
    for length in (100, 1000, 1001, 3000):
        ROWS["growing"] = [length, length // 2]
        q, k, v, words, pages, _ = make(kind, "growing", device, dim=128)
        attention(q, k, v, impl="gluon", **words, **pages)
        compiled.append(count())
    del ROWS["growing"]
    assert compiled[0] == compiled[-1]


@pytest.mark.parametrize("columns", [8, 16])
@pytest.mark.parametrize("batch", [1, 4, 8, 64])
@pytest.mark.parametrize("row_bytes", [32, 64, 128, 256])
def test_keys_change_the_number_of_programs_alone(row_bytes, batch, columns):
    pytest.importorskip("triton")
    from ropewalk.ops.attention.hopper.decode_launch import choose_tiles

    tiles = {choose_tiles(row_bytes, columns, batch, 8, n_keys, 132) for n_keys in (16, 8192, 1 << 17)}
    assert len({x._replace(programs=0) for x in tiles}) == 1
    assert {x.programs for x in tiles} != {1}


MASK = torch.ones(1, 1, 1, 1504, dtype=torch.bool)
REFUSED = {
    "mask": ({}, {"mask": MASK}, "masks"),
    "softcap": ({}, {"softcap": 10.0}, "softcap"),
    "score mod": ({}, {"position": Alibi()}, "score mods"),
    "two ranges": ({}, {"position": ReRope(50)}, "two-range"),
    "raw keys": ({}, {"position": Rope()}, "not rotated"),
    "dim": ({"dim": 32}, {}, "head dims of q and v are 32 and 32"),
    "page size": ({"page_size": 24}, {}, "pages of 24 keys"),
    "rows": ({"queries": 5}, {}, "20 queries"),
}


@pytest.mark.parametrize("kind", ["own", "int4"])
@pytest.mark.parametrize("case", REFUSED)
def test_calls_that_are_refused_say_why(kind, case):
    options, keywords, reason = REFUSED[case]
    q, k, v, words, pages, _ = make(kind, "lengths", "cpu", **options)
    found = support._why_not_paged(make_call(q, k, v, **{**words, **keywords}, **pages))
    assert found is not None
    assert found.code == "block_table"
    assert reason in found.reason


@pytest.mark.parametrize("kind", KINDS)
def test_pages_that_lie_anyhow(kind):
    q, k, v, words, pages, _ = make(kind, "lengths", "cpu")

    def refusal(k, v, **changed):
        return support._why_not_paged(make_call(q, k, v, **words, **{**pages, **changed}))

    assert refusal(k, v) is None
    of_tokens = [torch.stack((x, x), 3).flatten(3)[..., : x.shape[3]] for x in (k, v)]  # K beside V
    assert refusal(*of_tokens) is None
    bytes_wide = [torch.nn.functional.pad(x.view(torch.uint8), (0, 4)).view(x.dtype)[..., : x.shape[3]] for x in (k, v)]
    assert "strides of pages" in refusal(*bytes_wide).reason
    if kind == "int4":
        scale = pages["k_scale"]
        apart = scale[..., None].expand(*scale.shape, 2).contiguous()[..., 0]
        assert "scales" in refusal(k, v, k_scale=apart).reason
