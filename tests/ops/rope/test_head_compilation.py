"""The kernels for tables per head compile for every target, without spills and with wide memory accesses."""

from __future__ import annotations

import re
from functools import lru_cache

import pytest
from helpers.head_launches import HEAD_KERNELS, specialise_heads
from helpers.targets import SHARED_MEMORY, TARGETS, cuobjdump, resources, spilled_bytes

pytestmark = pytest.mark.compile

CASES = {
    "vision": {},
    "d128": {"head_dim": 128, "heads": 32, "batch": 2},
    "d512": {"head_dim": 512},
    "interleaved": {"head_dim": 128, "interleaved": True},
    "bhtd": {"layout": "bhtd"},
    "per-token": {"kind": "per-token"},
    "tokens": {"kind": "tokens", "interleaved": True, "layout": "bhtd"},
    "offsets": {"kind": "offsets"},
    "partial": {"head_dim": 128, "rotary_dim": 64},
    "partial-offset": {"head_dim": 256, "rotary_dim": 64, "rotary_offset": 64, "interleaved": True},
    "blocks": {"pair_block": 16},
    "q-alone": {"has_k": False},
    "tables-alone": {"needs_dx": False},
    "bf16-tables": {"table_dtype": "bf16"},
    "in-place": {"inplace": True},
    "decode": {"batch": 1, "tokens": 1},
    "fp16": {"dtype": "fp16"},
    "fp32": {"dtype": "fp32"},
    "fp64": {"dtype": "fp64", "table_dtype": "fp64"},
}
# On sm_90 all of them, on the others every third.
COMPILED = [(target, case) for target in TARGETS for case in (list(CASES) if target == "sm_90" else list(CASES)[::3])]


@lru_cache(maxsize=64)
def compiled(target, kernel, case):
    return specialise_heads(kernel, **CASES[case]).compile(TARGETS[target])


@pytest.mark.parametrize("kernel", HEAD_KERNELS)
@pytest.mark.parametrize(("target", "case"), COMPILED, ids=lambda value: value)
def test_nothing_is_spilled(target, case, kernel, tmp_path):
    used = resources(compiled(target, kernel, case), tmp_path)
    assert used["registers"] > 0
    assert spilled_bytes(used, target) == 0, f"registers are spilled: {used}"
    assert used["shared"] <= SHARED_MEMORY[target]


def accesses(kernel, tmp_path):
    """Bits of each access to global memory in the machine code, without the loads of positions."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    found = re.findall(r"\b(LD|ST)G?\.E(\S*)", cuobjdump(cubin, "-sass"))
    return [(kind, max([32, *map(int, re.findall(r"\.(64|128)\b", modifiers))])) for kind, modifiers in found]


@pytest.mark.parametrize("kernel", HEAD_KERNELS)
@pytest.mark.parametrize("case", [name for name in CASES if name not in ("fp64", "bf16-tables", "decode")])
def test_memory_is_accessed_16_bytes_at_a_time(kernel, case, tmp_path):
    found = accesses(compiled("sm_90", kernel, case), tmp_path)
    assert {width for kind, width in found if kind == "ST"} == {128}
    narrow = [width for kind, width in found if kind == "LD" and width != 128]
    assert len(narrow) <= 8, "more than the positions"
    assert ("LD", 128) in found


@pytest.mark.parametrize("kernel", HEAD_KERNELS)
def test_narrow_accesses_are_found(kernel, tmp_path):
    found = accesses(specialise_heads(kernel, alignment=2).compile(TARGETS["sm_90"]), tmp_path)
    assert ("ST", 128) not in found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", ["vision", "d128", "fp64"])
def test_the_sum_of_rows_compiles(target, case, tmp_path):
    kernel = specialise_heads("row_sum_kernel", **CASES[case]).compile(TARGETS[target])
    assert spilled_bytes(resources(kernel, tmp_path), target) == 0
    if target == "sm_90":
        assert ("LD", 128) in (found := accesses(kernel, tmp_path))
        assert {width for kind, width in found if kind == "ST"} == {128}


def test_the_cases_meet_every_choice():
    launches = [specialise_heads(kernel, **case) for kernel in HEAD_KERNELS for case in CASES.values()]
    assert {launch["POSITIONS"] for launch in launches} == {0, 1, 2}
    assert {launch["HEADS_ARE_NEAR"] for launch in launches} == {False, True}
    signatures = [launch.source.signature for launch in launches if "dcos_ptr" in launch.arguments]
    assert {signature["dcos_ptr"] for signature in signatures} == {"*fp32", "*fp64"}
