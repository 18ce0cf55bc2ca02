"""Tests for plain eager calls, which nothing traces, transforms or intercepts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ropewalk import device as gpu

# Each eager call asks them: a name of this module takes the host less than an attribute of PyTorch's.
_n_modes, _tracing_state = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
_top_transform, _is_compiling = torch._C._functorch.peek_interpreter_stack, torch.compiler.is_compiling

PLAIN_TYPES = {Tensor, torch.nn.Parameter, torch.nn.Buffer}


def is_intercepted() -> bool:
    """Say whether a mode, a tracer or a transform follows an eager call's operators."""
    return bool(
        _n_modes() or _tracing_state() is not None or _top_transform() is not None or forward_ad._current_level >= 0
    )


def is_plain_eager(*tensors: Tensor | None) -> bool:
    """Say whether a call is eager, its tensors are what they seem, and no mode or tracer intercepts it."""
    if _is_compiling() or _n_modes() or _tracing_state() is not None:
        return False
    try:
        for x in tensors:
            if x is not None and (
                (type(x) is not Tensor and type(x) not in PLAIN_TYPES)  # most are one: the set takes longer
                # The memory of a lazily negated view holds the opposite values, and what is known as zero has none: the
                # dispatcher resolves both. PyTorch's guards end the process where a tensor has no strides.
                or x.is_neg()
                or x.is_nested
                or not (x.data_ptr() or x.is_meta or x.numel() == 0)
            ):
                return False
    except RuntimeError:  # a tensor that outlived its transform has no address: the dispatcher unwraps it
        return False
    return True


def with_memory(x: Tensor) -> Tensor:
    """Return a tensor at whose address its values lie: x, or a copy of one that is lazily negated, or known as zero."""
    if x.is_neg():
        return x.resolve_neg()
    return torch.zeros_like(x) if x._is_zerotensor() else x


def is_dtensor(x: Tensor | None) -> bool:
    """Say whether x is a DTensor, whose module is loaded by then."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def is_transformed() -> bool:
    """Say whether a torch.func transform or forward-mode differentiation is active."""
    return _top_transform() is not None or forward_ad._current_level >= 0


def differentiates(*tensors: Tensor | None) -> bool:
    """Say whether a transform of `torch.func` or forward-mode differentiation differentiates by one of eager tensors.

    Any `torch.func.grad` and `jvp` counts, and a `vmap` of tensors that require a gradient outside of it.
    """
    found = [x for x in tensors if x is not None]
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in found):
        return True
    if _top_transform() is None:
        return False
    functorch = torch._C._functorch
    kinds = {level.key() for level in functorch.get_interpreter_stack() or ()}
    if kinds & {functorch.TransformType.Grad, functorch.TransformType.Jvp}:
        return True
    return any(_requires_grad_outside(x) for x in found)


def _requires_grad_outside(x: Tensor) -> bool:
    """Say whether a tensor that transforms wrap requires a gradient, inside of one of them or outside of all."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if x.requires_grad:
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return x.requires_grad


def refuse_tangents(grads: Sequence[Tensor | None]) -> None:
    """Raise ValueError if a gradient has a tangent of forward-mode differentiation, which a launch would lose."""
    if forward_ad._current_level < 0:
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in grads):
        raise ValueError(
            "a gradient that came to a backward has a tangent, but forward-mode differentiation of this backward is "
            "not supported; torch.func.jvp of torch.func.grad is"
        )


def has_values(x: Tensor) -> bool:
    """Say whether a check may read a tensor's values.

    The host would wait for those on a device. Compilers, tracers, modes and transforms follow tensors without any.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling() or gpu.is_fake(x):
        return False
    is_traced = torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None
    return not (is_traced or torch._C._functorch.is_functorch_wrapped_tensor(x))


# The PyTorch versions whose `TensorGuards` are known to do what `make_matcher` says; it is private.
_GUARDS_FROM, _GUARDS_BEFORE = (2, 10), (2, 14)


def has_guards() -> bool:
    """Say whether this PyTorch's guards are known."""
    return _GUARDS_FROM <= gpu.release_of(torch.__version__) < _GUARDS_BEFORE


def make_matcher(*tensors: Tensor) -> Callable[..., bool]:
    """Return a function that says whether a later call's tensors are of the same kinds, in the same surroundings.

    Kinds are types, shapes, strides, dtypes, devices, lazy negation, and whether a gradient is required. Surroundings
    are autocast, inference mode, transforms, tracers and modes that follow operators; neither forward-mode
    differentiation nor whether gradients are recorded. Tensors that are one object must be one again; other than that,
    the function may say False for like tensors that are one object.
    """
    if not has_guards():
        kinds = _describe(tensors)
        return lambda *others: _describe(others) == kinds
    from torch._C._dynamo.guards import TensorGuards

    # torch.compile's own check: one call of C++, where PyTorch's attributes are a dozen calls a tensor. It takes no
    # tensor twice.
    firsts: dict[int, int] = {}
    for index, x in enumerate(tensors):
        firsts.setdefault(id(x), index)
    distinct = [tensors[index] for index in firsts.values()]
    fixed: dict[str, Any] = {
        "dynamic_dims_sizes": [list(x.shape) for x in distinct],
        "dynamic_dims_strides": [list(x.stride()) for x in distinct],
    }
    check: Callable[..., bool] = TensorGuards(*distinct, **fixed).check
    if len(distinct) == len(tensors):
        return check
    pairs = [(index, firsts[id(x)]) for index, x in enumerate(tensors) if firsts[id(x)] != index]
    pick: Any = itemgetter(*firsts.values()) if len(firsts) > 1 else itemgetter(slice(1))  # a tuple, always

    def check_repeats(*others: Tensor) -> bool:
        for index, first in pairs:
            if others[index] is not others[first]:
                return False
        return check(*pick(others))

    return check_repeats


def _describe(tensors: tuple[Tensor, ...]) -> list[Any]:
    """Return the kinds of tensors, and their surroundings."""
    found: list[Any] = [is_intercepted(), torch.is_inference_mode_enabled(), torch._C._is_any_autocast_enabled()]
    for x in tensors:
        found += (type(x), x.shape, x.stride(), x.dtype, x.device, x.is_neg(), x.requires_grad)
    return found


def has_saved_tensor_hooks() -> bool:
    """Say whether default hooks pack what a forward saves, as those of checkpoints and of `save_on_cpu` do."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
