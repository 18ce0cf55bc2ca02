"""Pages that are copied into contiguous keys before a call attends them: the rule, and values by the reference.

Shape letters: B batch, H query heads, K key heads, D head dim.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
from helpers import stub_gpu
from helpers.compile import Recorder, compile_launch, pretend_target
from helpers.hopper_calls import on_hopper
from helpers.kinds import kinds_of
from helpers.modes import INTERPRETED, needs_kernels, on_gpu
from helpers.targets import TARGETS

from ropewalk import Alibi, ExpoSB, ReRope, Rope, attention, explain_choice
from ropewalk.ops.attention import pages
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.hopper import support as hopper_support
from ropewalk.ops.attention.plans.backward import FORWARDS
from ropewalk.ops.attention.triton import gather
from ropewalk.ops.cache.formats import Format, quantize
from ropewalk.ops.launch import kinds
from ropewalk.ops.launch.kinds import KINDS
from ropewalk.testing import poisoned_memory, unchanged

H, K = 4, 2
FORMATS = list(Format)
BUDGETS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # of the largest output
PADDING = 3  # tokens of no sequence


def draw(device, dtype=torch.float32, kind=Format.OWN, *, packed=True, page_size=8, dims=(32, 32), hnd=False):
    """Return q, k, v and keywords of a call of three rows; pages that no key is in are NaN, or NaN's bytes."""
    lengths, queries = (37, 9, 20), (11, 0, 20)
    n_pages = -(-40 // page_size)
    order = torch.randperm(3 * n_pages + 2)
    table = order[:-2].view(3, n_pages).int()
    filled = torch.zeros(len(order), page_size, dtype=torch.bool)
    for row, length in enumerate(lengths):
        token = torch.arange(length)
        filled[table[row, token // page_size].long(), token % page_size] = True
        table[row, -(-length // page_size) :] = 10**6 if row else -5  # no page
    caches, scales = [], []
    for dim in dims:
        x = torch.randn(len(order), page_size, K, dim)
        if kind is Format.OWN:
            stored, scale = x.to(dtype), None
            stored[~filled] = math.nan
        else:
            stored, scale = quantize(x, kind, torch.rand(K) * 0.02 + 0.02 if kind is Format.FP8 else None)
            stored.view(torch.uint8)[~filled] = 0x7F
            if scale is not None:
                scale[~filled] = math.nan
            else:
                scale = torch.rand(K) * 0.02 + 0.02
        if hnd:
            stored = stored.transpose(1, 2).contiguous().transpose(1, 2)
        caches.append(stored.to(device))
        scales.append(None if scale is None else scale.to(device))
    where = {"block_table": table.to(device), "key_lengths": torch.tensor(lengths, device=device)}
    if kind is not Format.OWN:
        where |= {"k_scale": scales[0], "v_scale": scales[1]}
    if packed:
        where |= {"layout": "thd", "cu_seqlens_q": torch.tensor([0, *queries], device=device).cumsum(0).int()}
        q = torch.randn(sum(queries) + PADDING, H, dims[0])
    else:
        where["query_starts"] = torch.tensor([26, -2, 9], device=device)
        q = torch.randn(3, 11, H, dims[0])
    return q.to(device, dtype), *caches, where


@pytest.fixture
def always(monkeypatch):
    """Let every call of pages pay for a copy."""
    monkeypatch.setattr(pages, "MIN_ROWS", 0)
    monkeypatch.setattr(pages, "MIN_PROGRAM_ROWS", 0)
    monkeypatch.setattr(pages, "pays", lambda call: True)


def check(tensors, where, impl="triton", **keywords):
    """Compare a call of a copy with the reference in float64, or in float32 where numbers are quantised."""
    q, k, v = tensors
    assert explain_choice(q, k, v, impl=impl, **where, **keywords).pages == "copied"
    given = [x for x in (q, k, v, *where.values()) if isinstance(x, torch.Tensor) and x.dtype.itemsize > 1]
    with poisoned_memory(), unchanged(given):
        out, lse = attention(q, k, v, impl=impl, return_lse=True, **where, **keywords)
    wide = torch.float32 if k.dtype.itemsize == 1 else torch.float64
    plain = [x.to(wide) if x.dtype == q.dtype else x for x in (q, k, v)]
    keywords = {name: x.to(wide) if name in ("sinks", "gate") else x for name, x in keywords.items()}
    expected, expected_lse = attention(*plain, impl="reference", return_lse=True, **where, **keywords)
    budget = BUDGETS[q.dtype]
    assert expected.any()
    assert (out - expected).abs().max() <= budget * expected.abs().max()
    finite = expected_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    assert (lse - expected_lse)[finite].abs().max() <= 5 * budget


CALLS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 7},
    "sides": {"window": (9, 2)},
    "softcap": {"causal": True, "softcap": 3.0},
    "rope": {"position": Rope(), "causal": True},
    "rope-rotated": {"position": Rope(interleaved=True), "keys_rotated": True, "causal": True},
    "alibi": {"position": Alibi(), "causal": True},
    "rerope": {"position": ReRope(8), "causal": True},
    "rerope-ahead": {"position": ReRope(8)},
    "bands": {"position": ExpoSB(), "causal": True},
}


@needs_kernels
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "rows"])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", CALLS)
def test_it_is_what_the_reference_attends(device, name, kind, packed):
    *tensors, where = draw(device, kind=kind, packed=packed)
    check(tensors, where, **CALLS[name])


@needs_kernels
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("page_size", [1, 3, 48, 512])
def test_pages_of_any_size(device, page_size, kind):
    for packed in (True, False):
        *tensors, where = draw(device, kind=kind, page_size=page_size, packed=packed)
        check(tensors, where, causal=True)


@needs_kernels
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dims", [(64, 160), (192, 128), (96, 256)], ids=str)
def test_head_dims(device, dims, kind):
    *tensors, where = draw(device, kind=kind, dims=dims)
    check(tensors, where, causal=True)


@needs_kernels
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("dims", [(24, 40), (17, 9)], ids=str)
def test_rows_that_fill_no_16_bytes(device, dims):
    for packed in (True, False):
        *tensors, where = draw(device, torch.float16, dims=dims, packed=packed)
        check(tensors, where, causal=True)


@needs_kernels
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("kind", FORMATS)
def test_any_strides(device, kind):
    *tensors, where = draw(device, torch.float16, kind, hnd=True)
    where["block_table"] = where["block_table"].t().contiguous().t()
    check(tensors, where, causal=True)
    if kind is Format.OWN:
        q, k, v = tensors
        both = torch.stack((k, v), dim=1)  # K beside V of a page
        check((q, *both.unbind(1)), where, causal=True)
        check((q, torch.stack((k, k), dim=-1)[..., 0], v), where, causal=True)  # features are not dense


@needs_kernels
@pytest.mark.usefixtures("always")
def test_bounds_positions_sinks_and_gate(device):
    *tensors, where = draw(device, packed=False)
    where["key_starts"] = torch.tensor([5, 0, 19], device=device)
    check(tensors, where, position=Rope(), causal=True, sinks=torch.randn(H, device=device))
    check(tensors, where, causal=True, window=3, gate=torch.randn_like(tensors[0]))
    *tensors, where = draw(device)
    positions = torch.randint(0, 60, (len(tensors[0]),), device=device)
    for position in (Rope(), Alibi(), ReRope(8)):
        check(tensors, where, position=position, causal=True, positions_q=positions)


@needs_kernels
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "rows"])
def test_keys_before_a_window_are_not_copied(device, monkeypatch, packed):
    """One tile before the window's first key is, as kernels read whole tiles."""
    monkeypatch.setattr(gather, "WIDEST_TILE", 16 if INTERPRETED else 256)
    q, k, v, where = draw(device, packed=packed)
    if packed:  # the last query of each sequence
        where["cu_seqlens_q"] = torch.tensor([0, 1, 1, 2], device=device)
    else:
        where["query_starts"] = where["key_lengths"] - 1
        q = q[:, :1]
    if INTERPRETED:
        with poisoned_memory():
            copied = gather.copy_pages(make_call(q, k, v, causal=True, window=3, **where))
        first = copied.k[0, 0, :37, 0].isnan()
        assert first[: 36 - 2 - 16].all()
        assert not first[36 - 2 - 16 :].any()
    check((q, k, v), where, causal=True, window=3)


