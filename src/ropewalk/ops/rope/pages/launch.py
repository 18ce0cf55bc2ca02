"""The launch of the kernel that rotates pages of cached keys.

Shape letters: B rows of the block table, T tokens of a row, H heads, D head dim.
"""

from __future__ import annotations

import triton
from torch import Tensor

from ropewalk.ops.launch.steps import Steps
from ropewalk.ops.rope.arguments import contiguous
from ropewalk.ops.rope.pages.call import PageRotation
from ropewalk.ops.rope.pages.kernel import rotate_pages_kernel

MAX_ELEMENTS = 2048  # pairs of a program: 4 warps hold both halves in registers


def rotate(rotation: PageRotation, on: Steps) -> tuple[Tensor, ...]:
    """Rotate pages (pages, page_size, H, D) that a table (B, n) names, in place."""
    pages, block_table, positions, cos, sin, axes, pair_block, rotary_offset, inverse = rotation
    n_pages, page_size, n_heads, head_dim = pages.shape
    rows, tokens = block_table.shape[0], block_table.shape[1] * page_size
    if rows * tokens * n_heads == 0 or n_pages == 0:
        return ()
    n_pairs = cos.shape[1]
    block_pairs = triton.next_power_of_2(max(1, n_pairs))
    block_heads = min(triton.next_power_of_2(n_heads), max(1, MAX_ELEMENTS // block_pairs))
    block_tokens = max(1, min(16, MAX_ELEMENTS // (block_pairs * block_heads)))
    row_stride = positions.stride(-2) if positions.shape[-2] > 1 else 0
    on.launch(
        rotate_pages_kernel,
        (rows * triton.cdiv(tokens, block_tokens), triton.cdiv(n_heads, block_heads)),
        pages_ptr=pages,
        stride_page=pages.stride(0),
        stride_token=pages.stride(1),
        stride_head=pages.stride(2),
        stride_feature=pages.stride(3),
        table_ptr=block_table,
        table_stride_row=block_table.stride(0),
        table_stride_column=block_table.stride(1),
        positions_ptr=positions,
        positions_stride_axis=0 if axes is None else positions.stride(0),
        positions_stride_row=row_stride,
        positions_stride_token=positions.stride(-1),
        axes_ptr=contiguous(axes, on),
        cos_ptr=cos,
        sin_ptr=sin,
        cos_stride_row=cos.stride(0),
        cos_stride_pair=cos.stride(1),
        sin_stride_row=sin.stride(0),
        sin_stride_pair=sin.stride(1),
        n_tokens=tokens,
        n_pages=n_pages,
        n_rows=cos.shape[0],
        n_axes=0 if axes is None else positions.shape[0],
        N_HEADS=n_heads,
        HEAD_DIM=head_dim,
        N_PAIRS=n_pairs,
        HALF=pair_block // 2,
        ROTARY_OFFSET=rotary_offset,
        PAGE_SIZE=page_size,
        INVERSE=inverse,
        BLOCK_TOKENS=block_tokens,
        BLOCK_HEADS=block_heads,
        BLOCK_PAIRS=block_pairs,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
    )
    return ()
