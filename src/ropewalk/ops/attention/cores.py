"""Attention by other libraries' kernels, after our rotation: PyTorch's (cuDNN's, on NVIDIA GPUs) and flash-attn's.

Each has a function that says why it cannot serve a call, in words, and one that serves it.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor

from ropewalk.ops.attention import flash_far
from ropewalk.ops.attention.checks import Call
from ropewalk.ops.attention.prepare import FarFeatures, Prepared, map_far_features, map_features, tables_of

HALF = (torch.float16, torch.bfloat16)


Function = TypeVar("Function", bound=Callable[..., Any])


def constant(function: Function) -> Function:
    """Let torch.compile call a function as it traces, and take what it returns for a constant."""
    # This is torch.compiler.assume_constant_result, which would load the whole compiler.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class Request(NamedTuple):
    """A call of attention: its tensors as (B, heads, T, D), what was asked, and what the scheme has become."""

    q: Tensor
    k: Tensor
    v: Tensor
    call: Call
    prepared: Prepared
    return_lse: bool
    deterministic: bool
    backward: bool  # whether one will come
    far: FarFeatures | None = None  # what far pairs meet with, if it was given, and not to be made by the scheme


def _why_no_core(request: Request) -> str | None:
    """Why neither library serves a call: both know full and causal attention alone."""
    q, k, _, call, prepared, return_lse, deterministic, backward, _ = request
    reason = _why_not_asked(call)
    if reason is not None:
        return reason
    if call.position.changes_scores():
        return f"{type(call.position).__name__} changes scores"
    if call.mask is not None or call.key_lengths is not None:
        return f"it takes no {'mask that leaves' if call.mask is not None else 'key_lengths that leave'} rows empty"
    if return_lse:
        return "its log-sum-exp is not differentiated"
    if q.numel() == 0 or k.numel() == 0:
        return "there is nothing to attend"
    if not call.scale > 0:
        return f"the scale is {call.scale}, and it needs one above 0"
    learned = tables_of(prepared)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in learned):
        return "the scheme's tables are to be learned, and the rotation does not differentiate them"
    if q.device.type == "cuda" and deterministic and backward:
        return "its backward is not deterministic"
    return None


def _why_not_asked(call: Call) -> str | None:
    """Why no library is asked to serve a call, though some could in ways of their own; None where one may be."""
    if call.cu_seqlens_q is not None:
        return "it is not asked for packed sequences, by cu_seqlens_q"
    if call.block_table is not None:
        return "it is not asked for keys in pages, by block_table"
    if call.key_starts is not None:
        return "it takes no key_starts that leave rows empty"
    if call.query_starts is not None:
        return "it takes no query_starts, where each batch row's queries stand elsewhere"
    if call.softcap is not None:
        return "it is not asked for a softcap"
    if call.sinks is not None:
        return "it is not asked for sinks"
    if call.dropout_p > 0:
        return "dropout_p is above 0, and its dropout goes by another seed"
    return None


def why_not_sdpa(request: Request) -> str | None:
    """Say why PyTorch's scaled_dot_product_attention cannot serve a call; None if it can."""
    q, k, v, call, *_ = request
    if call.window is not None:
        return "it knows no window"
    if request.prepared.far_window is not None:
        return "it has no log-sum-exp to merge near and far pairs of tokens by"
    reason = _why_no_core(request)
    if reason is not None:
        return reason
    if call.causal and q.shape[2] != k.shape[2]:
        return "it aligns causal attention at the top left"
    if q.device.type != "cpu" and v.shape[3] != q.shape[3]:
        return _other_values(v, q)
    if q.device.type != "cuda" or torch.version.hip is not None:
        return None
    if not may_use_cudnn():
        return "cuDNN's attention is not there, or switched off"
    if capability(q.device) < (8, 0):
        return "cuDNN's attention needs compute capability 8.0"
    if q.dtype not in HALF:
        return f"cuDNN's attention needs float16 or bfloat16, not {str(q.dtype).removeprefix('torch.')}"
    if q.shape[3] % 8 or q.shape[3] > 128:
        return f"the head dim is {q.shape[3]}, and cuDNN's attention needs a multiple of 8 up to 128"
    if k.shape[2] == 1:
        return "cuDNN's attention needs more than one key"
    if max(q.shape[:2]) > 65535:
        return "cuDNN's attention takes up to 65535 batch rows and heads"
    return _why_misaligned(q, k, v)


@constant
def may_use_cudnn() -> bool:
    """Whether cuDNN's attention is there, and not switched off; torch.compile asks once, as it traces."""
    return bool(torch.backends.cudnn.is_available() and torch.backends.cuda.cudnn_sdp_enabled())


def sdpa(request: Request) -> Tensor:
    """Attend by PyTorch, on NVIDIA GPUs always by cuDNN; (B, H, Tq, Dv)."""
    q, k = map_features(request.q, request.k, request.prepared)
    v, call = request.v, request.call
    if q.device.type == "cuda" and torch.version.hip is None:
        # The operator itself: choosing a backend through torch.nn.attention.sdpa_kernel costs the host more.
        out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, request.backward, 0.0, call.causal, False, scale=call.scale
        )[0]
        return out
    grouped = bool(q.shape[1] != k.shape[1])
    return F.scaled_dot_product_attention(q, k, v, is_causal=call.causal, scale=call.scale, enable_gqa=grouped)


_LATENT = (192, 128)  # head dims of q and k, and of v, in DeepSeek's attention with latent keys and values


