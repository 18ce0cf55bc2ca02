"""The call of a row of the table: its tensors, drawn by a seed, and the keywords of `attention`.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v), S packed
sequences.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from products import foreign
from products.table import Row
from ropewalk import Alibi, BlockLists, ExpoSB, QKNorm, QuantizedProducts, ReRope, Rope, SelfExtend, T5Bias

Leaves = dict[str, Tensor]
DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}
BUCKETS = 8


class Sizes(NamedTuple):
    """Sizes of calls: head dims, and for each class of tokens some (Tq, Tk)."""

    head_dims: dict[str, tuple[int, int]]
    tokens: dict[str, tuple[tuple[int, int], ...]]
    window: int  # of two-range encodings, and the bounds of windows
    page: dict[str, int]


# A class has one remainder of 16, and one side of each length where tiles or splits change: its calls share binaries.
GPU = Sizes(
    head_dims={
        "64": (64, 64),
        "128": (128, 128),
        "256": (256, 256),
        "96": (96, 96),
        "20": (20, 20),
        "512": (512, 512),
        "192/128": (192, 128),
        "64/32": (64, 32),
    },
    tokens={
        "equal": ((256, 256), (192, 192), (320, 320)),
        "odd": ((201, 201), (137, 137), (275, 275)),
        "fewer queries": ((70, 210), (38, 162), (87, 290)),
        "more queries": ((210, 70), (170, 90), (290, 133)),
        "one query": ((1, 300), (1, 170), (1, 411)),
        "few queries": ((5, 260), (5, 180), (5, 333)),
        "no keys": ((70, 0), (38, 0), (87, 0)),
    },
    window=40,
    page={"16": 16, "64": 64},
)
CPU = Sizes(
    head_dims={
        "64": (32, 32),
        "128": (64, 64),
        "256": (128, 128),
        "96": (96, 96),
        "20": (20, 20),
        "512": (160, 160),
        "192/128": (96, 64),
        "64/32": (64, 32),
    },
    tokens={
        "equal": ((32, 32), (48, 48)),
        "odd": ((19, 19), (27, 27)),
        "fewer queries": ((7, 35), (11, 27)),
        "more queries": ((35, 7), (27, 11)),
        "one query": ((1, 30), (1, 44)),
        "few queries": ((5, 37), (5, 26)),
        "no keys": ((7, 0), (11, 0)),
    },
    window=9,
    page={"16": 8, "64": 16},
)


class Call(NamedTuple):
    """A call: leaves, which may need gradients, and its keywords as a function of them, q, k and v among them."""

    row: Row
    leaves: Leaves
    learned: tuple[str, ...]  # leaves that need a gradient
    keywords: Callable[[Leaves], dict[str, Any]]
    weights: Callable[[Tensor], Tensor]  # the gradient of an output, like it
    lse_weights: Callable[[Tensor], Tensor]
    has_lse_gradient: bool
    seed: int  # of torch's generator, for dropout


class Draw:
    """Random tensors on a device, the same for a seed; without values where shapes alone are asked for."""

    def __init__(self, seed: int, device: torch.device, *, is_empty: bool = False) -> None:
        self.device, self.is_empty = device, is_empty
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return normal numbers."""
        if self.is_empty:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Return numbers between two."""
        if self.is_empty:
            return torch.full(shape, (low + high) / 2, device=self.device)
        return torch.rand(shape, generator=self.generator, device=self.device) * (high - low) + low

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return integers from `low` to below `high`."""
        if self.is_empty:
            return torch.full(shape, low, dtype=dtype, device=self.device)
        found = torch.randint(low, high, shape, generator=self.generator, device=self.device)
        return found.to(dtype)

    def mask(self, *shape: int) -> Tensor:
        """Return a mask in which one pair of five is hidden."""
        return self.uniform(*shape) < 0.8


