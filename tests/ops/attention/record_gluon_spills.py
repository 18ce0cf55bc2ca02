"""Write what the Gluon kernels spill, compiled by the Triton that is there, into gluon_spills.json.

PYTHONPATH=.venv/triton-3.8.0 .venv/bin/python tests/ops/attention/record_gluon_spills.py

The compile checks fail on more. It needs no GPU: kernels are compiled as the checks compile them, by their functions.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import test_gluon_compilation as checks


def main() -> None:
    """Compile every call of the checks, and write."""
    spills: dict[str, int] = {}
    for head_dim, dtype, name in checks.CASES + checks.FAR_CASES:
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
            forward, _ = checks.launch_of(patch, head_dim, dtype, name)
            _, backward, _ = checks.backward_launches_of(patch, head_dim, dtype, name)
            for direction, launch in (("forward", forward), ("backward", backward)):
                reports = checks.reports_of_ptxas(checks.compile_gluon(*launch), Path(folder))
                key = checks.key_of(direction, launch, name)
                spills[key] = max(spills.get(key, 0), checks.spilled_bytes(reports))
                print(key, spills[key], flush=True)
    recorded = json.loads(checks.SPILLS.read_text(encoding="utf-8"))
    recorded[checks.VERSION] = {key: spilled for key, spilled in spills.items() if spilled}
    checks.SPILLS.write_text(json.dumps(dict(sorted(recorded.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
