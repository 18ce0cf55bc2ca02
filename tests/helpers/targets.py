"""The GPUs that every Triton kernel is compiled for, and what a compiled kernel uses of them."""

import re
import subprocess
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# And those for which attention's are.
GPUS = {
    **TARGETS,
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
}
# Bytes; sm_80 has 163 KiB, but shares its tiles with sm_86 and 89.
SHARED_MEMORY = {
    "sm_80": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "gfx942": 64 * 1024,
    **dict.fromkeys(("sm_86", "sm_89", "sm_120"), 99 * 1024),
}
TENSOR_MEMORY = 512  # columns: with more, Triton compiles a trap, and its launcher refuses


def cuobjdump(cubin, *options):
    """What NVIDIA's disassembler, which comes with Triton, says about a binary."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton comes without cuobjdump")
    return subprocess.run([tool, *options, cubin], check=True, capture_output=True, text=True).stdout


def resources(kernel, tmp_path):
    """Registers, and bytes of stack, local and shared memory; a spilled register lies in stack or local memory."""
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        found = {
            "registers": r"\.vgpr_count: +(\d+)",
            "stack": r"\.private_segment_fixed_size: (\d+)",
            "local": r"\.vgpr_spill_count: (\d+)",
            "scalar": r"\.sgpr_spill_count: (\d+)",
            "shared": r"\.group_segment_fixed_size: (\d+)",
        }
    else:
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        text = cuobjdump(cubin, "--dump-resource-usage")
        found = {"registers": r"REG:(\d+)", "stack": r"STACK:(\d+)", "local": r"LOCAL:(\d+)", "shared": r"SHARED:(\d+)"}
    return {name: int(re.search(pattern, text).group(1)) for name, pattern in found.items()}


def spilled_bytes(used, target):
    """Of a thread, by its `resources`; AMD's compiler counts in "local" what it keeps in registers of another kind."""
    return used["stack"] + (0 if target.startswith("gfx") else used["local"])


def tensor_memory(kernel):
    """Columns that a kernel wants on Blackwell; none elsewhere."""
    return getattr(kernel.metadata, "tmem_size", None) or 0
