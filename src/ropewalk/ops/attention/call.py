"""The one record of a call of attention, and what follows from it alone.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v), R rotary
dim, S packed sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ropewalk.ops.launch.record import Record, fields_of
from ropewalk.schemes import PositionScheme

MAX_PAGE_SIZE = 512

# Fields that backends list together: numbers of the softmax, and what changes scores before it.
SOFTMAX = ("scale", "sinks")
SCORE_CHANGES = ("softcap", "score_mod", "score_mod_params", "n_learned_params")
# Reasons for which a backend that lacks them refuses them.
SCORE_SENTENCES = {"softcap": "softcap is not supported", "sinks": "sinks are not supported"}


class RopeTable(NamedTuple):
    """cos and sin of a rotation, (B or 1, T, R/2), float32."""

    cos: Tensor
    sin: Tensor


class Tables(NamedTuple):
    """A scheme's map of the features of q and of k; None leaves them alone."""

    q: RopeTable | None = None
    k: RopeTable | None = None  # None too where the keys come rotated
    feature_weights: Tensor | None = None  # (D,), float32: k's features are multiplied by them
    interleaved: bool = False
    rotary_offset: int = 0  # the first rotated feature
    q_start: int | None = None  # q's table has a row for each position from this one on; None: one for each query
    pair_block: int | None = None  # pairs are half-split inside blocks of so many features; None: inside all of them


NO_TABLES = Tables()


class FarTables(NamedTuple):
    """The rotations of far pairs."""

    q_past: RopeTable | None = None  # of queries as they score far keys behind them
    q_future: RopeTable | None = None  # as they score far keys ahead; None: no key ahead is far
    k: RopeTable | None = None  # None: far keys are not rotated


class FarQK(NamedTuple):
    """Rotated features of far pairs: queries (B, H, Tq, D) and keys (B, K, Tk, D)."""

    q_past: Tensor
    q_future: Tensor | None
    k: Tensor


class FarRange(NamedTuple):
    """The second range of a two-range encoding: pairs at least `window` positions apart."""

    window: int
    tables: FarTables | None = None  # the scheme's rotations; None: the caller's features
    given: FarQK | None = None  # rotated by the caller, and differentiable


class BlockTables(NamedTuple):
    """Lists of blocks as kernels read them: M blocks of queries, N of keys; no block twice.

    A row of lists begins with two counts. Blocks that are taken as they are come first, then those whose pairs `bits`
    or `spans` choose; each kind is sorted. What follows is undefined. B and H are 1 where all rows or heads share
    lists, and each has room for one block more, which kernels load ahead.
    """

    rows: Tensor  # (B, H, M, 3 + n), int32: for each block of queries, counts and blocks of keys
    columns: Tensor | None = None  # (B, H, N, 3 + M), int32: for each block of keys, those of queries; for a backward
    slots: Tensor | None = None  # (B, H, M, N), int32: where a block's bits are; None: there are none
    bits: Tensor | None = None  # (slots, block_q, block_k / 32), int32: bit n % 32 of word n // 32 is key n's
    spans: Tensor | None = None  # (B, H, Tq, 2), int32: instead of bits, the first key of each query, and the end
    block_q: int = 128  # queries of a block
    block_k: int = 128


class Precision(NamedTuple):
    """8-bit products of a call: how its operands are quantised. Queries and keys are int8.

    A call has it as text, `AttentionCall.precision`, and reads it by `AttentionCall.quantised`: an operator of PyTorch
    takes 64 arguments at most, and three flags would be too many.
    """

    float8_values: bool  # values and probabilities in e4m3; otherwise in 16 bits
    hadamard: bool  # features of queries and keys pass a Hadamard transform first
    centre: bool  # keys are shifted by a mean, and values in e4m3 too

    def as_text(self) -> str:
        """Return it as text: "int8", with the names of the flags that are set."""
        return "+".join(("int8", *(name for name, is_set in zip(self._fields, self, strict=True) if is_set)))


def read_precision(text: str) -> Precision:
    """Undo `Precision.as_text`."""
    flags = text.split("+")
    return Precision("float8_values" in flags, "hadamard" in flags, "centre" in flags)


