"""The keys of calls of `attention`, by its arguments before they are validated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ropewalk.ops.attention.plans.cache import CALLS, may_plan
from ropewalk.ops.attention.plans.leaves import Flags, Given, describe, switches
from ropewalk.ops.attention.plans.library import LibraryCall
from ropewalk.ops.attention.plans.planned import FIXED, PlannedCall
from ropewalk.ops.attention.tables import identity_of, signature_of
from ropewalk.ops.tracing import is_intercepted
from ropewalk.schemes import PositionScheme

# As the kernels for few queries: their most rows that share a key, and so many keys, but for one query.
_MOST_ROWS, _FEWEST_KEYS = 64, 257
_q, _k, _v, *_OTHERS = Given._fields
_BLOCKS = slice(_OTHERS.index("blocks_rows"), _OTHERS.index("blocks_spans") + 1)
del _OTHERS[_BLOCKS]  # a signature stands for them
_GATE, _SINKS, _MASK = map(_OTHERS.index, ("gate", "sinks", "mask"))
_NOT_GROWING = {index for index, name in enumerate(_OTHERS) if name.startswith(("cu_seqlens", "block", "positions"))}
_INDEX = 0  # of a description
_WINDOW, _KEYS_ROTATED, _LAYOUT = map(Flags._fields.index, ("window", "keys_rotated", "layout"))


def _growing_key(
    given: Sequence[Any], others: tuple[tuple[Any, ...], ...], position: PositionScheme, flags: tuple[Any, ...]
) -> Any:
    """Return the key of a call over a cache, without its length; None if the call is no such one.

    It holds the powers of two, from 256 on, that the length lies between: they decide the size of tables and whether
    there are splits, and the rules of the choice of a backend are by them. others: the description of all tensors but
    q, k and v.
    """
    for described in others:
        if described[_INDEX] in _NOT_GROWING:
            return None
    q, k, v, mask, *_ = given
    layout = flags[_LAYOUT]
    # Where the keys come unrotated, a call maps the features of all.
    if not flags[_KEYS_ROTATED] and type(position).rotation is not PositionScheme.rotation:
        return None
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or (layout != "bthd" and layout != "bhtd"):
        return None
    head, token = (2, 1) if layout == "bthd" else (1, 2)
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    queries, keys = q_shape[token], k_shape[token]
    if keys < (_FEWEST_KEYS if queries > 1 else 2) or keys < queries or v_shape[token] != keys:
        return None
    if queries * q_shape[head] > _MOST_ROWS * k_shape[head]:
        return None
    of_mask = None
    if mask is not None:
        if mask.ndim != 4 or mask.shape[3] != keys:
            return None
        strides = mask.stride()
        is_expanded = (strides[0] == 0, strides[1] == 0, strides[2] == 0)
        of_mask = (type(mask), mask.shape[:3], is_expanded, strides[3], mask.dtype, mask.device, mask.is_neg())
        others = tuple([x for x in others if x[_INDEX] != _MASK])  # its own length is not in the key
    window, k_strides, v_strides = flags[_WINDOW], k.stride(), v.stride()
    # Those that are not in the key are multiples of 16 bytes.
    if (k_strides[0] | k_strides[head] | v_strides[0] | v_strides[head]) * q.element_size() & 15:
        return None
    return (
        *("cache", max(8, (keys - 1).bit_length()), max(8, keys.bit_length())),
        *(type(q), q_shape, q.stride(), q.dtype, q.get_device(), q.is_neg()),
        *(type(k), k_shape[0], k_shape[head], k_shape[3], k_strides[token], k_strides[3], k.dtype, k.get_device()),
        *(type(v), v_shape[0], v_shape[head], v_shape[3], v_strides[token], v_strides[3], v.dtype, v.get_device()),
        *(k.is_neg(), v.is_neg(), q is k, q is v, k is v, of_mask),
        others,
        identity_of(position),
        flags,
        *map(type, flags),
        *(map(type, window) if type(window) is tuple else ()),
        switches(),
    )


def find_call(
    given: Sequence[Any], position: PositionScheme, flags: tuple[Any, ...], of_blocks: str | None
) -> tuple[Any, PlannedCall | LibraryCall | None]:
    """Return the key of a call, None for one that no plan is for, and its plan if there is one.

    given: the fields of `Given`. flags: those of `Flags`. of_blocks: the signature of lists of blocks, None without
    them. Arguments are not validated yet: the key holds all that decides whether they are valid.
    """
    if is_intercepted():
        return None, None
    q, k, v, *others = given
    del others[_BLOCKS]
    gate, sinks = others[_GATE], others[_SINKS]
    window = flags[_WINDOW]
    try:
        if not may_plan(q):
            return None, None
        grads = None
        if torch.is_grad_enabled():
            of_gate, of_sinks = gate is not None and gate.requires_grad, sinks is not None and sinks.requires_grad
            grads = (q.requires_grad, k.requires_grad, v.requires_grad, of_gate, of_sinks)
            # Hooks, as those of checkpoints, count what a forward saves: with a plan that differs.
            if True in grads and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
                return None, None
        described = describe(others)
        if of_blocks is None and (grads is None or True not in grads):
            key = _growing_key(given, described, position, flags)
            found = None if key is None else CALLS.found.get(key)
            if key is not None and found is not FIXED:
                return key, found
        identity = identity_of(position)
        if identity is None:
            identity = ("read", signature_of(position))
            if grads is not None and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
                return None, None
        # One tuple, as each * costs the host. It holds of q, k and v all that `describe` tells of the others.
        key = (
            type(q),
            q.shape,
            q.stride(),
            q.dtype,
            q.get_device(),
            q.is_neg(),
            type(k),
            k.shape,
            k.stride(),
            k.dtype,
            k.get_device(),
            k.is_neg(),
            type(v),
            v.shape,
            v.stride(),
            v.dtype,
            v.get_device(),
            v.is_neg(),
            q is k,
            q is v,
            k is v,
            described,
            identity,
            grads,
            flags,
            of_blocks,
            tuple(map(type, flags)),  # True is 1 to a dict, and no window
            tuple(map(type, window)) if type(window) is tuple else None,
            switches(),
        )
        return key, CALLS.found.get(key)
    except (RuntimeError, TypeError, AttributeError):  # sparse tensors have no strides, lists no hash, None no shape
        return None, None
