"""`torch.ops.ropewalk.append_kv`, for torch.compile, tracing and dispatch modes, and the plans of eager calls.

A decode step appends once per layer, so a call's host time counts. A plan depends on shapes, strides, dtypes and flags
alone; it is made once and found again under those. Plain eager calls go around the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ropewalk import device as gpu
from ropewalk.ops.cache import reference
from ropewalk.ops.cache.call import ABSENT, N_TENSORS, AppendCall, AppendFlags, Tensors, stand_in
from ropewalk.ops.cache.validate import check, check_no_grad, check_values
from ropewalk.ops.cache.written import check_written, writes_scales
from ropewalk.ops.tracing import PLAIN_TYPES, has_guards, make_matcher

Append = Callable[[AppendCall, "Tensor | None"], Any]
Run = Callable[["tuple[Tensor, ...]", "tuple[Any, ...]", "Tensor | None"], Any]


class Plan:
    """The function of calls of one kind, and a check that a call is of it."""

    __slots__ = ("flags", "key", "matches", "reads_values", "requires_grad", "run", "written")

    def __init__(self, key: Any, run: Run, flags: AppendFlags, reads_values: bool, writes_scales: bool) -> None:
        self.key, self.run, self.flags, self.reads_values = key, run, flags, reads_values
        written = ("k_cache", "v_cache", *(("k_scale", "v_scale") if writes_scales else ()))
        self.written = itemgetter(*map(AppendCall._fields.index, written))
        self.matches: Callable[..., bool] = _matches_nothing
        self.requires_grad = False


_LIBRARY = torch.library.Library("ropewalk", "FRAGMENT")
_SCHEMA = (
    "append_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, Tensor cos, Tensor sin, "
    "Tensor? q, Tensor? positions, Tensor? axes, Tensor? q_weight, Tensor? k_weight, Tensor(c!)? k_scale, "
    "Tensor(d!)? v_scale, bool interleaved=False, int rotary_offset=0, bool has_norm=False, float eps=1e-06, "
    "float weight_offset=0.0, bool after=False, bool across_heads=False, str? impl=None) -> Tensor"
)
_LIBRARY.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
_OPERATOR: Any = torch.ops.ropewalk.append_kv.default

_MAX_PLANS = 4096  # a stream of ever new lengths must not fill the memory
_MAX_RECENT = 4  # kinds of layers that take turns
_PLANS: dict[Any, Plan] = {}
_recent: tuple[Plan, ...] = ()
_NO_Q, _NO_POSITIONS, _NO_AXES, _NO_Q_WEIGHT, _NO_K_WEIGHT, _NO_K_SCALE, _NO_V_SCALE = ABSENT
_Q = AppendCall._fields.index("q")
UNKNOWN: Any = object()
_increment_version = torch._C._increment_version


def repeat(tensors: Tensors, flags: tuple[Any, ...]) -> Any:
    """Append as an earlier call with the same metadata did; UNKNOWN, with nothing done, where there was none.

    The check of metadata finds out also that the call is a plain eager one; Dynamo must not trace it.
    """
    k, v, k_cache, v_cache, slots, cos, sin, q, positions, axes, q_weight, k_weight, k_scale, v_scale = tensors
    # As `stand_in` does, which takes 2 µs more.
    given: Any = (
        k,
        v,
        k_cache,
        v_cache,
        slots,
        cos,
        sin,
        _NO_Q if q is None else q,
        _NO_POSITIONS if positions is None else positions,
        _NO_AXES if axes is None else axes,
        _NO_Q_WEIGHT if q_weight is None else q_weight,
        _NO_K_WEIGHT if k_weight is None else k_weight,
        _NO_K_SCALE if k_scale is None else k_scale,
        _NO_V_SCALE if v_scale is None else v_scale,
    )
    interleaved, rotary_offset, _, _, _, after, across_heads, _ = flags
    # 1 is True to a tuple, and no flag; 0.0 is 0, and no offset.
    are_flags = type(interleaved) is type(after) is type(across_heads) is bool and type(rotary_offset) is int
    for plan in _recent:
        if are_flags and flags == plan.flags and plan.matches(*given):
            break
    else:
        return UNKNOWN
    if forward_ad._current_level >= 0 or (plan.requires_grad and torch.is_grad_enabled()):
        return UNKNOWN
    return _run(plan, given, flags)


def append(call: AppendCall) -> Tensor | None:
    """Append eagerly, and return q rotated: by the plan of an earlier call, if its metadata were the same."""
    plan = _find(call)
    check_no_grad(call)
    given = stand_in(call)
    if has_guards() and PLAIN_TYPES.issuperset(map(type, given)):
        _remember(plan, given)
    return _run(plan, given, call.flags)


def _with_none(given: tuple[Tensor, ...], flags: tuple[Any, ...]) -> AppendCall:
    """Return the call of tensors that have stand-ins."""
    optional = [None if x is absent else x for x, absent in zip(given[7:], ABSENT, strict=True)]
    return AppendCall._make((*given[:7], *optional, AppendFlags(*flags)))


def _run(plan: Plan, given: tuple[Tensor, ...], flags: tuple[Any, ...]) -> Tensor | None:
    if plan.reads_values:
        check_values(_with_none(given, flags))
    q = given[_Q]
    out = None if q is _NO_Q else torch.empty_like(q)
    if not torch.is_inference_mode_enabled():  # before the launch: it raises for tensors of inference mode
        _increment_version(plan.written(given))
    plan.run(given, flags, out)
    return out


def _find(call: AppendCall) -> Plan:
    """Return the plan of a call by its key."""
    k, v, k_cache, v_cache, slots, cos, sin, q, positions, axes, q_weight, k_weight, k_scale, v_scale, flags = call
    try:
        key = (
            (k.shape, k.stride(), k.dtype, k.device, v.shape, v.stride(), v.dtype, v.device),
            (k_cache.shape, k_cache.stride(), k_cache.dtype, k_cache.device),
            (v_cache.shape, v_cache.stride(), v_cache.dtype, v_cache.device),
            (slots.shape, slots.stride(), slots.dtype, slots.device),
            (cos.shape, cos.stride(), cos.dtype, cos.device),
            (sin.shape, sin.stride(), sin.dtype, sin.device),
            None if q is None else (q.shape, q.stride(), q.dtype, q.device),
            None if positions is None else (positions.shape, positions.stride(), positions.dtype, positions.device),
            None if axes is None else (axes.shape, axes.stride(), axes.dtype, axes.device),
            None if q_weight is None else (q_weight.shape, q_weight.stride(), q_weight.dtype, q_weight.device),
            None if k_weight is None else (k_weight.shape, k_weight.stride(), k_weight.dtype, k_weight.device),
            None if k_scale is None else (k_scale.shape, k_scale.stride(), k_scale.dtype, k_scale.device),
            None if v_scale is None else (v_scale.shape, v_scale.stride(), v_scale.dtype, v_scale.device),
            flags,
            *map(type, flags),  # 1 is True to a dict, and no flag; 0.0 is 0, and no offset
        )
        found = _PLANS.get(key)
    except (AttributeError, RuntimeError, TypeError):  # no tensors, a nested one, or a flag that is not hashable
        check(call)
        raise
    if found is None:
        found = _prepare(call, key)
        if len(_PLANS) >= _MAX_PLANS:
            _PLANS.clear()
        _PLANS[key] = found
    return found


def _remember(plan: Plan, given: tuple[Tensor, ...]) -> None:
    """Let the calls that follow find a plan without its key."""
    global _recent
    if not plan.matches(*given):  # matchers know more than keys, such as inference mode
        plan = copy(plan)  # the calls of the other matcher find theirs, too
        plan.matches, plan.requires_grad = make_matcher(*given), any(x.requires_grad for x in given)
        _PLANS[plan.key] = plan
    _recent = (plan, *[x for x in _recent if x is not plan])[:_MAX_RECENT]


def _matches_nothing(*tensors: Tensor) -> bool:
    return False


def _prepare(call: AppendCall, key: Any) -> Plan:
    """Check a call, and return the plan of calls like it."""
    check(call)
    run = _PREPARE[choose(call)](call)
    return Plan(key, run, call.flags, not call.k.is_cuda, writes_scales(call))


def choose(call: AppendCall) -> str:
    """Return the implementation of a call; raise if the one that is named cannot run it."""
    impl = call.flags.impl
    if impl is not None and impl not in _PREPARE:
        raise ValueError(f"impl is {impl!r}, but must be None, 'triton' or 'reference'")
    if impl in _ALWAYS:
        return impl
    reason = gpu.why_no_triton(call.k.device)
    if impl is not None and reason is not None:
        raise ValueError(f"impl is {impl!r}, but cannot run: {reason}")
    return _KERNELS if reason is None else _ALWAYS[0]


def _prepare_kernels(call: AppendCall) -> Run:
    from ropewalk.ops.cache.triton.append_launch import Launch, prepare

    launch = prepare(call)
    return launch.run if isinstance(launch, Launch) else _by_name(launch)


def _prepare_reference(call: AppendCall) -> Run:
    return _by_name(_append_by_reference)


def _by_name(append: Append) -> Run:
    """Return the `Run` of a function that reads a call's fields."""
    return lambda given, flags, out: append(_with_none(given, flags), out)


