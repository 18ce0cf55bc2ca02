"""The benchmark of the host's part of eager calls, as a user makes them.

A burst of calls is enqueued on an idle GPU and timed on the host alone. The multiple of PyTorch's simplest call,
`x.mul_(1.0)`, carries over to other hosts better than microseconds do: it takes turns with the candidates.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from ropewalk.bench.attention.candidates import AUTO, AttentionCandidate, candidates_of, our_candidate
from ropewalk.bench.attention.cases import REROPE, AttentionCase, AttentionInputs, direction_of, make_attention_inputs
from ropewalk.bench.attention.gate import AttentionGate
from ropewalk.bench.attention.peers import ATTENTION_PEERS, BACKENDS
from ropewalk.bench.core.gate import Verdict
from ropewalk.bench.core.load import Row
from ropewalk.bench.core.options import Options
from ropewalk.bench.core.runner import Bench, Candidate, Rates, Right, new_row
from ropewalk.bench.core.summary import microseconds, number
from ropewalk.bench.core.timing import MIN_ROUNDS, at_parts, interleave
from ropewalk.bench.rope.bench import MULTIPLY
from ropewalk.bench.rope.cases import Case, make_inputs
from ropewalk.bench.rope.gate import Gate, Rotation
from ropewalk.bench.rope.peers import Peer, by_operator
from ropewalk.ops.attention import backends
from ropewalk.ops.rope.api import apply_rope

IMPLS = {"cuda": ("triton", "gluon", "flash", "sdpa"), "cpu": ("sdpa", "reference")}  # unless some are named
CPU_FLOPS = 2e8  # of a forward that a CPU runs unless a case is named
CALLS = {"cuda": 16, "cpu": 2}  # of a burst; on a GPU hundreds of launches at most, where its queue holds a thousand
SECONDS = {"cuda": 10.0, "cpu": 1.0}  # of the rounds of one mode
ROUNDS = 100
_WARMUP = 2  # rounds that are not recorded
_SPREAD = {"least": "least", "median": "median", "95 %": "p95"}  # of a burst's times, and their keys in records
ROTATE = "rotate-fwd"  # `apply_rope` alone, on q and k of the case
# A mode is a setting of attention with one of these, or `ROTATE`.
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
# Inputs, their gate, and the candidates of the benchmark of attention by its modes.
Opened = tuple[AttentionInputs, AttentionGate, Mapping[str, Sequence[AttentionCandidate]]]


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


class HostBench(Bench):
    name = "host"
    cases = CASES
    modes = MODES
    impls = tuple(backends.BACKENDS)
    peers = HOST_PEERS
    columns = (
        *((f"{name}, µs", microseconds(f"host.{key}")) for name, key in _SPREAD.items()),
        ("× mul_", number("multiple.median", ".2f")),
        *((part, microseconds(f"{part}.median")) for part in ("forward", "backward")),
    )

    def __init__(self, options: Options, device: torch.device, console: Console) -> None:
        self.rounds = ROUNDS if options.rounds is None else options.rounds
        self._impls = list(options.impls or IMPLS[device.type])
        if self.rounds < MIN_ROUNDS:
            raise ValueError(f"rounds is {self.rounds}, but must be at least {MIN_ROUNDS}")
        super().__init__(options, device, console)
        if device.type == "cpu":
            console.print("warning: on a CPU a call's time includes its arithmetic", style="yellow", highlight=False)

    @property
    def row_options(self) -> Mapping[str, object]:
        return {"impls": self._impls, "rounds": self.rounds}

    def is_too_large(self, case: AttentionCase) -> bool:
        return case.flops("fwd") > CPU_FLOPS

    def open(self, case: AttentionCase) -> Opened:
        inputs = make_attention_inputs(case, self.device, self.options.seed)
        return inputs, AttentionGate(case, inputs), candidates_of(case, inputs, (AUTO, *self._impls), self.found)

    def candidates(self, case: AttentionCase, mode: str, opened: Opened) -> Iterator[Candidate]:
        """Yield ours, then the peers; one that has no adapter with the mode's setting is there to say so."""
        inputs, gate, found = opened
        if mode == ROTATE:
            yield from rotations_of(case, self.device, self.options.seed)
            return
        if case.form == "cache":
            chosen = [*{one.position + one.impl: one for one in found["decode"]}.values()]
        else:
            setting = mode.rpartition("-")[0]
            chosen = [our_candidate(case, inputs, impl, setting) for impl in (AUTO, *self._impls)]
            reason = f"the benchmark has no adapter of it with {setting}"
            missing: dict[str, Any] = {"position": setting, "choose": lambda backward: (None, reason)}
            peers = (x for x in found["train" if setting == "rope" else "fwd"] if x.kind == "peer")
            chosen += peers if setting in ("none", "rope") else [replace(peer, **missing) for peer in peers]
        for candidate in chosen:
            plain = candidate.for_mode(mode, gate)
            yield replace(plain, check=functools.partial(_check, candidate, gate, direction_of(mode) == "train"))

    def time(self, case: AttentionCase, mode: str, right: Right, rates: Rates) -> Iterator[Row]:
        """Time those that are right in turns with `mul_`."""
        simplest = Timed(functools.partial(torch.ones(64, device=self.device).mul_, 1.0))
        right = {MULTIPLY: (new_row(case, mode, MULTIPLY, "anchor"), simplest), **right}
        calls, seconds = CALLS[self.device.type], SECONDS[self.device.type]

        def one_round(order: Sequence[str]) -> dict[str, dict[str, float]]:
            return {name: time_burst(right[name][1], self.device, calls) for name in order}

        # A rotation's inputs say if it records.
        with torch.set_grad_enabled(mode == ROTATE or direction_of(mode) == "train"):
            samples = interleave(right, one_round, warmup=_WARMUP, rounds=self.rounds, max_seconds=seconds)
        unit = _spread([burst["host"] for burst in samples[MULTIPLY]])["median"]
        for name, bursts in samples.items():
            parts = {part: _spread([burst[part] for burst in bursts]) for part in bursts[0]}
            multiple = {key: value / unit for key, value in parts["host"].items()}
            row = {**right[name][0], "host": parts.pop("host"), "multiple": multiple}
            yield {**row, "calls": calls, "bursts": len(bursts), **parts}


