"""What a consumer of the kernels for Hopper does with a tile of scores: the softmax, and the probabilities again."""

from ropewalk.ops.attention.gluon_shim import gl, gluon
from ropewalk.ops.attention.triton_sequences import PAST, may_attend
from ropewalk.ops.attention.triton_softmax import saturate


@gluon.jit
def sum_in_threads(p):
    """Sums of a tile's rows as far as each thread holds them, [rows, 4].

    Of eight neighbouring columns of a product a thread holds two: its lane says which.
    """
    return gl.sum(gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


_PIN = gl.constexpr(
    "{ .reg .pred far; .reg .f32 sum; .reg .b32 bits; add.f32 sum, $2, $3; setp.gt.f32 far, sum, 0f7E000000; "
    "mov.b32 bits, sum; @far st.shared.b32 [bits], bits; mov.b32 $0, $2; mov.b32 $1, $3; }"
)


@gluon.jit
def _pin(sums):
    """The sums as they are; but all exponentials must have been taken before.

    The assembler moves exponentials below the next wait for a product, where nothing overlaps with them. A store that
    needs their sum holds them. It never happens: sums stay below 2¹²⁵, which the assembler does not know. (It knows
    that they are not negative, and drops a store that asks for that.)
    """
    return gl.inline_asm_elementwise(_PIN, "=f,=f,f,f", [sums], gl.float32, False, 2)


# The most powers of two by which exponentials may exceed 1, as the maximum that they count from lags behind: few enough
# for probabilities in halves, and more than most rows grow by after their first tile.
_MOST_AHEAD = gl.constexpr(8.0)


@gluon.constexpr_function
def _rescaling(n):
    """PTX that multiplies a thread's n sums by what is kept of each, unless the warp keeps all of all its rows.

    As a product leaves them, the sums are of two rows, two of one and two of the other by turns.
    """
    kept = [f"${2 * n + i}" for i in range(n)]
    products = " ".join(f"mul.f32 ${i}, ${i}, {kept[i]};" for i in range(n))
    return (
        "{ .reg .pred whole; "
        f"setp.eq.f32 whole, {kept[0]}, 0f3F800000; setp.eq.and.f32 whole, {kept[2]}, 0f3F800000, whole; "
        f"vote.sync.all.pred whole, whole, 0xFFFFFFFF; @whole bra.uni done; {products} done: }}"
    )


@gluon.constexpr_function
def _operands(n):
    """Of `_rescaling`: n sums, which come in where they go out, and what is kept of each."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def rescale(sums, kept):
    """A running output, of each row what is kept: all of it in most steps, as `take_softmax` lets maxima lag behind."""
    PER_THREAD: gl.constexpr = sums.shape[0] * sums.shape[1] // 128
    PTX: gl.constexpr = _rescaling(PER_THREAD)
    OPERANDS: gl.constexpr = _operands(PER_THREAD)
    kept = gl.convert_layout(kept, gl.SliceLayout(1, sums.type.layout))[:, None]
    return gl.inline_asm_elementwise(PTX, OPERANDS, [sums, kept], gl.float32, True, PER_THREAD)


@gluon.jit
def take_softmax(
    scores, row_max, row_sum, m, n_start, is_edge, lengths, scale, softcap, factor, parameters_ptr,
    SIDE: gl.constexpr, WINDOWED: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_STARTS: gl.constexpr,
    EDGES: gl.constexpr, SCORE: gl.constexpr, SOFTCAP: gl.constexpr, PIN: gl.constexpr,
):  # fmt: skip
    """Exponentials of a tile of scores, what is kept of those before, and each row's new maximum and sums.

    A maximum that would grow by less than _MOST_AHEAD powers of two stays, and with it all that was summed.
    """
    layout: gl.constexpr = scores.type.layout
    column = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, layout))
    if SOFTCAP:
        scores = saturate(scores * scale, True)
        if SCORE is not None:
            scores *= softcap
    elif SCORE is not None:
        scores *= scale
    if SCORE is not None:
        ours = (m + (lengths[3] - n_start)).to(gl.float32)
        scores = SCORE(scores, ours[:, None], column.to(gl.float32)[None, :], parameters_ptr, SIDE == PAST)
    if EDGES:  # noqa: SIM102
        if is_edge:
            may = may_attend(
                m[:, None], (n_start + column)[None, :], lengths, None, None, HAS_LENGTHS, HAS_STARTS, SIDE, WINDOWED
            )  # fmt: skip
            scores = gl.where(may, scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1))
    grows = (new_max - row_max) * factor > _MOST_AHEAD
    new_max = gl.where(grows, new_max, row_max)
    shift = new_max * factor
    if EDGES:
        shift = gl.where(new_max == float("-inf"), 0.0, shift)  # a row that has attended nothing yet
    kept = gl.where(grows, gl.exp2(row_max * factor - shift), 1.0)
    p = gl.exp2(scores * factor - shift[:, None])
    sums = sum_in_threads(p)
    if PIN:
        sums = _pin(sums)
    row_sum = row_sum * gl.convert_layout(kept, gl.SliceLayout(1, sums.type.layout))[:, None] + sums
    return p, kept, new_max, row_sum


@gluon.jit
def take_probabilities(
    scores, lse, m_start, n, is_edge, lengths, scale, softcap, factor, parameters_ptr, SIDE: gl.constexpr,
    WINDOWED: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_STARTS: gl.constexpr, EDGES: gl.constexpr,
    SCORE: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Probabilities of a tile of raw scores, and what a score function was given."""
    layout: gl.constexpr = scores.type.layout
    QUERIES: gl.constexpr = scores.shape[1]
    if SOFTCAP:
        scores = saturate(scores * scale, True)
    scaled = scores
    column = gl.arange(0, QUERIES, layout=gl.SliceLayout(0, layout))
    if SCORE is not None:
        scaled = scores * (softcap if SOFTCAP else scale)
        theirs = (n - (m_start + lengths[3])).to(gl.float32)
        changed = SCORE(scaled, column.to(gl.float32)[None, :], theirs[:, None], parameters_ptr, SIDE == PAST)
    else:
        changed = scores
    p = gl.exp2(changed * factor - lse[None, :])
    if EDGES:  # noqa: SIM102
        if is_edge:
            from_here = (lengths[0], lengths[1], lengths[2], lengths[3] + m_start, lengths[4])
            may = may_attend(
                column[None, :], n[:, None], from_here, None, None, HAS_LENGTHS, HAS_STARTS, SIDE, WINDOWED
            )  # fmt: skip
            p = gl.where(may, p, 0.0)
    return p, scores, scaled
