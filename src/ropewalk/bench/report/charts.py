"""The data of the charts: a panel for each choice that the page offers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ropewalk.bench.core.timing import COPY
from ropewalk.bench.report.entries import Entry, Source, rates
from ropewalk.bench.report.formats import duration, ratio, share, significant, size
from ropewalk.bench.report.styles import style_of, styles_in
from ropewalk.bench.report.verdicts import title_of
from ropewalk.bench.rope.run import MULTIPLY

_FEWEST_LENGTHS = 3  # of one family of cases, to be drawn over the length
_KIND_ORDER = {"ours": 0, "peer": 1, "anchor": 2}

Panel = dict[str, Any]


def speed_panels(source: Source) -> list[Panel]:
    """Time and rate by case, and by length where cases differ in it alone."""
    panels = []
    for (benchmark, mode, protocol, dtype), entries in _partition(_timed(source)).items():
        place = {"record": source.name, "what": title_of(benchmark, mode, protocol), "dtype": dtype}
        for variant, over in _by_variant(entries).items():
            families = _families(over)
            for name, members in families.items():
                lengths = sorted({entry.tokens for entry in members})
                title = f"by length: {name}"
                panels.append({**place, "over": title, **_panel(members, lengths, lambda entry: entry.tokens, source)})
            if families and sum(map(len, families.values())) == len(over):
                continue
            cases = list(dict.fromkeys(entry.case for entry in over))
            title = f"by case: {variant}" if variant else "by case"
            panels.append({**place, "over": title, **_panel(over, cases, lambda entry: entry.case, source)})
    return panels


def _timed(source: Source) -> list[Entry]:
    return [entry for entry in source.entries if entry.time is not None and entry.impl != MULTIPLY]


def _partition(entries: Sequence[Entry]) -> dict[tuple[str, str, str | None, str], list[Entry]]:
    parts: dict[tuple[str, str, str | None, str], list[Entry]] = {}
    for entry in entries:
        parts.setdefault((entry.benchmark, entry.mode, entry.protocol, entry.dtype), []).append(entry)
    return parts


def _by_variant(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Rotations by pairing and place, so that a case is there once; attention together."""
    parts: dict[str, list[Entry]] = {}
    for entry in entries:
        variant = ", ".join(entry.variant.split(", ")[:2]) if entry.benchmark == "rope" else ""
        parts.setdefault(variant, []).append(entry)
    return parts


