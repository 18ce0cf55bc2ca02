"""`torch.ops.ropewalk.append_kv`, for torch.compile, tracing and dispatch modes, and the plans of eager calls.

A decode step appends once per layer, so a call's host time counts. A plan depends on shapes, strides, dtypes and flags
alone; it is made once and found again under those. Plain eager calls go around the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.cache import reference
from ropewalk.ops.cache.call import N_TENSORS, AppendCall, AppendFlags
from ropewalk.ops.cache.formats import Format, format_of
from ropewalk.ops.cache.validate import check, check_no_grad, check_values

Append = Callable[[AppendCall, "Tensor | None"], Any]

try:  # torch.compile's own check of tensors: type, dispatch keys, dtype, device, shape and strides in one call of C++
    from torch._C._dynamo import guards

    _Guards: Any = guards.TensorGuards
except (ImportError, AttributeError):
    _Guards = None


class Plan:
    """The function of calls of one kind, and a check that a call is of it."""

    __slots__ = ("flags", "guards", "reads_values", "run", "writes_scales")

    def __init__(self, run: Append, reads_values: bool, writes_scales: bool) -> None:
        self.run, self.reads_values, self.writes_scales = run, reads_values, writes_scales
        self.flags: AppendFlags | None = None
        self.guards: Any = None

    def guard(self, tensors: tuple[Tensor, ...], flags: AppendFlags) -> None:
        """Let calls with such tensors find the plan without a key."""
        sizes = {"dynamic_dims_sizes": [list(x.shape) for x in tensors]}
        strides = {"dynamic_dims_strides": [list(x.stride()) for x in tensors]}
        self.guards, self.flags = _Guards(*tensors, **sizes, **strides).check, flags


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
# Each stands for a None: guards take tensors alone, and no tensor twice. No argument is like them.
_ABSENT = tuple(torch.empty((0,) * 7, device="meta") for _ in range(7))


def append(call: AppendCall) -> Tensor | None:
    """Append eagerly, and return q rotated: by the plan of an earlier call, if its metadata were the same."""
    _, _, k_cache, v_cache, _, _, _, q, positions, axes, q_weight, k_weight, k_scale, v_scale, flags = call
    tensors = (
        *call[:7],
        _ABSENT[0] if q is None else q,
        _ABSENT[1] if positions is None else positions,
        _ABSENT[2] if axes is None else axes,
        _ABSENT[3] if q_weight is None else q_weight,
        _ABSENT[4] if k_weight is None else k_weight,
        _ABSENT[5] if k_scale is None else k_scale,
        _ABSENT[6] if v_scale is None else v_scale,
    )
    for plan in _recent:
        # 1 is True to a tuple, and no flag.
        if flags == plan.flags and type(flags.interleaved) is bool and plan.guards(*tensors):
            break
    else:
        plan = _find(call, tensors)
    if torch.is_grad_enabled():
        check_no_grad(call)
    if plan.reads_values:
        check_values(call)
    out = None if q is None else torch.empty_like(q)
    if not torch.is_inference_mode_enabled():  # before the launch: it raises for tensors of inference mode
        written = (k_cache, v_cache, k_scale, v_scale) if plan.writes_scales else (k_cache, v_cache)
        torch._C._increment_version(written)  # type: ignore[arg-type]
    plan.run(call, out)
    return out


def _find(call: AppendCall, tensors: tuple[Any, ...]) -> Plan:
    """Return the plan of a call by its key, and let the calls that follow find it by its guards."""
    global _recent
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
            type(flags.interleaved),  # 1 is True to a dict, and no flag
        )
        found = _PLANS.get(key)
    except (AttributeError, RuntimeError, TypeError):  # no tensors, a nested one, or a flag that is not hashable
        check(call)
        raise
    if found is None:
        found = _prepare(call)
        if len(_PLANS) >= _MAX_PLANS:
            _PLANS.clear()
        _PLANS[key] = found
    if _Guards is not None and len({*map(id, tensors)}) == N_TENSORS:
        if found.guards is None or found in _recent:  # guards know more than keys, such as inference mode
            found.guard(tensors, flags)
        _recent = (found, *[x for x in _recent if x is not found])[:_MAX_RECENT]
    return found


def _prepare(call: AppendCall) -> Plan:
    """Check a call, and return the plan of calls like it."""
    check(call)
    run = _PREPARE[choose(call)](call)
    writes_scales = format_of(call.k_cache, call.k) in (Format.INT8, Format.INT4)
    return Plan(run, not call.k.is_cuda, writes_scales)


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


def _prepare_kernels(call: AppendCall) -> Append:
    from ropewalk.ops.cache.triton.append_launch import prepare

    return prepare(call)


def _prepare_reference(call: AppendCall) -> Append:
    return _append_by_reference


_KERNELS, _ALWAYS = "triton", ("reference",)
_PREPARE: dict[str, Callable[[AppendCall], Append]] = {_KERNELS: _prepare_kernels, _ALWAYS[0]: _prepare_reference}


def _append_by_reference(call: AppendCall, out: Tensor | None) -> None:
    if call.k_cache.data_ptr() == call.v_cache.data_ptr() and call.k_cache.numel():
        raise ValueError("v_cache begins where k_cache does, but must have memory of its own")
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
    with torch.no_grad():
        call = _make_call(arguments)
        out = append(call)
    return call.k.new_empty(0) if out is None else out


def _append_kv_fake(*arguments: Any) -> Tensor:
    call = _make_call(arguments)
    check(call)
    choose(call)
    return call.k.new_empty(0) if call.q is None else torch.empty_like(call.q)


def _refuse_gradient(keyset: Any, *arguments: Any) -> Any:
    """Raise where there would be a gradient, and run the operator."""
    check_no_grad(_make_call(arguments))
    return _OPERATOR.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *arguments)


_LIBRARY.impl("append_kv", _append_kv, "CompositeExplicitAutograd")
_LIBRARY.impl("append_kv", torch.library.fallthrough_kernel, "Autograd")
_LIBRARY.impl("append_kv", _refuse_gradient, "ADInplaceOrView", with_keyset=True)
torch.library.register_fake("ropewalk::append_kv", _append_kv_fake, lib=_LIBRARY)
