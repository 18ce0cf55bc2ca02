"""The tables of docs/serving.md are of their records."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMES = {
    "none": "none, float32",
    "bfloat16": "bfloat16",
    "float8_e4m3fn": "float8, a scale a head",
    "int8": "int8",
    "4-bit": "4-bit",
}


def test_the_times_are_the_records():
    lines = (ROOT / "results/serving-h200.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines[1:]) if "case" in row and row["mode"] != "host"]
    times = {(row["case"]["name"], row["impl"]): row["time"]["p50"] for row in rows}
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    for name in dict.fromkeys(name for name, _ in times):
        cells = [name, *(f"{times[name, kind]:.3g}" for kind in ("bf16", "fp8", "int8", "int4"))]
        assert f"| {' | '.join(cells)} |" in page


def test_the_table_is_the_records():
    lines = (ROOT / "results/cache-quality.jsonl").read_text(encoding="utf-8").splitlines()
    rows = {row["cache"]: row for row in map(json.loads, lines[1:]) if "cache" in row}
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    for name, title in NAMES.items():
        row = rows[name]
        more = "" if name == "none" else f"{abs(row['more']):.4f} ± {row['standard_error']:.4f}"
        assert name == "none" or row["more"] > -0.00005
        assert f"| {title} | {row['perplexity']:.4f} | {more}".rstrip() in page
