"""The probabilities that dropout keeps: a pure function of a seed and of indices, the same in every implementation.

Key n, query m and row r = b·H + h have a number of 8 bits; sequence s too, in a packed batch, where n and m count in
their sequence and r is h. Numbers come from Philox4x32 with 7 rounds, whose key is the seed. Its counter
(4 · (n // 64) + (n mod 8) // 2, m, r, s) gives those of 16 keys: key n's is in word (n mod 64) // 16, byte
2 · ((n mod 16) // 8) + n mod 2. So a thread of an NVIDIA GPU computes the numbers of the scores that it holds.

A probability stays where its number is not among the first D of 256. A rate of T steps of 2⁻¹⁶ is finer than that: D
is T // 256, and one more for T mod 256 in 256 blocks of 64 keys, in even turns that begin where the seed says. So each
probability is dropped at the exact rate.

Source: “Parallel random numbers: as easy as 1, 2, 3” (https://doi.org/10.1145/2063384.2063405), §3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
DROPOUT_STEPS = 1 << 16  # rates are multiples of one of them
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_LOW_32, _LOW_16, _LOW_8 = 0xFFFFFFFF, 0xFFFF, 0xFF
MOST_STEPS = 255 * 256  # every query keeps some number


def dropped_steps(dropout_p: float) -> int:
    """The rate in steps of 2⁻¹⁶: a rate above 255/256 is 255/256."""
    return min(round(dropout_p * DROPOUT_STEPS), MOST_STEPS)


def rescale(dropout_p: float) -> float:
    """Return the factor of the probabilities that stay."""
    return DROPOUT_STEPS / (DROPOUT_STEPS - dropped_steps(dropout_p))


def dropout_mask(
    seed: Tensor, dropout_p: float, rows: Tensor, sequences: Tensor, queries: Tensor, keys: Tensor
) -> Tensor:
    """Say which probabilities stay. The seed is (1,), the others int64 tensors of indices that broadcast."""
    steps = dropped_steps(dropout_p)
    block = keys // 64
    phase = (seed & _LOW_32) + rows * 0x2545F491 + sequences * 0x1B873593 + block * 0x61C88647
    dropped = (steps >> 8) + ((phase & _LOW_32) >> 24 < (steps & _LOW_8)).long()
    words = philox(seed, block * 4 + keys % 8 // 2, queries, rows, sequences)
    word = (keys % 64 // 16).expand_as(words[0])
    chosen = torch.stack(words).gather(0, word[None])[0]
    byte = keys % 16 // 8 * 2 + keys % 2
    return (chosen >> byte * 8 & _LOW_8) >= dropped


def philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of 32 bits, in int64, for counters that broadcast and a seed (1,), int64."""
    c0, c1, c2, c3 = (c & _LOW_32 for c in (c0, c1, c2, c3))
    k0, k1 = seed & _LOW_32, (seed >> 32) & _LOW_32
    for _ in range(ROUNDS):
        (high_0, low_0), (high_1, low_1) = _multiply(c0, _MULTIPLIERS[0]), _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW_32, (k1 + _KEY_STEPS[1]) & _LOW_32
    c0, c1, c2, c3 = torch.broadcast_tensors(c0, c1, c2, c3)
    return c0, c1, c2, c3


def _multiply(x: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower 32 bits of a product of 32-bit numbers. By halves of x: no int64 overflows."""
    low = (x & _LOW_16) * by
    upper = (x >> 16) * by + (low >> 16)
    return upper >> 16, (upper & _LOW_16) << 16 | (low & _LOW_16)


def make_seed(q: Tensor) -> Tensor:
    """Draw a seed, (1,), from torch's generator of q's device: the host waits for no number."""
    return torch.randint(2**63 - 1, (1,), device=q.device)