def _spread(microseconds: Sequence[float]) -> dict[str, float]:
    return dict(zip(_SPREAD.values(), at_parts(microseconds, 0.0, 0.5, 0.95), strict=True))


def time_burst(timed: Timed, device: torch.device, calls: int) -> dict[str, float]:
    """Time a burst of calls on an idle device: `calls` must be too few to fill the launch queue.

    Returns the microseconds of one call, "host", and where there is a backward those of its "forward" and "backward".
    One call goes before the clock starts: another candidate's burst has left the host's caches cold.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    forward, backward, now, in_forward = timed.forward, timed.backward, time.perf_counter_ns, 0
    with timed.context():
        if backward is None:
            forward()
            start = now()
            for _ in range(calls):
                forward()
            return {"host": (now() - start) / 1e3 / calls}
        backward(forward())
        start = now()
        for _ in range(calls):
            before = now()
            out = forward()
            in_forward += now() - before
            backward(out)
            del out
        total = now() - start
    parts = in_forward / 1e3 / calls, (total - in_forward) / 1e3 / calls
    return {"host": sum(parts), "forward": parts[0], "backward": parts[1]}


def _check(candidate: AttentionCandidate, gate: AttentionGate, trains: bool) -> tuple[Verdict, Timed]:
    attend, context = candidate.build(), CONTEXTS.get(candidate.impl, nullcontext)
    with context():
        verdict = gate.check(attend, candidate.setting, backward=trains, parameters=candidate.parameters)
    if not trains:
        return verdict, Timed(functools.partial(attend, *candidate.tensors()), context=context)
    leaves, grad = candidate.inputs.leaves(), candidate.inputs.grad
    wanted = (*leaves, *candidate.parameters)

    def backward(out: Tensor) -> object:
        return torch.autograd.grad(out, wanted, grad)

    return verdict, Timed(functools.partial(attend, *leaves), backward, context)
