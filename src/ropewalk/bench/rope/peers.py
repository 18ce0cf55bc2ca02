"""Other libraries' rotations, found by import and called as their own documentation says.

A model computes gathered tables and positions once for all layers: they are prepared outside the timed call, in the
peers' favour.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ropewalk.bench.core.peers import Library
from ropewalk.bench.rope.cases import Case, Inputs
from ropewalk.bench.rope.gate import NORM_EPS, Rotation, View, norm_plainly, rotate_plainly

Adapt = TypeVar("Adapt", bound=Callable[..., Any])


@dataclass(frozen=True)
class Peer(Library):
    """One implementation of the rotation or of attention."""

    why_not: Callable[..., str | None]  # of a case, and of the rotation's mode: why it is not supported
    build: Callable[..., Any]  # of a case and its inputs, and of whether a rotation is differentiated: the call
    rerope: bool = False  # of attention: whether it supports ReRoPE, and nothing else


class Peers(dict[str, Peer]):
    """The peers of a benchmark by name; and its limits by name: a reason against a case, and whether it holds."""

    def __init__(self, **limits: tuple[str, Callable[..., bool]]) -> None:
        super().__init__()
        self.limits = limits

    def add(
        self, name: str, module: str, distribution: str, needs_gpu: bool, *, limits: str = "", rerope: bool = False
    ) -> Callable[[Adapt], Adapt]:
        """Decorate an adapter, which builds a call of an imported module; the first limit that holds is the reason."""

        def why_not(*case: Any) -> str | None:
            found = (self.limits[limit] for limit in limits.split())
            return next((reason.format(*case) for reason, holds in found if holds(*case)), None)

        def add(adapt: Adapt) -> Adapt:
            def build(*arguments: Any) -> Any:
                return adapt(importlib.import_module(module), *arguments)

            self[name] = Peer(name, module, distribution, needs_gpu, why_not, build, rerope)
            return adapt

        return add


def compile_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function as one graph of fixed shapes."""
    return torch.compile(function, fullgraph=True, dynamic=False)


def keep_buffers() -> None:
    """Let compiled backwards that are timed run many times over one graph: it must not give its buffers away."""
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False


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


def _liger_overwrites(case: Case, mode: str) -> bool:
    # It makes q and k (B, T, H, D) in memory, by a copy if need be, and overwrites what it then has.
    copies = case.layout == "bhtd" and min(case.tokens, case.q_heads, case.k_heads) > 1
    return not (case.inplace or copies)


PEERS = Peers(
    backward=("no backward", lambda case, mode: mode == "bwd"),
    overwrites=("it overwrites q and k", lambda case, mode: not case.inplace),
    new=("it returns new tensors", lambda case, mode: case.inplace),
    compiled=("a compiled rotation returns new tensors", lambda case, mode: case.inplace),
    cache=("it returns q and writes k to a cache", lambda case, mode: case.inplace),
    half=("it pairs features half-split", lambda case, mode: case.interleaved),
    llama=("transformers' Llama pairs features half-split", lambda case, mode: case.interleaved),
    whole=("it rotates the whole head", lambda case, mode: case.width != case.head_dim),
    positions=("no positions per token", lambda case, mode: case.positions == "tokens"),
    major=("token-major tensors alone", lambda case, mode: case.layout == "bhtd"),
    dtype=("float16 and bfloat16 alone", lambda case, mode: case.dtype not in ("float16", "bfloat16")),
    dims=("head dims 64, 128, 256 and 512", lambda case, mode: case.head_dim not in (64, 128, 256, 512)),
    wide=("head dims up to 256", lambda case, mode: case.head_dim > 256),
    eights=("head and rotary dim must be multiples of 8", lambda case, mode: case.head_dim % 8 or case.width % 8),
    copies=(
        "it copies tensors that are not (B, T, H, D) in memory",
        lambda case, _: case.inplace and case.layout == "bhtd",
    ),
    keeps=("it overwrites tensors that are (B, T, H, D) in memory", _liger_overwrites),
)
NORM_PEERS = Peers(
    norms=("norms alone", lambda case, mode: case.norm_offset is None),
    whole=("its rotation is of the whole head", lambda case, mode: case.width != case.head_dim),
)


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


