"""`attention`: the one public function of attention, and `explain_choice`, which names the backend of a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from ropewalk.ops.arguments import refuse_unknown, without_unknown
from ropewalk.ops.attention import autograd, operator, reference
from ropewalk.ops.attention.autograd import Features
from ropewalk.ops.attention.backend import Backend
from ropewalk.ops.attention.backends import KERNELS, LIBRARIES, Choice, choose, explain, takes_gate
from ropewalk.ops.attention.blocks.tables import cached_tables_of, find_tables, has_rows
from ropewalk.ops.attention.call import NO_TABLES, AttentionCall, as_bhtd, from_bhtd, rope_tables, tensors_of
from ropewalk.ops.attention.dropout import make_seed
from ropewalk.ops.attention.gate.operation import apply_gate
from ropewalk.ops.attention.plans.find import ATTENTION
from ropewalk.ops.attention.plans.library import LibraryCall
from ropewalk.ops.attention.plans.norms import norm_first, norm_impl
from ropewalk.ops.attention.quantise.precision import QuantizedProducts
from ropewalk.ops.attention.tables import check_mapped_alone, check_norm_fits, goes_with_rotation
from ropewalk.ops.attention.validate import NO_POSITION, Arguments, Unchecked, check_precision_grad, resolve
from ropewalk.ops.launch.kinds import KINDS
from ropewalk.ops.rope.api import normalize
from ropewalk.ops.rope.norm import QKNorm
from ropewalk.ops.tracing import is_dtensor, is_plain_eager
from ropewalk.schemes import PositionScheme

# What PyTorch, transformers, flash-attn, vLLM and xFormers call arguments of `attention`.
_ELSEWHERE = {
    "is_causal": "causal",
    "attn_mask": "mask",
    "attention_mask": "mask",
    "attn_bias": "mask",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "scaling": "scale",
    "window_size": "window",
    "sliding_window": "window",
    "enable_gqa": "grouped heads need no argument, k may have fewer heads than q",
    "cu_seqlens": "cu_seqlens_q",
    "max_seqlen_q": "no length is needed beside cu_seqlens_q",
    "max_seqlen_k": "no length is needed beside cu_seqlens_k",
    "max_seqlen": "no length is needed beside cu_seqlens_q",
    "seqused_k": "key_lengths",
    "cache_seqlens": "key_lengths",
    "seq_lens": "key_lengths",
    "key_padding_mask": "for padding pass key_lengths, or a mask of (B, 1, 1, Tk)",
    "page_table": "block_table",
    "block_tables": "block_table",
    "block_mask": "blocks",
    "position_ids": "positions_q",
    "positions": "positions_q",
    "softcapping": "softcap",
    "logits_soft_cap": "softcap",
    "s_aux": "sinks",
    "learnable_sink": "sinks",
    "alibi_slopes": "pass position=Alibi(slopes)",
    "dropout": "dropout_p",
    "p_dropout": "dropout_p",
    "return_attn_probs": "probabilities are never held, but return_lse=True gives the log-sum-exp",
    "return_softmax_lse": "return_lse",
    "return_max_logit": "return_max_logits",  # Transformer Engine
    "tensor_layout": "layout",
    "qkv_format": "layout",
    "backend": "impl",
    "smooth_k": "precision takes a mean off keys by itself: see QuantizedProducts(centre=…)",
    "qk_quant_gran": "with precision each query has a unit, and so has each group of 32 keys",
    "pv_accum_dtype": "with precision sums are in float32 all the same",
    "q_descale": "precision finds the units of q, k and v by itself: pass them in 16 bits",
    "k_descale": "precision finds the units of q, k and v by itself; those of quantised pages are k_scale",
    "v_descale": "precision finds the units of q, k and v by itself; those of quantised pages are v_scale",
    "fp8_dpa": "pass precision='int8-fp8'",
}

# Within `ropewalk.parallel.context_parallel`: finds the function that a call of this thread goes to; None for none.
find_sharded: Callable[[], Callable[..., Any] | None] | None = None


def takes_shards() -> bool:
    """Say whether `attention` takes shards of sequences now: token i is not at position i."""
    return find_sharded is not None and find_sharded() is not None


def repeat_plain(q: Tensor, k: Tensor, v: Tensor, causal: Any, scale: float) -> Tensor | None:
    """Do what `attention(q, k, v, causal=causal, scale=scale, layout="bhtd")` does, where a library did it last.

    None: it is another call. Few functions and objects, since a model's layers find each of them out of the caches.
    """
    if is_dynamo_compiling():  # alone here: it is a constant to torch.compile, which traces no further
        return None
    found: LibraryCall | None = KINDS.plain.get((causal, scale))
    if (
        found is None
        or not found.matches_qkv(q, k, v)
        or found.records is not torch.is_grad_enabled()
        or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
        or forward_ad._current_level >= 0
        or torch._C._get_deterministic_algorithms()
        or not torch._C._get_cudnn_sdp_enabled()
        or find_sharded is not None
    ):
        return None
    return found.attend(q, k, v)


@without_unknown
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    position: PositionScheme = NO_POSITION,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    positions_q: Tensor | None = None,
    positions_k: Tensor | None = None,
    key_starts: Tensor | None = None,
    query_starts: Tensor | None = None,
    block_table: Tensor | None = None,
    blocks: Any = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    keys_rotated: bool = False,
    norm: QKNorm | None = None,
    gate: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    layout: str = "bthd",
    deterministic: bool | None = None,
    precision: str | QuantizedProducts | None = None,
    impl: str | None = None,
    **unknown: NoReturn,
) -> Any:
    """Attend from q to k and v, with the position encoding inside.

    The same in PyTorch, for `layout="bhtd"`, as many key heads as query heads, and a scheme that maps features::

        q, k = map_features(q), map_features(k)  # see the scheme: Rope rotates pairs, others leave features alone
        scores = q @ k.mT * scale  # (B, H, Tq, Tk)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = score_mod(scores)  # see the scheme: Alibi, T5Bias and the decay of ExpoSB do
        ahead = torch.arange(Tk) - torch.arange(Tk - Tq, Tk)[:, None]  # the last query stands at the last key
        allowed = torch.ones(Tq, Tk, dtype=torch.bool) if mask is None else mask
        if causal:
            allowed = allowed & (ahead <= 0)
        if window is not None:
            left, right = window if isinstance(window, tuple) else (window - 1, window - 1)  # -1: no bound
            allowed = allowed & ((left == -1) | (ahead >= -left)) & ((right == -1) | (ahead <= right))
        if blocks is not None:
            allowed = allowed & listed  # the pairs of listed blocks: see `BlockLists`
        scores = scores.masked_fill(~allowed, -torch.inf)
        if sinks is not None:  # one more key for each head, with a value of zero
            scores = torch.cat((scores, sinks[:, None, None].expand(B, H, Tq, 1)), dim=-1)
        out = F.dropout(scores.softmax(-1)[..., :Tk], dropout_p) @ v
        if gate is not None:
            out = out * torch.sigmoid(gate)  # unsqueezed, if it is one number for each head

    A query that may attend nothing gives zeros, a log-sum-exp of −inf (with sinks: its head's sink), and no gradient.
    No (Tq, Tk) matrix is ever held. Products of float16 and bfloat16 are summed in float32; those of float32 are exact
    to float32, unless torch is told to use TF32. Under autocast q, k and v are cast as by PyTorch's
    scaled_dot_product_attention.

    For the backward, our kernels keep q and k with their features mapped, v, the output and the log-sum-exp; the
    probabilities are computed again. Triton's gradients are the same bits every time; of Gluon's, that of q differs by
    roundings unless `deterministic`. They cannot be differentiated again; those of "reference" can.

    Args:
        q: (B, Tq, H, D) for layout "bthd", (B, H, Tq, D) for "bhtd", (total_q, H, D) for "thd"; float16, bfloat16,
            float32 or float64, any strides. Kernels take D up to 256, and Triton's up to 512 in float16 and
            bfloat16; for more, PyTorch's attention or the reference runs.
        k: (B, Tk, K, D), (B, K, Tk, D) or (total_k, K, D), where H is a multiple of K: each key head has H/K query
            heads in a row. Pages of keys with a `block_table`. With "thd" it may be a cache too, as "bthd" has it: (S,
            Tk, K, D) with a row for each sequence, or pages.
        v: like k, but for its head dim Dv, which the output has.
        position: the position scheme, such as `Rope()`, `ReRope(2048)`, `Alibi()`, `T5Bias(table)` or `ExpoSB()`. What
            it has to learn gets its gradient; where something exchanges a module's parameters, as FSDP does, the scheme
            is to be computed from them in each forward.
        causal: let no query attend a later key, by index, aligned at the bottom right.
        window: attend keys with abs(m - n) < window, by index; or, as flash-attn's (left, right), with m - left <= n <=
            m + right, where -1 leaves a side without a bound. With `causal`, no key after the query's own.
        scale: of the scores; 1/√D by default.
        mask: bool, True where a query may attend: (Tq, Tk); (B, Tq, Tk), the same for all heads; or (B or 1, H or 1,
            Tq or 1, Tk or 1). It is read where it lies, so a broadcast one costs nothing. Two dimensions are refused
            where B = Tq > 1, as they could be (B, Tk): pass (1, 1, Tq, Tk), or for padding key_lengths or (B, 1, 1,
            Tk).
        key_lengths: (B,), int32 or int64: where the keys of each batch row end, from 0 to Tk; what follows is padding
            and is never read. Its values are checked on CPU tensors alone, as are those of all that follow.
        cu_seqlens_q: (S + 1,), int32 or int64, for layout "thd": sequence s is rows cu_seqlens_q[s] to below
            cu_seqlens_q[s + 1], and attends itself alone, aligned at the bottom right. It starts at 0 and never falls;
            rows past its end belong to no sequence and attend nothing. It is the same as a call for each sequence.
            Over a cache a sequence's last query stands at its last key, as key_lengths says: new tokens after a
            prefix, of any number for each sequence.
        cu_seqlens_k: likewise of k and v; cu_seqlens_q by default. A cache has key_lengths instead.
        positions_q: the queries' positions for the scheme, (B, Tq) or (1, Tq), (total_q,) in "thd", int32 or int64. By
            default the index of the key that a query stands at, which is index + Tk − Tq unless query_starts says
            otherwise, counted from the first key of its sequence or of key_starts. `causal` and `window` go by index
            all the same.
        positions_k: the keys' positions, (B, Tk), (1, Tk) or (total_k,); by default their index, counted likewise.
            Where the scheme has axes, as `Rope(axes=…)`, both are (A, B, T), (A, 1, T) or (A, total).
        key_starts: (B,), int32 or int64: where the keys of each batch row start, from 0 to Tk; what comes before is
            padding on the left and is never read. With default positions it is the same as a call without the padding.
        query_starts: (B,), int32 or int64: the index of the key that each batch row's first query stands at, from −Tq
            to Tk − Tq, instead of Tk − Tq: for a cache that was allocated for more keys than it holds. A query before
            the first key, at an index below 0, attends nothing where `causal` is set.
        block_table: (B, pages of a row), int32 or int64: k is pages, (pages, page_size, K, D) for "bthd" or (pages, K,
            page_size, D) for "bhtd", v likewise, and key n of row b lies in page block_table[b, n // page_size] at
            n % page_size. Pages have 1 to 512 keys. It needs key_lengths, and has no backward. With "thd" it is (S,
            pages of a sequence), and pages are as for "bthd". In other layouts queries stand at the end of all its
            pages unless query_starts says where: in decoding, say it. Many queries attend a copy of their keys and
            values, of the table's width for each row, and never of more keys than all pages have where kernels read
            pages in place too: `explain_choice` says which.
        blocks: `BlockLists`, or FlexAttention's BlockMask: blocks of pairs that are attended, if every other mask
            allows it too. Kernels walk nothing that is not listed, forward and backward. A BlockMask has blocks of
            64 or 128 and was built for Tq and Tk, and B or 1 rows and H or 1 heads; its mask_mod is evaluated in its
            partial blocks once, at b and h of the mask, into bits, and the host waits for their number then. Full
            blocks are taken as they are. Tables of lists are cached beside them until they, or tensors, arrays and
            sets that the mask_mod reads, are written to, or a variable or an attribute that it reads holds another
            number or tensor; which blocks are partial stays as the BlockMask says. Under `torch.compile` a BlockMask
            with a mask_mod must have been in a call outside before; and such changes are not seen.
        k_scale: the scales of quantised pages, k of float8_e4m3fn, int8 or uint8 (two 4-bit numbers a byte, D/2 bytes
            a head), as `append_kv` reads or writes them: a key is its number times its scale. Their shape is the same
            in both layouts. They need a block_table; q, of float16, bfloat16 or float32, decides the output's dtype.
        v_scale: likewise of v, whose dtype is k's.
        softcap: bounds the scaled scores to ±softcap by tanh, before the scheme changes them (Gemma 2's).
        sinks: (H,), a logit for each head that takes part in the softmax and attends nothing (gpt-oss's);
            differentiable, and part of the log-sum-exp. Neither scaled nor capped.
        dropout_p: the probability, in [0, 1) and in steps of 2**-16, of dropping a probability after the softmax; what
            survives is divided by the rest. More than 255/256 counts as that. It is seeded by torch's generator of q's
            device; Triton's kernels and the reference drop the same for a seed.
        keys_rotated: k is already rotated, as in a cache of rotated keys; q alone is rotated. (ExpoSB weighs features
            of k alone, by both weights.) A two-range encoding does not support it.
        norm: normalise q and k by their root mean square (see `QKNorm`), before the scheme maps features or after it;
            the weights are trained. `Rope` rotates in the same launch, and is the one map of features that takes a norm
            after it. With keys_rotated or block_table there is none: k was normed when it was cached. Pass q normed.
        gate: multiplies the output by its sigmoid; of q's dtype, any strides. It is shaped like the output, as in
            Qwen3-Next, or is one number for each head: (B, Tq, H), (B, H, Tq) or (total_q, H). Our kernels multiply
            their float32 output and round once, and keep the gated output alone for the backward. After others, the
            output is rounded to its dtype, multiplied in float32 or more and rounded again; both are saved. The
            log-sum-exp does not depend on it. Differentiable.
        return_lse: return the log-sum-exp too; it is differentiable.
        return_max_logits: return each head's largest score too, as it is after the scale and before softcap, score mod
            and sinks, over all pairs that attend; −inf for a head without any. It is not differentiable. QK-clip of
            Muon takes it. Our kernels and the reference run it. A score that is NaN may be left out.
        layout: "bthd", "bhtd" or, for packed sequences, "thd". (B, H, T, D) tensors, as PyTorch and transformers have
            them, need "bhtd": in "bthd" they run too, and attend across heads. No check can tell.
        deterministic: True takes no kernels whose gradients differ from run to run; "gluon" adds the
            gradient of q in one order, or takes Triton's backward; None does as
            `torch.are_deterministic_algorithms_enabled()` says.
        precision: None for products in q's dtype; "int8" for QKᵀ in int8; "int8-fp8" for PV in e4m3 too; or
            `QuantizedProducts`, which defines both. The attention finds the units by itself: of each query and head, of
            32 keys and of 128 values. The log-sum-exp and the largest logits are those of the rounded scores. A
            gradient needs QuantizedProducts(backward="16-bit"). No backend picks it by itself, and none falls back from
            it: on a GPU a call that no kernel runs raises. It supports neither dropout, block_table, k_scale, packed
            queries over a cache, torch.func.grad nor shards of a sequence.
        impl: None for a choice by measurement on Hopper, by expectation elsewhere, as `explain_choice` tells;
            "triton"; "gluon", for Hopper; "flash" (flash-attn 4, 3 or 2) or "sdpa" (PyTorch's, on NVIDIA GPUs
            cuDNN's), each after our rotation; or "reference". A named one that cannot run the call raises.

    Returns:
        The output, like q but with v's head dim; or with return_lse (output, log-sum-exp), the second (B, H, Tq), or
        (H, total_q) in "thd", to base e and in float32 (float64 for float64 tensors). With return_max_logits the last
        of the tuple is (H,), float32.

    Raises:
        TypeError: an argument of another type or dtype than said here, a `position` that is no scheme among them;
            sparse or nested tensors; a name that is no argument, with what it is called here; a call under
            `torch.jit.trace`.
        ValueError: shapes, devices or values that do not fit; "thd" together with mask, key_starts, query_starts, or
            with key_lengths or block_table but no cache; a cache beside cu_seqlens_k or positions_k; a block_table
            without key_lengths, or where a gradient is needed; an `impl`
            that cannot run the call; blocks with "thd" or a block_table, lists of another shape, and on CPU tensors a
            count or an index of no block; a `precision` beside what it does not go with, without the backward that a
            gradient needs, or on a GPU where no kernel runs it.

    Under `torch.func` transforms and forward-mode differentiation the reference runs. `torch.compile` sees the
    operator `torch.ops.ropewalk.attend`: no graph break, and no recompilation for each length.

    Source: FlashAttention-2 (https://arxiv.org/abs/2307.08691), algorithms 1 and 2.

    Example:
        >>> import torch
        >>> from ropewalk import Rope, attention
        >>> q = torch.randn(2, 128, 8, 64)
        >>> k, v = torch.randn(2, 128, 2, 64), torch.randn(2, 128, 2, 64)
        >>> out = attention(q, k, v, position=Rope(base=500000.0), causal=True)
        >>> out.shape
        torch.Size([2, 128, 8, 64])
        >>> padding = torch.tensor([128, 100])
        >>> out, lse = attention(q, k, v, key_lengths=padding, return_lse=True)
        >>> lse.shape
        torch.Size([2, 8, 128])
        >>> packed = torch.tensor([0, 100, 228])  # a sequence of 100 tokens, and one of 128
        >>> q, k, v = torch.randn(228, 8, 64), torch.randn(228, 2, 64), torch.randn(228, 2, 32)
        >>> attention(q, k, v, position=Rope(), causal=True, cu_seqlens_q=packed, layout="thd").shape
        torch.Size([228, 8, 32])
    """
    if unknown:
        _refuse_unknown("attention", unknown)
    arguments = tuple.__new__(  # as `call` below: the constructor of a named tuple costs the host a function
        Arguments,
        (
            *(position, causal, window, scale, mask, key_lengths, cu_seqlens_q, cu_seqlens_k, positions_q, positions_k),
            *(key_starts, query_starts, block_table, softcap, sinks, dropout_p, keys_rotated, layout, gate, blocks),
            *(k_scale, v_scale, precision),
        ),
    )
    parts = None if find_sharded is None else find_sharded()
    if parts is None and type(q) is not Tensor and is_dtensor(q):
        parts = _attend_dtensors
    if parts is not None:
        flags = {"return_lse": return_lse, "return_max_logits": return_max_logits, "deterministic": deterministic}
        return parts(q, k, v, norm=norm, impl=impl, **flags, **arguments._asdict())
    if norm is not None:
        check_norm_fits(norm, keys_rotated, k if layout == "thd" and getattr(k, "ndim", 3) == 4 else block_table)
        if not goes_with_rotation(norm, position):
            q, k = normalize((q, k), norm, layout, norm_impl(impl))
            norm = None
    call = tuple.__new__(Unchecked, (q, k, v, arguments, return_lse, return_max_logits, deterministic, impl))
    is_compiling = torch.compiler.is_compiling()
    if (is_compiling or torch._C._is_any_autocast_enabled()) and _is_autocast(q):
        return _attend_lowered(call, norm, is_compiling)
    return _attend(call, norm, is_compiling)


def _attend_lowered(call: Unchecked, norm: QKNorm | None, is_compiling: bool) -> Any:
    """Attend as autocast has it: all that is computed in float32 from there on must stay there."""
    arguments = call.arguments._replace(gate=_lower(call.arguments.gate))
    call = call._replace(q=_lower(call.q), k=_lower(call.k), v=_lower(call.v), arguments=arguments)
    with torch.autocast(call.q.device.type, enabled=False):
        return _attend(call, norm, is_compiling)


def _attend(call: Unchecked, norm: QKNorm | None, is_compiling: bool) -> Any:
    """Attend by the plan of the call's kind, or without one."""
    if norm is not None:
        call = norm_first(call, norm)
    if not (call.return_max_logits or is_compiling):
        arguments = call.arguments
        if arguments.blocks is not None and has_rows(call.q, call.k):  # of thd, which takes no blocks
            q, k, blocks, layout = call.q, call.k, arguments.blocks, arguments.layout
            tables = cached_tables_of(blocks, q, k, layout) if arguments.block_table is None else None
            if tables is None:
                tables = find_tables(blocks, q, k, layout, arguments.block_table)
            call = call._replace(arguments=arguments._replace(blocks=tables))
        kind = ATTENTION.find(call)
        result = None if kind is None else kind.run(call)
        if result is not None:
            gate = arguments.gate
            return result if gate is None or kind.gates else _apply_gate(result, gate)
    return _attend_unplanned(call)


def _attend_unplanned(unchecked: Unchecked) -> Any:
    """Validate a call, choose a backend, and run it."""
    q, k, v, arguments, *_ = unchecked
    call = resolve(unchecked)
    backend, gate, layout = choose(call, unchecked.impl), arguments.gate, arguments.layout
    if gate is not None and takes_gate(backend, call, gate):
        call = call._replace(gate=as_bhtd(gate, layout))
    if call.dropout_p > 0:
        call = call._replace(seed=make_seed(call.q))
    if call.return_max_logits:
        out, lse, max_logits = _run_with_max_logits(call, backend)
        out = from_bhtd(out, layout)
    else:
        out, lse = _run(call, backend, Features(q, k, v, None if call.gate is None else gate, layout))
    if lse is not None and layout == "thd":
        lse = lse.squeeze(0)
    if gate is not None and call.gate is None:
        out = apply_gate(out, gate)
    if call.return_max_logits:
        return (out, lse, max_logits) if call.return_lse else (out, max_logits)
    return (out, lse) if call.return_lse else out


def _attend_dtensors(q: Any, k: Tensor, v: Tensor, **keywords: Any) -> Any:
    """Run a call with DTensors."""
    from ropewalk.ops import dtensor

    return dtensor.attend(attention, q, k, v, keywords)


def _apply_gate(result: Any, gate: Tensor) -> Any:
    """Gate the output among the results of `attention`."""
    if isinstance(result, tuple):
        return apply_gate(result[0], gate), *result[1:]
    return apply_gate(result, gate)


_KEYWORDS = (*Arguments._fields, "norm", "return_lse", "return_max_logits", "deterministic", "impl")


def _refuse_unknown(function: str, unknown: dict[str, Any]) -> NoReturn:
    """Raise for keywords that a function lacks; a scheme is meant for `position`, whatever it was called."""
    schemes = {name: "position" for name, x in unknown.items() if isinstance(x, PositionScheme)}
    refuse_unknown(function, unknown, _KEYWORDS, {**_ELSEWHERE, **schemes})


def explain_choice(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Choice:
    """Say which implementation `attention` takes for a call, and why not each other one. Nothing is computed.

    Args:
        q, k, v: as for `attention`.
        keywords: those of `attention`.

    Returns:
        A `Choice`: its `name`; `others`, a reason for each other implementation; `hint`, if the shapes look like those
        of another layout, or None; `pages`, of paged keys "copied" or "in place"; and all as text, by `str`.

    Raises:
        What `attention` would raise.

    Example:
        >>> import torch
        >>> from ropewalk import explain_choice
        >>> q = k = v = torch.randn(2, 128, 8, 64)
        >>> choice = explain_choice(q, k, v, softcap=50.0)
        >>> choice.name
        'reference'
        >>> choice.others["sdpa"]
        'softcap is not supported'
    """
    unknown = {name: x for name, x in keywords.items() if name not in _KEYWORDS}
    if unknown:
        _refuse_unknown("explain_choice", unknown)
    impl, norm = keywords.pop("impl", None), keywords.pop("norm", None)
    call = make_call(q, k, v, **keywords)
    if norm is not None:
        check_norm_fits(norm, call.keys_rotated, call.block_table)
        if goes_with_rotation(norm, call.scheme):
            check_mapped_alone(call)
            call = call._replace(tables=NO_TABLES)
        if call.precision is not None:
            check_precision_grad(keywords["precision"], False, norm.q_weight, norm.k_weight)
    return dataclasses.replace(explain(call, impl), hint=_layout_hint(call, keywords.get("layout", "bthd")))


def _layout_hint(call: AttentionCall, layout: str) -> str | None:
    """Return a hint where k has far more heads than keys, as (B, H, T, D) tensors seem to have in layout "bthd"."""
    heads, keys = call.k.shape[1:3]
    if layout != "bthd" or call.block_table is not None or heads < 4 * keys:
        return None
    return f"k has {heads} heads and {keys} keys in layout 'bthd': if it is (B, H, T, D), pass layout='bhtd'"


def make_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    return_max_logits: bool = False,
    deterministic: bool | None = None,
    **keywords: Any,
) -> AttentionCall:
    """Validate the arguments of `attention` and build the call, its scheme resolved to tables and numbers."""
    if _is_autocast(q):
        q, k, v = (_lower(x) for x in (q, k, v))
        keywords["gate"] = _lower(keywords.get("gate"))
    return resolve(Unchecked(q, k, v, Arguments(**keywords), return_lse, return_max_logits, deterministic))


def run(call: AttentionCall, backend: Backend, features: Features | None = None) -> tuple[Tensor, Tensor | None]:
    """Run a call: the output, (B, H, Tq, Dv), and the natural log-sum-exp, (B, H, Tq), if it is returned.

    features: the caller's tensors, in whose layout the output is then.
    """
    result: tuple[Tensor, Tensor | None] = _outside_autocast(call.q, _run, call, backend, features)
    return result


def _outside_autocast(q: Tensor, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function whose q, k and v are cast by now: all that it computes in float32 must stay there."""
    if not _is_autocast(q):
        return function(*arguments)
    with torch.autocast(q.device.type, enabled=False):
        return function(*arguments)


def _run(call: AttentionCall, backend: Backend, features: Features | None = None) -> tuple[Tensor, Tensor | None]:
    kernels = KERNELS.get(backend.name)
    if kernels is None:
        out, lse = LIBRARIES[backend.name].attend(call)
    else:
        if call.sinks is not None:
            call = call._replace(sinks=call.sinks.float())
        is_eager = is_plain_eager(*tensors_of(call), *rope_tables(call))
        if is_eager and features is not None and autograd.are_of_call(features, call):
            return autograd.attend(call, kernels, features)
        out, lse = (autograd.attend if is_eager else operator.attend)(call, kernels)
    return (out if features is None else from_bhtd(out, features.layout)), lse


def _run_with_max_logits(call: AttentionCall, backend: Backend) -> tuple[Tensor, Tensor | None, Tensor]:
    """Run a call as `_run` does, and return each head's largest scaled score too."""
    kernels = KERNELS.get(backend.name)
    if kernels is None:
        with torch.no_grad():
            max_logits = reference.max_logits(call)
        return *_run(call, backend), max_logits
    if is_plain_eager(*tensors_of(call)):
        row_logits = operator.empty_row_logits(call)
        out, lse = _run(call._replace(row_logits=row_logits), backend)
    else:
        if call.sinks is not None:
            call = call._replace(sinks=call.sinks.float())
        out, lse, row_logits = operator.attend_with_row_logits(call, kernels)
    if row_logits.numel() == 0:
        return out, lse, row_logits.new_full(row_logits.shape[1:2], -torch.inf)
    return out, lse, row_logits.detach().amax((0, 2))


_AUTOCAST_DEVICES = tuple(kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind))


def _is_autocast(q: Tensor) -> bool:
    if not isinstance(q, Tensor):
        return False
    kind = q.device.type
    return kind in _AUTOCAST_DEVICES and torch.is_autocast_enabled(kind)


def lower_for_autocast(q: Tensor, *others: Any) -> tuple[Any, ...]:
    """Cast q and others as `attention` does where autocast is on for q."""
    return tuple(_lower(x) for x in (q, *others)) if _is_autocast(q) else (q, *others)


def _lower(x: Any) -> Any:
    """Cast as autocast does for PyTorch's scaled_dot_product_attention."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64 or x.dtype.itemsize == 1:
        return x  # float8 is of quantised pages
    return x.to(torch.get_autocast_dtype(x.device.type))
