"""`apply_rope` over a block table: cached keys rotated where they are, to move them to other positions.

Shape letters: B rows of the block table, T tokens of a row, H heads, D head dim, R rotary dim, A position axes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.arguments import check_dense
from ropewalk.ops.launch.kinds import Launcher, Operation
from ropewalk.ops.rope.call import RopeCall
from ropewalk.ops.rope.pages.call import PageRotation
from ropewalk.ops.rope.reference import apply_rope
from ropewalk.ops.rope.validate import check_arguments, may_overlap_itself
from ropewalk.ops.tracing import has_values, is_plain_eager, is_transformed

_KERNELS, _REFERENCE = "triton", "reference"
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def rotate_pages(
    pages: Tensor, k: Tensor | None, block_table: Tensor, call: RopeCall, others: dict[str, Any]
) -> Tensor:
    """Rotate the pages that a block table names, in place; `others` are arguments of `apply_rope` that must be None."""
    cos, sin, positions, cu_seqlens, offset, flags, axes = call
    for name, x in {"k": k, "cu_seqlens": cu_seqlens, **others}.items():
        if x is not None:
            raise ValueError(f"{name} was given, but must be None with block_table")
    if not flags.inplace:
        raise ValueError("inplace is False, but must be True with block_table: pages are rotated where they are")
    if flags.layout not in ("bthd", "bhtd"):
        raise ValueError(f"layout is {flags.layout!r}, but must be 'bthd' or 'bhtd' with block_table")
    if flags.impl not in (None, _KERNELS, _REFERENCE):
        raise ValueError(f"impl is {flags.impl!r}, but must be None, 'triton' or 'reference' with block_table")
    if not isinstance(pages, Tensor) or pages.dtype not in DTYPES:
        kind = str(pages.dtype) if isinstance(pages, Tensor) else type(pages).__name__
        raise TypeError(
            f"q is {kind}, but pages must be of float16, bfloat16, float32 or float64: read quantised keys, rotate "
            "them and append them anew"
        )
    check_dense("q", pages)
    if pages.ndim != 4:
        raise ValueError(f"q has shape {tuple(pages.shape)}, but pages must be (pages, page_size, H, D)")
    if pages.requires_grad and torch.is_grad_enabled():
        raise ValueError("q requires grad, but with block_table there is no backward: call under no_grad")
    if may_overlap_itself(pages):
        raise ValueError("q has elements that share memory, but pages must have memory of their own")
    if not isinstance(block_table, Tensor) or block_table.dtype not in (torch.int32, torch.int64):
        kind = str(block_table.dtype) if isinstance(block_table, Tensor) else type(block_table).__name__
        raise TypeError(f"block_table is {kind}, but must be a tensor of int32 or int64")
    if block_table.ndim != 2 or block_table.device != pages.device:
        raise ValueError(
            f"block_table has shape {tuple(block_table.shape)} on {block_table.device}, but must be (B, pages of a "
            f"row) on q's device, {pages.device}"
        )
    if cos.ndim != 2:
        raise ValueError(f"cos has shape {tuple(cos.shape)}, but must be (n, R/2) with block_table")
    pages = pages if flags.layout == "bthd" else pages.transpose(1, 2)
    rows, tokens = block_table.shape[0], block_table.shape[1] * pages.shape[1]
    like = pages.new_empty(1, 1, *pages.shape[2:]).expand(rows, tokens, -1, -1)  # the rows as a batch
    check_arguments(like, None, cos, sin, positions, None, axes, flags._replace(layout="bthd"))
    if positions is None or (positions.ndim == 1 and axes is None):
        start = offset if positions is None else positions[:, None]
        positions = torch.arange(tokens, device=pages.device)[None] + start
    if has_values(block_table) and bool((block_table >= pages.shape[0]).any()):
        raise ValueError(f"block_table holds {int(block_table.max())}, but must be below {pages.shape[0]} pages")
    reason = gpu.why_no_triton(pages.device)
    if flags.impl == _KERNELS and reason is not None:
        raise ValueError(f"impl is {flags.impl!r}, but it cannot run this call: {reason}")
    by_kernel = flags.impl == _KERNELS or (flags.impl is None and reason is None and pages.device.type != "cpu")
    pair_block = 2 if flags.interleaved else flags.pair_block or 2 * cos.shape[1]
    tensors = (pages, block_table, positions, cos, sin, axes)
    rotation = PageRotation(*tensors, pair_block, flags.rotary_offset, flags.inverse)
    if is_plain_eager(*tensors) and not is_transformed():
        # A custom operator takes a third of the host time, in its layers of Python.
        if not pages.is_inference():
            torch._C._increment_version((pages,))
        _run(rotation, by_kernel)
    else:
        torch.ops.ropewalk.rope_pages(*rotation, by_kernel)
    return pages if flags.layout == "bthd" else pages.transpose(1, 2)


def _choose(rotation: PageRotation) -> Launcher:
    from ropewalk.ops.rope.pages.launch import rotate

    return rotate


def _rotate_plain(rotation: PageRotation) -> None:
    """Rotate pages in plain PyTorch."""
    pages, block_table, positions, cos, sin, axes, pair_block, rotary_offset, inverse = rotation
    rows, page_size = block_table.shape[0], pages.shape[1]
    token = torch.arange(block_table.shape[1] * page_size, device=pages.device)
    page, offset = block_table[:, token // page_size].long(), (token % page_size).expand(rows, -1)
    exists = (page >= 0) & (page < pages.shape[0])
    positions = positions.expand(*positions.shape[:-2], *exists.shape)[..., exists]
    where = page[exists], offset[exists]
    pages[where] = apply_rope(
        pages[where],
        cos,
        sin,
        positions=positions,
        layout="thd",
        interleaved=pair_block == 2,
        inverse=inverse,
        rotary_offset=rotary_offset,
        axes=axes,
        pair_block=None if pair_block == 2 else pair_block,
    )


BY_KERNEL = Operation(PageRotation, _choose)


@torch.no_grad()
def _run(rotation: PageRotation, by_kernel: bool) -> None:
    if by_kernel:
        BY_KERNEL.run(rotation)
    else:
        _rotate_plain(rotation)


def _rotate(
    pages: Tensor,
    block_table: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    axes: Tensor | None,
    pair_block: int,
    rotary_offset: int,
    inverse: bool,
    by_kernel: bool,
) -> None:
    _run(PageRotation(pages, block_table, positions, cos, sin, axes, pair_block, rotary_offset, inverse), by_kernel)


_rope_pages = torch.library.custom_op("ropewalk::rope_pages", _rotate, mutates_args=("pages",))


@_rope_pages.register_fake
def _(*arguments: Any) -> None:
    return None
