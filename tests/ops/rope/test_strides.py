"""Memory: slices of fused projections, transposed and expanded tensors, tables of any stride, odd alignments."""

from __future__ import annotations

import pytest
import torch
from helpers.rope_definition import check_out_of_place, check_rotation, random_tables, random_tensor

HQ, HK, D, T = 4, 2, 8, 5


def memory_cases(device, dtype):
    """Name, q, k, layout of tensors that can also be overwritten."""

    def new(*shape):
        return random_tensor(*shape, dtype=dtype, device=device)

    for batch in (1, 2):
        fused = new(batch, T, HQ + 2 * HK, D)
        yield f"slices of a fused projection, B={batch}", fused[:, :, :HQ], fused[:, :, HQ : HQ + HK], "bthd"
        per_head = new(batch, T, HK, 3 * D)
        yield f"Megatron's slices of each head, B={batch}", per_head[..., :D], per_head[..., D : 2 * D], "bthd"
        first = new(T, batch, HK, 3 * D).transpose(0, 1)
        yield f"Megatron's slices, tokens first, B={batch}", first[..., D : 2 * D], first[..., :D], "bthd"
        q, k = new(batch, HQ, T, D), new(batch, HK, T, D)
        yield f"heads first in memory, B={batch}", q.transpose(1, 2), k.transpose(1, 2), "bthd"
        q, k = new(batch, T, HQ, D), new(batch, T, HK, D)
        yield f"tokens first in memory, B={batch}", q.transpose(1, 2), k.transpose(1, 2), "bhtd"
        yield f"q and k in another order, B={batch}", q, new(batch, HK, T, D).transpose(1, 2), "bthd"
        q, k = new(batch, T, D, HQ), new(batch, T, D, HK)
        yield f"heads last in memory, B={batch}", q.transpose(2, 3), k.transpose(2, 3), "bthd"
        q, k = new(batch, HQ, D, T), new(batch, HK, D, T)
        yield f"tokens last in memory, B={batch}", q.transpose(2, 3), k.transpose(2, 3), "bhtd"
    packed = new(T, HQ + 2 * HK, D)
    yield "slices of a packed fused projection", packed[:, :HQ], packed[:, HQ : HQ + HK], "thd"
    yield "k before q", packed[:, HK : HK + HQ], packed[:, :HK], "thd"
    every = new(2, 2 * T, 2 * HQ, 2 * D)
    yield "every second token", every[:, ::2, :HQ, :D], every[:, 1::2, HQ:, D:], "bthd"
    yield "every second head", every[:, :T, ::2, :D], every[:, :T, 1::2, :D], "bthd"
    yield "every second feature", every[:, :T, :HQ, ::2], every[:, T:, :HK, 1::2], "bthd"
    yield "only q has every second feature", every[:, :T, :HQ, ::2], new(2, T, HK, D), "bthd"
    padded = new(2, T, HQ, D + 1)
    yield "rows of odd length", padded[..., :D], new(2, T, HK, D + 3)[..., 3:], "bthd"
    for shift in (1, 2, 4):
        q, k = new(2 * T * HQ * D + shift)[shift:], new(2 * T * HK * D + shift)[shift:]
        yield f"{shift} elements off", q.view(2, T, HQ, D), k.view(2, T, HK, D), "bthd"
        yield f"only k is {shift} elements off", new(2, T, HQ, D), k.view(2, T, HK, D), "bthd"
    q, k = new(T * HQ * D), new(T * HK * D)
    odd = [(7, HQ * D, D, 1), (0, HK * D, D, 1)]
    yield (
        "odd strides where nobody walks",
        q.as_strided((1, T, HQ, D), odd[0]),
        k.as_strided((1, T, HK, D), odd[1]),
        "bthd",
    )
    q = q.as_strided((T, 1, 1, D), (HQ * D, 2**40, 2**35, 1))
    yield "huge strides where nobody walks", q, k.as_strided((T, 1, 1, D), (HK * D, 2**33, 3, 1)), "bthd"
    yield "batch rows inside each other", *(x.view(T, 2, -1, D).transpose(0, 1) for x in (new(T * 2, HQ, D), k)), "bthd"


def expanded_cases(device, dtype):
    """Name, q, k of tensors whose elements share memory."""

    def new(*shape):
        return random_tensor(*shape, dtype=dtype, device=device)

    whole, row = new(2, T, HQ, D), new(2, T, HK, D)
    yield "heads", whole[:, :, :1].expand(2, T, HQ, D), row
    yield "batch", whole[:1].expand(2, T, HQ, D), row[:1].expand(2, T, HK, D)
    yield "tokens", whole[:, :1].expand(2, T, HQ, D), row
    yield "features", whole, row[..., :1].expand(2, T, HK, D)
    yield "all", new(1).expand(2, T, HQ, D), new(1).expand(2, T, HK, D)
    yield "overlapping windows", new(2 * T * D + HQ).as_strided((2, T, HQ, D), (T * D, D, 1, 1)), row


