"""`append_kv` against its definition in float64: every format, layout and convention, by reference and kernel."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.append_definition import assert_stored, expect
from helpers.modes import KERNEL_DTYPES, ON_GPU, needs_kernels, on_gpu

from ropewalk import QKNorm, append_kv, apply_rope, inverse_frequencies, rope_table
from ropewalk.ops.cache.call import AppendCall

N, H, K, PAGES, SIZE = 9, 4, 2, 5, 16
STORED = {"own": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}
IMPLS = ["reference", pytest.param("triton", marks=needs_kernels)]


def make_cache(dtype, layout, page_size, width, device):
    """Return a cache of random bytes (pages, page_size, K, width) in some order of memory, and all of its memory."""
    shape = {
        "nhd": (PAGES, page_size, K, width),
        "hnd": (PAGES, K, page_size, width),
        "kv": (PAGES, page_size, K, 2 * width),
        "slice": (PAGES + 2, 2, page_size, K + 1, width + 16),
        "features": (PAGES, K, width, page_size),
    }[layout]
    size = torch.empty((), dtype=dtype).element_size()
    memory = torch.randint(0, 120, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, device=device).view(dtype)
    cache = {
        "nhd": lambda: memory,
        "hnd": lambda: memory.transpose(1, 2),
        "kv": lambda: memory[..., :width],
        "slice": lambda: memory[1:-1, 1, :, :K, :width],
        "features": lambda: memory.permute(0, 3, 1, 2),
    }[layout]()
    return cache, memory


def make_scale(kind, page_size, dim, device):
    if kind == "own":
        return None
    if kind == "fp8":
        return torch.rand(K, device=device) * 0.02 + 0.01
    shape = (PAGES, K, page_size) if kind == "int8" else (PAGES, K, page_size, dim // 32)
    dtype = torch.float32 if kind == "int8" else torch.float16
    return torch.full(shape, -3.0, dtype=dtype, device=device).transpose(1, 2)


def make_call(
    kind, dtype, device, *, d=64, dv=32, rotary=None, offset=0, page_size=16, layout="nhd", norm=None, n_axes=0,
    n_slots=7, index_dtype=torch.int64, table_dtype=torch.float32, has_q=True, n_tokens=N, positions=True, **flags,
):  # fmt: skip
    """Return a call, and the memory of its caches."""
    rotary = rotary or d
    table = rope_table(50, inverse_frequencies("default", rotary_dim=rotary, base=100.0)[0])
    cos, sin = (x.to(device, table_dtype) for x in table)
    # Slices of one projection.
    qkv = torch.randn(n_tokens, (H + K) * d + K * dv, device=device).to(dtype)
    q, k, v = qkv.split([H * d, K * d, K * dv], dim=-1)
    q, k, v = q.unflatten(-1, (H, d)), k.unflatten(-1, (K, d)), v.unflatten(-1, (K, dv))
    k[:, :, 5] *= 20  # a feature that outweighs others
    if n_tokens > 3:
        v[1] = 0
        k[2] *= 1e-4
    slots = torch.randperm(PAGES * page_size)[: min(n_slots, n_tokens)].to(device, index_dtype)
    if slots.numel() > 3:
        slots[3] = -1
    halves = 2 if kind == "int4" else 1
    stored = STORED[kind] or dtype
    (k_cache, k_memory), (v_cache, v_memory) = (
        make_cache(stored, layout, page_size, width // halves, device) for width in (d, dv)
    )
    index, axes = None, None
    if positions:
        index = torch.randint(0, 50, (n_axes, n_tokens) if n_axes else (n_tokens,)).to(device, index_dtype)
        axes = (torch.arange(rotary // 2) % n_axes).to(device, index_dtype) if n_axes else None
    q_weight = k_weight = None
    if norm:
        shapes = {"shared": ((d,), (d,)), "heads": ((H, d), (K, d)), "across": ((H * d,), (K * d,))}[norm]
        q_weight, k_weight = (torch.rand(shape, device=device) + 0.5 for shape in shapes)
        flags |= {"has_norm": True, "across_heads": norm == "across"}
    call = AppendCall(
        *(k, v, k_cache, v_cache, slots, cos, sin, q if has_q else None, index, axes, q_weight, k_weight),
        *(make_scale(kind, page_size, width, device) for width in (d, dv)),
        rotary_offset=offset,
        **flags,
    )
    return call, (k_memory, v_memory)


def run(call, impl):
    """Call the public function."""
    norm = None
    if call.has_norm:
        norm = QKNorm(
            call.q_weight, call.k_weight, call.eps, call.weight_offset, call.after, across_heads=call.across_heads
        )
    return append_kv(
        *call[:5],
        **{name: getattr(call, name) for name in ("cos", "sin", "q", "positions", "axes", "k_scale", "v_scale")},
        norm=norm,
        interleaved=call.interleaved,
        rotary_offset=call.rotary_offset,
        impl=impl,
    )


def check(call, memory, impl):
    """Run a call and compare all of its effects with the definition."""
    expected = expect(call)
    inputs = [x.clone() for x in (call.k, call.v) + (() if call.q is None else (call.q,))]
    before = [x.view(torch.uint8).clone() for x in memory]
    of_scales = [None if x is None else x.clone() for x in (call.k_scale, call.v_scale)]
    versions = [x._version for x in (call.k_cache, call.v_cache)]
    out = run(call, impl)
    assert [x._version > version for x, version in zip((call.k_cache, call.v_cache), versions, strict=True)] == [
        True
    ] * 2
    error = 4e-6 if call.has_norm else 1e-6
    if call.q is None:
        assert out is None
    else:
        assert out.dtype == call.q.dtype
        assert out.stride() == torch.empty_like(call.q).stride()
        budget = 0.51 * torch.finfo(out.dtype).eps * expected.q.abs() + error * expected.q.abs().amax(-1, keepdim=True)
        assert ((out.double() - expected.q).abs() <= budget + torch.finfo(out.dtype).tiny).all()
    for cache, scale, values in ((call.k_cache, call.k_scale, expected.k), (call.v_cache, call.v_scale, expected.v)):
        assert_stored(cache, scale, values[expected.tokens], expected.slots, error)
    for x, y in zip(inputs, (call.k, call.v, call.q), strict=False):
        assert torch.equal(x, y)
    # All else is as it was: put what was written back, and compare every byte.
    page_size = call.k_cache.shape[1]
    fresh = [x.clone() for x in before]
    for cache, whole, old in zip((call.k_cache, call.v_cache), memory, fresh, strict=True):
        bytes_now, bytes_before = whole.view(torch.uint8).reshape(-1), old.reshape(-1)
        for slot in expected.slots:
            written = bytes_of(cache[slot // page_size, slot % page_size]).to(bytes_now.device)
            bytes_before[written] = bytes_now[written]
        assert torch.equal(bytes_now, bytes_before)
    for scale, old in zip((call.k_scale, call.v_scale), of_scales, strict=True):
        if scale is not None:
            untouched = torch.ones(PAGES * page_size, dtype=torch.bool, device=scale.device)
            if scale.ndim > 1:
                untouched[expected.slots] = False
                assert torch.equal(scale.flatten(0, 1)[untouched], old.flatten(0, 1)[untouched])
            else:
                assert torch.equal(scale, old)


def bytes_of(row):
    """Return the offsets in memory of the bytes of a token's heads, (K, D)."""
    heads, features = (torch.arange(size) * stride for size, stride in zip(row.shape, row.stride(), strict=True))
    elements = row.storage_offset() + heads[:, None] + features
    return (elements[..., None] * row.element_size() + torch.arange(row.element_size())).flatten()


