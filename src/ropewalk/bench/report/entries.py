"""The rows of records in one form, whichever the benchmark, with derived values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ropewalk.bench.attention.cases import AttentionCase, direction_of
from ropewalk.bench.attention.rows import AttentionRow
from ropewalk.bench.core.load import BenchRecord
from ropewalk.bench.core.timing import COPY, HostTime, Quantiles
from ropewalk.bench.report.load import read_bench_record
from ropewalk.bench.rope.cases import Case
from ropewalk.bench.rope.rows import RopeRow

_ROTATION_FLOPS = 3  # an element: of a pair's six, two products and a sum for each


@dataclass(frozen=True)
class Entry:
    """One row of a record. Times are in microseconds."""

    record: str
    benchmark: str  # "rope" or "attention"
    case: str
    shape: str
    variant: str  # rotation: pairing, place and what else is not usual; attention: the mask
    dtype: str
    mode: str  # rotation: the direction
    protocol: str | None
    impl: str
    label: str  # the implementation, and where positions come in
    kind: str
    status: str
    reason: str | None
    time: Quantiles | None
    graph: Quantiles | None
    gb_per_s: float | None
    tflops: float | None
    share: float | None  # of the roof: of a copy's bandwidth, or of a matrix product's rate
    roof: str  # "copy" or "matrix product"
    host: HostTime | None
    host_forward: HostTime | None
    peak_bytes: int | None
    floor_bytes: int | None
    error: float | None
    error_budget: float | None
    flops: float
    bytes_moved: float  # at least: each tensor read or written once
    tokens: int
    family: tuple[object, ...]  # the case, but for its name and its length
    position: str = "none"
    yardstick: str | None = None
    served_by: str | None = None
    ratios: Mapping[str, float] = field(default_factory=dict)

    @property
    def group(self) -> tuple[object, ...]:
        """The fields that compared rows have in common."""
        return self.record, self.benchmark, self.case, self.shape, self.variant, self.dtype, self.mode, self.protocol

    @property
    def what(self) -> str:
        """The case in words."""
        return ", ".join(part for part in (self.shape, self.dtype, self.variant) if part)


@dataclass(frozen=True)
class Source:
    """A record file as the page shows it."""

    name: str  # of its own on the page
    run: dict[str, Any]
    entries: list[Entry]

    @property
    def device(self) -> str:
        """The measured device."""
        return str(self.run["device"])

    @property
    def date(self) -> str:
        """When the run began, in a form that sorts."""
        return str(self.run["date"])

    @property
    def on_cpu(self) -> bool:
        """Whether times are those of calls on a CPU."""
        return self.device.startswith("CPU")

    @property
    def machine(self) -> str:
        """The device, and by what machines with the same one differ. Rows of two machines are never compared."""
        run = self.run
        parts = [self.device]
        if run.get("driver_version"):
            parts.append(f"driver {run['driver_version']}")
        if run.get("power_limit"):
            parts.append(f"power limit {run['power_limit']}")
        return ", ".join([*parts, *(str(run[key]) for key in ("system",) if run.get(key))])


def read_sources(paths: Sequence[Path]) -> list[Source]:
    """Read records; the error says which file is none."""
    sources: list[Source] = []
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} is not a file, but must be a record of ropewalk bench")
        try:
            record = read_bench_record(path)
        except ValueError as error:
            raise ValueError(f"{path} is not a record of ropewalk bench rope, attention or all: {error}") from error
        for key in ("device", "date"):
            if not isinstance(record.run.get(key), str):
                raise ValueError(f"{path}: the line about the run has no {key!r}")
        name, used = path.stem, {source.name for source in sources}
        number = 1
        while name in used:
            number += 1
            name = f"{path.stem} ({number})"
        sources.append(Source(name, record.run, list(_entries(name, record))))
    return sources


def _entries(name: str, record: BenchRecord) -> Iterator[Entry]:
    for rotation in record.of(RopeRow):
        yield _rotation(name, rotation)
    for attention in record.of(AttentionRow):
        yield _attention(name, attention, record.run)


def _rotation(record: str, row: RopeRow) -> Entry:
    case = row.case
    rotated = case.batch * case.tokens * (case.q_heads + case.k_heads) * case.width
    return Entry(
        record=record,
        benchmark="rope",
        case=case.name,
        shape=f"B{case.batch} T{case.tokens} H{case.q_heads}/{case.k_heads} D{case.head_dim}",
        variant=describe_variant(case),
        dtype=case.dtype,
        mode=row.direction,
        protocol=None,
        impl=row.impl,
        label=row.impl,
        kind=row.kind,
        status=row.status,
        reason=row.reason if row.reason is not None else row.graph_reason,
        time=row.time,
        graph=row.graph,
        gb_per_s=row.gb_per_s,
        tflops=None,
        share=row.copy_ratio,
        roof="copy",
        host=row.host,
        host_forward=row.host_forward,
        peak_bytes=row.peak_bytes,
        floor_bytes=None,
        error=row.error,
        error_budget=row.error_budget,
        flops=_ROTATION_FLOPS * rotated,
        bytes_moved=case.bytes_moved,
        tokens=case.tokens,
        family=(case.batch, case.q_heads, case.k_heads, case.head_dim, case.base, case.positions, case.sequences),
    )


def describe_variant(case: Case) -> str:
    """Describe the pairing, the place of the result, and anything unusual in a rotation."""
    parts = [case.variant.replace("/", ", ")]
    if case.rotary_dim is not None:
        parts.append(f"R{case.rotary_dim}")
    if case.layout != "bthd":
        parts.append(case.layout)
    if case.sequences:
        parts.append(f"{len(case.sequences)} packed sequences")
    if case.positions != "index":
        parts.append(f"positions by {case.positions}")
    return ", ".join(parts)


def _attention(record: str, row: AttentionRow, run: Mapping[str, Any]) -> Entry:
    case, seed = row.case, int(run.get("seed", 0))
    shape, mask = _describe_attention(case)
    bound_by_bytes = case.form == "cache" or row.impl == COPY
    return Entry(
        record=record,
        benchmark="attention",
        case=case.name,
        shape=shape,
        variant=mask,
        dtype=case.dtype,
        mode=row.mode,
        protocol=row.protocol,
        impl=row.impl,
        label=row.label,
        kind=row.kind,
        status=row.status,
        reason=row.reason,
        time=row.time,
        graph=None,
        gb_per_s=row.gb_per_s,
        tflops=row.tflops,
        share=_share_of_copy(row, run) if bound_by_bytes else row.matrix_ratio,
        roof="copy" if bound_by_bytes else "matrix product",
        host=row.host,
        host_forward=None,
        peak_bytes=row.peak_bytes,
        floor_bytes=row.floor_bytes,
        error=row.error,
        error_budget=row.error_budget,
        flops=case.flops(row.mode, seed),
        bytes_moved=_attention_bytes(case, row.mode, seed),
        tokens=case.tokens,
        family=(case.q_heads, case.k_heads, shape.partition(" H")[2], mask, case.batch * case.tokens, case.form),
        position=row.position,
        yardstick=row.yardstick,
        served_by=row.served_by,
        ratios=row.ratios or {},
    )


def _describe_attention(case: AttentionCase) -> tuple[str, str]:
    """Return the shape, and the mask with anything unusual."""
    shape, _, rest = case.description.partition(f", {case.dtype}")
    return shape, rest.removeprefix(", ")


def _attention_bytes(case: AttentionCase, mode: str, seed: int) -> float:
    """Count q, k, v and out forward; them and their gradients backward; a cache's keys and values."""
    if case.form == "cache":
        return case.cache_bytes(seed)
    lengths = case.draw_lengths(seed) if case.form == "packed" else None
    tokens = case.batch * case.tokens if lengths is None else int(lengths.sum())
    once = tokens * (case.q_heads + case.k_heads) * (case.head_dim + case.out_head_dim) * case.torch_dtype.itemsize
    return once * {"fwd": 1, "bwd": 2, "train": 3}[direction_of(mode)]


def _share_of_copy(row: AttentionRow, run: Mapping[str, Any]) -> float | None:
    if row.time is None:
        return None
    if row.impl == COPY:
        return 1.0
    of_anchor = (row.ratios or {}).get(COPY)
    if of_anchor is not None:
        return of_anchor
    copy = rates(run).get("copy_gb_per_s")
    return row.gb_per_s / copy if copy and row.gb_per_s is not None else None


def rates(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the device's rates of copies and products, if the run has them."""
    found: Mapping[str, Any] = run.get("rates") or {}
    return found
