"""The table of quality in docs/serving.md is of its record."""

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


def test_the_table_is_the_records():
    lines = (ROOT / "results/cache-quality.jsonl").read_text(encoding="utf-8").splitlines()
    rows = {row["cache"]: row for row in map(json.loads, lines[1:]) if "cache" in row}
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    for name, title in NAMES.items():
        row = rows[name]
        more = "" if name == "none" else f"{abs(row['more']):.4f} ± {row['standard_error']:.4f}"
        assert name == "none" or row["more"] > -0.00005
        assert f"| {title} | {row['perplexity']:.4f} | {more}".rstrip() in page
