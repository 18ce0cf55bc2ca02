"""8-bit products in the reference: its numbers are those of an oracle in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import eight_bits

from ropewalk import Alibi, BlockLists, ExpoSB, NoPosition, QuantizedProducts, ReRope, Rope, T5Bias, attention
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.quantise.call import Quantized
from ropewalk.ops.attention.reference import quantise_call

H, K, D = 4, 2, 16
PRECISIONS: dict[str, Any] = {
    "int8": "int8",
    "int8-fp8": "int8-fp8",
    "not turned": QuantizedProducts(hadamard=False),
    "not centred": QuantizedProducts(values="float8", centre=False),
}


def options_of(precision: Any) -> dict[str, Any]:
    """The oracle's keywords for a precision."""
    if isinstance(precision, str):
        precision = QuantizedProducts(values="float8" if precision == "int8-fp8" else "16-bit")
    return {"values": precision.values, "turns": precision.hadamard, "centre": precision.centre}


def draw(queries: int, keys: int, width: int = D, value_width: int | None = None, heads: int = H) -> list[torch.Tensor]:
    """q, k and v of one sequence, (heads, T, D): their channels and tokens have magnitudes of their own."""
    shapes = ((heads, queries, width), (K, keys, width), (K, keys, value_width or width))
    xs = [torch.randn(*shape, dtype=torch.float64) for shape in shapes]
    return [x * (1 + torch.rand(x.shape[-1]) * 3) + torch.randn(x.shape[-1]) for x in xs]


