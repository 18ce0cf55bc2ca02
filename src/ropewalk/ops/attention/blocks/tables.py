"""Lists of blocks, validated, turned into the `BlockTables` that kernels read, and cached beside them.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, M blocks of queries, N blocks of keys.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from operator import attrgetter
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.arguments import check_dense
from ropewalk.ops.attention.blocks.lists import BlockLists
from ropewalk.ops.attention.call import BlockTables, as_bhtd
from ropewalk.ops.tracing import is_intercepted, is_plain_eager

SIZES = (64, 128)
FULL, PARTIAL = 2, 1  # as in `kernel`, which loads Triton
_ATTRIBUTE = "_ropewalk_tables"  # of lists that were read
_PAIRS = 1 << 22  # whose mask_mod is evaluated at a time


class Source(NamedTuple):
    """The lists of a `BlockLists` or a `BlockMask`."""

    counts: Tensor
    indices: Tensor
    full_counts: Tensor | None
    full_indices: Tensor | None
    block_q: int
    block_k: int
    spans: Tensor | None  # of pairs in blocks that are not full
    mask_mod: Callable[..., Tensor] | None  # likewise

    @property
    def tensors(self) -> list[Tensor]:
        """The lists."""
        return [x for x in (*self.lists, self.spans) if isinstance(x, Tensor)]

    @property
    def lists(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Counts and indices, of both kinds."""
        return self.counts, self.indices, self.full_counts, self.full_indices


class Sizes(NamedTuple):
    """The extents of a call."""

    batch: int
    heads: int
    queries: int
    keys: int


_version_of = attrgetter("_version")


