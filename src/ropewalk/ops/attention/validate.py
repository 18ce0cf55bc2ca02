"""Validating the arguments of `attention`: the record of a call, or the error.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v), S packed
sequences.
"""

from __future__ import annotations

import math
import operator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.ops.arguments import check_dense, check_flags
from ropewalk.ops.attention.blocks.tables import find_tables
from ropewalk.ops.attention.call import MAX_PAGE_SIZE, AttentionCall, BlockTables, as_bhtd, kv_capacity, rope_tables
from ropewalk.ops.attention.quantise.precision import QuantizedProducts, as_products, precision_of
from ropewalk.ops.attention.tables import resolve_scheme, with_rows
from ropewalk.ops.cache.formats import NUMBERS_PER_ELEMENT, QUANTIZED, Format
from ropewalk.ops.cache.validate import check_scale, refuse_bytes
from ropewalk.ops.tracing import differentiates, has_values, is_dtensor
from ropewalk.schemes import NoPosition, PositionScheme
from ropewalk.schemes.base import check_class

LAYOUTS = ("bthd", "bhtd", "thd")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NO_POSITION = NoPosition()


class Arguments(NamedTuple):
    """The keywords of `attention` that decide what is computed, with their defaults."""

    position: PositionScheme = NO_POSITION
    causal: bool = False
    window: int | tuple[int, int] | None = None
    scale: float | None = None
    mask: Tensor | None = None
    key_lengths: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    positions_q: Tensor | None = None
    positions_k: Tensor | None = None
    key_starts: Tensor | None = None
    query_starts: Tensor | None = None
    block_table: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    keys_rotated: bool = False
    layout: str = "bthd"
    gate: Tensor | None = None
    blocks: BlockTables | None = None  # or what these come from: BlockLists, or FlexAttention's BlockMask
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    precision: str | QuantizedProducts | None = None


class Unchecked(NamedTuple):
    """A call as the caller makes it, but for a norm, which comes before."""

    q: Tensor
    k: Tensor
    v: Tensor
    arguments: Arguments
    return_lse: bool = False
    return_max_logits: bool = False
    deterministic: bool | None = None
    impl: str | None = None


def resolve(unchecked: Unchecked) -> AttentionCall:
    """Validate a call, and resolve its scheme to tables and numbers."""
    q, k, v, arguments, _, _, deterministic, _ = unchecked
    check_flags(unchecked, "return_lse", "return_max_logits")
    if not (deterministic is None or isinstance(deterministic, bool)):
        raise TypeError(f"deterministic is {deterministic!r}, but must be None, True or False")
    if torch.compiler.is_compiling():
        _fix_all_but_lengths(q, k, v, arguments.layout)
    elif torch._C._get_tracing_state() is not None:
        raise TypeError(
            "q is traced by torch.jit.trace, but attention must know sizes as ints: use torch.export or torch.compile"
        )
    call = resolve_scheme(validate(q, k, v, arguments))
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    needs_backward = False
    if torch.is_grad_enabled():
        params = call.score_mod_params
        learns = (params is not None and params.requires_grad) or (call.sinks is not None and call.sinks.requires_grad)
        if learns and call.block_table is not None:
            raise ValueError(
                "position has parameters that require grad, but with block_table there is no backward: call under "
                "no_grad"
            )
        needs_backward = learns or q.requires_grad or k.requires_grad or v.requires_grad
    if call.precision is not None:
        check_precision_grad(arguments.precision, needs_backward, q, k, v, arguments.gate, *rope_tables(call))
    if needs_backward:
        call = with_rows(call)
    return call._replace(
        return_lse=unchecked.return_lse,
        deterministic=deterministic,
        needs_backward=needs_backward,
        return_max_logits=unchecked.return_max_logits,
    )


def check_precision_grad(precision: Any, needs_backward: bool, *tensors: Tensor | None) -> None:
    """Raise if a gradient is needed that a call with 8-bit products does not compute.

    tensors: those of the call that may need one, beside what needs a backward.
    """
    if not torch.is_grad_enabled():
        return
    needs_grad = needs_backward or any(x is not None and x.requires_grad for x in tensors)
    products = as_products(precision)
    if needs_grad and products is not None and products.backward is None:
        raise ValueError(
            f"precision is {precision!r}, whose backward is None, but a gradient is needed: pass precision="
            f"QuantizedProducts(…, backward='16-bit'), or call under no_grad"
        )
    if not torch.compiler.is_compiling() and differentiates(*tensors):
        raise ValueError(
            f"precision is {precision!r}, but must be None where torch.func or forward-mode differentiation "
            f"differentiates, whatever its backward: pass None, or call under no_grad"
        )