@needs_kernels
@pytest.mark.usefixtures("always")
def test_a_dense_cache_is_copied_too(device):
    q, k, v, where = draw(device, page_size=40)
    rows = where.pop("block_table")[:, 0].long()
    check((q, k[rows], v[rows]), where, position=Rope(), causal=True)


@needs_kernels
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "rows"])
def test_dropout_and_largest_scores(device, packed):
    """No kernel takes these over pages in place, so a copy is made for any number of queries."""
    q, k, v, where = draw(device, packed=packed)
    outs, largest = [], []
    for impl in ("triton", "reference"):
        torch.manual_seed(5)
        outs.append(attention(q, k, v, impl=impl, causal=True, dropout_p=0.5, **where))
        largest.append(attention(q, k, v, impl=impl, causal=True, return_max_logits=True, **where)[1])
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*largest)


@needs_kernels
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("lengths", [(), (0, 0)], ids=str)
def test_nothing_to_attend(device, lengths):
    q, k = torch.randn(5, H, 16, device=device), torch.full((3, 4, K, 16), math.nan, device=device)
    where = {
        "cu_seqlens_q": torch.tensor([0, *(2,) * len(lengths)], device=device).cumsum(0),
        "key_lengths": torch.tensor(lengths, dtype=torch.int64, device=device),
        "block_table": torch.zeros(len(lengths), 2, dtype=torch.int32, device=device),
    }
    with poisoned_memory():
        out, lse = attention(q, k, k, layout="thd", impl="triton", return_lse=True, **where)
    assert not out.any()
    assert bool((lse == -math.inf).all())


