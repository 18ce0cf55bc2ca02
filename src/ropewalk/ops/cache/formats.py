"""Formats of cached keys and values: their dtypes, their scales, and the maps between numbers and stored ones.

Shape letters: K key heads, D features of a key or of a value.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

FP8_MAX = 448.0
INT8_MAX = 127.0
INT4_MAX = 7.0
INT4_ZERO = 8  # the stored number of 0
INT4_GROUP = 32  # features that share a scale
MAX_FP16 = 65504.0


class Format(IntEnum):
    """The numbers of a cache."""

    OWN = 0  # as the tensors' own: no scales
    FP8 = 1  # float8_e4m3fn, with a scale for the cache or for each head
    INT8 = 2  # with a scale for each token and head
    INT4 = 3  # two in a byte of uint8, with a scale for each 32 features of a token and head


QUANTIZED = {torch.float8_e4m3fn: Format.FP8, torch.int8: Format.INT8, torch.uint8: Format.INT4}
NUMBERS_PER_ELEMENT = {Format.OWN: 1, Format.FP8: 1, Format.INT8: 1, Format.INT4: 2}


def format_of(cache: Tensor, like: Tensor) -> Format | None:
    """Return the format of a cache of tensors like another; None if it has none."""
    return Format.OWN if cache.dtype == like.dtype else QUANTIZED.get(cache.dtype)


def scale_shape(cache: Tensor, kind: Format, head: int) -> tuple[int, ...]:
    """Return the shape of the scales of int8 and 4-bit pages, (pages, page_size, K), or with D/32 after it.

    head: the dimension of heads in `cache`, 1 or 2.
    """
    pages, heads, page_size = cache.shape[0], cache.shape[head], cache.shape[3 - head]
    if kind is Format.INT8:
        return pages, page_size, heads
    return pages, page_size, heads, cache.shape[-1] * 2 // INT4_GROUP


def quantize(x: Tensor, kind: Format, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the stored numbers of x (..., K, D), float32 or more, and the scales of int8 and 4-bit ones."""
    if kind is Format.FP8:
        assert scale is not None
        scale = scale.to(x.dtype)[..., None] if scale.ndim else scale.to(x.dtype)
        return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), None
    if kind is Format.INT8:
        scales = x.abs().amax(-1) / INT8_MAX
        safe = torch.where(scales == 0, 1.0, scales)[..., None]
        numbers = (x / safe).round().clamp(-INT8_MAX, INT8_MAX)
        return numbers.nan_to_num().to(torch.int8), scales.float()
    groups = x.unflatten(-1, (-1, INT4_GROUP))
    largest = groups.abs().amax(-1)
    # Finite for finite features, and as float16 rounds it: the stored numbers are of the scale that a reader finds.
    scales = torch.where(largest.isfinite(), (largest / INT4_MAX).clamp(max=MAX_FP16), largest).half()
    safe = torch.where(scales == 0, 1.0, scales.to(x.dtype))[..., None]
    numbers = (groups / safe).round().clamp(-INT4_MAX, INT4_MAX)
    numbers = (numbers.masked_fill((scales == 0)[..., None], 0).nan_to_num() + INT4_ZERO).flatten(-2).to(torch.uint8)
    packed: Tensor = numbers[..., 0::2] | numbers[..., 1::2] << 4
    return packed, scales


def dequantize(stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return stored · scale of (..., K, D or D/2) in a dtype; the scales are those of each head, or of all its tokens.

    scale: () or (K,) of float8_e4m3fn; (..., K) of int8; (..., K, D/32) of 4-bit numbers; None: no scale.
    """
    if scale is None:
        return stored.to(dtype)
    kind = QUANTIZED[stored.dtype]
    scale = scale.to(dtype)
    if kind is Format.INT4:
        numbers: Tensor = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2).to(dtype) - INT4_ZERO
        grouped: Tensor = numbers.unflatten(-1, (-1, INT4_GROUP)) * scale[..., None]
        return grouped.flatten(-2)
    values: Tensor = stored.to(dtype) * (scale[..., None] if scale.ndim else scale)
    return values