def check(xs: list[torch.Tensor], precision: Any, of_oracle: dict[str, Any], **keywords: Any) -> None:
    """A dense call of one row gives what the oracle does."""
    found = attention(
        *(x[None] for x in xs), layout="bhtd", precision=precision, return_lse=True, return_max_logits=True, **keywords
    )
    expected = eight_bits.attend(*xs, **options_of(precision), **of_oracle)
    torch.testing.assert_close(found[0][0], expected[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[1][0], expected[1], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[2].double(), expected[2], rtol=1e-5, atol=1e-5)


T5 = T5Bias(torch.linspace(-1, 1, 8 * H, dtype=torch.float32).view(8, H))
# Queries, keys, D and Dv; the scheme; and keywords of both.
CALLS: dict[str, tuple[tuple[int, ...], Any, dict[str, Any]]] = {
    "full": ((30, 300, 16, 16), NoPosition(), {}),
    "causal": ((40, 150, 16, 8), Rope(), {"causal": True}),
    "window": ((20, 270, 20, 24), Rope(), {"window": (60, 3)}),
    "window without a future": ((20, 140, 48, 16), NoPosition(), {"window": (60, 0)}),
    "alibi": ((9, 33, 6, 6), Alibi(), {"causal": True, "softcap": 3.0}),
    "t5": ((9, 33, 5, 5), T5, {}),
    "exposb": ((9, 140, 16, 16), ExpoSB(), {"causal": True}),
    "rerope": ((20, 140, 16, 16), ReRope(30), {}),
    "causal rerope": ((20, 140, 16, 16), ReRope(30), {"causal": True}),
    "odd": ((1, 1, 1, 1), NoPosition(), {"causal": True}),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_what_the_oracle_does(name, precision):
    sizes, scheme, keywords = CALLS[name]
    check(draw(*sizes), PRECISIONS[precision], {"scheme": scheme, **keywords}, position=scheme, **keywords)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_starts_sinks_masks_and_blocks(precision, causal):
    start, end = 37, 301
    q, k, v = draw(70, 310)
    for x in (k, v):  # padding
        x[:, :start], x[:, end:] = torch.nan, 1e38
    mask, sinks = torch.rand(H, 70, 310) < 0.3, torch.linspace(-2, 3, H).double()
    mask[:, 5] = False
    bounds = {"key_starts": torch.tensor([start]), "key_lengths": torch.tensor([end])}
    of_both = {"causal": causal, "sinks": sinks}
    of_oracle = {"scheme": Rope(), "mask": mask, "start": start, "end": end, **of_both}
    check([q, k, v], PRECISIONS[precision], of_oracle, position=Rope(), mask=mask[None], **bounds, **of_both)
    lists = BlockLists(torch.tensor([[[1, 1]]]), torch.tensor([[[[0], [2]]]]), block_q=64, block_k=128)
    listed = torch.zeros(70, 310, dtype=torch.bool)
    listed[:64, :128] = listed[64:, 256:] = True
    of_oracle["mask"] = listed
    check([q, k, v], PRECISIONS[precision], of_oracle, position=Rope(), blocks=lists, **bounds, **of_both)


@pytest.mark.parametrize("precision", ["int8", "int8-fp8"])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_are_quantised_as_if_alone(precision, causal):
    queries, keys, rest = (3, 0, 140, 5, 129), (130, 4, 140, 0, 257), 7
    xs = [draw(m, n) for m, n in zip(queries, keys, strict=True)]
    packed = [torch.cat(parts, 1).transpose(0, 1) for parts in zip(*xs, strict=True)]
    packed = [torch.cat((x, torch.full((rest, *x.shape[1:]), torch.nan, dtype=x.dtype))) for x in packed]
    bounds = [torch.tensor((0, *lengths)).cumsum(0) for lengths in (queries, keys)]
    given = {"causal": causal, "position": Rope(), "precision": precision}
    of_thd = {"layout": "thd", "cu_seqlens_q": bounds[0], "cu_seqlens_k": bounds[1]}
    out, lse = attention(*packed, **given, **of_thd, return_lse=True)
    together = quantise_call(make_call(*packed, **given, **of_thd))
    for number, (m, n) in enumerate(zip(queries, keys, strict=True)):
        expected = eight_bits.attend(*xs[number], scheme=Rope(), causal=causal, **options_of(precision))
        rows = slice(int(bounds[0][number]), int(bounds[0][number]) + m)
        torch.testing.assert_close(out[rows].transpose(0, 1), expected[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(lse[:, rows], expected[1], rtol=1e-9, atol=1e-9)
        alone = quantise_call(make_call(*(x[None] for x in xs[number]), **given, layout="bhtd"))
        check_same_numbers(together, alone, rows, int(bounds[1][number]) // 128 + number, -(-n // 128), number)
    assert (out[-rest:] == 0).all()


def check_same_numbers(
    together: Quantized, alone: Quantized, queries: slice, first_block: int, n_blocks: int, sequence: int = 0
) -> None:
    """The numbers of some queries and blocks of a call are those of another call, bit by bit."""
    keys = slice(128 * first_block, 128 * (first_block + n_blocks))
    blocks = slice(first_block, first_block + n_blocks)
    n_queries = queries.stop - queries.start
    for x, y in zip(together.q, alone.q, strict=True):
        assert torch.equal(x[:, :, queries], y[:, :, :n_queries])
    assert torch.equal(together.k.x[:, :, keys], alone.k.x[:, :, : 128 * n_blocks])
    assert torch.equal(together.k.unit[:, :, blocks], alone.k.unit[:, :, :n_blocks])
    assert (together.v is None) is (alone.v is None)
    if together.v is not None and alone.v is not None:
        mine, other = (x.view(torch.uint8) for x in (together.v.x, alone.v.x))
        assert torch.equal(mine[..., keys], other[..., : 128 * n_blocks])
        assert torch.equal(together.v.unit[:, :, blocks], alone.v.unit[:, :, :n_blocks])
        assert torch.equal(together.v.mean[sequence], alone.v.mean[0])


@pytest.mark.parametrize("precision", ["int8", "int8-fp8"])
@pytest.mark.parametrize("scheme", [Rope(), ReRope(50)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prefix_and_a_chunk_have_the_same_numbers(precision, scheme, dtype):
    xs = [x[None].to(dtype) for x in draw(400, 400)]
    keywords = {"causal": True, "position": scheme, "precision": precision, "layout": "bhtd"}
    prefix = [x[:, :, :256] for x in xs]
    later = [xs[0][:, :, 256:], *xs[1:]]
    whole = quantise_call(make_call(*xs, **keywords))
    check_same_numbers(whole, quantise_call(make_call(*prefix, **keywords)), slice(0, 256), 0, 2)
    check_same_numbers(whole, quantise_call(make_call(*later, **keywords)), slice(256, 400), 0, 4)
    out, lse = attention(*xs, **keywords, return_lse=True)
    xs[1][:, :, 256:] = xs[2][:, :, 256:] = torch.nan
    first, first_lse = attention(*prefix, **keywords, return_lse=True)
    poisoned, poisoned_lse = attention(*xs, **keywords, return_lse=True)
    for x, y in ((first, out), (first_lse, lse), (poisoned, out), (poisoned_lse, lse)):
        torch.testing.assert_close(x[:, :, :256], y[:, :, :256])
    assert poisoned[:, :, 256:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_features_are_quantised_in_float32(dtype):
    """Not in the dtype of q, which would be half a percent off: they are the numbers of the float32 call."""
    xs = [x[None].to(dtype) for x in draw(140, 140)]
    keywords = {"causal": True, "position": Rope(), "precision": "int8-fp8", "layout": "bhtd"}
    low, high = (quantise_call(make_call(*ys, **keywords)) for ys in (xs, [x.float() for x in xs]))
    check_same_numbers(low, high, slice(0, 140), 0, 2)
    out, expected = attention(*xs, **keywords), attention(*(x.float() for x in xs), **keywords)
    assert torch.equal(out, expected.to(dtype))


def test_numbers_lie_as_the_record_says():
    q, k, v = (x[None].float() for x in draw(20, 140, 16, 24))
    found = quantise_call(make_call(q, k, v, layout="bhtd", position=ReRope(30), precision="int8-fp8"))
    queries = [found.q, found.q_past, found.q_future]
    assert [(x.x.shape, x.x.dtype, x.unit.shape, x.shift.shape) for x in queries if x is not None] == [
        ((1, H, 20, 16), torch.int8, (1, H, 20), (1, H, 20))
    ] * 3
    for keys in (found.k, found.k_far):
        assert keys is not None
        assert (keys.x.shape, keys.x.dtype, keys.unit.shape) == ((1, K, 256, 16), torch.int8, (1, K, 2, 4))
        assert keys.x.abs().amax() == 127
        assert (keys.x[:, :, 140:] == 0).all()
    assert found.v is not None
    assert (found.v.x.shape, found.v.x.dtype) == ((1, K, 24, 256), torch.float8_e4m3fn)
    assert found.v.x.float().abs().amax() == 448
    assert (found.v.unit.shape, found.v.mean.shape) == ((1, K, 2), (1, K, 24))


# === numbers that are none, and zeros ===


@pytest.mark.parametrize("precision", ["int8", "int8-fp8"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_number_that_is_none_spoils_what_it_enters(precision, bad, dtype):
    # Window without a future: the first 128 keys enter the shift. Key 200 is in block 1, group 0.
    keywords = {"window": (30, 0), "precision": precision, "layout": "bhtd", "return_lse": True}
    index = torch.arange(300)
    q, k, v = (x[None].to(dtype) for x in draw(300, 300))

    def spoiled(name: str, row: int) -> torch.Tensor:
        xs = {"q": q.clone(), "k": k.clone(), "v": v.clone()}
        xs[name][:, :, row, 3] = bad
        out, lse = attention(*xs.values(), **keywords)
        rows = out.isnan().any(-1)
        assert torch.equal(rows, lse.isnan() | rows)
        spoils_one = name == "v" and precision == "int8"
        assert torch.equal(out.isnan().sum(-1), rows * (1 if spoils_one else D))
        assert out[~rows].isfinite().all()
        return rows[0, 0]

    attends_group = [
        (((m - 30 <= index) & (index <= m)) & (index // 128 == 1) & (index % 8 // 2 == 0)).any() for m in index
    ]
    assert torch.equal(spoiled("k", 200), torch.stack(attends_group))
    assert spoiled("k", 100).all()  # of the shift
    assert torch.equal(spoiled("q", 40), index == 40)
    if precision == "int8":
        assert torch.equal(spoiled("v", 200), (index >= 200) & (index <= 230))
    else:
        assert torch.equal(spoiled("v", 200), (index >= 128) & (index < 256 + 30))
        assert spoiled("v", 100).all()


def test_zeros_have_units_and_padding_may_hold_anything():
    q, k, v = (torch.zeros(1, 40, 2, 8) for _ in "qkv")
    v[:] = torch.arange(40)[None, :, None, None]
    for precision in ("int8", "int8-fp8"):
        out, lse = attention(q, k, v, precision=precision, return_lse=True)
        torch.testing.assert_close(out, torch.full_like(out, 19.5), rtol=0.02, atol=0)
        torch.testing.assert_close(lse, torch.full_like(lse, 40.0).log())
        nothing, empty = attention(q, k, v, precision=precision, return_lse=True, key_lengths=torch.tensor([0]))
        assert (nothing == 0).all()
        assert (empty == -torch.inf).all()
