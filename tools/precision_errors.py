"""The errors of 8-bit products against float64: normal numbers, outlier channels, sinks, values with a mean.

A row is of one case, head dim, mask and precision. Its errors are over a sample of queries that always has the last:
`error`, the norm of an output's error over that of the output; `lse_error`, the root mean square of the log-sum-exp's
error over rows of at least 128 keys; `kernel_error`, the error's norm against the definition of the precision in
float64, where that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ropewalk import NoPosition, Rope, attention, inverse_frequencies
from ropewalk.bench.rope.gate import rotate_plainly

BASE = 10000.0
PRECISIONS: Mapping[str, str | None] = {"16-bit": None, "int8": "int8", "int8-fp8": "int8-fp8"}
QUERIES, FEWEST_KEYS = 512, 128
AT_ONCE = 1 << 26  # scores of float64 at a time
WHOLE = 4096  # the most tokens whose matrix of scores the definition may hold
SINK_NATS, ALONG = 9.0, 8.0


@dataclass(frozen=True)
class Case:
    """Tensors of one kind: their names say what is not normal about them."""

    name: str
    tokens: int
    head_dim: int
    causal: bool = True
    rotated: bool = False
    dtype: str = "bfloat16"
    q_heads: int = 4
    k_heads: int = 2


def cases(head_dims: Sequence[int], short: int = 4096, long: int = 32768, longest: int = 131072) -> list[Case]:
    """Return the cases, by head dim."""
    found = []
    for dim in head_dims:
        found += [Case("normal", short, dim, causal) for causal in (False, True)]
        found += [Case("outliers", short, dim, False), Case("outliers", short, dim)]
        found += [Case("outliers", short, dim, causal, rotated=True) for causal in (False, True)]
        found += [Case("wide channels", short, dim, causal, rotated=True) for causal in (False, True)]
        found += [Case("sink", tokens, dim) for tokens in (short, long)]
        found += [Case("values with a mean", tokens, dim, False) for tokens in (long, longest)]
    return found


def draw(case: Case, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Draw q, k and v, (1, T, H, D)."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(heads: int, *shape: int) -> Tensor:
        return torch.randn(1, *(shape or (case.tokens,)), heads, case.head_dim, generator=generator, device=device)

    q, k, v = normal(case.q_heads), normal(case.k_heads), normal(case.k_heads)
    channels = torch.arange(4, device=device) * (case.head_dim // 4) + 1
    if case.name == "outliers":
        k[..., channels] += 10
    elif case.name == "wide channels":
        k[..., channels] *= 8
    elif case.name == "sink":  # the first key, whose scores are some 9 nats, and its value small
        direction = normal(1, 1).sign() / math.sqrt(case.head_dim)
        q += ALONG * direction
        k[:, :1] = direction * (SINK_NATS * math.sqrt(case.head_dim) / ALONG)
        v[:, :1] *= 0.1
    elif case.name == "values with a mean":
        v += normal(case.k_heads, 1).sign()
    return tuple(x.to(getattr(torch, case.dtype)) for x in (q, k, v))  # type: ignore[return-value]


def sample_rows(case: Case, device: torch.device) -> Tensor:
    """Return indices of queries, in order, the last among them; of a short case all."""
    if case.tokens <= QUERIES:
        return torch.arange(case.tokens, device=device)
    drawn = torch.randperm(case.tokens - 1, generator=torch.Generator().manual_seed(1))[: QUERIES - 1]
    return torch.cat((drawn.sort().values, torch.tensor([case.tokens - 1]))).to(device)


def truth(case: Case, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Compute rows of the output, (rows, H, D), and of the log-sum-exp, (rows, H), in float64."""
    q, k, v = (x[0].double() for x in (q, k, v))
    if case.rotated:
        angles = torch.arange(case.tokens, device=q.device).double()[:, None]
        angles = angles * inverse_frequencies("default", case.head_dim, BASE)[0].to(q.device).double()
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        q, k = rotate_plainly(q, cos, sin, False), rotate_plainly(k, cos, sin, False)
    k, v = (x.repeat_interleave(case.q_heads // case.k_heads, 1) for x in (k, v))
    index, found = torch.arange(case.tokens, device=q.device), []
    for part in rows.split(max(1, AT_ONCE // (case.tokens * case.q_heads))):
        scores = torch.einsum("qhd,khd->hqk", q[part], k) / math.sqrt(case.head_dim)
        if case.causal:
            scores.masked_fill_(index > part[:, None], -math.inf)
        lse = scores.logsumexp(-1)
        found.append((torch.einsum("hqk,khd->qhd", (scores - lse[..., None]).exp_(), v), lse.T))
    out, lse = (torch.cat(parts) for parts in zip(*found, strict=True))
    return out, lse


def compute(case: Case, q: Tensor, k: Tensor, v: Tensor, precision: str | None, **more: Any) -> tuple[Tensor, Tensor]:
    """Attend by a precision; returns the output and the log-sum-exp, (T, H, …)."""
    position = Rope(BASE) if case.rotated else NoPosition()
    out, lse = attention(q, k, v, position=position, causal=case.causal, precision=precision, return_lse=True, **more)
    return out[0], lse[0].T


def relative(result: Tensor, exact: Tensor) -> float:
    """Return the norm of the error over that of the exact result."""
    return float((result.double() - exact).norm() / exact.norm())


def measure(case: Case, device: torch.device, attend: Callable[..., Any] = compute) -> Iterator[dict[str, Any]]:
    """Yield a row for each precision."""
    q, k, v = draw(case, device)
    rows = sample_rows(case, device)
    exact, exact_lse = truth(case, q, k, v, rows)
    has_keys = rows >= FEWEST_KEYS - 1 if case.causal else torch.ones_like(rows, dtype=torch.bool)
    for name, precision in PRECISIONS.items():
        row: dict[str, Any] = {"case": asdict(case), "precision": name, "queries": len(rows)}
        try:
            out, lse = attend(case, q, k, v, precision)
        except ValueError as refusal:
            yield {**row, "status": "unsupported", "reason": str(refusal)}
            continue
        lse_error = (lse[rows].double() - exact_lse)[has_keys].square().mean().sqrt()
        row |= {"status": "ok", "error": relative(out[rows], exact), "lse_error": float(lse_error)}
        if precision is not None and case.tokens <= WHOLE:
            defined, _ = attend(case, q.double(), k.double(), v.double(), precision, impl="reference")
            row["kernel_error"] = relative(out[rows], defined[rows])
            row["definition_error"] = relative(defined[rows], exact)
        yield row
