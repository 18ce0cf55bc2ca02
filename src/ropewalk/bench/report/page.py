"""The page: one file with its styles, its script, the charting library and the data inside."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ropewalk.bench.report import charts, sections
from ropewalk.bench.report.entries import Source, read_sources
from ropewalk.bench.report.markup import element
from ropewalk.bench.report.styles import colours_of
from ropewalk.bench.report.table import table_of


def write_report(records: Sequence[Path], output: Path, *, force: bool = False) -> Path:
    """Write the page of some records of `ropewalk bench rope`, `attention` or `all`.

    Args:
        records: the files, at least one.
        output: the page, which must not exist unless `force` is true, and is never one of the records.

    Raises:
        ValueError: a file is no record, or the output exists.
        ModuleNotFoundError: plotly is not installed.
    """
    if not records:
        raise ValueError("records is empty, but must name at least one file")
    if output.resolve() in {path.resolve() for path in records}:
        raise ValueError(f"output is {output}, which is one of the records")
    if output.is_dir():
        raise ValueError(f"output is {output}, which is a folder, but must be a file")
    if output.exists() and not force:
        raise ValueError(f"{output} exists already, and is not overwritten without --force")
    page = render(read_sources(records))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page, encoding="utf-8")
    return output


def render(sources: Sequence[Source]) -> str:
    """Render the page as HTML."""
    folder = files("ropewalk.bench.report")
    devices = ", ".join(dict.fromkeys(source.device for source in sources))
    parts = {
        "title": element("title", f"Ropewalk on {devices}"),
        "style": (folder / "report.css").read_text(encoding="utf-8"),
        "header": sections.header(sources),
        "verdicts": sections.verdicts(sources),
        "systems": sections.systems(sources),
        "method": sections.method(sources),
        "data": embed(data_of(sources)),
        "plotly": _plotly(),
        "script": (folder / "report.js").read_text(encoding="utf-8"),
    }
    template = (folder / "report.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def data_of(sources: Sequence[Source]) -> dict[str, Any]:
    """Collect the script's data."""
    entries = [entry for source in sources for entry in source.entries]
    return {
        "colours": {entry.label: colours_of(entry.impl) for entry in entries},
        "speed": [panel for source in sources for panel in charts.speed_panels(source)],
        "roofline": [panel for source in sources for panel in charts.roofline_panels(source)],
        "host": [panel for source in sources for panel in charts.bar_panels(source, "host")],
        "memory": [panel for source in sources for panel in charts.bar_panels(source, "memory")],
        "table": table_of(entries),
    }


def embed(data: Mapping[str, Any]) -> str:
    """Encode as JSON that ends no element and begins no comment anywhere in HTML."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plotly is not installed: pip install 'ropewalk[bench]'", name=error.name) from error
    source: str = get_plotlyjs()
    return source
