"""The benchmark of the rotation: ours against the peers and against a copy of the same bytes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ropewalk.bench.core.load import Record, Row, variant_of
from ropewalk.bench.core.records import cpu_note
from ropewalk.bench.core.runner import Bench, Candidate, Rates, Right, new_row
from ropewalk.bench.core.summary import microseconds, number
from ropewalk.bench.core.timing import COPY, Call, peak_memory, time_graphs, time_host, time_rounds
from ropewalk.bench.rope.cases import CASES, MODES, NORM_CASES, SWEEP, Case, make_inputs
from ropewalk.bench.rope.gate import Gate
from ropewalk.bench.rope.peers import NORM_PEERS, OURS, PEERS, Peer
from ropewalk.ops.rope.backends import IMPLEMENTATIONS, why_not

MULTIPLY = "mul_"  # of one token's head by one, in place: what PyTorch's own simplest call costs the host
SMALL_BYTES = 64 << 20  # moved by a call whose launch matters as much as its work: it is timed in a CUDA graph too
CPU_ELEMENTS = 1 << 21  # of q and k, that a CPU rotates unless a case is named: all of them take about a minute
CPU_SECONDS = 0.5  # that a CPU times one mode for
ROUNDS = 100

_TITLES = {"fwd": "forward", "bwd": "backward", "decode": "forward"}


class RopeBench(Bench):
    name = "rope"
    cases = CASES
    modes = MODES
    impls = IMPLEMENTATIONS
    peers = PEERS
    columns = (
        ("GB/s", number("gb_per_s")),
        ("of copy", number("copy_ratio", ".3f")),
        ("graph, µs", microseconds("graph.p50")),
        ("host, µs", microseconds("host.median")),
        ("recording", microseconds("host_forward.median")),
        ("peak, MiB", number("peak_bytes", scale=2**20)),
    )

    @functools.cached_property
    def _ours(self) -> list[Peer]:
        reasons = {impl: why_not(impl, self.device) for impl in self.options.impls or IMPLEMENTATIONS}
        for impl in self.options.impls:
            if reasons[impl] is not None:
                raise ValueError(f"impl {impl!r} cannot be measured: {reasons[impl]}")
        chosen = [impl for impl, reason in reasons.items() if reason is None]
        return [OURS[name] for name in (*chosen, *(("rotary_embedding",) if "native" in chosen else ()))]

    @property
    def row_options(self) -> Mapping[str, object]:
        return {"impls": [ours.name for ours in self._ours], "rounds": self.options.rounds or ROUNDS}

    def is_too_large(self, case: Case) -> bool:
        return case.elements > CPU_ELEMENTS

    def label_of(self, case: Case) -> str:
        return f"{case.name} {variant_of(vars(case))}"

    def open(self, case: Case) -> None:
        """Make nothing: each mode has its own inputs and gate."""

    def candidates(self, case: Case, mode: str, opened: None) -> Iterator[Candidate]:
        """Yield ours, then the peers."""
        gate = Gate(case, make_inputs(case, self.device, self.options.seed), mode)
        for kind, known in (("ours", self._ours), ("peer", self.found)):
            for peer in known:
                check = functools.partial(gate.judge, peer.build)
                yield Candidate(peer.name, kind, check, reason=peer.why_not(case, mode))

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
            rows[name], xs, backward = row, (inputs.q, inputs.k), mode == "bwd"
            calls[name] = rotation.backward(xs, grads, case.inplace) if backward else rotation.forward(xs)
            if backward and not case.inplace:  # otherwise the forward cannot be repeated
                forwards[name] = rotation.forward(xs, recording=True)
        how: dict[str, Any] = {} if on_gpu else {"warmup": 1, "max_seconds": CPU_SECONDS}
        in_graphs = on_gpu and mode != "bwd" and case.bytes_of("fwd") <= SMALL_BYTES
        with torch.set_grad_enabled(mode == "bwd"):
            times = time_rounds(calls, device, rounds=self.options.rounds or ROUNDS, **how)
            graphs, failures = time_graphs(calls, device) if in_graphs else ({}, {})
            for name, call in calls.items():
                row = rows[name] = {**rows[name], "time": times[name]}
                if name != MULTIPLY:
                    row["gb_per_s"] = moved / times[name].p50 / 1e3
                    row["copy_ratio"] = times[COPY].p50 / times[name].p50
                for key, known in (("graph", graphs), ("graph_reason", failures)):
                    row |= {key: known[name]} if name in known else {}
                if on_gpu:
                    row["host"] = time_host(call, device)
                    if name in forwards:
                        row["host_forward"] = time_host(forwards[name], device)
                    row["peak_bytes"] = peak_memory(call, device)
        yield from rows.values()

    @classmethod
    def draw(cls, record: Record, path: Path, names: Mapping[str, str] | None = None) -> bool:
        """Draw the time of a copy over each implementation's time."""
        from ropewalk.bench.core.figure import draw_dots

        def fractions(group: Sequence[Row]) -> list[float | None]:
            """Return the copy's time over each row's, in a graph where the copy was timed in one."""
            copy: Row = next((row for row in group if row["impl"] == COPY), {})
            key = "graph" if "graph" in copy else "time"
            known = [key in copy and key in row and row["kind"] != "anchor" for row in group]
            return [copy[key]["p50"] / row[key]["p50"] if one else None for row, one in zip(group, known, strict=True)]

        title = f"RoPE on {record.run['device']}: fraction of a copy's speed{cpu_note(record.run['device'])}"
        return draw_dots(record.of(cls.name), _TITLES, fractions, title=title, path=path, names=names)


class SweepBench(RopeBench):
    """One shape at many lengths."""

    cases = SWEEP


class NormBench(RopeBench):
    """The norm beside the rotation, and positions on three axes."""

    cases = NORM_CASES
    peers = NORM_PEERS
