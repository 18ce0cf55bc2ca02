"""The benchmark of attention: our kernels against the peers, and position schemes against none.

Device times hold no time of the host (`ropewalk.bench.core.sustained` says how). A backward is timed alone, over one
recorded forward; "train" is from q, k and v to their gradients, with RoPE on the way. Beside some cases a yardstick is
timed in the same rounds: our kernels on another case, or a copy of as many bytes as must be read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ropewalk.bench.attention.candidates import COMPILED, AttentionCandidate, candidates_of, our_candidate
from ropewalk.bench.attention.cases import (
    ALIASES,
    CASES,
    EIGHT_BITS,
    MODES,
    AttentionCase,
    direction_of,
    make_attention_inputs,
)
from ropewalk.bench.attention.gate import AttentionGate
from ropewalk.bench.attention.peers import ATTENTION_PEERS
from ropewalk.bench.core.load import Record, Row
from ropewalk.bench.core.records import cpu_note
from ropewalk.bench.core.runner import Bench, Candidate, Rates, Right, new_row
from ropewalk.bench.core.summary import microseconds, number
from ropewalk.bench.core.sustained import PROTOCOLS, time_bursts
from ropewalk.bench.core.timing import COPY, Call, peak_memory, quantiles, ratios, time_host
from ropewalk.ops.attention.backends import BACKENDS

CPU_FLOPS = 1e9  # of a forward that a CPU runs unless a case is named
SMALL_FLOPS = 1e11  # of a forward whose launches matter as much as its work: the host's time is recorded too
_TITLES = {"fwd": "forward", "bwd": "backward", "train": "RoPE, training"}
# Gates by case, as a yardstick has its own; and candidates by mode.
_Opened = tuple[Mapping[str, AttentionGate], Mapping[str, Sequence[AttentionCandidate]]]


class AttentionBench(Bench):
    name = "attention"
    cases = CASES
    modes = MODES
    impls = tuple(BACKENDS)
    peers = ATTENTION_PEERS
    aliases = ALIASES
    protocols = tuple(PROTOCOLS)
    columns = (
        ("TFLOP/s", number("tflops")),
        ("GB/s", number("gb_per_s")),
        ("of matmul", number("matrix_ratio", ".2f")),
        ("host, µs", microseconds("host.median")),
        ("peak, MiB", number("peak_bytes", ".0f", 2**20)),
        ("floor, MiB", number("floor_bytes", ".0f", 2**20)),
    )

    @property
    def _impls(self) -> list[str]:
        return list(self.options.impls or (("triton",) if self.device.type == "cuda" else ("reference",)))

    @property
    def row_options(self) -> Mapping[str, object]:
        return {"impls": self._impls, "protocols": list(self.options.protocols), "rounds": self.options.rounds}

    @property
    def dtypes(self) -> Sequence[str]:
        return list(dict.fromkeys(case.dtype for case, _ in self.jobs))

    def is_too_large(self, case: AttentionCase) -> bool:
        return bool(case.modes) and case.flops("fwd") > CPU_FLOPS

    def modes_of(self, case: AttentionCase) -> list[str]:
        return [mode for mode in super().modes_of(case) if mode != "memory" or self.device.type == "cuda"]

    def open(self, case: AttentionCase) -> _Opened:
        """Make the inputs, the gates and the candidates, whose peers are built and compiled once for all modes."""
        inputs = make_attention_inputs(case, self.device, self.options.seed)
        gates, found = {case.name: AttentionGate(case, inputs)}, candidates_of(case, inputs, self._impls, self.found)
        if case.yardstick is not None:
            other = self.known[case.yardstick]
            inputs = make_attention_inputs(other, self.device, self.options.seed)
            gates[other.name] = AttentionGate(other, inputs)
            for mode, setting in (("fwd", "none"), ("bwd", "none"), ("train", "rope")):
                ours = (our_candidate(other, inputs, impl, setting) for impl in self._impls)
                found[mode] = [*found[mode], *(replace(one, kind="anchor") for one in ours)]
        return gates, found

    def candidates(self, case: AttentionCase, mode: str, opened: _Opened) -> Iterator[Candidate]:
        gates, found = opened
        return (candidate.for_mode(mode, gates[candidate.case.name]) for candidate in found[mode])

    def time(self, case: AttentionCase, mode: str, right: Right, rates: Rates) -> Iterator[Row]:
        """Time everything that is right against each other, by each protocol; or measure its bytes."""
        seed, device, rows = self.options.seed, self.device, {name: row for name, (row, _) in right.items()}
        if mode == "memory":
            for name, (_, (candidate, attend)) in right.items():
                inputs = candidate.inputs
                held = sum(x.nbytes for x in (inputs.q, inputs.k, inputs.v, inputs.grad))
                peak = held + peak_memory(candidate.call(mode, attend), device)
                yield {**rows[name], "peak_bytes": peak, "floor_bytes": case.training_bytes()}
            return
        read, measured = case.cache_bytes(seed) if case.form == "cache" else None, list[Row]()
        with torch.set_grad_enabled(direction_of(mode) != "fwd"):
            calls: dict[str, Call] = {name: one.call(mode, attend) for name, (_, (one, attend)) in right.items()}
            if device.type == "cuda" and case.flops("fwd", seed) < SMALL_FLOPS:
                for name, call in calls.items():
                    rows[name] = {**rows[name], "host": time_host(call, device, calls=8, repeats=10)}
            if read is not None:  # a copy reads half so many bytes, and writes the other half
                source = torch.randn(read // 4, device=device).bfloat16()
                calls[COPY] = functools.partial(torch.empty_like(source).copy_, source)
                rows[COPY] = new_row(case, mode, COPY, "anchor")
            both = mode in ("fwd", "bwd", EIGHT_BITS)
            protocols = self.options.protocols or (("hot", "cool") if both else ("hot",))
            for protocol in protocols if right else ():
                samples = time_bursts(calls, device, PROTOCOLS[protocol], rounds=self.options.rounds)
                for name, times in samples.items():
                    spread, of = quantiles(times), ratios(samples, name)
                    row = {**rows[name], "protocol": protocol, "time": spread, "rounds": len(times), "ratios": of}
                    if name in right:
                        row["tflops"] = right[name][1][0].case.flops(mode, seed) / spread.p50 / 1e6
                    if read is None:
                        row["matrix_ratio"] = row["tflops"] / rates["matmul_tflops"][case.dtype]
                    else:
                        row["gb_per_s"] = read / spread.p50 / 1e3
                    measured.append(row)
        yield from measured

    @classmethod
    def draw(cls, record: Record, path: Path, names: Mapping[str, str] | None = None) -> bool:
        """Draw TFLOP/s, hot, a panel for each of fwd, bwd and train; the latter with RoPE."""
        from ropewalk.bench.core.figure import draw_dots

        def rates(group: Sequence[Row]) -> list[float | None]:
            positions = ("rope", COMPILED) if group[0]["mode"] == "train" else ("none",)
            return [row.get("tflops") if row["position"] in positions else None for row in group]

        rows = [row for row in record.of(cls.name) if row.get("protocol") == "hot" and "yardstick" not in row]
        device = record.run["device"]
        title = f"Attention on {device}, hot: TFLOP/s{cpu_note(device)}"
        return draw_dots(rows, _TITLES, rates, title=title, path=path, names=names)