class _CachedTables:
    """Tables of lists, and the state that the lists were in."""

    __slots__ = (
        "call",
        "contents",
        "event",
        "sizes",
        "source",
        "stream",
        "tables",
        "variables",
        "versions",
        "watched",
    )

    def __init__(self, source: Source, sizes: Sizes, tables: BlockTables, call: tuple[Any, ...]) -> None:
        self.source, self.sizes, self.tables, self.call = source, sizes, tables, call
        captured = list(_captured(source.mask_mod))
        tensors = {id(x): x for *_, x in captured if isinstance(x, Tensor) and not x.is_inference()}
        self.watched = [*source.tensors, *tensors.values()]
        # Nothing else is put into a tuple, and few who write masks put another function where one was.
        self.variables = [x for x in captured if not (isinstance(x[0], tuple) or isinstance(x[2], FunctionType))]
        self.versions = [x._version for x in self.watched]
        self.contents = [(x, _copy_contents(x)) for *_, x in captured if _has_contents(x)]
        # The stream that makes the tables, and the event after them; None once it came.
        self.stream, self.event = 0, None
        device = tables.rows.device
        if device.type == "cuda":
            self.stream, self.event = torch._C._cuda_getCurrentRawStream(device.index), torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Let the current stream wait for the tables, which another one may make yet."""
        if self.event is None or self.stream == torch._C._cuda_getCurrentRawStream(self.tables.rows.device.index):
            return
        if torch.cuda.is_current_stream_capturing():  # which waits for its own events alone: a capture begins idle
            return
        if self.event.query():
            self.event = None
        else:
            self.event.wait(torch.cuda.current_stream(self.tables.rows.device))

    def __reduce__(self) -> tuple[Any, ...]:
        return set, ()  # a copy of the lists keeps nothing, and any unpickler reads an empty set


def has_rows(q: Any, k: Any) -> bool:
    """Say whether q and k have the extents that lists of blocks are for; `validate` says what else is wrong."""
    return isinstance(q, Tensor) and isinstance(k, Tensor) and q.ndim == 4 and k.ndim == 4


def cached_tables_of(blocks: Any, q: Tensor, k: Tensor, layout: str) -> BlockTables | None:
    """Return the cached tables of `BlockLists`, those of the last call of such tensors, or None.

    Each eager call asks this first, so it calls no other Python function. `BlockLists` is frozen: it compares no field.
    """
    if type(blocks) is not BlockLists:
        return None
    cached = blocks.__dict__.get(_ATTRIBUTE)
    if type(cached) is not _CachedTables or cached.call != (q.shape, k.shape, q.device, layout):
        return None
    if cached.tables.columns is None and torch.is_grad_enabled():
        return None
    if list(map(_version_of, cached.watched)) != cached.versions:
        return None
    if cached.event is not None:
        cached.wait()
    tables: BlockTables = cached.tables
    return tables


def find_tables(blocks: Any, q: Tensor, k: Tensor, layout: str, block_table: Tensor | None) -> BlockTables:
    """Return the tables of a call's `blocks`, computed now or cached.

    They have `columns` where a backward may come.
    """
    if isinstance(blocks, BlockTables):
        return blocks
    if layout == "thd":
        raise ValueError(
            "blocks was given with layout 'thd', but must come with 'bthd' or 'bhtd': documents are lists of blocks too"
        )
    if block_table is not None:
        raise ValueError("blocks was given beside block_table, but paged keys take none")
    (batch, heads, queries, _), keys = as_bhtd(q, layout).shape, as_bhtd(k, layout).shape[2]
    sizes, columns = Sizes(batch, heads, queries, keys), torch.is_grad_enabled()
    compiling = torch.compiler.is_compiling()
    if compiling and not isinstance(blocks, BlockLists):  # to read a mask_mod would compile for each one
        cached = getattr(blocks, _ATTRIBUTE, None)
        if isinstance(cached, _CachedTables) and cached.sizes == sizes and cached.tables.columns is not None:
            return cached.tables
    source = _read(blocks)
    if not compiling:
        cached = vars(blocks).get(_ATTRIBUTE)
        is_cached = isinstance(cached, _CachedTables) and _is_current(cached, source, sizes, q.device)
        if is_cached and (cached.tables.columns is not None or not columns):
            cached.call = (q.shape, k.shape, q.device, layout)
            cached.wait()
            tables: BlockTables = cached.tables
            return tables
    _check(source, sizes, q, isinstance(blocks, BlockLists))
    _check_lengths(blocks, sizes)
    if source.spans is not None:
        _check_spans(source.spans, sizes, q)
    if source.mask_mod is not None and (compiling or is_intercepted()):
        raise ValueError(
            "blocks is a BlockMask whose mask_mod was not evaluated yet, but must be for torch.compile and tracers: "
            "call attention with it once before, where gradients are enabled"
        )
    tables = _make(source, sizes, columns)
    may_keep = not compiling and is_plain_eager(*source.tensors) and not is_intercepted()
    if may_keep and not any(x.is_inference() for x in source.tensors) and not _is_capturing(q):
        vars(blocks)[_ATTRIBUTE] = _CachedTables(source, sizes, tables, (q.shape, k.shape, q.device, layout))
    return tables


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _is_current(cached: _CachedTables, source: Source, sizes: Sizes, device: torch.device) -> bool:
    """Say whether lists are those of the tables on this device, and nothing was written to them since."""
    return (
        cached.sizes == sizes
        and source.tensors[0].device == device
        and all(x is y for x, y in zip(cached.source, source, strict=True))
        and [x._version for x in cached.watched] == cached.versions
        and all(map(_is_there, cached.variables))
        and all(_holds(x, copied) for x, copied in cached.contents)
    )


def _has_contents(x: Any) -> bool:
    """Say whether something may be written to and has no version that tells: arrays, sets, tensors with such memory."""
    if isinstance(x, Tensor):  # NumPy may write to the memory of those on the CPU
        return x.device.type == "cpu" or x.is_inference()
    if isinstance(x, (set, deque)):
        return True
    try:
        memoryview(x)
    except (TypeError, ValueError, BufferError):
        return False
    return not isinstance(x, bytes)


def _copy_contents(x: Any) -> Any:
    """Return a copy of what something holds; None where it cannot be compared without waiting for a device."""
    if isinstance(x, Tensor):
        return x.detach().clone() if x.device.type == "cpu" else None
    return copy(x) if isinstance(x, (set, deque)) else memoryview(x).tobytes()


def _holds(x: Any, copied: Any) -> bool:
    """Say whether something holds what it held when it was copied."""
    if copied is None:
        return False
    if isinstance(x, Tensor):
        return torch.equal(x, copied)
    return bool(x == copied) if isinstance(x, (set, deque)) else memoryview(x).tobytes() == copied


# A variable, an entry or an attribute that a mask_mod reads: its holder, its name there, and what it held.
_Variable = tuple[Any, Any, Any]
_PLAIN = (bool, int, float, str)  # put anew where they change


def _is_there(variable: _Variable) -> bool:
    """Say whether a variable holds what it held, or its equal."""
    holder, name, x = variable
    try:
        now = holder.cell_contents if name is None else holder[name]
    except (KeyError, IndexError, ValueError):
        return False
    return now is x or (type(x) in _PLAIN and type(now) is type(x) and now == x)


def _captured(function: Any) -> Iterator[_Variable]:
    """Yield the places that a function reads, or functions that it reads: variables, entries and attributes.

    An object, such as the `self` of a method, may be a whole model. Its weights change in each step, and each change
    would make the tables anew. So only the attributes that the code names count.
    """
    seen: set[tuple[int, frozenset[str]]] = set()
    waiting: list[tuple[_Variable, frozenset[str]]] = [(((function,), 0, function), frozenset())]
    while waiting:
        variable, names = waiting.pop()
        x = variable[2]
        if isinstance(x, (type, ModuleType)):
            continue
        yield variable
        if x is None or isinstance(x, (Tensor, *_PLAIN)) or (id(x), names) in seen:
            continue
        seen.add((id(x), names))
        found: list[_Variable] = []
        if isinstance(x, (tuple, list)):
            found += [(x, index, y) for index, y in enumerate(x)]
        elif isinstance(x, dict):
            found += _entries(x, x)
        elif isinstance(x, FunctionType):
            names = frozenset(_names_in(x.__code__))
            found += [(cell, None, cell.cell_contents) for cell in x.__closure__ or () if _is_filled(cell)]
            found += [(x.__defaults__, index, y) for index, y in enumerate(x.__defaults__ or ())]
            found += _entries(x.__kwdefaults__ or {}, x.__kwdefaults__ or {})
            found += _entries(x.__globals__, names)
        elif isinstance(x, MethodType):
            names = frozenset(_names_in(getattr(x.__func__, "__code__", None)))
            found += _items(x.__self__, x.__func__)
        elif isinstance(x, functools.partial):
            found += _items(x.func, x.args, x.keywords)
        else:
            for name in (*names, "__call__"):
                method = getattr(type(x), name, None)
                if isinstance(method, FunctionType) and method is not torch.nn.Module.__call__:
                    found += _items(MethodType(method, x))
            found += _attributes(x, names)
        waiting += [(y, names) for y in found]


def _items(*xs: Any) -> list[_Variable]:
    """Return places that nothing else is put into."""
    return [(xs, index, x) for index, x in enumerate(xs)]


def _entries(holder: dict[Any, Any], names: Iterable[Any]) -> list[_Variable]:
    """Return the places that a dictionary has of these names."""
    return [(holder, name, holder[name]) for name in names if name in holder]


def _names_in(code: Any) -> Iterator[str]:
    """Yield the names of attributes and globals that code loads, and functions inside it."""
    if isinstance(code, CodeType):
        yield from code.co_names
        for constant in code.co_consts:
            yield from _names_in(constant)


def _attributes(x: Any, names: frozenset[str]) -> Iterator[_Variable]:
    """Yield the places that an object, or a module of a network, has of these names; nothing is computed for it."""
    held = getattr(x, "__dict__", {})
    for holder in (held, *[held.get(name) for name in ("_buffers", "_parameters", "_modules")]):
        if isinstance(holder, dict):
            yield from _entries(holder, names)


def _is_filled(cell: CellType) -> bool:
    """Say whether a variable that a function captured is set."""
    try:
        _ = cell.cell_contents
        return True
    except ValueError:
        return False


def _read(blocks: Any) -> Source:
    """Return the lists of an argument, or raise."""
    if isinstance(blocks, BlockLists):
        lists = (blocks.counts, blocks.indices, blocks.full_counts, blocks.full_indices)
        return Source(*lists, blocks.block_q, blocks.block_k, blocks.spans, None)
    from torch.nn.attention.flex_attention import BlockMask, noop_mask

    if not isinstance(blocks, BlockMask):
        raise TypeError(f"blocks is {type(blocks).__name__}, but must be a BlockLists or a BlockMask of FlexAttention")
    lists = (blocks.kv_num_blocks, blocks.kv_indices, blocks.full_kv_num_blocks, blocks.full_kv_indices)
    mask_mod = None if blocks.mask_mod is noop_mask else blocks.mask_mod
    return Source(*lists, *blocks.BLOCK_SIZE, None, mask_mod)


_NAMES = {
    True: ("counts", "indices", "full_counts", "full_indices", "block_q", "block_k"),
    False: (
        *("blocks.kv_num_blocks", "blocks.kv_indices", "blocks.full_kv_num_blocks", "blocks.full_kv_indices"),
        *("blocks.BLOCK_SIZE[0] (block_q)", "blocks.BLOCK_SIZE[1] (block_k)"),
    ),
}


def _check(source: Source, sizes: Sizes, q: Tensor, are_lists: bool) -> None:
    """Raise unless lists are of the right types, for a call of these extents."""
    names = _NAMES[are_lists]
    for name, size in zip(names[4:], source[4:6], strict=True):
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} of blocks is {size!r}, but must be 64 or 128")
        if size not in SIZES:
            raise ValueError(f"{name} of blocks is {size}, but must be 64 or 128")
    if (source.full_counts is None) is not (source.full_indices is None):
        missing, other = (names[2], names[3]) if source.full_counts is None else (names[3], names[2])
        raise ValueError(f"{missing} of blocks is None, but must be given beside {other}")
    rows, n_blocks = -(-sizes.queries // source.block_q), -(-sizes.keys // source.block_k)
    pairs: list[tuple[Any, ...]] = [(source.counts, source.indices, *names[:2])]
    if source.full_counts is not None:
        pairs.append((source.full_counts, source.full_indices, *names[2:4]))
    for counts, indices, counts_name, indices_name in pairs:
        for name, x in ((counts_name, counts), (indices_name, indices)):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} of blocks is {type(x).__name__}, but must be a tensor of int32 or int64")
            if x.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{name} of blocks is a tensor of {x.dtype}, but must be one of int32 or int64")
            check_dense(name, x)
            if x.device != q.device:
                raise ValueError(f"{name} of blocks is on {x.device}, but must be on q's device, {q.device}")
        fits = counts.ndim == 3 and counts.shape[0] in (1, sizes.batch) and counts.shape[1] in (1, sizes.heads)
        if not fits or counts.shape[2] != rows:
            raise ValueError(
                f"{counts_name} of blocks has shape {tuple(counts.shape)}, but must be (B or 1, H or 1, M) with "
                f"B = {sizes.batch}, H = {sizes.heads} and M = {rows} blocks of {source.block_q} for {sizes.queries} "
                "queries"
            )
        if indices.ndim != 4 or indices.shape[:3] != counts.shape:
            raise ValueError(
                f"{indices_name} of blocks has shape {tuple(indices.shape)}, but must be {counts_name}' and n: "
                f"{(*counts.shape, 'n')}"
            )
        if _has_values(counts) and _has_values(indices):
            _check_values(counts, indices, counts_name, indices_name, n_blocks)


def _check_spans(spans: Any, sizes: Sizes, q: Tensor) -> None:
    if not isinstance(spans, Tensor) or spans.dtype != torch.int32:
        kind = str(spans.dtype) if isinstance(spans, Tensor) else type(spans).__name__
        raise TypeError(f"spans of blocks is {kind}, but must be a tensor of int32")
    check_dense("spans", spans)
    if spans.device != q.device:
        raise ValueError(f"spans of blocks is on {spans.device}, but must be on q's device, {q.device}")
    fits = spans.ndim == 4 and spans.shape[0] in (1, sizes.batch) and spans.shape[1] in (1, sizes.heads)
    if not fits or spans.shape[2:] != (sizes.queries, 2):
        raise ValueError(
            f"spans of blocks has shape {tuple(spans.shape)}, but must be (B or 1, H or 1, Tq, 2) with "
            f"B = {sizes.batch}, H = {sizes.heads} and Tq = {sizes.queries}"
        )


def _check_lengths(blocks: Any, sizes: Sizes) -> None:
    """Raise unless a BlockMask was built for a call's lengths, or for whole blocks that hold them."""
    mask_lengths = getattr(blocks, "seq_lengths", None)
    if mask_lengths is None:
        return
    for name, length, tokens, size in zip(("Tq", "Tk"), mask_lengths, sizes[2:], blocks.BLOCK_SIZE, strict=True):
        if length != tokens and length != -(-tokens // size) * size:
            raise ValueError(f"blocks is a BlockMask for {name} = {length}, but must be built for {tokens}")


def _has_values(x: Tensor) -> bool:
    return x.device.type == "cpu" and not (torch.compiler.is_compiling() or gpu.is_fake(x) or is_intercepted())


def _check_values(counts: Tensor, indices: Tensor, counts_name: str, indices_name: str, n_blocks: int) -> None:
    n = indices.shape[3]
    wrong = (counts < 0) | (counts > n)
    if bool(wrong.any()):
        raise ValueError(f"{counts_name} of blocks holds {int(counts[wrong][0])}, but must be from 0 to n = {n}")
    listed = torch.arange(n) < counts[..., None]
    wrong = listed & ((indices < 0) | (indices >= n_blocks))
    if bool(wrong.any()):
        raise ValueError(
            f"{indices_name} of blocks holds {int(indices[wrong][0])}, but must be from 0 to below N = {n_blocks} "
            "blocks"
        )


def _make(source: Source, sizes: Sizes, columns: bool) -> BlockTables:
    """Return the tables of lists."""
    n_blocks = -(-sizes.keys // source.block_k)
    lists, (block_q, block_k, spans, mask_mod) = source.lists, source[4:]
    if mask_mod is None:
        if is_plain_eager(*source.tensors) and not is_intercepted():
            rows, column_lists = make_lists(*lists, n_blocks, spans is not None, columns)
        else:
            rows, column_lists = torch.ops.ropewalk.block_lists(*lists, n_blocks, spans is not None, columns)
        spans = None if spans is None else spans.contiguous()
        return BlockTables(rows, column_lists if columns else None, None, None, spans, block_q, block_k)
    marks = _mark(*lists, n_blocks, True)
    rows, column_lists = _compact(marks, *lists, True, columns)
    slots, bits = _evaluate(mask_mod, marks == PARTIAL, source, sizes)
    return BlockTables(rows, column_lists, slots, bits, None, block_q, block_k)


def make_lists(
    counts: Tensor,
    indices: Tensor,
    full_counts: Tensor | None,
    full_indices: Tensor | None,
    n_blocks: int,
    has_partial: bool,
    columns: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return sorted lists without duplicates of rows, and of columns if they are wanted, as `BlockTables` has them."""
    lists = (counts, indices, full_counts, full_indices)
    if gpu.why_no_triton(counts.device) is None and counts.numel() and n_blocks:
        from ropewalk.ops.attention.blocks import kernel

        rows, column_lists = kernel.LISTS.run(kernel.ListsCall(*lists, n_blocks, has_partial, columns))
        assert rows is not None
        return rows, column_lists
    return _compact(_mark(*lists, n_blocks, has_partial), *lists, has_partial, columns)


def _mark(
    counts: Tensor,
    indices: Tensor,
    full_counts: Tensor | None,
    full_indices: Tensor | None,
    n_blocks: int,
    has_partial: bool,
) -> Tensor:
    """Return the map (B or 1, H or 1, M, N) of listed blocks, bytes; a block in both kinds of lists is full."""
    shape = list(counts.shape)
    if full_counts is not None:
        shape = [max(x, y) for x, y in zip(shape, full_counts.shape, strict=True)]
    marks = torch.zeros(*shape, n_blocks, dtype=torch.uint8, device=counts.device)
    for kind_counts, kind_indices, value in (
        (counts, indices, PARTIAL if has_partial else FULL),
        (full_counts, full_indices, FULL),
    ):
        if kind_counts is None or kind_indices is None or kind_indices.shape[3] == 0 or marks.numel() == 0:
            continue
        if gpu.why_no_triton(counts.device) is None:
            from ropewalk.ops.attention.blocks import kernel

            kernel.mark(marks, kind_counts, kind_indices, value)
            continue
        listed = torch.arange(kind_indices.shape[3], device=counts.device) < kind_counts[..., None]
        listed = listed & (kind_indices >= 0) & (kind_indices < n_blocks)
        found = torch.zeros(*kind_counts.shape, n_blocks + 1, dtype=torch.bool, device=counts.device)
        found = found.scatter(3, torch.where(listed, kind_indices, n_blocks).long(), True)[..., :n_blocks]
        marks = torch.where(found, value, marks)
    return marks


def _compact(
    marks: Tensor,
    counts: Tensor,
    indices: Tensor,
    full_counts: Tensor | None,
    full_indices: Tensor | None,
    has_partial: bool,
    columns: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the sorted lists of a map's rows, and of its columns if they are wanted."""
    width = indices.shape[3] + (0 if full_indices is None else full_indices.shape[3])
    width = min(width, marks.shape[3])
    if gpu.why_no_triton(marks.device) is None and marks.numel():
        from ropewalk.ops.attention.blocks import kernel

        rows = kernel.compact(marks, "rows", width, has_partial)
        return rows, kernel.compact(marks, "columns", marks.shape[2], has_partial) if columns else None
    return _sort(marks, width), _sort(marks.mT, marks.shape[2]) if columns else None


def _sort(marks: Tensor, width: int) -> Tensor:
    """Return the sorted lists of a map's rows, in plain PyTorch."""
    counts = [(marks == value).sum(3, keepdim=True) for value in (FULL, PARTIAL)]
    order = torch.argsort(marks, dim=3, descending=True, stable=True)[..., :width]
    return torch.cat((*counts, order, torch.zeros_like(counts[0])), 3).to(torch.int32)


def _evaluate(mask_mod: Callable[..., Tensor], partial: Tensor, source: Source, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Return where the bits of partial blocks are, and the bits. The host waits for the number of blocks, once."""
    device, block_q, block_k = partial.device, source.block_q, source.block_k
    block_indices = partial.nonzero()  # (count, 4)
    count = block_indices.shape[0]
    slots = torch.zeros(partial.shape, dtype=torch.int32, device=device)
    slots[partial] = torch.arange(count, dtype=torch.int32, device=device)
    bits = torch.empty(max(count, 2), block_q, block_k // 32, dtype=torch.int32, device=device)
    evaluate = mask_mod
    for dims in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
        evaluate = torch.vmap(evaluate, in_dims=dims)
    shifts = torch.arange(32, device=device)
    step = _PAIRS // (block_q * block_k)
    # FlexAttention's own: what is indexed by a number of a vmap is indexed by a tensor.
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    with torch.no_grad(), TransformGetItemToIndex():
        for start in range(0, count, step):
            b, h, i, j = block_indices[start : start + step].unbind(1)
            m = (i[:, None] * block_q + torch.arange(block_q, device=device)).clamp(max=sizes.queries - 1)
            n = (j[:, None] * block_k + torch.arange(block_k, device=device)).clamp(max=sizes.keys - 1)
            allowed = evaluate(b, h, m, n).expand(len(b), block_q, block_k)
            words = allowed.reshape(len(b), block_q, block_k // 32, 32).long() << shifts
            bits[start : start + step] = words.sum(3).to(torch.int32)
    torch._dynamo.maybe_mark_dynamic(bits, 0)  # another mask has another number of blocks, and one program
    return slots, bits


_LIBRARY = torch.library.Library("ropewalk", "FRAGMENT")
_LIBRARY.define(
    "block_lists(Tensor counts, Tensor indices, Tensor? full_counts, Tensor? full_indices, SymInt n_blocks, "
    "bool has_partial, bool columns) -> (Tensor, Tensor)"
)


def _block_lists(
    counts: Tensor,
    indices: Tensor,
    full_counts: Tensor | None,
    full_indices: Tensor | None,
    n_blocks: int,
    has_partial: bool,
    columns: bool,
) -> tuple[Tensor, Tensor]:
    rows, column_lists = make_lists(counts, indices, full_counts, full_indices, n_blocks, has_partial, columns)
    return rows, rows.new_empty(0) if column_lists is None else column_lists


def _block_lists_fake(
    counts: Tensor,
    indices: Tensor,
    full_counts: Tensor | None,
    full_indices: Tensor | None,
    n_blocks: int,
    has_partial: bool,
    columns: bool,
) -> tuple[Tensor, Tensor]:
    batch, heads, rows = counts.shape
    width = indices.shape[3]
    if full_counts is not None and full_indices is not None:
        batch, heads = max(batch, full_counts.shape[0]), max(heads, full_counts.shape[1])
        width = width + full_indices.shape[3]
    width = torch.sym_min(width, n_blocks)
    empty = counts.new_empty
    row_lists = empty((batch, heads, rows, 3 + width), dtype=torch.int32)
    return row_lists, empty((batch, heads, n_blocks, 3 + rows) if columns else (0,), dtype=torch.int32)


_LIBRARY.impl("block_lists", _block_lists, "CompositeExplicitAutograd")
torch.library.register_fake("ropewalk::block_lists", _block_lists_fake, lib=_LIBRARY)
