"""Every rotation kernel that can be chosen compiles for its GPUs, without spills and with wide memory accesses."""

import re
from collections import Counter
from functools import lru_cache

import pytest
import torch
from helpers.rope_launches import DTYPES, specialise
from helpers.targets import SHARED_MEMORY, TARGETS, cuobjdump, resources

pytestmark = pytest.mark.compile

HEAD_DIMS = (40, 64, 80, 96, 128, 192, 256, 512)
WIDE_HEAD_DIMS = tuple(dim for dim in HEAD_DIMS if dim % 32 == 0)
PAIRINGS = {"halves": False, "interleaved": True}
KINDS = ("index", "offsets", "tokens", "one-row", "packed", "packed-tokens", "per-token", "axes", "packed-axes")


def configurations():
    """All that is compiled, as (name, arguments of `specialise`), one axis of choices after another."""
    for head_dim in HEAD_DIMS:
        for dtype in DTYPES:
            yield f"{head_dim}-{dtype}", {"head_dim": head_dim, "dtype": dtype}
    for tokens in (1, 7, 64, 1024):
        for inplace in (False, True):
            yield f"{tokens}-tokens-{inplace=}", {"batch": 1, "tokens": tokens, "inplace": inplace}
    for kind in KINDS:
        for index_dtype in (torch.int32, torch.int64):
            yield f"{kind}-{index_dtype}", {"kind": kind, "index_dtype": index_dtype, "head_dim": 96}
        yield f"{kind}-decode", {"kind": kind, "batch": 8, "tokens": 8 if kind.startswith("packed") else 1}
    for head_dim, rotary_dim, offset in (
        (128, 64, 0),
        (64, 16, 0),
        (80, 32, 0),
        (96, 24, 0),
        (256, 64, 192),
        (96, 2, 1),
        (512, 32, 480),
    ):
        for inplace in (False, True):
            partial = {"head_dim": head_dim, "rotary_dim": rotary_dim, "rotary_offset": offset, "inplace": inplace}
            yield f"{rotary_dim}-of-{head_dim}-{inplace=}", partial
    for head_dim in (64, 80, 128, 512):
        yield f"bhtd-{head_dim}", {"head_dim": head_dim, "layout": "bhtd"}
        yield f"bhtd-decode-{head_dim}", {"head_dim": head_dim, "layout": "bhtd", "tokens": 1}
    for heads in ((1, 1), (3, 0), (7, 1), (128, 128)):
        yield f"{heads}-heads", {"heads": heads}
    for dtype, alignment in (("bf16", 2), ("fp16", 4), ("fp32", 4), ("bf16", 8), ("fp64", 8)):
        yield f"{dtype}-aligned-to-{alignment}", {"dtype": dtype, "alignment": alignment}
    for padding in (1, 2, 8):
        yield f"padded-by-{padding}", {"padding": padding}
    for table_dtype in ("fp16", "bf16", "fp64"):
        yield f"{table_dtype}-tables", {"table_dtype": table_dtype}
    yield "far", {"far": True}


def blocks():
    """Half-split pairs inside blocks; those of 36 features are Gemma 4's vision tower's."""
    for pair_block in (2, 8, 16, 64):
        yield f"blocks-of-{pair_block}", {"pair_block": pair_block}
    yield "blocks-of-36", {"head_dim": 72, "pair_block": 36, "kind": "axes"}
    yield "blocks-axes", {"kind": "axes", "pair_block": 64}
    yield "blocks-partial", {"head_dim": 256, "rotary_dim": 64, "rotary_offset": 192, "pair_block": 32, "inplace": True}


EVERY = {
    f"{name}-{pairing}": arguments | {"interleaved": interleaved}
    for name, arguments in configurations()
    for pairing, interleaved in PAIRINGS.items()
} | dict(blocks())
# On sm_90 all of them, on the others every third, which meets both pairings and each axis.
COMPILED = [(target, case) for target in TARGETS for case in (list(EVERY) if target == "sm_90" else list(EVERY)[::3])]
WIDE = (
    {
        f"{head_dim}-{dtype}-{pairing}": {"head_dim": head_dim, "dtype": dtype, "interleaved": interleaved}
        for head_dim in WIDE_HEAD_DIMS
        for dtype in ("fp16", "bf16", "fp32")
        for pairing, interleaved in PAIRINGS.items()
    }
    | {
        f"{name}-{pairing}": arguments | {"interleaved": interleaved}
        for name, arguments in {
            "decode": {"batch": 1, "tokens": 1},
            "64-tokens": {"batch": 1, "tokens": 64},
            "inplace": {"inplace": True},
            "bhtd": {"layout": "bhtd"},
            "partial": {"rotary_dim": 64},
            "far": {"far": True},
        }.items()
        for pairing, interleaved in PAIRINGS.items()
    }
    | {
        f"blocks-of-{pair_block}-{head_dim}-{dtype}": {"pair_block": pair_block, "head_dim": head_dim, "dtype": dtype}
        for pair_block in (16, 32)
        for head_dim in (96, 128)
        for dtype in ("bf16", "fp32")
    }
    | {"blocks-decode": {"pair_block": 64, "batch": 1, "tokens": 1}}
)
WIDE_COMPILED = [
    (target, case) for target in TARGETS for case in (list(WIDE) if target == "sm_90" else list(WIDE)[::5])
]