def _fix_all_but_lengths(q: Tensor, k: Tensor, v: Tensor, layout: str) -> None:
    """Let torch.compile take the numbers of heads and the head dims for constants, as the kernels do."""
    heads = -3 if layout == "bhtd" else -2
    for x in (q, k, v):
        if x.ndim in (len(layout), 4):
            len(range(x.shape[heads]))  # a range has a length that must be known
            len(range(x.shape[-1]))


def validate(q: Tensor, k: Tensor, v: Tensor, arguments: Arguments) -> AttentionCall:
    """Validate the arguments of `attention` and build the call, its scheme not yet resolved.

    Dropout needs a seed beside: `call._replace(seed=...)`. The gate is checked alone: a backend's kernels take it by
    `call._replace(gate=...)`, and after others it acts on the output.
    """
    is_over_cache = arguments.layout == "thd" and isinstance(k, Tensor) and k.ndim == 4
    call = (_validate_over_cache if is_over_cache else _validate)(q, k, v, arguments)
    _check_pages(call)
    if arguments.precision is not None:
        products = as_products(arguments.precision)
        _check_precision(arguments)
        call = call._replace(precision=precision_of(products))
    return call


def _check_precision(arguments: Arguments) -> None:
    """Raise if a call with 8-bit products has what they do not go with."""
    others = {
        "dropout_p above 0": arguments.dropout_p > 0,
        "block_table": arguments.block_table is not None,
        "k_scale": arguments.k_scale is not None or arguments.v_scale is not None,
        "packed queries over a cache": arguments.layout == "thd" and arguments.key_lengths is not None,
    }
    for name, is_passed in others.items():
        if is_passed:
            raise ValueError(f"precision was passed with {name}, but must be None: 8-bit products do not support it")


def _validate(q: Tensor, k: Tensor, v: Tensor, arguments: Arguments) -> AttentionCall:
    """Validate all but the numbers of pages."""
    layout, position, block_table = arguments.layout, arguments.position, arguments.block_table
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}, but must be one of {', '.join(map(repr, LAYOUTS))}")
    if not isinstance(position, PositionScheme):
        raise TypeError(f"position is {position!r}, but must be a scheme of ropewalk.schemes, such as Rope()")
    check_class(position)
    batch, heads, queries, head_dim, value_dim, keys = _check_tensors(
        q, k, v, layout, block_table, (arguments.k_scale, arguments.v_scale)
    )
    window_left, window_right = _as_window(arguments.window)
    check_flags(arguments, "causal", "keys_rotated")
    causal = bool(arguments.causal) or window_right == 0
    # make_fx has symbols for sizes.
    scale = int(head_dim) ** -0.5 if arguments.scale is None else _as_float(arguments.scale)
    if not abs(scale) < math.inf:
        raise ValueError(f"scale is {arguments.scale!r}, but must be a finite number")
    cu_seqlens_k = arguments.cu_seqlens_q if arguments.cu_seqlens_k is None else arguments.cu_seqlens_k
    if layout == "thd":
        _check_packed(q, queries, keys, arguments.cu_seqlens_q, cu_seqlens_k)
        for name in ("mask", "key_lengths", "key_starts", "query_starts", "block_table"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"{name} was given beside cu_seqlens_q, but layout 'thd' takes none")
    elif cu_seqlens_k is not None:
        name = "cu_seqlens_k" if arguments.cu_seqlens_q is None else "cu_seqlens_q"
        raise ValueError(f"{name} was given with layout {layout!r}, but must come with layout 'thd' alone")
    mask = arguments.mask
    if mask is not None:
        mask = _as_mask(mask, batch, heads, queries, keys)
        _check_device("mask", mask, q)
    if arguments.key_lengths is not None:
        _check_rows("key_lengths", arguments.key_lengths, batch, (0, keys), ("0", "Tk"), q)
    if arguments.key_starts is not None:
        _check_rows("key_starts", arguments.key_starts, batch, (0, keys), ("0", "Tk"), q)
    if arguments.query_starts is not None:
        limits = ("−Tq", "Tk − Tq")  # a query before the first key may attend nothing
        _check_rows("query_starts", arguments.query_starts, batch, (-queries, keys - queries), limits, q)
    positions_q, positions_k = arguments.positions_q, arguments.positions_k
    if positions_q is not None:
        positions_q = _check_positions("positions_q", positions_q, batch, queries, q, layout, position)
    if positions_k is not None:
        positions_k = _check_positions("positions_k", positions_k, batch, keys, q, layout, position)
    if layout == "thd" and arguments.positions_q is arguments.positions_k:
        positions_k = positions_q  # the checks took two views of one tensor
    if block_table is not None:
        if arguments.key_lengths is None:
            raise ValueError("key_lengths is None, but block_table needs it: which pages are filled")
        _check_no_grad(q, k, v, arguments)
    blocks: Any = arguments.blocks
    if blocks is not None:
        blocks = find_tables(blocks, q, k, layout, block_table)
    softcap = arguments.softcap
    if softcap is not None:
        softcap = math.nan if isinstance(softcap, bool) else _as_float(softcap)
        if not 0 < softcap < math.inf:
            raise ValueError(f"softcap is {arguments.softcap!r}, but must be None or a finite number above 0")
    if arguments.sinks is not None:
        _check_sinks(arguments.sinks, heads, q)
    if arguments.gate is not None:
        check_gate(arguments.gate, q, v, layout, value_dim)
    dropout_p = _as_float(arguments.dropout_p)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p is {arguments.dropout_p!r}, but must be a number from 0 to below 1")
    if arguments.keys_rotated and position.far_window() is not None:
        raise ValueError(
            f"keys_rotated is True, but {type(position).__name__} rotates a key in one way for near queries and in "
            "another for far ones: pass keys as they are"
        )
    return AttentionCall(
        q=as_bhtd(q, layout),
        k=as_bhtd(k, layout),
        v=as_bhtd(v, layout),
        scheme=position,
        causal=causal,
        window_left=window_left,
        window_right=None if causal else window_right,
        mask=mask,
        key_lengths=arguments.key_lengths,
        key_starts=arguments.key_starts,
        query_starts=arguments.query_starts,
        cu_seqlens_q=arguments.cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        block_table=block_table,
        positions_q=positions_q,
        positions_k=positions_k,
        blocks=blocks,
        scale=scale,
        softcap=softcap,
        k_scale=arguments.k_scale,
        v_scale=arguments.v_scale,
        sinks=arguments.sinks,
        dropout_p=dropout_p,
        keys_rotated=bool(arguments.keys_rotated),
    )


