"""The benchmark of the rotation: ours against the peers and against a copy of the same bytes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ropewalk.bench.core.load import Record, Row, variant_of
from ropewalk.bench.core.records import cpu_note
from ropewalk.bench.core.runner import Bench, Candidate, Rates, Right, new_row
from ropewalk.bench.core.summary import microseconds, number
from ropewalk.bench.core.timing import COPY, Call, peak_memory, time_graphs, time_host, time_rounds
from ropewalk.bench.rope.cases import CASES, MODES, NORM_CASES, SWEEP, Case, Inputs, make_inputs
from ropewalk.bench.rope.gate import NORM_EPS, Gate, Rotation
from ropewalk.bench.rope.peers import NORM_PEERS, PEERS, Peer, Peers, by_operator
from ropewalk.ops.rope.api import apply_rope
from ropewalk.ops.rope.backends import IMPLEMENTATIONS, NORM_IMPLEMENTATIONS, why_not
from ropewalk.ops.rope.norm import QKNorm
from ropewalk.ops.rope.rotary_embedding import rotary_embedding

MULTIPLY = "mul_"  # of one token's head by one, in place: what PyTorch's own simplest call costs the host
SMALL_BYTES = 64 << 20  # moved by a call whose launch matters as much as its work: it is timed in a CUDA graph too
CPU_ELEMENTS = 1 << 21  # of q and k, that a CPU rotates unless a case is named: all of them take about a minute
CPU_SECONDS = 0.5  # that a CPU times one mode for
ROUNDS = 100


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
    def _ours(self) -> list[Peer]:
        for impl in self.options.impls:
            reason = why_not(impl, self.device)
            if reason is not None:
                raise ValueError(f"impl {impl!r} cannot be measured: {reason}")
        chosen = self.options.impls or [impl for impl in IMPLEMENTATIONS if why_not(impl, self.device) is None]
        return [OURS[name] for name in (*chosen, *(("rotary_embedding",) if "native" in chosen else ()))]

    @property
    def given(self) -> Mapping[str, object]:
        return {"impls": [ours.name for ours in self._ours], "rounds": self.options.rounds or ROUNDS}

    def is_too_large(self, case: Case) -> bool:
        return case.elements > CPU_ELEMENTS

    def label_of(self, case: Case) -> str:
        """Name a case with its variant."""
        return f"{case.name} {variant_of(vars(case))}"

    def open(self, case: Case) -> None:
        """Make nothing: modes have nothing in common."""

    def candidates(self, case: Case, mode: str, opened: None) -> Iterator[Candidate]:
        """Yield ours, then the peers."""
        inputs = make_inputs(case, self.device, self.options.seed)
        gate = Gate(case, inputs, mode)
        for kind, known in (("ours", self._ours), ("peer", self.found)):
            for peer in known:
                check, reason = functools.partial(gate.judge, peer.build), peer.why_not(case, mode)
                yield Candidate(peer.name, kind, check, reason=reason)

    def time(self, case: Case, mode: str, right: Right, rates: Rates) -> Iterator[Row]:
        """Time everything that is right, and a copy of the same bytes, against each other."""
        device, on_gpu, moved = self.device, self.device.type == "cuda", case.bytes_of(mode)
        source = torch.randn(moved // (2 * case.torch_dtype.itemsize), device=device).to(case.torch_dtype)
        copied, head = torch.empty_like(source), torch.ones(case.head_dim, device=device)
        calls: dict[str, Call] = {COPY: lambda: copied.copy_(source)}
        if mode == "decode":
            calls[MULTIPLY] = lambda: head.mul_(1.0)
        rows = {name: new_row(case, mode, name, "anchor") for name in calls}
        forwards: dict[str, Call] = {}
        for name, (row, (rotation, inputs, grads)) in right.items():
            rows[name], xs = row, (inputs.q, inputs.k)
            if mode != "bwd":
                calls[name] = rotation.forward(xs)
            else:
                calls[name] = rotation.backward(xs, grads, inplace=case.inplace)
                if not case.inplace:  # otherwise the forward cannot be repeated
                    forwards[name] = rotation.forward(xs, recording=True)
        with torch.set_grad_enabled(mode == "bwd"):
            how: dict[str, Any] = {} if on_gpu else {"warmup": 1, "max_seconds": CPU_SECONDS}
            times = time_rounds(calls, device, rounds=self.options.rounds or ROUNDS, **how)
            small = case.bytes_of("fwd") <= SMALL_BYTES and mode != "bwd"
            graphs, failures = time_graphs(calls, device) if on_gpu and small else ({}, {})
            for name, call in calls.items():
                row = rows[name] = {**rows[name], "time": times[name]}
                if name != MULTIPLY:
                    row["gb_per_s"] = moved / times[name].p50 / 1e3
                    row["copy_ratio"] = times[COPY].p50 / times[name].p50
                if name in graphs:
                    row["graph"] = graphs[name]
                if name in failures:
                    row["graph_reason"] = failures[name]
                if on_gpu:
                    row["host"] = time_host(call, device)
                    if name in forwards:
                        row["host_forward"] = time_host(forwards[name], device)
                    row["peak_bytes"] = peak_memory(call, device)
        yield from rows.values()

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


def _build(impl: str, lib: Any, case: Case, inputs: Inputs, grad: bool) -> Rotation:
    cos, sin, cu_seqlens, axes = inputs.cos, inputs.sin, inputs.cu_seqlens, inputs.axes
    positions, offsets = (None, inputs.positions) if case.positions == "offsets" else (inputs.positions, None)
    layout, interleaved, inplace = case.layout, case.interleaved, case.inplace
    weights, norm = inputs.parameters(grad), None
    if case.norm_offset is not None:
        q_weight, k_weight = weights
        norm = QKNorm(q_weight, k_weight, NORM_EPS, case.norm_offset)

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


def _build_operator(lib: Any, case: Case, inputs: Inputs, grad: bool) -> Rotation:
    return by_operator(rotary_embedding, inputs, case.head_dim, not case.interleaved)


_PACKAGE = ("ropewalk", "ropewalk", False)
OURS = Peers(
    special=("no norm, and no axes", lambda case, mode: case.norm_offset is not None or case.positions == "axes"),
    **PEERS.limits,
)
OURS.add("rotary_embedding", *_PACKAGE, limits="special backward overwrites major")(_build_operator)
for _impl in IMPLEMENTATIONS:
    _limits = "" if _impl in NORM_IMPLEMENTATIONS else "special"
    OURS.add(_impl, *_PACKAGE, limits=_limits)(functools.partial(_build, _impl))
