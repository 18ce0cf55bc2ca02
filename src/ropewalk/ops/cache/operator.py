"""`torch.ops.ropewalk.append_kv`, for torch.compile, tracing and dispatch modes, and eager calls.

A decode step appends once per layer, so a call's host time counts. Plain eager calls go around the dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.cache import reference
from ropewalk.ops.cache.call import AppendCall
from ropewalk.ops.cache.validate import check, check_no_grad, check_values
from ropewalk.ops.cache.written import find_written
from ropewalk.ops.launch.kinds import Operation
from ropewalk.ops.launch.steps import Steps


class Launcher:
    """The launcher of calls of one kind."""

    def __init__(self, call: AppendCall) -> None:
        check(call)
        self.is_plain = choose(call) == _ALWAYS
        requires_grad = any(isinstance(x, Tensor) and x.requires_grad for x in call)
        self.checks = requires_grad or not call.k.is_cuda  # gradients, or values on a CPU
        pairs = find_written(call)
        self.pairs = [(pair, *pair.indices, pair.distances) for pair in pairs]
        self.pick_written = itemgetter(*[call._fields.index(name) for pair in pairs for name in pair.names])

    def __call__(self, call: AppendCall, on: Steps) -> Sequence[Tensor]:
        """Append, and return q rotated if there is one."""
        if self.is_plain:
            return reference.append(call)
        from ropewalk.ops.cache.triton.append_launch import append as append_by_kernel

        return append_by_kernel(call, on)

    def before(self, call: AppendCall, addresses: Sequence[int]) -> None:
        """Raise where gradients, values or addresses of a call do not fit; count that its tensors are written."""
        if self.checks:
            check_no_grad(call)
            check_values(call)
        for pair, index, other_index, distances in self.pairs:
            distance = addresses[other_index] - addresses[index]
            if distance not in distances:
                pair.check(distance)
        if not _in_inference_mode():
            _increment_version(self.pick_written(call))


_in_inference_mode, _increment_version = torch.is_inference_mode_enabled, torch._C._increment_version
_KERNELS, _ALWAYS = "triton", "reference"
OPERATION = Operation(AppendCall, Launcher)


def choose(call: AppendCall) -> str:
    """Return the implementation of a call; raise if the one that is named cannot run it."""
    impl = call.impl
    if impl not in (None, _KERNELS, _ALWAYS):
        raise ValueError(f"impl is {impl!r}, but must be None, 'triton' or 'reference'")
    if impl == _ALWAYS:
        return _ALWAYS
    reason = gpu.why_no_triton(call.k.device)
    if impl is not None and reason is not None:
        raise ValueError(f"impl is {impl!r}, but cannot run: {reason}")
    return _KERNELS if reason is None else _ALWAYS


def append(call: AppendCall) -> Tensor | None:
    """Append eagerly, and return q rotated."""
    results = OPERATION.run(call)
    return results[0] if results else None


def append_traced(call: AppendCall) -> Tensor | None:
    """Append in a way that tracers and dispatch modes follow."""
    out: Tensor = torch.ops.ropewalk.append_kv(*call)
    return None if call.q is None else out


def _append_kv(*arguments: Any) -> Tensor:
    # PyTorch leaves out what the schema has as the default. A record's own `__new__` is a function of Python.
    call = tuple.__new__(AppendCall, arguments + _DEFAULTS[len(arguments) :])
    results: Any = OPERATION.run(call)
    return results[0] if results else call.k.new_empty(0)


def _append_kv_fake(*arguments: Any) -> Tensor:
    call = AppendCall(*arguments)
    check(call)
    check_no_grad(call)
    choose(call)
    return call.k.new_empty(0) if call.q is None else torch.empty_like(call.q)


_DEFAULTS = tuple(AppendCall._field_defaults.get(name) for name in AppendCall._fields)
_ALIASES = {"k_cache": "a", "v_cache": "b", "k_scale": "c", "v_scale": "d"}  # of what is written


def _argument(name: str, argument: str) -> str:
    """Return an argument of the operator, as its schema has it."""
    alias = f"({_ALIASES[name]}!)" if name in _ALIASES else ""
    default = f"={AppendCall._field_defaults[name]}" if name in AppendCall._field_defaults else ""
    return argument.replace("Tensor", f"Tensor{alias}") + default


_ARGUMENTS = map(_argument, OPERATION.record.names, OPERATION.record.schema.split(", "))
_SCHEMA = f"append_kv({', '.join(_ARGUMENTS)}) -> Tensor"
_LIBRARY = torch.library.Library("ropewalk", "FRAGMENT")
_LIBRARY.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("append_kv", _append_kv, "CompositeExplicitAutograd")
_LIBRARY.impl("append_kv", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("ropewalk::append_kv", _append_kv_fake, lib=_LIBRARY)