_KERNELS, _ALWAYS = "triton", ("reference",)
_PREPARE: dict[str, Callable[[AppendCall], Run]] = {_KERNELS: _prepare_kernels, _ALWAYS[0]: _prepare_reference}


def _append_by_reference(call: AppendCall, out: Tensor | None) -> None:
    check_written(call)
    rotated = reference.append(call)
    if out is not None and rotated is not None:
        out.copy_(rotated)


def append_traced(call: AppendCall) -> Tensor | None:
    """Append in a way that tracers and dispatch modes follow."""
    out: Tensor = torch.ops.ropewalk.append_kv(*call[:-1], *call.flags)
    return None if call.q is None else out


def _make_call(arguments: tuple[Any, ...]) -> AppendCall:
    tensors, flags = arguments[:N_TENSORS], arguments[N_TENSORS:]
    return AppendCall._make((*tensors, AppendFlags(*flags)))


def _append_kv(*arguments: Any) -> Tensor:
    # PyTorch leaves out what the schema has as the default.
    tensors, flags = arguments[:N_TENSORS], arguments[N_TENSORS:] + _DEFAULTS[len(arguments) - N_TENSORS :]
    out = repeat(tensors, flags)
    if out is UNKNOWN:
        out = append(_make_call(arguments))
    result: Tensor = arguments[0].new_empty(0) if out is None else out
    return result


def _append_kv_fake(*arguments: Any) -> Tensor:
    call = _make_call(arguments)
    check(call)
    check_no_grad(call)
    choose(call)
    return call.k.new_empty(0) if call.q is None else torch.empty_like(call.q)


_DEFAULTS = tuple(AppendFlags())
_LIBRARY.impl("append_kv", _append_kv, "CompositeExplicitAutograd")
_LIBRARY.impl("append_kv", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("ropewalk::append_kv", _append_kv_fake, lib=_LIBRARY)