CASES = {
    "plain": {},
    "partial": {"d": 96, "dv": 64, "rotary": 64, "offset": 32, "page_size": 32},
    "odd-offset": {"rotary": 32, "offset": 5},
    "interleaved": {"interleaved": True, "layout": "hnd"},
    "interleaved-partial": {"d": 96, "rotary": 32, "offset": 8, "interleaved": True, "page_size": 1},
    "interleaved-odd": {"rotary": 16, "offset": 7, "interleaved": True},
    "norm": {"norm": "shared", "layout": "kv"},
    "norm-after": {"norm": "heads", "after": True, "weight_offset": 1.0, "layout": "slice"},
    "norm-across": {"norm": "across", "d": 32, "dv": 96, "page_size": 512},
    "norm-interleaved": {"norm": "shared", "interleaved": True, "rotary": 32, "layout": "hnd"},
    "axes": {"n_axes": 3, "norm": "shared", "page_size": 48},
    "axes-interleaved": {"n_axes": 2, "interleaved": True, "index_dtype": torch.int32},
    "no-positions": {"positions": False, "has_q": False, "table_dtype": torch.float64},
    "features-apart": {"layout": "features"},
    "all-slots": {"n_slots": N, "index_dtype": torch.int32, "d": 128, "dv": 128},
    "no-slots": {"n_slots": 0},
}