def _start_compiling(differentiable: bool) -> None:
    # Past its limit of recompilations Dynamo would run the function eagerly; `fullgraph` would make that an error.
    torch.compiler.reset()
    if differentiable:
        keep_buffers()


@PEERS.add("compiled", "torch", "torch", False, limits="compiled")
def _compiled(lib: Any, case: Case, inputs: Inputs, grad: bool) -> Rotation:
    _start_compiling(grad)
    head_axis = -3 if case.layout == "bhtd" else -2
    indexed = inputs.positions is not None or bool(case.sequences)
    positions, cos, sin = inputs.token_positions, inputs.cos, inputs.sin

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        c, s = (cos[positions], sin[positions]) if indexed else (cos[: case.tokens], sin[: case.tokens])
        c, s = c.unsqueeze(head_axis), s.unsqueeze(head_axis)
        return rotate_plainly(q, c, s, case.interleaved), rotate_plainly(k, c, s, case.interleaved)

    return Rotation(compile_whole(rotate))


@PEERS.add("huggingface", "transformers.models.llama.modeling_llama", "transformers", False, limits="new llama whole")
def _huggingface(lib: Any, case: Case, inputs: Inputs, grad: bool) -> Rotation:
    cos, sin = (table.to(case.torch_dtype) for table in _token_tables(inputs))
    if case.layout == "thd":
        cos, sin = cos[0], sin[0]
    rotate, head_axis = lib.apply_rotary_pos_emb, 2 if case.layout == "bthd" else 1
    return Rotation(lambda q, k: rotate(q, k, cos, sin, unsqueeze_dim=head_axis))


@PEERS.add("liger_kernel", "liger_kernel.ops.rope", "liger_kernel", True, limits="half whole copies keeps")
def _liger(lib: Any, case: Case, inputs: Inputs, grad: bool) -> Rotation:
    cos, sin = _token_tables(inputs)
    differentiable, forward = lib.LigerRopeFunction, lib.rope_forward

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return differentiable.apply(q, k, cos, sin) if grad else forward(q, k, cos, sin)[:2]

    if case.layout == "thd":  # to (1, H, T, D)
        return Rotation(rotate, lambda x: x[None].transpose(1, 2), lambda x: x.transpose(1, 2)[0])
    return Rotation(rotate) if case.layout == "bhtd" else Rotation(rotate, _swap, _swap)


def _per_tensor(case: Case, apply: Callable[..., Tensor], *tables: Tensor, **options: Any) -> Rotation:
    """Build the calls of libraries that rotate one tensor a launch, (B, T, H, D) or packed."""
    views = (_swap, _swap) if case.layout == "bhtd" else ()
    return Rotation(lambda q, k: (apply(q, *tables, **options), apply(k, *tables, **options)), *views)


@PEERS.add("quack", "quack.rotary", "quack-kernels", True, limits="positions eights")
def _quack(lib: Any, case: Case, inputs: Inputs, grad: bool, no_offset: int | None = None) -> Rotation:
    """Build the calls of QuACK, whose arguments are flash-attn's."""
    return _per_tensor(
        *(case, lib.apply_rotary_emb if grad else lib.apply_rotary, inputs.cos, inputs.sin),
        seqlen_offsets=no_offset if inputs.positions is None else inputs.positions.int(),
        cu_seqlens=inputs.cu_seqlens,
        max_seqlen=max(case.sequences) if case.sequences else None,
        interleaved=case.interleaved,
        inplace=case.inplace,
    )


@PEERS.add("flash_attn", "flash_attn.ops.triton.rotary", "flash-attn", True, limits="positions wide")
def _flash_attn(lib: Any, case: Case, inputs: Inputs, grad: bool) -> Rotation:
    return _quack(importlib.import_module("flash_attn.layers.rotary") if grad else lib, case, inputs, grad, no_offset=0)