@pytest.mark.parametrize(
    ("dtype", "interleaved"), [(torch.float16, False), (torch.float16, True), (torch.float32, False)]
)
@pytest.mark.parametrize("name", [name for name, *_ in memory_cases("cpu", torch.float32)])
def test_strides_of_q_and_k(impl, device, name, dtype, interleaved):
    q, k, layout = next(rest for case, *rest in memory_cases(device, dtype) if case == name)
    cos, sin = random_tables(T, D // 2, device=device)
    packed = {"cu_seqlens": torch.tensor([0, 2, T], device=device)} if layout == "thd" else {}
    check_rotation(q, k, cos, sin, impl=impl, layout=layout, interleaved=interleaved, **packed)


@pytest.mark.parametrize("name", [name for name, *_ in memory_cases("cpu", torch.float32)])
def test_strides_with_partial_rotary(impl, device, name):
    q, k, layout = next(rest for case, *rest in memory_cases(device, torch.float32) if case == name)
    cos, sin = random_tables(T, D // 2 - 2, device=device)
    positions = torch.tensor([4, 0, 9, 3, 3], device=device)
    positions = positions if layout == "thd" else positions[: q.shape[layout.index("t")]][None]
    check_rotation(q, k, cos, sin, impl=impl, layout=layout, positions=positions, rotary_offset=3)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", [name for name, *_ in expanded_cases("cpu", torch.float32)])
def test_expanded_inputs_out_of_place(impl, device, name, interleaved):
    q, k = next(rest for case, *rest in expanded_cases(device, torch.float32) if case == name)
    cos, sin = random_tables(T, D // 2, device=device)
    check_out_of_place(q, k, cos, sin, impl=impl, interleaved=interleaved)


def table_cases(device, dtype):
    """Name, cos, sin: (T, D/2), or (2, T, D/2) per token."""
    half = D // 2
    full = [x.to(dtype) for x in random_tables(2 * T, 2 * D, device=device)]
    yield "every second column of a duplicated table", *(x[:T, :D:2] for x in full)
    yield "first half of a duplicated table", *(x[:T, :half] for x in full)
    yield "columns from an odd one on", *(x[:T, 3 : 3 + half] for x in full)
    yield "every second row", *(x[::2, :half] for x in full)
    yield "sin of other strides", full[0][:T, :half], full[1][:T, :half].contiguous()
    yield "only sin is transposed", full[0][:T, :half].contiguous(), full[1][:T, :half].t().contiguous().t()
    yield "cos and sin side by side", full[0][:T, :half], full[0][:T, half : 2 * half]
    yield "one row, expanded", *(x[:1, :half].expand(T, half) for x in full)
    yield "one angle, expanded", *(x[:T, :1].expand(T, half) for x in full)
    yield "per token", *(x[:, :half].reshape(T, 2, half).transpose(0, 1) for x in full)
    yield "per token, one row for all", *(x[None, :T, :half].expand(2, T, half) for x in full)
    yield (
        "per token, only cos expanded",
        full[0][None, :T, :half].expand(2, T, half),
        full[1][:, :half].view(2, T, half),
    )
    yield "per token, batch of one", full[0][None, :T, :half], full[1][None, T:, half:D]


@pytest.mark.parametrize("table_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", [name for name, *_ in table_cases("cpu", torch.float32)])
def test_strides_of_the_tables(impl, device, name, table_dtype):
    cos, sin = next(rest for case, *rest in table_cases(device, table_dtype) if case == name)
    q, k = random_tensor(2, T, HQ, D, device=device), random_tensor(2, T, HK, D, device=device)
    check_rotation(q, k, cos, sin, impl=impl)


@pytest.mark.parametrize("which", ["q", "k", "cos", "sin"])
def test_alignment_may_change_from_call_to_call(impl, device, which):
    """What is remembered of one call must not serve a call whose memory starts elsewhere."""
    shapes = {"q": (2, T, HQ, D), "k": (2, T, HK, D), "cos": (T, D // 2), "sin": (T, D // 2)}
    for shift in (0, 1, 3, 4, 8, 0):
        tensors = {}
        for name, shape in shapes.items():
            n, start = torch.Size(shape).numel(), shift if name == which else 0
            tensors[name] = random_tensor(n + start, device=device)[start:].view(shape)
        check_out_of_place(**tensors, impl=impl)


def test_lazily_negated_and_conjugated_views(impl, device):
    """The imaginary part of a conjugate is a view whose memory holds the opposite numbers."""
    q = torch.view_as_complex(random_tensor(2, T, HQ, D, 2, dtype=torch.float64, device=device)).conj().imag
    assert q.is_neg()
    cos, sin = random_tables(T, D // 2, device=device)
    check_out_of_place(q, None, cos, sin, impl=impl)
    check_out_of_place(q.resolve_neg(), q, cos, sin, impl=impl)
