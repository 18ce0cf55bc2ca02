"""What attention's benchmark measures: ours, with positions in the kernel and in front of it, and the peers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ropewalk.bench.attention_cases import SCHEMES, AttentionCase, AttentionInputs
from ropewalk.bench.attention_gate import Attend
from ropewalk.bench.attention_peers import AttentionPeer, Rotate, compile_rope
from ropewalk.bench.attention_records import label
from ropewalk.ops.attention.api import attention, explain_choice
from ropewalk.ops.rope.api import apply_rope

AUTO = "auto"  # impl=None
OUTSIDE = "apply_rope"  # our rotation, then attention without positions
COMPILED = "compiled rope"  # PyTorch's, for the peers

# Whether there is a backward -> which implementation serves the case (ours alone can say), and why none does.
Serves = Callable[[bool], tuple[str | None, str | None]]


@dataclass(frozen=True)
class Candidate:
    """Something to be measured."""

    impl: str
    position: str  # as records name it
    scheme: str  # of `SCHEMES`, by which the result is judged
    kind: str  # "ours" or "peer"
    serves: Serves
    build: Callable[[], Attend]

    @property
    def label(self) -> str:
        """What records call it."""
        return label(self.impl, self.position)


def candidates_of(
    case: AttentionCase, inputs: AttentionInputs, impls: Sequence[str], peers: Sequence[AttentionPeer]
) -> dict[str, list[Candidate]]:
    """By mode, what is measured of a case. A peer is built once for all modes: what it compiles, it compiles once."""
    rotate = functools.cache(functools.partial(compile_rope, inputs))
    kernels = [_ours(case, inputs, impl, "none") for impl in impls]
    in_kernel = [_ours(case, inputs, impl, "rope") for impl in (AUTO, *impls)]
    outside = [_ours(case, inputs, impl, OUTSIDE) for impl in impls]
    schemes = [_ours(case, inputs, impl, name) for impl in impls for name in ("alibi", "exposb", "exposb-decay")]
    peers_alone, peers_with_rope = [], []
    for peer in peers:
        serves = _peer_serves(peer, case)
        build = functools.cache(functools.partial(peer.build, case, inputs))
        peers_alone.append(Candidate(peer.name, "none", "none", "peer", serves, build))
        with_rope = functools.partial(_rotate_first, rotate, build)
        peers_with_rope.append(Candidate(peer.name, COMPILED, "rope", "peer", serves, with_rope))
    alone = [*kernels, *peers_alone]
    return {
        "fwd": alone,
        "bwd": alone,
        "train": [*in_kernel, *outside, *kernels, *peers_with_rope],
        "schemes-fwd": [*kernels, *schemes],
        "schemes-bwd": [*kernels, *schemes],
        "memory": in_kernel,
    }


def _ours(case: AttentionCase, inputs: AttentionInputs, impl: str, position: str) -> Candidate:
    scheme = "rope" if position == OUTSIDE else position
    keywords: dict[str, Any] = {
        "position": SCHEMES["none" if position == OUTSIDE else position](case.q_heads),
        "causal": case.causal,
        "key_lengths": inputs.key_lengths,
        "impl": None if impl == AUTO else impl,
    }

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if position == OUTSIDE:
            q, k = apply_rope(q, k, inputs.cos, inputs.sin)
        out: Tensor = attention(q, k, v, **keywords)
        return out

    def serves(backward: bool) -> tuple[str | None, str | None]:
        tensors = inputs.leaves() if backward else (inputs.q, inputs.k, inputs.v)
        try:
            return explain_choice(*tensors, **keywords).name, None
        except ValueError as error:
            return None, str(error)

    return Candidate(impl, position, scheme, "ours", serves, lambda: attend)


def _peer_serves(peer: AttentionPeer, case: AttentionCase) -> Serves:
    reason = peer.why_not(case)
    return lambda backward: (None, reason)


def _rotate_first(rotate: Callable[[], Rotate], build: Callable[[], Attend]) -> Attend:
    turn, core = rotate(), build()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = turn(q, k)
        return core(q, k, v)

    return attend
