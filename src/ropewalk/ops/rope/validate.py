"""The checks of `apply_rope`'s arguments, and their errors.

They read shapes, strides, dtypes and devices alone, so that a plan built after them holds for all calls with the same
metadata. `check_values` is the exception: it reads values, of CPU tensors only.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch._C._autograd import CreationMeta, _get_creation_meta

from ropewalk.ops.arguments import check_dense, check_flags, check_pair_block
from ropewalk.ops.rope.call import RopeFlags

LAYOUTS = ("bthd", "bhtd", "thd")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = 512


def check_arguments(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    cu_seqlens: Tensor | None,
    axes: Tensor | None,
    flags: RopeFlags,
) -> None:
    """Raise unless the arguments fit together, by their metadata alone."""
    layout = flags.layout
    check_tensors(q, k, layout)
    check_flags(flags, "interleaved", "inverse", "inplace")
    head_dim = q.shape[-1]
    batch, tokens = as_bthd(q, layout).shape[:2]
    _check_tables(q, cos, sin, positions, batch, tokens, layout)
    if are_per_head(cos, positions):
        _check_heads(q, k, cos, positions, layout)
    _check_rotary(cos, head_dim, flags.rotary_dim, flags.rotary_offset)
    check_pair_block(flags.pair_block, 2 * cos.shape[-1], flags.interleaved)
    _check_positions(q, cos, positions, cu_seqlens, axes, batch, tokens, layout)


def check_tensors(q: Tensor, k: Tensor | None, layout: str) -> None:
    """Raise unless q and k fit together and the layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}, but must be one of {', '.join(map(repr, LAYOUTS))}")
    _check_x("q", q, layout)
    if k is not None:
        _check_x("k", k, layout)
        _check_same("k.dtype", k.dtype, "q.dtype", q.dtype)
        _check_same("k.device", k.device, "q.device", q.device)
        head_axis = layout.index("h")
        for axis, letter in enumerate(layout):
            if axis != head_axis and k.shape[axis] != q.shape[axis]:
                raise ValueError(
                    f"k has shape {tuple(k.shape)}, but must agree with q's {tuple(q.shape)} on all of {layout!r} "
                    f"except the number of heads; they differ on {letter!r}"
                )


def check_offsets(offsets: Tensor, positions: Tensor | int | None, layout: str, axes: Tensor | None) -> None:
    """Raise unless `offsets` are a tensor (B,), and the only positions of a padded layout."""
    if not isinstance(offsets, Tensor):
        hint = f"; one offset for all batch rows is positions={offsets}" if isinstance(offsets, int) else ""
        raise TypeError(f"offsets is {type(offsets).__name__}, but must be a tensor (B,) of int32 or int64{hint}")
    if positions is not None:
        raise ValueError("offsets and positions were both given, but one of them must be None")
    if axes is not None:
        raise ValueError("offsets must be None where axes is given: positions has a row for each axis")
    if layout == "thd":
        raise ValueError(
            "offsets was given with layout 'thd', but must come with 'bthd' or 'bhtd'; packed tokens have positions of "
            "shape (total,)"
        )
    if offsets.ndim != 1:
        hint = "; a position for each token is positions" if offsets.ndim == 2 else ""
        raise ValueError(f"offsets has shape {tuple(offsets.shape)}, but must be (B,), one for each batch row{hint}")


def check_not_offsets(positions: Tensor, layout: str) -> None:
    """Raise where 1-D `positions` could be meant for the tokens of one row or as an offset for each row."""
    if layout in ("bthd", "bhtd"):
        raise ValueError(
            f"positions has shape {tuple(positions.shape)}, but in layout {layout!r} it must be (1, T) or (B, T): for "
            f"tokens of every row pass positions[None], for one offset per batch row offsets=, (B,)"
        )


def are_per_head(cos: Tensor, positions: Tensor | None) -> bool:
    """Say whether tables have rows for each head: (n, H, R/2) by positions, or (B or 1, T, H, R/2)."""
    return cos.ndim == 4 or (cos.ndim == 3 and positions is not None)