def _validate_over_cache(q: Tensor, k: Tensor, v: Tensor, arguments: Arguments) -> AttentionCall:
    """Validate a call of packed queries over a cache: as a dense call, whose rows are the packed sequences.

    A dense cache is pages too, of as many keys as a row has.
    """
    bounds, key_lengths = arguments.cu_seqlens_q, arguments.key_lengths
    for name in ("cu_seqlens_k", "positions_k", "mask", "key_starts", "query_starts", "blocks"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"{name} was given with packed queries over a cache, which take none")
    if isinstance(q, Tensor) and q.ndim == 3:
        _check_packed(q, q.shape[0], q.shape[0], bounds, bounds)
    if key_lengths is None:
        raise ValueError("key_lengths is None, but a cache needs it: where each sequence's keys end")
    sequences = 1 if bounds is None else bounds.numel() - 1
    # One query stands for those of each sequence: the cache's checks go by the number of sequences.
    rows = q.new_empty(sequences, 1, *q.shape[1:]) if isinstance(q, Tensor) and q.ndim == 3 else q
    dense = arguments._replace(cu_seqlens_q=None, positions_q=None, gate=None, layout="bthd")
    call = _validate(rows, k, v, dense)
    positions_q, block_table = arguments.positions_q, arguments.block_table
    if positions_q is not None:
        positions_q = _check_positions("positions_q", positions_q, 1, q.shape[0], q, "thd", arguments.position)
    if arguments.gate is not None:
        check_gate(arguments.gate, q, v, "thd", call.value_dim)
    _check_no_grad(q, k, v, arguments, "over a cache")
    if block_table is None:
        block_table = torch.arange(sequences, dtype=torch.int32, device=q.device)[:, None]
    return call._replace(q=as_bhtd(q, "thd"), cu_seqlens_q=bounds, block_table=block_table, positions_q=positions_q)