def why_not_flash(request: Request) -> str | None:
    """Say why flash-attn cannot serve a call; None if it can."""
    q, k, v, call, *_ = request
    if q.device.type != "cuda" or torch.version.hip is not None:
        return f"flash-attn's kernels need an NVIDIA GPU, and the tensors are on {q.device.type}"
    version = flash_version(q.device)
    if version is None:
        return "flash-attn is not installed, or has no kernels for this GPU"
    if torch.compiler.is_compiling() or isinstance(q, FakeTensor):
        return "flash-attn's functions are no operators that torch.compile could see"
    reason = _why_no_core(request)
    if reason is not None:
        return reason
    if (call.causal or call.window is not None) and q.shape[2] > k.shape[2]:
        return "there are more queries than keys, hence rows that attend nothing"
    reason = None if request.prepared.far_window is None else _why_no_far(request, version)
    if reason is not None:
        return reason
    if v.shape[3] != q.shape[3]:
        has_kernels = version == 4 and capability(q.device)[0] == 9 and (q.shape[3], v.shape[3]) == _LATENT
        if not has_kernels or request.prepared.far_window is not None:
            return _other_values(v, q)
    if q.dtype not in HALF:
        return f"flash-attn needs float16 or bfloat16, not {str(q.dtype).removeprefix('torch.')}"
    widest = 128 if version == 4 and capability(q.device)[0] != 9 else 256
    if q.shape[3] % 8 or q.shape[3] > widest:
        return f"the head dim is {q.shape[3]}, and flash-attn {version} needs a multiple of 8 up to {widest}"
    return _why_misaligned(q, k, v) or load_flash(version)[1]


def _why_no_far(request: Request, version: int) -> str | None:
    """Why flash-attn's calls for near and for far pairs cannot be merged; None if they can."""
    q, k, _, call, prepared, *_ = request
    if version != 4:
        return f"near and far pairs of tokens are merged with flash-attn 4 alone, not with {version}"
    if not call.causal:
        return "near and far pairs of tokens are two calls of its only if both are causal"
    if request.far is None and prepared.cos_past is None:
        return f"{type(call.position).__name__} leaves far queries alone, and it is not asked for that"
    if call.window is not None:
        return "it is not asked for a window beside near and far pairs of tokens"
    if prepared.positions_q is not None:
        return "near and far pairs of tokens go by positions_q and positions_k, and its windows by index"
    if q.shape[2] != k.shape[2]:
        return "near and far pairs of tokens are two calls of its only for as many queries as keys"
    if prepared.far_window is not None and prepared.far_window >= q.shape[2]:
        return "no pair of tokens is far, and it is not asked for gradients that are zero"
    return flash_far.load_functions()[1]


def flash(request: Request) -> Tensor:
    """Attend by flash-attn; (B, H, Tq, D)."""
    version = flash_version(request.q.device)
    function, reason = load_flash(version or 0)
    if function is None:
        raise RuntimeError(reason)
    call, prepared = request.call, request.prepared
    far = request.far or map_far_features(request.q, request.k, prepared)
    q, k = map_features(request.q, request.k, prepared)
    if far is not None and prepared.far_window is not None:
        q, k, past, far_keys, v = (x.transpose(1, 2) for x in (q, k, far.past, far.keys, request.v))
        return flash_far.attend(q, k, past, far_keys, v, call.scale, prepared.far_window).transpose(1, 2)
    keywords: dict[str, Any] = {"softmax_scale": call.scale, "causal": call.causal}
    if call.window is not None:
        keywords["window_size"] = (call.window - 1, 0 if call.causal else call.window - 1)
    result = function(q.transpose(1, 2), k.transpose(1, 2), request.v.transpose(1, 2), **keywords)
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out.transpose(1, 2)


@constant
def flash_version(device: torch.device) -> int | None:
    """The newest flash-attn that is installed and has kernels for a GPU: 4, 3 or 2. Nothing is imported."""
    return _find_flash(device)


@lru_cache
def _find_flash(device: torch.device) -> int | None:
    major, minor = capability(device)
    package = importlib.util.find_spec("flash_attn")
    folders = [] if package is None else [Path(folder) for folder in package.submodule_search_locations or ()]
    if 9 <= major <= 12 and any((folder / "cute" / "interface.py").exists() for folder in folders):
        return 4
    if (major, minor) == (9, 0) and importlib.util.find_spec("flash_attn_interface") is not None:
        return 3
    if major >= 8 and any((folder / "flash_attn_interface.py").exists() for folder in folders):
        return 2
    return None


_FLASH_MODULES = {4: "flash_attn.cute", 3: "flash_attn_interface", 2: "flash_attn"}


@lru_cache
def load_flash(version: int) -> tuple[Callable[..., Any] | None, str | None]:
    """Import flash-attn: its function, or why there is none."""
    try:
        return importlib.import_module(_FLASH_MODULES[version]).flash_attn_func, None
    except Exception as error:  # whatever a build for another torch or CUDA may raise
        return None, f"flash-attn {version} cannot be imported: {error}"


@constant
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU."""
    return _find_capability(device)


_find_capability = lru_cache(torch.cuda.get_device_capability)


def _other_values(v: Tensor, q: Tensor) -> str:
    return f"v's head dim is {v.shape[3]}, and it is not asked for another than q's {q.shape[3]}"


def _why_misaligned(*tensors: Tensor) -> str | None:
    """Why kernels that read 16 bytes at a time cannot read the tensors; None if they can."""
    for name, x in zip("qkv", tensors, strict=True):
        steps = (stride % 8 == 0 for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1)
        placed = torch.compiler.is_compiling() or isinstance(x, FakeTensor) or x.data_ptr() % 16 == 0
        if x.stride(3) != 1 or not placed or not all(steps):
            return f"rows of {name} do not begin at multiples of 16 bytes"
    return None