@pytest.mark.both_modes
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("case", CASES)
def test_caches_hold_the_definition(case, kind, impl, device):
    for dtype in KERNEL_DTYPES if impl == "triton" else (torch.float32, torch.float16, torch.bfloat16):
        check(*make_call(kind, dtype, device, **CASES[case]), impl)


@pytest.mark.both_modes
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", STORED)
def test_no_tokens(kind, impl, device):
    call, memory = make_call(kind, torch.float16, device, n_tokens=0)
    before = [x.view(torch.uint8).clone() for x in memory]
    out = run(call, impl)
    assert out.shape == (0, H, 64)
    assert all(torch.equal(x.view(torch.uint8), y) for x, y in zip(memory, before, strict=True))


@pytest.mark.both_modes
@pytest.mark.parametrize("impl", IMPLS)
def test_fp8_saturates_and_takes_one_scale_for_all(impl, device):
    call, _ = make_call("fp8", torch.float32, device, page_size=16)
    call.v.copy_(torch.linspace(-1000, 1000, call.v.numel(), device=device).view_as(call.v))
    one = torch.tensor(0.75, device=device)
    run(call._replace(k_scale=one, v_scale=one), impl)
    expected = expect(call)
    assert_stored(call.v_cache, one, expected.v[expected.tokens], expected.slots, 1e-7)
    written = call.v_cache.view(torch.uint8).flatten(0, 1)[expected.slots].view(torch.float8_e4m3fn).float()
    assert written.abs().max() == 448


