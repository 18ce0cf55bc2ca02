"""The operands of 8-bit products: the kernels' against their definition in float64."""

import math

import pytest
import torch
from helpers.modes import INTERPRETED, needs_kernels

from ropewalk.ops.attention.call import AttentionCall, FarQK, FarRange, FarTables, Precision, RopeTable, Tables
from ropewalk.ops.attention.quantise.call import BLOCK
from ropewalk.ops.launch.steps import AT_ONCE
from ropewalk.testing import poisoned_memory, unchanged

if INTERPRETED or torch.cuda.is_available():
    from ropewalk.ops.attention.quantise import launch

pytestmark = [
    needs_kernels,
    pytest.mark.filterwarnings(
        "ignore:invalid value encountered:RuntimeWarning"
    ),  # the interpreter subtracts infinities
]
INT8 = Precision(float8_values=False, hadamard=True, centre=True)
FLOAT8 = INT8._replace(float8_values=True)


# === the definition ===


def rotate(x, table, tables):
    """Rotate x (B, H, T, D) in float64."""
    x = x.double()
    if table is None:
        return x
    rotary_dim = 2 * table.cos.shape[2]
    width = tables.pair_block or rotary_dim
    features = torch.arange(rotary_dim, device=x.device)
    second = features % 2 == 1 if tables.interleaved else features % width >= width // 2
    a, b = (features[chosen] + tables.rotary_offset for chosen in (~second, second))
    cos, sin = (t.double()[:, None] for t in table)
    y = x.clone()
    y[..., a] = x[..., a] * cos - x[..., b] * sin
    y[..., b] = x[..., b] * cos + x[..., a] * sin
    return y


def transform(x, precision):
    """Apply the Hadamard transform; the features of 64 come back in the order in which kernels store them."""
    if precision.hadamard:
        n = x.shape[-1] & -x.shape[-1]
        matrix = torch.ones(1, 1, dtype=x.dtype, device=x.device)
        while len(matrix) < n:
            matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
        x = (x.unflatten(-1, (-1, n)) @ matrix / math.sqrt(n)).flatten(-2)
    if x.shape[-1] == 64:
        x = x.unflatten(-1, (2, 4, 8)).transpose(-3, -2).flatten(-3)
    return x


