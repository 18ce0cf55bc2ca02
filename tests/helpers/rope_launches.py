"""Launches of the rotation's Triton kernel, for the compile checks and tools/kernel_figures.py."""

from __future__ import annotations

import torch

from helpers.noted_steps import Noted, NotingSteps
from ropewalk.ops.rope.call import RopeCall, RopeFlags, Rotation
from ropewalk.ops.rope.launch import rotate

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def specialise(
    *,
    head_dim=128,
    dtype="bf16",
    interleaved=False,
    layout="bthd",
    batch=2,
    tokens=4096,
    heads=(32, 8),
    rotary_dim=None,
    rotary_offset=0,
    kind="index",
    index_dtype=torch.int64,
    table_dtype="fp32",
    inplace=False,
    pair_block=None,
    alignment=16,
    padding=0,
    far=False,
) -> Noted:
    """The launch of such a call: tensors without memory are enough to ask.

    padding: by how many elements each head is further from the next than it must be; far: with batch rows that are
    more than 2³¹ elements apart.
    """
    if kind.startswith("packed"):
        layout, batch = "thd", 1
    x_shapes = [
        {"bthd": (batch, tokens, n), "bhtd": (batch, n, tokens), "thd": (tokens, n)}[layout] for n in heads if n
    ]
    xs = [_empty(*shape, head_dim + padding, dtype=DTYPES[dtype])[..., :head_dim] for shape in x_shapes]
    if far:
        xs = [x.as_strided(x.shape, (2**35, *x.stride()[1:])) for x in xs]
    rows = (batch, tokens) if kind == "per-token" else (tokens,)
    cos = _empty(*rows, (rotary_dim or head_dim) // 2, dtype=DTYPES[table_dtype])
    positions_shape = {
        "offsets": (batch,),
        "tokens": (batch, tokens),
        "one-row": (1, tokens),
        "packed-tokens": (tokens,),
        "axes": (3, batch, tokens),
        "packed-axes": (3, tokens),
    }.get(kind)
    call = RopeCall(
        cos,
        cos,
        None if positions_shape is None else _empty(*positions_shape, dtype=index_dtype),
        _empty(5, dtype=index_dtype) if kind == "packed" else None,
        0,
        RopeFlags(layout, interleaved, rotary_offset=rotary_offset, inplace=inplace, pair_block=pair_block),
        _empty(cos.shape[-1], dtype=index_dtype) if kind.endswith("axes") else None,
    )
    on = NotingSteps(alignment)
    rotate(Rotation(*xs, *[None] * (2 - len(xs)), call), on)
    return on.launches["rotate_kernel"]


def _empty(*shape, dtype):
    return torch.empty(*shape, dtype=dtype, device="meta")
