"""The table of docs/sparse.md is of its record."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMES = {
    "topk": "12.5 % by top-k, lists per head",
    "frames": "frames of video",
    "sinks": "window and sinks",
    "documents": "documents",
    "dense": "all blocks",
}


def test_the_table_is_the_records():
    lines = (ROOT / "results/blocks-h200.jsonl").read_text(encoding="utf-8").splitlines()
    rows = {(x["row"], x["dim"], x["impl"]): x for x in map(json.loads, lines[1:]) if "dim" in x}
    page = (ROOT / "docs/sparse.md").read_text(encoding="utf-8")
    for dim in (128, 64):
        for row, name in NAMES.items():
            cells = [f"D {dim}, {name}"]
            for way in ("forward", "backward"):
                cells.append(f"{rows[row, dim, 'ropewalk'][f'{way}_ms']:.2f}")
                cells += [f"{rows[row, dim, impl][f'{way}_tflops']:.0f}" for impl in ("ropewalk", "triton", "flex")]
            assert f"| {' | '.join(cells)} |" in page
