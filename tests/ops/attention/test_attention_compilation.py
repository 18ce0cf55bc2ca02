"""Every attention kernel compiles for its GPUs, within their shared memory, and with Hopper's matrix instructions."""

import functools
import math

import pytest
import torch
from helpers.attention_launches import CALLS, KERNELS, launch_of_8_bits, launches_of
from helpers.compile import OLDER_TRITON, compile_launch, pretend_target
from helpers.targets import GPUS, SHARED_MEMORY, TARGETS, TENSOR_MEMORY, resources, spilled_bytes, tensor_memory

from ropewalk import device as gpu
from ropewalk.ops.attention.triton import config

pytestmark = pytest.mark.compile


def configurations(target):
    """For sm_90 every entry of the tables of tiles, and every kind of call."""
    for head_dim in (64, 128, 256):
        for name in CALLS if target == "sm_90" else ("rope-causal", "decay-window"):
            yield target, head_dim, head_dim, torch.bfloat16, name
        yield target, head_dim, head_dim, torch.float32, "rope-causal"
    yield target, 192, 128, torch.bfloat16, "rope-causal"
    yield target, 192, 128, torch.float32, "rope-causal"
    if target == "sm_90":
        for head_dim in (16, 80, 192):
            yield target, head_dim, head_dim, torch.float16, "rope-causal"
        yield target, 192, 128, torch.bfloat16, "packed"
    else:
        for name in ("packed", "softcap", "dropout", "rerope", "learned", "alibi-mask"):
            yield target, 128, 128, torch.bfloat16, name
    for name in CALLS if target == "sm_90" else ("rope-causal", "decay-window", "packed", "dropout"):
        yield target, 512, 512, torch.bfloat16, name
    for head_dim, v_head_dim in ((320, 320), (512, 40), (64, 384)) if target == "sm_90" else ((512, 64),):
        yield target, head_dim, v_head_dim, torch.float16, "rope-causal"


# Bytes of registers that kernels of halves may spill on sm_90: larger tiles were measured to be worth it.
SPILLS = {"forward_kernel": 64, "backward_dq_kernel": 520, "backward_dkdv_kernel": 520}
# Turning the sums of a gradient from far pairs to near ones, once a tile, takes registers for them twice.
SPILLS_OF_FAR = {"forward_kernel": 64, "backward_dq_kernel": 1500, "backward_dkdv_kernel": 780}
SPILLS_OF_T5 = 2300  # in tiles with distances that have buckets of their own: near the diagonal
# With more than 256 features: a loop behind another one, as those of lists and of two ranges are, keeps addresses of
# operands in registers, 194 of a step of dQ.
SPILLS_OF_WIDE = {"forward_kernel": 8, "backward_dq_kernel": 0, "backward_dkdv_kernel": 56}
SPILLS_OF_WIDE_LOOPS = {"forward_kernel": 104, "backward_dq_kernel": 2500, "backward_dkdv_kernel": 2500}
# Bytes on other GPUs, by target, kernel and head dim: what is left where the next smaller tile reads twice as much.
SPILLS_ELSEWHERE = {
    ("sm_80", "backward_dq_kernel", 128): 40,
    ("sm_80", "backward_dkdv_kernel", 128): 48,
    ("sm_80", "backward_dkdv_kernel", 256): 40,
    ("sm_100", "forward_kernel", 128): 24,
    ("sm_100", "backward_dkdv_kernel", 64): 32,
    ("sm_100", "backward_dkdv_kernel", 128): 24,
    ("sm_100", "backward_dkdv_kernel", 256): 72,
    ("gfx942", "backward_dkdv_kernel", 256): 16,
    ("sm_80", "backward_dq_kernel", 512): 72,
    ("sm_100", "forward_kernel", 512): 16,
    ("sm_100", "backward_dkdv_kernel", 512): 500,  # addresses, which one thread reads
}
# Of float32, whose tiles of 16 × 16 are the smallest there are, and whose products do without tensor cores: where
# descriptors are TMA's, which keeps operands in shared memory, their whole rows come to registers.
SPILLS_OF_FLOAT32 = {
    ("forward_kernel", 128): 336,
    ("forward_kernel", 192): 864,
    ("forward_kernel", 256): 1456,
    ("backward_dq_kernel", 64): 280,
    ("backward_dq_kernel", 128): 336,
    ("backward_dq_kernel", 192): 1680,
    ("backward_dq_kernel", 256): 2088,
    ("backward_dkdv_kernel", 128): 424,
    ("backward_dkdv_kernel", 192): 1848,
    ("backward_dkdv_kernel", 256): 2240,
}
SPILLS_OF_FLOAT32_ON_SM_80 = {
    ("forward_kernel", 64): 8,
    ("backward_dq_kernel", 256): 280,
    ("backward_dkdv_kernel", 192): 8,
}


