"""The kernels for few queries and many keys compile for every GPU: within its memory, and with accesses of 16 bytes."""

import functools
import re

import pytest
import torch
from helpers import decode_launches
from helpers.compile import OLDER_TRITON, compile_launch, describe_launch
from helpers.decode_launches import CALLS, LENGTHS, B, H
from helpers.targets import SHARED_MEMORY, TARGETS, resources, spilled_bytes

from ropewalk.schemes import Alibi, ReRope, Rope

pytestmark = pytest.mark.compile

ROTATES_KEYS = ("rerope", "leaky-interleaved")


@pytest.fixture
def launches_of(monkeypatch):
    """Record the launches of a call on a target."""
    return functools.partial(decode_launches.launches_of, monkeypatch)


def configurations(target):
    """For sm_90 every entry of the table of tiles; features, bytes of an element and rows say which."""
    for queries in (1, 8):
        yield target, 512, torch.bfloat16, queries
    for head_dim in (64, 128, 256):
        for queries in (1, 8, 16, 40) if target == "sm_90" else (1, 40):
            yield target, head_dim, torch.bfloat16, queries
        for queries in (1, 8) if target == "sm_90" else (1,):
            yield target, head_dim, torch.float32, queries


# Bytes of registers that a kernel may spill, at most; decoding with halves may spill none. On sm_80 it is the tile of
# 128 rows of 128 features, and that of 16 such rows in float32, that spill; on sm_100 the latter spills two registers.
SPILLS = {"sm_80": 208, "sm_90": 96, "sm_100": 8, "gfx942": 0}
SPILLS_OF_ROTATION = {2: 1300, 4: 5300}  # by the bytes of an element, where keys are rotated in registers


@pytest.mark.parametrize(
    ("target", "head_dim", "dtype", "queries"), [case for target in TARGETS for case in configurations(target)]
)
def test_kernels_compile_within_shared_memory_and_registers(launches_of, tmp_path, target, head_dim, dtype, queries):
    for name in CALLS if target == "sm_90" and head_dim == 128 else ("rope", "alibi-window", "leaky-interleaved"):
        unpaged = name in ("decay-padding", "rope-mask", "rope-pairs") or (queries == 1 and name == "alibi-window")
        page_size = None if unpaged else 16
        for kernel, arguments, keywords in launches_of(target, head_dim, dtype, queries, page_size, **CALLS[name]):
            compiled = compile_launch(kernel, arguments, keywords, TARGETS[target])
            assert compiled.metadata.shared <= SHARED_MEMORY[target], (kernel.__name__, name)
            allowed = 0 if queries == 1 and dtype.itemsize == 2 else SPILLS[target]
            if target == "sm_90" and head_dim == 512:
                allowed = 8  # with 8 warps nothing spills, but on an H200 it took 1.2 to 1.4 times as long
            if name in ROTATES_KEYS:
                allowed = SPILLS_OF_ROTATION[dtype.itemsize] * (1.3 if head_dim == 512 else 1)
            if target == "sm_90" or not OLDER_TRITON:
                spilled = spilled_bytes(resources(compiled, tmp_path), target)
                assert spilled <= allowed, (kernel.__name__, name)


@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize(("head_dim", "name"), [(40, "rope"), (128, "rope"), (128, "rope-blocks")])
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_keys_and_values_are_copied_16_bytes_at_a_time_and_ahead(launches_of, target, head_dim, name, page_size):
    launches = launches_of(target, head_dim, torch.bfloat16, 1, page_size, **CALLS[name])
    ptx = compile_launch(*launches[0], TARGETS[target]).asm["ptx"]
    assert set(re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x[0-9a-f]+)", ptx)) == {"0x10"}
    # No load waits for the block table: k and v are loaded as many steps ahead as without one.
    contiguous = launches_of(target, head_dim, torch.bfloat16, 1, None, **CALLS[name])
    assert ptx.count("cp.async.cg") == compile_launch(*contiguous[0], TARGETS[target]).asm["ptx"].count("cp.async.cg")


def test_what_is_not_split_is_not_combined(launches_of):
    launches = launches_of("sm_90", 128, torch.bfloat16, keys=64)
    assert [kernel.__name__ for kernel, *_ in launches] == ["decode_kernel"]
    compile_launch(*launches[0], TARGETS["sm_90"])


GROWING = {
    "rope": lambda keys: CALLS["rope"],
    "rope-rotated": lambda keys: {"position": Rope(), "keys_rotated": True, "query_starts": LENGTHS},
    "alibi-window": lambda keys: CALLS["alibi-window"],
    "alibi-positions": lambda keys: {"position": Alibi(), "positions_k": torch.arange(keys)[None]},
    "rerope": lambda keys: {"position": ReRope(200), "causal": True},
    "mask-of-keys": lambda keys: {"mask": torch.ones(B, 1, 1, keys, dtype=torch.bool)},
    "mask-of-pairs": lambda keys: {"mask": torch.ones(B, H, 1, keys, dtype=torch.bool)},
}


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("name", GROWING)
def test_no_length_makes_another_binary(launches_of, name, head_dim):
    """A cache grows by a token a step; its capacity, its strides and its splits differ from call to call."""
    described = []
    for keys in (257, 300, 4096, 4097, 4200, 8192, 32768):
        launches = launches_of("sm_90", head_dim, torch.bfloat16, keys=keys, **GROWING[name](keys))
        described.append([describe_launch(*launch) for launch in launches])
    assert all(launches == described[0] for launches in described)


def test_no_growing_block_table_makes_another_binary(launches_of):
    described = [
        [describe_launch(*launch) for launch in launches_of("sm_90", 128, torch.bfloat16, 1, 16, keys, **CALLS["rope"])]
        for keys in (4096, 4112, 4352)
    ]
    assert all(launches == described[0] for launches in described)
