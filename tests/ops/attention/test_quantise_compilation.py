"""The kernels that quantise operands compile for their GPUs, and keep rows in registers on Hopper."""

import pytest
import torch
from helpers.compile import OLDER_TRITON, Recorder, compile_launch, pretend_target
from helpers.targets import GPUS, SHARED_MEMORY, TARGETS, TENSOR_MEMORY, resources, spilled_bytes, tensor_memory

from ropewalk.ops.attention.call import AttentionCall, Precision, RopeTable, Tables
from ropewalk.ops.attention.quantise import launch
from ropewalk.ops.launch.steps import AT_ONCE

pytestmark = pytest.mark.compile
TOKENS = 256
PAIRINGS = ("halves", "interleaved", "none", "packed")
# Bytes of registers: at 128 features two programs on a processor are worth them.
SPILLS = {("sm_90", 256): 160}
SPILLS_ELSEWHERE = {64: 16, 128: 120, 256: 600}


def launches_of(monkeypatch, target, head_dim, name, float8):
    pretend_target(monkeypatch, target)
    launches = []
    for kernel in ("mean_kernel", "quantise_kernel"):
        monkeypatch.setattr(launch, kernel, Recorder(getattr(launch, kernel), launches))
    q, k, v = (torch.randn(1, heads, TOKENS, head_dim).bfloat16() for heads in (4, 2, 2))
    table = RopeTable(torch.ones(1, TOKENS, head_dim // 2), torch.zeros(1, TOKENS, head_dim // 2))
    tables = Tables() if name == "none" else Tables(table, table, interleaved=name == "interleaved")
    call = AttentionCall(q=q, k=k, v=v, tables=tables, precision=Precision(float8, True, True).as_text())
    if name == "packed":
        bounds = torch.tensor([0, 100, TOKENS], dtype=torch.int32)
        call = call._replace(cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    launch.quantise(call, AT_ONCE, permuted=True)
    assert [kernel.__name__ for kernel, _, _ in launches] == ["mean_kernel", "quantise_kernel"]
    return launches


def configurations(target):
    """Values are e4m3 where the GPU converts to it: from sm_89 on."""
    float8 = target not in ("sm_80", "gfx942")
    for head_dim in (128, 64, 256):
        yield target, head_dim, "halves", float8
    if target == "sm_90":
        yield from ((target, 128, name, True) for name in PAIRINGS[1:])
        yield target, 128, "halves", False


@pytest.mark.parametrize(
    ("target", "head_dim", "name", "float8"),
    [case for target in (*TARGETS, "sm_89") for case in configurations(target)],
)
def test_kernels_compile_within_memory_and_registers(monkeypatch, tmp_path, target, head_dim, name, float8):
    for kernel, arguments, keywords in launches_of(monkeypatch, target, head_dim, name, float8):
        compiled = compile_launch(kernel, arguments, keywords, GPUS[target])
        assert compiled.metadata.shared <= SHARED_MEMORY[target]
        assert tensor_memory(compiled) <= TENSOR_MEMORY
        spilled = spilled_bytes(resources(compiled, tmp_path), target)
        if kernel.__name__ == "mean_kernel":
            assert spilled <= 16
        elif not OLDER_TRITON and name == "halves":
            assert spilled <= SPILLS.get((target, head_dim), SPILLS_ELSEWHERE[head_dim])
        if kernel.__name__ == "quantise_kernel" and target == "sm_90":
            ptx = compiled.asm["ptx"]
            assert "wgmma.mma_async" in ptx
            if not float8:  # signs alone, 128 × 64 of bfloat16, and numbers of rows
                assert compiled.metadata.shared <= 2 * 128 * 64 + 1024
