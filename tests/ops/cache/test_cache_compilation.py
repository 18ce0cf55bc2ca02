"""The kernels of caches compile for every target, without spills, and with wide accesses where it counts."""

from __future__ import annotations

import re

import pytest
import torch
from helpers import compile as compile_helpers
from helpers.append_launches import FORMATS, compile_for, specialise
from helpers.compile import Recorder, compile_launch, pretend_target
from helpers.targets import SHARED_MEMORY, TARGETS, cuobjdump, resources, spilled_bytes

from ropewalk import Alibi, Rope
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.triton import decode_launch

pytestmark = pytest.mark.compile

CASES = {
    "few": {},
    "many": {"tokens": 16384},
    "interleaved": {"tokens": 16384, "flags": {"interleaved": True}, "value_dim": 64},
    "partial": {"rotary_dim": 64, "flags": {"rotary_offset": 32}, "weight": "heads", "transposed": True},
    "across": {"weight": "across", "n_axes": 3, "page_size": 48},
}
COMPILED = [(target, case) for target in TARGETS for case in (CASES if target == "sm_90" else ["few", "partial"])]


@pytest.mark.parametrize("cache", FORMATS)
@pytest.mark.parametrize(("target", "case"), COMPILED)
def test_appending_spills_nothing(target, case, cache, tmp_path):
    kernel = compile_for(target, specialise(cache, **CASES[case]))
    used = resources(kernel, tmp_path)
    assert used["registers"] > 0
    assert spilled_bytes(used, target) == 0
    assert used["shared"] <= SHARED_MEMORY[target]
    if target == "sm_90" and case == "many":
        (tmp_path / "kernel.cubin").write_bytes(kernel.asm["cubin"])
        found = re.findall(r"\bLDG?\.E(\S*)", cuobjdump(tmp_path / "kernel.cubin", "-sass"))
        assert sum(".128" in modifiers for modifiers in found) >= 15


def launch_of(monkeypatch, target, cache, queries, **keywords):
    """Record the launch of the decode kernel over pages of a format."""
    monkeypatch.setitem(compile_helpers.POINTERS, torch.int16, "*i16")
    pretend_target(monkeypatch, target)
    dim, heads, rows, page_size = 128, 8, 64, 16
    stored = FORMATS[cache]
    pages = torch.empty(64, page_size, heads, dim // (2 if cache == "int4" else 1), dtype=torch.uint8).view(stored)
    shapes = {"fp8": (), "int8": (64, page_size, heads), "int4": (64, page_size, heads, dim // 32)}
    scale = torch.empty(shapes[cache], dtype=torch.float16 if cache == "int4" else torch.float32)
    lengths = torch.full((rows,), 100)
    launches = []
    with monkeypatch.context() as patch:
        for kernel in ("decode_kernel", "combine_kernel"):
            patch.setattr(decode_launch, kernel, Recorder(getattr(decode_launch, kernel), launches))
        call = make_call(
            *(torch.empty(rows, queries, 32, dim, dtype=torch.bfloat16), pages, pages),
            k_scale=scale,
            v_scale=scale,
            key_lengths=lengths,
            query_starts=lengths - queries,
            block_table=torch.zeros(rows, 512, dtype=torch.int32),
            causal=True,
            **keywords,
        )
        decode_launch.forward(call)
    return launches[0]


# Tiles of several queries are for sm_90 alone so far: on the others they spill. AMD's GPUs are refused.
DECODED = [*((target, 1) for target in TARGETS if target.startswith("sm_")), ("sm_90", 16)]


@pytest.mark.parametrize("cache", ["fp8", "int8", "int4"])
@pytest.mark.parametrize(("target", "queries"), DECODED)
def test_decoding_spills_nothing(target, queries, cache, monkeypatch, tmp_path):
    keywords = {"position": Rope(), "keys_rotated": True} if queries == 1 else {"position": Alibi()}
    kernel = compile_launch(*launch_of(monkeypatch, target, cache, queries, **keywords), TARGETS[target])
    used = resources(kernel, tmp_path)
    assert used["registers"] > 0
    # Of several queries over int8 a tile's scales take registers that there are not.
    most = {"sm_90": 0 if queries == 1 else {"fp8": 0, "int8": 256, "int4": 16}[cache]}.get(target, 64)
    assert spilled_bytes(used, target) <= most
    assert kernel.metadata.shared <= SHARED_MEMORY[target]
