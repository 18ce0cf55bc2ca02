"""Soft-capping of scores, sinks of their softmax, and dropout of probabilities."""

from __future__ import annotations

import triton
import triton.language as tl

from ropewalk.ops.attention.triton.arguments import RowDropout


@triton.jit
def tanh(x, FAST: tl.constexpr):
    """Return the hyperbolic tangent: to float32's precision, or to 11 bits by one instruction of NVIDIA's."""
    if FAST:
        result = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        square = x * x
        # x + x³ · a polynomial fitted to x² up to 0.36, where 1 − 2/(e²ˣ + 1) would cancel.
        small = x + x * (
            square
            * (-0.3333333 + square * (0.13332923 + square * (-0.053875 + square * (0.0211157 - square * 0.00627573))))
        )
        result = 1 - 2 / (tl.exp2(x * (2 * 1.4426950408889634)) + 1)
        result = tl.where(square < 0.36, small, result)
    return result


@triton.jit
def cap_scores(s, scores, flags):
    """Return a tile of products, or with a cap their hyperbolic tangents, for `scale_scores`."""
    if flags.CAPPED:
        s = tanh(s * scores.scale, flags.FAST_TANH)
    return s


@triton.jit
def scale_scores(capped, scores, flags):
    """Return the scores that a score function takes, of what `cap_scores` returns."""
    if flags.CAPPED:
        capped *= scores.cap
    elif scores.scale is not None:
        capped *= scores.scale
    return capped


@triton.jit
def differentiate_cap(ds, capped, flags):
    """Return the gradient of what `cap_scores` takes, given that of its result; or of P, a factor of it."""
    if flags.CAPPED:
        ds *= 1 - capped * capped
    return ds


@triton.jit
def scale_logits(s, scores, flags):
    """Return products in the order of scaled scores: a scale that a cap or a score function reads may be below 0."""
    if (flags.CAPPED or flags.MOD is not None) and scores.scale is not None:
        s *= scores.scale
    return s


@triton.jit
def logit_factor(scores, MOD: tl.constexpr, CAPPED: tl.constexpr):
    """Return a factor above 0 that makes a row's largest result of `scale_logits` its largest scaled score."""
    factor = scores.scale
    if scores.scale is None:
        factor = scores.exp2_scale * 0.6931471805599453  # scale · log2(e) · ln(2)
    elif CAPPED or MOD is not None:  # the scale is divided by the cap
        factor = scores.cap
    return factor


@triton.jit
def begin_rows(zeros, sums, first_logits_ptr, head, exists, unit, SHARE: tl.constexpr):
    """Return rows' maxima, in units of base 2, and sums before the first key: of their heads' sinks, if there are any.

    zeros and sums are those of no key. SHARE is what a thread adds to its part of a row's sum.
    """
    row_max = zeros + float("-inf")
    if first_logits_ptr is not None:
        if exists is None:
            logit = tl.load(first_logits_ptr + head)
        else:
            logit = tl.load(first_logits_ptr + head, exists, other=0.0)
        row_max = zeros + logit * (1.4426950408889634 / unit)
        sums += SHARE
    return row_max, sums


@triton.jit
def add_first_logit(row_sum, row_max, first_logits_ptr, head, exponent):
    """Return rows' sums, of which 2 ** exponent is 1, with their head's sink, of which `begin_rows` had no share."""
    if first_logits_ptr is not None:
        logit = tl.load(first_logits_ptr + head) * 1.4426950408889634
        row_sum += tl.where(row_max == float("-inf"), 0.0, tl.exp2(logit - row_max + exponent))
    return row_sum


@triton.jit
def sinks_grad_kernel(grad_ptr, sinks_ptr, lse_ptr, delta_ptr, n_heads, n_queries, n_rows, BLOCK: tl.constexpr):
    """Write −Σ p · delta of a head over the n_rows rows of a batch, where p is the sink's probability.

    lse (base 2) and delta are (B, H, Tq).
    """
    head = tl.program_id(0)
    sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        batch = row // n_queries
        index = (batch.to(tl.int64) * n_heads + head) * n_queries + (row - batch * n_queries)
        lse = tl.load(lse_ptr + index, row < n_rows, other=float("-inf"))
        delta = tl.load(delta_ptr + index, row < n_rows, other=0.0)
        # −inf: the row attends nothing, and its sink of −inf has no gradient.
        total += tl.where(lse == float("-inf"), 0.0, tl.exp2(sink - lse) * delta)
    tl.store(grad_ptr + head, -tl.sum(total, 0))


@triton.jit
def begin_dropout(dropout, row, sequence):
    """Return the `RowDropout` of one row of all batches' heads; it loads the seed."""
    # The compiler does not fold this zero. With a constant it would select after the conversion to 16 bits, half a
    # register at a time: 70 instructions more in a step of 340.
    zero = dropout.rescale - dropout.rescale
    return RowDropout(tl.load(dropout.seed), dropout.steps, dropout.rescale, row, sequence, zero)