def _as_window(window: Any) -> tuple[int | None, int | None]:
    """Return how many keys before its own a query attends, and how many after it; None for all of a side."""
    if window is None:
        return None, None
    if isinstance(window, (tuple, list)):
        left, right = map(_as_int, window) if len(window) == 2 else (None, None)
        if left is not None and right is not None and left >= -1 and right >= -1:
            return None if left == -1 else left, None if right == -1 else right
    else:
        reach = _as_int(window)
        if reach is not None and reach >= 1:
            return reach - 1, reach - 1
    raise ValueError(
        f"window is {window!r}, but must be None, an int of at least 1, or a pair (left, right) of ints of at least 0, "
        "or -1 for a side without a bound"
    )


def _as_int(value: Any) -> int | None:
    """Return an integer of any type, NumPy's too, as an int; None for what is none, such as a bool or a tensor."""
    if isinstance(value, (bool, Tensor)):
        return None
    try:  # no isinstance: torch.compile takes numbers of NumPy for arrays
        return value if isinstance(value, int) else operator.index(value)
    except TypeError:
        return None


def _as_float(value: Any) -> float:
    """Return a number of any type, NumPy's too, as a float; NaN for what is none, such as a tensor."""
    if isinstance(value, float):
        return value
    if isinstance(value, (Tensor, str, bytes)):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


_SHAPES = {"bthd": "(B, T, H, D)", "bhtd": "(B, H, T, D)", "thd": "(total, H, D)"}


