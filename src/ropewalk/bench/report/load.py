"""Reading a record of either of the kernels' benchmarks, or of both."""

from __future__ import annotations

from pathlib import Path

from ropewalk.bench.attention.rows import attention_row
from ropewalk.bench.core.load import BenchRecord, load_record
from ropewalk.bench.rope.rows import rope_row


def read_bench_record(path: Path) -> BenchRecord:
    """Read a record of `ropewalk bench rope`, `attention` or `all`."""
    return load_record(path, {"rope": rope_row, "attention": attention_row})
