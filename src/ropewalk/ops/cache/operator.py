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
_PLANS: dict[Any, tuple[Append, bool, bool]] = {}


def append(call: AppendCall) -> Tensor | None:
    """Append eagerly, and return q rotated: by the plan of an earlier call, if its metadata were the same."""
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
    run, reads_values, writes_scales = found
    if torch.is_grad_enabled():
        check_no_grad(call)
    if reads_values:
        check_values(call)
    out = None if q is None else torch.empty_like(q)
    if not torch.is_inference_mode_enabled():  # before the launch: it raises for tensors of inference mode
        written = (k_cache, v_cache, k_scale, v_scale) if writes_scales else (k_cache, v_cache)
        torch._C._increment_version(written)  # type: ignore[arg-type]
    run(call, out)
    return out


def _prepare(call: AppendCall) -> tuple[Append, bool, bool]:
    """Check a call, and return the function of calls like it, and whether it reads slots and writes scales."""
    check(call)
    run = _PREPARE[choose(call)](call)
    writes_scales = format_of(call.k_cache, call.k) in (Format.INT8, Format.INT4)
    return run, not call.k.is_cuda, writes_scales


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
