"""The softmax of a tile of scores, and its probabilities again in the backward, for the kernels for Hopper."""

from typing import Any, NamedTuple

from ropewalk.ops.attention.hopper.gluon_compat import gl, gluon
from ropewalk.ops.attention.hopper.lists import listed_keys, listed_queries, select_keys, select_queries
from ropewalk.ops.attention.hopper.scores import (
    add_bias,
    add_slopes,
    add_transposed_bias,
    add_transposed_slopes,
    modify_scores,
    modify_transposed_scores,
)
from ropewalk.ops.attention.hopper.tiles import sum_in_threads
from ropewalk.ops.attention.triton.arguments import Seqlens
from ropewalk.ops.attention.triton.masking import attention_mask
from ropewalk.ops.attention.triton.softmax import cap_scores, scale_logits, scale_scores


class TileMask(NamedTuple):
    """Everything that decides which pairs of a tile are attended, except `MaskFlags`."""

    masked: Any  # whether some may not be
    seqlens: Any
    is_partial: Any = None  # whether bits, spans or a range cut the tile's listed block; None without
    slots: Any = None  # fields of `Lists`, at one head; with bits at the program's block, too
    slots_stride_query: Any = None
    bits: Any = None
    ranges: Any = None  # RangePositions; None: they do not say which pairs are far


_PIN_EXP2 = gl.constexpr(
    "{ .reg .pred far; .reg .f32 sum; .reg .b32 bits; add.f32 sum, $2, $3; setp.gt.f32 far, sum, 0f7E000000; "
    "mov.b32 bits, sum; @far st.shared.b32 [bits], bits; mov.b32 $0, $2; mov.b32 $1, $3; }"
)


@gluon.jit
def pin_exp2(sums):
    """Return the sums, and keep the assembler from moving exponentials past this point.

    It moves them below the next wait for a product, where nothing overlaps with them. A store that needs their sum
    holds them there. The store never runs: sums stay below 2¹²⁵, which the assembler cannot prove. (It can prove that
    they are not negative, and drops a store on that condition.)
    """
    return gl.inline_asm_elementwise(_PIN_EXP2, "=f,=f,f,f", [sums], gl.float32, False, 2)


# Rescale O only if a row maximum grew by more than 2^8: small enough for P in 16 bits, and more than most rows grow by
# after their first tile.
RESCALE_THRESHOLD = gl.constexpr(8.0)


@gluon.constexpr_function
def _rescaling(n):
    """Return PTX that multiplies a thread's n numbers of O by alpha, unless alpha is 1 in all rows of the warp.

    In the layout of a product the numbers are of two rows: two of one, two of the other, by turns.
    """
    alpha = [f"${2 * n + i}" for i in range(n)]
    products = " ".join(f"mul.f32 ${i}, ${i}, {alpha[i]};" for i in range(n))
    return (
        "{ .reg .pred whole; "
        f"setp.eq.f32 whole, {alpha[0]}, 0f3F800000; setp.eq.and.f32 whole, {alpha[2]}, 0f3F800000, whole; "
        f"vote.sync.all.pred whole, whole, 0xFFFFFFFF; @whole bra.uni done; {products} done: }}"
    )


@gluon.constexpr_function
def _operands(n):
    """Return the constraints of `_rescaling`: n numbers, read and written in place, and an alpha for each."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.constexpr_function
def _at_once(n):
    """Return how many of a thread's numbers one piece of PTX takes: its operands are three times as many."""
    return min(n, 64)