def numbers(device: torch.device, *values: int) -> Tensor:
    """Return integers, int32."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def build(row: Row, seed: int, device: torch.device, sizes: Sizes, variant: int = 0, is_empty: bool = False) -> Call:
    """Return the call of a row. variant: which sizes of its class."""
    draw = Draw(seed, device, is_empty=is_empty)
    dtype = DTYPES[row["dtype"]]
    dim, value_dim = sizes.head_dims[row["head_dim"]]
    heads, kv_heads = map(int, row["heads"].split("/"))
    classes = sizes.tokens[row["tokens"]]
    queries, keys = classes[variant % len(classes)]
    is_packed, pages = row["layout"] == "thd", row["pages"]
    batch = 3 if is_packed else int(row["batch"])  # packed: the number of sequences
    fixed: dict[str, Any] = {"layout": row["layout"]}
    leaves: Leaves = {}
    views: dict[str, Callable[[Tensor], Tensor]] = {}

    def add(name: str, shape: tuple[int, ...], memory: str, axis: int, of: torch.dtype = dtype) -> None:
        leaves[name], views[name] = _allocate(draw, shape, memory, axis, of)

    # === q, k and v ===
    memory, head_axis = row["memory"], 1 if row["layout"] == "bhtd" else -2
    lengths_q, lengths_k = _lengths(row, queries, keys, batch)
    total_q, total_k = sum(lengths_q), sum(lengths_k)
    if is_packed:
        if pages == "none":
            total_q, total_k = (n + (7 if row["bounds"] == "with a tail" else 0) for n in (total_q, total_k))
        q_shape: tuple[int, ...] = (total_q, heads, dim)
    else:
        q_shape = (batch, queries, heads, dim)
    add("q", _in_layout(q_shape, row["layout"]), "dense" if memory == "broadcast" else memory, head_axis)
    n_keys = keys
    if pages == "none":
        rows = (total_k,) if is_packed else (batch, keys)
        for name, width in (("k", dim), ("v", value_dim)):
            add(name, _in_layout((*rows, kv_heads, width), row["layout"]), memory, head_axis)
    else:
        n_keys = _add_pages(row, draw, sizes, add, fixed, (batch, keys, kv_heads, dim, value_dim), dtype)

    # === which pairs ===
    def bound(*values: int) -> Tensor:
        return numbers(device, *values)

    if is_packed:
        ends_q = [0, *itertools.accumulate(lengths_q)]
        fixed["cu_seqlens_q"] = bound(*ends_q)
        if row["bounds"] in ("equal", "unequal"):
            fixed["cu_seqlens_k"] = bound(0, *itertools.accumulate(lengths_k))
    if row["key_lengths"] != "none":
        lengths = [max(n_keys - 11 * b, 0) for b in range(batch)]
        if is_packed:
            lengths = [max(length, n) for length, n in zip(lengths, lengths_q, strict=True)]
        if row["key_lengths"] == "with zero":
            lengths[-1] = 0
        fixed["key_lengths"] = bound(*lengths)
    if row["key_starts"] == "given":
        fixed["key_starts"] = bound(*([0, min(5, n_keys)][-batch:] if batch <= 2 else [0] * batch))
    if row["query_starts"] == "given":
        fixed["query_starts"] = bound(*[max(n_keys - queries - 3 * b - 1, -queries) for b in range(batch)])
    elif pages != "none" and not is_packed:
        fixed["query_starts"] = bound(*[max(n_keys - 11 * b - queries, 0) for b in range(batch)])
    fixed["causal"] = row["causal"] == "yes"
    w = sizes.window
    fixed["window"] = {"none": None, "int": w, "left": (w, -1), "right": (-1, w // 2), "pair": (w, w // 3)}[
        row["window"]
    ]
    masks = {
        "keys": (batch, 1, 1, n_keys),
        "pairs": (queries, n_keys),
        "rows": (batch, queries, n_keys),
        "heads": (batch, heads, queries, n_keys),
    }
    if row["mask"] != "none":
        fixed["mask"] = draw.mask(*masks[row["mask"]])
        if row["mask"] == "pairs" and batch == queries > 1:
            fixed["mask"] = fixed["mask"][None, None]
    if row["blocks"] != "none":
        fixed["blocks"] = _make_blocks(row["blocks"], draw, heads, queries, n_keys, w)

    # === the scheme, and what it reads ===
    axes = 3 if row["scheme"] == "rope axes" else 0
    scheme = _make_scheme(row["scheme"], draw, leaves, dim, heads, sizes)
    _add_positions(row, fixed, device, (total_q, total_k) if is_packed else (queries, n_keys), batch, axes)
    fixed["keys_rotated"] = row["keys_rotated"] == "yes"

    # === options ===
    fixed["scale"] = {"default": None, "given": 1.5 / math.sqrt(dim), "negative": -0.8 / math.sqrt(dim)}[row["scale"]]
    fixed["softcap"] = 2.0 if row["softcap"] == "given" else None
    fixed["dropout_p"] = 0.3 if row["dropout"] == "given" else 0.0
    fixed["deterministic"] = True if row["deterministic"] == "yes" else None
    fixed["precision"] = _make_precision(row)
    fixed["return_lse"] = row["results"] in ("lse", "lse and its gradient", "all")
    fixed["return_max_logits"] = row["results"] in ("max logits", "all")
    if row["sinks"] != "none":
        leaves["sinks"] = draw.normal(heads)
    norm = _make_norm(row["norm"], draw, leaves, dim, heads, kv_heads)
    if row["gate"] != "none":
        shape = (*q_shape[:-1], value_dim) if row["gate"] == "feature" else q_shape[:-1]
        if row["layout"] == "bhtd":
            shape = (shape[0], shape[2], shape[1], *shape[3:])
        gate_memory = "features apart" if memory == "features apart" and row["gate"] == "feature" else "dense"
        add("gate", shape, gate_memory, head_axis)

    def keywords(leaves: Leaves) -> dict[str, Any]:
        made = dict(fixed)
        made |= {name: view(leaves[name]) for name, view in views.items()}
        if row["sinks"] != "none":
            made["sinks"] = leaves["sinks"]
        if scheme is not None:
            made["position"] = scheme(leaves)
        if norm is not None:
            made["norm"] = norm(leaves)
        return {name: x for name, x in made.items() if x is not None}

    wants = {
        "none": (),
        "all": tuple(leaves),
        "q": ("q",),
        "k and v": ("k", "v"),
        "options": tuple(name for name in leaves if name not in ("q", "k", "v")),
    }[row["gradients"]]
    fixed_leaves = ("sinks",) if row["sinks"] == "fixed" else ()
    fixed_leaves += () if "learned" in row["scheme"] or "bands" in row["scheme"] else _SCHEME_LEAVES
    learned = tuple(name for name in wants if name not in fixed_leaves and leaves[name].is_floating_point())

    def weights(like: Tensor, of_lse: bool = False) -> Tensor:
        shape, kind = like.shape, row["grad memory"]
        made = Draw(seed + 1 + of_lse, device)
        if kind == "expanded":
            return made.normal(1).to(like.dtype).expand(shape)
        if kind == "features apart" and len(shape) > 1:
            return made.normal(*shape[:-2], shape[-1], shape[-2]).to(like.dtype).transpose(-1, -2)
        return made.normal(*shape).to(like.dtype)

    has_lse_gradient = row["results"] in ("lse and its gradient", "all") and bool(learned)
    return Call(row, leaves, learned, keywords, weights, lambda lse: weights(lse, True), has_lse_gradient, seed)


# === parts ===

_SCHEME_LEAVES = ("slopes", "table", "rates", "inv_freq")


def _in_layout(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Return the shape of (B, T, H, D) in a layout."""
    if layout != "bhtd" or len(shape) == 3:
        return shape
    batch, tokens, heads, width = shape
    return batch, heads, tokens, width


