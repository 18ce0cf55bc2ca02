"""`append_kv` in plain PyTorch: the definition that the kernel is tested against.

Shape letters: N tokens, H query heads, K key heads, D head dim, Dv that of values, R rotary dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk.ops.cache.call import AppendCall
from ropewalk.ops.cache.formats import format_of, quantize
from ropewalk.ops.rope.reference import join_pairs, rotate_pairs, split_pairs, token_rows


@torch.no_grad()
def append(call: AppendCall) -> Sequence[Tensor]:
    """Write k and v into their slots, and return q rotated if there is one."""
    n = call.slots.shape[0]
    page_size = call.k_cache.shape[1]
    n_slots = call.k_cache.shape[0] * page_size
    token = ((call.slots >= 0) & (call.slots < n_slots)).nonzero()[:, 0]
    slot = call.slots[token].long()
    index = slot // page_size, slot % page_size
    k = map_features(call.k, call.k_weight, call)[:n]
    for x, cache, scale in ((k, call.k_cache, call.k_scale), (call.v[:n].float(), call.v_cache, call.v_scale)):
        kind = format_of(cache, call.k)
        assert kind is not None
        if kind == 0:
            cache[index] = x[token].to(cache.dtype)
            continue
        stored, scales = quantize(x[token], kind, scale)
        # Tensors of float8 are not indexed everywhere.
        cache.view(torch.uint8)[index] = stored.view(torch.uint8)
        if scales is not None:
            assert scale is not None
            scale[index] = scales
    if call.q is None:
        return ()
    return (torch.empty_like(call.q).copy_(map_features(call.q, call.q_weight, call)),)


def map_features(x: Tensor, weight: Tensor | None, call: AppendCall) -> Tensor:
    """Normalise and rotate x (N, heads, D), in float32."""
    y = x.float()
    if call.after:
        y = _rotate(y, call)
    if call.has_norm:
        dims = (1, 2) if call.across_heads else (2,)
        y = y * torch.rsqrt(y.square().mean(dims, keepdim=True) + call.eps)
        if weight is not None:
            factors = weight.float() + call.weight_offset
            y = y * (factors if weight.shape == x.shape[2:] else factors.reshape(x.shape[1:]))
    return y if call.after else _rotate(y, call)


def _rotate(x: Tensor, call: AppendCall) -> Tensor:
    cos, sin, inside = token_rows(
        call.cos, call.sin, x.shape[0], positions=call.positions, layout="thd", axes=call.axes
    )
    cos, sin = cos[0, :, None], sin[0, :, None]
    width = 2 * cos.shape[-1]
    before, middle, after = x.split([call.rotary_offset, width, x.shape[-1] - call.rotary_offset - width], dim=-1)
    a, b = rotate_pairs(*split_pairs(middle, call.interleaved), cos.to(x.dtype), sin.to(x.dtype))
    rotated = torch.cat((before, join_pairs(a, b, call.interleaved), after), dim=-1)
    return rotated if inside is None else torch.where(inside[0, :, None, None], rotated, torch.nan)
