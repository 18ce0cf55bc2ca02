"""Attention by the installed flash-attn (4, 3 or 2) after our rotation."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.attention.backend import LibraryBackend, Refusal
from ropewalk.ops.attention.call import AttentionCall
from ropewalk.ops.attention.libraries import flash_two_range
from ropewalk.ops.attention.libraries.common import (
    HALF,
    READS,
    refuse_dtype,
    refuse_values,
    why_misaligned,
    why_no_library,
)
from ropewalk.ops.attention.tables import map_far_features, map_features

_LATENT = (192, 128)  # head dims of q and k, and of v, in DeepSeek's attention with latent keys and values
_MODULES = {4: "flash_attn.cute", 3: "flash_attn_interface", 2: "flash_attn"}


class Flash(LibraryBackend):
    """The backend "flash"."""

    name = "flash"
    reads: tuple[str, ...] = (*READS, "far")

    def why_not(self, call: AttentionCall) -> Refusal | None:
        """Say why flash-attn does not run a call; None if it does."""
        q, k, v = call.q, call.k, call.v
        if not gpu.is_nvidia(q.device):
            return Refusal("device", f"flash-attn needs an NVIDIA GPU, and the tensors are on {q.device.type}")
        version = flash_version(q.device)
        if version is None:
            return Refusal("missing", "flash-attn is not installed, or has no kernels for this GPU")
        if torch.compiler.is_compiling() or gpu.is_fake(q):
            return Refusal("compile", "flash-attn's functions are no operators that torch.compile can trace")
        refusal = why_no_library(call, self.reads)
        if refusal is not None:
            return refusal
        if (call.causal or call.has_window) and q.shape[2] > k.shape[2]:
            return Refusal("more_queries", "more queries than keys leave rows without a key")
        refusal = None if call.far is None else _why_no_far(call, version)
        if refusal is not None:
            return refusal
        is_hopper = gpu.capability(q.device)[0] == 9
        if v.shape[3] != q.shape[3]:
            has_kernels = version == 4 and is_hopper and (q.shape[3], v.shape[3]) == _LATENT
            if not has_kernels or call.far is not None:
                return refuse_values(call)
        if q.dtype not in HALF:
            return refuse_dtype("flash-attn", q)
        widest = 128 if version == 4 and not is_hopper else 256
        if q.shape[3] % 8 or q.shape[3] > widest:
            return Refusal(
                "head_dim",
                f"head dim {q.shape[3]} is not supported: flash-attn {version} needs a multiple of 8 up to {widest}",
            )
        refusal = why_misaligned(call)
        if refusal is not None:
            return refusal
        failure = load_flash(version)[1]
        return None if failure is None else Refusal("import", failure)

    def attend(self, call: AttentionCall) -> tuple[Tensor, None]:
        """Attend by flash-attn, by two calls of it for a two-range encoding."""
        function, reason = load_flash(flash_version(call.q.device) or 0)
        if function is None:
            raise RuntimeError(reason)
        far = map_far_features(call)
        q, k = map_features(call)
        if far is not None and call.far is not None:
            q, k, q_past, k_far, v = (x.transpose(1, 2) for x in (q, k, far.q_past, far.k, call.v))
            return flash_two_range.attend(q, k, q_past, k_far, v, call.scale, call.far.window).transpose(1, 2), None
        v = call.v
        keywords: dict[str, Any] = {"softmax_scale": call.scale, "causal": call.causal}
        if call.has_window:
            # Keys before the first query's window may hold anything, and flash-attn multiplies some of them by 0.
            first = 0 if call.window_left is None else max(0, k.shape[2] - q.shape[2] - call.window_left)
            k, v = k[:, :, first:], v[:, :, first:]
            unbounded = None if flash_version(call.q.device) == 4 else -1
            sides = (call.window_left, 0 if call.causal else call.window_right)
            keywords["window_size"] = tuple(unbounded if side is None else side for side in sides)
        result = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **keywords)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out.transpose(1, 2), None


def _why_no_far(call: AttentionCall, version: int) -> Refusal | None:
    """Say why flash-attn's calls for near and for far pairs cannot be merged; None if they can."""
    q, k, far = call.q, call.k, call.far
    assert far is not None
    if version != 4:
        return Refusal("far_version", f"a two-range encoding needs flash-attn 4, and {version} is installed")
    if not call.causal:
        return Refusal("far_causal", "a two-range encoding is supported with causal attention alone")
    if far.given is None and (far.tables is None or far.tables.q_past is None):
        return Refusal("far_tables", f"{type(call.scheme).__name__} does not rotate far queries: not supported")
    if call.has_window:
        return Refusal("far_window", "window beside a two-range encoding is not supported")
    if call.positions_q is not None:
        return Refusal("far_positions", "positions_q and positions_k are not supported with a two-range encoding")
    if q.shape[2] != k.shape[2]:
        return Refusal("far_lengths", "a two-range encoding is supported for as many queries as keys alone")
    if far.window >= q.shape[2]:
        return Refusal("far_nothing", "no pair is far: gradients that are zero are not supported")
    failure = flash_two_range.load_functions()[1]
    return None if failure is None else Refusal("import", failure)


@gpu.assume_constant
def flash_version(device: torch.device) -> int | None:
    """Return the newest installed flash-attn with kernels for a GPU: 4, 3 or 2. Nothing is imported."""
    return _find_flash(device)


@lru_cache
def _find_flash(device: torch.device) -> int | None:
    major, minor = gpu.capability(device)
    package = importlib.util.find_spec("flash_attn")
    folders = [] if package is None else [Path(folder) for folder in package.submodule_search_locations or ()]
    if 9 <= major <= 12 and any((folder / "cute" / "interface.py").exists() for folder in folders):
        return 4
    if (major, minor) == (9, 0) and importlib.util.find_spec("flash_attn_interface") is not None:
        return 3
    if major >= 8 and any((folder / "flash_attn_interface.py").exists() for folder in folders):
        return 2
    return None


@lru_cache
def load_flash(version: int) -> tuple[Callable[..., Any] | None, str | None]:
    """Import flash-attn; return its function, or why there is none."""
    try:
        return importlib.import_module(_MODULES[version]).flash_attn_func, None
    except Exception as error:  # whatever a build for another torch or CUDA may raise
        return None, f"flash-attn {version} cannot be imported: {error}"
