"""Groups of kernel arguments: NamedTuples that the host builds, and that jitted functions read by field.

A field is a number, a pointer, None where a call lacks it, or a constexpr in the groups of constants.

Constants (MaskFlags, ScoreFlags, Blocks) enter a kernel as `tl.constexpr` parameters and are grouped inside, because
the interpreter of Triton 3.6 takes no bool in a tuple. Build such a group in a call's argument or by a constexpr
function, never in an assignment or a jitted function's result: Triton makes tensors of constants there.
A group of groups has no field that is a number or a pointer, or ends with a constant: a loop of Triton 3.6 would lose
the constants of the groups in it, as a stride of 1 is (`tests/helpers/groups.py`).
Where a field is None, compare the field with None and never the group, and return no such group from a jitted function:
Triton 3.6 refuses both.
Tensor descriptors are parameters of their own, because Triton's launcher finds no descriptor in a tuple.
So are numbers that differ from call to call: where a number in a tuple is 1 or a multiple of 16, Triton makes another
binary, whatever `do_not_specialize` says.

Shape letters: B batch, T tokens, H query heads, D head dim, R rotary dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Seqlens(NamedTuple):
    """Extents of one sequence, in tokens."""

    n_queries: Any
    kv_start: Any  # the first key that exists
    n_keys: Any  # one past the last key that exists
    causal_offset: Any  # query m has the index m + causal_offset among the keys
    window: Any  # attended keys n are more than m + causal_offset - window
    window_right: Any  # and less than m + causal_offset + window_right; both where MaskFlags says so


class Bounds(NamedTuple):
    """Extents of a dense batch's sequences: pointers to B integers, or None."""

    key_lengths: Any
    key_starts: Any
    query_starts: Any


class Packed(NamedTuple):
    """The sequences of a packed batch; a dense batch has None in its place."""

    cu_seqlens_q: Any  # pointer to n_sequences + 1 integers
    cu_seqlens_k: Any  # likewise; not read over a cache, whose keys end at `Bounds.key_lengths`
    schedule: Any  # pointer to (entries, 2), int32: a sequence, and one of its tiles
    n_sequences: Any


class Mask(NamedTuple):
    """A boolean mask (B or 1, H or 1, Tq or 1, Tk) as bytes; inside a kernel `ptr` is at one head."""

    ptr: Any  # None: there is no mask, and no stride
    stride_batch: Any
    stride_head: Any
    stride_key: Any
    stride_query: Any  # None: the mask is the same for all queries


class Lists(NamedTuple):
    """The fields of `BlockTables`, dense; inside a kernel `ptr` is at one line, and `slots` at one head."""

    ptr: Any  # the rows, or the columns where a kernel loops over queries; None: all pairs, and no field
    stride_batch: Any  # 0: all batch rows have the same
    stride_head: Any
    stride_line: Any
    slots: Any  # None: no pair is chosen by bits; spans, or positions of queries, are in its place, and their strides
    slots_stride_batch: Any
    slots_stride_head: Any
    slots_stride_query: Any  # from one block of queries to the next
    bits: Any  # None: no bits
    # Of the kernels for Hopper, where positions decide which pairs are far; each range then has lists, as a head would:
    k_pos: Any = None  # positions of keys, like those of queries int64 and dense; None: no lists of ranges
    k_pos_stride_batch: Any = None


class Pages(NamedTuple):
    """Keys or values of a cache, (pages, page_size, K, D), and a row's pages; inside a kernel `table` is at one row."""

    ptr: Any
    stride_page: Any
    stride_head: Any
    stride_token: Any
    head_dim: Any
    n_pages: Any
    table: Any  # pointer to page numbers
    stride_row: Any
    stride_column: Any


class Units(NamedTuple):
    """Pointers to the numbers beside 8-bit operands, `Quantized` without their `x`, dense and float32; or all None."""

    q: Any  # (B, H, Tq): multiplies a row's products
    q_shift: Any  # (B, H, Tq): is added to them
    q_past: Any
    q_past_shift: Any
    q_future: Any
    q_future_shift: Any
    k: Any  # (B, K, blocks, GROUPS): multiplies those of a group of keys; None: operands are of 16 or 32 bits
    k_far: Any
    v: Any  # (B, K, blocks): multiplies those of a block of values; None: values are of 16 bits
    v_mean: Any  # (B or S, K, Dv): is added to the mean of the values that a row attends
    v_dim: Any  # Dv


