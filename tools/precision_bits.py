"""The errors of products of 4 bits against float64, beside those of 8, by their arithmetic in PyTorch.

A row is of one case of `precision_errors`, one product (`QK` with exact probabilities and values, or `PV` with exact
scores), and one format of its operands. Queries and keys are centred and pass a Hadamard transform first, as for int8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from precision_errors import BASE, Case, draw, relative, sample_rows
from torch import Tensor

from ropewalk import inverse_frequencies
from ropewalk.bench.rope.gate import rotate_plainly

Round = Callable[[Tensor], Tensor]
KEYS, GROUP = 128, 32  # keys of a block, and of a group that shares a unit in int8 and int4
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST_E2M1, _LARGEST_E4M3 = 6.0, 448.0


def to_e2m1(x: Tensor) -> Tensor:
    """Round to the nearest number of two exponent bits and one of the mantissa, 6 at most."""
    known = torch.tensor(_E2M1, dtype=x.dtype)
    return x.sign() * known[torch.bucketize(x.abs().contiguous(), (known[1:] + known[:-1]) / 2)]


def by_integers(x: Tensor, largest: int, dim: int = -1) -> Tensor:
    """Round to integers of up to ± `largest`, with a unit for each row along `dim`."""
    unit = x.abs().amax(dim, keepdim=True).clamp_min(2.0**-40) / largest
    return (x / unit).round().clamp(-largest, largest) * unit


def in_groups(x: Tensor, size: int, rounded: Round) -> Tensor:
    """Round groups of `size` numbers along the last dimension, each by itself."""
    return rounded(x.unflatten(-1, (-1, size))).flatten(-2)


def by_mxfp4(x: Tensor) -> Tensor:
    """Round to e2m1 with a power of two for each 32 numbers along the last dimension."""

    def rounded(x: Tensor) -> Tensor:
        unit = (x.abs().amax(-1, keepdim=True).clamp_min(2.0**-40).log2().floor() - 2).exp2()
        return to_e2m1(x / unit) * unit

    return in_groups(x, 32, rounded)


def by_nvfp4(x: Tensor) -> Tensor:
    """Round to e2m1 with a unit in e4m3 for each 16 numbers along the last dimension, and one for the tensor."""
    whole = x.abs().max().clamp_min(2.0**-40) / (_LARGEST_E2M1 * _LARGEST_E4M3)

    def rounded(x: Tensor) -> Tensor:
        unit = (x.abs().amax(-1, keepdim=True) / (_LARGEST_E2M1 * whole)).float().to(torch.float8_e4m3fn).double()
        unit = unit.clamp_min(2.0**-9) * whole
        return to_e2m1(x / unit) * unit

    return in_groups(x, 16, rounded)


def by_key_groups(x: Tensor, largest: int) -> Tensor:
    """Round keys (T, D) to integers, with a unit for each 32 keys of a block, as `precision="int8"` has them."""
    groups = x.unflatten(0, (-1, KEYS // 8, 4, 2)).transpose(1, 2)  # (blocks, groups, eighths, pairs, D)
    shape = groups.shape
    return by_integers(groups.flatten(2), largest).view(shape).transpose(1, 2).flatten(0, 3)


QK: Mapping[str, tuple[Round, Round]] = {  # formats of queries and of keys
    "int8": (lambda q: by_integers(q, 127), lambda k: by_key_groups(k, 127)),
    "int4": (lambda q: by_integers(q, 7), lambda k: by_key_groups(k, 7)),
    "int4, groups of 32 features": (
        lambda q: in_groups(q, 32, lambda x: by_integers(x, 7)),
        lambda k: in_groups(k, 32, lambda x: by_integers(x, 7)),
    ),
    "mxfp4": (by_mxfp4, by_mxfp4),
    "nvfp4": (by_nvfp4, by_nvfp4),
}


def unsigned(p: Tensor) -> Tensor:
    """Round probabilities to 0, …, 15, each tile of 128 keys by its largest."""
    return in_groups(p, KEYS, lambda x: by_integers(x, 15))


def two_levels(p: Tensor) -> Tensor:
    """Round probabilities to nvfp4, each row by a unit of its own first, so that units in e4m3 have their range."""
    row = p.amax(-1, keepdim=True)
    return by_nvfp4(p / row) * row


def by_e4m3(x: Tensor, *dims: int) -> Tensor:
    """Round blocks of 128 keys, the last dimension, to e4m3, with a unit for all numbers along `dims`."""
    blocks = x.unflatten(-1, (-1, KEYS))
    unit = blocks.abs().amax(dims, keepdim=True) / _LARGEST_E4M3
    return ((blocks / unit).float().to(torch.float8_e4m3fn).double() * unit).flatten(-2)


PV: Mapping[str, tuple[Round, Round]] = {  # formats of probabilities (rows, T) and of values (D, T)
    "e4m3": (lambda p: by_e4m3(p, -1), lambda v: by_e4m3(v, -1, 0)),
    "int4": (unsigned, lambda v: in_groups(v, KEYS, lambda x: by_integers(x, 7))),
    "mxfp4": (by_mxfp4, by_mxfp4),
    "nvfp4": (two_levels, by_nvfp4),
}


def hadamard(size: int) -> Tensor:
    """Return the symmetric Hadamard matrix of a power of two, of rows of norm 1."""
    found = torch.ones(1, 1, dtype=torch.float64)
    while len(found) < size:
        found = torch.cat((torch.cat((found, found), 1), torch.cat((found, -found), 1)))
    return found / math.sqrt(size)


def cases(tokens: int = 4096, head_dim: int = 128) -> list[Case]:
    """Return the cases: of values there is one kind alone."""
    kinds = (("normal", False), ("outliers", False), ("outliers", True), ("wide channels", True))
    more = {"tokens": tokens, "head_dim": head_dim, "causal": False, "dtype": "float32", "q_heads": 1, "k_heads": 1}
    return [Case(name, rotated=rotated, **more) for name, rotated in kinds]


def measure(case: Case) -> Iterator[dict[str, Any]]:
    """Yield a row for each product and format."""
    device = torch.device("cpu")
    q, k, v = (x[0, :, 0].double() for x in draw(case, device))
    rows = sample_rows(case, device)
    if case.rotated:
        angles = torch.arange(case.tokens).double()[:, None]
        angles = angles * inverse_frequencies("default", case.head_dim, BASE)[0].double()
        q, k = (rotate_plainly(x, angles.cos(), angles.sin(), False) for x in (q, k))
    q, k = q[rows], k - k[:: max(1, case.tokens // 256)].mean(0)  # a shift of keys changes no probability
    turn, scale = hadamard(case.head_dim), case.head_dim**-0.5
    q, k = q @ turn, k @ turn
    p = (q @ k.T * scale).softmax(-1)
    exact = p @ v
    for name, (of_q, of_k) in QK.items():
        out = (of_q(q) @ of_k(k).T * scale).softmax(-1) @ v
        yield {"case": asdict(case), "product": "QK", "format": name, "error": relative(out, exact)}
    for name, (of_p, of_v) in PV.items():
        out = of_p(p) @ of_v(v.T).T
        yield {"case": asdict(case), "product": "PV", "format": name, "error": relative(out, exact)}
