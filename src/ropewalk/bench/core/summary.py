"""The summary of a record for the terminal: a line for each row that was timed, and what was not right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Column as Heading
from rich.table import Table

from ropewalk.bench.core.load import Row, describe, groups, label, to_digits, variant_of, words
from ropewalk.bench.core.records import cpu_note

NOTHING = "–"
UNSTEADY = 1.5  # times the 10 % quantile: a 90 % quantile beyond it is no measurement of the call alone
# A heading, and the value of a row as text; None: there is none.
Column = tuple[str, Callable[[Row], str | None]]


def number(key: str, form: str = "", scale: float = 1.0) -> Callable[[Row], str | None]:
    """Make a column's text: the number at `key`, as "host.median" finds it; without a form to three digits."""

    def text(row: Row) -> str | None:
        value = _at(row, key)
        return None if value is None else f"{value / scale:{form}}" if form else to_digits(value / scale)

    return text


def microseconds(key: str) -> Callable[[Row], str | None]:
    """Make a column's text: the time at `key`."""
    return lambda row: None if (value := _at(row, key)) is None else f"{value:.{2 if value < 100 else 0}f}"


def _at(row: Row, key: str) -> Any:
    first, _, rest = key.partition(".")
    return _at(row.get(first) or {}, rest) if rest else row.get(first)


COMMON = tuple((text, microseconds(f"time.{key}")) for text, key in (("µs", "p50"), ("10 %", "p10"), ("90 %", "p90")))


def is_unsteady(row: Row) -> bool:
    """Say whether the quantiles of a row's time are far apart: in a CUDA graph where it has one, else on the device."""
    spread = row.get("graph", row.get("time"))
    return spread is not None and spread["p90"] > UNSTEADY * spread["p10"]


def print_summary(rows: Sequence[Row], run: Mapping[str, Any], columns: Sequence[Column], console: Console) -> None:
    """Print the rows of one benchmark: what was timed, what ours do not support, what was wrong or failed."""
    ok = [row for row in rows if row["status"] == "ok"]
    shown = [column for column in (*COMMON, *columns) if any(column[1](row) is not None for row in ok)]
    table = Table(
        *(Heading(heading, overflow="fold") for heading in ("case", "mode", "implementation")),
        *(Heading(heading, justify="right") for heading in ("×", *dict(shown))),
        title=f"{run['device']}, medians{cpu_note(run['device'])}",
        caption="×: how many times as long as the first of ours of the same rounds",
    )
    for group in groups(ok, "protocol"):
        lead = next((row for row in group if row["kind"] == "ours"), group[0])
        for row in group:
            # By the median over rounds if the record has it, else by medians.
            ratio = lead.get("ratios", {}).get(label(row))
            if ratio is None and row is not lead and "time" in row and "time" in lead:
                ratio = row["time"]["p50"] / lead["time"]["p50"]
            by = row.get("served_by", row["impl"])
            remarks = (f"by {by}" if by != row["impl"] else "", "unsteady" if is_unsteady(row) else "")
            table.add_row(
                words(row["case"]["name"], variant_of(row["case"])),
                words(row["mode"], row.get("protocol")),
                ", ".join(filter(None, (label(row), *remarks))),
                NOTHING if ratio is None else f"{ratio:.3f}",
                *(text(row) or NOTHING for _, text in shown),
            )
        table.add_section()
    console.print(table)
    if any(map(is_unsteady, ok)):
        said = f"unsteady: the 90 % quantile is more than {UNSTEADY} times the 10 % quantile"
        console.print(f"{said}. Is the machine at other work?", style="yellow", highlight=False)
    for row in rows:
        if row["status"] in ("wrong", "failed") or (row["status"] == "unsupported" and row["kind"] != "peer"):
            error = f" (error {row['error']:.3g}, budget {row['error_budget']:.3g})" if "error" in row else ""
            text = f"{row['status']}: {describe(row)}: {row.get('reason')}{error}"
            console.print(text, style="red", markup=False, highlight=False)
