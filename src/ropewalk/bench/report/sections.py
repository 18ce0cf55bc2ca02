"""The parts of the page that need no script: header, verdicts, costs, systems."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ropewalk.bench.report.choices import (
    CHOICES_NOTE,
    COLUMNS,
    NOT_MEASURED,
    PICKED,
    Choice,
    Pick,
    newest_choices,
)
from ropewalk.bench.report.entries import Entry, Source
from ropewalk.bench.report.formats import MISSING, duration, ratio, share
from ropewalk.bench.report.markup import Markup, element, join
from ropewalk.bench.report.strip import draw_strip, scale_of
from ropewalk.bench.report.styles import colours_of
from ropewalk.bench.report.verdicts import (
    ABSENT,
    AHEAD,
    ALONE,
    BEHIND,
    LEVEL,
    SAME,
    Cost,
    Group,
    Side,
    Verdict,
    costs,
    host_sentence,
    losses,
    sentence,
    title_of,
    verdict_groups,
)

_LONG = 14  # verdicts of a group that is folded away
_VERSIONS = ("ropewalk", "torch", "triton", "cuda", "hip", "python", "driver_version")
_NAMES = {"driver_version": "driver", "cuda": "CUDA", "hip": "ROCm", "torch": "PyTorch", "python": "Python"}


def by_machine(sources: Sequence[Source]) -> dict[str, list[Source]]:
    """Records by the machine that they are of."""
    machines: dict[str, list[Source]] = {}
    for source in sources:
        machines.setdefault(source.machine, []).append(source)
    return machines


def header(sources: Sequence[Source]) -> Markup:
    """The devices, and a line for each record: date, commit, versions."""
    devices = " · ".join(dict.fromkeys(source.device for source in sources))
    line = element("p", describe_runs([source.run for source in sources]), class_="runs")
    if len(sources) == 1:
        return join(element("h1", devices), line)
    lines = [element("li", element("b", source.name), " ", describe_runs([source.run])) for source in sources]
    summary = element("summary", f"{len(sources)} records")
    return join(element("h1", devices), line, element("details", summary, element("ul", *lines), class_="runs"))


def describe_runs(runs: Sequence[Mapping[str, Any]]) -> str:
    """Dates, commits and versions in one line; where runs differ, each that there is."""
    dates = sorted(str(run["date"]) for run in runs)
    when = dates[0].replace("T", " ").replace("+00:00", " UTC")
    if len(runs) > 1:
        when = " to ".join(dict.fromkeys((dates[0][:10], dates[-1][:10])))
    commits = dict.fromkeys(_commit(run) for run in runs)
    parts = [when, f"{'commit' if len(commits) == 1 else 'commits'} {', '.join(commits)}"]
    for key in _VERSIONS:
        versions = dict.fromkeys(str(run[key]) for run in runs if run.get(key))
        if versions:
            parts.append(f"{_NAMES.get(key, key)} {', '.join(versions)}")
    return " · ".join(parts)


def _commit(run: Mapping[str, Any]) -> str:
    commit = run.get("commit")
    return f"{str(commit)[:7]}{' with changes' if run.get('dirty') else ''}" if commit else "unknown"


def verdicts(sources: Sequence[Source]) -> Markup:
    """For each machine: the verdict in a sentence, the groups at a glance, the losses, and all cases."""
    machines = by_machine(sources)
    parts = []
    for machine, records in machines.items():
        entries = [entry for source in records for entry in source.entries]
        title = element("h3", machine) if len(machines) > 1 else None
        parts.append(element("div", title, _of_machine(entries, records), class_="machine"))
    return join(*parts)


def _of_machine(entries: Sequence[Entry], records: Sequence[Source]) -> Markup:
    if not entries:
        return element("p", "There are no rows in this record.", class_="lead")
    several = len(records) > 1
    groups = verdict_groups(entries, {source.name: source.date for source in records})
    compared = [group for group in groups if group.compared]
    scale = scale_of(compared)
    tiles = element("div", *(_tile(group, scale) for group in compared), class_="tiles")
    found = losses(groups)
    behind = None
    if found:
        rows = [_row(one, several, group.title) for group, one in found]
        behind = join(element("h3", f"Behind a peer, or without a time of ours: {len(found)}"), _table(rows))
    shown = [_group(group, several) for group in compared]
    alone = sum(group.count(ALONE) for group in groups)
    more = _alone(groups, alone, several, open_=not compared) if alone else None
    return join(
        element("p", sentence(groups), class_="lead"),
        element("p", host_sentence(groups)) if host_sentence(groups) else None,
        _complaints(entries),
        tiles if compared else None,
        _choices(newest_choices(records), several),
        behind,
        element("h3", "Every case") if shown else None,
        *shown,
        more,
        _superseded(groups),
        _costs(costs(entries), several),
    )


def _complaints(entries: Sequence[Entry]) -> Markup | None:
    bad = [entry for entry in entries if entry.status in ("wrong", "failed")]
    if not bad:
        return None
    of_ours = sum(entry.kind != "peer" for entry in bad)
    text = f"{len(bad)} results were wrong or failed, {of_ours} of them ours, and were not timed: "
    names = ", ".join(dict.fromkeys(f"{entry.label} ({entry.status})" for entry in bad))
    return element("p", text + names + ". The table below has the reasons.", class_="warn")


def _tile(group: Group, scale: tuple[float, float]) -> Markup:
    times = [one.times_as_fast for one in group.verdicts if one.times_as_fast is not None]
    shares = [one.share for one in group.verdicts if one.share is not None]
    outcomes = (AHEAD, LEVEL, BEHIND, *((ABSENT,) if group.count(ABSENT) else ()))
    counts = " · ".join(f"{group.count(outcome)} {outcome}" for outcome in outcomes)
    facts = [f"median {ratio(statistics.median(times))} ×"] if times else []
    if shares:
        facts.append(f"{share(statistics.median(shares))} of roof")
    good = group.count(AHEAD, LEVEL)
    number = element("p", element("b", f"{good}"), f" of {group.compared}", class_="number")
    return element(
        "div",
        element("h4", group.title),
        number,
        draw_strip(group, scale),
        element("p", counts, element("br"), ", ".join(facts), class_="counts"),
        class_="tile" + (" has-losses" if good < group.compared else ""),
    )


def _group(group: Group, several: bool) -> Markup:
    rows = [_row(one, several) for one in group.verdicts if one.outcome != ALONE]
    good = group.count(AHEAD, LEVEL)
    summary = element(
        "summary", element("b", group.title), " ", element("span", f"{good} of {group.compared}", class_="count")
    )
    note = element("p", f"{group.note[0].upper()}{group.note[1:]}.", class_="note") if group.note else None
    return element("details", summary, note, _table(rows), open=len(rows) <= _LONG, class_="group")


def _alone(groups: Sequence[Group], count: int, several: bool, *, open_: bool) -> Markup:
    rows = [_row(one, several, group.title) for group in groups for one in group.verdicts if one.outcome == ALONE]
    summary = element("summary", element("b", "Without a peer"), " ", element("span", f"{count}", class_="count"))
    note = element("p", "No peer was measured in these cases.", class_="note")
    return element("details", summary, note, _table(rows), class_="group", open=open_)


def _superseded(groups: Sequence[Group]) -> Markup | None:
    rows = [_row(one, True, group.title) for group in groups for one in group.superseded]
    if not rows:
        return None
    summary = element("summary", element("b", "Superseded"), " ", element("span", f"{len(rows)}", class_="count"))
    note = "A newer record timed the case and this row's best peer again. These rows count nowhere above."
    return element("details", summary, element("p", note, class_="note"), _table(rows), class_="group")


_CHOICE_HEADINGS = ("case", "our kernels", *PICKED, *COLUMNS.values())
_CHOICE_LABELS = ("our kernels", *(name.removeprefix("impl=None ") for name in PICKED), *COLUMNS.values())


def _choices(found: Sequence[Choice], several: bool) -> Markup | None:
    """Our kernels beside what `impl=None` picks, hot."""
    found = [one for one in found if one.lead.protocol == "hot"]
    if not found:
        return None
    rows = []
    for one in found:
        mode = title_of(one.lead.benchmark, one.lead.mode)
        small = " · ".join([mode, *([one.lead.record] if several else []), one.lead.what])
        times = [duration(one.peers[name]) if name in one.peers else MISSING for name in COLUMNS]
        ours = _picked(one.kernels and replace(one.kernels, by_name=False))  # that one is by name in every row
        picks = (ours, _picked(one.without_flash), _picked(one.with_flash))
        cells = zip(_CHOICE_LABELS, (*picks, *times), strict=True)
        head = element("th", one.lead.case, element("small", small), scope="row")
        rows.append(element("tr", head, *(_cell(heading, cell) for heading, cell in cells)))
    head = element("thead", element("tr", *(element("th", text, scope="col") for text in _CHOICE_HEADINGS)))
    table = element("table", head, element("tbody", *rows), class_="verdicts choices")
    return join(
        element("h3", "Kernels and choices"),
        element("p", CHOICES_NOTE, class_="note"),
        element("div", table, class_="scroll"),
    )


def _picked(pick: Pick | None) -> str:
    if pick is None:
        return NOT_MEASURED
    time = element("span", duration(pick.time), class_="time")
    said = element("small", "timed by its name") if pick.by_name else None
    return join(chip(pick.backend), element("span", pick.backend), " ", time, said)


_HEADINGS = ("case", "ours", "best peer", "verdict", "of the roof", "host: ours, peer")


def _table(rows: Sequence[Markup]) -> Markup:
    head = element("thead", element("tr", *(element("th", text, scope="col") for text in _HEADINGS)))
    return element("div", element("table", head, element("tbody", *rows), class_="verdicts"), class_="scroll")


def _row(verdict: Verdict, several: bool, title: str | None = None) -> Markup:
    lead = verdict.lead
    where = [title] if title else []
    if several:
        where.append(lead.record)
    small = " · ".join([*where, lead.what])
    excluded = ", ".join(f"{name} ({why})" for name, why in verdict.excluded)
    superseded = f"superseded by {verdict.superseded_by}" if verdict.superseded_by else None
    said = "; ".join(text for text in (f"not compared: {excluded}" if excluded else None, superseded) if text)
    note = element("small", said) if said else None
    roof = element("span", share(verdict.share), title=f"of a {lead.roof}") if verdict.share is not None else MISSING
    cells = (
        element("th", lead.case, element("small", small), scope="row"),
        _cell(_HEADINGS[1], _side(verdict.ours)),
        _cell(_HEADINGS[2], _side(verdict.peer), note),
        _cell(_HEADINGS[3], element("span", verdict.text, class_=f"verdict {verdict.outcome}")),
        _cell(_HEADINGS[4], roof),
        _cell("host", _hosts(verdict)),
    )
    return element("tr", *cells)


def _cell(heading: str, *children: str | None) -> Markup:
    return element("td", *children, data_label=heading)


def _side(side: Side | None) -> str:
    if side is None:
        return MISSING
    entry = side.entry
    said = ["in a graph"] if side.in_graph else []
    if entry.served_by not in (None, entry.impl):
        said.append(f"by {entry.served_by}")
    name = element("span", entry.impl, title=entry.label)
    time = element("span", duration(side.time), class_="time")
    return join(chip(entry.impl), name, " ", time, element("small", ", ".join(said)) if said else None)


def _hosts(verdict: Verdict) -> str:
    hosts = [None if side is None else side.entry.host for side in (verdict.ours, verdict.peer)]
    if hosts == [None, None]:
        return MISSING
    text = ", ".join(MISSING if host is None else duration(host.median) for host in hosts)
    more = verdict.host_ratio is not None and verdict.host_ratio < 1 / (1 + SAME)
    return element("span", text, class_="more" if more else None)


def chip(impl: str) -> Markup:
    """The implementation's colour."""
    style = ";".join(f"{name}:{colour}" for name, colour in colours_of(impl).items())
    return element("i", class_="chip", style=style)