def bound_of_spills(target, kernel, head_dim, dtype, name):
    """Bytes of registers that a kernel may spill; none where nothing is said of it."""
    if target == "sm_90" and head_dim > 256:
        has_loops = name in ("rerope", "leaky-full", "blocks", "block-mask", "learned-t5")
        return (SPILLS_OF_WIDE_LOOPS if has_loops else SPILLS_OF_WIDE)[kernel]
    if target == "sm_90" and dtype.itemsize == 2:
        bounds = SPILLS_OF_FAR if name in ("rerope", "leaky-full") else SPILLS
        return SPILLS_OF_T5 if name == "learned-t5" else bounds[kernel]
    if OLDER_TRITON:
        return math.inf
    if dtype.itemsize == 4:
        if target == "gfx942":
            return 0
        bounds = SPILLS_OF_FLOAT32_ON_SM_80 if target == "sm_80" else SPILLS_OF_FLOAT32
        return bounds.get((kernel, head_dim), 0)
    return SPILLS_ELSEWHERE.get((target, kernel, head_dim), 0)


@pytest.mark.parametrize(
    ("target", "head_dim", "v_head_dim", "dtype", "name"),
    [case for target in TARGETS for case in configurations(target)],
)
def test_kernels_compile_within_memory_and_registers(monkeypatch, tmp_path, target, head_dim, v_head_dim, dtype, name):
    launches, schedules = launches_of(monkeypatch, target, head_dim, v_head_dim, dtype, name)
    for launch in schedules:
        compile_launch(*launch, TARGETS[target])
    for kernel, arguments, keywords in launches:
        compiled = compile_launch(kernel, arguments, keywords, TARGETS[target])
        assert compiled.metadata.shared <= SHARED_MEMORY[target], kernel.__name__
        assert tensor_memory(compiled) <= TENSOR_MEMORY, kernel.__name__
        spilled = spilled_bytes(resources(compiled, tmp_path), target)
        width = max(head_dim, v_head_dim)
        assert spilled <= bound_of_spills(target, kernel.__name__, width, dtype, name), kernel.__name__
        if target == "sm_90" and dtype.itemsize == 2:
            assert "wgmma.mma_async" in compiled.asm["ptx"], kernel.__name__
            assert "mma.sync" not in compiled.asm["ptx"], kernel.__name__


# Bytes of registers that the forward of 8-bit products may spill, by target, kind of call, head dim and precision.
SPILLS_OF_8_BITS = {
    ("sm_80", "rerope", 128, "int8"): 24,
    ("sm_80", "alibi-mask", 128, "int8"): 32,
    ("sm_89", "rerope", 128, "int8-fp8"): 16,
    ("sm_89", "alibi-mask", 128, "int8-fp8"): 16,
    ("sm_100", "rerope", 128, "int8-fp8"): 16,
    ("sm_100", "alibi-mask", 128, "int8-fp8"): 8,
}


# What is compiled for a GPU; sm_80 has no e4m3, and AMD's is of another format.
PRECISIONS = {
    "sm_80": ("int8",),
    "sm_89": ("int8-fp8",),
    "sm_90": ("int8", "int8-fp8"),
    "sm_100": ("int8", "int8-fp8"),
    "gfx942": ("int8",),
}


def configurations_of_8_bits(target):
    """Every tile of the tables, and kinds of calls that take most registers."""
    for precision in PRECISIONS[target]:
        for head_dim, v_head_dim in ((64, 64), (128, 128), (192, 128), (256, 256)):
            yield target, head_dim, v_head_dim, precision, "rope-causal"
        for name in ("packed", "rerope", "alibi-mask"):
            yield target, 128, 128, precision, name


