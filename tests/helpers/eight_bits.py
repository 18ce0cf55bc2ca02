"""8-bit products by their definition, in NumPy and loops: an oracle written apart from the reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

BLOCK = 128


class Integers(NamedTuple):
    """Numbers of one map of one sequence: queries (H, Tq, D) and keys (K, Tk, D)."""

    q: np.ndarray
    q_unit: np.ndarray  # (H, Tq)
    k: np.ndarray
    k_unit: np.ndarray  # (K, Tk)
    shift: np.ndarray  # (K, D)
    q_exact: np.ndarray  # the features that were quantised, in the basis of the integers
    k_exact: np.ndarray


def hadamard(n_features: int) -> np.ndarray:
    """The matrix that turns features: blocks of the largest power of two that divides their number."""
    n = 1
    while n_features % (2 * n) == 0:
        n *= 2
    block = np.array([[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)]) / np.sqrt(n)
    return np.kron(np.eye(n_features // n), block)


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """Numbers of at most 448 rounded to e4m3, to nearest even."""
    with np.errstate(divide="ignore"):
        exponent = np.maximum(np.floor(np.log2(np.abs(x))), -6)
    step = 2.0 ** (exponent - 3)
    return np.rint(x / step) * step


def rows_of_mean(start: int, end: int, causal: bool) -> list[int]:
    length = end - start
    if causal:
        return list(range(start, min(end, start + 128)))
    return list(range(start, end)) if length <= 256 else [start + i * length // 256 for i in range(256)]


def unit_of(xs: np.ndarray, most: int) -> float:
    largest = np.abs(xs).max() if xs.size else 0.0
    return max(float(largest) / most, 2.0**-40) if np.isfinite(largest) else np.nan


def quantise_map(
    q: np.ndarray, k: np.ndarray, start: int, end: int, causal: bool, turns: bool, centre: bool
) -> Integers:
    rows, turn = rows_of_mean(start, end, causal), hadamard(q.shape[2]) if turns else np.eye(q.shape[2])
    shift = k[:, rows].mean(1) if centre and rows else np.zeros((k.shape[0], k.shape[2]))
    q_turned = q @ turn
    q_unit = np.array([[unit_of(row, 127) for row in head] for head in q_turned])
    k_turned, k_unit = np.zeros_like(k), np.full(k.shape[:2], 2.0**-40)
    k_turned[:, start:end] = (k[:, start:end] - shift[:, None]) @ turn
    for head in range(k.shape[0]):
        for block in range(0, k.shape[1], BLOCK):
            for group in range(4):
                n = [x for x in range(block, min(block + BLOCK, k.shape[1])) if x % 8 // 2 == group]
                k_unit[head, n] = unit_of(k_turned[head, [x for x in n if start <= x < end]], 127)
    with np.errstate(invalid="ignore"):
        q_int = np.clip(np.rint(q_turned * (1 / q_unit)[..., None]), -127, 127)
        k_int = np.clip(np.rint(k_turned * (1 / k_unit)[..., None]), -127, 127)
    return Integers(q_int, q_unit, k_int, k_unit, shift, q_turned, k_turned)


def scores_of_map(of: Integers, q: np.ndarray, scale: float) -> np.ndarray:
    """(H, Tq, Tk)"""
    group = q.shape[0] // of.k.shape[0]
    scores = []
    for head in range(q.shape[0]):
        key_head = head // group
        products = of.q[head] @ of.k[key_head].T * of.q_unit[head][:, None] * of.k_unit[key_head]
        scores.append(scale * (products + (q[head] @ of.shift[key_head])[:, None]))
    return np.stack(scores)


def quantise_values(v: np.ndarray, start: int, end: int, causal: bool, centre: bool) -> tuple[np.ndarray, np.ndarray]:
    """What the values stand for, and the unit of each: (K, Tk, Dv), (K, Tk)."""
    rows = rows_of_mean(start, end, causal)
    mean = v[:, rows].mean(1) if centre and rows else np.zeros((v.shape[0], v.shape[2]))
    found, units = np.zeros_like(v), np.zeros(v.shape[:2])
    for head in range(v.shape[0]):
        for block in range(0, v.shape[1], BLOCK):
            n = [x for x in range(block, min(block + BLOCK, v.shape[1])) if start <= x < end]
            rest = v[head, n] - mean[head]
            unit = units[head, block : block + BLOCK] = unit_of(rest, 448)
            found[head, n] = to_e4m3(np.clip(rest * (1 / unit), -448, 448)) * unit + mean[head]
    return found, units


def rotate(x: np.ndarray, table: Any) -> np.ndarray:
    """Features (heads, T, D) rotated by a table of (1, T, R/2), which says which ones are pairs."""
    if table is None:
        return x
    cos, sin = (y[0].double().numpy() for y in (table.cos, table.sin))
    x, half = x.copy(), cos.shape[1]
    for pair in range(half):
        first, second = (2 * pair, 2 * pair + 1) if table.interleaved else (pair, pair + half)
        a, b = x[..., first].copy(), x[..., second].copy()
        x[..., first] = a * cos[:, pair] - b * sin[:, pair]
        x[..., second] = b * cos[:, pair] + a * sin[:, pair]
    return x


def weigh(x: np.ndarray, table: Any) -> np.ndarray:
    """Features multiplied by a table's weights, as those of keys are."""
    return x if table is None or table.weights is None else x * table.weights.double().numpy()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scheme: Any,
    values: str = "16-bit",
    turns: bool = True,
    centre: bool = True,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    start: int = 0,
    end: int | None = None,
    mask: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output (H, Tq, Dv), log-sum-exp (H, Tq) and largest logits (H,) of one sequence: q (H, Tq, D), k (K, Tk, D)."""
    (n_heads, n_queries, width), n_keys = q.shape, k.shape[1]
    end = n_keys if end is None else end
    index = torch.arange(n_queries) + n_keys - n_queries
    positions_q, positions_k = index[None] - start, torch.arange(n_keys)[None] - start
    xq, xk, xv = (x.detach().double().numpy().copy() for x in (q, k, v))
    outside = [n for n in range(n_keys) if not start <= n < end]
    xk[:, outside] = xv[:, outside] = 0
    near_only = causal or (window is not None and window[1] == 0)
    options = (start, end, near_only, turns, centre)

    def score(table_q: Any, table_k: Any) -> np.ndarray:
        features_q, features_k = rotate(xq, table_q), weigh(rotate(xk, table_k), table_k)
        return scores_of_map(quantise_map(features_q, features_k, *options), features_q, width**-0.5)

    keys_table = scheme.rotation(positions_k, width)
    scores = score(scheme.query_rotation(positions_q, width) or scheme.rotation(positions_q, width), keys_table)
    distance = (positions_q[0][:, None] - positions_k[0]).numpy()
    far = scheme.far_window()
    if far is not None:
        k_far = scheme.far_rotation(positions_k, width, "keys")
        past = score(scheme.far_rotation(positions_q, width, "past"), k_far)
        future = score(scheme.far_rotation(positions_q, width, "future"), k_far)
        scores = np.where(distance >= far, past, np.where(distance <= -far, future, scores))
    ahead = np.arange(n_keys) - index.numpy()[:, None]
    allowed = np.zeros((n_heads, n_queries, n_keys), dtype=bool)
    allowed[:, :, start:end] = True
    if causal:
        allowed &= ahead <= 0
    if window is not None:
        left, right = window
        allowed &= (ahead >= -left) | (left == -1)
        allowed &= (ahead <= right) | (right == -1)
    if mask is not None:
        allowed &= mask.numpy()
    largest = np.where(allowed, scores, -np.inf).max((1, 2), initial=-np.inf)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    if scheme.has_score_mod():
        changed = scheme.score_mod(torch.from_numpy(scores)[None], torch.from_numpy(distance)[None, None])
        scores = changed[0].detach().numpy()
    represented = quantise_values(xv, start, end, near_only, centre)[0] if values == "float8" else xv
    out, lse = np.zeros((n_heads, n_queries, v.shape[2])), np.full((n_heads, n_queries), -np.inf)
    group = n_heads // k.shape[0]
    for head in range(n_heads):
        for row in range(n_queries):
            n = np.flatnonzero(allowed[head, row])
            logits = scores[head, row, n]
            if sinks is not None:
                logits = np.append(logits, float(sinks[head]))
            if len(logits):
                lse[head, row] = logits.max() + np.log(np.exp(logits - logits.max()).sum())
            for p, key in zip(np.exp(logits - lse[head, row]), n, strict=False):
                out[head, row] += p * represented[head // group, key]
    return tuple(torch.from_numpy(x) for x in (out, lse, largest))  # type: ignore[return-value]