class AttentionCall(NamedTuple):
    """A call of attention: validated, with defaults filled in, and with the scheme resolved to tables and numbers.

    q is (B, H, Tq, D), k (B, K, Tk, D), v (B, K, Tk, Dv); packed sequences are one batch row; k and v may be pages,
    (pages, K, page_size, D or Dv). Packed queries over a cache have cu_seqlens_q, key_lengths and a block_table, (S,
    n_pages), but no cu_seqlens_k. Read it by name alone.

    A field's default is its neutral value, with which it changes nothing. A backend lists the fields that it reads, and
    a call in which another one is set is refused (`backend.why_unread`).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scheme: PositionScheme | None = None
    causal: bool = False
    window_left: int | None = None  # keys before its own that a query attends; None: all
    window_right: int | None = None  # those after it; None with `causal`
    mask: Tensor | None = None  # (B or 1, H or 1, Tq, Tk), bool
    key_lengths: Tensor | None = None  # (B,): where the keys end
    key_starts: Tensor | None = None  # (B,): where the keys start; None: at 0
    query_starts: Tensor | None = None  # (B,): the key index of the first query; None: Tk − Tq
    cu_seqlens_q: Tensor | None = None  # (S + 1,); None: the batch is dense
    cu_seqlens_k: Tensor | None = None  # (S + 1,)
    block_table: Tensor | None = None  # (B, n_pages); None: k and v are not paged
    positions_q: Tensor | None = None  # (B or 1, Tq); None: as `token_positions` says
    positions_k: Tensor | None = None  # (B or 1, Tk)
    blocks: BlockTables | None = None  # the blocks of pairs that are attended; None: all
    scale: float = 1.0
    softcap: float | None = None
    k_scale: Tensor | None = None  # of quantised pages, as `append_kv` has them
    v_scale: Tensor | None = None
    gate: Tensor | None = None  # (B, H, Tq, Dv) or (B, H, Tq); kernels multiply the output by its sigmoid
    sinks: Tensor | None = None  # (H,)
    dropout_p: float = 0.0
    seed: Tensor | None = None  # (1,), int64: of dropout
    precision: str | None = None  # a `Precision` as text; None: products in q's dtype
    keys_rotated: bool = False
    score_mod: str | None = None  # “module:NAME” of the ScoreMod that kernels apply
    score_mod_params: Tensor | None = None  # (H, n) or (B, H, n), float32: the ScoreMod's numbers
    n_learned_params: int = 0  # how many columns of them, from the first, may need a gradient; 0: all
    tables: Tables = Tables()
    far: FarRange | None = None  # None: no pair is far
    return_lse: bool = False
    deterministic: bool = False
    needs_backward: bool = False
    return_max_logits: bool = False
    row_logits: Tensor | None = None  # (B, H, Tq), float32: kernels write each row's largest scaled score here

    @property
    def value_dim(self) -> int:
        """Return Dv, of which a byte of 4-bit pages holds two."""
        width = int(self.v.shape[3])
        return 2 * width if self.v_scale is not None and self.v_scale.dtype == torch.float16 else width

    @property
    def quantised(self) -> Precision | None:
        """Return how operands are quantised; None if they are not."""
        return None if self.precision is None else read_precision(self.precision)

    @property
    def has_window(self) -> bool:
        """Whether a query attends fewer keys before its own, or after it, than causality allows."""
        return self.window_left is not None or self.window_right is not None

    @property
    def is_capped(self) -> bool:
        """Whether scores are soft-capped."""
        return self.softcap is not None

    @property
    def reads_positions(self) -> bool:
        """Whether kernels read positions: for a score mod, or to tell far pairs from near ones."""
        return self.score_mod is not None or self.far is not None

    @property
    def goes_by_index(self) -> bool:
        """Whether every position that kernels read is the token's index."""
        return not self.reads_positions or (self.positions_q is None and self.positions_k is None)


def rope_tables(call: AttentionCall) -> list[Tensor]:
    """All tables and weights that map features."""
    far = call.far.tables if call.far is not None else None
    tables = (call.tables.q, call.tables.k, *(far or ()))
    weights = call.tables.feature_weights
    return [*(x for table in tables if table is not None for x in table), *([] if weights is None else [weights])]


# The program that runs needs neither the scheme object nor the fields that shape results and choose a backend.
NOT_IN_PROGRAM = ("scheme", "return_lse", "needs_backward", "return_max_logits", "row_logits")
RECORD = Record(AttentionCall, NOT_IN_PROGRAM)
LEAVES, SCHEMA, flatten, unflatten = RECORD.names, RECORD.schema, RECORD.flatten, RECORD.unflatten
NO_BLOCKS = (None,) * len(BlockTables._fields)
BLOCK_TENSORS = slice(BlockTables._fields.index("block_q"))  # of tables: the sizes of blocks follow


