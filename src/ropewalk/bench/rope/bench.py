"""The benchmark of the rotation: ours against the peers and against a copy of the same bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ropewalk.bench.core.gate import Verdict
from ropewalk.bench.core.load import Record, Row
from ropewalk.bench.core.records import cpu_note
from ropewalk.bench.core.runner import Bench, Candidate, Rates, Right, new_row
from ropewalk.bench.core.summary import microseconds, number
from ropewalk.bench.core.timing import COPY, Call, peak_memory, time_graphs, time_host, time_rounds
from ropewalk.bench.rope.cases import CASES, MODES, NORM_CASES, SWEEP, Case, Inputs, make_inputs
from ropewalk.bench.rope.gate import NORM_EPS, Gate, Rotation
from ropewalk.bench.rope.peers import NORM_PEERS, PEERS, Build, WhyNot
from ropewalk.ops.rope.api import apply_rope
from ropewalk.ops.rope.backends import IMPLEMENTATIONS, NORM_IMPLEMENTATIONS, why_not
from ropewalk.ops.rope.norm import QKNorm
from ropewalk.ops.rope.rotary_embedding import rotary_embedding

MULTIPLY = "mul_"  # of one token's head by one, in place: what PyTorch's own simplest call costs the host
SMALL_BYTES = 64 << 20  # moved by a call whose launch matters as much as its work: it is timed in a CUDA graph too
CPU_ELEMENTS = 1 << 21  # of q and k, that a CPU rotates unless a case is named: all of them take about a minute
CPU_SECONDS = 0.5  # that a CPU times one mode for
ROUNDS = 100

# A right rotation, and the inputs and gradients that it is timed on.
Checked = tuple[Rotation, Inputs, Sequence[Tensor]]


class RopeBench(Bench):
    """Rotations. Each mode has its own inputs and gate."""

    name = "rope"
    cases = CASES
    modes = MODES
    impls = IMPLEMENTATIONS
    peers = PEERS
    columns = (
        ("GB/s", number("gb_per_s", ".4g")),
        ("of copy", number("copy_ratio", ".3f")),
        ("graph, µs", microseconds("graph.p50")),
        ("host, µs", microseconds("host.median")),
        ("recording", microseconds("host_forward.median")),
        ("peak, MiB", number("peak_bytes", ".4g", 2**20)),
    )

    @functools.cached_property
    def _ours(self) -> dict[str, tuple[WhyNot, Build]]:
        for impl in self.options.impls:
            reason = why_not(impl, self.device)
            if reason is not None:
                raise ValueError(f"impl {impl!r} cannot be measured: {reason}")
        chosen = self.options.impls or [impl for impl in IMPLEMENTATIONS if why_not(impl, self.device) is None]
        ours: dict[str, tuple[WhyNot, Build]] = {
            impl: (functools.partial(_why_not, impl), functools.partial(_build, impl)) for impl in chosen
        }
        if "native" in chosen:
            ours["rotary_embedding"] = _rotary_embedding_why_not, build_rotary_embedding
        return ours

    @property
    def given(self) -> Mapping[str, object]:
        return {"impls": list(self._ours), "rounds": self.options.rounds or ROUNDS}

    def is_too_large(self, case: Case) -> bool:
        return case.elements > CPU_ELEMENTS

    def label_of(self, case: Case) -> str:
        """Name a case with its variant."""
        return f"{case.name} {case.variant}"

    def open(self, case: Case) -> None:
        """Make nothing: modes have nothing in common."""

    def candidates(self, case: Case, mode: str, opened: None) -> Iterator[Candidate]:
        """Yield ours, then the peers."""
        inputs = make_inputs(case, self.device, self.options.seed)
        gate = Gate(case, inputs, mode)
        peers = {peer.name: (peer.why_not, peer.build) for peer in self.found}
        for kind, known in (("ours", self._ours), ("peer", peers)):
            for name, (refuse, build) in known.items():
                check = functools.partial(_check, case, inputs, gate, build)
                yield Candidate(name, kind, check, reason=refuse(case, mode))

    def time(self, case: Case, mode: str, right: Right, rates: Rates) -> Iterator[Row]:
        """Time everything that is right, and a copy of the same bytes, against each other."""
        device, on_gpu = self.device, self.device.type == "cuda"
        moved = case.bytes_of(mode)
        source = torch.randn(moved // (2 * case.torch_dtype.itemsize), device=device).to(case.torch_dtype)
        copied = torch.empty_like(source)
        rows = {COPY: new_row(case, mode, COPY, "anchor")}
        calls: dict[str, Call] = {COPY: lambda: copied.copy_(source)}
        if mode == "decode":
            head = torch.ones(case.head_dim, device=device)
            rows[MULTIPLY] = new_row(case, mode, MULTIPLY, "anchor")
            calls[MULTIPLY] = lambda: head.mul_(1.0)
        forwards: dict[str, Call] = {}
        for name, (row, (rotation, inputs, grads)) in right.items():
            rows[name] = row
            if mode == "bwd":
                calls[name], forward = _backward_calls(case, inputs, grads, rotation)
                if forward is not None:
                    forwards[name] = forward
            else:
                native = (rotation.to_native(x) for x in (inputs.q, inputs.k))
                calls[name] = functools.partial(rotation.rotate, *native)
        rounds = self.options.rounds or ROUNDS
        with torch.set_grad_enabled(mode == "bwd"):
            if on_gpu:
                times = time_rounds(calls, device, rounds=rounds)
            else:
                times = time_rounds(calls, device, warmup=1, rounds=rounds, max_seconds=CPU_SECONDS)
            small = case.bytes_moved <= SMALL_BYTES and mode != "bwd"
            graphs, failures = time_graphs(calls, device) if on_gpu and small else ({}, {})
            measured = []
            for name, call in calls.items():
                row = {**rows[name], "time": times[name]}
                if name != MULTIPLY:
                    row["gb_per_s"] = moved / times[name].p50 / 1e3
                    row["copy_ratio"] = times[COPY].p50 / times[name].p50
                for key, found in (("graph", graphs), ("graph_reason", failures)):
                    if name in found:
                        row[key] = found[name]
                if on_gpu:
                    row["host"] = time_host(call, device)
                    if name in forwards:
                        row["host_forward"] = time_host(forwards[name], device)
                    row["peak_bytes"] = peak_memory(call, device)
                measured.append(row)
        yield from measured

    def draw(self, record: Record, path: Path) -> bool:
        """Draw bars of the time of a copy over each implementation's time."""
        from ropewalk.bench.core.figure import draw_bars

        device = record.run["device"]
        title = f"RoPE on {device}: speed of a copy of the same bytes reached{cpu_note(device)}"
        across = "fraction of the copy's speed"
        return draw_bars(record.of(self.name), MODES, _fractions, title=title, across=across, path=path)


