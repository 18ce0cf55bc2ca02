"""The rotation by the CUDA extension in csrc/: find or build the library, and call its operator.

When it is loaded, the library registers the operators `ropewalk::_rotate`, `ropewalk::_rotated`, which allocates its
results, and `ropewalk::rotary_embedding`. It is found in the cache of `ropewalk build`, or compiled on first use if the
machine has a compiler. The caller may have loaded one that CMake built.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.rope.call import RopeCall

_SCHEMAS = {
    "_rotate": "ropewalk::_rotate(Tensor(a!) q_out, Tensor(b!)? k_out, Tensor cos, Tensor sin, int flags, "
    "Tensor? q=None, Tensor? k=None, Tensor? positions=None, Tensor? cu_seqlens=None, int offset=0, int rotary_dim=-1, "
    "int rotary_offset=0) -> bool",
    "_rotated": "ropewalk::_rotated(Tensor q, Tensor? k, Tensor cos, Tensor sin, int flags, Tensor? positions=None, "
    "Tensor? cu_seqlens=None, int offset=0, int rotary_dim=-1, int rotary_offset=0) -> (Tensor? q_out, Tensor? k_out)",
}
# The bits of the operators' flags (operators.cpp). Bits 5 and 6 are the width of accesses, 0 for the best: for tests.
_LAYOUTS = {"bthd": 0, "bhtd": 1, "thd": 2}
_NO_LAYOUT, _INTERLEAVED, _INVERSE, _CHECKED = 3, 4, 8, 16
ACCESSES = {"best": 0, "scalar": 1 << 5, "narrow": 2 << 5, "wide": 3 << 5}
MAX_COUNT = 2**31 - 1
_IMPLS = (None, "native")  # the values of `impl` that choose the library once it is loaded

_LOG = logging.getLogger("ropewalk")
_LIBRARY = torch.library.Library("ropewalk", "FRAGMENT")
_rotate: Any = None  # torch.ops.ropewalk._rotate.default, once the library is loaded
_rotated: Any = None  # torch.ops.ropewalk._rotated.default, likewise
_refusal: str | None = None  # why an attempt to load the library failed


def why_not(device: torch.device) -> str | None:
    """Say why the extension does not support tensors on a device; None if it does. Nothing is built for that."""
    if not gpu.is_nvidia(device):
        where = "an AMD GPU" if device.type == "cuda" else device.type
        return f"CUDA kernels need an NVIDIA GPU, and the tensors are on {where}"
    if gpu.capability(device) < (8, 0):
        return f"CUDA kernels need compute capability 8.0, and {torch.cuda.get_device_name(device)} has less"
    if _rotate is not None:
        return None
    return _refusal or (None if _is_registered() else _why_not_built())


@cache
def _why_not_built() -> str | None:
    """Say why there is neither a library nor a way to build one on first use."""
    from ropewalk.ops.rope.cuda import build as native_build

    architectures = native_build.visible_architectures()
    try:
        if native_build.find_library(architectures) is not None:
            return None
        reason = native_build.may_build_on_first_use() or native_build.find_compilers().missing
        if reason is not None:
            return f"it is not built, and {reason}"
        failure = native_build.failed_before(architectures)
    except native_build.BuildError as error:
        return str(error)
    if failure is None:
        return None
    # It would fail again: `ropewalk build` is the way to retry.
    _warn(failure)
    return failure.splitlines()[0]


def load() -> bool:
    """Load the library, built first if need be, and say whether it is loaded; if not, `why_not` has the reason."""
    global _rotate, _rotated
    if _rotate is not None:
        return True
    if _refusal is not None or not (_is_registered() or _load_library()):
        return False
    namespace = torch.ops.ropewalk
    operators = [getattr(namespace, name).default if hasattr(namespace, name) else None for name in _SCHEMAS]
    schemas = [str(getattr(operator, "_schema", None)) for operator in operators]
    if schemas != list(_SCHEMAS.values()) or not hasattr(namespace, "_check_device"):
        return _refuse("the library that was loaded belongs to another version of ropewalk")
    if error := namespace._check_device():
        return _refuse(f"its kernels do not run with this GPU and this driver: CUDA error {error}")
    for name in _SCHEMAS:
        for key in ("Autograd", "ADInplaceOrView"):  # autograd.py does the work of both
            _LIBRARY.impl(name, torch.library.fallthrough_kernel, key)
    _rotate, _rotated = operators
    return True


def _refuse(reason: str) -> bool:
    """Refuse all calls from now on, and warn once."""
    global _refusal
    _refusal = reason.splitlines()[0]
    _warn(reason)
    return False


def _warn(reason: str) -> None:
    warnings.warn(
        f"ropewalk does without its CUDA extension: {reason}\n`ropewalk doctor` says what this machine has.",
        RuntimeWarning,
        stacklevel=2,
    )


def _is_registered() -> bool:
    return bool(torch._C._dispatch_has_kernel("ropewalk::_rotate"))


def _load_library() -> bool:
    """Find or build the library and load it."""
    from ropewalk.ops.rope.cuda import build as native_build

    architectures = native_build.visible_architectures()
    try:
        path = native_build.find_library(architectures)
        if path is None:
            if _why_not_built() is not None:
                return False
            _LOG.warning("compiling ropewalk's CUDA extension, once for this GPU and this PyTorch")
            start = time.perf_counter()
            path = native_build.build(architectures)
            _LOG.warning("compiled in %.0f s: %s", time.perf_counter() - start, path)
        torch.ops.load_library(str(path))
    except (native_build.BuildError, OSError) as error:
        return _refuse(str(error))
    return True


def rotate(xs: Sequence[Tensor], outs: Sequence[Tensor], call: RopeCall, bits: int = 0) -> bool:
    """Write the rotation of `xs` into `outs` if the library is loaded and its own checks accept the call.

    False means that nothing was written: `impl` names another implementation, the arguments are wrong, or of a kind
    that `rotate_unusual` supports.
    """
    if _rotate is None or not xs[0].is_cuda or (packed := _pack(call)) is None:
        return False
    flags, rest = packed
    if xs is not outs:
        rest = (xs[0], xs[1] if len(xs) == 2 else None, *rest)
    elif rest:
        rest = (None, None, *rest)
    k_out = outs[1] if len(outs) == 2 else None
    try:
        accepted: bool = _rotate(outs[0], k_out, call[0], call[1], flags | bits, *rest)
    except NotImplementedError:  # a sparse or nested tensor, or one on a device without this operator
        return False
    return accepted


def rotated(xs: Sequence[Tensor], call: RopeCall) -> tuple[Tensor, ...] | None:
    """Return the rotation of `xs` in new tensors; None where `rotate` would return False."""
    if _rotated is None or not xs[0].is_cuda or (packed := _pack(call)) is None:
        return None
    flags, rest = packed
    try:
        q, k = _rotated(xs[0], xs[1] if len(xs) == 2 else None, call[0], call[1], flags, *rest)
    except NotImplementedError:
        return None
    if q is None:
        return None
    return (q,) if k is None else (q, k)


def _pack(call: RopeCall) -> tuple[int, tuple[Any, ...]] | None:
    """Return the operators' `flags` and the arguments that end both; None where the library is not to run.

    An argument takes PyTorch 0.1 us, even None: those at the end that are at their defaults are left out.
    """
    _, _, positions, cu_seqlens, offset, flags_of_call, axes = call
    layout, interleaved, inverse, rotary_dim, rotary_offset, _, impl, pair_block = flags_of_call
    if impl not in _IMPLS or axes is not None or pair_block is not None:
        return None
    flags = _LAYOUTS.get(layout, _NO_LAYOUT)
    if interleaved:
        flags |= _INTERLEAVED
    if inverse:
        flags |= _INVERSE
    if offset or rotary_dim is not None or rotary_offset or type(rotary_offset) is not int:
        if type(rotary_offset) is not int or not (rotary_dim is None or type(rotary_dim) is int) or offset >> 62:
            return None
        width = -1 if rotary_dim is None else rotary_dim
        return flags, (positions, cu_seqlens, offset, width, rotary_offset)
    if cu_seqlens is not None:
        return flags, (positions, cu_seqlens)
    return flags, () if positions is None else (positions,)


@torch.no_grad()
def rotate_unusual(xs: Sequence[Tensor], outs: Sequence[Tensor], call: RopeCall) -> None:
    """Rotate what `rotate` refuses, for arguments that are checked.

    Features that are not dense in memory, and tables of a dtype that is neither float32 nor that of q, are copied. The
    caller has to check that memory does not overlap.
    """
    if xs[0].numel() + xs[-1].numel() == 0:
        return
    tables = [_dense(call.cos), _dense(call.sin)]
    if call.cos.dtype not in (torch.float32, xs[0].dtype):
        dtype = torch.float64 if xs[0].dtype == torch.float64 else torch.float32
        tables = [table.to(dtype) for table in tables]
    cu_seqlens = None if call.cu_seqlens is None else call.cu_seqlens.contiguous()
    dense_outs = [_dense(out) for out in outs]
    dense_xs = dense_outs if xs is outs else [_dense(x) for x in xs]
    dense_call = RopeCall(tables[0], tables[1], call.positions, cu_seqlens, call.offset, call.flags)
    accepted = rotate(dense_xs, dense_outs, dense_call, _CHECKED)
    if not accepted:
        raise ValueError(f"a dimension of q, k, cos or cu_seqlens is over {MAX_COUNT}, the most for impl 'native'")
    for out, dense in zip(outs, dense_outs, strict=True):
        if out is not dense:
            out.copy_(dense)


def _dense(x: Tensor) -> Tensor:
    """Return `x`, or a copy of it, with its last dimension dense in memory."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
