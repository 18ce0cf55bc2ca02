"""Record the spills of the Gluon kernels, compiled by the installed Triton, in hopper_spills.json.

PYTHONPATH=.venv/triton-3.8.0 .venv/bin/python tests/ops/attention/record_hopper_spills.py [wide|lists|8bit|…]

With `wide`, only those of head dims above 128 are recorded anew, and so on.
The compile checks fail on more. No GPU is needed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from helpers import compile_hopper as hopper


def main(cases: list[tuple[Any, torch.dtype, str]]) -> None:
    """Compile calls of the checks, and write."""
    spills: dict[str, int] = {}
    for head_dim, dtype, name in cases:
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
            forward, _ = hopper.forward_launch_of(patch, head_dim, dtype, name)
            backward = []
            if name not in hopper.FORWARD_CALLS:
                backward = hopper.kernels_of(hopper.backward_launches_of(patch, head_dim, dtype, name))
            for direction, launch in (("forward", forward), *backward):
                report = hopper.ptxas_report(hopper.compile_gluon(launch), Path(folder))
                key = hopper.spill_key(direction, launch, name)
                spills[key] = max(spills.get(key, 0), hopper.spilled_bytes(report))
                print(key, spills[key], flush=True)
    write(spills)


def main_8bit() -> None:
    """Compile calls by 8-bit products, and write."""
    spills: dict[str, int] = {}
    for head_dim, dtype, name, precision in hopper.CASES_8BIT:
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
            launch, _ = hopper.forward_8bit_launches_of(patch, head_dim, dtype, name, precision)
            report = hopper.ptxas_report(hopper.compile_gluon(launch), Path(folder))
            key = hopper.spill_key(f"forward by {precision}", launch, name)
            spills[key] = max(spills.get(key, 0), hopper.spilled_bytes(report))
            print(key, spills[key], flush=True)
    write(spills)


def write(spills: dict[str, int]) -> None:
    """Write the spills of this Triton beside those that are recorded."""
    recorded = json.loads(hopper.SPILLS.read_text(encoding="utf-8"))
    spills = {**recorded.get(hopper.VERSION, {}), **spills}
    recorded[hopper.VERSION] = {key: spilled for key, spilled in spills.items() if spilled}
    hopper.SPILLS.write_text(json.dumps(dict(sorted(recorded.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    ORDERED = [case for case in hopper.ORDERED_CASES if case[2] == "ordered-dropout"]
    DROPPED = [case for case in hopper.CASES if case[2].startswith("dropout")] + ORDERED
    EVERY = hopper.CASES + hopper.FAR_CASES + hopper.RANGE_CASES + hopper.WIDE_CASES + hopper.LIST_CASES + ORDERED
    EVERY += hopper.FORWARD_CASES
    LEARNED = [case for case in EVERY if "learned" in case[2]]
    STEP_ORDERS = [case for case in hopper.CASES if case[0] in (96, 128)] + hopper.WIDE_CASES
    SOME = {
        "forward": hopper.FORWARD_CASES,
        "wide": hopper.WIDE_CASES,
        "lists": hopper.LIST_CASES,
        "ranges": hopper.RANGE_CASES,
        "dropout": DROPPED,
        "learned": LEARNED,
        "orders": STEP_ORDERS,
    }
    if sys.argv[1:] != ["8bit"]:
        main(SOME[sys.argv[1]] if sys.argv[1:] else EVERY)
    if sys.argv[1:] in ([], ["8bit"]):
        main_8bit()