@pytest.mark.slow
@needs_kernels
@pytest.mark.usefixtures("always")
def test_many_sequences(device):
    """More than a program adds the lengths of at once."""
    count, rng = 300, torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 9, (count,), generator=rng)
    bounds = torch.cat((torch.zeros(1, dtype=torch.int64), torch.minimum(lengths, lengths % 3).cumsum(0)))
    k, v = torch.randn(2, 2 * count, 4, 1, 16)
    where = {
        "layout": "thd",
        "cu_seqlens_q": bounds.to(device),
        "key_lengths": lengths.to(device),
        "block_table": torch.randperm(2 * count, generator=rng).view(count, 2).to(device),
    }
    q = torch.randn(int(bounds[-1]), 1, 16)
    check([x.to(device) for x in (q, k, v)], where, causal=True)


@needs_kernels
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "rows"])
@pytest.mark.parametrize("name", ["causal", "rope", "rerope"])
def test_plans_read_what_the_device_holds_now(device, monkeypatch, name, packed):
    """Other lengths, tables and keys at the same shapes: the third call and those after it run by a plan."""
    monkeypatch.setattr(kinds, "on_cpu", INTERPRETED)
    KINDS.clear()
    for step in range(4):
        *tensors, where = draw(device, packed=packed)
        where["key_lengths"] = where["key_lengths"] - torch.tensor([step, 0, 0], device=device)
        if packed and step == 3:
            where["cu_seqlens_q"] = torch.tensor([0, 4, 9, 25], device=device, dtype=torch.int32)
        elif step:
            where["cu_seqlens_q" if packed else "query_starts"] += 0
        check(tensors, where, **CALLS[name])
    assert kinds_of() + kinds_of(FORWARDS)


RULE = {  # half as many packed queries do
    "chunk": ({"queries": 128}, "copied"),
    "few": ({"queries": 126}, "in place"),
    "decode": ({"queries": 2, "rows": 64}, "in place"),
    "rows": ({"queries": 128, "rows": 4}, "copied"),
    "short rows": ({"queries": 126, "rows": 4}, "in place"),
    "one head": ({"queries": 512, "heads": 8}, "copied"),
    "wide table": ({"queries": 2048, "table": 9}, "in place"),
}


