"""The summary of a record of training steps, and its verdict on each target."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ropewalk.bench.core.records import cpu_note
from ropewalk.bench.training.cases import CASES, TrainingCase
from ropewalk.bench.training.models import OURS
from ropewalk.bench.training.rows import TrainingRecord

# By family or case, and by candidate: our tokens/s ought to be at least so many times that one's.
TARGETS = {
    "bert-rope": {"compiled RoPE + sdpa": 1.03, "RoPE + eager": 1.5},
    "bert": {"sdpa": 1.0},
    "bert-base": {"sdpa": 1.05},
    "bert-base-64x512": {"sdpa": 1.05},
    "llama": {"sdpa": 1.06},
    "llama-attention": {"sdpa": 1.0},
    "llama-12x1024": {"sdpa": 1.08},
    "llama-4x4096-attention": {"sdpa": 1.03},
    "qwen3": {"sdpa": 1.08},
    "qwen3-attention": {"sdpa": 1.0},
}


def targets_of(case: TrainingCase) -> dict[str, float]:
    """Return the targets of a case, or those of its family."""
    return TARGETS.get(case.name) or TARGETS.get(case.family, {})


def print_training_summary(record: TrainingRecord, console: Console) -> None:
    """Print the measurements, and whether they meet their targets."""
    table = Table(
        title=f"{record.run['device']}: training steps{cpu_note(record.run['device'])}",
        caption="×: Ropewalk's speed over this one's",
    )
    table.add_column("case", overflow="fold")
    for heading in ("precision", "attention", "ms a step", "tokens/s", "×", "peak, GiB", "error, gradient's"):
        table.add_column(heading, justify="left" if heading in ("precision", "attention") else "right")
    ours: dict[str, float] = {}
    for row in record.rows:
        ours = (row.speed_over or {}) if row.candidate == OURS else ours
        errors = f"{row.hidden_error:.2g}, {row.gradient_error:.2g}"
        if row.time is None or row.tokens_per_second is None:
            table.add_row(row.case, row.precision, row.candidate, row.status, "–", "–", "–", errors, style="red")
            continue
        ratio = f"{ours[row.candidate]:.3f}" if row.candidate in ours else "–"
        peak = "–" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.1f}"
        time_ms, speed = f"{row.time.p50 / 1e3:.2f}", f"{row.tokens_per_second:,.0f}"
        table.add_row(row.case, row.precision, row.candidate, time_ms, speed, ratio, peak, errors)
    console.print(table)
    for row in record.rows:
        case = next((case for case in CASES if case.name == row.case), None)
        for other, bound in ({} if case is None else targets_of(case)).items():
            if row.speed_over and other in row.speed_over:
                value = row.speed_over[other]
                verdict = "met" if value >= bound else "missed"
                what = f"{row.case}, {row.precision}: {value:.3f} × the speed of {other}, ought to be ≥ {bound}"
                console.print(f"{verdict}: {what}", highlight=False, style=None if verdict == "met" else "yellow")
