"""The candidates of `apply_rope`'s host time: where its result goes, our operator, and complex multiplication."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ropewalk.bench.attention.cases import AttentionCase
from ropewalk.bench.core.gate import Verdict
from ropewalk.bench.core.runner import Candidate
from ropewalk.bench.host.timing import Timed
from ropewalk.bench.rope.bench import by_operator
from ropewalk.bench.rope.cases import Case, Inputs, make_inputs
from ropewalk.bench.rope.gate import Gate, Rotation
from ropewalk.ops.rope.api import apply_rope

RECORDING = "recording"  # out of place, for autograd


def rotations_of(case: AttentionCase, device: torch.device, seed: int) -> Iterator[Candidate]:
    """Make all rotations of a case's q and k."""
    plain = Case(case.name, case.batch, case.tokens, case.q_heads, case.k_heads, case.head_dim, case.dtype)
    in_place, inputs = replace(plain, inplace=True), make_inputs(plain, device, seed)

    def check(of: Case, build: Callable[[Inputs], Rotation], mode: str = "fwd") -> tuple[Verdict, Timed]:
        rotation = build(inputs)
        verdict = Gate(of, inputs, mode).check(rotation)
        q, k = (rotation.to_native(x.clone()).requires_grad_(mode == "bwd") for x in (inputs.q, inputs.k))
        return verdict, Timed(functools.partial(rotation.rotate, q, k))

    inside, outside = (functools.partial(_build, inplace=inplace) for inplace in (True, False))
    neighbours = replace(plain, interleaved=True)
    checks = {
        ("apply_rope", "in place"): functools.partial(check, in_place, inside),
        ("apply_rope", "out of place"): functools.partial(check, plain, outside),
        ("apply_rope", RECORDING): functools.partial(check, plain, outside, "bwd"),
        ("rotary_embedding", "in place"): functools.partial(check, in_place, _build_operator),
        ("complex", "out of place"): functools.partial(check, neighbours, _build_complex),
    }
    for (impl, position), one in checks.items():
        yield Candidate(impl, "anchor" if impl == "complex" else "ours", one, position)


def _build(inputs: Inputs, inplace: bool) -> Rotation:
    cos, sin = inputs.cos, inputs.sin
    return Rotation(lambda q, k: apply_rope(q, k, cos, sin, inplace=inplace))


def _build_operator(inputs: Inputs) -> Rotation:
    """Build the operator that vLLM calls."""
    return by_operator(torch.ops.ropewalk.rotary_embedding, inputs, inputs.q.shape[-1], True)


def _build_complex(inputs: Inputs) -> Rotation:
    """Build RoPE by PyTorch's complex numbers, in float32: pairs of neighbours times unit numbers."""
    units = torch.complex(inputs.cos, inputs.sin)[:, None]  # over heads

    def rotate(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * units).flatten(-2).to(x.dtype)

    return Rotation(lambda q, k: (rotate(q), rotate(k)))