@PEERS.add("flashinfer", "flashinfer", "flashinfer-python", True, limits="backward dtype major dims")
def _flashinfer(lib: Any, case: Case, inputs: Inputs, grad: bool) -> Rotation:
    positions, table = inputs.token_positions.flatten().int(), torch.cat((inputs.cos, inputs.sin), -1)
    rotate, head_dim, is_neox = lib.apply_rope_with_cos_sin_cache, case.head_dim, not case.interleaved
    if case.inplace:
        overwrite = lib.apply_rope_with_cos_sin_cache_inplace
        return by_operator(overwrite, inputs, head_dim, is_neox, *_flat(case), positions=positions)
    return Rotation(lambda q, k: rotate(positions, q, k, head_dim, table, is_neox), *_flat(case))


@PEERS.add("vllm", "vllm._custom_ops", "vllm", True, limits="backward overwrites major")
def _vllm(lib: Any, case: Case, inputs: Inputs, grad: bool) -> Rotation:
    table = torch.cat((inputs.cos, inputs.sin), -1).to(
        case.torch_dtype
    )  # it computes in the table's dtype, which is q's
    other = {"table": table, "positions": inputs.token_positions.flatten()}
    operator = torch.ops._C.rotary_embedding  # there since `lib` is imported
    return by_operator(operator, inputs, case.head_dim, not case.interleaved, *_flat(case), **other)


@PEERS.add("xformers", "xformers.ops", "xformers", True, limits="backward cache whole major")
def _xformers(lib: Any, case: Case, inputs: Inputs, grad: bool) -> Rotation:
    """Build its one rotation, which also fills a cache: its time holds a copy of v that no other's holds."""
    masks = importlib.import_module("xformers.ops.fmha.attn_bias")
    # All tokens as one sequence with explicit positions: any positions can be said so.
    positions = inputs.token_positions.flatten()
    total, apply, theta, adjacents = positions.numel(), lib.rope_padded, case.base, case.interleaved
    bias = masks.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        q_seqlen=[total], kv_padding=total, kv_seqlen=[total], device=inputs.q.device
    )
    v, v_cache, k_cache = (inputs.k.new_zeros(1, total, case.k_heads, case.head_dim) for _ in range(3))

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return apply(q, k, v, k_cache, v_cache, bias, theta=theta, seqpos=positions, adjacents=adjacents), k_cache

    return Rotation(rotate, lambda x: x.view(1, total, -1, case.head_dim), _flat(case)[1])


_TE = "transformer_engine.pytorch.attention.rope"


@PEERS.add("transformer_engine", _TE, "transformer-engine", True, limits="new positions")
def _te(lib: Any, case: Case, inputs: Inputs, grad: bool) -> Rotation:
    # It takes angles, in float32, and takes their cosines in the kernel.
    index = torch.arange(inputs.cos.shape[0], device=inputs.q.device)
    angles = (index[:, None].double() * inputs.inv_freq).float()
    angles = angles.repeat_interleave(2, -1) if case.interleaved else torch.cat((angles, angles), -1)
    return _per_tensor(
        *(case, lib.apply_rotary_pos_emb, angles[:, None, None]),
        tensor_format="thd" if case.layout == "thd" else "bshd",
        start_positions=None if inputs.positions is None else inputs.positions.int(),
        interleaved=case.interleaved,
        fused=True,
        cu_seqlens=inputs.cu_seqlens,
    )


@NORM_PEERS.add("compiled", "torch", "torch", False, limits="norms")
def _compiled_norm(lib: Any, case: Case, inputs: Inputs, grad: bool) -> Rotation:
    _start_compiling(grad)
    eager = _eager_norm(lib, case, inputs, grad)
    return replace(eager, rotate=compile_whole(eager.rotate))


@NORM_PEERS.add("eager", "torch", "torch", False, limits="norms")
def _eager_norm(lib: Any, case: Case, inputs: Inputs, grad: bool) -> Rotation:
    q_weight, k_weight = weights = inputs.parameters()
    cos, sin = (table[: case.tokens, None].to(case.torch_dtype) for table in (inputs.cos, inputs.sin))

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return norm_plainly(q, q_weight, cos, sin, case), norm_plainly(k, k_weight, cos, sin, case)

    return Rotation(rotate, weights=weights)


@NORM_PEERS.add("liger_kernel", "liger_kernel.ops.rope", "liger_kernel", True, limits="whole norms")
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
