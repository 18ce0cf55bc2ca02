"""Which probabilities dropout keeps, in Python's own integers: by the definition, apart from the library's code."""

from __future__ import annotations

import torch


def words(seed: int, counter: tuple[int, int, int, int]) -> list[int]:
    """Philox4x32 with 7 rounds, in Python's own integers."""
    k0, k1 = seed % 2**32, seed // 2**32 % 2**32
    c0, c1, c2, c3 = counter
    for _ in range(7):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b // 2**32) ^ c1 ^ k0, b % 2**32, (a // 2**32) ^ c3 ^ k1, a % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def stays(seed: int, p: float, row: int, sequence: int, query: int, key: int) -> bool:
    """Whether one probability is kept."""
    word = words(seed, (key // 64 * 4 + key % 8 // 2, query, row, sequence))[key % 64 // 16]
    number = word // 256 ** (key % 16 // 8 * 2 + key % 2) % 256
    phase = seed + row * 0x2545F491 + sequence * 0x1B873593 + key // 64 * 0x61C88647
    steps = min(round(p * 2**16), 255 * 256)
    return number >= steps // 256 + (phase % 2**32 // 2**24 < steps % 256)


def as_seed(seed, device):
    return torch.tensor([seed], dtype=torch.int64, device=device)