def sampled(call, begin, stop):
    """Return the keys whose mean is the shift, of those that exist."""
    length = max(stop - begin, 0)
    if call.causal or call.window_right == 0:
        return range(begin, begin + min(length, 128))
    return [begin + (i if length <= 256 else i * length // 256) for i in range(min(length, 256))]


def spans(call):
    """Yield each sequence's batch row, queries, first key, number of keys, those that exist, block and number."""
    if call.cu_seqlens_q is not None:
        q, k = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
        for s in range(len(q) - 1):
            keys = k[s + 1] - k[s]
            yield 0, slice(q[s], q[s + 1]), k[s], keys, (0, keys), k[s] // BLOCK + s, s
        return
    keys = call.k.shape[2]
    for b in range(call.q.shape[0]):
        begin = 0 if call.key_starts is None else max(int(call.key_starts[b]), 0)
        stop = keys if call.key_lengths is None else min(int(call.key_lengths[b]), keys)
        yield b, slice(None), 0, keys, (begin, stop), 0, b


def check_units(unit, largest, floor=2.0**-40):
    rtol = 2e-6 if INTERPRETED else 1e-5  # kernels transform sums of two numbers of bfloat16
    torch.testing.assert_close(unit.double(), largest.clamp(min=floor), rtol=rtol, atol=0, equal_nan=True)


def check_integers(x, unit, exact):
    """Numbers are nearest ones; one where the exact quotient is close to a half may be its other neighbour."""
    quotient = exact / unit.double()
    off = (x.double() - quotient).abs()
    assert ((off <= 0.5 + 2.0**-10) | off.isnan()).all()
    assert (x >= -127).all()


def check(call, permuted=False):
    """Quantise, and compare all but values themselves; return the operands."""
    precision, device = call.quantised, call.q.device
    with unchanged((call.q, call.k, call.v)), poisoned_memory():
        result = launch.quantise(call, AT_ONCE, permuted=permuted)
    tables, far = call.tables, call.far
    is_mapped = tables.q is not None and tables.k is not None
    near_k = rotate(call.k, tables.k if is_mapped else None, tables)
    if is_mapped and tables.feature_weights is not None:
        near_k *= tables.feature_weights.double()
    maps = [(result.q, rotate(call.q, tables.q, tables), result.k, near_k)]
    if far is not None and far.given is not None:
        q_past, q_future, k_far = (None if x is None else x.double() for x in far.given)
        maps += [(result.q_past, q_past, result.k_far, k_far), (result.q_future, q_future, result.k_far, k_far)]
    elif far is not None:
        k_far = rotate(call.k, far.tables.k, tables)
        for mine, table in ((result.q_past, far.tables.q_past), (result.q_future, far.tables.q_future)):
            maps.append((mine, None if table is None else rotate(call.q, table, tables), result.k_far, k_far))
    for mine_q, q, mine_k, k in maps:
        assert (mine_q is None) == (q is None)
        if q is None:
            continue
        assert mine_q.x.shape == q.shape
        assert mine_k.x.shape == (*k.shape[:2], mine_k.unit.shape[2] * BLOCK, k.shape[3])
        heads_per_key = q.shape[1] // k.shape[1]
        for b, rows, first, keys, (begin, stop), block, _ in spans(call):
            x = k[b, :, first : first + keys]
            mean = x[:, list(sampled(call, begin, stop))].mean(1, keepdim=True)
            mean = torch.zeros_like(mean) if not precision.centre or stop <= begin else mean
            exists = torch.zeros(keys, dtype=torch.bool, device=device)
            exists[begin : max(stop, begin)] = True
            y = torch.where(exists[:, None], transform(x - mean, precision), 0)
            n_blocks = -(-keys // BLOCK)
            y = torch.nn.functional.pad(y, (0, 0, 0, n_blocks * BLOCK - keys))
            mine = mine_k.unit[b, :, block : block + n_blocks]
            check_units(mine, y.abs().unflatten(1, (n_blocks, 16, 4, 2)).amax((2, 4, 5)) / 127)
            unit = mine[:, :, None, :, None].expand(-1, -1, 16, -1, 2).reshape(len(y), -1, 1)
            stored = mine_k.x[b, :, block * BLOCK : (block + n_blocks) * BLOCK]
            check_integers(stored, unit, y)
            missing = torch.ones(n_blocks * BLOCK, dtype=torch.bool, device=device)
            missing[:keys] = ~exists
            assert (stored[:, missing] == 0).all()
            x = q[b, :, rows]
            products = (x * mean.repeat_interleave(heads_per_key, 0)).sum(-1)
            size = float(x.norm(dim=-1).max() * mean.norm(dim=-1).max()) if x.numel() else 0
            atol = (2e-7 if INTERPRETED else 2e-6) * size + 1e-7
            torch.testing.assert_close(mine_q.shift[b, :, rows].double(), products, rtol=1e-6, atol=atol)
            y = transform(x, precision)
            check_units(mine_q.unit[b, :, rows], y.abs().amax(-1) / 127)
            check_integers(mine_q.x[b, :, rows], mine_q.unit[b, :, rows, None], y)
    assert (result.v is not None) == precision.float8_values
    if result.v is not None:
        check_values(call, result.v)
    return result


def check_values(call, mine):
    """Compare units, means and zeros; the interpreter rounds to e4m3 wrong."""
    blocks = mine.unit.shape[2]
    assert mine.x.shape == (*call.v.shape[:2], call.v.shape[3], blocks * BLOCK)
    for b, _, first, keys, (begin, stop), block, number in spans(call):
        x = call.v[b, :, first : first + keys].double()
        mean = x[:, list(sampled(call, begin, stop))].mean(1, keepdim=True)
        mean = torch.zeros_like(mean) if not call.quantised.centre or stop <= begin else mean
        torch.testing.assert_close(mine.mean[number].double(), mean[:, 0], rtol=1e-5, atol=1e-5)
        y = x - mean
        y[:, : max(begin, 0)] = 0
        y[:, max(stop, begin) :] = 0
        n_blocks = -(-keys // BLOCK)
        y = torch.nn.functional.pad(y, (0, 0, 0, n_blocks * BLOCK - keys))
        check_units(
            mine.unit[b, :, block : block + n_blocks], y.unflatten(1, (n_blocks, BLOCK)).abs().amax((2, 3)) / 448
        )


# === calls ===


def table_of(device, tokens, rotary_dim, batch=1):
    angles = 3 * torch.randn(batch, tokens, rotary_dim // 2, device=device)
    return RopeTable(angles.cos(), angles.sin())


def draw(
    device, tokens=140, keys=None, head_dim=64, v_head_dim=None, batch=1, heads=2, kv_heads=1, quantised=INT8, **fields
):
    keys = tokens if keys is None else keys
    shapes = ((heads, tokens, head_dim), (kv_heads, keys, head_dim), (kv_heads, keys, v_head_dim or head_dim))
    q, k, v = (torch.randn(batch, *shape, device=device).half() for shape in shapes)
    k += 3 * torch.randn(head_dim, device=device).half()
    return AttentionCall(q=q, k=k, v=v, precision=quantised.as_text(), **fields)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
def test_head_dims(device, head_dim):
    table = table_of(device, 140, head_dim)
    check(draw(device, head_dim=head_dim, tables=Tables(table, table), causal=True))


@pytest.mark.parametrize(
    ("rotary_dim", "pairing"),
    [
        (64, {"interleaved": True}),
        (32, {}),
        (32, {"rotary_offset": 32}),
        (48, {"rotary_offset": 8, "interleaved": True}),
        (64, {"pair_block": 16}),
    ],
)
@pytest.mark.parametrize("head_dim", [64, 192])
def test_pairings(device, head_dim, rotary_dim, pairing):
    table = table_of(device, 20, rotary_dim)
    check(draw(device, 20, head_dim=head_dim, tables=Tables(table, table, **pairing)))


def test_no_rotation_and_rotated_keys(device):
    table = table_of(device, 20, 64)
    check(draw(device, 20))
    check(draw(device, 20, tables=Tables(table)))


def test_weights(device):
    table, weights = table_of(device, 20, 64), torch.rand(64, device=device)
    check(draw(device, 20, tables=Tables(table, table, weights)))
    table, weights = table_of(device, 20, 80), torch.rand(80, device=device)
    check(draw(device, 20, head_dim=80, tables=Tables(table, table, weights)))


@pytest.mark.parametrize("hadamard", [True, False])
@pytest.mark.parametrize("centre", [True, False])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_options(device, hadamard, centre, head_dim):
    check(draw(device, 20, head_dim=head_dim, quantised=Precision(True, hadamard, centre)))


@pytest.mark.parametrize("options", [{"causal": True}, {"window_left": 9, "window_right": 0}, {}])
def test_means_of_long_sequences(device, options):
    """Later keys have other means, so that the wrong sample shows."""
    call = draw(device, 5, 700, quantised=FLOAT8, **options)
    drift = torch.arange(700, device=device).sqrt()[:, None].half() / 8
    check(call._replace(k=call.k + drift, v=call.v + drift))


@pytest.mark.parametrize("causal", [True, False])
def test_missing_keys_hold_anything(device, causal):
    tokens = 300
    starts, lengths = torch.tensor([0, 130, 7, 260], device=device), torch.tensor([300, 301, 0, 270], device=device)
    table = table_of(device, tokens, 64, batch=4)
    call = draw(device, tokens, batch=4, tables=Tables(table, table), quantised=FLOAT8, causal=causal)
    call = call._replace(key_starts=starts, key_lengths=lengths)
    index = torch.arange(tokens, device=device)
    missing = ((index < starts[:, None]) | (index >= lengths[:, None]))[:, None, :, None]
    poisoned = call._replace(k=call.k.masked_fill(missing, math.nan), v=call.v.masked_fill(missing, math.inf))
    mine, plain = check(poisoned), launch.quantise(call, AT_ONCE, permuted=False)
    for field, other in zip(mine.q + mine.k + mine.v, plain.q + plain.k + plain.v, strict=True):
        assert torch.equal(field.view(torch.uint8), other.view(torch.uint8))
    assert (mine.v.x[2].float() == 0).all()


@pytest.mark.parametrize("causal", [True, False])
def test_packed(device, causal):
    """Each sequence has the numbers of a call of its own."""
    lengths_k = torch.tensor([1, 127, 128, 300, 0, 3], device=device)
    lengths_q = torch.tensor([1, 127, 0, 40, 2, 3], device=device)
    cu_q, cu_k = (torch.nn.functional.pad(x.cumsum(0), (1, 0)).int() for x in (lengths_q, lengths_k))
    queries, keys = int(cu_q[-1]) + 2, int(cu_k[-1]) + 2  # the last ones are of no sequence
    tables = Tables(table_of(device, queries, 64), table_of(device, keys, 64))
    call = draw(device, queries, keys, tables=tables, quantised=FLOAT8, causal=causal)
    mine = check(call._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k))
    rows, columns = slice(int(cu_q[3]), int(cu_q[4])), slice(int(cu_k[3]), int(cu_k[4]))
    alone = call._replace(
        **{name: getattr(call, name)[:, :, part] for name, part in (("q", rows), ("k", columns), ("v", columns))},
        tables=Tables(
            *(RopeTable(*(x[:, part] for x in t)) for t, part in zip(tables[:2], (rows, columns), strict=True))
        ),
    )
    other = launch.quantise(alone, AT_ONCE, permuted=False)
    first = int(cu_k[3]) // BLOCK + 3
    for field, expected in zip(mine.q, other.q, strict=True):
        assert torch.equal(field[:, :, rows], expected)
    assert torch.equal(mine.k.x[:, :, first * BLOCK :][:, :, : expected_keys(other)], other.k.x)
    assert torch.equal(mine.k.unit[:, :, first : first + 3], other.k.unit)
    v = mine.v.x[..., first * BLOCK :][..., : expected_keys(other)]
    assert torch.equal(v.view(torch.uint8), other.v.x.view(torch.uint8))


def expected_keys(quantized):
    return quantized.k.x.shape[2]


@pytest.mark.parametrize("has_future", [True, False])
def test_two_ranges(device, has_future):
    table, past, future, far = (table_of(device, 20, 64) for _ in range(4))
    tables = FarTables(past, future if has_future else None, far)
    check(draw(device, 20, tables=Tables(table, table), far=FarRange(4, tables), quantised=FLOAT8))
    check(draw(device, 20, tables=Tables(table, table), far=FarRange(4, tables._replace(k=None))))
    call = draw(device, 20)
    given = FarQK(torch.randn_like(call.q), torch.randn_like(call.q) if has_future else None, torch.randn_like(call.k))
    check(call._replace(far=FarRange(4, None, given)))


def test_strides(device):
    """Heads behind tokens, heads beside others, one row for the batch, features that are not dense."""
    table = table_of(device, 20, 64)
    call = draw(device, 20, batch=2, heads=4, kv_heads=2, tables=Tables(table, table), quantised=FLOAT8)
    q = torch.randn(2, 20, 8, 64, device=device).half()[:, :, 1:5].transpose(1, 2)
    k = torch.randn(1, 20, 2, 72, device=device).half()[..., 8:].transpose(1, 2).expand(2, -1, -1, -1)
    v = torch.randn(2, 2, 48, 20, device=device).half().transpose(2, 3)
    check(call._replace(q=q, k=k, v=v))


def test_programs_of_several_heads(device, monkeypatch):
    monkeypatch.setattr(launch, "_PROGRAMS", 1)
    table = table_of(device, 20, 64)
    check(draw(device, 20, heads=15, kv_heads=5, tables=Tables(table, table), quantised=FLOAT8))


def test_tokens_behind_the_table(device):
    """A table of all positions is cut to the queries' rows."""
    table = table_of(device, 30, 64)
    call = draw(device, 5, 20, tables=Tables(table, q_start=-4))
    mine = launch.quantise(call, AT_ONCE, permuted=False)
    rows = RopeTable(*(x[:, 19:24] for x in table))
    other = launch.quantise(call._replace(tables=Tables(rows)), AT_ONCE, permuted=False)
    assert all(map(torch.equal, mine.q, other.q))


def test_no_tokens(device):
    for queries, keys, batch in ((0, 20, 1), (20, 0, 1), (20, 20, 0)):
        mine = launch.quantise(draw(device, queries, keys, batch=batch, quantised=FLOAT8), AT_ONCE, permuted=False)
        assert mine.k.x.shape == (batch, 1, -(-keys // BLOCK) * BLOCK, 64)
        assert (mine.q.shift == 0).all() or keys > 0


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("hadamard", [True, False])
def test_numbers_that_are_not_finite(device, number, hadamard):
    """Their unit is NaN; those of others are theirs."""
    precision = Precision(True, hadamard, True)
    call = draw(device, 300, quantised=precision, causal=True)
    plain = launch.quantise(call, AT_ONCE, permuted=False)
    for x, head, token in ((call.q, 1, 17), (call.k, 0, 131), (call.v, 0, 299)):
        x[0, head, token, 5] = number
    mine = launch.quantise(call, AT_ONCE, permuted=False)
    for field, other, at in (
        (mine.q, plain.q, (0, 1, 17)),
        (mine.k, plain.k, (0, 0, 1, 1)),
        (mine.v, plain.v, (0, 0, 2)),
    ):
        expected = other.unit.clone()
        expected[at] = math.nan
        torch.testing.assert_close(field.unit, expected, rtol=0, atol=0, equal_nan=True)
    assert (mine.v.x[..., 256:].float() == 0).all()
    assert not mine.q.shift[0, 1, 17].isfinite()
    call.k[0, 0, 3, 5] = number  # one of those in the mean
    mine = launch.quantise(call, AT_ONCE, permuted=False)
    assert mine.k.unit.isnan().all()
    assert not mine.q.shift.isfinite().any()


@pytest.mark.parametrize("permuted", [True, False])
@pytest.mark.parametrize("v_head_dim", [16, 64, 80, 128, 256])
def test_values(device, permuted, v_head_dim):
    """Small integers are exact in e4m3, in blocks whose unit is 1."""
    call = draw(device, 200, v_head_dim=v_head_dim, quantised=FLOAT8._replace(centre=False))
    v = torch.randint(-8, 9, call.v.shape, device=device)
    v[:, :, ::128, 0] = 448
    mine = check(call._replace(v=v.half()), permuted).v
    n = torch.arange(2 * BLOCK, device=device)
    if permuted:
        n = n // 16 * 16 + n // 2 % 2 * 8 + n // 4 % 4 * 2 + n % 2
    expected = torch.nn.functional.pad(v, (0, 0, 0, 56))[:, :, n].transpose(2, 3)
    assert torch.equal(mine.x.float(), expected.float())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
def test_rounding_of_values(device, dtype, head_dim):
    call = draw(device, 300, head_dim=head_dim, quantised=FLOAT8)
    call = call._replace(q=call.q.to(dtype), k=call.k.to(dtype), v=call.v.to(dtype))
    mine = check(call).v
    mean, unit = mine.mean[:, :, None], mine.unit.repeat_interleave(BLOCK, 2)[:, :, :300, None]
    exact = (call.v.float() - mean) * (1 / unit)
    off = (mine.x[..., :300].float().transpose(2, 3) - exact.to(torch.float8_e4m3fn).float()).abs()
    assert (off > 0).float().mean() < 1e-3
    assert (off <= exact.abs() / 8 + 2**-8).all()