def _check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: str,
    block_table: Tensor | None,
    scales: tuple[Tensor | None, Tensor | None],
) -> tuple[int, int, int, int, int, int]:
    """B, H, Tq, D, Dv and Tk."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is {type(x).__name__}, but must be a tensor")
        if type(x) is not Tensor and is_dtensor(x):  # q would have gone another way
            raise ValueError(f"{name} is a DTensor, but must be a plain tensor, as q is")
        check_dense(name, x)
        if x.ndim != len(layout):
            raise ValueError(f"{name} has shape {tuple(x.shape)}, but must be {_SHAPES[layout]}")
        if name != "q" and x.dtype in QUANTIZED:
            continue
        if x.dtype not in DTYPES or x.dtype != q.dtype:
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise TypeError(f"{name} has dtype {x.dtype}, but q, k and v must share one of {kinds}")
        _check_device(name, x, q)
    batch, heads, queries, head_dim = as_bhtd(q, layout).shape
    rows, key_heads, keys, key_dim = as_bhtd(k, layout).shape
    value_dim = v.shape[-1]
    if k.dtype in QUANTIZED or v.dtype in QUANTIZED or scales != (None, None):
        key_dim, value_dim = _check_quantized(q, k, v, layout, block_table, scales)
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v has shape {tuple(v.shape)}, but must have k's, {tuple(k.shape)}, all but the head dim")
    if block_table is not None and layout != "thd":
        rows, keys = _check_table(block_table, batch, keys, q)
    if rows != batch or key_dim != head_dim:
        raise ValueError(f"k has batch {rows} and head dim {key_dim}, but must have q's, {batch} and {head_dim}")
    if key_heads < 1 or heads % key_heads:
        raise ValueError(f"q has {heads} heads, but they must be a multiple of k's {key_heads}")
    for owner, dim in (("the", head_dim), ("v's", value_dim)):
        if dim < 1:
            raise ValueError(f"{owner} head dim is {dim}, but must be at least 1")
    return batch, heads, queries, head_dim, value_dim, keys


def _check_quantized(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: str,
    block_table: Tensor | None,
    scales: tuple[Tensor | None, Tensor | None],
) -> tuple[int, int]:
    """Return D and Dv of quantised pages."""
    if v.dtype != k.dtype:
        raise TypeError(f"v has dtype {v.dtype}, but must have k's, {k.dtype}")
    kind = QUANTIZED.get(k.dtype, Format.OWN)
    if kind is not Format.OWN and block_table is None:
        raise ValueError(f"block_table is None, but k of {k.dtype} must come in pages")
    if q.dtype == torch.float64 and kind is not Format.OWN:
        raise TypeError(f"q has dtype {q.dtype}, but must be float16, bfloat16 or float32 for pages of {k.dtype}")
    if kind is Format.INT4 and k.shape[-1] == q.shape[-1]:
        refuse_bytes("k", k)
    for name, x, scale in (("k_scale", k, scales[0]), ("v_scale", v, scales[1])):
        check_scale(name, scale, x, kind, head=1 if layout == "bhtd" else 2)
        _check_device(name[0], x, q)
    numbers = NUMBERS_PER_ELEMENT[kind]
    return numbers * k.shape[-1], numbers * v.shape[-1]


def _check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}, but must be on q's device, {q.device}")


def _check_packed(q: Tensor, queries: int, keys: int, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> None:
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise ValueError("cu_seqlens_q is None, but layout 'thd' needs it, (S + 1,), to tell sequences apart")
    for name, bounds, total in (("cu_seqlens_q", cu_seqlens_q, queries), ("cu_seqlens_k", cu_seqlens_k, keys)):
        _check_integers(name, bounds)
        if bounds.ndim != 1 or bounds.numel() == 0:
            raise ValueError(f"{name} has shape {tuple(bounds.shape)}, but must be (S + 1,)")
        _check_device(name, bounds, q)
        if not has_values(bounds):
            continue
        values = bounds.tolist()
        if values[0] != 0:
            raise ValueError(f"{name} starts at {values[0]}, but must start at 0")
        for index, (start, end) in enumerate(pairwise(values)):
            if end < start:
                raise ValueError(f"{name} falls from {start} to {end} at index {index + 1}, but must not decrease")
        if values[-1] > total:
            which = "q" if name == "cu_seqlens_q" else "k"
            raise ValueError(f"{name} ends at {values[-1]}, but must end within {which}'s {total} tokens")
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            f"cu_seqlens_k has shape {tuple(cu_seqlens_k.shape)}, but must have cu_seqlens_q's, "
            f"{tuple(cu_seqlens_q.shape)}"
        )


def _check_table(block_table: Tensor, batch: int, page_size: int, q: Tensor) -> tuple[int, int]:
    """Return the batch rows of the table, and Tk."""
    _check_integers("block_table", block_table)
    if block_table.ndim != 2 or block_table.shape[0] != batch:
        raise ValueError(
            f"block_table has shape {tuple(block_table.shape)}, but must be (B, number of pages) with B = {batch}"
        )
    _check_device("block_table", block_table, q)
    if not 1 <= page_size <= MAX_PAGE_SIZE:
        raise ValueError(f"k has pages of {page_size} keys, but with block_table they must be of 1 to {MAX_PAGE_SIZE}")
    return batch, block_table.shape[1] * page_size


def _check_pages(call: AttentionCall) -> None:
    """Raise unless each entry of a block table that is read names a page; others may hold anything."""
    table, lengths, starts, bounds = call.block_table, call.key_lengths, call.query_starts, call.cu_seqlens_q
    if table is None or lengths is None:
        return
    read = (call.k, table, lengths, call.key_starts, starts, bounds)
    if not all(has_values(x) for x in read if x is not None):
        return
    pages, page_size, keys = call.k.shape[0], call.k.shape[2], kv_capacity(call)
    if keys == 0:
        return
    lengths = lengths.long()
    if bounds is not None:
        queries = bounds.diff()
        first = lengths - queries
    else:
        queries = torch.full_like(lengths, call.q.shape[2])
        first = keys - queries if starts is None else starts.long()
    low, high = torch.zeros_like(lengths) if call.key_starts is None else call.key_starts, lengths
    if call.window_left is not None:
        low = torch.maximum(low, first - call.window_left)
    right = 0 if call.causal else call.window_right
    if right is not None:
        high = torch.minimum(high, first + queries + right)
    begin = torch.arange(0, keys, page_size)
    is_read = (begin < high[:, None]) & (begin + page_size > low[:, None]) & (queries > 0)[:, None]
    outside = is_read & ((table < 0) | (table >= pages))
    if bool(outside.any()):
        page = int(table[outside][0])
        raise ValueError(f"block_table holds {page} below key_lengths, but must be from 0 to below {pages} pages")


def _check_no_grad(q: Tensor, k: Tensor, v: Tensor, arguments: Arguments, of: str = "with block_table") -> None:
    others = (("sinks", arguments.sinks), ("k_scale", arguments.k_scale), ("v_scale", arguments.v_scale))
    for name, x in (("q", q), ("k", k), ("v", v), *others):
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad, but {of} there is no backward: call under no_grad")


def _check_sinks(sinks: Tensor, heads: int, q: Tensor) -> None:
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        kind = str(sinks.dtype) if isinstance(sinks, Tensor) else type(sinks).__name__
        raise TypeError(f"sinks is {kind}, but must be a floating-point tensor, (H,)")
    check_dense("sinks", sinks)
    if sinks.shape != (heads,):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}, but must be (H,) with H = {heads}")
    _check_device("sinks", sinks, q)


_ROWS = {"bthd": "(B, T, H)", "bhtd": "(B, H, T)", "thd": "(total, H)"}


def check_gate(gate: Tensor, q: Tensor, v: Tensor, layout: str, value_dim: int | None = None) -> None:
    """Check the gate of a call whose q and v are valid."""
    if not isinstance(gate, Tensor) or gate.dtype != q.dtype:
        kind = str(gate.dtype) if isinstance(gate, Tensor) else type(gate).__name__
        raise TypeError(f"gate is {kind}, but must be a tensor of q's dtype, {q.dtype}")
    check_dense("gate", gate)
    rows, value_dim = q.shape[:-1], v.shape[-1] if value_dim is None else value_dim
    if gate.shape != rows and gate.shape != (*rows, value_dim):
        raise ValueError(
            f"gate has shape {tuple(gate.shape)}, but must be like the output, {(*rows, value_dim)}, or one number "
            f"for each head, {_ROWS[layout]}: {tuple(rows)}"
        )
    _check_device("gate", gate, q)


def _as_mask(mask: Tensor, batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """The mask with 4 dimensions. A batch of masks is never read as one for each head, even with B = H."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = str(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask is {kind}, but must be a bool tensor, True where a query attends")
    check_dense("mask", mask)
    shape, square = tuple(mask.shape), (queries, keys)
    if shape == square:
        if batch == queries > 1:
            raise ValueError(
                f"mask has shape {shape}, which is both (Tq, Tk) and (B, Tk), as B = Tq = {batch}: pass (1, 1, Tq, Tk) "
                "for one mask of all batch rows; for padding pass key_lengths, or a mask of (B, 1, 1, Tk)"
            )
        return mask[None, None]
    if shape == (batch, *square):
        return mask[:, None]
    if len(shape) == 4 and shape[0] in (1, batch) and shape[1] in (1, heads):
        rows, columns = shape[2:]
        if rows in (1, queries) and columns in (1, keys):
            return mask.expand(-1, -1, *square)
    raise ValueError(
        f"mask has shape {shape}, but must be (Tq, Tk), (B, Tq, Tk) or (B or 1, H or 1, Tq or 1, Tk or 1) with "
        f"B = {batch}, H = {heads}, Tq = {queries} and Tk = {keys}"
    )