class QuantizedRows(NamedTuple):
    """Queries of 8 bits, and their numbers from the first query of a sequence's head on."""

    x: Any  # descriptor
    unit: Any
    shift: Any


class QuantizedBlocks(NamedTuple):
    """Keys or values of 8 bits in whole blocks, and their units from the first block of a sequence's head on."""

    x: Any  # descriptor
    unit: Any
    offset: Any  # the sequence's first row


class MaskFlags(NamedTuple):
    """Constants of the conditions under which a query attends a key."""

    SIDE: Any  # EITHER_SIDE, PAST or FUTURE
    WINDOWED: Any  # OUTSIDE where some keys may be in no query's window
    HAS_LENGTHS: Any  # causality alone does not imply n < n_keys
    HAS_STARTS: Any  # kv_start may be above 0
    PACKED: Any  # rows past the last query belong to another sequence
    RANGE: Any  # ALL, NEAR, FAR_PAST or FAR_FUTURE: the pairs that a loop is over
    INDEX_POSITIONS: Any  # positions are indices of tokens
    PARTIAL_TILES: Any  # a tile may have pairs that are not attended
    UNREAD_KEYS: Any  # no query may attend some keys that exist, and that may hold NaN


class Scores(NamedTuple):
    """Numbers that turn a product q·k into an exponent; inside a kernel `params` is at one head."""

    params: Any  # pointer to the score function's numbers, float32; or None
    params_stride: Any  # from one head's to the next's; or None
    params_stride_batch: Any  # None: all batch rows have the same
    scale: Any  # multiplies products before soft-capping and the score function; None: `exp2_scale` holds it
    cap: Any  # of soft-capping, by which `scale` is divided; without it 1, or None in the decode kernel
    exp2_scale: Any  # multiplies scores, as the softmax reads them, into exponents of 2
    # Of the kernels for Hopper:
    largest: Any = None  # the distance from which a bias is the same, of which `params` has a table; None: no bias
    slopes: Any = None  # pointer, with the strides of `params`, to what each token of distance takes off; or None
    factors: Any = None  # likewise: what `exp2_scale` is multiplied by, 0 or more; or None
    q_pos: Any = None  # pointers to positions (B or 1, T), float32 from a sequence's origin; None: they are indices
    k_pos: Any = None
    q_pos_stride_batch: Any = None
    k_pos_stride_batch: Any = None


class ScoreFlags(NamedTuple):
    """Constants of the scores: functions of a `ScoreMod`, each of which may be None, and soft-capping."""

    MOD: Any  # None: scores are products, and `exp2_scale` holds the scale
    MOD_BWD: Any
    PARAM_GRAD: Any
    CAPPED: Any
    FAST_TANH: Any
    MAX_LOGITS: Any = None  # keep each row's largest scaled score
    HIDES_KEYS: Any = None  # MOD may return −inf for all that a row attends


class Tile(NamedTuple):
    """The tile of a program, or of a consumer."""

    batch: Any
    head: Any
    kv_head: Any
    q_offset: Any  # the sequence's first query, in a packed batch
    k_offset: Any
    start: Any  # the tile's first token in its sequence
    sequence: Any = None  # for dropout, in the kernels for Hopper: of a packed batch; otherwise 0


class TileRange(NamedTuple):
    """Tokens that a loop is over: [full, full_stop) in tiles without a masked pair, the rest in partial tiles."""

    start: Any
    full: Any
    full_stop: Any
    stop: Any


class RopeTable(NamedTuple):
    """Tables (B or 1, T, R / 2) of cosines and sines; a gradient that is not rotated has None in its place."""

    cos: Any
    sin: Any
    stride_batch: Any  # 0: one table for the whole batch
    stride_token: Any


class Positions(NamedTuple):
    """Positions (B or 1, T) of tokens; None in its place: their index."""

    ptr: Any
    stride_batch: Any
    stride_token: Any
    n_tokens: Any


class Dropout(NamedTuple):
    """A rate of dropout; None in its place: nothing is dropped."""

    seed: Any  # pointer to int64
    steps: Any  # of 65,536 probabilities so many are dropped
    rescale: Any  # multiplies the others