def _costs(found: Sequence[Cost], several: bool) -> Markup | None:
    if not found:
        return None
    rows = []
    for cost in found:
        entry = cost.entry
        assert entry.time is not None
        small = " · ".join([*([entry.record] if several else []), entry.what])
        rows.append(
            element(
                "tr",
                element("th", entry.case, element("small", small), scope="row"),
                _cell("mode", title_of(entry.benchmark, entry.mode, entry.protocol)),
                _cell("ours", chip(entry.impl), entry.label),
                _cell("time", duration(entry.time.p50)),
                _cell("over the same kernels without", f"{ratio(cost.times)} × {cost.baseline.label}"),
            )
        )
    headings = ("case", "mode", "ours", "time", "over the same kernels without")
    head = element("thead", element("tr", *(element("th", text, scope="col") for text in headings)))
    table = element("table", head, element("tbody", *rows), class_="verdicts costs")
    count = element("span", str(len(rows)), class_="count")
    summary = element("summary", element("b", "What positions cost"), " ", count)
    note = "Ours against the same implementation without them, timed in the same rounds; ReRoPE against RoPE."
    return element(
        "details", summary, element("p", note, class_="note"), element("div", table, class_="scroll"), class_="group"
    )


def systems(sources: Sequence[Source]) -> Markup:
    """Everything that each record says of its run."""
    parts = []
    for source in sources:
        facts = [
            join(element("dt", key), element("dd", value if isinstance(value, str) else json.dumps(value)))
            for key, value in source.run.items()
            if key != "peers" and value is not None
        ]
        peers: Mapping[str, Any] = source.run.get("peers") or {}
        said = [join(element("dt", chip(name), name), element("dd", str(value))) for name, value in peers.items()]
        parts.append(
            element(
                "details",
                element("summary", element("b", source.name), " ", element("span", source.machine, class_="count")),
                element("dl", *facts),
                element("h4", "Peers"),
                element("dl", *said) if said else element("p", "None was looked for.", class_="note"),
                class_="group",
                open=len(sources) == 1,
            )
        )
    return join(*parts)


