"""`append_kv`: keys and values normalised, rotated, quantised and written into pages.

Shape letters: N tokens, H query heads, K key heads, D head dim, Dv that of values, R rotary dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ropewalk.ops.cache import operator
from ropewalk.ops.cache.call import AppendCall
from ropewalk.ops.cache.validate import check, check_no_grad
from ropewalk.ops.rope.norm import QKNorm
from ropewalk.ops.tracing import PLAIN_TYPES, is_plain_eager, is_transformed

_PLAIN_TYPES = PLAIN_TYPES | {type(None)}
_is_compiling, _rerun = torch.compiler.is_compiling, operator.OPERATION.rerun


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    cos: Tensor,
    sin: Tensor,
    q: Tensor | None = None,
    positions: Tensor | None = None,
    norm: QKNorm | None = None,
    interleaved: bool = False,
    rotary_offset: int = 0,
    axes: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    impl: str | None = None,
) -> Tensor | None:
    """Rotate keys, and write them and values into pages, in one launch; return q rotated.

    The same in PyTorch, for `norm=None`, half-split pairs of all features, and a cache of k's dtype::

        def rotate(x):  # (N, heads, D)
            a, b = x.float().chunk(2, dim=-1)
            c, s = cos[positions][:, None], sin[positions][:, None]
            return torch.cat([a * c - b * s, a * s + b * c], dim=-1).to(x.dtype)

        page_size = k_cache.shape[1]
        for i, slot in enumerate(slots.tolist()):
            if slot >= 0:
                k_cache[slot // page_size, slot % page_size] = rotate(k)[i]
                v_cache[slot // page_size, slot % page_size] = v[i]
        return None if q is None else rotate(q)

    The arithmetic is in float32, and is rounded once: straight to the stored number. By the dtype of the caches:

    ================  ==============================================  ============================================
    dtype             stored                                          k_scale and v_scale
    ================  ==============================================  ============================================
    k's               the value                                       None
    float8_e4m3fn     value / scale, saturating at 448                () or (K,), float32, read
    int8              value / scale, from -127 to 127                 (pages, page_size, K), float32, written:
                                                                      the largest magnitude of a head / 127
    uint8             two 4-bit numbers a byte, low nibble first:     (pages, page_size, K, D/32), float16, written:
                      8 + value / scale, from 1 to 15                 the largest magnitude of 32 features / 7
    ================  ==============================================  ============================================

    Rounding is to nearest, half to even. Zeros are stored as zeros. `ropewalk.attention` reads such pages by
    `block_table`, `k_scale` and `v_scale`. Nothing else of the caches is written, and k, v and q are left alone.

    Args:
        k: (N, K, D), float16, bfloat16 or float32, any strides; D up to 256.
        v: (N, K, Dv), k's dtype; Dv up to 256.
        k_cache: (pages, page_size, K, D), or D/2 bytes of 4-bit numbers; pages of 1 to 512 tokens. Any strides: view
            (pages, K, page_size, D) by `transpose(1, 2)`.
        v_cache: likewise with Dv, of k_cache's dtype, pages and page size.
        slots: (n,), int32 or int64, n at most N: page * page_size + offset of each of the first n tokens. -1 and the
            tokens after n are not written, but their q is rotated. Twice the same slot is undefined. Values are
            checked on CPU tensors alone: on a GPU, nothing is written outside of the cache.
        cos: (n, R/2), row p for position p, any floating dtype.
        sin: like cos.
        q: (N, H, D), H a multiple of K, to be normalised and rotated too; or None.
        positions: (N,), int32 or int64: the row of cos and sin of each token. None: row n is token n's, whatever its
            slot is: for tables with a row for each token, and prompts that start at 0. (A, N) with `axes`. A position
            outside the tables makes the token's key and query NaN, and the scales of such a key.
        norm: normalise k, and q, before the rotation or after it: see `QKNorm`.
        interleaved: pair features (2i, 2i + 1) rather than (i, i + R/2).
        rotary_offset: the first rotated feature. Features outside of R pass through.
        axes: (R/2,), int32 or int64: the row of positions that each pair turns by (multimodal RoPE).
        k_scale: by the table above; strides are free.
        v_scale: likewise of v_cache.
        impl: "triton", "reference" or None for the first of them that fits; a named one that cannot run raises.

    Returns:
        q rotated, with the strides of `torch.empty_like(q)`; None without q.

    Raises:
        TypeError: an argument of another type or dtype than said here.
        ValueError: shapes, devices or values that do not fit; a cache whose elements share memory; tensors that
            require grad, as there is no gradient. Each names the argument, and is raised before anything is written.

    Also `torch.ops.ropewalk.append_kv`, which `torch.compile` traces. It can be captured in a CUDA graph: slots,
    positions and scales are read on the device.

    Source: vLLM's reshape_and_cache and FlashInfer's append_paged_kv_cache write pages likewise.

    Example:
        >>> import torch
        >>> from ropewalk import append_kv, attention, inverse_frequencies, rope_table
        >>> cos, sin = rope_table(64, inverse_frequencies("default", rotary_dim=32, base=10000.0)[0])
        >>> k_cache, v_cache = torch.zeros(2, 4, 16, 2, 32, dtype=torch.int8)  # 4 pages of 16 tokens, 2 heads
        >>> k_scale, v_scale = torch.zeros(2, 4, 16, 2)
        >>> q, k, v = torch.randn(3, 8, 32), torch.randn(3, 2, 32), torch.randn(3, 2, 32)
        >>> slots = torch.tensor([32, 33, 34])  # the first tokens of page 2
        >>> q = append_kv(k, v, k_cache, v_cache, slots, cos=cos, sin=sin, q=q, k_scale=k_scale, v_scale=v_scale)
        >>> table, lengths = torch.tensor([[2]]), torch.tensor([3])
        >>> scales = {"k_scale": k_scale, "v_scale": v_scale}
        >>> attention(q[None, -1:], k_cache, v_cache, block_table=table, key_lengths=lengths, **scales).shape
        torch.Size([1, 1, 8, 32])
    """
    how: tuple[Any, ...] = (False, 1e-6, 0.0, False, False)
    q_weight = k_weight = None
    if type(norm) is QKNorm:
        q_weight, k_weight = None if q is None else norm.q_weight, norm.k_weight
        how = (True, norm.eps, norm.offset, norm.after, norm.across_heads)
    elif norm is not None:
        raise TypeError(f"norm is {type(norm).__name__}, but must be a ropewalk.QKNorm")
    has_norm, eps, weight_offset, after, across_heads = how
    # One tuple, and not the record's own `__new__`, which is a function of Python: 0.3 of 5 us.
    call = tuple.__new__(AppendCall, (
        k, v, k_cache, v_cache, slots, cos, sin, q, positions, axes, q_weight, k_weight, k_scale, v_scale,
        interleaved, rotary_offset, has_norm, eps, weight_offset, after, across_heads, impl,
    ))  # fmt: skip
    if _is_compiling():
        return operator.append_traced(call)
    results = _rerun(call)
    if results is not None:
        return results[0] if results else None
    tensors = operator.OPERATION.record.tensors_of(call)
    if _PLAIN_TYPES.issuperset(map(type, tensors)) and is_plain_eager(*tensors) and not is_transformed():
        return operator.append(call)
    check(call)
    check_no_grad(call)
    return operator.append_traced(call)
