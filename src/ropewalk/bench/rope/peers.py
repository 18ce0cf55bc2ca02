"""Ours, and other libraries' rotations, found by import and called as their own documentation says.

A model computes gathered tables and positions once for all layers: they are computed before, in the peers' favour.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ropewalk.bench.core.peers import Library
from ropewalk.bench.rope.cases import Case, Inputs
from ropewalk.bench.rope.gate import NORM_EPS, Rotation, View, norm_plainly, rotate_plainly
from ropewalk.ops.rope.api import apply_rope
from ropewalk.ops.rope.backends import IMPLEMENTATIONS, NORM_IMPLEMENTATIONS
from ropewalk.ops.rope.norm import QKNorm
from ropewalk.ops.rope.rotary_embedding import rotary_embedding


@dataclass(frozen=True)
class Peer(Library):
    """One implementation of the rotation or of attention."""

    why_not: Callable[..., str | None]  # of a case, and of the rotation's mode: why it is not supported
    build: Callable[..., Any]  # of a case and its inputs, and of whether a rotation is differentiated: the call
    rerope: bool = False  # of attention: whether it supports ReRoPE, and nothing else
    eight_bits: bool = False  # of attention: whether its products are of 8 bits


def peers_of(limits: Callable[..., dict[str, Any]], *rows: tuple[Any, ...]) -> dict[str, Peer]:
    """Make peers of rows: name, module, distribution, whether it needs a GPU, names of limits, and an adapter.

    `limits` has by name the reason against a case, or a false value; the first that holds counts. The adapter builds
    the call, of the imported module before its other arguments. A row of attention may end with "rerope" or "8-bit".
    """

    def make(name: str, module: str, distribution: str, gpu: bool, named: str, adapt: Any, kind: str = "") -> Peer:
        def why_not(*case: Any) -> str | None:
            known = limits(*case)
            return next((known[limit] for limit in named.split() if known[limit]), None)

        def build(*arguments: Any) -> Any:
            return adapt(importlib.import_module(module), *arguments)

        return Peer(name, module, distribution, gpu, why_not, build, kind == "rerope", kind == "8-bit")

    return {row[0]: make(*row) for row in rows}


def compile_whole(function: Callable[..., Any], again: bool = False) -> Callable[..., Any]:
    """Compile a function as one graph of fixed shapes; its backward may run `again` over one forward."""
    import torch._functorch.config

    if again:
        torch._functorch.config.donated_buffer = False
    return torch.compile(function, fullgraph=True, dynamic=False)


def by_operator(
    operator: Callable[..., object], inputs: Inputs, head_dim: int, is_neox: bool, *views: View, **other: Tensor
) -> Rotation:
    """Build a call with the signature of vLLM's operator, with a position for every token."""
    positions = other.get("positions", inputs.token_positions)
    table = other.get("table", torch.cat((inputs.cos, inputs.sin), -1))

    def overwrite(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        operator(positions, q, k, head_dim, table, is_neox)
        return q, k

    return Rotation(overwrite, *views or (lambda x: x.flatten(-2), lambda x: x.unflatten(-1, (-1, head_dim))))


def _swap(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _flat(case: Case) -> tuple[View, View]:
    """Return the views of q and k as (tokens, H·D), and back."""
    tokens = case.shape(1)[:-2]
    return lambda x: x.view(math.prod(tokens), -1), lambda x: x.view(*tokens, -1, case.head_dim)


def _token_tables(inputs: Inputs) -> list[Tensor]:
    """Return each token's row of cos and sin, twice side by side, (B or 1, T, R), as transformers makes them."""
    positions = torch.atleast_2d(inputs.token_positions)
    if inputs.positions is None:
        positions = positions[:1]  # all batch rows are alike
    return [torch.cat((table[positions], table[positions]), -1) for table in (inputs.cos, inputs.sin)]


def _compiled(lib: Any, case: Case, inputs: Inputs, grad: bool) -> Rotation:
    torch.compiler.reset()  # past its limit of recompilations Dynamo would run the function eagerly
    head_axis = -3 if case.layout == "bhtd" else -2
    indexed = inputs.positions is not None or bool(case.sequences)
    positions, cos, sin = inputs.token_positions, inputs.cos, inputs.sin

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        c, s = (cos[positions], sin[positions]) if indexed else (cos[: case.tokens], sin[: case.tokens])
        c, s = c.unsqueeze(head_axis), s.unsqueeze(head_axis)
        return rotate_plainly(q, c, s, case.interleaved), rotate_plainly(k, c, s, case.interleaved)

    return Rotation(compile_whole(rotate, grad))


def _huggingface(lib: Any, case: Case, inputs: Inputs, grad: bool) -> Rotation:
    tables = [table.to(case.torch_dtype) for table in _token_tables(inputs)]
    cos, sin = (table[0] for table in tables) if case.layout == "thd" else tables
    rotate, head_axis = lib.apply_rotary_pos_emb, 2 if case.layout == "bthd" else 1
    return Rotation(lambda q, k: rotate(q, k, cos, sin, unsqueeze_dim=head_axis))


def _liger(lib: Any, case: Case, inputs: Inputs, grad: bool) -> Rotation:
    cos, sin = _token_tables(inputs)
    rotate = lib.LigerRopeFunction.apply if grad else lib.rope_forward
    packed: tuple[View, View] = (lambda x: x[None].transpose(1, 2), lambda x: x.transpose(1, 2)[0])  # (1, H, T, D)
    views = {"thd": packed, "bthd": (_swap, _swap), "bhtd": ()}[case.layout]
    return Rotation(lambda q, k: rotate(q, k, cos, sin)[:2], *views)


def _per_tensor(case: Case, inputs: Inputs, apply: Callable[..., Tensor], *tables: Tensor, **more: Any) -> Rotation:
    """Build the calls of libraries that rotate one tensor a launch, (B, T, H, D) or packed."""
    views = (_swap, _swap) if case.layout == "bhtd" else ()
    options = {"cu_seqlens": inputs.cu_seqlens, "interleaved": case.interleaved, **more}
    return Rotation(lambda q, k: (apply(q, *tables, **options), apply(k, *tables, **options)), *views)


def _quack(lib: Any, case: Case, inputs: Inputs, grad: bool, no_offset: int | None = None) -> Rotation:
    """Build the calls of QuACK, whose arguments are flash-attn's."""
    apply, tables = lib.apply_rotary_emb if grad else lib.apply_rotary, (inputs.cos, inputs.sin)
    offsets = no_offset if inputs.positions is None else inputs.positions.int()
    options = {"seqlen_offsets": offsets, "max_seqlen": max(case.sequences, default=None), "inplace": case.inplace}
    return _per_tensor(case, inputs, apply, *tables, **options)


def _flash_attn(lib: Any, case: Case, inputs: Inputs, grad: bool) -> Rotation:
    return _quack(importlib.import_module("flash_attn.layers.rotary") if grad else lib, case, inputs, grad, no_offset=0)


def _flashinfer(lib: Any, case: Case, inputs: Inputs, grad: bool) -> Rotation:
    positions, table = inputs.token_positions.flatten().int(), torch.cat((inputs.cos, inputs.sin), -1)
    rotate, head_dim, is_neox = lib.apply_rope_with_cos_sin_cache, case.head_dim, not case.interleaved
    if case.inplace:
        overwrite = lib.apply_rope_with_cos_sin_cache_inplace
        return by_operator(overwrite, inputs, head_dim, is_neox, *_flat(case), positions=positions)
    return Rotation(lambda q, k: rotate(positions, q, k, head_dim, table, is_neox), *_flat(case))


def _vllm(lib: Any, case: Case, inputs: Inputs, grad: bool) -> Rotation:
    operator = torch.ops._C.rotary_embedding  # there since `lib` is imported; it computes in the dtype of q and table
    table = torch.cat((inputs.cos, inputs.sin), -1).to(case.torch_dtype)
    other = {"table": table, "positions": inputs.token_positions.flatten()}
    return by_operator(operator, inputs, case.head_dim, not case.interleaved, *_flat(case), **other)


def _xformers(lib: Any, case: Case, inputs: Inputs, grad: bool) -> Rotation:
    """Build its one rotation, which also fills a cache: its time holds a copy of v that no other's holds."""
    # All tokens are one sequence with explicit positions: any positions can be said so.
    positions = inputs.token_positions.flatten()
    total, apply, theta, adjacents = positions.numel(), lib.rope_padded, case.base, case.interleaved
    mask = importlib.import_module("xformers.ops.fmha.attn_bias").BlockDiagonalCausalWithOffsetPaddedKeysMask
    bias = mask.from_seqlens(q_seqlen=[total], kv_padding=total, kv_seqlen=[total], device=inputs.q.device)
    v, v_cache, k_cache = (inputs.k.new_zeros(1, total, case.k_heads, case.head_dim) for _ in range(3))

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return apply(q, k, v, k_cache, v_cache, bias, theta=theta, seqpos=positions, adjacents=adjacents), k_cache

    return Rotation(rotate, lambda x: x.view(1, total, -1, case.head_dim), _flat(case)[1])


def _te(lib: Any, case: Case, inputs: Inputs, grad: bool) -> Rotation:
    # It takes angles, in float32, and takes their cosines in the kernel.
    index = torch.arange(inputs.cos.shape[0], device=inputs.q.device)
    angles = (index[:, None].double() * inputs.inv_freq).float()
    angles = angles.repeat_interleave(2, -1) if case.interleaved else torch.cat((angles, angles), -1)
    starts = None if inputs.positions is None else inputs.positions.int()
    options = {"tensor_format": "thd" if case.layout == "thd" else "bshd", "start_positions": starts, "fused": True}
    return _per_tensor(case, inputs, lib.apply_rotary_pos_emb, angles[:, None, None], **options)


def _norm(compiled: bool, lib: Any, case: Case, inputs: Inputs, grad: bool) -> Rotation:
    q_weight, k_weight = weights = inputs.parameters()
    cos, sin = (table[: case.tokens, None].to(case.torch_dtype) for table in (inputs.cos, inputs.sin))

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return norm_plainly(q, q_weight, cos, sin, case), norm_plainly(k, k_weight, cos, sin, case)

    if compiled:
        torch.compiler.reset()
    return Rotation(compile_whole(rotate, grad) if compiled else rotate, weights=weights)


def _liger_norm(lib: Any, case: Case, inputs: Inputs, grad: bool) -> Rotation:
    """Build Liger's functions, one after another: each norm has a launch, and the rotation overwrites their results."""
    norm = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    rope, weights, (cos, sin) = lib.LigerRopeFunction, inputs.parameters(), _token_tables(inputs)
    options = NORM_EPS, case.norm_offset, "gemma" if case.norm_offset else "llama", False

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        normed = (norm.apply(x, weight, *options) for x, weight in zip((q, k), weights, strict=True))
        rotated = rope.apply(*map(_swap, normed), cos, sin)
        return _swap(rotated[0]), _swap(rotated[1])

    return Rotation(rotate, weights=weights)


def _ours(impl: str, lib: Any, case: Case, inputs: Inputs, grad: bool) -> Rotation:
    cos, sin, cu_seqlens, axes = inputs.cos, inputs.sin, inputs.cu_seqlens, inputs.axes
    positions, offsets = (None, inputs.positions) if case.positions == "offsets" else (inputs.positions, None)
    layout, interleaved, inplace = case.layout, case.interleaved, case.inplace
    weights = inputs.parameters(grad)
    norm = None if case.norm_offset is None else QKNorm(weights[0], weights[1], NORM_EPS, case.norm_offset)

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rope(
            q,
            k,
            cos,
            sin,
            positions=positions,
            offsets=offsets,
            cu_seqlens=cu_seqlens,
            layout=layout,
            interleaved=interleaved,
            inplace=inplace,
            axes=axes,
            norm=norm,
            impl=impl,
        )

    return Rotation(rotate, weights=weights)


def _our_operator(lib: Any, case: Case, inputs: Inputs, grad: bool) -> Rotation:
    return by_operator(rotary_embedding, inputs, case.head_dim, not case.interleaved)


def _limits(case: Case, mode: str) -> dict[str, Any]:
    in_place, swapped, dim = case.inplace, case.layout == "bhtd", case.head_dim
    # Liger makes q and k (B, T, H, D) in memory, by a copy if need be, and overwrites what it then has.
    copies = swapped and min(case.tokens, case.q_heads, case.k_heads) > 1
    return {
        "backward": mode == "bwd" and "no backward",
        "overwrites": not in_place and "it overwrites q and k",
        "new": in_place and "it returns new tensors",
        "compiled": in_place and "a compiled rotation returns new tensors",
        "cache": in_place and "it returns q and writes k to a cache",
        "half": case.interleaved and "it pairs features half-split",
        "llama": case.interleaved and "transformers' Llama pairs features half-split",
        "whole": case.width != dim and "it rotates the whole head",
        "positions": case.positions == "tokens" and "no positions per token",
        "major": swapped and "token-major tensors alone",
        "dtype": case.dtype not in ("float16", "bfloat16") and "float16 and bfloat16 alone",
        "dims": dim not in (64, 128, 256, 512) and "head dims 64, 128, 256 and 512",
        "wide": dim > 256 and "head dims up to 256",
        "eights": (dim % 8 or case.width % 8) and "head and rotary dim must be multiples of 8",
        "copies": in_place and swapped and "it copies tensors that are not (B, T, H, D) in memory",
        "keeps": not in_place and not copies and "it overwrites tensors that are (B, T, H, D) in memory",
        "norms": case.norm_offset is None and "norms alone",
        "part": case.width != dim and "its rotation is of the whole head",
        "plain": (case.norm_offset is not None or case.positions == "axes") and "no norm, and no axes",
    }


_PACKAGE = ("ropewalk", "ropewalk", False)
_LLAMA, _TE = "transformers.models.llama.modeling_llama", "transformer_engine.pytorch.attention.rope"
PEERS = peers_of(
    _limits,
    ("compiled", "torch", "torch", False, "compiled", _compiled),
    ("huggingface", _LLAMA, "transformers", False, "new llama whole", _huggingface),
    ("liger_kernel", "liger_kernel.ops.rope", "liger_kernel", True, "half whole copies keeps", _liger),
    ("quack", "quack.rotary", "quack-kernels", True, "positions eights", _quack),
    ("flash_attn", "flash_attn.ops.triton.rotary", "flash-attn", True, "positions wide", _flash_attn),
    ("flashinfer", "flashinfer", "flashinfer-python", True, "backward dtype major dims", _flashinfer),
    ("vllm", "vllm._custom_ops", "vllm", True, "backward overwrites major", _vllm),
    ("xformers", "xformers.ops", "xformers", True, "backward cache whole major", _xformers),
    ("transformer_engine", _TE, "transformer-engine", True, "new positions", _te),
)
NORM_PEERS = peers_of(
    _limits,
    ("compiled", "torch", "torch", False, "norms", partial(_norm, True)),
    ("eager", "torch", "torch", False, "norms", partial(_norm, False)),
    ("liger_kernel", "liger_kernel.ops.rope", "liger_kernel", True, "part norms", _liger_norm),
)
OURS = peers_of(
    _limits,
    ("rotary_embedding", *_PACKAGE, "plain backward overwrites major", _our_operator),
    *((x, *_PACKAGE, "" if x in NORM_IMPLEMENTATIONS else "plain", partial(_ours, x)) for x in IMPLEMENTATIONS),
)
