"""The kernels of the norm compile for every target, without spills and with wide memory accesses."""

from __future__ import annotations

import re
from functools import lru_cache

import pytest
from helpers.norm_launches import KERNELS, specialise_norm
from helpers.targets import SHARED_MEMORY, TARGETS, cuobjdump, resources, spilled_bytes

pytestmark = pytest.mark.compile

ACROSS = {"weight": "across", "norm": {"across_heads": True}}
CASES = {
    "qwen3": {},
    "qwen3-next": {"head_dim": 256, "rotary_dim": 64, "heads": (24, 4), "norm": {"offset": 1.0}},
    "bert": {"head_dim": 64, "heads": (12, 12), "batch": 32, "tokens": 512},
    "d512": {"head_dim": 512},
    "interleaved": {"interleaved": True},
    "interleaved-offset": {"interleaved": True, "rotary_dim": 64, "rotary_offset": 64},
    "after": {"norm": {"after": True}, "weight_dtype": "fp32"},
    "after-no-weight": {"norm": {"after": True}, "weight": None},
    "heads": {"weight": "heads", "weight_dtype": "fp32"},
    "heads-bhtd": {"weight": "heads", "layout": "bhtd"},
    "across": ACROSS,
    "across-8192": {**ACROSS, "heads": (64, 8)},
    "across-after": {**ACROSS, "norm": {"across_heads": True, "after": True}},
    "alone": {"rotary_dim": 0},
    "axes": {"n_axes": 3},
    "axes-interleaved": {"n_axes": 3, "interleaved": True, "norm": {"after": True}},
    "axes-next": {"n_axes": 3, "head_dim": 256, "rotary_dim": 64, "heads": (24, 4), "norm": {"offset": 1.0}},
    "blocks": {"pair_block": 16},
    "blocks-axes": {"n_axes": 2, "pair_block": 64},
    "blocks-offset": {"head_dim": 256, "rotary_dim": 64, "rotary_offset": 64, "pair_block": 32},
    "biases": {"bias": True, "weight_dtype": "fp32"},
    "biases-next": {"bias": True, "head_dim": 256, "rotary_dim": 64, "heads": (24, 4), "norm": {"offset": 1.0}},
    "biases-across": {**ACROSS, "bias": True},
    "decode": {"batch": 1, "tokens": 1},
    "fp32": {"dtype": "fp32", "weight_dtype": "fp32"},
    "fp64": {"dtype": "fp64", "weight_dtype": "fp64"},
    "fp16": {"dtype": "fp16", "weight_dtype": "fp16"},
}
# On sm_90 all of them, on the others every third.
COMPILED = [(target, case) for target in TARGETS for case in (list(CASES) if target == "sm_90" else list(CASES)[::3])]
WIDE = [name for name in CASES if name not in ("fp32", "fp64", "decode")]  # one token has narrower rows


@lru_cache(maxsize=64)
def compiled(target, kernel, case):
    return specialise_norm(kernel, **CASES[case]).compile(TARGETS[target])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("target", "case"), COMPILED, ids=lambda value: value)
def test_nothing_is_spilled(target, case, kernel, tmp_path):
    used = resources(compiled(target, kernel, case), tmp_path)
    assert used["registers"] > 0
    # For sm_100 ptxas leaves two numbers of the backward on the stack.
    assert spilled_bytes(used, target) <= (8 if target == "sm_100" else 0), f"registers are spilled: {used}"
    assert used["shared"] <= SHARED_MEMORY[target]


def accesses(kernel, tmp_path):
    """Bits of each access to global memory in the machine code."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    found = re.findall(r"\b(LD|ST)G?\.E(\S*)", cuobjdump(cubin, "-sass"))
    widths = [(kind, re.findall(r"\.(64|128)\b", modifiers)) for kind, modifiers in found]
    return [(kind, int(sizes[-1]) if sizes else 32) for kind, sizes in widths]


def assert_loads_are_wide(found, case):
    """Beside axes, the pairs of a token gather their positions and their elements of the tables."""
    narrow = [width for kind, width in found if kind == "LD" and width != 128]
    assert len(narrow) <= (12 if CASES[case].get("n_axes") else 0)
    assert ("LD", 128) in found


@pytest.mark.parametrize("case", WIDE)
def test_the_forward_accesses_16_bytes_at_a_time(case, tmp_path):
    found = accesses(compiled("sm_90", "norm_kernel", case), tmp_path)
    assert {width for kind, width in found if kind == "ST"} == {128}
    assert_loads_are_wide(found, case)


@pytest.mark.parametrize("case", WIDE)
def test_the_backward_accesses_16_bytes_at_a_time(case, tmp_path):
    """All but the partial sums of the weights, which it stores once."""
    found = accesses(compiled("sm_90", "norm_backward_kernel", case), tmp_path)
    assert_loads_are_wide(found, case)
    assert ("ST", 128) in found


def loads_before_arithmetic(kernel, tmp_path):
    """Whether a step loads all that it needs before it multiplies any of it: else it waits for memory twice."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    return are_loads_first(cuobjdump(cubin, "-sass"))


def are_loads_first(machine_code):
    found = re.findall(r"\b(LDG|FFMA)\b", machine_code)
    return found.index("FFMA") == found.count("LDG")


@pytest.mark.parametrize("case", ["qwen3", "qwen3-next", "bert", "heads", "decode"])
def test_the_backward_loads_before_it_multiplies(case, tmp_path):
    assert loads_before_arithmetic(compiled("sm_90", "norm_backward_kernel", case), tmp_path)


def test_a_late_load_is_found():
    assert are_loads_first("LDG.E R1\nLDG.E R2\nFFMA R3\nSTG R3")
    assert not are_loads_first("LDG.E R1\nFFMA R3\nLDG.E R2\nSTG R3")


@pytest.mark.parametrize("case", ["qwen3", "interleaved", "qwen3-next", "bert"])
def test_a_row_stays_in_one_warp(case, tmp_path):
    assert resources(compiled("sm_90", "norm_kernel", case), tmp_path)["shared"] == 0


def test_narrow_accesses_are_found(tmp_path):
    kernel = specialise_norm("norm_kernel", alignment=2).compile(TARGETS["sm_90"])
    assert ("ST", 128) not in accesses(kernel, tmp_path)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", ["qwen3", "heads", "across", "fp64"])
def test_the_sum_of_weights_compiles(target, case, tmp_path):
    kernel = specialise_norm("weight_sum_kernel", **CASES[case]).compile(TARGETS[target])
    assert spilled_bytes(resources(kernel, tmp_path), target) == 0


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_sum_waits_before_it_reads_where_it_overlaps(overlaps):
    options = {"launch_pdl": True} if overlaps else {}
    kernel = specialise_norm("weight_sum_kernel").compile(TARGETS["sm_90"], OVERLAPS=overlaps, **options)
    before_loads = kernel.asm["ptx"].partition("ld.global")[0]
    assert ("griddepcontrol.wait" in before_loads) is overlaps
    assert kernel.metadata.launch_pdl is overlaps