@lru_cache(maxsize=64)
def compiled(target, **arguments):
    return specialise(**arguments).compile(TARGETS[target])


def accesses(kernel, tmp_path):
    """Accesses to global memory in the machine code, counted by (load or store, width in bits)."""
    if "amdgcn" in kernel.asm:
        widths = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32}
        found = re.findall(r"\b(?:global|buffer|flat)_(load|store)_(\w+)", kernel.asm["amdgcn"])
        return Counter((kind, widths.get(width, 16)) for kind, width in found)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    found = re.findall(r"\b(LD|ST)G?\.E(\S*)", cuobjdump(cubin, "-sass"))
    return Counter(({"LD": "load", "ST": "store"}[kind], _width(modifiers)) for kind, modifiers in found)


def _width(modifiers):
    sizes = re.findall(r"\.[US]?(8|16|32|64|128|256)\b", modifiers)
    return int(sizes[-1]) if sizes else 32


def assert_no_spills(used):
    assert used["registers"] > 0
    spilled = {name: used[name] for name in ("stack", "local", "scalar") if used.get(name)}
    assert not spilled, f"registers are spilled: {used}"


def assert_wide(counts):
    """Every store moves 16 bytes, so do loads of q and k, and those of the tables move at least 8."""
    narrow = {access: n for access, n in counts.items() if access[1] < (128 if access[0] == "store" else 64)}
    assert not narrow, f"narrow accesses among {dict(counts)}"
    assert counts["load", 128] > 0
    assert counts["store", 128] > 0


@pytest.mark.parametrize(("target", "case"), COMPILED, ids=lambda value: value)
def test_nothing_is_spilled(target, case, tmp_path):
    used = resources(compiled(target, **EVERY[case]), tmp_path)
    assert_no_spills(used)
    assert used["shared"] <= SHARED_MEMORY[target]


@pytest.mark.parametrize(("target", "case"), WIDE_COMPILED, ids=lambda value: value)
def test_aligned_memory_is_accessed_16_bytes_at_a_time(target, case, tmp_path):
    kernel = compiled(target, **WIDE[case])
    assert_wide(accesses(kernel, tmp_path))
    assert resources(kernel, tmp_path)["shared"] == 0


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("change", [{"alignment": 2}, {"padding": 1}], ids=["pointer", "stride"])
def test_unaligned_memory_is_not(target, change, tmp_path):
    counts = accesses(compiled(target, **change), tmp_path)
    assert counts["store", 128] == 0
    with pytest.raises(AssertionError, match="narrow"):
        assert_wide(counts)


def test_a_spill_is_found(tmp_path):
    launch = specialise(head_dim=512, dtype="fp64")
    kernel = launch.compile(TARGETS["sm_90"], threads=32, BLOCK_HEADS=8, maxnreg=24)
    with pytest.raises(AssertionError, match="spilled"):
        assert_no_spills(resources(kernel, tmp_path))


def test_the_configurations_meet_every_choice():
    launches = [specialise(**arguments) for arguments in EVERY.values()]
    signatures = [launch.source.signature for launch in launches]
    assert {launch["POSITIONS"] for launch in launches} == {0, 1, 2, 3, 4}
    assert {signature["q_ptr"] for signature in signatures} == {f"*{dtype}" for dtype in DTYPES}
    assert {signature["q_stride_token"] for signature in signatures} == {"i32", "i64"}
    assert {signature["positions_ptr"] for signature in signatures} >= {"*i32", "*i64"}
    assert {launch.alignment for launch in launches} == {2, 4, 8, 16}
    assert {launch["STRIDE_UNIT"] for launch in launches} >= {1, 2, 8, 16}
    assert {(launch["INTERLEAVED"], launch["INPLACE"]) for launch in launches} == {
        (a, b) for a in (False, True) for b in (False, True)
    }
    assert any(2 * launch["HALF"] < launch["D"] for launch in launches)