@needs_kernels
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "rows"])
@pytest.mark.parametrize("name", RULE)
def test_rule(device, name, packed):
    sizes, expected = RULE[name]
    rows, heads, queries = sizes.get("rows", 1), sizes.get("heads", 32), sizes["queries"] // (1 + packed)
    k = torch.empty(8 * rows, 512, 8, 16, dtype=torch.float16, device=device)
    where = {
        "block_table": torch.zeros(rows, sizes.get("table", 8), dtype=torch.int32, device=device),
        "key_lengths": torch.full((rows,), 600, device=device),
    }
    q = torch.empty(rows, queries, heads, 16, dtype=torch.float16, device=device)
    if packed:
        bounds = torch.arange(0, (rows + 1) * queries, queries, device=device)
        q, where = q.flatten(0, 1), where | {"layout": "thd", "cu_seqlens_q": bounds}
    choice = explain_choice(q, k, k, impl="triton", **where)
    assert choice.pages == expected
    assert f"pages: {expected}" in str(choice)
    assert explain_choice(q, k, k, impl="reference", **where).pages == "copied"
    scales = {f"{x}_scale": torch.ones((), device=device) for x in "kv"}
    quantised = explain_choice(q, *(k.to(torch.float8_e4m3fn),) * 2, impl="triton", **where, **scales)
    assert quantised.pages == ("in place" if name in ("decode", "wide table") and not packed else "copied")


def test_contiguous_keys_have_no_pages(device):
    q = torch.empty(1, 8, H, 16, device=device)
    choice = explain_choice(q, q, q)
    assert choice.pages is None
    assert "pages" not in str(choice)


def test_hopper_takes_a_copy(device, monkeypatch):
    """Its kernels read no pages: few queries are refused, many are copied for it."""
    monkeypatch.setattr(hopper_support, "why_not_on", lambda device: None)
    monkeypatch.setattr(hopper_support.Triton, "why_not", lambda self, call: None)
    k = torch.zeros(16, 512, 8, 64, dtype=torch.uint8, device=device)
    scale = torch.ones(16, 512, 8, 4, dtype=torch.float16, device=device)
    where = {
        "block_table": torch.zeros(1, 16, dtype=torch.int32, device=device),
        "key_lengths": torch.tensor([600], device=device),
        "k_scale": scale,
        "v_scale": scale,
    }
    codes = []
    for queries in (63, 64):
        q = torch.empty(1, queries, 32, 128, dtype=torch.bfloat16, device=device)
        refusal = hopper_support.Gluon().why_not(make_call(q, k, k, **where))
        codes.append(None if refusal is None else refusal.code)
    assert codes == ["block_table", None]


@needs_kernels
@pytest.mark.usefixtures("always")
def test_compiled(device):
    *tensors, where = draw(device)

    def attend(tensors, where):
        return attention(*tensors, causal=True, position=Rope(), impl="triton", **where)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tensors, where), attend(tensors, where))


@on_gpu
@on_hopper
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "rows"])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", CALLS)
def test_hopper(device, name, kind, packed):
    q, k, v, where = draw(device, torch.bfloat16, kind, packed=packed, page_size=16, dims=(64, 128))
    if not packed:  # its kernels need 64 queries
        q = q.repeat(1, 8, 1, 1)
        where["query_starts"] = torch.tensor([-51, -79, -68], device=device)
    else:
        q = torch.cat((q, torch.zeros(64, H, 64, device=device, dtype=q.dtype)))
    check((q, k, v), where, impl="gluon", **CALLS[name])


