"""Other libraries' rotations, found by import and called as their own documentation says.

Each adapter has the reason why a case is not supported. A model computes gathered tables and positions once for all
layers: they are prepared outside the timed call, in the peers' favour.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ropewalk.bench.core.peers import Library
from ropewalk.bench.rope.cases import Case, Inputs
from ropewalk.bench.rope.gate import NORM_EPS, Rotation, norm_plainly, rotate_plainly

# case, mode: why it is not supported, or None. case, inputs, whether autograd is needed: the rotation.
WhyNot = Callable[[Case, str], str | None]
Build = Callable[[Case, Inputs, bool], Rotation]


@dataclass(frozen=True)
class Peer(Library):
    """One other implementation of the rotation."""

    why_not: WhyNot
    build: Build


def _first(*reasons: tuple[bool, str]) -> str | None:
    """Return the text of the first reason that holds."""
    return next((text for holds, text in reasons if holds), None)


def _to_bthd(case: Case) -> tuple[Callable[[Tensor], Tensor], ...]:
    """Return the views from the case's layout to (B, T, H, D) and back; none where it is that layout."""
    if case.layout == "bhtd":
        return (lambda x: x.transpose(1, 2), lambda x: x.transpose(1, 2))
    if case.layout == "thd":
        return (lambda x: x.unsqueeze(0), lambda x: x.squeeze(0))
    return ()


def _token_tables(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return each token's row of cos and sin, (B or 1, T, R/2), as transformers makes them for all layers."""
    positions = inputs.token_positions
    positions = positions[None] if positions.ndim == 1 else positions
    if inputs.positions is None:
        positions = positions[:1]  # all batch rows are alike
    return inputs.cos[positions], inputs.sin[positions]


def _prepare_compiler(differentiable: bool) -> None:
    import torch._functorch.config

    # Past its limit of recompilations Dynamo would run the function eagerly; `fullgraph` would make that an error.
    torch.compiler.reset()
    if differentiable:
        # A backward that is timed runs many times over one graph, so it must not give its buffers away.
        torch._functorch.config.donated_buffer = False


# Compiled PyTorch


def _compiled_why_not(case: Case, mode: str) -> str | None:
    return _first((case.inplace, "a compiled rotation returns new tensors"))


def _build_compiled(case: Case, inputs: Inputs, differentiable: bool) -> Rotation:
    _prepare_compiler(differentiable)
    head_axis = -3 if case.layout == "bhtd" else -2
    indexed = inputs.positions is not None or bool(case.sequences)
    positions, cos, sin = inputs.token_positions, inputs.cos, inputs.sin

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        c, s = (cos[positions], sin[positions]) if indexed else (cos[: case.tokens], sin[: case.tokens])
        c, s = c.unsqueeze(head_axis), s.unsqueeze(head_axis)
        return rotate_plainly(q, c, s, case.interleaved), rotate_plainly(k, c, s, case.interleaved)

    return Rotation(torch.compile(rotate, fullgraph=True, dynamic=False))


# transformers


def _huggingface_why_not(case: Case, mode: str) -> str | None:
    return _first(
        (case.inplace, "it returns new tensors"),
        (case.interleaved, "transformers' Llama pairs features half-split"),
        (case.width != case.head_dim, "it rotates the whole head"),
    )


def _build_huggingface(case: Case, inputs: Inputs, differentiable: bool) -> Rotation:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = (torch.cat((table, table), -1).to(case.torch_dtype) for table in _token_tables(inputs))
    head_axis = 1 if case.layout == "bhtd" else 2
    if case.layout == "thd":
        cos, sin, head_axis = cos[0], sin[0], 1

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=head_axis)

    return Rotation(rotate)


# Liger