def _make_precision(row: Row) -> Any:
    """Return a precision by its name, or as an object with a backward where a gradient is needed."""
    kind, backward = row["precision"], None if row["gradients"] == "none" else "16-bit"
    if kind == "neither turned nor centred":
        return QuantizedProducts(values="float8", hadamard=False, centre=False, backward=backward)
    if kind == "none" or backward is None:
        return None if kind == "none" else kind
    return QuantizedProducts(values="float8" if kind == "int8-fp8" else "16-bit", backward=backward)


def _lengths(row: Row, queries: int, keys: int, batch: int) -> tuple[list[int], list[int]]:
    """Return the lengths of packed sequences: queries and keys of each."""
    if row["pages"] != "none":  # new tokens after a prefix
        lengths = [max(queries // (b + 1), 1) for b in range(batch)]
        if row["bounds"] == "with empty":
            lengths[1] = 0
        return lengths, lengths
    third = queries // 3
    lengths_q = [queries - third - third // 2, third, third // 2]
    lengths_k = lengths_q
    if row["bounds"] == "unequal":
        fifth = keys // 5
        lengths_k = [2 * fifth, keys - 3 * fifth, fifth]
    if row["bounds"] == "with empty":
        lengths_q = lengths_k = [0, *lengths_q, 0]
    return lengths_q, lengths_k


def _allocate(
    draw: Draw, shape: tuple[int, ...], memory: str, head_axis: int, dtype: torch.dtype
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return a leaf, and how a tensor of a shape is a view of it."""
    heads = shape[head_axis]
    if not dtype.is_floating_point or dtype.itemsize == 1:
        memory = "dense"
    if memory == "sliced heads":
        wide = list(shape)
        wide[head_axis] += 3
        return draw.normal(*wide, dtype=dtype), lambda x: x.narrow(head_axis, 1, heads)
    if memory == "sliced features":
        return draw.normal(*shape[:-1], shape[-1] + 16, dtype=dtype), lambda x: x[..., 8 : 8 + shape[-1]]
    if memory == "misaligned":
        return draw.normal(*shape[:-1], shape[-1] + 3, dtype=dtype), lambda x: x[..., 1 : 1 + shape[-1]]
    if memory == "features apart":
        return draw.normal(*shape[:-2], shape[-1], shape[-2], dtype=dtype), lambda x: x.transpose(-1, -2)
    if memory == "broadcast":
        axis = 0 if len(shape) == 4 else head_axis
        narrow = list(shape)
        narrow[axis] = 1
        return draw.normal(*narrow, dtype=dtype), lambda x: x.expand(shape)
    return draw.normal(*shape, dtype=dtype), lambda x: x


def _add_pages(
    row: Row,
    draw: Draw,
    sizes: Sizes,
    add: Callable[..., None],
    fixed: dict[str, Any],
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype,
) -> int:
    """Add pages and their table, and return how many keys the table has room for."""
    batch, keys, kv_heads, dim, value_dim = shape
    device, head_axis = draw.device, 1 if row["layout"] == "bhtd" else -2
    if row["pages"] == "dense cache":
        for name, width in (("k", dim), ("v", value_dim)):
            add(name, (batch, keys, kv_heads, width), row["memory"], head_axis)
        return keys
    kind, size = row["pages"].split()
    page = sizes.page[size]
    per_row = -(-keys // page) + 1
    n_pages = batch * per_row + 2
    order = torch.randperm(n_pages, generator=torch.Generator().manual_seed(5))[: batch * per_row]
    fixed["block_table"] = order.view(batch, per_row).int().to(device)
    pages = (n_pages, page, kv_heads)
    if kind == "own":
        for name, width in (("k", dim), ("v", value_dim)):
            add(name, _in_layout((*pages, width), row["layout"]), row["memory"], head_axis)
        return per_row * page
    for name, width in (("k", dim), ("v", value_dim)):
        if kind == "fp8":
            made = draw.normal(*pages, width).mul(20).to(torch.float8_e4m3fn)
            scale = draw.uniform(kv_heads, low=0.02, high=0.08)
            scale = scale if name == "k" else scale[0]
        elif kind == "int8":
            made = draw.integers(-127, 128, *pages, width, dtype=torch.int8)
            scale = draw.uniform(*pages, low=0.005, high=0.02)
        else:
            low, high = (draw.integers(1, 16, *pages, width // 2, dtype=torch.uint8) for _ in range(2))
            made = low | high << 4
            scale = draw.uniform(*pages, max(width // 32, 1), low=0.05, high=0.3).half()
        fixed[f"{name}_scale"] = scale
        fixed[name] = made.transpose(1, 2) if row["layout"] == "bhtd" else made
    return per_row * page


def _make_blocks(kind: str, draw: Draw, heads: int, queries: int, keys: int, window: int) -> Any:
    """Return lists of blocks."""
    device = draw.device
    if kind == "causal":
        return BlockLists.causal(queries, keys, device=device)
    if kind == "sliding":
        return BlockLists.sliding_window(queries, keys, window=130, device=device)
    if kind == "BlockMask":
        from torch.nn.attention.flex_attention import create_block_mask

        def near(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
            return (m + keys - queries - n).abs() <= 2 * window + h

        return create_block_mask(near, None, heads, queries, keys, device=device.type, BLOCK_SIZE=128)
    block = int(kind.split()[1])
    rows, columns = -(-queries // block), max(-(-keys // block), 1)
    counts = draw.integers(0, columns + 1, 1, 1, rows, dtype=torch.int32)
    order = torch.stack([torch.randperm(columns, generator=torch.Generator().manual_seed(m)) for m in range(rows)])
    return BlockLists(counts, order.int().to(device)[None, None], block_q=block, block_k=block)


def _make_scheme(
    name: str, draw: Draw, leaves: Leaves, dim: int, heads: int, sizes: Sizes
) -> Callable[[Leaves], Any] | None:
    """Return a scheme as a function of the leaves that it adds."""
    device = draw.device
    half = max(dim // 4 * 2, 2)
    frequencies = torch.logspace(0, -3, half // 2, device="cpu")
    if name.startswith("alibi learned"):
        leaves["slopes"] = draw.uniform(heads, low=0.02, high=0.3)
    elif name.startswith("t5"):
        leaves["table"] = draw.normal(BUCKETS, heads)
    elif "bands" in name:
        leaves["bands"] = draw.uniform(heads, low=0.5, high=1.3)
    elif name.startswith("own kernel"):
        leaves["rates"] = draw.uniform(heads, low=0.1, high=0.5)
    elif name.startswith(("own rotation", "own two-range")):
        leaves["inv_freq"] = torch.logspace(0, -2, dim // 2, device=device)
    window = sizes.window
    axes = torch.arange(dim // 2, device=device) * 3 // max(dim // 2, 1)
    schemes: dict[str, Callable[[Leaves], Any] | None] = {
        "none": None,
        "rope": lambda leaves: Rope(),
        "rope interleaved": lambda leaves: Rope(base=500.0, interleaved=True),
        "rope partial": lambda leaves: Rope(rotary_dim=half),
        "rope offset": lambda leaves: Rope(rotary_dim=half, rotary_offset=dim - half, interleaved=True),
        "rope blocks": lambda leaves: Rope(pair_block=dim // 2 if dim % 4 == 0 else dim),
        "rope axes": lambda leaves: Rope(axes=axes),
        "rope frequencies": lambda leaves: Rope(inv_freq=frequencies, attention_factor=1.2),
        "alibi": lambda leaves: Alibi(),
        "alibi learned": lambda leaves: Alibi(leaves["slopes"]),
        "t5": lambda leaves: T5Bias(leaves["table"], max_distance=20),
        "t5 learned": lambda leaves: T5Bias(leaves["table"], bidirectional=False, max_distance=64),
        "exposb": lambda leaves: ExpoSB(),
        "exposb decay": lambda leaves: ExpoSB(distance_decay=True),
        "exposb bands": lambda leaves: ExpoSB(band_weights=leaves["bands"]),
        "exposb bands decay": lambda leaves: ExpoSB(band_weights=leaves["bands"], distance_decay=True),
        "rerope": lambda leaves: ReRope(window),
        "rerope leak": lambda leaves: ReRope(window, leak=4.0, log_n=16, rope=Rope(interleaved=True)),
        "self-extend": lambda leaves: SelfExtend(window, 4, log_n=12, rope=Rope(rotary_dim=half)),
        "own score_mod": lambda leaves: foreign.OwnInPyTorch(),
        "own kernel": lambda leaves: foreign.OwnWithFunctions(leaves["rates"]),
        "own kernel learned": lambda leaves: foreign.OwnWithFunctions(leaves["rates"], "LEARNED_LOG_BIAS"),
        "own rotation": lambda leaves: foreign.OwnRotation(leaves["inv_freq"]),
        "own rotation learned": lambda leaves: foreign.OwnRotation(leaves["inv_freq"]),
        "own two-range": lambda leaves: foreign.OwnTwoRanges(leaves["inv_freq"], window),
    }
    return schemes[name]


def _add_positions(
    row: Row, fixed: dict[str, Any], device: torch.device, tokens: tuple[int, int], batch: int, axes: int
) -> None:
    """Add positions: of one or of several axes."""
    kind, is_packed = row["positions"], row["layout"] == "thd"

    def make(n: int, step: int, start: int) -> Tensor:
        places = torch.arange(n, device=device) * step + start
        if is_packed:
            made = places
        else:
            made = places + torch.arange(batch, device=device)[:, None] if step > 1 else places[None]
        return torch.stack([made, made // 2, made % 7]) if axes else made

    n_q, n_k = tokens
    if kind in ("queries", "two tensors"):
        fixed["positions_q"] = make(n_q, 2, 5)
    if kind in ("keys", "two tensors"):
        fixed["positions_k"] = make(n_k, 2, 3)
    if kind == "one tensor" and n_q == n_k:
        fixed["positions_q"] = fixed["positions_k"] = make(n_q, 1, 4)
    elif kind == "one tensor":
        fixed["positions_q"], fixed["positions_k"] = make(n_q, 1, 4), make(n_k, 1, 4)


def _make_norm(
    kind: str, draw: Draw, leaves: Leaves, dim: int, heads: int, kv_heads: int
) -> Callable[[Leaves], QKNorm] | None:
    """Return a norm as a function of the leaves that it adds."""
    if kind == "none":
        return None
    if kind == "without weights":
        return lambda leaves: QKNorm()
    shapes: dict[str, Callable[[int], tuple[int, ...]]] = {
        "before": lambda heads: (dim,),
        "after": lambda heads: (dim,),
        "per head": lambda heads: (heads, dim),
        "across heads": lambda heads: (heads * dim,),
    }
    for name, n in (("norm_q", heads), ("norm_k", kv_heads)):
        leaves[name] = draw.normal(*shapes[kind](n)) * 0.3 + (0.0 if kind == "before" else 1.0)
    offset = 1.0 if kind == "before" else 0.0
    eps = 0.05 if kind == "after" else 1e-6
    how = {"eps": eps, "offset": offset, "after": kind == "after", "across_heads": kind == "across heads"}
    return lambda leaves: QKNorm(leaves["norm_q"], leaves["norm_k"], **how)
