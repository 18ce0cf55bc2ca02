"""The backends of the rotation, the fastest first, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.launch.kinds import Launcher, plain
from ropewalk.ops.launch.steps import Steps
from ropewalk.ops.rope import cpu, reference
from ropewalk.ops.rope.call import RopeCall, Rotation
from ropewalk.ops.rope.cuda import load as native
from ropewalk.ops.rope.heads import reference as head_reference
from ropewalk.ops.rope.norm import reference as norm_reference
from ropewalk.ops.rope.validate import are_per_head


class Backend(Protocol):
    """An implementation of the rotation, under the name that `impl` takes."""

    name: str

    def why_not(self, device: torch.device, call: RopeCall | None = None) -> str | None:
        """Say why it does not support tensors on a device, or a call with them; None if it does.

        Nothing is loaded or compiled for that.
        """

    def launcher(self, rotation: Rotation) -> Launcher | None:
        """Return the launcher of calls like this one; None if the backend fails to load, and refuses from now on."""


class _Native:
    """The CUDA extension."""

    name = "native"

    def why_not(self, device: torch.device, call: RopeCall | None = None) -> str | None:
        if call is not None and call.axes is not None:
            return "axes are not supported"
        if call is not None and call.flags.pair_block is not None:
            return "pair_block is not supported"
        if call is not None and are_per_head(call.cos, call.positions):
            return "tables per head are not supported"
        return native.why_not(device)

    def launcher(self, rotation: Rotation) -> Launcher | None:
        # Calls come here that the extension has refused to check by itself, or the one that loads it.
        return _writing(native.rotate_unusual) if native.load() else None


class _Triton:
    """The Triton kernel."""

    name = "triton"

    def why_not(self, device: torch.device, call: RopeCall | None = None) -> str | None:
        return gpu.why_no_triton(device)

    def launcher(self, rotation: Rotation) -> Launcher:
        if are_per_head(rotation.call.cos, rotation.call.positions):
            from ropewalk.ops.rope.heads import launch as head_launch

            return head_launch.rotate
        from ropewalk.ops.rope import launch

        return launch.rotate


class _Reference:
    """Plain PyTorch; on a CPU in chunks of tokens."""

    name = "reference"

    def why_not(self, device: torch.device, call: RopeCall | None = None) -> str | None:
        return None

    def launcher(self, rotation: Rotation) -> Launcher:
        return _writing(cpu.rotate if rotation.q.device.type == "cpu" else reference.rotate)


def _writing(rotate: Callable[[Sequence[Tensor], Sequence[Tensor], RopeCall], None]) -> Launcher:
    """Return the launcher that calls a function which writes the rotation of the first tensors into the second."""

    @plain
    def launch(rotation: Rotation, on: Steps) -> Sequence[Tensor]:
        xs, outs = rotation.xs, rotation.make_results()
        rotate(xs, outs or xs, rotation.call)
        return outs

    return launch


BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (_Native(), _Triton(), _Reference())}
IMPLEMENTATIONS = tuple(BACKENDS)
# On the CPU Triton means its interpreter, which is for tests: it runs there only by name.
_CPU_IMPLEMENTATIONS = ("reference",)
NORM_IMPLEMENTATIONS = ("triton", "reference")


def why_not(impl: str, device: torch.device, call: RopeCall | None = None, *, has_norm: bool = False) -> str | None:
    """Say why an implementation does not support tensors on a device, or a call with them; None if it does."""
    if has_norm and impl not in NORM_IMPLEMENTATIONS:
        return "a norm is not supported"
    return BACKENDS[impl].why_not(device, call)


def choose(impl: str | None, device: torch.device, call: RopeCall | None = None, *, has_norm: bool = False) -> str:
    """Name the implementation of a call: `impl`, or the fastest that this device has."""
    if impl is None:
        names = IMPLEMENTATIONS if device.type == "cuda" else _CPU_IMPLEMENTATIONS
        return next(name for name in names if why_not(name, device, call, has_norm=has_norm) is None)
    if not isinstance(impl, str) or impl not in BACKENDS:
        raise ValueError(f"impl is {impl!r}, but must be None or one of {', '.join(map(repr, IMPLEMENTATIONS))}")
    reason = why_not(impl, device, call, has_norm=has_norm)
    if reason is not None:
        raise ValueError(f"impl is {impl!r}, but it cannot run this call: {reason}")
    return impl


def choose_norm(impl: str | None, device: torch.device) -> Any:
    """Return the module of a call with a norm, whose launchers are `forward` and `backward`."""
    if choose(impl, device, has_norm=True) == "reference":
        return norm_reference
    from ropewalk.ops.rope.norm import launch as norm_launch

    return norm_launch


def choose_gradients(impl: str | None, device: torch.device, call: RopeCall) -> Launcher:
    """Return the launcher of the gradients of a call with tables per head."""
    if choose(impl, device, call) == "reference":
        return head_reference.launch_gradients
    from ropewalk.ops.rope.heads import launch as head_launch

    return head_launch.differentiate


def choose_launcher(rotation: Rotation) -> Launcher:
    """Return the launcher of calls like this one, whose arguments are checked."""
    q, _, call = rotation
    launcher = None
    while launcher is None:  # again where a backend has failed to load: `choose` passes it over, or raises if named
        launcher = BACKENDS[choose(call.flags.impl, q.device, call)].launcher(rotation)
    return launcher