def rows_by_index(q: Tensor, cos: Tensor, sin: Tensor, offset: int, layout: str) -> tuple[Tensor, Tensor, int]:
    """Return tables (n, H, R/2) without positions as rows of each token and head, and 0; others as they are.

    Tables that fit as (B or 1, T, R/2) are per token.
    """
    is_whole = isinstance(q, Tensor) and isinstance(sin, Tensor) and sin.shape == cos.shape
    if not (is_whole and layout in ("bthd", "bhtd", "thd") and q.ndim == len(layout)):
        return cos, sin, offset  # the checks raise
    batch, tokens = as_bthd(q, layout).shape[:2]
    n_rows, n_heads, _ = cos.shape
    if (n_rows in (1, batch) and n_heads == tokens and offset == 0) or n_heads != q.shape[layout.index("h")]:
        return cos, sin, offset
    if not 0 <= offset <= n_rows - tokens:
        raise ValueError(
            f"positions is {offset}, but the {tokens} tokens from there must lie in the {n_rows} rows of cos, which "
            f"has shape {tuple(cos.shape)}"
        )
    rows = slice(offset, offset + tokens)
    return cos[None, rows], sin[None, rows], 0


def check_fixed(cos: Tensor, sin: Tensor) -> None:
    """Raise if a table requires grad."""
    if cos.requires_grad or sin.requires_grad:
        raise ValueError(
            "cos or sin requires grad, but neither is differentiated where heads share them: pass cos.detach() and "
            "sin.detach(), or tables with a row for each head, (n, H, R/2) or (B, T, H, R/2)"
        )


def check_learned(cos: Tensor, sin: Tensor, positions: Tensor | None, inplace: bool) -> None:
    """Raise if a table that requires grad cannot be differentiated."""
    if not are_per_head(cos, positions):
        check_fixed(cos, sin)
    if inplace and torch.is_grad_enabled():
        raise ValueError(
            "inplace is True, but must be False where cos or sin requires grad: their gradient needs q and k as they "
            "were"
        )


def max_offset(q: Tensor, cos: Tensor, positions: Tensor | None, cu_seqlens: Tensor | None, layout: str) -> int:
    """Return the largest offset with which no position that the host can compute leaves the table."""
    if cos.ndim > 2 or positions is not None:
        return 0
    n_rows, tokens = cos.shape[0], q.shape[layout.index("t")]
    if cu_seqlens is not None:
        # The lengths of the sequences are on the device: tokens past the table become NaN there.
        tokens = min(tokens, 1)
    return n_rows - tokens


def check_offset(
    offset: int, q: Tensor, cos: Tensor, positions: Tensor | None, cu_seqlens: Tensor | None, layout: str
) -> None:
    """Raise unless positions offset, offset + 1, … stay inside the table."""
    limit = max_offset(q, cos, positions, cu_seqlens, layout)
    if 0 <= offset <= limit:
        return
    if cos.ndim > 2:
        hint = "" if cos.ndim == 4 else "; tables per head are (n, H, R/2) with q's heads"
        raise ValueError(
            f"positions is {offset}, but must be None where cos and sin are per token (they have {cos.ndim} "
            f"dimensions){hint}"
        )
    tokens = q.shape[layout.index("t")]
    rule = f"the start must be at least 0 and at most {limit}" if limit >= 0 else f"they must have at least {tokens}"
    raise ValueError(
        f"positions start at {offset} for {tokens} tokens, but cos and sin have rows 0 … {cos.shape[0] - 1}: {rule}"
    )


def check_values(cu_seqlens: Tensor | None, total: int) -> None:
    """Raise unless cu_seqlens rises from 0 to `total`; on a GPU it is not read, as that would wait for the device."""
    if cu_seqlens is None or cu_seqlens.device.type != "cpu":
        return
    values = cu_seqlens.tolist()
    if values[0] != 0:
        raise ValueError(f"cu_seqlens starts at {values[0]}, but must start at 0")
    for index, (start, end) in enumerate(pairwise(values)):
        if end < start:
            raise ValueError(f"cu_seqlens falls from {start} to {end} at index {index + 1}, but must not decrease")
    if values[-1] != total:
        raise ValueError(f"cu_seqlens ends at {values[-1]}, but must end at the number of tokens, {total}")


def check_axes(axes: Tensor, n_axes: int) -> None:
    """Raise unless each pair's axis is a row of the positions; on a GPU it is not read, and such a pair gives NaN."""
    if axes.device.type != "cpu":
        return
    for pair, axis in enumerate(axes.tolist()):
        if not 0 <= axis < n_axes:
            raise ValueError(
                f"axes is {axis} for pair {pair}, but must be from 0 to {n_axes - 1}: positions has {n_axes} rows"
            )


