"""Measure what products of few bits cost: errors against float64, and the quality of a language model.

python tools/bench_precision.py errors|quality|bits… [--device cuda] [--dim 64 128 256] [--share 1.0] [--out FILE]

"errors" takes half a minute on an H200, "quality" some three minutes, most of them to train the model; a smaller one
takes five minutes on a core of a CPU. "bits" computes the arithmetic of 4 bits on a CPU, in seconds: no kernel has it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import precision_bits
import precision_errors
import precision_quality

from ropewalk.bench.core.options import choose_device
from ropewalk.bench.core.records import RecordWriter, describe_run


def show(row: dict[str, Any]) -> str:
    """Return a row's values in one line."""
    values = (" ".join(map(str, value.values())) if isinstance(value, dict) else value for value in row.values())
    return " ".join(f"{value:.5f}" if isinstance(value, float) else str(value) for value in values)


def main() -> None:
    """Measure each group, print its rows, and write the record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("groups", choices=["errors", "quality", "bits"], nargs="+")
    parser.add_argument("--device")
    parser.add_argument("--dim", type=int, nargs="+", default=[64, 128, 256], help="head dims of errors")
    parser.add_argument("--tokens", type=int, nargs=3, default=[4096, 32768, 131072], help="lengths of errors")
    parser.add_argument("--share", type=float, default=1.0, help="of the training's steps")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = choose_device("cpu" if options.groups == ["bits"] else options.device)
    groups = dict[str, Iterator[dict[str, Any]]]()
    about = dict[str, Any]()
    if "errors" in options.groups:
        found = precision_errors.cases(options.dim, *options.tokens)
        groups["errors"] = (row for case in found for row in precision_errors.measure(case, device))
    if "bits" in options.groups:
        groups["bits"] = (row for case in precision_bits.cases() for row in precision_bits.measure(case))
    if "quality" in options.groups:
        about, groups["quality"] = precision_quality.run(device, options.share, lambda line: print(line, flush=True))
    run = {**describe_run("precision", device, {}), "seed": 0, **about}
    with nullcontext() if options.out is None else RecordWriter(options.out, run) as record:
        for group, rows in groups.items():
            for row in rows:
                row = {"mode": group, **row}
                print(show(row), flush=True)
                if record is not None:
                    record.append(row)
        if record is not None:
            record.end()


if __name__ == "__main__":
    main()
