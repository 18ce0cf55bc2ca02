"""Keys that no query attends may hold NaN, and pages of such keys may be anybody's: before windows, behind queries."""

from __future__ import annotations

import pytest
import torch
from helpers.hopper_calls import on_hopper
from helpers.modes import ON_GPU, needs_kernels
from helpers.written_attention import attend_plainly, compute
from torch import Tensor

from ropewalk import Alibi, NoPosition, T5Bias, attention
from ropewalk.testing import assert_close_to_truth

ROUNDINGS = 4
IMPLS = [pytest.param("triton", marks=needs_kernels), pytest.param("gluon", marks=on_hopper)]
# Queries, keys, and keywords: which keys no query attends follows from them.
CALLS = {
    "causal window": (20, 100, {"causal": True, "window": 14}),
    "window of two sides": (20, 100, {"window": (5, 3)}),
    "one tile": (3, 21, {"causal": True, "window": 5}),
    "behind the last query": (20, 100, {"causal": True, "query_starts": 40}),
    "both": (20, 100, {"window": (9, 2), "query_starts": 40}),
    "before the first key": (20, 100, {"causal": True, "window": 30, "query_starts": -7}),
    "key starts": (20, 100, {"causal": True, "window": 70, "key_starts": 33}),
}


def pairs(queries: int, keys: int, call: dict, device: torch.device) -> Tensor:
    """Which pairs a call attends, (Tq, Tk)."""
    offset = call.get("query_starts", keys - queries)
    index = torch.arange(keys, device=device)
    ahead = index[None] - (torch.arange(queries, device=device) + offset)[:, None]
    window = call.get("window")
    left, right = (window - 1, None) if isinstance(window, int) else window or (None, None)
    attends = index[None] >= call.get("key_starts", 0)
    if call.get("causal"):
        attends = attends & (ahead <= 0)
    if left is not None:
        attends = attends & (ahead >= -left)
    if right is not None:
        attends = attends & (ahead <= right)
    return attends.expand(queries, keys)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256] if ON_GPU else [16])
@pytest.mark.parametrize("name", CALLS)
def test_no_result_knows_of_them(device, name, head_dim, is_packed, impl):
    queries, keys, call = CALLS[name]
    if is_packed and {"query_starts", "key_starts"} & call.keys():
        pytest.skip("packed sequences have neither")
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    q, k, v = (torch.randn(n, h, head_dim, device=device).to(dtype) for n, h in ((queries, 4), (keys, 2), (keys, 2)))
    attends = pairs(queries, keys, call, device)
    unread = ~attends.any(0)
    assert unread.any()
    weights, of_lse = torch.randn(queries, 4, head_dim, device=device), torch.randn(4, queries, device=device)

    def define(q, k, v):
        return attend_plainly(q, k, v, attends)

    # Zeros have the gradients of what is not there.
    clean = [x.masked_fill(unread[:, None, None], 0) if len(x) == keys else x for x in (q, k, v)]
    truths = compute(define, [x.double() for x in clean], weights, of_lse)
    plain = compute(define, clean, weights, of_lse)
    k[unread] = v[unread] = torch.nan
    given = {n: torch.tensor([x], device=device) if n.endswith("starts") else x for n, x in call.items()}

    def attend(q, k, v):
        if is_packed:
            q, k, v = (torch.cat((x, x)) for x in (q, k, v))
            bounds = {
                f"cu_seqlens_{x}": torch.tensor([0, n, 2 * n], device=device) for x, n in (("q", queries), ("k", keys))
            }
            out, lse = attention(q, k, v, layout="thd", impl=impl, return_lse=True, **bounds, **given)
            return out[queries:], lse[:, queries:]
        out, lse = attention(q[None], k[None], v[None], impl=impl, return_lse=True, **given)
        return out[0], lse[0]

    for mine, exact, baseline in zip(compute(attend, [q, k, v], weights, of_lse), truths, plain, strict=True):
        assert_close_to_truth(mine, exact, baseline, ROUNDINGS)