def check_inplace(q: Tensor, k: Tensor | None) -> None:
    """Raise unless q and k can be overwritten: no two elements may share memory."""
    for name, x in (("q", q), ("k", k)):
        if x is not None and may_overlap_itself(x):
            raise ValueError(
                f"{name} has strides {x.stride()} at shape {tuple(x.shape)}: some of its elements share memory (an "
                f"expanded tensor?), so inplace must be False"
            )


def check_disjoint(q: Tensor, k: Tensor) -> None:
    """Raise unless q and k, about to be overwritten, share no element."""
    if share_memory(q.shape, q.stride(), k.shape, k.stride(), k.data_ptr() - q.data_ptr(), q.element_size()):
        raise ValueError("q and k share memory, so inplace must be False")


@lru_cache(maxsize=4096)
def share_memory(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    other_shape: tuple[int, ...],
    other_strides: tuple[int, ...],
    distance: int,
    itemsize: int,
) -> bool:
    """Say whether two tensors share a byte; the other one starts `distance` bytes after the first."""
    first, other = (
        [((size - 1) * stride * itemsize, stride * itemsize) for size, stride in zip(*x, strict=True)]
        for x in ((shape, strides), (other_shape, other_strides))
    )
    reach, other_reach = (sum(extent for extent, _ in x) + itemsize - 1 for x in (first, other))
    if 0 in (*shape, *other_shape) or distance > reach or -distance > other_reach:
        return False
    # A byte of both: the offset into the first, less that into the other, is the distance. Each stride adds a multiple
    # of itself, within what it reaches in each; bytes of an element have the stride 1.
    steps = {1: (1 - itemsize, itemsize - 1)}
    for sign, x in ((1, first), (-1, other)):
        for extent, stride in x:
            low, high = steps.get(stride, (0, 0))
            steps[stride] = (low, high + extent) if sign == 1 else (low - extent, high)
    return _is_reached(tuple((stride, *steps[stride]) for stride in sorted(steps, reverse=True) if stride), distance)