def _liger_why_not(case: Case, mode: str) -> str | None:
    # It makes q and k (B, T, H, D) in memory, by a copy if need be, and overwrites what it then has.
    copied = case.layout == "bhtd" and min(case.tokens, case.q_heads, case.k_heads) > 1
    return _first(
        (case.interleaved, "it pairs features half-split"),
        (case.width != case.head_dim, "it rotates the whole head"),
        (case.inplace and case.layout == "bhtd", "it copies tensors that are not (B, T, H, D) in memory"),
        (not case.inplace and not copied, "it overwrites tensors that are (B, T, H, D) in memory"),
    )


def _build_liger(case: Case, inputs: Inputs, differentiable: bool) -> Rotation:
    from liger_kernel.ops.rope import LigerRopeFunction, rope_forward

    cos, sin = (torch.cat((table, table), -1) for table in _token_tables(inputs))

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return LigerRopeFunction.apply(q, k, cos, sin) if differentiable else rope_forward(q, k, cos, sin)[:2]

    if case.layout == "bhtd":
        return Rotation(rotate)
    if case.layout == "thd":  # to (1, H, T, D)
        return Rotation(rotate, lambda x: x[None].transpose(1, 2), lambda x: x.transpose(1, 2)[0])
    return Rotation(rotate, lambda x: x.transpose(1, 2), lambda x: x.transpose(1, 2))


# QuACK and flash-attn: one tensor a launch, the same arguments


def _per_tensor_why_not(case: Case, mode: str) -> str | None:
    return _first((case.positions == "tokens", "no positions per token"))


def _quack_why_not(case: Case, mode: str) -> str | None:
    aligned = case.head_dim % 8 == 0 and case.width % 8 == 0
    return _per_tensor_why_not(case, mode) or _first((not aligned, "head and rotary dim must be multiples of 8"))


def _flash_attn_why_not(case: Case, mode: str) -> str | None:
    return _per_tensor_why_not(case, mode) or _first((case.head_dim > 256, "head dims up to 256"))


def _build_per_tensor(apply: Callable[..., Tensor], no_offset: int | None, case: Case, inputs: Inputs) -> Rotation:
    offsets = no_offset if inputs.positions is None else inputs.positions.int()
    options: dict[str, Any] = {
        "seqlen_offsets": offsets,
        "cu_seqlens": inputs.cu_seqlens,
        "max_seqlen": case.longest if case.sequences else None,
        "interleaved": case.interleaved,
        "inplace": case.inplace,
    }
    cos, sin = inputs.cos, inputs.sin

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return apply(q, cos, sin, **options), apply(k, cos, sin, **options)

    return Rotation(rotate) if case.layout == "thd" else Rotation(rotate, *_to_bthd(case))


def _build_quack(case: Case, inputs: Inputs, differentiable: bool) -> Rotation:
    from quack.rotary import apply_rotary, apply_rotary_emb

    return _build_per_tensor(apply_rotary_emb if differentiable else apply_rotary, None, case, inputs)


def _build_flash_attn(case: Case, inputs: Inputs, differentiable: bool) -> Rotation:
    if differentiable:
        from flash_attn.layers.rotary import apply_rotary_emb as apply
    else:
        from flash_attn.ops.triton.rotary import apply_rotary as apply
    return _build_per_tensor(apply, 0, case, inputs)


# FlashInfer


def _flashinfer_why_not(case: Case, mode: str) -> str | None:
    return _first(
        (mode == "bwd", "no backward"),
        (case.dtype not in ("float16", "bfloat16"), "float16 and bfloat16 alone"),
        (case.layout == "bhtd", "token-major tensors alone"),
        (case.head_dim not in (64, 128, 256, 512), "head dims 64, 128, 256 and 512"),
    )