_TENSORS = tuple(field.name for field in RECORD.fields if field.kind is Tensor)
_BLOCK_TENSORS = tuple(field.name for field in fields_of(BlockTables) if field.kind is Tensor)


def tensors_of(call: AttentionCall) -> tuple[Tensor | None, ...]:
    """Every tensor that the caller passed, as far as kernels read it."""
    features = () if call.far is None or call.far.given is None else call.far.given
    block_tensors = () if call.blocks is None else tuple([getattr(call.blocks, name) for name in _BLOCK_TENSORS])
    # A generator would cost a frame each.
    return (*[getattr(call, name) for name in _TENSORS], *block_tensors, *features)


def as_bhtd(x: Tensor, layout: str) -> Tensor:
    """View x as (B, H, T, D); packed as (1, H, total, D), and pages of keys as (pages, K, page_size, D)."""
    if layout == "thd":
        return x.transpose(0, 1).unsqueeze(0)
    return x if layout == "bhtd" else x.transpose(1, 2)


def from_bhtd(x: Tensor, layout: str) -> Tensor:
    """Undo `as_bhtd`."""
    if layout == "thd":
        return x.squeeze(0).transpose(0, 1)
    return x if layout == "bhtd" else x.transpose(1, 2)


def is_wide(call: AttentionCall) -> bool:
    """Say whether heads have more features than flash-attn's and cuDNN's kernels take."""
    return max(call.q.shape[3], call.value_dim) > 256


def kv_capacity(call: AttentionCall) -> int:
    """Return Tk: the rows of k, or of all pages that a row's block table names."""
    page_size = call.k.shape[2]
    return page_size if call.block_table is None else call.block_table.shape[1] * page_size


class TokenIndices(NamedTuple):
    """The key index of every token; causal and window go by it."""

    queries: Tensor  # (B or 1, Tq)
    keys: Tensor  # (B or 1, Tk)
    sequences_q: Tensor | None  # (1, Tq): of packed tokens, the sequence; −1: none
    sequences_k: Tensor | None  # (1, Tk)


def token_indices(call: AttentionCall) -> TokenIndices:
    """Return every token's key index: aligned at the bottom right, unless query_starts says otherwise.

    Packed tokens count from the first key of their sequence; a token of no sequence is at 0. Over a cache, packed
    queries end where `key_lengths` says, and keys have the same indices in all sequences.
    """
    queries, keys, device = call.q.shape[2], kv_capacity(call), call.q.device
    if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
        sequences_q, index_q, lengths_q = _unpack(call.cu_seqlens_q, queries)
        sequences_k, index_k, lengths_k = _unpack(call.cu_seqlens_k, keys)
        shift = torch.cat((lengths_k - lengths_q, lengths_k.new_zeros(1)))[sequences_q]  # −1 finds the zero
        return TokenIndices((index_q + shift)[None], index_k[None], sequences_q[None], sequences_k[None])
    columns = torch.arange(keys, device=device)[None]
    if call.cu_seqlens_q is not None and call.key_lengths is not None:  # over a cache
        sequences, index, lengths = _unpack(call.cu_seqlens_q, queries)
        shift = call.key_lengths.clamp(0, keys) - lengths
        shift = torch.cat((shift, shift.new_zeros(1)))[sequences]
        return TokenIndices((index + shift)[None], columns, sequences[None], None)
    if call.query_starts is None:
        return TokenIndices(torch.arange(keys - queries, keys, device=device)[None], columns, None, None)
    return TokenIndices(torch.arange(queries, device=device) + call.query_starts[:, None], columns, None, None)


