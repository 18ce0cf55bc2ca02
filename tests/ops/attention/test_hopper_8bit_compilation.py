"""The forward by 8-bit products compiles for Hopper: within registers, with P in 32 bits, and as its tiles say."""

import re

import pytest
import torch
from helpers.targets import SHARED_MEMORY

from ropewalk.ops.attention.hopper import support

if support.why_missing() is not None:
    pytest.skip(str(support.why_missing()), allow_module_level=True)

from helpers.compile_hopper import (
    CASES_8BIT,
    RANGES,
    allowed_spills,
    arguments_of,
    barriers_among_tiles,
    compile_gluon,
    exponentials_in_main_loops,
    forward_8bit_launches_of,
    instructions_of,
    local_memory_in_main_loops,
    order_of_work,
    ptxas_report,
    spilled_bytes,
)

pytestmark = pytest.mark.compile
MOST_PRMT = 4  # of a warp group's loop: P that is carried as numbers of 8 bits takes 95 of them a step


MOST_LOCAL = 12  # of a step: accesses to local memory
# With e4m3 where registers are few, and bounds of keys or of near pairs take some too.
MOST_LOCAL_BOUNDED = 320


def count(instructions, name):
    return sum(line.startswith(name) for line in instructions)


@pytest.mark.parametrize(("head_dim", "dtype", "name", "precision"), CASES_8BIT, ids=str)
def test_the_forward_compiles_as_it_was_tuned(monkeypatch, tmp_path, head_dim, dtype, name, precision):
    launch, before = forward_8bit_launches_of(monkeypatch, head_dim, dtype, name, precision)
    assert before
    assert {kernel.__name__ for kernel, _, _ in before} <= {"mean_kernel", "quantise_kernel"}
    arguments = arguments_of(launch)
    compiled = compile_gluon(launch)
    assert compiled.metadata.shared <= SHARED_MEMORY["sm_90"]
    block, consumers, block_n = arguments["q"].block_shape[3], arguments["CONSUMERS"], arguments["BLOCK_N"]

    report = ptxas_report(compiled, tmp_path)
    assert not re.findall(r"C75\d\d", report)  # matrix products that wait for each other
    assert spilled_bytes(report) <= allowed_spills(f"forward by {precision}", launch, name)

    instructions = instructions_of(compiled, tmp_path)
    assert not barriers_among_tiles(instructions, compiled.metadata.shared)
    # Steps of 32 bytes: of the products with keys over features, of those with values over keys; each twice in a range.
    groups = RANGES.get(name, 1) * consumers
    is_e4m3 = precision != "int8"
    assert count(instructions, "IGMMA") == groups * 2 * (block // 32)
    assert count(instructions, "QGMMA") == (groups * 2 * (block_n // 32) if is_e4m3 else 0)
    assert count(instructions, "HGMMA") == (0 if is_e4m3 else groups * 2 * (block_n // 16))
    # The first scores alone; then those of the next tile beside this one's product with values, which is the second
    # that a step waits for; the last product with values alone.
    marks = "".join(mark for mark, _ in order_of_work(instructions))
    assert marks == "P0PP10P0" * groups
    loops = exponentials_in_main_loops(instructions)
    assert len(loops) == groups
    # A masked tile's and a whole tile's are in branches, which cannot sink.
    if arguments["PIN_EXP2"] or arguments["HAS_PARTIAL_TILES"]:
        assert min(before for before, _ in loops) >= block_n // 2  # a thread's scores, of 64 rows among 128 threads
    bounds = arguments["bounds"]
    has_missing_keys = any(x is not None for x in (arguments["packed"], bounds.key_lengths, bounds.key_starts))
    # What spills otherwise is O between chunks of tiles, and numbers of a tile of queries.
    is_bounded = is_e4m3 and block != 128 and (has_missing_keys or arguments["far_window"] is not None)
    assert max(local_memory_in_main_loops(instructions)) <= (MOST_LOCAL_BOUNDED if is_bounded else MOST_LOCAL)
    if arguments["gate"].ptr is None and (is_e4m3 or not has_missing_keys):  # which read, or zero, numbers of 16 bits
        assert count(instructions, "PRMT") <= groups * MOST_PRMT


@pytest.mark.slow
@pytest.mark.parametrize("pinned", [False, True])
def test_exponentials_sink_unless_they_are_pinned(monkeypatch, tmp_path, pinned):
    """What the check above looks for is there to be found."""
    launch, _ = forward_8bit_launches_of(monkeypatch, 256, torch.bfloat16, "plain", "int8-fp8")
    compiled = compile_gluon(launch, PIN_EXP2=pinned)
    for before, after in exponentials_in_main_loops(instructions_of(compiled, tmp_path)):
        scores, others = (before, after) if pinned else (after, before)
        assert scores >= arguments_of(launch)["BLOCK_N"] // 2
        assert others <= 1  # a row's


@pytest.mark.slow
def test_too_few_registers_spill(monkeypatch, tmp_path):
    """What the check above looks for is there to be found."""
    launch, _ = forward_8bit_launches_of(monkeypatch, 128, torch.bfloat16, "plain", "int8-fp8")
    report = ptxas_report(compile_gluon(launch, CONSUMER_REGISTERS=152), tmp_path)
    assert spilled_bytes(report) > 32
    assert re.findall(r"C75\d\d", report)


def test_local_memory_of_a_step_is_counted_apart():
    step = [
        "STL [R1]",
        "WARPGROUP.DEPBAR.LE gsb0, 0x1",
        "LDL R2",
        "STL [R1]",
        "WARPGROUP.DEPBAR.LE gsb0, 0x0",
        "LDL R2",
    ]
    assert local_memory_in_main_loops(step * 2) == [2, 2]