def _is_reached(steps: tuple[tuple[int, int, int], ...], distance: int) -> bool:
    """Say whether a sum of multiples of strides, each from a least to a greatest one, is the distance."""
    stride, low, high = steps[0]
    others = steps[1:]
    if not others:  # the stride 1
        return low <= distance <= high
    least, greatest = sum(x for _, x, _ in others), sum(x for *_, x in others)
    start = max(low, -((greatest - distance) // stride) * stride)
    stop = min(high, (distance - least) // stride * stride)
    return any(_is_reached(others, distance - part) for part in range(start, stop + 1, stride))


def check_overwritable(name: str, x: Tensor) -> None:
    """Raise before `x` is overwritten if autograd would not allow it."""
    is_view = x._is_view()
    base = x._base if is_view else x
    if base is not None and base.requires_grad and base.is_leaf:
        kind = "a view of a leaf" if is_view else "a leaf"
        raise RuntimeError(f"{name} is {kind} that requires grad, so inplace must be False")
    if is_view and _get_creation_meta(x) != CreationMeta.DEFAULT:
        raise RuntimeError(
            f"{name} is a view whose overwriting autograd cannot record (made by split, chunk or unbind, or without "
            f"grad), so inplace must be False; a slice, x[:, :, :H], can be overwritten"
        )


def reach(x: Tensor) -> int:
    """Return the bytes from the start of the first element to the start of the last."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) * x.element_size()


def as_bthd(x: Tensor, layout: str) -> Tensor:
    """View `x` as (B, T, H, D), a packed tensor as one batch row."""
    if layout == "bhtd":
        return x.transpose(1, 2)
    return x.unsqueeze(0) if layout == "thd" else x


def may_overlap_itself(x: Tensor) -> bool:
    """Say whether two indices of `x` may address the same memory; False is certain."""
    reach = 0
    rest = [(stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    while rest:
        smallest = 0  # torch.compile sorts and takes the least of no symbols
        for index in range(1, len(rest)):
            if rest[index][0] < rest[smallest][0]:
                smallest = index
        stride, size = rest.pop(smallest)
        if stride <= reach:
            return x.numel() > 0
        reach += stride * (size - 1)
    return False


def _check_x(name: str, x: Tensor, layout: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}, but must be a tensor")
    check_dense(name, x)
    if x.ndim != len(layout):
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, but must have {len(layout)} dimensions in layout {layout!r}, "
            f"({', '.join(layout.upper())})"
        )
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {x.dtype}, but must be float16, bfloat16, float32 or float64")
    if x.shape[-1] > MAX_HEAD_DIM:
        raise ValueError(f"{name} has head dim {x.shape[-1]}, but it must be at most {MAX_HEAD_DIM}")


def _check_same(name: str, value: object, other_name: str, other: object) -> None:
    if value != other:
        raise ValueError(f"{name} is {value}, but must be {other_name}, {other}")


def _check_tables(
    q: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, batch: int, tokens: int, layout: str
) -> None:
    for name, table in (("cos", cos), ("sin", sin)):
        if not isinstance(table, Tensor):
            raise TypeError(f"{name} is {type(table).__name__}, but must be a tensor")
        check_dense(name, table)
        if table.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {table.dtype}, but must be float16, bfloat16, float32 or float64")
        _check_same(f"{name}.device", table.device, "q.device", q.device)
    if cos.ndim not in (2, 3, 4):
        raise ValueError(
            f"cos has shape {tuple(cos.shape)}, but must be (n, R/2), or (B, T, R/2) per token; per head (n, H, R/2), "
            f"or (B, T, H, R/2)"
        )
    _check_same("sin.shape", tuple(sin.shape), "cos.shape", tuple(cos.shape))
    _check_same("sin.dtype", sin.dtype, "cos.dtype", cos.dtype)
    is_per_token = cos.ndim == 4 or (cos.ndim == 3 and positions is None)
    if is_per_token and not (cos.shape[0] in (1, batch) and cos.shape[1] == tokens):
        rule, hint = ("(B or 1, T, R/2)", "") if cos.ndim == 3 else ("(B or 1, T, H, R/2)", "")
        if cos.ndim == 3 and cos.shape[1] == q.shape[layout.index("h")]:
            hint = "; tables per head, (n, H, R/2), take positions beside cu_seqlens"
        raise ValueError(
            f"cos has shape {tuple(cos.shape)}, but per token it must be {rule} with B = {batch} and "
            f"T = {tokens}, as in q of shape {tuple(q.shape)} (layout {layout!r}){hint}"
        )


def _check_heads(q: Tensor, k: Tensor | None, cos: Tensor, positions: Tensor | None, layout: str) -> None:
    """Raise unless q and k have as many heads as the tables."""
    n_heads = q.shape[layout.index("h")]
    if cos.shape[-2] != n_heads:
        shape, rule = tuple(cos.shape), "(B or 1, T, H, R/2)" if cos.ndim == 4 else "(n, H, R/2)"
        batch, tokens = as_bthd(q, layout).shape[:2]
        if cos.ndim == 3 and shape[0] in (1, batch) and shape[1] == tokens:
            name = "offsets" if _are_offsets(positions, layout, None) else "positions"
            raise ValueError(
                f"{name} must be None where cos and sin are per token (they have shape {shape}); per head they must be "
                f"{rule} with H = {n_heads}, the heads of q"
            )
        raise ValueError(f"cos has shape {shape}, but per head it must be {rule} with H = {n_heads}, the heads of q")
    if k is not None and k.shape[layout.index("h")] != n_heads:
        raise ValueError(
            f"k has {k.shape[layout.index('h')]} heads, but must have {n_heads}, as many as q, where cos and sin are "
            f"per head: rotate k by a call with tables of its own heads"
        )


def _check_rotary(cos: Tensor, head_dim: int, rotary_dim: int | None, rotary_offset: int) -> None:
    width = 2 * cos.shape[-1]
    for name, value in (("rotary_dim", rotary_dim), ("rotary_offset", rotary_offset)):
        if value is not None and not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}, but must be an int")
    if rotary_dim is not None and rotary_dim % 2:
        raise ValueError(f"rotary_dim is {rotary_dim}, but must be even")
    if rotary_dim is not None and rotary_dim != width:
        hint = "; cos holds every angle once, not twice" if 2 * rotary_dim == width else ""
        raise ValueError(
            f"rotary_dim is {rotary_dim}, but must be twice the width of cos, {width} with shape "
            f"{tuple(cos.shape)}{hint}"
        )
    if width == 0:
        raise ValueError(f"cos has shape {tuple(cos.shape)}, but must have at least one column")
    if rotary_offset < 0 or rotary_offset + width > head_dim:
        raise ValueError(
            f"rotary_offset {rotary_offset} and the rotary dim {width} (twice the width of cos) must lie within the "
            f"head dim, {head_dim}"
        )


def _check_positions(
    q: Tensor,
    cos: Tensor,
    positions: Tensor | None,
    cu_seqlens: Tensor | None,
    axes: Tensor | None,
    batch: int,
    tokens: int,
    layout: str,
) -> None:
    positions_name = "offsets" if _are_offsets(positions, layout, axes) else "positions"
    for name, index in ((positions_name, positions), ("cu_seqlens", cu_seqlens), ("axes", axes)):
        if index is None:
            continue
        if not isinstance(index, Tensor):
            raise TypeError(f"{name} is {type(index).__name__}, but must be a tensor of int32 or int64")
        if index.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} has dtype {index.dtype}, but must be int32 or int64")
        check_dense(name, index)
        _check_same(f"{name}.device", index.device, "q.device", q.device)
    if cu_seqlens is not None:
        if layout != "thd":
            raise ValueError(f"cu_seqlens was given with layout {layout!r}, but must come with layout 'thd' alone")
        if cu_seqlens.ndim != 1 or cu_seqlens.numel() == 0:
            raise ValueError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}, but must be (number of sequences + 1,)")
    if cos.ndim > 2 and axes is not None:
        kind = "per token" if cos.ndim == 3 else "per token and head"
        raise ValueError(f"axes must be None where cos and sin are {kind} (they have {cos.ndim} dimensions)")
    if cos.ndim == 4 and positions is not None:
        raise ValueError(f"{positions_name} must be None where cos and sin are per token (they have 4 dimensions)")
    if cos.ndim > 2 and positions is None:
        return
    if axes is not None:
        _check_several_axes(cos, positions, axes, batch, tokens, layout)
        return
    if positions is None:
        if layout == "thd" and cu_seqlens is None:
            raise ValueError("layout is 'thd', so cu_seqlens or positions of shape (total,) must be given")
        return
    shape = tuple(positions.shape)
    if _is_multimodal(shape, (tokens,) if layout == "thd" else (batch, tokens)):
        raise ValueError(
            f"positions has shape {shape}, {shape[0]} axes for each token (multimodal RoPE, M-RoPE), so axes must be "
            f"given: the axis of each pair, (R/2,), as mrope_axes makes it"
        )
    if layout == "thd":
        if shape != (tokens,):
            raise ValueError(f"positions has shape {shape}, but in layout 'thd' it must be (total,), ({tokens},)")
    elif len(shape) == 1:
        if shape != (batch,):
            raise ValueError(f"offsets has shape {shape}, but must be (B,), ({batch},)")
    elif len(shape) != 2 or shape[0] not in (1, batch) or shape[1] != tokens:
        raise ValueError(f"positions has shape {shape}, but must be (1, T) or (B, T) with B = {batch}, T = {tokens}")


def _are_offsets(positions: object, layout: str, axes: Tensor | None) -> bool:
    return layout != "thd" and axes is None and isinstance(positions, Tensor) and positions.ndim == 1


def _check_several_axes(
    cos: Tensor, positions: Tensor | None, axes: Tensor, batch: int, tokens: int, layout: str
) -> None:
    n_pairs = cos.shape[-1]
    if axes.shape != (n_pairs,):
        raise ValueError(
            f"axes has shape {tuple(axes.shape)}, but must be (R/2,), ({n_pairs},), as cos has {n_pairs} columns"
        )
    expected: list[tuple[int, ...]]
    if layout == "thd":
        rule, expected = f"(A, total) with total = {tokens}", [(tokens,)]
    else:
        rule, expected = f"(A, 1, T) or (A, B, T) with B = {batch}, T = {tokens}", [(1, tokens), (batch, tokens)]
    if positions is None:
        raise ValueError(f"axes was given, so positions must be a tensor, {rule}")
    shape = tuple(positions.shape)
    if shape[1:] not in expected or shape[0] == 0:
        raise ValueError(f"positions has shape {shape}, but with axes it must be {rule}, and A at least 1")


def _is_multimodal(shape: tuple[int, ...], tokens: tuple[int, ...]) -> bool:
    """Say whether positions of this shape are several for each token, and cannot be one for each.

    `tokens` is the shape of one position for each token, (T,) or (B, T).
    """
    if shape == tokens or len(shape) < 2 or shape[-1] != tokens[-1]:
        return False
    if len(shape) == len(tokens):  # one batch row's, without its dimension
        return shape[0] == 3
    return len(shape) == len(tokens) + 1 and (len(tokens) == 1 or shape[1] in (1, tokens[0])) and shape[0] > 1