def _build_flashinfer(case: Case, inputs: Inputs, differentiable: bool) -> Rotation:
    import flashinfer

    table = torch.cat((inputs.cos, inputs.sin), -1)
    positions = inputs.token_positions.flatten().int()
    head_dim, is_neox = case.head_dim, not case.interleaved

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return flashinfer.apply_rope_with_cos_sin_cache(positions, q, k, head_dim, table, is_neox)

    def overwrite(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        flashinfer.apply_rope_with_cos_sin_cache_inplace(positions, q, k, head_dim, table, is_neox)
        return q, k

    token_axes = case.shape(1)[:-2]
    return Rotation(
        overwrite if case.inplace else rotate,
        lambda x: x.view(positions.numel(), -1),
        lambda x: x.view(*token_axes, -1, head_dim),
    )


# vLLM: it reads the table in q's dtype, and computes in it


def _vllm_why_not(case: Case, mode: str) -> str | None:
    return _first(
        (mode == "bwd", "no backward"),
        (not case.inplace, "it overwrites q and k"),
        (case.layout == "bhtd", "token-major tensors alone"),
    )


def _build_vllm(case: Case, inputs: Inputs, differentiable: bool) -> Rotation:
    importlib.import_module("vllm._custom_ops")  # loads the operators
    operator = torch.ops._C.rotary_embedding
    table = torch.cat((inputs.cos, inputs.sin), -1).to(case.torch_dtype)
    positions = inputs.token_positions.flatten()
    head_dim, is_neox = case.head_dim, not case.interleaved

    def overwrite(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        operator(positions, q, k, head_dim, table, is_neox)
        return q, k

    token_axes = case.shape(1)[:-2]
    return Rotation(
        overwrite, lambda x: x.view(positions.numel(), -1), lambda x: x.view(*token_axes, -1, case.head_dim)
    )


# xFormers: its one rotation also fills a cache with k and v, so its time holds a copy of v that no other's holds


def _xformers_why_not(case: Case, mode: str) -> str | None:
    return _first(
        (mode == "bwd", "no backward"),
        (case.inplace, "it returns q and writes k to a cache"),
        (case.width != case.head_dim, "it rotates the whole head"),
        (case.layout == "bhtd", "token-major tensors alone"),
    )


def _build_xformers(case: Case, inputs: Inputs, differentiable: bool) -> Rotation:
    from xformers.ops import rope_padded
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalWithOffsetPaddedKeysMask

    # All tokens as one sequence with explicit positions: any positions can be said so.
    positions = inputs.token_positions.flatten()
    total = positions.numel()
    bias = BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        q_seqlen=[total], kv_padding=total, kv_seqlen=[total], device=inputs.q.device
    )
    cache_shape = (1, total, case.k_heads, case.head_dim)
    v, v_cache, k_cache = (inputs.k.new_zeros(cache_shape) for _ in range(3))

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q_rotated = rope_padded(
            q, k, v, k_cache, v_cache, bias, theta=case.base, seqpos=positions, adjacents=case.interleaved
        )
        return q_rotated, k_cache

    token_axes = case.shape(1)[:-2]
    return Rotation(
        rotate, lambda x: x.view(1, total, -1, case.head_dim), lambda x: x.view(*token_axes, -1, case.head_dim)
    )


# Transformer Engine: it takes angles, in float32, and takes their cosines in the kernel


def _te_why_not(case: Case, mode: str) -> str | None:
    return _first(
        (case.inplace, "it returns new tensors"),
        (case.positions == "tokens", "no positions per token"),
    )


def _build_te(case: Case, inputs: Inputs, differentiable: bool) -> Rotation:
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    index = torch.arange(inputs.cos.shape[0], device=inputs.q.device)
    angles = (index[:, None].double() * inputs.inv_freq).float()
    angles = angles.repeat_interleave(2, -1) if case.interleaved else torch.cat((angles, angles), -1)
    options: dict[str, Any] = {
        "tensor_format": "thd" if case.layout == "thd" else "bshd",
        "start_positions": None if inputs.positions is None else inputs.positions.int(),
        "interleaved": case.interleaved,
        "fused": True,
        "cu_seqlens": inputs.cu_seqlens,
    }
    angles = angles[:, None, None]

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(q, angles, **options), apply_rotary_pos_emb(k, angles, **options)

    return Rotation(rotate) if case.layout == "thd" else Rotation(rotate, *_to_bthd(case))


# The norm beside the rotation: PyTorch as models write it, and Liger's two functions


def _norm_why_not(case: Case, mode: str) -> str | None:
    return "norms alone" if case.norm_offset is None else None


def _liger_norm_why_not(case: Case, mode: str) -> str | None:
    return "its rotation is of the whole head" if case.width != case.head_dim else _norm_why_not(case, mode)


def _parameters(inputs: Inputs) -> tuple[Tensor, ...]:
    return tuple(weight.detach().clone().requires_grad_() for weight in inputs.weights)


def _build_eager_norm(case: Case, inputs: Inputs, differentiable: bool) -> Rotation:
    weights = _parameters(inputs)
    cos, sin = (table[: case.tokens, None].to(case.torch_dtype) for table in (inputs.cos, inputs.sin))

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return norm_plainly(q, weights[0], cos, sin, case), norm_plainly(k, weights[1], cos, sin, case)

    return Rotation(rotate, weights=weights)


def _build_compiled_norm(case: Case, inputs: Inputs, differentiable: bool) -> Rotation:
    _prepare_compiler(differentiable)
    eager = _build_eager_norm(case, inputs, differentiable)
    return Rotation(torch.compile(eager.rotate, fullgraph=True, dynamic=False), weights=eager.weights)


def _build_liger_norm(case: Case, inputs: Inputs, differentiable: bool) -> Rotation:
    """Build Liger's functions, one after another: each norm has a launch, and the rotation overwrites their results."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction

    weights = _parameters(inputs)
    cos, sin = (torch.cat((table, table), -1)[None, : case.tokens] for table in (inputs.cos, inputs.sin))
    casting = "gemma" if case.norm_offset else "llama"

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        normed = (
            LigerRMSNormFunction.apply(x, weight, NORM_EPS, case.norm_offset, casting, False).transpose(1, 2)
            for x, weight in zip((q, k), weights, strict=True)
        )
        rotated = LigerRopeFunction.apply(*normed, cos, sin)
        return rotated[0].transpose(1, 2), rotated[1].transpose(1, 2)

    return Rotation(rotate, weights=weights)


def _by_name(*peers: Peer) -> dict[str, Peer]:
    return {peer.name: peer for peer in peers}


_LLAMA = "transformers.models.llama.modeling_llama"
_TE = "transformer_engine.pytorch.attention.rope"
PEERS = _by_name(
    Peer("compiled", "torch", "torch", False, _compiled_why_not, _build_compiled),
    Peer("huggingface", _LLAMA, "transformers", False, _huggingface_why_not, _build_huggingface),
    Peer("liger_kernel", "liger_kernel.ops.rope", "liger_kernel", True, _liger_why_not, _build_liger),
    Peer("quack", "quack.rotary", "quack-kernels", True, _quack_why_not, _build_quack),
    Peer("flash_attn", "flash_attn.ops.triton.rotary", "flash-attn", True, _flash_attn_why_not, _build_flash_attn),
    Peer("flashinfer", "flashinfer", "flashinfer-python", True, _flashinfer_why_not, _build_flashinfer),
    Peer("vllm", "vllm._custom_ops", "vllm", True, _vllm_why_not, _build_vllm),
    Peer("xformers", "xformers.ops", "xformers", True, _xformers_why_not, _build_xformers),
    Peer("transformer_engine", _TE, "transformer-engine", True, _te_why_not, _build_te),
)
NORM_PEERS = _by_name(
    Peer("compiled", "torch", "torch", False, _norm_why_not, _build_compiled_norm),
    Peer("eager", "torch", "torch", False, _norm_why_not, _build_eager_norm),
    Peer("liger_kernel", "liger_kernel.ops.rope", "liger_kernel", True, _liger_norm_why_not, _build_liger_norm),
)