class SweepBench(RopeBench):
    """One shape at many lengths."""

    cases = SWEEP


class NormBench(RopeBench):
    """The norm beside the rotation, and positions on three axes."""

    cases = NORM_CASES
    peers = NORM_PEERS


def _fractions(group: Sequence[Row]) -> list[float | None]:
    """Return the copy's time over each row's, in a graph where the copy was timed in one."""
    copy = next((row for row in group if row["impl"] == COPY), {})
    key = "graph" if "graph" in copy else "time"
    return [
        copy[key]["p50"] / row[key]["p50"] if key in copy and key in row and row["kind"] != "anchor" else None
        for row in group
    ]


def _check(case: Case, inputs: Inputs, gate: Gate, build: Build) -> tuple[Verdict, Checked]:
    rotation = build(case, inputs, gate.backward)
    verdict = gate.check(rotation)
    if gate.backward and verdict.complaint is None:
        backward, _ = _backward_calls(case, inputs, [grad.clone() for grad in gate.grads], rotation)
        for _ in range(2):  # not every backward can run again over one forward
            backward()
    return verdict, (rotation, inputs, gate.grads)


def _why_not(impl: str, case: Case, mode: str) -> str | None:
    """Say why an implementation does not support a case: norms and axes have the same ones."""
    is_special = case.norm_offset is not None or case.positions == "axes"
    return "no norm, and no axes" if is_special and impl not in NORM_IMPLEMENTATIONS else None


def _rotary_embedding_why_not(case: Case, mode: str) -> str | None:
    if case.norm_offset is not None or case.positions == "axes":
        return "no norm, and no axes"
    if mode == "bwd":
        return "no backward"
    if not case.inplace:
        return "it overwrites q and k"
    return "token-major tensors alone" if case.layout == "bhtd" else None


def build_rotary_embedding(case: Case, inputs: Inputs, differentiable: bool) -> Rotation:
    """Build our version of vLLM's operator, with a position for every token."""
    return by_operator(rotary_embedding, inputs, case.head_dim, not case.interleaved)


def by_operator(operator: Callable[..., object], inputs: Inputs, head_dim: int, is_neox: bool) -> Rotation:
    """Build a call with the signature of vLLM's operator."""
    table, positions = torch.cat((inputs.cos, inputs.sin), -1), inputs.token_positions

    def overwrite(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        operator(positions, q, k, head_dim, table, is_neox)
        return q, k

    return Rotation(overwrite, lambda x: x.flatten(-2), lambda x: x.unflatten(-1, (-1, head_dim)))


def _build(impl: str, case: Case, inputs: Inputs, differentiable: bool) -> Rotation:
    """Build our rotation of a case by the implementation `impl`."""
    cos, sin, cu_seqlens, axes = inputs.cos, inputs.sin, inputs.cu_seqlens, inputs.axes
    positions, offsets = (None, inputs.positions) if case.positions == "offsets" else (inputs.positions, None)
    layout, interleaved, inplace = case.layout, case.interleaved, case.inplace
    weights = tuple(weight.detach().clone().requires_grad_(differentiable) for weight in inputs.weights)
    norm = None
    if case.norm_offset is not None:
        norm = QKNorm(weights[0], weights[1], eps=NORM_EPS, offset=case.norm_offset)

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


def _backward_calls(
    case: Case, inputs: Inputs, grads: Sequence[Tensor], rotation: Rotation
) -> tuple[Call, Call | None]:
    """Make the backward of one rotation, and the forward that records it if it can be repeated: out of place."""
    backward = rotation.prepare_backward(inputs.q, inputs.k, case.inplace)
    call = functools.partial(backward, *(rotation.to_native(grad) for grad in grads))
    if case.inplace:
        return call, None
    leaves = [rotation.to_native(x).detach().requires_grad_() for x in (inputs.q, inputs.k)]
    return call, functools.partial(rotation.rotate, *leaves)