@triton.jit
def philox(seed, c0, c1, c2, c3):
    """Return the words of `tl.philox` with 7 rounds, by wide products: it has one for each half of theirs."""
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c0 = c0.to(tl.uint32)
    c1 = c1.to(tl.uint32)
    c2 = c2.to(tl.uint32)
    c3 = c3.to(tl.uint32)
    for _ in tl.static_range(7):
        even = c0.to(tl.uint64) * 0xD2511F53
        odd = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (odd >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = odd.to(tl.uint32)
        c2 = (even >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = even.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def dropped_numbers(dropout, block):
    """Return how many of 256 numbers are dropped in a block of 64 keys, or in each of some."""
    # The top byte of this sum grows evenly from block to block, from a start that the seed decides.
    phase = dropout.seed.to(tl.uint32) + dropout.row.to(tl.uint32) * 0x2545F491
    phase += dropout.sequence.to(tl.uint32) * 0x1B873593
    phase += block.to(tl.uint32) * 0x61C88647
    return (dropout.steps >> 8).to(tl.uint32) + ((phase >> 24) < (dropout.steps & 0xFF)).to(tl.uint32)


@triton.jit
def dropout_mask(dropout, m, n_start, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Return whether probabilities of queries m [BLOCK_M] and BLOCK_N keys stay: [BLOCK_M, BLOCK_N], or TRANSPOSED.

    `ropewalk.ops.attention.dropout` defines it. One call of Philox gives the numbers of 16 keys among 64 in a row.
    They are those that one thread holds in the layout of NVIDIA's matrix products: neighbours two by two, 8 keys apart.
    So numbers need not move between threads, unless the tile is TRANSPOSED.
    """
    seed = dropout.seed
    row = dropout.row
    sequence = dropout.sequence
    BLOCK_M: tl.constexpr = m.shape[0]
    BLOCKS: tl.constexpr = max(BLOCK_N // 64, 1)
    call = n_start // 64 * 4 + tl.arange(0, BLOCKS * 4)
    block = (n_start + tl.arange(0, BLOCK_N)) // 64 if TRANSPOSED else call // 4
    dropped = dropped_numbers(dropout, block)
    if TRANSPOSED:
        w0, w1, w2, w3 = tl.philox(seed, call[:, None], m[None, :], row, sequence, 7)
    else:
        w0, w1, w2, w3 = tl.philox(seed, call[None, :], m[:, None], row, sequence, 7)
        dropped = (dropped << 24)[None, :]
    if BLOCK_N >= 64:
        words = tl.join(tl.join(w0, w1), tl.join(w2, w3))
    elif BLOCK_N == 32:
        second = n_start % 64 >= 32
        words = tl.join(tl.where(second, w2, w0), tl.where(second, w3, w1))
    else:
        tl.static_assert(BLOCK_N == 16)
        part = n_start % 64 // 16
        words = tl.where(part < 2, tl.where(part == 0, w0, w1), tl.where(part == 2, w2, w3))
    # A byte that is shifted to the top compares by itself: what follows it only breaks ties, upwards.
    if TRANSPOSED:  # words move between threads, and there become bytes
        n = tl.arange(0, BLOCK_N)
        if BLOCK_N >= 64:
            words = tl.permute(tl.reshape(words, (BLOCKS, 4, BLOCK_M, 2, 2)), (0, 4, 3, 1, 2))
        elif BLOCK_N == 32:
            words = tl.permute(words, (2, 0, 1))
        words = tl.reshape(words, (BLOCK_N // 16, 1, 4, 1, BLOCK_M))
        words = tl.reshape(tl.broadcast_to(words, (BLOCK_N // 16, 2, 4, 2, BLOCK_M)), (BLOCK_N, BLOCK_M))
        kept = (words << (24 - n // 8 % 2 * 16 - n % 2 * 8)[:, None].to(tl.uint32)) >= (dropped << 24)[:, None]
    else:
        if BLOCK_N >= 64:
            dropped = dropped[:, :, None, None]
        elif BLOCK_N == 32:
            dropped = dropped[:, :, None]
        low = tl.join((words << 24) >= dropped, (words << 16) >= dropped)
        high = tl.join((words << 8) >= dropped, words >= dropped)
        kept = tl.join(low, high)
        # The dimensions: queries, calls, bits of the word's number, the byte's low bit (which of two neighbours), and
        # its high bit (8 keys on).
        if BLOCK_N >= 64:
            kept = tl.permute(tl.reshape(kept, (BLOCK_M, BLOCKS, 4, 2, 2, 2, 2)), (0, 1, 4, 3, 6, 2, 5))
        elif BLOCK_N == 32:
            kept = tl.permute(kept, (0, 2, 4, 1, 3))
        else:
            kept = tl.permute(kept, (0, 3, 1, 2))
        kept = tl.reshape(kept, (BLOCK_M, BLOCK_N))
    return kept
