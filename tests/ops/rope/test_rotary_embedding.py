"""vLLM's operator: its values over the shapes of vLLM's own test, what it refuses, and what looks on while it runs."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from helpers.modes import ON_GPU
from helpers.rope_definition import random_tables, random_tensor, whole_memory
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ropewalk import rotary_embedding
from ropewalk.testing import assert_close_to_truth, unchanged

OPERATOR = torch.ops.ropewalk.rotary_embedding.default
LAYOUTS = ("t-hd", "t-h-d", "b-t-hd", "b-t-h-d")
HEADS = 17
ROWS = 512


@pytest.fixture(autouse=True)
def _forget_what_was_compiled():
    torch._dynamo.reset()


@pytest.fixture
def cuda(device):
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    return device


def equation(
    x: Tensor, positions: Tensor, cache: Tensor, head_size: int, is_neox: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Rotate x in `dtype`, (T, H, D): pair (a, b) becomes (a·cos − b·sin, a·sin + b·cos).

    Also says which tokens have a position inside the table; the others are NaN.
    """
    rotated = x.to(dtype).reshape(positions.numel(), -1, head_size).clone()
    row = positions.flatten().long()
    inside = (row >= 0) & (row < len(cache))
    cos, sin = cache.to(dtype)[torch.where(inside, row, 0)][:, None].chunk(2, dim=-1)
    R = cache.shape[1]
    first, second = (slice(R // 2), slice(R // 2, R)) if is_neox else (slice(0, R, 2), slice(1, R, 2))
    a, b = rotated[..., first].clone(), rotated[..., second].clone()
    rotated[..., first] = a * cos - b * sin
    rotated[..., second] = a * sin + b * cos
    rotated[~inside] = torch.nan
    return rotated, inside


def random_cache(
    rotary_dim: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", rows: int = ROWS
) -> Tensor:
    """A table in which no row passes for another."""
    return torch.cat(random_tables(rows, rotary_dim // 2, device=device), dim=-1).to(dtype)


def random_positions(*shape: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(ROWS, shape, dtype=dtype).to(device)


def make(layout, batch, tokens, heads, head_size, *, padding=0, dtype=torch.float32, device="cpu") -> Tensor:
    """Random heads, sliced out of memory with `padding` more features on either side."""
    lead = (batch * tokens,) if layout.startswith("t") else (batch, tokens)
    *lead, width = (*lead, heads * head_size) if layout.endswith("hd") else (*lead, heads, head_size)
    wide = torch.randn(*lead, width + 2 * padding, device=device).to(dtype)
    return wide[..., padding : padding + width]


def positions_of(layout, batch, tokens, device="cpu") -> Tensor:
    return random_positions(*((batch * tokens,) if layout.startswith("t") else (batch, tokens)), device=device)


def check(positions, query, key, head_size, cache, is_neox=True, function=rotary_embedding) -> None:
    """Rotate, and compare with the equation in float64; then undo it: the rest of the memory is what it was."""
    xs = [x for x in (query, key) if x is not None]
    before = [(x.clone(), whole_memory(x).clone(), x._version) for x in xs]
    with unchanged([positions, cache]):
        assert function(positions, query, key, head_size, cache, is_neox) is None
    for x, (old, _, version) in zip(xs, before, strict=True):
        assert x._version > version
        truth, inside = equation(old, positions, cache, head_size, is_neox, torch.float64)
        at_least_float32 = torch.promote_types(x.dtype, torch.float32)
        baseline, _ = equation(old, positions, cache, head_size, is_neox, at_least_float32)
        actual = x.reshape(truth.shape)
        assert_close_to_truth(actual, truth, baseline.to(x.dtype))
        passed_on = actual[inside][..., cache.shape[1] :]
        assert torch.equal(passed_on, old.reshape(truth.shape)[inside][..., cache.shape[1] :])
    for x, (old, _, _) in zip(xs, before, strict=True):
        x.copy_(old)
    for x, (_, memory, _) in zip(xs, before, strict=True):
        assert torch.equal(whole_memory(x), memory), "the memory around was written to"


# The shapes and dtypes of vLLM's own test of this operator; its long sequences are for GPUs. The results are held
# against float64 within the error of float32 arithmetic, and not against vLLM's path in bfloat16, which rounds more.
@pytest.mark.parametrize("padding", [0, 16], ids=["dense", "padded"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("batch", "tokens"), [(5, 11), (2, 8192)] if ON_GPU else [(5, 11)])
@pytest.mark.parametrize("rotary_dim", [None, 32])
@pytest.mark.parametrize("head_size", [64, 80, 120, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
def test_shapes_of_vllms_test(is_neox, dtype, head_size, rotary_dim, batch, tokens, layout, padding, device):
    positions = positions_of(layout, batch, tokens, device)
    cache = random_cache(rotary_dim or head_size, dtype, device)
    how = {"padding": padding, "dtype": dtype, "device": device}
    for with_key in (True, False):
        query = make(layout, batch, tokens, HEADS, head_size, **how)
        key = make(layout, batch, tokens, HEADS, head_size, **how) if with_key else None
        check(positions, query, key, head_size, cache, is_neox)


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_tokens_than_positions(layout, is_neox, device):
    query, key = (make(layout, 2, 2 * ROWS, heads, 16, device=device) for heads in (2, 1))
    check(positions_of(layout, 2, 2 * ROWS, device), query, key, 16, random_cache(8, device=device), is_neox)


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("heads", [(8, 2), (6, 1), (6, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fewer_key_heads(layout, heads, is_neox, device):
    query, key = (make(layout, 2, 5, n, 64, device=device) for n in heads)
    check(positions_of(layout, 2, 5, device), query, key, 64, random_cache(48, device=device), is_neox)


@pytest.mark.parametrize("paddings", [(0, 8), (8, 0), (3, 8), (1, 0)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_query_and_key_have_strides_of_their_own(layout, paddings, device):
    query, key = (make(layout, 2, 5, 4, 32, padding=n, device=device) for n in paddings)
    assert query.stride() != key.stride()
    check(positions_of(layout, 2, 5, device), query, key, 32, random_cache(32, device=device))


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["t-hd", "b-t-hd"])
def test_slices_of_one_projection(layout, dtype, is_neox, device):
    query_heads, key_heads, D = 8, 2, 64
    fused = make(layout, 2, 7, query_heads + 2 * key_heads, D, dtype=dtype, device=device)
    query, key, _ = fused.split([query_heads * D, key_heads * D, key_heads * D], dim=-1)
    check(positions_of(layout, 2, 7, device), query, key, D, random_cache(D, dtype, device), is_neox)


def test_any_order_of_dimensions_in_memory(device):
    cache = random_cache(16, device=device)
    by_head = [random_tensor(2, heads, 5, 16, device=device) for heads in (4, 2)]
    check(random_positions(2, 5, device=device), *(x.transpose(1, 2) for x in by_head), 16, cache)
    check(random_positions(5, device=device), *(x[1].transpose(0, 1) for x in by_head), 16, cache)
    flat = [random_tensor(5, 3, heads * 16, device=device) for heads in (4, 2)]
    check(random_positions(3, 5, device=device), *(x.transpose(0, 1) for x in flat), 16, cache)
    check(random_positions(3, device=device), *(x[::2, 1] for x in flat), 16, cache)


@pytest.mark.parametrize(("query", "key"), [("t-hd", "t-h-d"), ("t-h-d", "t-hd"), ("b-t-h-d", "b-t-hd")])
def test_query_flat_and_key_not(query, key, device):
    positions = positions_of(query, 2, 5, device)
    query, key = make(query, 2, 5, 4, 16, device=device), make(key, 2, 5, 2, 16, device=device)
    check(positions, query, key, 16, random_cache(16, device=device))


def test_the_table_may_be_a_slice(device):
    wide = random_cache(32, device=device)
    positions = random_positions(6, device=device)
    check(positions, random_tensor(6, 4, 16, device=device), None, 16, wide[:, 5:17])
    check(positions % 100, random_tensor(6, 4, 16, device=device), None, 16, wide[7:107:, :16])


@pytest.mark.parametrize("cache_dtype", ["float32", "same"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_table_is_float32_or_as_the_query(dtype, cache_dtype, device):
    query, key = (make("t-h-d", 1, 9, heads, 40, dtype=dtype, device=device) for heads in (4, 2))
    cache = random_cache(40, torch.float32 if cache_dtype == "float32" else dtype, device)
    for is_neox in (True, False):
        check(random_positions(9, device=device), query, key, 40, cache, is_neox)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "values",
    [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [7, 7, 7, 7, 7, 7], [ROWS - 1, 0, 300, 0, 300, 1]],
    ids=["rising", "falling", "repeated", "jumping"],
)
@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 6), (6, 1)], ids=str)
def test_positions_come_in_any_order(shape, values, dtype, device):
    positions = torch.tensor(values, dtype=dtype, device=device).view(shape)
    query, key = (random_tensor(*shape, heads * 16, device=device) for heads in (4, 2))
    check(positions, query, key, 16, random_cache(16, device=device))


@pytest.mark.parametrize("stride", [2, 3])
def test_positions_may_be_strided(stride, device):
    positions = random_positions(6 * stride, device=device)[::stride]
    check(positions, random_tensor(6, 4, 16, device=device), None, 16, random_cache(16, device=device))


OUTSIDE = {torch.int32: (-1, ROWS, -(2**31), 2**31 - 1), torch.int64: (-1, ROWS, -(2**63), 2**32, 2**63 - 1)}


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [16, 6])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("index_dtype", OUTSIDE, ids=str)
def test_a_position_outside_the_table_makes_its_token_nan(index_dtype, dtype, rotary_dim, is_neox, device):
    outside = OUTSIDE[index_dtype]
    values = [x for position in outside for x in (3, position)] + [ROWS - 1]  # neighbours on both sides
    positions = torch.tensor(values, dtype=index_dtype, device=device)
    query, key = (random_tensor(len(values), heads, 16, dtype=dtype, device=device) for heads in (4, 2))
    rotated = query.clone(), key.clone()
    rotary_embedding(positions, *rotated, 16, random_cache(rotary_dim, dtype, device), is_neox)
    for x in rotated:
        assert x[1:-1:2].isnan().all()
        assert x[0::2].isfinite().all()
    check(positions, query, key, 16, random_cache(rotary_dim, dtype, device), is_neox)


@pytest.mark.parametrize("with_key", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("batch", "tokens"), [(2, 0), (0, 3)])
def test_no_tokens_are_no_work(batch, tokens, layout, with_key, device):
    query = make(layout, batch, tokens, 4, 16, device=device)
    key = make(layout, batch, tokens, 2, 16, device=device) if with_key else None
    cache = random_cache(16, device=device)
    assert rotary_embedding(positions_of(layout, batch, tokens, device), query, key, 16, cache, True) is None


def good(device, requires_grad=False):
    """Arguments that fit; a test changes one of them."""
    return {
        "positions": torch.tensor([3, 0, 2], device=device),
        "query": random_tensor(3, 4, 16, device=device).requires_grad_(requires_grad),
        "key": random_tensor(3, 2, 16, device=device),
        "head_size": 16,
        "cos_sin_cache": random_cache(8, device=device, rows=4),
        "is_neox": True,
    }


SHAPE = r"positions must have shape \[num_tokens\] or \[batch_size, seq_len\]"
TOKENS = "query, key and positions must have the same number of tokens"
BATCHES = "query, key and positions must have the same batch_size and seq_len"
# What is changed of the good arguments, and the error; the first eight are vLLM's.
REFUSED = {
    "positions of 0 dimensions": ({"positions": lambda x: x[0]}, SHAPE),
    "positions of 3 dimensions": ({"positions": lambda x: x[None, None]}, SHAPE),
    "fewer positions": ({"positions": lambda x: x[:2]}, TOKENS),
    "a longer query": ({"query": lambda x: torch.cat((x, x))}, TOKENS),
    "a shorter key": ({"key": lambda x: x[:2]}, TOKENS),
    "other batches": (
        {"positions": lambda x: x[None], "query": lambda x: x[:, None], "key": lambda x: x[None]},
        BATCHES,
    ),
    "a key of other batches": (
        {"positions": lambda x: x[None], "query": lambda x: x[None], "key": lambda x: x[:, None]},
        BATCHES,
    ),
    "a key of another length": (
        {"positions": lambda x: x[None], "query": lambda x: x[None], "key": lambda x: x[None, :2]},
        BATCHES,
    ),
    "positions of float": ({"positions": lambda x: x.float()}, "^positions must be int32 or int64"),
    "positions of int16": ({"positions": lambda x: x.short()}, "^positions must be int32 or int64"),
    "a query of int": ({"query": lambda x: x.int()}, "^query must be float16, bfloat16, float32 or float64"),
    "a key of another dtype": ({"key": lambda x: x.half()}, "^key must have query's dtype"),
    "a table of less precision": (
        {"cos_sin_cache": lambda x: x.half()},
        "^cos_sin_cache must be float32 or have query's dtype",
    ),
    "a table of more precision": (
        {"cos_sin_cache": lambda x: x.double()},
        "^cos_sin_cache must be float32 or have query's dtype",
    ),
    "query of 1 dimension": ({"query": lambda x: x[:, 0, 0]}, "^query has 1 dimensions, but must have 2 or 3"),
    "key of 4 dimensions": ({"key": lambda x: x[:, None]}, "^key has 4 dimensions, but must have 2 or 3"),
    "head_size 0": ({"head_size": lambda x: 0}, "^head_size is 0, but must be from 1 to 512"),
    "head_size 514": ({"head_size": lambda x: 514}, "^head_size is 514, but must be from 1 to 512"),
    "query of other heads": ({"query": lambda x: x[..., :12]}, "^query has head dim 12, but head_size is 16"),
    "key of other heads": ({"key": lambda x: x[..., :12]}, "^key has head dim 12, but head_size is 16"),
    "query of half a head": ({"query": lambda x: x.flatten(1)[:, :24]}, "^query has 24 features .* head_size, 16"),
    "key of half a head": ({"key": lambda x: x.flatten(1)[:, :24]}, "^key has 24 features .* head_size, 16"),
    "heads that do not divide": (
        {"key": lambda x: torch.cat((x, x), dim=1)[:, :3]},
        "^query has 4 heads, but they must be a multiple of key's 3",
    ),
    "more heads in key": (
        {"key": lambda x: torch.cat([x] * 4, dim=1)},
        "^query has 4 heads, but they must be a multiple of key's 8",
    ),
    "multimodal positions": (
        {"positions": lambda x: x[:2].repeat(3, 1), "query": lambda x: x[:2], "key": lambda x: x[:2]},
        SHAPE + r", but has three axes for each token \(multimodal RoPE.*ropewalk.apply_rope",
    ),
    "multimodal positions, flat": (
        {"positions": lambda x: x[:2].repeat(3, 1), "query": lambda x: x[:2].flatten(1), "key": lambda x: None},
        SHAPE + r", but has three axes for each token \(multimodal RoPE.*ropewalk.apply_rope",
    ),
    "a table of 1 dimension": ({"cos_sin_cache": lambda x: x[0]}, "^cos_sin_cache must have shape"),
    "a table of 3 dimensions": ({"cos_sin_cache": lambda x: x[None]}, "^cos_sin_cache must have shape"),
    "an odd rotary dim": (
        {"cos_sin_cache": lambda x: x[:, :7]},
        "^cos_sin_cache has rotary dim 7, but it must be even",
    ),
    "no rotary dim": ({"cos_sin_cache": lambda x: x[:, :0]}, "^cos_sin_cache has rotary dim 0, but it must be even"),
    "a rotary dim beyond the head": (
        {"cos_sin_cache": lambda x: torch.cat([x] * 3, dim=1)},
        "^cos_sin_cache has rotary dim 24, but .* at most head_size, 16",
    ),
    "a transposed table": (
        {"cos_sin_cache": lambda x: x.t().contiguous().t()},
        "^cos_sin_cache must be dense along its last dimension",
    ),
    "a strided query": (
        {"query": lambda x: x.repeat(1, 1, 2)[..., ::2]},
        "^query has stride 2 along its last dimension",
    ),
    "a strided key": ({"key": lambda x: x.repeat(1, 1, 2)[..., ::2]}, "^key has stride 2 along its last dimension"),
    "an expanded query": ({"query": lambda x: x[:1].expand(3, 4, 16)}, "^query has elements that share memory"),
    "an expanded query alone": (
        {"query": lambda x: x[:, :1].expand(3, 4, 16), "key": lambda x: None},
        "^query has elements that share memory",
    ),
    "an expanded key": ({"key": lambda x: x[:, :1].expand(3, 2, 16)}, "^key has elements that share memory"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("function", [rotary_embedding, OPERATOR], ids=["function", "operator"])
def test_what_does_not_fit_is_refused_before_anything_is_written(function, name, device):
    changes, message = REFUSED[name]
    arguments = {key: changes.get(key, lambda x: x)(value) for key, value in good(device).items()}
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    with unchanged(tensors), pytest.raises(RuntimeError, match=message):
        function(*arguments.values())


def pairs_that_share_memory(x):
    """Name, query and key of which key has an element of query; x is (3, 4, 16)."""
    yield "the same tensor", x, x
    yield "the same memory, flat", x, x.flatten(1)
    yield "one head in common", x[:, :3], x[:, 2:3]
    yield "one feature in common", x.flatten(1)[:, :48], x.flatten(1)[:, 47:63]
    yield "one feature in common, key first", x.flatten(1)[:, 15:63], x.flatten(1)[:, :16]


@pytest.mark.parametrize("name", [name for name, *_ in pairs_that_share_memory(torch.empty(3, 4, 16))])
@pytest.mark.parametrize("function", [rotary_embedding, OPERATOR], ids=["function", "operator"])
def test_query_and_key_that_share_memory_are_refused(function, name, device):
    arguments = good(device)
    pairs = {case: pair for case, *pair in pairs_that_share_memory(arguments["query"])}
    arguments["query"], arguments["key"] = pairs[name]
    with unchanged([arguments["query"]]), pytest.raises(RuntimeError, match="query and key share memory"):
        function(*arguments.values())


@pytest.mark.parametrize("odd", ["positions", "key", "cos_sin_cache"])
def test_every_tensor_is_where_the_query_is(odd, device):
    elsewhere = "cpu" if device.type == "cuda" else "meta"
    arguments = good(device)
    arguments[odd] = arguments[odd].to(elsewhere)
    with unchanged([arguments["query"]]), pytest.raises(RuntimeError, match=f"^{odd} must be on query's device"):
        rotary_embedding(*arguments.values())


@pytest.mark.parametrize("wants", ["query", "key"])
@pytest.mark.parametrize("function", [rotary_embedding, OPERATOR], ids=["function", "operator"])
def test_a_gradient_is_refused_and_apply_rope_named(function, wants, device):
    arguments = good(device)
    arguments[wants].requires_grad_()
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    with unchanged(tensors), pytest.raises(RuntimeError, match="apply_rope"):
        function(*arguments.values())
    arguments[wants] = arguments[wants] * 1  # nor where it is no leaf
    with unchanged([arguments[wants]]), pytest.raises(RuntimeError, match="apply_rope"):
        function(*arguments.values())


@pytest.mark.parametrize("function", [rotary_embedding, OPERATOR], ids=["function", "operator"])
def test_tangents_are_refused_and_not_passed_on_unrotated(function, device):
    arguments = good(device)
    query = arguments.pop("query")

    def rotated(x):
        x = x * 1
        function(arguments["positions"], x, *list(arguments.values())[1:])
        return x

    with pytest.raises(RuntimeError, match="forward-mode differentiation of rotary_embedding are not supported"):
        torch.func.jvp(rotated, (query,), (query,))
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(RuntimeError, match="forward-mode differentiation of rotary_embedding are not supported"),
    ):
        rotated(torch.autograd.forward_ad.make_dual(query, query))


@pytest.mark.parametrize("function", [rotary_embedding, OPERATOR], ids=["function", "operator"])
@pytest.mark.parametrize("name", ["query", "key"])
def test_a_lazily_negated_tensor_is_refused(name, function, device):
    arguments = good(device)
    arguments[name] = torch._neg_view(arguments[name])
    with unchanged([arguments[name]]), pytest.raises(RuntimeError, match="must not be lazily negated"):
        function(*arguments.values())


def test_a_table_that_requires_grad_is_read(device):
    arguments = good(device)
    expected = good(device)
    expected["query"].copy_(arguments["query"])
    arguments["cos_sin_cache"] = expected["cos_sin_cache"].clone().requires_grad_()
    for x in (arguments, expected):
        x["key"] = None
        rotary_embedding(*x.values())
    assert torch.equal(arguments["query"], expected["query"])


@pytest.mark.parametrize("function", [rotary_embedding, OPERATOR], ids=["function", "operator"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_a_leaf_may_be_overwritten(mode, function, device):
    arguments = good(device, requires_grad=True)
    query, version = arguments["query"], arguments["query"]._version
    expected, _ = equation(
        query.detach(), *(arguments[x] for x in ("positions", "cos_sin_cache")), 16, True, query.dtype
    )
    with mode():
        function(*arguments.values())
    torch.testing.assert_close(query.detach(), expected)
    assert query._version > version


def test_tensors_made_in_inference_mode(device):
    with torch.inference_mode():
        arguments = good(device)
        query, key = arguments["query"], arguments["key"]
        for x in (query, key):
            assert x.is_inference()
        expected = [
            equation(x, arguments["positions"], arguments["cos_sin_cache"], 16, True, x.dtype)[0] for x in (query, key)
        ]
        rotary_embedding(*arguments.values())
        torch.testing.assert_close([query, key], expected)


@pytest.mark.parametrize("function", [rotary_embedding, OPERATOR], ids=["function", "operator"])
@pytest.mark.parametrize("spoiled", ["query", "key"])
def test_a_consumer_that_saved_the_unrotated_tensor_raises(spoiled, function, device):
    arguments = good(device)
    weight = torch.ones((), device=device, requires_grad=True)
    product = arguments[spoiled] * weight  # saves the tensor for the weight's gradient
    function(*arguments.values())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_the_schema_is_vllms():
    assert str(OPERATOR._schema) == (
        "ropewalk::rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, "
        "Tensor cos_sin_cache, bool is_neox) -> ()"
    )


CALLS = {
    "three dimensions": {},
    "no key": {"key": lambda x: None},
    "flat": {"query": lambda x: x.flatten(1), "key": lambda x: x.flatten(1)},
    "batched": {"positions": lambda x: x[None], "query": lambda x: x[None], "key": lambda x: x[None]},
    "batched and flat": {
        "positions": lambda x: x[None],
        "query": lambda x: x[None].flatten(2),
        "key": lambda x: x[None].flatten(2),
    },
    "interleaved": {"is_neox": lambda x: False},
    "padded": {"query": lambda x: torch.cat((x, x), dim=-1)[..., :16]},
    "int32": {"positions": lambda x: x.int()},
}


def call(name, device):
    return [CALLS[name].get(key, lambda x: x)(value) for key, value in good(device).items()]


@pytest.mark.parametrize("name", CALLS)
def test_the_operator_is_what_its_schema_says(name, device):
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(OPERATOR, call(name, device), test_utils=checks)


def counted(function, backend="aot_eager", dynamic=None):
    """The function without a graph break, and a counter of its compilations."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, dynamic=dynamic), counter


@pytest.mark.parametrize("name", CALLS)
def test_compiled_calls_equal_eager_ones(name, device):
    positions, query, key, *rest = call(name, device)

    def function(query, key):
        rotary_embedding(positions, query, key, *rest)
        return query * 2

    faster, counter = counted(function)
    results = []
    for run in (function, faster):
        xs = query.clone(), None if key is None else key.clone()
        results.append([run(*xs), *(x for x in xs if x is not None)])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_slices_of_a_projection(backend, device):
    def function(x, positions, cache):
        fused = x * 2
        query, key, value = fused.split([64, 32, 32], dim=-1)
        rotary_embedding(positions, query, key, 16, cache, False)
        return query + 1, key + 1, value, fused

    x, positions = random_tensor(5, 128, device=device), random_positions(5, device=device)
    cache = random_cache(16, device=device)
    faster, counter = counted(function, backend)
    for eager, compiled in zip(function(x, positions, cache), faster(x, positions, cache), strict=True):
        assert torch.equal(eager, compiled)
    assert counter.frame_count == 1


def test_one_compilation_serves_every_length(device):
    def function(positions, query, key, cache):
        rotary_embedding(positions, query, key, 16, cache, True)

    faster, counter = counted(function, dynamic=True)
    cache = random_cache(16, device=device)
    for tokens in (5, 6, 1000, 3):
        query, key = (random_tensor(tokens, heads * 16, device=device) for heads in (4, 2))
        positions = random_positions(tokens, device=device)
        check(positions, query, key, 16, cache, function=lambda p, q, k, _, c, __: faster(p, q, k, c))
    assert counter.frame_count == 1


def test_a_dispatch_mode_sees_one_operator(device):
    class Onlooker(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen = []
    arguments = call("three dimensions", device)
    with Onlooker():
        rotary_embedding(*arguments)
    assert seen == [OPERATOR]


def test_export_keeps_the_operator_and_the_length_free(device):
    class Rotation(torch.nn.Module):
        def forward(self, positions, query, key, cache):
            rotary_embedding(positions, query, key, 16, cache, True)
            return query * 1, key * 1

    positions, query, key, _, cache, _ = call("three dimensions", device)
    length = torch.export.Dim("length", min=2, max=ROWS)
    shapes = (*[{0: length}] * 3, None)
    program = torch.export.export(Rotation(), (positions, query, key, cache), dynamic_shapes=shapes)
    assert "ropewalk.rotary_embedding.default" in str(program.graph)
    longer = [x.repeat(5, *[1] * (x.ndim - 1)) for x in (positions, query, key)]
    expected = [x.clone() for x in longer]
    rotary_embedding(*expected, 16, cache, True)
    for x, y in zip(program.module()(*longer, cache), expected[1:], strict=True):
        assert torch.equal(x, y)


def test_a_graph_holds_one_opaque_operator(device):
    seen = []

    def backend(graph, inputs):
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    positions, *rest = call("three dimensions", device)
    torch.compile(lambda positions: rotary_embedding(positions, *rest), backend=backend, fullgraph=True)(positions)
    assert seen in ([OPERATOR], [torch.ops.ropewalk.rotary_embedding])


@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_are_checked_and_not_computed(name, device):
    arguments = call(name, device)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments]
        assert rotary_embedding(*fakes) is None
        fakes[0] = fakes[0][..., :2]
        with pytest.raises(RuntimeError, match="query, key and positions must have the same"):
            rotary_embedding(*fakes)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_a_cuda_graph_replays_the_rotation(name, cuda):
    positions, query, key, *rest = call(name, cuda)
    xs = [x for x in (query, key) if x is not None]
    source = [x.clone() for x in xs]
    rotary_embedding(positions, query.clone(), None if key is None else key.clone(), *rest)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rotary_embedding(positions, query, key, *rest)
    for shift in (0, 1):
        positions.copy_((positions + shift) % 4)
        for x, original in zip(xs, source, strict=True):
            x.copy_(original)
        expected = [x.clone() for x in xs]
        rotary_embedding(positions, expected[0], *(expected[1:] or [None]), *rest)
        graph.replay()
        for x, y in zip(xs, expected, strict=True):
            assert torch.equal(x, y)


@pytest.mark.gpu
def test_the_current_stream_is_the_one_used(cuda):
    positions, query, key, *rest = call("three dimensions", cuda)
    expected = query.clone(), key.clone()
    rotary_embedding(positions, *expected, *rest)
    late = torch.zeros_like(query), torch.zeros_like(key)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # on any other stream the rotation would overtake the copies
        late[0].copy_(query)
        late[1].copy_(key)
        rotary_embedding(positions, *late, *rest)
    stream.synchronize()
    for x, y in zip(late, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.gpu
def test_a_second_device_is_served_while_the_first_is_current(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    arguments = call("three dimensions", torch.device("cuda:0"))
    there = [x.to("cuda:1") if isinstance(x, Tensor) else x for x in arguments]
    rotary_embedding(*arguments)
    with torch.cuda.device(0):
        rotary_embedding(*there)
        assert torch.cuda.current_device() == 0
    for x, y in zip(arguments[1:3], there[1:3], strict=True):
        assert torch.equal(x, y.to("cuda:0"))


def test_it_is_imported_after_the_extension_too():
    """A rotation may have loaded the library before: then there is a kernel, and no schema yet."""
    code = """
    import torch
    library = torch.library.Library("ropewalk", "IMPL", "CUDA")
    library.impl("rotary_embedding", lambda *arguments: None)
    from ropewalk import rotary_embedding
    query = torch.ones(2, 64)
    rotary_embedding(torch.arange(2), query, None, 64, torch.ones(2, 64), True)
    assert not torch.equal(query, torch.ones(2, 64))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)