@needs_kernels
@pytest.mark.parametrize("freed", ["kept", "null page", "no page"])
@pytest.mark.parametrize("kind", ["own", "int8"])
@pytest.mark.parametrize("layout", ["thd", "bthd"])
@pytest.mark.parametrize(("queries", "keys", "window", "page_size"), [(3, 21, 5, 8), (40, 90, 14, 16), (1, 60, 31, 16)])
def test_pages_before_a_window_are_free(device, queries, keys, window, page_size, layout, kind, freed):
    """A page that no query attends is another sequence's, or holds NaN; its entry names a null page, or none."""
    dtype, head_dim = torch.bfloat16 if ON_GPU else torch.float32, 64
    n_read = -(-keys // page_size)
    shape = (n_read + 1, page_size, 2, head_dim)
    q = torch.randn(queries, 4, head_dim, device=device).to(dtype)
    k, v = (torch.randn(shape, device=device).to(dtype) for _ in "kv")
    scales, stored = {}, (k, v)
    if kind == "int8":
        k, v = (torch.randint(-127, 128, shape, device=device, dtype=torch.int8) for _ in "kv")
        stored = tuple(torch.rand(shape[:3], device=device) * 0.02 for _ in "kv")
        scales = dict(zip(("k_scale", "v_scale"), stored, strict=True))
    table = torch.randperm(n_read, device=device) + 1
    attends = pairs(queries, keys, {"causal": True, "window": window}, device)
    read = [x.float() * scales[f"{n}_scale"][..., None] if scales else x for n, x in (("k", k), ("v", v))]
    clean = [x[table].flatten(0, 1)[:keys].masked_fill(~attends.any(0)[:, None, None], 0) for x in read]
    first = int(attends.any(0).nonzero().min())
    for x in stored:
        x[0] = torch.nan
        rows = x[table].flatten(0, 1)
        rows[:first] = rows[keys:] = torch.nan
        x[table] = rows.unflatten(0, (n_read, page_size))
    if freed != "kept":
        table[: first // page_size] = 0
    # The check of values on a CPU reads entries that kernels do not.
    if freed == "no page" and ON_GPU:
        table[: first // page_size] = -1
    call = {"block_table": table[None].int(), "key_lengths": torch.tensor([keys], device=device), **scales}
    call |= {"causal": True, "window": window, "impl": "triton"}
    if layout == "thd":
        out = attention(q, k, v, layout="thd", cu_seqlens_q=torch.tensor([0, queries], device=device), **call)
    else:
        out = attention(q[None], k, v, query_starts=torch.tensor([keys - queries], device=device), **call)[0]
    truth, _ = attend_plainly(q.double(), *(x.double() for x in clean), attends)
    plain, _ = attend_plainly(q, *(x.to(q.dtype) for x in clean), attends)
    assert_close_to_truth(out, truth, plain, ROUNDINGS)


@needs_kernels
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("kind", ["none", "Alibi", "T5Bias"])
def test_rows_without_a_key_get_no_gradient(device, kind, softcap):
    """All that such a row holds may be NaN, and what schemes learn does not know of it."""
    q, k, v = (torch.randn(2, 20, 2, 16, device=device, dtype=torch.float16) for _ in "qkv")
    learned = {"Alibi": torch.rand(2, device=device), "T5Bias": torch.randn(8, 2, device=device)}.get(kind)
    given = {name: torch.tensor(x, device=device) for name, x in (("key_lengths", [9, 15]), ("key_starts", [9, 2]))}
    given |= {"softcap": softcap, "impl": "triton"}

    def differentiate(row):
        leaves = [torch.cat((row(x[:1]), x[1:])).requires_grad_() for x in (q, k, v)]
        position = NoPosition()
        if learned is not None:
            leaves.append(learned.clone().requires_grad_())
            position = Alibi(leaves[3]) if kind == "Alibi" else T5Bias(leaves[3], max_distance=9)
        out = attention(*leaves[:3], position=position, **given)
        return out, *torch.autograd.grad(out.float().sin().sum(), leaves)

    for mine, expected in zip(differentiate(lambda x: x * torch.nan), differentiate(lambda x: x * 0), strict=True):
        torch.testing.assert_close(mine, expected)
