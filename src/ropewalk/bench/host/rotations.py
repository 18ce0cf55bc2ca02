"""The candidates of `apply_rope`'s host time: where its result goes, our operator, and complex multiplication."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ropewalk.bench.attention.cases import AttentionCase
from ropewalk.bench.core.gate import Verdict
from ropewalk.bench.host.rows import HostRow
from ropewalk.bench.host.timing import Timed
from ropewalk.bench.rope.cases import Case, Inputs, make_inputs
from ropewalk.bench.rope.gate import Gate, Rotation
from ropewalk.ops.rope.api import apply_rope

RECORDING = "recording"  # out of place, for autograd


def rotations_of(
    case: AttentionCase, mode: str, device: torch.device, seed: int
) -> list[tuple[HostRow, Callable[[], tuple[Verdict, Timed]]]]:
    """Make the rows of all rotations of a case's q and k, with the checks of their results."""
    plain = Case(case.name, case.batch, case.tokens, case.q_heads, case.k_heads, case.head_dim, case.dtype)
    in_place, inputs = replace(plain, inplace=True), make_inputs(plain, device, seed)

    def row(impl: str, position: str, kind: str = "ours") -> HostRow:
        return HostRow(case, mode, impl, position, kind, "ok")

    def check(of: Case, build: Callable[[Inputs], Rotation], direction: str = "fwd") -> tuple[Verdict, Timed]:
        rotation = build(inputs)
        verdict = Gate(of, inputs, direction).check(rotation)
        q, k = (rotation.to_native(x.clone()).requires_grad_(direction == "bwd") for x in (inputs.q, inputs.k))
        return verdict, Timed(functools.partial(rotation.rotate, q, k))

    outside = functools.partial(_build, inplace=False)
    return [
        (row("apply_rope", "in place"), functools.partial(check, in_place, functools.partial(_build, inplace=True))),
        (row("apply_rope", "out of place"), functools.partial(check, plain, outside)),
        (row("apply_rope", RECORDING), functools.partial(check, plain, outside, "bwd")),
        (row("rotary_embedding", "in place"), functools.partial(check, in_place, _build_operator)),
        (
            row("complex", "out of place", "anchor"),
            functools.partial(check, replace(plain, interleaved=True), _build_complex),
        ),
    ]


def _build(inputs: Inputs, inplace: bool) -> Rotation:
    cos, sin = inputs.cos, inputs.sin

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        rotated: tuple[Tensor, Tensor] = apply_rope(q, k, cos, sin, inplace=inplace)
        return rotated

    return Rotation(rotate)


def _build_operator(inputs: Inputs) -> Rotation:
    """Build the operator that vLLM calls, with a position for every token."""
    operator, positions = torch.ops.ropewalk.rotary_embedding, inputs.token_positions
    table, head_dim = torch.cat((inputs.cos, inputs.sin), -1), inputs.q.shape[-1]

    def overwrite(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        operator(positions, q, k, head_dim, table, True)
        return q, k

    return Rotation(overwrite, lambda x: x.flatten(-2), lambda x: x.unflatten(-1, (-1, head_dim)))


def _build_complex(inputs: Inputs) -> Rotation:
    """Build RoPE by PyTorch's complex numbers, in float32: pairs of neighbours times unit numbers."""
    units = torch.complex(inputs.cos, inputs.sin)[:, None]  # over heads

    def rotate(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * units).flatten(-2).to(x.dtype)

    return Rotation(lambda q, k: (rotate(q), rotate(k)))