def _families(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    families: dict[tuple[object, ...], list[Entry]] = {}
    for entry in entries:
        if entry.yardstick is None:
            families.setdefault((*entry.family, entry.variant), []).append(entry)
    found = {}
    for members in families.values():
        if len({entry.tokens for entry in members}) >= _FEWEST_LENGTHS:
            first = members[0]
            found[", ".join(part for part in (_shape_but_length(first), first.variant) if part)] = members
    return found


def _shape_but_length(entry: Entry) -> str:
    heads = entry.shape[entry.shape.index(" H") + 1 :]
    return f"{entry.shape.split()[0]} {heads}" if entry.benchmark == "rope" else heads


def _panel(
    entries: Sequence[Entry], xs: Sequence[str | int], x_of: Callable[[Entry], str | int], source: Source
) -> Panel:
    labels: dict[str, Entry] = {}
    for entry in sorted(entries, key=lambda entry: _KIND_ORDER[entry.kind]):
        labels.setdefault(entry.label, entry)
    styles = _styles(entries)
    series = []
    for label in labels:
        at = {x_of(entry): entry for entry in entries if entry.label == label}
        series.append({"name": label, "style": styles[label], "points": [_point(at.get(x)) for x in xs]})
    by_length = isinstance(xs[0], int)
    metrics = {key: title for key, title in _metrics(entries, source, by_length).items() if _has(series, key)}
    return {
        "axis": "length" if by_length else "case",
        "x": list(xs),
        "metrics": metrics,
        "series": series,
    }


def _metrics(entries: Sequence[Entry], source: Source, by_length: bool) -> Mapping[str, str]:
    """By name, in words: times before rates over the length, and rates first where cases are side by side."""
    time = "time of the call, µs" if source.on_cpu else "time on the device, µs"
    roofs = " or ".join(dict.fromkeys(entry.roof for entry in entries if entry.share is not None))
    times = {"time": time, "graph": "time in a CUDA graph, µs"}
    speeds = {"gb_per_s": "GB/s", "tflops": "TFLOP/s", "share": f"fraction of a {roofs}"}
    return {**times, **speeds} if by_length else {**speeds, **times}


def _has(series: Sequence[Panel], key: str) -> bool:
    return any(point is not None and point.get(key) is not None for one in series for point in one["points"])


def _point(entry: Entry | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    values: dict[str, Any] = {"gb_per_s": entry.gb_per_s, "tflops": entry.tflops, "share": entry.share}
    for key, times in (("time", entry.time), ("graph", entry.graph)):
        if times is not None:
            values |= {key: times.p50, f"{key}_low": times.p50 - times.p10, f"{key}_high": times.p90 - times.p50}
    values["text"] = describe_point(entry)
    return {key: value for key, value in values.items() if value is not None}


def describe_point(entry: Entry) -> str:
    """Describe one point of a chart; the page escapes the text."""
    parts = [f"{entry.case} ({entry.what})"]
    if entry.time is not None:
        parts.append(f"{duration(entry.time.p50)} [{duration(entry.time.p10)} – {duration(entry.time.p90)}]")
    if entry.graph is not None:
        parts.append(f"{duration(entry.graph.p50)} in a graph")
    if entry.gb_per_s is not None:
        parts.append(f"{significant(entry.gb_per_s)} GB/s")
    if entry.tflops is not None:
        parts.append(f"{significant(entry.tflops)} TFLOP/s")
    if entry.share is not None:
        parts.append(f"{share(entry.share)} of a {entry.roof}")
    return "\n".join(parts)


def roofline_panels(source: Source) -> list[Panel]:
    """Make panels of reached speed against operations for each byte, below the device's copy and product."""
    parts: dict[tuple[str, str], list[Entry]] = {}
    for entry in source.entries:
        if entry.time is not None and entry.kind != "anchor":
            parts.setdefault((title_of(entry.benchmark, entry.mode, entry.protocol), entry.dtype), []).append(entry)
    copy = copy_rate(source)
    panels = []
    for (what, dtype), entries in parts.items():
        styles = _styles(entries)
        matmul = (rates(source.run).get("matmul_tflops") or {}).get(dtype)
        series = [
            {
                "name": label,
                "style": styles[label],
                "x": [entry.flops / entry.bytes_moved for entry in members],
                "y": [_tflops(entry) for entry in members],
                "text": [describe_point(entry) for entry in members],
            }
            for label, members in _by_label(entries).items()
        ]
        roofs = {"copy": copy, "matmul": matmul}
        panel = {"record": source.name, "what": what, "dtype": dtype, "series": series, "roofs": roofs}
        panels.append({**panel, "note": _roof_note(copy, matmul, dtype)})
    return panels


def _styles(entries: Sequence[Entry]) -> dict[str, dict[str, str]]:
    return {label: asdict(style) for label, style in styles_in(entries).items()}


def _bar_style(entry: Entry) -> dict[str, str]:
    return asdict(style_of(entry.impl))


def _tflops(entry: Entry) -> float:
    assert entry.time is not None
    return entry.flops / entry.time.p50 / 1e6


def _by_label(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    parts: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: _KIND_ORDER[entry.kind]):
        parts.setdefault(entry.label, []).append(entry)
    return parts


def copy_rate(source: Source) -> float | None:
    """GB/s of a copy: the run's own, or that of the copy of the largest case."""
    recorded: float | None = rates(source.run).get("copy_gb_per_s")
    if recorded is not None:
        return recorded
    copies = [entry for entry in source.entries if entry.impl == COPY and entry.gb_per_s is not None]
    return max(copies, key=lambda entry: entry.bytes_moved).gb_per_s if copies else None


def _roof_note(copy: float | None, matmul: float | None, dtype: str) -> str:
    said = []
    if copy is not None:
        said.append(f"A copy runs at {significant(copy, 4)} GB/s.")
    if matmul is not None:
        said.append(f"A matrix product in {dtype} runs at {significant(matmul)} TFLOP/s.")
    elif copy is not None:
        said.append(f"No rate of matrix products in {dtype} is in this record: the copy's roof is drawn alone.")
    if copy is None:
        said.append("No rate of a copy is in this record, so no roof of bandwidth is drawn.")
        if matmul is None:
            said.append("Nor is there one of matrix products.")
    return " ".join(said)


def bar_panels(source: Source, quantity: str) -> list[Panel]:
    """Bars for one case at a time: of "host", what an eager call costs the host, or of "memory", bytes at the peak."""
    panels = []
    for rows in _cases(source, quantity):
        first = rows[0]
        what = title_of(first.benchmark, first.mode)
        case = f"{first.case} ({first.what})"
        bars = sorted((_bar(entry, quantity) for entry in rows), key=lambda bar: float(bar["value"]))
        floors = [entry.floor_bytes for entry in rows if entry.floor_bytes is not None]
        panel = {"record": source.name, "what": what, "case": case, "bars": bars}
        panels.append({**panel, "floor": floors[0] / 2**20 if floors else None})
    return panels


def _cases(source: Source, quantity: str) -> Iterator[list[Entry]]:
    groups: dict[tuple[object, ...], dict[str, Entry]] = {}
    for entry in source.entries:
        measured = entry.host is not None if quantity == "host" else entry.peak_bytes is not None
        if measured and (quantity == "host" or entry.kind != "anchor"):
            groups.setdefault(entry.group[:-1], {}).setdefault(entry.label, entry)
    for group in sorted(groups.values(), key=lambda group: _weight(next(iter(group.values())), quantity)):
        yield list(group.values())


def _weight(entry: Entry, quantity: str) -> tuple[int, float]:
    """Host time matters most where there is least to do, memory where there is most; decode comes first."""
    if quantity == "host":
        return 0 if entry.mode == "decode" else 1, entry.bytes_moved
    return 0 if entry.mode == "memory" else 1, -entry.bytes_moved


def _bar(entry: Entry, quantity: str) -> dict[str, Any]:
    if quantity == "host":
        assert entry.host is not None
        forward = entry.host_forward
        return {
            "name": entry.label,
            "value": entry.host.median,
            "style": _bar_style(entry),
            "label": significant(entry.host.median),
            "forward": None if forward is None else forward.median,
            "text": f"median {duration(entry.host.median)}, least {duration(entry.host.least)}",
        }
    assert entry.peak_bytes is not None
    text = size(entry.peak_bytes)
    if entry.floor_bytes:
        times = ratio(entry.peak_bytes / entry.floor_bytes)
        text += f", {times} × the inputs, outputs, gradients and rotated q and k"
    return {
        "name": entry.label,
        "style": _bar_style(entry),
        "value": entry.peak_bytes / 2**20,
        "label": size(entry.peak_bytes),
        "text": text,
    }