@on_gpu
@on_hopper
def test_chunk_in_a_graph(device):
    """A captured graph reads the table, the lengths and the pages of each replay; an engine's step in bfloat16."""
    n_pages, page_size = 64, 16
    k, v = torch.randn(2, n_pages, page_size, 8, 128, device=device).to(torch.bfloat16)
    q = torch.randn(600, 32, 128, device=device).to(torch.bfloat16)
    where = {
        "block_table": torch.arange(n_pages, device=device, dtype=torch.int32)[None].clone(),
        "key_lengths": torch.tensor([1000], device=device),
        "cu_seqlens_q": torch.tensor([0, 600], device=device),
        "layout": "thd",
    }
    choice = explain_choice(q, k, v, causal=True, **where)
    assert (choice.name, choice.pages) == ("gluon", "copied")
    for _ in range(3):
        attention(q, k, v, causal=True, **where)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, causal=True, **where)
    for length in (1000, 700):
        where["key_lengths"].fill_(length)
        where["block_table"].copy_(torch.randperm(n_pages, device=device)[None])
        q.normal_()
        graph.replay()
        expected = attention(q.float(), k.float(), v.float(), causal=True, impl="reference", **where)
        assert (out - expected).abs().max() <= BUDGETS[torch.bfloat16] * expected.abs().max()


def launch_thrice(packed, impl):
    """Record a step three times: without a plan, as it is made, and by it."""
    kinds.on_cpu = True
    pages.MIN_ROWS = pages.MIN_PROGRAM_ROWS = 0
    q = torch.zeros(3, 70, 8, 64, dtype=torch.bfloat16)
    k, v = torch.zeros(2, 8, 16, 2, 64, dtype=torch.bfloat16)
    where = {
        "key_lengths": torch.tensor([20, 17, 7], dtype=torch.int32),
        "block_table": torch.tensor([[5, 2], [0, 0], [1, 0]], dtype=torch.int32),
    }
    if packed:
        q, where = q.flatten(0, 1), where | {"layout": "thd", "cu_seqlens_q": torch.tensor([0, 1, 11, 11]).int()}
    records = []
    with torch.no_grad():
        for _ in range(3):
            stub_gpu.clear()
            attention(q, k, v, causal=True, impl=impl, **where)
            records.append(
                [(x.name, x.grid, [a for a in x.args if not isinstance(a, tuple)]) for x in stub_gpu.launches()]
            )
    return records, len(kinds_of())


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("impl", ["triton", "gluon"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "rows"])
def test_plans_launch_the_same(packed, impl):
    (first, second, third), planned = stub_gpu.run(launch_thrice, packed, impl)
    assert planned == 1
    between = ["schedule_kernel"] if packed else []
    assert [name for name, _, _ in first] == ["gather_kernel", *between, "forward_kernel"]
    assert first == second == third


@pytest.mark.compile
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "rows"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("kind", FORMATS)
def test_it_compiles_with_accesses_of_16_bytes(monkeypatch, kind, target, packed):
    pretend_target(monkeypatch, target)
    q, k, v, where = draw("cpu", torch.bfloat16, kind, packed=packed, page_size=16, dims=(128, 128))
    launches = []
    monkeypatch.setattr(gather, "gather_kernel", Recorder(gather.gather_kernel, launches))
    gather.copy_pages(make_call(q, k, v, causal=True, window=100, **where))
    ptx = compile_launch(*launches[0], TARGETS[target]).asm["ptx"]
    assert set(re.findall(r"st\.global\.(\S+) \[", ptx)) - {"b32"} == {"v4.b32"}
    if kind is Format.OWN:
        assert "ld.global.v4.b32" in ptx
        assert ".local" not in ptx


@pytest.mark.compile
def test_no_length_makes_another_binary(monkeypatch):
    from helpers.compile import describe_launch

    pretend_target(monkeypatch, "sm_90")
    launches = []
    monkeypatch.setattr(gather, "gather_kernel", Recorder(gather.gather_kernel, launches))
    for width, queries, n_pages in ((1000, 600, 1200), (1024, 512, 4096), (2001, 2048, 2222)):
        k = torch.empty(n_pages, 16, 8, 64, dtype=torch.bfloat16)
        q = torch.empty(1, queries, 32, 64, dtype=torch.bfloat16)
        where = {"block_table": torch.zeros(1, width, dtype=torch.int32), "key_lengths": torch.tensor([600])}
        gather.copy_pages(make_call(q, k, k, causal=True, window=queries, **where))
    described = [describe_launch(*launch) for launch in launches]
    assert all(launch == described[0] for launch in described)