@pytest.mark.parametrize(
    ("target", "head_dim", "v_head_dim", "precision", "name"),
    [case for target in PRECISIONS for case in configurations_of_8_bits(target)],
)
def test_8_bit_products_compile_to_8_bit_instructions(
    monkeypatch, tmp_path, target, head_dim, v_head_dim, precision, name
):
    launch = launch_of_8_bits(monkeypatch, target, head_dim, v_head_dim, precision, name)
    compiled = compile_launch(*launch, GPUS[target])
    assert compiled.metadata.shared <= SHARED_MEMORY[target]
    assert tensor_memory(compiled) <= TENSOR_MEMORY
    if not OLDER_TRITON:
        most = SPILLS_OF_8_BITS.get((target, name, head_dim, precision), 0)
        assert spilled_bytes(resources(compiled, tmp_path), target) <= most
    if target == "gfx942":
        assert "v_mfma_i32_32x32x16_i8" in compiled.asm["amdgcn"]
        return
    ptx = compiled.asm["ptx"]
    assert ".s32.s8.s8" in ptx
    is_blackwell = target == "sm_100"
    assert is_blackwell or ("e4m3.e4m3" in ptx) is (precision == "int8-fp8")
    assert not is_blackwell or "tcgen05.mma" in ptx
    if target in ("sm_80", "sm_89"):  # where a descriptor of the host would be a load for each number
        assert "cp.async.cg" in ptx
        assert "ld.global.b8" not in ptx or name == "alibi-mask"


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("target", [target for target in GPUS if target not in TARGETS])
def test_tiles_fit_into_little_shared_memory(monkeypatch, target, head_dim):
    """sm_120 has TMA, so that its descriptors take other shared memory than those of sm_80; spills are not held."""
    pretend_target(monkeypatch, target)
    assert config.table_of_gpu() is config._OTHERS
    launches, _ = launches_of(monkeypatch, target, head_dim, head_dim, torch.bfloat16, "rope-causal")
    for kernel, arguments, keywords in launches:
        compiled = compile_launch(kernel, arguments, keywords, GPUS[target])
        assert compiled.metadata.shared <= SHARED_MEMORY[target], kernel.__name__


@pytest.mark.parametrize(
    ("capability", "table"),
    [
        *(((8, minor), "_OTHERS") for minor in (0, 6, 7, 9)),
        ((9, 0), "_HOPPER"),
        ((10, 0), "_BLACKWELL"),
        ((10, 3), "_BLACKWELL"),
        ((11, 0), "_OTHERS"),
        ((12, 0), "_OTHERS"),
        ((12, 1), "_OTHERS"),
    ],
)
def test_capability_chooses_a_table(monkeypatch, capability, table):
    monkeypatch.setattr(gpu, "is_rocm", lambda: False)
    monkeypatch.setattr(gpu, "current_capability", lambda: capability)
    assert config.table_of_gpu() is getattr(config, table)


def test_amd_has_a_table_of_one_stage(monkeypatch):
    monkeypatch.setattr(gpu, "is_rocm", lambda: True)
    table = config.table_of_gpu()
    assert table is config._AMD
    assert {tiles.num_stages for entries in table.values() for tiles in entries.values()} == {1}


def test_capability_is_asked_once_for_each_gpu(monkeypatch):
    asked, current = [], 0
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    capability = functools.lru_cache(lambda device: asked.append(device) or (9 + device, 0))
    monkeypatch.setattr(gpu, "_capability", capability)
    assert gpu.current_capability() == gpu.current_capability() == (9, 0)
    current = 1
    assert gpu.current_capability() == (10, 0)
    assert asked == [0, 1]


@pytest.mark.parametrize("name", ["_HOPPER", "_BLACKWELL", "_OTHERS", "_AMD"])
def test_tables_are_whole(name):
    table = getattr(config, name)
    keys = {(kernel[:-7], width, size) for kernel in KERNELS for width in (64, 128, 192, 256) for size in (2, 4)}
    keys |= {(name, width, 2) for name in config.QUANTISED_FORWARDS for width in (64, 128, 192, 256)}
    keys |= {(name, 512, 2) for name in ("forward", "backward_dq", "backward_dk", "backward_dv")}
    assert set(table["any"]) == keys
    specials = {"score_mod", "score_mod_bwd", "bias", "cap", "far", "dropout", "packed", "padding", "mask", "bits"}
    assert set(table) - {"any"} <= specials
    assert all(set(entries) <= keys for entries in table.values())