@pytest.mark.both_modes
@pytest.mark.parametrize("impl", IMPLS)
def test_every_fp8_number_and_every_tie_is_rounded_to_even(impl, device):
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (numbers[1:] + numbers[:-1]) / 2
    nearby = torch.cat((numbers, ties, ties * (1 + 2**-20), ties * (1 - 2**-20)))
    x = torch.cat((nearby, -nearby, torch.tensor([500.0, torch.inf, -torch.inf, torch.nan])))
    x = torch.nn.functional.pad(x, (0, -x.numel() % 32)).view(-1, 1, 32).to(device)
    cos, sin = torch.ones(x.shape[0], 16, device=device), torch.zeros(x.shape[0], 16, device=device)
    k_cache, v_cache = (torch.zeros(1, x.shape[0], 1, 32, dtype=torch.uint8, device=device) for _ in range(2))
    k_cache, v_cache = k_cache.view(torch.float8_e4m3fn), v_cache.view(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    slots = torch.arange(x.shape[0], device=device)
    append_kv(x, x, k_cache, v_cache, slots, cos=cos, sin=sin, k_scale=one, v_scale=one, impl=impl)
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(v_cache.float()[0].nan_to_num(7e5), expected.float().nan_to_num(7e5))


@pytest.mark.both_modes
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_zeros_and_tiny_values_have_finite_scales(kind, impl, device):
    call, _ = make_call(kind, torch.float32, device, norm=None)
    call.k[0] = 0
    call.k[1] = 1e-9
    call.v[0] = 0
    call.v[2] = 1e-30
    call.v[4] = 3e38
    run(call, impl)
    slots = call.slots.tolist()
    for cache, scale in ((call.k_cache, call.k_scale), (call.v_cache, call.v_scale)):
        page, offset = divmod(slots[0], 16)
        assert (cache[page, offset] == (0 if kind == "int8" else 0x88)).all()
        for slot in slots[:3] + slots[4:]:
            assert scale[slot // 16, slot % 16].isfinite().all()


@pytest.mark.both_modes
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", STORED)
def test_a_position_outside_the_tables_shows(kind, impl, device):
    call, _ = make_call(kind, torch.float32, device)
    call.positions[4] = 50
    call.positions[0] = -1
    q = run(call, impl)
    assert q[4].isnan().all()
    assert q[0].isnan().all()
    assert not q[1:4].isnan().any()
    for token in (0, 4):
        page, offset = divmod(int(call.slots[token]), 16)
        shown = call.k_scale if kind in ("int8", "int4") else call.k_cache
        assert not shown[page, offset].float().isfinite().any()
        assert call.v_cache[page, offset].float().isfinite().all()


@needs_kernels
@pytest.mark.parametrize("kind", STORED)
def test_slots_on_a_device_outside_the_cache_are_not_written(kind, device, monkeypatch):
    from ropewalk.ops.cache import operator

    call, memory = make_call(kind, torch.float16, device)
    before = [x.view(torch.uint8).clone() for x in memory]
    call.slots.copy_(torch.tensor([80, -1, -7, 10**6, 2**31 - 1, 81, 90], device=device))
    monkeypatch.setattr(operator, "check_values", lambda call: None)
    q = run(call, "triton")
    assert q.isfinite().all()
    assert all(torch.equal(x.view(torch.uint8), y) for x, y in zip(memory, before, strict=True))


@on_gpu
@pytest.mark.parametrize("kind", STORED)
def test_a_graph_replays_with_other_slots_and_positions(kind, device):
    call, _ = make_call(kind, torch.bfloat16, device, norm="shared", n_slots=N)
    run(call, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(call, None)
    for _ in range(2):
        call.slots.copy_(torch.randperm(PAGES * 16)[:N])
        call.slots[2] = -1
        call.positions.copy_(torch.randint(0, 50, (N,)))
        graph.replay()
        other, _ = make_call(kind, torch.bfloat16, device, norm="shared", n_slots=N)
        if kind == "fp8":
            other = other._replace(k_scale=call.k_scale, v_scale=call.v_scale)
        expected = run(
            call._replace(k_cache=other.k_cache, v_cache=other.v_cache, k_scale=other.k_scale, v_scale=other.v_scale),
            None,
        )
        assert torch.equal(out, expected)
        page, offset = call.slots[call.slots >= 0] // 16, call.slots[call.slots >= 0] % 16
        for a, b in ((call.k_cache, other.k_cache), (call.v_cache, other.v_cache)):
            assert torch.equal(a.view(torch.uint8)[page, offset], b.view(torch.uint8)[page, offset])


@on_gpu
def test_more_elements_than_int32_counts(device):
    """The last page begins 2³¹ elements after the first one."""
    heads, dim, page_size = 8, 128, 512
    pages = 2**31 // (heads * dim * page_size) + 3
    k_cache = torch.zeros(pages, page_size, heads, dim, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    v_cache = torch.zeros(pages, page_size, heads, dim, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    k, v = torch.randn(2, 4, heads, dim, device=device).bfloat16()
    n_slots = pages * page_size
    slots = torch.tensor([0, n_slots - 1, n_slots - 2, -1], device=device)
    cos, sin = torch.ones(4, dim // 2, device=device), torch.zeros(4, dim // 2, device=device)
    one = torch.ones((), device=device)
    append_kv(k, v, k_cache, v_cache, slots, cos=cos, sin=sin, k_scale=one, v_scale=one)
    for x, cache in ((k, k_cache), (v, v_cache)):
        for token, slot in enumerate(slots.tolist()[:3]):
            expected = x[token].float().to(torch.float8_e4m3fn)
            assert torch.equal(cache[slot // page_size, slot % page_size].float(), expected.float())
        assert int((cache.view(torch.uint8).view(-1, heads * dim)[:, 0] != 0).sum()) <= 3


@pytest.mark.skipif(ON_GPU, reason="the operator's tests run on the CPU")
def test_the_operator_is_checked(device):
    for kind in ("own", "int8"):
        call, _ = make_call(kind, torch.float32, device, norm="shared")
        torch.library.opcheck(torch.ops.ropewalk.append_kv.default, tuple(call), raise_exception=True)


@pytest.mark.skipif(ON_GPU, reason="the operator's tests run on the CPU")
@pytest.mark.parametrize("kind", STORED)
def test_compiled_calls_append(kind, device):
    call, _ = make_call(kind, torch.float32, device, norm="heads")
    other, _ = make_call(kind, torch.float32, device)
    caches = {name: getattr(other, name) for name in ("k_cache", "v_cache", "k_scale", "v_scale")}
    if kind == "fp8":
        caches |= {"k_scale": call.k_scale, "v_scale": call.v_scale}
    expected = run(call, None)
    out = torch.compile(run, backend="aot_eager", fullgraph=True)(call._replace(**caches), None)
    assert torch.equal(out, expected)
    written = call.slots[call.slots >= 0]
    page, offset = written // 16, written % 16
    for name in ("k_cache", "v_cache"):
        a, b = (x.view(torch.uint8)[page, offset] for x in (getattr(call, name), caches[name]))
        assert torch.equal(a, b)


EIGHT_ROWS = torch.zeros(8, 32)
REFUSED = {
    "k must be a tensor": ({"k": [1.0]}, TypeError, "k is list"),
    "dims": ({"k": torch.zeros(9, 128)}, ValueError, r"k has shape \(9, 128\)"),
    "dtype": ({"k": torch.zeros(9, K, 64, dtype=torch.float64)}, TypeError, "k has dtype torch.float64"),
    "v dtype": ({"v": torch.zeros(9, K, 32, dtype=torch.bfloat16)}, TypeError, "v has dtype torch.bfloat16"),
    "v heads": ({"v": torch.zeros(9, 3, 32)}, ValueError, "v has shape"),
    "q heads": ({"q": torch.zeros(9, 3, 64)}, ValueError, "q has 3 heads"),
    "q tokens": ({"q": torch.zeros(8, 4, 64)}, ValueError, "q has shape"),
    "more slots": ({"slots": torch.arange(10)}, ValueError, r"slots has shape \(10,\)"),
    "slots dtype": ({"slots": torch.zeros(3)}, TypeError, "slots has dtype torch.float32"),
    "slot outside": ({"slots": torch.tensor([3, 80])}, ValueError, "slots holds 80"),
    "slot below": ({"slots": torch.tensor([3, -2])}, ValueError, "slots holds -2"),
    "cache dtype": ({"k_cache": torch.zeros(5, 16, K, 64, dtype=torch.int16)}, TypeError, "v_cache has dtype"),
    "cache shape": ({"k_cache": torch.zeros(5, 16, K, 32)}, ValueError, "k_cache has shape"),
    "cache heads": ({"v_cache": torch.zeros(5, 16, 1, 32)}, ValueError, "v_cache has shape"),
    "cache pages": ({"v_cache": torch.zeros(4, 16, K, 32)}, ValueError, "v_cache has shape"),
    "expanded": ({"k_cache": torch.zeros(1, 16, K, 64).expand(5, -1, -1, -1)}, ValueError, "k_cache has strides"),
    "scale given": ({"k_scale": torch.ones(())}, ValueError, "k_scale was given"),
    "cos": ({"cos": torch.zeros(50)}, ValueError, "cos has shape"),
    "cos wide": ({"cos": torch.zeros(50, 40), "sin": torch.zeros(50, 40)}, ValueError, "rotary dim 80"),
    "sin": ({"sin": torch.zeros(50, 16)}, ValueError, "sin has shape"),
    "positions": ({"positions": torch.zeros(8, dtype=torch.int64)}, ValueError, "positions has shape"),
    "positions dtype": ({"positions": torch.zeros(9)}, TypeError, "positions has dtype"),
    "few rows": (
        {"positions": None, "cos": torch.zeros(8, 32), "sin": torch.zeros(8, 32)},
        ValueError,
        "cos has 8 rows",
    ),
    "grad": ({"k": torch.zeros(9, K, 64, requires_grad=True)}, ValueError, "k requires grad"),
    "weight": (
        {"k_weight": torch.ones(63), "has_norm": True},
        ValueError,
        "norm.k_weight has shape",
    ),
    "impl": ({"impl": "cuda"}, ValueError, "impl is 'cuda'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused_before_anything_is_written(case):
    changed, kind, message = REFUSED[case]
    call, memory = make_call("own", torch.float32, "cpu")
    before = [x.clone() for x in memory]
    changed = dict(changed)
    impl = changed.pop("impl", None)
    with pytest.raises(kind, match=message):
        run(call._replace(**changed), impl)
    assert all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(memory, before, strict=True))


def test_a_plan_knows_devices_and_flags():
    """A call like one before, but for where a tensor lies or a flag's type, is checked anew."""
    call, _ = make_call("own", torch.float32, "cpu")
    run(call, None)
    for name in ("v", "k_cache", "v_cache", "slots", "cos", "sin", "q", "positions"):
        moved = getattr(call, name).to("meta")
        with pytest.raises(ValueError, match=f"{name} is on meta"):
            run(call._replace(**{name: moved}), None)
    with pytest.raises(TypeError, match="interleaved is 0"):
        run(call._replace(interleaved=0), None)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_scales_are_checked(kind):
    call, _ = make_call(kind, torch.float32, "cpu")
    for name in ("k_scale", "v_scale"):
        scale = getattr(call, name)
        with pytest.raises(ValueError, match=f"{name} is None"):
            run(call._replace(**{name: None}), None)
        with pytest.raises(TypeError, match=f"{name} has dtype torch.bfloat16"):
            run(call._replace(**{name: scale.bfloat16()}), None)
        with pytest.raises(ValueError, match=f"{name} has shape"):
            run(call._replace(**{name: scale[:1]}), None)
    if kind == "int4":
        with pytest.raises(ValueError, match="k has head dim 48"):
            run(call._replace(k=torch.zeros(N, K, 48), q=None, cos=call.cos[:, :8], sin=call.sin[:, :8]), None)


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("dim", [48, 64])
def test_bytes_of_fp8_pages_name_the_view(name, dim):
    """vLLM's fp8 pages are of uint8."""
    x, c = torch.zeros(3, K, dim), torch.ones(9, 4)
    pages = torch.zeros(2, 16, K, dim, dtype=torch.uint8)
    caches = {"k_cache": pages, "v_cache": pages.clone()}
    if name == "v_cache" and dim == 64:
        caches["k_cache"] = pages[..., : dim // 2]
    scales = {"k_scale": torch.tensor(1.0), "v_scale": torch.tensor(1.0)}
    if name == "v_cache" and dim == 64:
        scales["k_scale"] = torch.zeros(2, 16, K, dim // 32, dtype=torch.float16)
    wrong = name if dim == 64 else "k_cache"
    message = rf"{wrong} is of uint8 .*: for fp8 pages pass {wrong}\.view\(torch\.float8_e4m3fn\)"
    with pytest.raises(ValueError, match=message):
        append_kv(x, x, **caches, slots=torch.arange(3), cos=c, sin=c, **scales)
    views = [x.view(torch.float8_e4m3fn) for x in (pages, pages.clone())]
    one = torch.tensor(1.0)
    append_kv(x, x, *views, torch.arange(3), cos=c, sin=c, k_scale=one, v_scale=one)


def caches_of_one_memory():
    """Caches that share an element or more, by what they are; and those that lie between each other."""
    memory = torch.zeros(2 * PAGES * SIZE * K * 64 + 64)
    shape = (PAGES, SIZE, K, 64)
    count = math.prod(shape)
    both, padded = torch.zeros(PAGES, SIZE, K, 2, 64), torch.zeros(PAGES, SIZE * K * 128 + 3)
    wide = torch.zeros(PAGES, SIZE, K, 128)
    of_pages = [padded.as_strided(shape, (padded.stride(0), K * 128, 128, 1), start) for start in (0, 64, 63)]
    yield "one tensor", True, memory[:count].view(shape), memory[:count].view(shape)
    yield "one page later", True, memory[:count].view(shape), memory[SIZE * K * 64 :][:count].view(shape)
    yield "an element later", True, memory[:count].view(shape), memory[1:][:count].view(shape)
    yield "the last element", True, memory[count - 1 :][:count].view(shape), memory[:count].view(shape)
    yield "one after the other", False, memory[:count].view(shape), memory[count:][:count].view(shape)
    yield "before keys", False, memory[count:][:count].view(shape), memory[:count].view(shape)
    yield "in turns", False, both[..., 0, :], both[..., 1, :]
    yield "of one head", False, wide[..., :64], wide[..., 64:]
    yield "a feature of one head", True, wide[..., :64], wide[..., 63:127]
    yield "in turns within padded pages", False, of_pages[0], of_pages[1]
    yield "a feature within padded pages", True, of_pages[0], of_pages[2]


@pytest.mark.parametrize(("shares", "k_cache", "v_cache"), [pytest.param(*x, id=i) for i, *x in caches_of_one_memory()])
def test_caches_that_share_memory_are_refused(shares, k_cache, v_cache):
    call, _ = make_call("own", torch.float32, "cpu", dv=64)
    call = call._replace(k_cache=k_cache, v_cache=v_cache)
    if not shares:
        run(call, None)
        return
    before = k_cache.clone()
    with pytest.raises(ValueError, match="v_cache shares memory with k_cache"):
        run(call, None)
    assert torch.equal(k_cache, before)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_scales_that_share_memory_are_refused(kind):
    call, _ = make_call(kind, torch.float32, "cpu", dv=64)
    with pytest.raises(ValueError, match="v_scale shares memory with k_scale"):
        run(call._replace(v_scale=call.k_scale), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cached_keys_are_moved_with_one_rounding(dtype):
    """The recipe of docs/serving.md: pages rotated back in place, all others bit for bit as they were."""
    k_cache = torch.randn(6, 16, K, 64).to(dtype)
    before, moved, shift = k_cache.clone(), [4, 1], 13
    cos, sin = rope_table(50, inverse_frequencies("default", rotary_dim=64, base=100.0)[0])
    shifts = torch.zeros(6, 16, dtype=torch.int64)
    shifts[moved] = shift
    apply_rope(
        k_cache.flatten(0, 1), None, cos, sin, positions=shifts.flatten(), layout="thd", inverse=True, inplace=True
    )
    others = [0, 2, 3, 5]
    assert torch.equal(k_cache[others], before[others])
    a, b = before[moved].double().chunk(2, dim=-1)
    c, s = cos[shift].double(), sin[shift].double()
    expected = torch.cat((a * c + b * s, b * c - a * s), dim=-1)
    budget = 0.51 * torch.finfo(dtype).eps * expected.abs() + 1e-6
    assert ((k_cache[moved].double() - expected).abs() <= budget).all()
