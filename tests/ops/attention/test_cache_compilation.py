"""The kernels for few queries and many keys compile for every GPU: within its memory, and with accesses of 16 bytes."""

import os
import re

import pytest
import torch
from targets import SHARED_MEMORY, TARGETS, resources, spilled_bytes
from test_attention_compilation import OLDER_TRITON, POINTERS, Recorder, compile_launch

from ropewalk.far_positions import ReRope
from ropewalk.ops.attention import triton_cache_launch
from ropewalk.ops.attention.checks import check_call
from ropewalk.ops.attention.prepare import prepare
from ropewalk.positions import Alibi, ExpoSB, Rope

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton's interpreter compiles nothing"),
]

B, H, HK, KEYS = 2, 8, 2, 4096
LENGTHS = torch.full((B,), 100)
CALLS = {
    "rope": {"position": Rope(), "key_lengths": LENGTHS},
    "rope-causal": {"position": Rope(interleaved=True), "causal": True, "query_starts": LENGTHS - 9},
    "alibi-window": {"position": Alibi(), "causal": True, "window": 500, "softcap": 10.0},
    "rope-mask": {"position": Rope(), "causal": True, "mask": torch.ones(B, 1, 1, KEYS, dtype=torch.bool)},
    "rope-pairs": {"position": Rope(), "mask": torch.ones(B, H, 1, KEYS, dtype=torch.bool)},
    "decay-padding": {"position": ExpoSB(distance_decay=True), "key_starts": LENGTHS, "sinks": torch.zeros(H)},
    "rerope": {"position": ReRope(1000), "causal": True, "query_starts": LENGTHS - 9},
    "leaky-interleaved": {
        "position": ReRope(1000, leak=4.0, rope=Rope(interleaved=True)),
        "causal": True,
        "query_starts": LENGTHS - 9,
    },
}
TURNS_KEYS = ("rerope", "leaky-interleaved")


@pytest.fixture
def launches_of(monkeypatch):
    """What a call would launch on a GPU; k and v lie in pages if there is a page size."""
    monkeypatch.setitem(POINTERS, torch.int32, "*i32")
    monkeypatch.setattr(triton_cache_launch, "interpreted", lambda: False)
    monkeypatch.setattr(triton_cache_launch, "_processors", lambda device: 132)

    def launches_of(target, head_dim, dtype, queries=1, page_size=None, keys=KEYS, **keywords):
        monkeypatch.setattr(triton_cache_launch, "on_amd", lambda: target == "gfx942")
        q = torch.empty(B, H, queries, head_dim, dtype=dtype)
        k = torch.empty(B, HK, keys, head_dim, dtype=dtype)
        if page_size is not None:
            k = torch.empty(4, HK, page_size, head_dim, dtype=dtype)
            table = torch.zeros(B, keys // page_size, dtype=torch.int32)
            keywords = {"key_lengths": LENGTHS, **keywords, "block_table": table}
            keywords["keys_rotated"] = keywords["position"].far_window() is None
        launches = []
        with monkeypatch.context() as patch:
            for kernel in ("cache_kernel", "combine_kernel"):
                patch.setattr(
                    triton_cache_launch, kernel, Recorder(getattr(triton_cache_launch, kernel), launches)
                )  # fmt: skip
            prepared = prepare(q, k, check_call(q, k, k, layout="bhtd", **keywords))
            triton_cache_launch.forward(q, k, k, prepared)
        return launches

    return launches_of


def configurations(target):
    """For sm_90 every entry of the table of tiles; features, bytes of an element and rows say which."""
    for head_dim in (64, 128, 256):
        for queries in (1, 8, 16, 40) if target == "sm_90" else (1, 40):
            yield target, head_dim, torch.bfloat16, queries
        for queries in (1, 8) if target == "sm_90" else (1,):
            yield target, head_dim, torch.float32, queries


# Bytes of registers that a kernel may spill, at most; decoding with halves may spill none. On sm_80 it is the tile of
# 128 rows of 128 features, and that of 16 such rows in float32, that spill.
SPILLS = {"sm_80": 208, "sm_90": 96, "sm_100": 0, "gfx942": 0}
SPILLS_OF_TURNING = {2: 1300, 4: 5300}  # by the bytes of an element, where keys are turned in registers


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
            if name in TURNS_KEYS:
                allowed = SPILLS_OF_TURNING[dtype.itemsize]
            if target == "sm_90" or not OLDER_TRITON:
                spilled = spilled_bytes(resources(compiled, tmp_path), target)
                assert spilled <= allowed, (kernel.__name__, name)


@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("head_dim", [40, 128])
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_keys_and_values_are_copied_16_bytes_at_a_time_and_ahead(launches_of, target, head_dim, page_size):
    launches = launches_of(target, head_dim, torch.bfloat16, 1, page_size, **CALLS["rope"])
    ptx = compile_launch(*launches[0], TARGETS[target]).asm["ptx"]
    assert set(re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x[0-9a-f]+)", ptx)) == {"0x10"}
    # No pages are awaited in the middle of things: loads of k and v stand as many steps ahead as without a table.
    contiguous = launches_of(target, head_dim, torch.bfloat16, 1, None, **CALLS["rope"])
    assert ptx.count("cp.async.cg") == compile_launch(*contiguous[0], TARGETS[target]).asm["ptx"].count("cp.async.cg")


def test_what_is_not_split_is_not_combined(launches_of):
    launches = launches_of("sm_90", 128, torch.bfloat16, keys=64)
    assert [kernel.__name__ for kernel, *_ in launches] == ["cache_kernel"]
    compile_launch(*launches[0], TARGETS["sm_90"])
