"""`rotary_embedding`: vLLM's operator, with vLLM's semantics and error texts.

On NVIDIA GPUs it runs in the CUDA extension, which registers its own kernel for CUDA tensors when it is loaded.
Everywhere else, and until then, it runs through `apply_rope`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ropewalk.ops.rope.api import apply_rope
from ropewalk.ops.rope.cuda import load as native
from ropewalk.ops.rope.validate import DTYPES, MAX_HEAD_DIM, check_disjoint, may_overlap_itself
from ropewalk.ops.tracing import is_transformed

_LIBRARY = torch.library.Library("ropewalk", "FRAGMENT")
_SCHEMA = (
    "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor cos_sin_cache, "
    "bool is_neox) -> ()"
)
# A library that CMake built, and that was loaded before this, defines the operator itself; one that Python built has
# registered its kernel, if it was loaded before this, and no schema.
if not torch._C._jit_get_schemas_for_operator("ropewalk::rotary_embedding"):
    _LIBRARY.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
_OPERATOR: Any = torch.ops.ropewalk.rotary_embedding.default
_OWN_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    """Rotate query and key in place, as vLLM's operator of this name does.

    The same in PyTorch, for `is_neox` and a query (T, H, D)::

        cos, sin = cos_sin_cache[positions].float().chunk(2, dim=-1)  # (T, R/2) each
        a, b = query[..., :R].float().chunk(2, dim=-1)
        query[..., :R] = torch.cat([a * cos[:, None] - b * sin[:, None], a * sin[:, None] + b * cos[:, None]], dim=-1)

    Results are tested at the shapes of vLLM's own test, against float64 within the error of float32 arithmetic. In
    bfloat16 vLLM's path rounds more often, and 0.3 to 0.6 percent of its elements differ from these.

    Also `torch.ops.ropewalk.rotary_embedding`. It has no gradient: use `ropewalk.apply_rope` for one. float16,
    bfloat16, float32 and float64; arithmetic in float32 (float64 for float64), rounded once.

    Args:
        positions: (T,) or (B, T), int32 or int64. A position outside the table makes every feature of its token NaN.
        query: (T, H·D), (T, H, D), (B, T, H·D) or (B, T, H, D), its last dimension dense in memory; the others may
            have any strides that do not overlap.
        key: the same with its own number of heads, which divides query's, and its own strides; or None.
        head_size: D, up to 512.
        cos_sin_cache: (max_position, R), a row for each position: R/2 cosines, then R/2 sines; float32 or query's
            dtype. Features past R are left alone.
        is_neox: pair features (i, i + R/2) (GPT-NeoX, Llama) rather than (2i, 2i + 1) (GPT-J).

    Returns:
        None.

    Raises:
        RuntimeError: "positions must have shape [num_tokens] or [batch_size, seq_len]", "query, key and positions must
            have the same number of tokens", "query, key and positions must have the same batch_size and seq_len"; for
            positions (3, T) of multimodal RoPE, which `ropewalk.apply_rope` runs with `axes`; also
            for other shapes, dtypes and devices that do not fit, memory that overlaps, a query or key that requires
            grad or is lazily negated, a torch.func transform, forward-mode differentiation. All are raised before
            anything is written.

    Source: vLLM, csrc/pos_encoding_kernels.cu.

    Example:
        >>> import torch
        >>> from ropewalk import inverse_frequencies, rope_table, rotary_embedding
        >>> inv_freq, _ = inverse_frequencies("default", rotary_dim=64, base=10000.0)
        >>> cache = torch.cat(rope_table(128, inv_freq), dim=-1)
        >>> query, key = torch.randn(5, 8 * 64), torch.randn(5, 2 * 64)
        >>> rotary_embedding(torch.arange(5), query, key, 64, cache, True)
    """
    if torch.compiler.is_compiling():
        _OPERATOR(positions, query, key, head_size, cos_sin_cache, is_neox)
        return
    # The same as `_bump_version`, in half its host time.
    _check_autograd(query, key)
    with torch._C._ExcludeDispatchKeyGuard(_OWN_KEY):
        _OPERATOR(positions, query, key, head_size, cos_sin_cache, is_neox)
    torch._C._increment_version((query,) if key is None else (query, key))


def _check_autograd(query: Tensor, key: Tensor | None) -> None:
    """Raise if query or key is differentiated, transformed or lazily negated: that is not supported."""
    if torch.is_grad_enabled() and (query.requires_grad or (key is not None and key.requires_grad)):
        name = "query" if query.requires_grad else "key"
        raise RuntimeError(f"{name} requires grad, but rotary_embedding has no gradient: use ropewalk.apply_rope")
    if is_transformed():
        raise RuntimeError(
            "torch.func transforms and forward-mode differentiation of rotary_embedding are not supported: use "
            "ropewalk.apply_rope"
        )
    if query.is_neg() or (key is not None and key.is_neg()):
        raise RuntimeError("query and key must not be lazily negated: pass x.resolve_neg()")


def _bump_version(keyset: Any, positions: Tensor, query: Tensor, key: Tensor | None, *rest: Any) -> None:
    """Raise where there would be a gradient, run the operator, and count up the versions of what it overwrote.

    The dispatcher skips this for tensors that were made in inference mode.
    """
    _check_autograd(query, key)
    _OPERATOR.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, positions, query, key, *rest)
    torch._C._increment_version((query,) if key is None else (query, key))


def _rotate_portably(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    """Run the operator on the CPU, and on GPUs without the CUDA extension."""
    if query.is_cuda and native.why_not(query.device) is None and native.load():
        _OPERATOR(positions, query, key, head_size, cos_sin_cache, is_neox)  # later calls go there directly
        return
    _check(positions, query, key, head_size, cos_sin_cache, is_neox)
    _check_memory(query, key, head_size)
    cos, sin = cos_sin_cache.detach().chunk(2, dim=-1)
    q, k = (None if x is None else _split_heads(x, positions, head_size) for x in (query, key))
    assert q is not None
    layout = "thd" if positions.ndim == 1 else "bthd"
    with torch.no_grad():
        apply_rope(q, k, cos, sin, positions=positions, layout=layout, interleaved=not is_neox, inplace=True)


def _check_memory(query: Tensor, key: Tensor | None, head_size: int) -> None:
    """Raise if two elements of query and key share memory."""
    for name, x in (("query", query), ("key", key)):
        if x is not None and may_overlap_itself(x):
            raise RuntimeError(f"{name} has elements that share memory")
    if key is None:
        return
    try:
        check_disjoint(query.unflatten(-1, (-1, head_size)), key.unflatten(-1, (-1, head_size)))
    except ValueError:
        raise RuntimeError("query and key share memory") from None


def _split_heads(x: Tensor, positions: Tensor, head_size: int) -> Tensor:
    """View query or key as (T, H, D) or (B, T, H, D)."""
    return x.unflatten(-1, (-1, head_size)) if x.ndim == positions.ndim + 1 else x


def _check(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    """Raise the errors of csrc/operators.cpp, from shapes, strides, dtypes and devices alone."""
    xs = [("query", query)] if key is None else [("query", query), ("key", key)]
    for name, x in (("positions", positions), ("cos_sin_cache", cos_sin_cache), *xs[1:]):
        if x.device != query.device:
            raise RuntimeError(f"{name} must be on query's device")
    if query.dtype not in DTYPES:
        raise RuntimeError("query must be float16, bfloat16, float32 or float64")
    if key is not None and key.dtype != query.dtype:
        raise RuntimeError("key must have query's dtype")
    if cos_sin_cache.dtype not in (torch.float32, query.dtype):
        raise RuntimeError("cos_sin_cache must be float32 or have query's dtype")
    if positions.dtype not in (torch.int32, torch.int64):
        raise RuntimeError("positions must be int32 or int64")
    is_per_row = query.shape[:2] == positions.shape
    if positions.ndim == 2 and positions.shape[0] == 3 and query.shape[:1] == positions.shape[1:] and not is_per_row:
        raise RuntimeError(
            "positions must have shape [num_tokens] or [batch_size, seq_len], but has three axes for each token "
            "(multimodal RoPE, M-RoPE): call ropewalk.apply_rope with axes, as mrope_axes makes them"
        )
    if positions.ndim not in (1, 2):
        raise RuntimeError("positions must have shape [num_tokens] or [batch_size, seq_len]")
    for _, x in xs:
        if x.ndim > positions.ndim and x.shape[: positions.ndim] != positions.shape:
            sizes = "number of tokens" if positions.ndim == 1 else "batch_size and seq_len"
            raise RuntimeError(f"query, key and positions must have the same {sizes}")
    if not 1 <= head_size <= MAX_HEAD_DIM:
        raise RuntimeError(f"head_size is {head_size}, but must be from 1 to {MAX_HEAD_DIM}")
    if cos_sin_cache.ndim != 2:
        raise RuntimeError("cos_sin_cache must have shape [max_position, rotary_dim]")
    width = cos_sin_cache.shape[1]
    if width % 2 or not 2 <= width <= head_size:
        raise RuntimeError(
            f"cos_sin_cache has rotary dim {width}, but it must be even, at least 2 and at most head_size, {head_size}"
        )
    if cos_sin_cache.stride(-1) != 1:
        raise RuntimeError("cos_sin_cache must be dense along its last dimension")
    heads = [_count_heads(name, x, positions.ndim, head_size) for name, x in xs]
    if key is not None and (heads[1] < 1 or heads[0] % heads[1]):
        raise RuntimeError(f"query has {heads[0]} heads, but they must be a multiple of key's {heads[1]}")


def _count_heads(name: str, x: Tensor, position_dims: int, head_size: int) -> int:
    if x.ndim - position_dims not in (1, 2):
        raise RuntimeError(
            f"{name} has {x.ndim} dimensions, but must have {position_dims + 1} or {position_dims + 2} where positions "
            f"has {position_dims}"
        )
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise RuntimeError(f"{name} has stride {x.stride(-1)} along its last dimension, but must have 1")
    if x.ndim - position_dims == 1:
        if x.shape[-1] % head_size:
            raise RuntimeError(
                f"{name} has {x.shape[-1]} features a token, but they must be a multiple of head_size, {head_size}"
            )
        return x.shape[-1] // head_size
    if x.shape[-1] != head_size:
        raise RuntimeError(f"{name} has head dim {x.shape[-1]}, but head_size is {head_size}")
    return x.shape[-2]


_LIBRARY.impl("rotary_embedding", _rotate_portably, "CompositeExplicitAutograd")
_LIBRARY.impl("rotary_embedding", torch.library.fallthrough_kernel, "Autograd")
_LIBRARY.impl("rotary_embedding", _bump_version, "ADInplaceOrView", with_keyset=True)
torch.library.register_fake("ropewalk::rotary_embedding", _check, lib=_LIBRARY)