@gluon.jit
def rescale(acc_o, alpha):
    """Multiply the rows of O by alpha, which is 1 in most steps: `online_softmax` lets maxima lag behind.

    Alpha is of rows, or as threads have it, [rows, 4].
    """
    PER_THREAD: gl.constexpr = _at_once(acc_o.shape[0] * acc_o.shape[1] // 128)
    PTX: gl.constexpr = _rescaling(PER_THREAD)
    OPERANDS: gl.constexpr = _operands(PER_THREAD)
    if len(alpha.shape) == 1:
        alpha = gl.convert_layout(alpha, gl.SliceLayout(1, acc_o.type.layout))[:, None]
        acc_o = gl.inline_asm_elementwise(PTX, OPERANDS, [acc_o, alpha], gl.float32, True, PER_THREAD)
    else:
        pieces = gl.reshape(acc_o, [acc_o.shape[0], acc_o.shape[1] // 8, 4, 2])
        alpha = gl.convert_layout(alpha, gl.SliceLayout(1, gl.SliceLayout(3, pieces.type.layout)))
        operands = [pieces, alpha[:, None, :, None]]
        pieces = gl.inline_asm_elementwise(PTX, OPERANDS, operands, gl.float32, True, PER_THREAD)
        acc_o = gl.convert_layout(gl.reshape(pieces, acc_o.shape), acc_o.type.layout)  # which moves nothing
    return acc_o


@gluon.constexpr_function
def _exponentials(n, half):
    """Return PTX of n pairs of a row that a thread has: exponentials, and again if their sum is above 2^12.

    Results: pairs of probabilities of 16 bits; the row's maximum, and alpha that rescales earlier sums; the sum of
    probabilities, and a number that nothing reads. Operands: the pairs; each twice, the maximum before, what all
    numbers of the thread lack, and what makes them exponents of 2.

    A large sum says that the maximum is too small, so none is looked for where it is not: in most tiles. In a row that
    has attended nothing, exponentials of -inf are 0, and others infinite: 10^38 stands for the shift.
    """
    p = [f"${i}" for i in range(n)]
    largest, alpha, total, other = (f"${n + i}" for i in range(4))
    s = [f"${n + 4 + i}" for i in range(2 * n)]
    before, rest, unit = (f"${3 * n + 4 + 2 * i}" for i in range(3))
    powers = f"sub.f32 shift, {rest}, {largest}; mul.f32 shift, shift, {unit}; min.f32 shift, shift, 0f7E967699; "
    powers += f"mov.f32 {total}, 0f00000000; mov.f32 {other}, 0f00000000; "
    for i in range(n):
        for name, number in (("a", s[2 * i]), ("b", s[2 * i + 1])):
            powers += f"fma.rn.f32 {name}, {number}, {unit}, shift; ex2.approx.ftz.f32 {name}, {name}; "
        powers += f"cvt.rn.{half}x2.f32 {p[i]}, b, a; add.f32 {total}, {total}, a; add.f32 {other}, {other}, b; "
    powers += f"add.f32 {total}, {total}, {other}; "
    find = f"max.f32 {largest}, {s[0]}, {s[1]}; " + " ".join(f"max.f32 {largest}, {largest}, {x};" for x in s[2:])
    find += f" add.f32 {largest}, {largest}, {rest}; " + " ".join(
        f"shfl.sync.bfly.b32 {other}, {largest}, {lanes}, 31, 0xFFFFFFFF; max.f32 {largest}, {largest}, {other};"
        for lanes in (1, 2)
    )
    return (
        "{ .reg .pred some; .reg .f32 shift, a, b; "
        f"mov.f32 {largest}, {before}; mov.f32 {alpha}, 0f3F800000; {powers}"
        f"setp.gt.f32 some, {total}, 0f45800000; vote.sync.any.pred some, some, 0xFFFFFFFF; @!some bra.uni done; "
        f"{find} max.f32 {largest}, {largest}, {before}; "
        f"sub.f32 {alpha}, {before}, {largest}; mul.f32 {alpha}, {alpha}, {unit}; ex2.approx.ftz.f32 {alpha}, {alpha}; "
        f"setp.eq.f32 some, {before}, {largest}; selp.f32 {alpha}, 0f3F800000, {alpha}, some; {powers}done: }}"
    )


@gluon.constexpr_function
def _exponential_operands(n):
    """Return the constraints of `_exponentials`: results share no register with operands, which are read again."""
    return ",".join(["=&r"] * n + ["=&f"] * 4 + ["f"] * (2 * n + 6))


@gluon.constexpr_function
def _exponential_dtypes(n, dtype):
    return (dtype,) * n + (gl.float32,) * 2


@gluon.constexpr_function
def _name_of_half(dtype):
    return "bf16" if dtype == gl.bfloat16 else "f16"


@gluon.jit
def _split_columns(pieces):
    """Return the pairs that a thread has of each row, [rows, 4, 2, n], as a tuple of n tensors [rows, 4, 2]."""
    ROWS: gl.constexpr = pieces.shape[0]
    if pieces.shape[3] == 1:
        columns = (gl.reshape(pieces, [ROWS, 4, 2]),)
    else:
        even, odd = gl.split(gl.reshape(pieces, [ROWS, 4, 2, pieces.shape[3] // 2, 2]))
        columns = _split_columns(even) + _split_columns(odd)
    return columns


@gluon.jit
def _join_columns(columns, FIRST: gl.constexpr, N: gl.constexpr):
    """Return n columns from the first one on as `_split_columns` takes them."""
    ROWS: gl.constexpr = columns[FIRST].shape[0]
    if N == 1:
        pieces = gl.reshape(columns[FIRST], [ROWS, 4, 2, 1])
    else:
        HALF: gl.constexpr = N // 2
        pieces = gl.join(_join_columns(columns, FIRST, HALF), _join_columns(columns, FIRST + HALF, HALF))
        pieces = gl.reshape(pieces, [ROWS, 4, 2, N])
    return pieces


@gluon.jit
def tile_attends(q_idx, n_start, column, mask, flags):
    """Return whether queries attend a tile of keys, [queries, keys]."""
    attends = attention_mask(q_idx[:, None], (n_start + column)[None, :], mask.seqlens, flags)
    if mask.is_partial is not None and mask.ranges is None:
        attends = attends & listed_keys(q_idx, n_start, column, mask)
    return attends


@gluon.jit
def masked_scores(s, row_logit, q_idx, n_start, mask, scores, flags, score_flags):
    """Return a tile of scores as the softmax reads them, what they lack, and each row's largest one before the change.

    They lack a number of the tile, or one of each row and thread, [rows, 4]; or nothing: 0. The last is never read
    without MAX_LOGITS.
    """
    rest = 0.0
    column = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
    HAS_MOD: gl.constexpr = score_flags.MOD is not None
    CHANGES: gl.constexpr = score_flags.CAPPED or HAS_MOD or scores.bias is not None or scores.slope is not None
    if score_flags.MAX_LOGITS and CHANGES:
        logit = scale_logits(s, scores, score_flags)
        largest = row_logit
        if flags.PARTIAL_TILES:
            if mask.masked:  # a maximum in each branch: a masked tile that both end with would take more registers
                attends = tile_attends(q_idx, n_start, column, mask, flags)
                attended = gl.where(attends, logit, float("-inf"))
                if mask.ranges is not None:
                    attended = select_keys(attended, q_idx, n_start, column, mask, flags.RANGE)
                largest = gl.max(attended, 1)
            else:
                largest = gl.max(logit, 1)
        else:
            largest = gl.max(logit, 1)
        row_logit = gl.maximum(row_logit, largest)
    s = cap_scores(s, scores, score_flags)
    if HAS_MOD:
        s = scale_scores(s, scores, score_flags)
    if scores.bias is not None:
        s, rest = add_bias(s, n_start, column, scores)
    elif scores.slope is not None:
        s, rest = add_slopes(s, q_idx, n_start, mask.seqlens, scores.slope, flags)
    elif score_flags.MOD is not None:
        s = modify_scores(s, q_idx, n_start, column, mask.seqlens, scores, flags, score_flags)
    if flags.PARTIAL_TILES:  # noqa: SIM102
        if mask.masked:
            attends = tile_attends(q_idx, n_start, column, mask, flags)
            s = gl.where(attends, s, float("-inf"))
            if mask.ranges is not None:
                s = select_keys(s, q_idx, n_start, column, mask, flags.RANGE)
    if score_flags.MAX_LOGITS and not CHANGES:
        row_logit = gl.maximum(row_logit, gl.max(s, 1))
    return s, rest, row_logit


@gluon.jit
def online_softmax(
    s, row_max, row_sum, row_logit, q_idx, n_start, mask, scores, flags, score_flags, PIN_EXP2: gl.constexpr
):
    """Return P, alpha that rescales earlier sums, each row's new maximum, sums in threads, and new largest score.

    A maximum that would grow by no more than 2^RESCALE_THRESHOLD stays, and alpha is 1. So `row_logit`, each row's
    largest score before the score function, is apart from it. Without MAX_LOGITS it is never read.
    """
    s, rest, row_logit = masked_scores(s, row_logit, q_idx, n_start, mask, scores, flags, score_flags)
    if scores.slope is None:
        largest = gl.max(s, 1)
        if scores.bias is not None:
            largest += rest
    else:
        pieces = gl.reshape(s, [s.shape[0], s.shape[1] // 8, 4, 2])
        largest = gl.convert_layout(gl.max(gl.max(gl.max(pieces, 3), 1) + rest, 1), row_max.type.layout)
    new_max = gl.maximum(row_max, largest)
    grows = (new_max - row_max) * scores.exp2_scale > RESCALE_THRESHOLD
    new_max = gl.where(grows, new_max, row_max)
    shift = new_max * scores.exp2_scale
    if flags.PARTIAL_TILES:
        shift = gl.where(new_max == float("-inf"), 0.0, shift)  # a row that has attended nothing yet
    alpha = gl.where(grows, gl.exp2(row_max * scores.exp2_scale - shift), 1.0)
    if scores.bias is not None:
        shift -= rest * scores.exp2_scale
    if scores.slope is None:
        p = gl.exp2(s * scores.exp2_scale - shift[:, None])
    else:
        shift = gl.convert_layout(shift, gl.SliceLayout(1, rest.type.layout))[:, None] - rest * scores.exp2_scale
        p = gl.exp2(pieces * scores.exp2_scale - shift[:, None, :, None])
        p = gl.convert_layout(gl.reshape(p, s.shape), s.type.layout)  # which moves nothing
    sums = sum_in_threads(p)
    if PIN_EXP2:
        sums = pin_exp2(sums)
    row_sum = row_sum * gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout))[:, None] + sums
    return p, alpha, new_max, row_sum, row_logit


@gluon.jit
def lagging_softmax(s, row_max, row_sum, q_idx, n_start, mask, scores, flags, score_flags, DTYPE: gl.constexpr):
    """Return P of 16 bits, alpha, maxima and sums in threads, as `online_softmax` does, where few maxima are needed.

    Maxima and alpha are as threads have them, [rows, 4].
    """
    s, rest, _ = masked_scores(s, row_max, q_idx, n_start, mask, scores, flags, score_flags)
    N: gl.constexpr = s.shape[1] // 8
    PTX: gl.constexpr = _exponentials(N, _name_of_half(DTYPE))
    OPERANDS: gl.constexpr = _exponential_operands(N)
    DTYPES: gl.constexpr = _exponential_dtypes(N, DTYPE)
    columns = _split_columns(gl.permute(gl.reshape(s, [s.shape[0], N, 4, 2]), (0, 2, 3, 1)))
    FIRST: gl.constexpr = 0  # all columns have one layout
    row_layout: gl.constexpr = gl.SliceLayout(2, columns[FIRST].type.layout)
    if scores.slope is not None:
        rest = gl.convert_layout(rest, row_layout)[:, :, None]
    operands = columns + (gl.convert_layout(row_max, row_layout)[:, :, None], rest, scores.exp2_scale)  # noqa: RUF005
    results = gl.inline_asm_elementwise(PTX, OPERANDS, operands, DTYPES, False, 2)
    p = gl.reshape(gl.permute(_join_columns(results, 0, N), (0, 3, 1, 2)), s.shape)
    p = gl.convert_layout(p, s.type.layout)  # which moves nothing
    layout: gl.constexpr = row_sum.type.layout
    row_max, alpha = gl.split(results[N])
    sums, _ = gl.split(results[N + 1])
    alpha = gl.convert_layout(alpha, layout)
    row_sum = row_sum * alpha + gl.convert_layout(sums, layout)
    return p, alpha, gl.convert_layout(row_max, layout), row_sum


@gluon.jit
def recompute_p(s, lse, m_start, k_idx, mask, scores, flags, score_flags):
    """Return P of a tile of raw scores [keys, queries], the soft-capped scores, and the score function's input."""
    seqlens = mask.seqlens
    column = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
    s = cap_scores(s, scores, score_flags)
    scaled = s
    if score_flags.MOD is not None:
        scaled = scale_scores(s, scores, score_flags)
    modified = scaled
    if scores.bias is not None:
        modified = add_transposed_bias(scaled, m_start, column, seqlens, scores)
    elif score_flags.MOD is not None:
        modified = modify_transposed_scores(scaled, m_start, column, k_idx, seqlens, scores, flags, score_flags)
    exponents = modified * scores.exp2_scale
    if scores.slope is not None:
        exponents = add_transposed_slopes(exponents, m_start, column, k_idx, seqlens, scores, flags)
    p = gl.exp2(exponents - lse[None, :])
    if flags.PARTIAL_TILES:  # noqa: SIM102
        if mask.masked:
            offset = seqlens.causal_offset + m_start
            from_here = Seqlens(
                seqlens.n_queries, seqlens.kv_start, seqlens.n_keys, offset, seqlens.window, seqlens.window_right
            )
            attends = attention_mask(column[None, :], k_idx[:, None], from_here, flags)
            if mask.is_partial is not None and mask.ranges is None:
                attends = attends & listed_queries(m_start + column, m_start, k_idx, mask)
            p = gl.where(attends, p, 0.0)
            if mask.ranges is not None:
                p = select_queries(p, m_start, column, k_idx, mask, flags.RANGE)
    return p, s, scaled