def method(sources: Sequence[Source]) -> Markup:
    """Describe the method, as far as these records used it."""
    said = [
        "A result is compared with float64 first; a wrong one is not timed, and is listed with its error. "
        f"Medians are compared; within {100 * SAME:.0f} % they count as equal."
    ]
    on_gpu = [source for source in sources if not source.on_cpu]
    benchmarks = {entry.benchmark for source in on_gpu for entry in source.entries}
    if "rope" in benchmarks:
        said.append(
            "Rotations are timed on the device in rounds, each call once per round in a random order, with a cold L2 "
            "cache. Small forwards are compared by their time inside a CUDA graph, where the host costs nothing; what "
            "an eager call costs the host is given beside it. The roof is a copy of the same bytes in the same rounds."
        )
    if "attention" in benchmarks:
        said.append(
            "Attention is timed in bursts of a few milliseconds: hot, without pauses, or cool, with a rest before each "
            "burst. Ratios are medians over rounds in which both were measured, so they may differ a little from the "
            "ratio of the medians. The roof is a hot matrix product of the same dtype, or for decoding a copy; a cool "
            "product would be a higher one."
        )
    if len(on_gpu) < len(sources):
        said.append("On a CPU the time is that of the call, in rounds with a random order; caches are as they are.")
        said.append("There Ropewalk is for correctness, not speed.")
    return element("p", " ".join(said), class_="note")
