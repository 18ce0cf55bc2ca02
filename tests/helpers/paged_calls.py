"""Calls of attention over pages that the decode kernels for Hopper run in place."""

from __future__ import annotations

import torch

from ropewalk import append_kv
from ropewalk.ops.attention.reference import read_pages

STORED = {"own": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}


def empty_pages(kind, dtype, shape, device):
    """Return pages (pages, page_size, K, D) of NaN, or of numbers that none should read, and their scales."""
    *_, n_kv_heads, dim = shape
    if kind == "own":
        return *(torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in "kv"), {}
    width = dim // 2 if kind == "int4" else dim
    stored = [torch.full((*shape[:3], width), 0x7F, dtype=torch.uint8, device=device) for _ in "kv"]
    if kind == "fp8":
        scales = [torch.rand(n_kv_heads, device=device) * 0.05 + 0.03, torch.tensor(0.02, device=device)]
    else:
        of = torch.float16 if kind == "int4" else torch.float32
        shape = (*shape[:3], dim // 32) if kind == "int4" else shape[:3]
        scales = [torch.full(shape, torch.nan, dtype=of, device=device) for _ in "kv"]
    k, v = (x.view(STORED[kind]) for x in stored)
    return k, v, {"k_scale": scales[0], "v_scale": scales[1]}


def fill_pages(kind, dtype, lengths, device, *, page_size=16, heads=2, dim=64, capacity=None):
    """Append random keys and values of some rows; return pages, scales, the block table and row lengths.

    The first page of all rows is that of the first one. Entries of the table past a row's length name no page.
    """
    batch = len(lengths)
    per_row = capacity or max(1, -(-max(lengths) // page_size))
    k, v, scales = empty_pages(kind, dtype, (batch * per_row, page_size, heads, dim), device)
    table = torch.randperm(batch * per_row).view(batch, per_row)
    table[:, 0] = table[0, 0]
    slots = {int(table[b, i // page_size]) * page_size + i % page_size for b in range(batch) for i in range(lengths[b])}
    slots = torch.tensor(sorted(slots), dtype=torch.int64, device=device)
    tokens_k, tokens_v = torch.randn(2, len(slots), heads, dim, device=device).to(dtype)
    tokens_k[..., 3] *= 4
    if kind == "own":
        k.view(-1, heads, dim)[slots], v.view(-1, heads, dim)[slots] = tokens_k, tokens_v
    elif len(slots):
        cos, sin = torch.ones(len(slots), dim // 2, device=device), torch.zeros(len(slots), dim // 2, device=device)
        append_kv(tokens_k, tokens_v, k, v, slots, cos=cos, sin=sin, **scales, impl="reference")
    for row, length in enumerate(lengths):
        table[row, -(-length // page_size) :] = (-1, 2**30)[row % 2]
    return k, v, scales, table.int().to(device), torch.tensor(lengths, device=device)


def exact_rows(k, v, scales, table, lengths):
    """Return what the pages of each row mean, (B, Tk, K, D), float64; zeros where nothing was written."""
    rows = []
    for name, x in (("k_scale", k), ("v_scale", v)):
        if scales:
            x = read_pages(x.transpose(1, 2), scales[name], torch.float64).transpose(1, 2)
        x = x.double()[table.long().clamp(0, len(x) - 1)].flatten(1, 2)
        exists = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        rows.append(torch.where(exists[..., None, None], x, 0.0))
    return rows