def token_positions(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return every token's position for the scheme, (B or 1, Tq) and (B or 1, Tk): by default index minus key_starts.

    Queries and keys before key_starts have positions below 0, so that distances are those of indices.
    """
    positions_q, positions_k = call.positions_q, call.positions_k
    if positions_q is None or positions_k is None:
        indices = token_indices(call)
        default_q, default_k = indices.queries, indices.keys
        if call.key_starts is not None:
            starts = call.key_starts[:, None]
            default_q, default_k = default_q - starts, default_k - starts
        positions_q = default_q if positions_q is None else positions_q
        positions_k = default_k if positions_k is None else positions_k
    return positions_q, positions_k


def existing(call: AttentionCall) -> Tensor | None:
    """Return the mask of keys that exist, (B or 1, Tk); None where all do."""
    if call.cu_seqlens_k is not None:
        sequences = token_indices(call).sequences_k
        return None if sequences is None else sequences >= 0
    columns = torch.arange(call.k.shape[2], device=call.k.device)
    starts, ends = call.key_starts, call.key_lengths
    after = None if starts is None else columns >= starts[:, None]
    before = None if ends is None else columns < ends[:, None]
    if after is None or before is None:
        return before if after is None else after
    return after & before


def allowed(block: slice, call: AttentionCall) -> Tensor | None:
    """Return the mask of keys that a block of queries attends, (B or 1, H or 1, M, Tk); None where it attends all.

    Causal and window go by index.
    """
    indices = token_indices(call)
    parts = []
    if indices.sequences_q is not None and indices.sequences_k is not None:
        sequences_q, sequences_k = indices.sequences_q[:, block, None], indices.sequences_k[:, None]
        parts.append(((sequences_q == sequences_k) & (sequences_k >= 0))[:, None])
    if call.causal or call.has_window:
        ahead = (indices.keys[:, None] - indices.queries[:, block, None])[:, None]
        if call.causal:
            parts.append(ahead <= 0)
        if call.window_left is not None:
            parts.append(ahead >= -call.window_left)
        if call.window_right is not None:
            parts.append(ahead <= call.window_right)
    if call.key_starts is not None or call.key_lengths is not None:
        exist = existing(call)
        if exist is not None:
            parts.append(exist[:, None, None])
    if call.mask is not None:
        parts.append(call.mask[:, :, block])
    if call.blocks is not None:
        parts.append(expand_blocks(call.blocks, block, call.k.shape[2]))
    if not parts:
        return None
    every = parts[0]
    for part in parts[1:]:
        every = every & part
    return every


def zero_unattended(may: Tensor, *xs: Tensor) -> list[Tensor]:
    """Return features of keys, (B, K, Tk, D or Dv), with zeros for keys that no query attends.

    Such keys may hold anything, and 0 · NaN is NaN: pages that were freed, padding. may: as `allowed` returns it.
    """
    attended = may.any(dim=2)  # (B or 1, H or 1, Tk)
    if attended.shape[1] > 1:
        attended = attended.unflatten(1, (xs[0].shape[1], -1)).any(dim=2)
    return [x.masked_fill(~attended[..., None], 0) for x in xs]


def expand_blocks(tables: BlockTables, queries: slice, n_keys: int) -> Tensor:
    """Return the mask of pairs that lists of blocks leave, (B or 1, H or 1, M, Tk), for a slice of the queries."""
    rows, device = tables.rows, tables.rows.device
    m = torch.arange(queries.start, queries.stop, device=device)
    query_rows = rows[:, :, m // tables.block_q]
    n_full, n_listed = query_rows[..., :1], query_rows[..., :1] + query_rows[..., 1:2]
    entry, blocks = torch.arange(rows.shape[3] - 2, device=device), query_rows[..., 2:].long()
    n_blocks = -(-n_keys // tables.block_k)

    def mark(listed: Tensor) -> Tensor:
        found = torch.zeros(*blocks.shape[:3], n_blocks + 1, dtype=torch.bool, device=device)
        return found.scatter(3, torch.where(listed, blocks, n_blocks), True)[..., :n_blocks]

    mask = mark(entry < n_full).repeat_interleave(tables.block_k, 3)
    partial = mark((entry >= n_full) & (entry < n_listed))
    if tables.spans is not None:
        n, (starts, stops) = torch.arange(n_blocks * tables.block_k, device=device), tables.spans[:, :, m].unbind(-1)
        inside = (n >= starts[..., None]) & (n < stops[..., None])
        mask = mask | (partial.repeat_interleave(tables.block_k, 3) & inside)
    if tables.slots is not None and tables.bits is not None:
        slots = torch.where(partial, tables.slots[:, :, m // tables.block_q], 0)
        words = tables.bits[slots, (m % tables.block_q)[:, None]]
        bits = words[..., None] >> torch.arange(32, dtype=torch.int32, device=device) & 1
        mask = mask | (partial[..., None] & (bits.flatten(4) != 0)).flatten(3)
    return mask[..., :n_keys]


def _unpack(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """The sequence of each packed token, −1 for none, and its index there, 0 for none; and the sequences' lengths."""
    bounds = cu_seqlens.long().clamp(0, total)
    starts, ends = bounds[:-1], bounds[1:]
    tokens = torch.arange(total, device=cu_seqlens.device)
    sequences = torch.searchsorted(ends, tokens, right=True)
    index = tokens - torch.cat((starts, starts.new_full((1,), total)))[sequences]  # below 0 in no sequence
    return torch.where(index < 0, -1, sequences), index.clamp(min=0), (ends - starts).clamp(min=0)
