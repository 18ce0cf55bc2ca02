"""The cases of the host's benchmark: a small layer, BERT-base's, and decoding steps; and rotations of q and k alone.

A mode is a setting of attention with a direction, "fwd" without gradients or "train" for forward and backward in turns,
or `ROTATE`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from ropewalk.bench.attention.cases import REROPE, AttentionCase
from ropewalk.bench.attention.peers import ATTENTION_PEERS, BACKENDS
from ropewalk.bench.core.gate import Verdict
from ropewalk.bench.core.runner import Candidate
from ropewalk.bench.rope.cases import Case, make_inputs
from ropewalk.bench.rope.gate import Gate, Rotation
from ropewalk.bench.rope.peers import Peer, by_operator
from ropewalk.ops.rope.api import apply_rope

ROTATE = "rotate-fwd"  # `apply_rope` alone, on q and k of the case
DIRECTIONS = {"fwd": "without gradients", "train": "a training loop: forward, then torch.autograd.grad, in turns"}
_ROPE, _LAYER = (
    tuple(f"{setting}-{direction}" for setting in settings.split() for direction in DIRECTIONS)
    for settings in ("rope", "none rope dropout sinks alibi-learned")
)


def _layer(name: str, batch: int, tokens: int, heads: int) -> list[AttentionCase]:
    """Make the cases of a layer's shape: one for each kind of mask and layout."""
    dense = AttentionCase(name, batch, tokens, heads, heads, 64, modes=(*_LAYER, ROTATE))
    others: dict[str, dict[str, Any]] = {
        "lengths": {"padded": True},
        "packed": {"form": "packed", "shortest": tokens // 4},
        "window": {"causal": True, "window": tokens // 4},
        "rerope": {"causal": True, "far_window": tokens // 2, "modes": REROPE},
    }
    return [dense, *(replace(dense, name=f"{name}-{end}", **{"modes": _ROPE, **x}) for end, x in others.items())]


# One query for each row of a cache of 8192 rotated keys.
_DECODE = AttentionCase("decode-1", 1, 8192, 32, 8, 128, causal=True, modes=("rope-fwd",), form="cache", shortest=8192)
CASES: tuple[AttentionCase, ...] = (
    *_layer("small", 2, 128, 4),
    *_layer("bert", 32, 512, 12),
    _DECODE,
    *(replace(_DECODE, name=f"decode-{rows}", batch=rows, shortest=1024) for rows in (8, 64)),
)
MODES = {
    **{mode: DIRECTIONS[mode.rpartition("-")[2]] for case in CASES for mode in case.modes},
    ROTATE: "apply_rope in place, out of place and recording, rotary_embedding, complex numbers",
}
_SDPA, _CUDNN = ATTENTION_PEERS["sdpa_default"], ATTENTION_PEERS["cudnn"]
# SDPA is the same call by PyTorch's choice and by cuDNN. A model makes the choice once, outside of the call.
HOST_PEERS: dict[str, Peer] = {
    "sdpa_default": replace(_SDPA, why_not=_CUDNN.why_not),
    "cudnn": replace(_CUDNN, build=_SDPA.build),
    **{name: ATTENTION_PEERS[name] for name in ("flash_attn_4", "flex")},
}
CONTEXTS: dict[str, Any] = {"cudnn": functools.partial(sdpa_kernel, BACKENDS["cudnn"])}


class Timed(NamedTuple):
    """A call to time: a forward, and the backward that takes its result where there is one."""

    forward: Callable[[], Any]
    backward: Callable[[Any], object] | None = None
    context: Callable[[], AbstractContextManager[object]] = nullcontext  # of a burst, entered before the clock starts


def rotations_of(case: AttentionCase, device: torch.device, seed: int) -> Iterator[Candidate]:
    """Make all rotations of a case's q and k: by where the result goes, by our operator, and by complex numbers."""
    plain = Case(case.name, case.batch, case.tokens, case.q_heads, case.k_heads, case.head_dim, case.dtype)
    in_place, neighbours = replace(plain, inplace=True), replace(plain, interleaved=True)
    inputs = make_inputs(plain, device, seed)
    cos, sin = inputs.cos, inputs.sin

    def check(of: Case, build: Callable[[], Rotation], mode: str = "fwd") -> tuple[Verdict, Timed]:
        rotation = build()
        verdict = Gate(of, inputs, mode).check(rotation)
        q, k = (rotation.to_native(x.clone()).requires_grad_(mode == "bwd") for x in (inputs.q, inputs.k))
        return verdict, Timed(functools.partial(rotation.rotate, q, k))

    def ours(inplace: bool) -> Rotation:
        return Rotation(lambda q, k: apply_rope(q, k, cos, sin, inplace=inplace))

    def operator() -> Rotation:  # which vLLM calls
        return by_operator(torch.ops.ropewalk.rotary_embedding, inputs, plain.head_dim, True)

    def by_complex() -> Rotation:
        """Build RoPE by PyTorch's complex numbers, in float32: pairs of neighbours times unit numbers."""
        units = torch.complex(cos, sin)[:, None]  # over heads

        def rotate(x: Tensor) -> Tensor:
            pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * units).flatten(-2).to(x.dtype)

        return Rotation(lambda q, k: (rotate(q), rotate(k)))

    inside, outside = (functools.partial(ours, inplace) for inplace in (True, False))
    checks: tuple[tuple[Any, ...], ...] = (
        ("apply_rope", "in place", in_place, inside),
        ("apply_rope", "out of place", plain, outside),
        ("apply_rope", "recording", plain, outside, "bwd"),  # out of place, for autograd
        ("rotary_embedding", "in place", in_place, operator),
        ("complex", "out of place", neighbours, by_complex),
    )
    for impl, position, *arguments in checks:
        yield Candidate(impl, "anchor" if impl == "complex" else "ours", functools.partial(check, *arguments), position)