def _check_rows(name: str, x: Tensor, batch: int, limits: tuple[int, int], said: tuple[str, str], q: Tensor) -> None:
    """Check one index for each batch row, within limits."""
    _check_integers(name, x)
    if x.shape != (batch,):
        raise ValueError(f"{name} has shape {tuple(x.shape)}, but must be (B,) with B = {batch}")
    _check_device(name, x, q)
    if has_values(x):
        (least, most), (low, high) = limits, said
        outside = (x < least) | (x > most)
        if bool(outside.any()):
            low = low if low == str(least) else f"{low} = {least}"
            raise ValueError(f"{name} holds {int(x[outside][0])}, but must be from {low} to {high} = {most}")


def _check_integers(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}, but must be a tensor of int32 or int64")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} is a tensor of {x.dtype}, but must be a tensor of int32 or int64")
    check_dense(name, x)


def _check_positions(
    name: str, positions: Tensor, batch: int, tokens: int, q: Tensor, layout: str, scheme: PositionScheme
) -> Tensor:
    """The positions with their batch dimension."""
    _check_integers(name, positions)
    _check_device(name, positions, q)
    shape = tuple(positions.shape)
    if scheme.has_axes():
        if layout == "thd":
            rule, is_right = f"(A, total) with total = {tokens}", len(shape) == 2 and shape[1] == tokens
        else:
            rule = f"(A, B, T) or (A, 1, T) with B = {batch} and T = {tokens}"
            is_right = shape[1:] in ((batch, tokens), (1, tokens))
        if not is_right or shape[0] == 0:
            raise ValueError(f"{name} has shape {shape}, but where {type(scheme).__name__} has axes it must be {rule}")
        return positions[:, None] if layout == "thd" else positions
    if layout == "thd":
        if shape != (tokens,):
            raise ValueError(f"{name} has shape {shape}, but must be (total,) with total = {tokens}")
        return positions[None]
    if shape not in ((batch, tokens), (1, tokens)):
        raise ValueError(f"{name} has shape {shape}, but must be (B, T) or (1, T) with B = {batch} and T = {tokens}")
    return positions
