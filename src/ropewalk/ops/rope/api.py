"""`apply_rope`: the public function of the rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

from torch import Tensor

from ropewalk.ops.arguments import refuse_unknown, without_unknown
from ropewalk.ops.rope.autograd import rotate
from ropewalk.ops.rope.call import RopeCall, RopeFlags
from ropewalk.ops.rope.norm import NormCall, Normed, QKNorm, check_norm, split_norm
from ropewalk.ops.rope.norm import operation as norm_operation
from ropewalk.ops.rope.norm.operator import norm_and_rotate_traced
from ropewalk.ops.rope.operator import rotate_traced
from ropewalk.ops.rope.pages.operation import rotate_pages
from ropewalk.ops.rope.validate import LAYOUTS, are_per_head, check_not_offsets, check_offsets, rows_by_index
from ropewalk.ops.tracing import is_dtensor, is_plain_eager, is_transformed

_KEYWORDS = (
    "positions",
    "offsets",
    "axes",
    "cu_seqlens",
    "layout",
    "interleaved",
    "pair_block",
    "inverse",
    "rotary_dim",
    "rotary_offset",
    "inplace",
    "norm",
    "q_bias",
    "k_bias",
    "block_table",
    "impl",
)
# What transformers, flash-attn, vLLM and others call them.
_ELSEWHERE = {
    "position_ids": "positions",
    "seqlen_offsets": "offsets",
    "unsqueeze_dim": "layout",
    "tensor_format": "layout",
    "rotary_interleaved": "interleaved",
    "is_neox_style": "it is the opposite of interleaved",
    "is_neox": "it is the opposite of interleaved",
    "conjugate": "inverse",
    "rotary_percent": "the width of cos and sin says how many features are rotated",
    "partial_rotary_factor": "the width of cos and sin says how many features are rotated",
    "max_seqlen": "no length is needed beside cu_seqlens",
    "freqs_cis": "pass cos and sin, its real and its imaginary part",
    "backend": "impl",
}


@without_unknown
def apply_rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | int | None = None,
    offsets: Tensor | None = None,
    axes: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    layout: str = "bthd",
    interleaved: bool = False,
    pair_block: int | None = None,
    inverse: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    inplace: bool = False,
    norm: QKNorm | None = None,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    block_table: Tensor | None = None,
    impl: str | None = None,
    **unknown: NoReturn,
) -> Any:
    """Rotate each pair of features of q and k by its token's angles: rotary position embedding.

    The same in PyTorch, for `layout="bthd"` and half-split pairs::

        def rotate(x):  # (B, T, H, D), with cos and sin (T, R/2)
            a, b, rest = x.float().split([R // 2, R // 2, D - R], dim=-1)
            c, s = cos[:T, None], sin[:T, None]
            return torch.cat([a * c - b * s, a * s + b * c, rest], dim=-1).to(x.dtype)

        q, k = rotate(q), rotate(k)

    q and k are rotated in one launch. The arithmetic is in float32 (float64 for float64 tensors) and is rounded once.
    The gradient of q and k is the inverse rotation, itself differentiable. cos and sin are differentiated where they
    have rows for each head, and must not require grad where heads share them.
    float16, bfloat16, float32 and float64; head dims up to 512; any strides.

    Args:
        q: (B, T, Hq, D) for layout "bthd", (B, Hq, T, D) for "bhtd", (total, Hq, D) for "thd".
        k: the same with its own number of heads and its own strides, or None.
        cos: (n, R/2), row p for position p; or (B or 1, T, R/2), a row for each token, with `positions` None. Tables
            per token are for positions that are no integers. Tables per head, of as many heads as q and k both have:
            (n, H, R/2), or (B or 1, T, H, R/2), a row for each token and head ("thd" counts as one batch row). Without
            `positions`, tables that fit as (B or 1, T, R/2) are per token. Those per head may require grad, for learned
            frequencies; `inplace` must be False then. Their gradients are summed over q, k and the tokens of a row, to
            the same bits every time. They take no `axes` and no `norm`; (n, H, R/2) with `cu_seqlens` needs
            `positions`. "triton" and "reference" run them.
        sin: like cos.
        positions: the tokens' positions, int32 or int64. None: their index (for "thd", in their own sequence); an
            int: the same plus this offset; (B, T) or (1, T): one for each token; (total,) for "thd": one for each
            token. A position outside the table makes every feature of its token NaN, on every device; an int that
            cannot fit raises.
        offsets: (B,), int32 or int64: the position of each batch row's first token, with `positions` None and not for
            "thd". Tokens outside the table become NaN.
        axes: (R/2,), int32 or int64: the position axis of each pair, for tokens with several positions (multimodal
            RoPE: time, height and width; `mrope_axes` makes it). `positions` is then (A, B, T) or (A, 1, T), (A, total)
            for "thd", and pair p of a token turns by row positions[axes[p], b, t] of column p. A token is NaN if its
            position lies outside the table on an axis of any pair. Values are checked on CPU tensors alone; on a GPU
            an axis that `positions` lacks makes every token NaN.
        cu_seqlens: for "thd", the bounds of the packed sequences: (number of sequences + 1,), int32 or int64, from 0 to
            total, never falling. Its values are checked on CPU tensors alone.
        layout: "bthd", "bhtd" or "thd". It must be given for (B, H, T, D), SDPA's and transformers' order: such
            tensors fit "bthd" as well, where each head takes the angles of another position and nothing raises.
        interleaved: pair features (2i, 2i + 1) (GPT-J, complex numbers) rather than (i, i + R/2) (GPT-NeoX, Llama).
        pair_block: P, pairs half-split inside blocks of P features (Gemma 4's vision tower: a block per axis). Pair
            p = b · P/2 + j has features j and j + P/2 of block b, and column p of the tables. P is even and divides R;
            `interleaved` must be False. None: one block of R features. "triton" and "reference" run it.
        inverse: rotate by −θ rather than +θ.
        rotary_dim: R, if it is to be checked: it must be twice the width of cos. The other D − R features pass through.
        rotary_offset: the first rotated feature.
        inplace: overwrite q and k, and return them; differentiable. A leaf that requires grad and memory that overlaps
            raise.
        norm: normalise q and k in the same launch: see `QKNorm`. Its weights are trained. `inverse` and `inplace` must
            be False then. "triton" and "reference" run it.
        q_bias: (Hq, D) or (Hq * D,), the bias of q's projection, added before the norm in the same launch. Its
            gradient comes out of the backward's launch, so that no other pass reads dQ. `norm` must be given too.
        k_bias: the same of k. It is not read where k is None.
        block_table: (B, n), int32 or int64: q is pages of cached keys, (pages, page_size, H, D) for "bthd" or (pages,
            H, page_size, D) for "bhtd", of any strides. Token t of row b is in page block_table[b, t // page_size] at
            t % page_size, and is rotated there, by `positions` as (B, T, H, D) tensors have them, T = n * page_size. A
            negative entry leaves a page alone; twice the same page is undefined. `inplace` must be True, k, norm and
            cu_seqlens None. Keys of float16, bfloat16, float32 or float64: quantised ones are to be appended anew.
            Nothing is differentiated. "triton" and "reference" run it.
        impl: "native" (CUDA), "triton", "reference" or None for the first of them that fits; a named one that does
            not support the call raises.

    Returns:
        (q, k) rotated, or q alone where k is None, with the strides that `torch.empty_like` gives.

    Raises:
        TypeError: an argument of another type or dtype than said here; sparse or nested tensors; a name that is no
            argument, with what it is called here.
        ValueError: shapes, devices or values that do not fit, or an `impl` that does not support them.
        RuntimeError: inplace for a tensor that autograd does not let be overwritten.
        Each names the argument, its value and the requirement, and is raised before anything is written.

    Under `torch.func` transforms and forward-mode differentiation the reference runs. `torch.compile` traces the
    operator `torch.ops.ropewalk.rope`: no graph break, and no recompilation for each length.

    Source: RoFormer (https://arxiv.org/abs/2104.09864), equation 34; half-split pairs are GPT-NeoX's.

    Example:
        >>> import torch
        >>> from ropewalk import apply_rope, inverse_frequencies, rope_table
        >>> inv_freq, _ = inverse_frequencies("default", rotary_dim=64, base=10000.0)
        >>> cos, sin = rope_table(128, inv_freq)
        >>> q, k = torch.randn(2, 128, 8, 64), torch.randn(2, 128, 2, 64)
        >>> q, k = apply_rope(q, k, cos, sin)
        >>> q.shape, k.shape
        (torch.Size([2, 128, 8, 64]), torch.Size([2, 128, 2, 64]))
    """
    if unknown:
        refuse_unknown("apply_rope", unknown, _KEYWORDS, _ELSEWHERE)
    if type(q) is not Tensor and is_dtensor(q):
        from ropewalk.ops import dtensor

        if block_table is not None:
            raise ValueError("block_table was given, but must be None for DTensors: pass local pages")
        for name, bias in (("q_bias", q_bias), ("k_bias", k_bias)):
            if bias is not None:
                raise ValueError(f"{name} was given, but must be None for DTensors: let the projection add it")

        keywords: dict[str, Any] = {
            "positions": positions,
            "offsets": offsets,
            "axes": axes,
            "cu_seqlens": cu_seqlens,
            "norm": norm,
        }
        keywords |= {"layout": layout, "interleaved": interleaved, "pair_block": pair_block, "inverse": inverse}
        keywords |= {"rotary_dim": rotary_dim, "rotary_offset": rotary_offset, "inplace": inplace, "impl": impl}
        return dtensor.rotate(apply_rope, q, k, {"cos": cos, "sin": sin, **keywords})
    offset, token_positions = 0, None
    if positions is not None or offsets is not None:
        offset, token_positions = _split_positions(positions, offsets, layout, axes)
    if (
        isinstance(cos, Tensor)
        and cos.ndim == 3
        and block_table is None
        and token_positions is None
        and cu_seqlens is None
    ):
        cos, sin, offset = rows_by_index(q, cos, sin, offset, layout)
    if block_table is not None:
        page_flags = RopeFlags(layout, interleaved, inverse, rotary_dim, rotary_offset, inplace, impl, pair_block)
        tables = RopeCall(cos, sin, token_positions, cu_seqlens, offset, page_flags, axes)
        return rotate_pages(q, k, block_table, tables, {"norm": norm, "q_bias": q_bias, "k_bias": k_bias})
    xs = (q,) if k is None else (q, k)
    # A named tuple's own constructor is a call of Python's.
    flags = tuple.__new__(
        RopeFlags, (layout, interleaved, inverse, rotary_dim, rotary_offset, inplace, impl, pair_block)
    )
    call = tuple.__new__(RopeCall, (cos, sin, token_positions, cu_seqlens, offset, flags, axes))
    if norm is not None:
        if isinstance(cos, Tensor) and are_per_head(cos, token_positions):
            raise ValueError("norm was given with tables per head, but must be None there: normalise q and k before")
        normed = norm_and_rotate(xs, norm, call, (q_bias, k_bias))
        return normed[0] if k is None else normed
    if q_bias is not None or k_bias is not None:
        name = "k_bias" if q_bias is None else "q_bias"
        raise ValueError(
            f"{name} was given without norm, but must be None there: the rotation alone adds no bias, so that its "
            f"backward needs no q and k; let the projection add it"
        )
    is_plain = is_plain_eager(q, k, cos, sin, token_positions, cu_seqlens, axes) and not is_transformed()
    if q is None or cos is None or sin is None:
        is_plain = False  # the checks of `rotate_traced` raise
    rotated = (rotate if is_plain else rotate_traced)(xs, call)
    return rotated[0] if k is None else rotated


def norm_and_rotate(
    xs: tuple[Tensor, ...],
    norm: QKNorm,
    call: RopeCall,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, ...]:
    """Normalise and rotate `xs`, (q,) or (q, k), as `apply_rope` with a norm."""
    (q_weight, k_weight), flags = split_norm(norm, 2)
    cos, sin, positions, cu_seqlens, _, _, axes = call
    q_bias, k_bias = biases
    q, k = xs if len(xs) == 2 else (xs[0], None)
    if k is None:
        k_weight = k_bias = None
    tensors = (q, k, q_weight, k_weight, q_bias, k_bias)
    is_plain = is_plain_eager(*tensors, cos, sin, positions, cu_seqlens, axes) and not is_transformed()
    if q is None or cos is None or sin is None:
        is_plain = False  # the checks of `norm_and_rotate_traced` raise
    run = norm_operation.norm_and_rotate if is_plain else norm_and_rotate_traced
    return run(tuple.__new__(Normed, (*tensors, tuple.__new__(NormCall, (call, flags)))))  # as in `apply_rope`


def normalize(xs: tuple[Tensor, ...], norm: QKNorm, layout: str, impl: str | None = None) -> tuple[Tensor, ...]:
    """Normalise `xs`, (q,) or (q, k), without a rotation: in one launch, or in two where k has another length."""
    for name, x in zip("qk", xs, strict=False):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is {type(x).__name__}, but must be a tensor")
    no_tables = xs[0].new_empty(1, 1, 0)
    call = RopeCall(no_tables, no_tables, None, None, 0, RopeFlags(layout, impl=impl))
    if not _differ_in_tokens(xs, layout):
        return norm_and_rotate(xs, norm, call)
    q, k = xs
    weights, flags = split_norm(norm, 2)
    check_norm(xs, weights, NormCall(call, flags))  # which names k's weight
    (q,) = norm_and_rotate((q,), norm, call)
    (k,) = norm_and_rotate((k,), replace(norm, q_weight=norm.k_weight), call)
    return q, k


def _differ_in_tokens(xs: tuple[Tensor, ...], layout: str) -> bool:
    """Say whether q and k of a layout have other lengths; what is of no layout is left to the checks."""
    if layout not in LAYOUTS or any(x.ndim != len(layout) for x in xs):
        return False
    tokens = layout.index("t")
    return any(x.shape[tokens] != xs[0].shape[tokens] for x in xs)


def _split_positions(
    positions: Tensor | int | None, offsets: Tensor | None, layout: str, axes: Tensor | None
) -> tuple[int, Tensor | None]:
    """Return the tokens' common offset, and the tensor of positions or offsets."""
    if positions is True or positions is False:
        raise TypeError(f"positions is {positions}, but must be None, an int or a tensor of int32 or int64")
    if offsets is not None:
        check_offsets(offsets, positions, layout, axes)
        return 0, offsets  # below, 1-D positions of padded layouts are offsets
    if isinstance(positions, Tensor):
        if positions.ndim == 1 and axes is None:
            check_not_offsets(positions, layout)
        return 0, positions
    return (positions, None) if isinstance(positions, int) else (0, positions)
