"""`append_kv` in float64, one token at a time, and how stored numbers are compared with it.

The number that a cache stores is the nearest to value / scale, so a kernel whose arithmetic is in float32 may store
another one only where the quotient lies between two numbers, to that arithmetic's error.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ropewalk.ops.cache.call import AppendCall

HALF_STEPS = {torch.int8: 127.0, torch.uint8: 7.0}


class Expected(NamedTuple):
    """Keys and values of the tokens that are written, their slots, and the rotated queries, in float64."""

    tokens: list[int]
    slots: list[int]
    k: Tensor  # (N, K, D)
    v: Tensor
    q: Tensor | None


def expect(call: AppendCall) -> Expected:
    """Return what a call means."""
    pairs = [(i, slot) for i, slot in enumerate(call.slots.tolist()) if slot >= 0]
    q = None if call.q is None else _map(call.q, call.q_weight, call)
    tokens, slots = ([pair[j] for pair in pairs] for j in range(2))
    return Expected(tokens, slots, _map(call.k, call.k_weight, call), call.v.double(), q)


def _map(x: Tensor, weight: Tensor | None, call: AppendCall) -> Tensor:
    """Normalise and rotate (N, heads, D)."""

    def normalize(x: Tensor) -> Tensor:
        dims = (0, 1) if call.across_heads else (1,)
        x = x / (x.square().mean(dims, keepdim=True) + call.eps).sqrt()
        if weight is None:
            return x
        factors = weight.double() + call.weight_offset
        return x * (factors if weight.numel() == x.shape[1] else factors.reshape(x.shape))

    rows = []
    for token in range(x.shape[0]):
        y = x[token].double()
        if call.has_norm and not call.after:
            y = normalize(y)
        y = _rotate(y, token, call)
        if call.has_norm and call.after:
            y = normalize(y)
        rows.append(y)
    return torch.stack(rows) if rows else x.double()


def _rotate(x: Tensor, token: int, call: AppendCall) -> Tensor:
    y, half = x.clone(), call.cos.shape[1]
    for pair in range(half):
        if call.positions is None:
            row = token
        elif call.axes is None:
            row = int(call.positions[token])
        else:
            row = int(call.positions[call.axes[pair], token])
        if not 0 <= row < call.cos.shape[0]:
            return torch.full_like(x, torch.nan)
        cos, sin = call.cos[row, pair].double(), call.sin[row, pair].double()
        first, second = (2 * pair, 2 * pair + 1) if call.interleaved else (pair, pair + half)
        first, second = first + call.rotary_offset, second + call.rotary_offset
        y[:, first] = x[:, first] * cos - x[:, second] * sin
        y[:, second] = x[:, first] * sin + x[:, second] * cos
    return y


def unpack(stored: Tensor) -> Tensor:
    """Return 4-bit numbers (..., D/2) as (..., D), from −7 to 7."""
    return torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2).double() - 8


def assert_stored(cache: Tensor, scale: Tensor | None, expected: Tensor, slots: list[int], error: float) -> None:
    """Fail unless a cache holds (n, K, D) at slots, and finite scales; `error` is relative to a head's largest value.

    Where the nearest number is not the stored one, the value is a tie to within the error.
    """
    page_size = cache.shape[1]
    for value, slot in zip(expected, slots, strict=True):
        stored = cache[slot // page_size, slot % page_size]
        slack = error * value.abs().amax(-1, keepdim=True)
        if cache.dtype == torch.float8_e4m3fn:
            assert scale is not None
            step = scale.double().reshape(-1, 1)
            quotient = (value / step).clamp(-448, 448)
            nearest = quotient.float().to(torch.float8_e4m3fn).double()
            found = stored.double()
            assert not found.isnan().any()
            # The two candidates are at the same distance from a tie.
            close = (found - quotient).abs() <= (nearest - quotient).abs() + 2 * slack / step
            assert close.all()
            assert (found == nearest).double().mean() > 0.98
        elif cache.dtype in HALF_STEPS:
            assert scale is not None
            limit = HALF_STEPS[cache.dtype]
            scales = scale[slot // page_size, slot % page_size].double()
            assert scales.isfinite().all()
            if cache.dtype == torch.int8:
                groups, found = value[:, None], stored.double()[:, None]
                scales = scales[:, None, None]
                allowed = 1e-6 + error
            else:
                groups = value.unflatten(-1, (-1, 32))
                found, scales = unpack(stored).unflatten(-1, (-1, 32)), scales[..., None]
                allowed = 2**-11 + error
            exact = groups.abs().amax(-1, keepdim=True) / limit
            assert ((scales - exact).abs() <= allowed * exact + 2**-25 * (limit == 7)).all()
            quotient = torch.where(scales > 0, groups / torch.where(scales > 0, scales, 1.0), 0.0).clamp(-limit, limit)
            off = (found - quotient).abs()
            assert (off <= 0.5 + 2 * limit * error + 1e-6).all()
            assert found.abs().max() <= limit
        else:
            budget = 0.51 * torch.finfo(cache.dtype).eps * value.abs() + slack + torch.finfo(cache.dtype).tiny
            assert ((stored.double() - value).abs() <= budget).all()