class RowDropout(NamedTuple):
    """Dropout of one row of all batches' heads."""

    seed: Any
    steps: Any
    rescale: Any
    row: Any  # batch · H + head
    sequence: Any  # of a packed batch; otherwise 0
    zero: Any  # a zero that the compiler does not fold


class Far(NamedTuple):
    """Features of pairs at least `window` positions apart, in a two-range encoding; descriptors, or None."""

    q_past: Any  # queries, as they read keys behind them
    q_future: Any  # queries, as they read keys ahead
    k: Any
    window: Any


class RowTarget(NamedTuple):
    """Rows (B, H, T, D) that a kernel stores to where no descriptor can: in a packed batch."""

    ptr: Any
    stride_batch: Any  # None: the batch is one row
    stride_head: Any
    stride_token: Any
    head_dim: Any


class Gate(NamedTuple):
    """The output gate (B, H, Tq, Dv), or its gradient; (B, H, Tq) has one number for a row."""

    ptr: Any  # None: there is no gate, and no stride
    stride_batch: Any
    stride_head: Any
    stride_token: Any
    stride_feature: Any  # None: one number for a row
    head_dim: Any  # Dv


class Blocks(NamedTuple):
    """Constants of the tiles: their sizes, and the precision of their products."""

    M: Any  # queries
    N: Any  # keys
    D: Any  # features of q and k in one chunk
    DV: Any  # features of v
    D_CHUNKS: Any  # 1, or 3 for 192 features
    PRECISION: Any
    LIST_Q: Any = None  # queries of a block in `Lists`
    LIST_K: Any = None
    PAGE_SIZE: Any = None  # None: k and v are descriptors; 0: rows of a dense cache, of any length
    ONE_LOOP: Any = None  # tiles without a masked pair have no loop of their own
    HAS_DK: Any = None  # gradients that a program of the backward computes
    HAS_DV: Any = None
    INT8: Any = None  # q and k are `QuantizedRows` and `QuantizedBlocks`
    FLOAT8: Any = None  # v is `QuantizedBlocks`


class Schedule(NamedTuple):
    """The tiles and heads of a Hopper kernel's work items."""

    n_tiles: Any  # of one head, or of a packed batch's schedule
    n_rows: Any  # batch · heads
    n_heads: Any  # of queries in the forward, of keys in the backward
    heads_per_key: Any
    heads_per_l2_section: Any  # whose keys and values, or queries, fit into the L2 cache


class Masking(NamedTuple):
    """Everything that decides whether a query attends a key, except `MaskFlags`."""

    seqlens: Any
    mask: Any  # at one head
    far_window: Any
    lists: Any  # at one line


class Scoring(NamedTuple):
    """Everything that turns products into probabilities, except `ScoreFlags`."""

    scores: Any  # at one head
    positions: Any  # of the tokens that a loop streams
    origin: Any  # subtracted from all positions
    dropout: Any  # RowDropout | None


class QueryTile(NamedTuple):
    """Rows of queries that a program holds; dO, lse and delta in the backward."""

    q: Any  # chunks of features
    pos: Any
    do: Any = None
    lse: Any = None
    delta: Any = None
    unit: Any = None  # of queries of 8 bits, in the forward
    shift: Any = None


class KeyTile(NamedTuple):
    """Rows of keys and values that a program of the backward holds."""

    k: Any  # chunks of features
    v: Any
    pos: Any


class QueryStream(NamedTuple):
    """Rows of queries that a loop of the backward loads."""

    do: Any  # descriptor
    lse: Any  # pointers to (B, H, Tq), or to one head's
    delta: Any
    n_queries: Any  # of a whole row of (B, H, Tq)
    n_kv_heads: Any
    heads_per_key: Any
    sequence: Any  # in a packed batch


class FarGrads(NamedTuple):
    """Gradients of far pairs: stored apart, or added to those of near pairs by rebasing their rotation.

    SEPARATE, R and INTERLEAVED are constants.
    """

    SEPARATE: Any  # whether they are stored apart
    dq_past: Any  # targets as of dq if SEPARATE
    dq_future: Any
    dk: Any
    table: Any  # RopeTable | None, of near pairs
    table_past: Any  # RopeTable | None, of the fields of `Far`
    table_future: Any
    table_k: Any
    factor: Any  # multiplies dq or dk
    R: Any
    INTERLEAVED: Any
