"""The Gluon kernels of attention compile for Hopper: within registers, and in the order that makes work overlap."""

import json
import re
from pathlib import Path

import pytest
import torch
from helpers.compile import compile_launch
from helpers.groups import translate, watch_groups
from helpers.targets import SHARED_MEMORY, TARGETS

from ropewalk.ops.attention.hopper import support

if support.why_missing() is not None:
    pytest.skip(str(support.why_missing()), allow_module_level=True)

from helpers.compile_hopper import (
    CASES,
    DROPOUT_CASES,
    FAR_CASES,
    FORWARD_CASES,
    GROUP_CALLS,
    LIST_CALLS,
    LIST_CASES,
    LONE_CALLS,
    ORDERED_CASES,
    RANGE_CALLS,
    RANGE_CASES,
    RANGES,
    SPILLS,
    WIDE,
    WIDE_CASES,
    allowed_spills,
    arguments_of,
    backward_launches_of,
    barriers_among_tiles,
    bias_grad_launch_of,
    compile_gluon,
    exponentials_in_main_loops,
    forward_launch_of,
    instructions_of,
    kernels_of,
    order_of_work,
    ptxas_report,
    source_of,
    spilled_bytes,
)

from ropewalk.ops.attention.hopper import config as hopper_config
from ropewalk.ops.attention.hopper import launch as hopper_launch
from ropewalk.ops.attention.hopper.backward_warps import ALTERNATING

pytestmark = pytest.mark.compile
SIDED_RANGES = {"rerope-causal": 2, "self-extend": 2}  # those in which the first queries do not attend later keys


@pytest.mark.parametrize(
    ("head_dim", "dtype", "name"),
    CASES + FORWARD_CASES + FAR_CASES + RANGE_CASES + WIDE_CASES + LIST_CASES,
    ids=str,
)
def test_the_forward_compiles_as_it_was_tuned(monkeypatch, tmp_path, head_dim, dtype, name):
    launch, schedules = forward_launch_of(monkeypatch, head_dim, dtype, name)
    arguments = arguments_of(launch)
    for schedule in schedules:
        compile_launch(*schedule, TARGETS["sm_90"])
    compiled = compile_gluon(launch)
    assert compiled.metadata.shared <= SHARED_MEMORY["sm_90"]
    block = arguments["q"].block_shape[3] * arguments["D_CHUNKS"]
    consumers, block_n = arguments["CONSUMERS"], arguments["BLOCK_N"]

    report = ptxas_report(compiled, tmp_path)
    assert not re.findall(r"C75\d\d", report)  # matrix products that wait for each other
    assert spilled_bytes(report) <= allowed_spills("forward", launch, name)

    instructions = instructions_of(compiled, tmp_path)
    assert not barriers_among_tiles(instructions, compiled.metadata.shared, arguments["HALVES"])
    # Rows of packed outputs go 16 bytes at a time.
    assert not any(line.startswith("STG.E.U16") for line in instructions)
    # Steps of 16: of the products with keys over features, of those with values over keys; each stands twice in a walk.
    products = sum(line.startswith("HGMMA") for line in instructions)
    groups = RANGES.get(name, 1) * consumers * arguments["HALVES"]
    assert products == groups * 2 * (block // 16 + block_n // 16)
    loops = exponentials_in_main_loops(instructions)
    assert len(loops) == groups
    if arguments["PIN_EXP2"] or arguments["LAGS"]:
        assert min(before for before, _ in loops) >= block_n // 2  # a thread's scores, of 64 rows among 128 threads


@pytest.mark.slow
@pytest.mark.parametrize("pinned", [False, True])
def test_exponentials_sink_unless_they_are_pinned(monkeypatch, tmp_path, pinned):
    """What the check above looks for is there to be found."""
    launch, _ = forward_launch_of(monkeypatch, 128, torch.bfloat16, "rope-causal")
    compiled = compile_gluon(launch, PIN_EXP2=pinned, LAGS=False)
    for before, after in exponentials_in_main_loops(instructions_of(compiled, tmp_path)):
        scores, others = (before, after) if pinned else (after, before)
        assert scores >= arguments_of(launch)["BLOCK_N"] // 2
        assert others == 0


@pytest.mark.parametrize(("head_dim", "dtype", "name"), CASES + FAR_CASES + RANGE_CASES + LIST_CASES)
def test_the_backward_compiles_as_it_was_tuned(monkeypatch, tmp_path, head_dim, dtype, name):
    _, launch, _ = backward_launches_of(monkeypatch, head_dim, dtype, name)
    arguments = arguments_of(launch)
    compiled = compile_gluon(launch)
    assert compiled.metadata.shared <= SHARED_MEMORY["sm_90"]
    (queries, block), keys = arguments["q"].block_shape[2:], arguments["k"].block_shape[2]

    report = ptxas_report(compiled, tmp_path)
    assert not re.findall(r"C75\d\d", report)  # matrix products that wait for each other
    assert spilled_bytes(report) <= allowed_spills("backward", launch, name)

    instructions = instructions_of(compiled, tmp_path)
    assert not barriers_among_tiles(instructions, compiled.metadata.shared)
    # Each role waits for the pass before, which the kernel may begin beside; nothing waits twice.
    assert sum(line.startswith("ACQBULK") for line in instructions) == 4
    # Steps of 16, of two consumers: over features for the scores and for the gradients of probabilities; over queries
    # for the gradients of keys and of values; over keys for those of queries, and once more after the loop if late, or
    # of one consumer before it in a walk that may begin with queries which attend none of its keys, or end with them.
    products = sum(line.startswith("HGMMA") for line in instructions)
    ranges = RANGES.get(name, 1)
    skips_none = arguments["DEFER_DQ"] or name in LIST_CALLS | RANGE_CALLS
    skipping = 0 if skips_none else SIDED_RANGES.get(name, int(arguments["CAUSAL"] or arguments["WINDOWED"]))
    skipping *= 1 + (arguments["STEP_ORDER"] == ALTERNATING.value)
    extra_dq = 2 * ranges if arguments["DEFER_DQ"] else skipping
    assert products == (ranges * 2 * (2 * block + 2 * queries + keys) + extra_dq * keys) // 16
    # Of each consumer, in a step: scores and the gradients of probabilities; gradients of values and queries; of keys.
    # Or scores and the gradients of queries of the step before; those of probabilities and of values; of keys.
    order = "PP10PP1P0" + "P0" if arguments["DEFER_DQ"] else "PP10PP1P10"
    work = order_of_work(instructions)
    marks = "".join(mark for mark, _ in work)
    assert re.sub(order, "", marks) == skipping * "P0"
    # The probabilities are taken behind the scores, before the next product: a thread's, of 64 keys' scores.
    steps = [match.start() for match in re.finditer(order, marks)]
    assert len(steps) == ranges * 2
    # Where dS is summed, some compilers take them beside the product with values: one mark later.
    n_marks = 3 if name in ("t5-learned", "alibi-learned", "alibi-learned-causal") else 2
    for place in steps:
        assert sum(count for _, count in work[place + 2 : place + 2 + n_marks]) >= 64 * queries // 128


@pytest.mark.parametrize(("head_dim", "dtype", "name"), WIDE_CASES, ids=str)
def test_the_backward_of_wide_head_dims_compiles_as_it_was_tuned(monkeypatch, tmp_path, head_dim, dtype, name):
    ranges = RANGES.get(name, 1)
    for direction, launch in kernels_of(backward_launches_of(monkeypatch, head_dim, dtype, name)):
        arguments = arguments_of(launch)
        compiled = compile_gluon(launch)
        assert compiled.metadata.shared <= SHARED_MEMORY["sm_90"]
        report = ptxas_report(compiled, tmp_path)
        assert not re.findall(r"C75\d\d", report)  # matrix products that wait for each other
        assert spilled_bytes(report) <= allowed_spills(direction, launch, name)
        instructions = instructions_of(compiled, tmp_path)
        assert not barriers_among_tiles(instructions, compiled.metadata.shared)
        marks = "".join(mark for mark, _ in order_of_work(instructions))
        products = sum(line.startswith("HGMMA") for line in instructions)
        chunks, (queries, block), width = arguments["D_CHUNKS"], arguments["q"].block_shape[2:], arguments["do"]
        features, values, keys = block * chunks, width.block_shape[3], arguments["k"].block_shape[2]
        if arguments["v"] is None:  # scores, and dV, each twice in a range: S runs a step ahead
            assert products == ranges * 2 * 2 * (features + queries) // 16
            scores = "P" * chunks
            assert marks == f"{scores}0{scores}P10P0" * ranges * 2
        else:
            # Of a warp group's dQ two quarters, of the step before, and once more behind the loop; or a chunk, and in
            # every second step the last one, which are of the step before where dV is computed too.
            is_fused = arguments["dv"] is not None
            of_dq = 4 if chunks == 1 or is_fused else 2
            of_queries = chunks * queries + (queries if is_fused else 0)
            assert products == ranges * 2 * (features + values + of_queries + of_dq * keys) // 16
            # With scores, dP, and dV; dK.
            order = "PP1P1P10P0P0P0" if chunks == 1 else "PPPP10PPPP10P0"
            if is_fused:
                order = "PPP0PP10P0P0PPP0P0P0"
            assert marks == order * ranges * 2
            # Pieces of dQ that each dQ-reduce warp adds in a step.
            added = [line for line in instructions if line.startswith("UTMAREDG")]
            assert all("ADD" in line for line in added)
            assert len(added) == ranges * 2 * (4 if chunks == 1 else 2)
            assert not any(line.startswith("RED") for line in instructions)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "dtype", "name"), DROPOUT_CASES, ids=str)
def test_dropout_fits_beside_everything(monkeypatch, tmp_path, head_dim, dtype, name):
    """The launcher asks for so much shared memory; near and far keys of 128 features leave 1.5 KiB of it."""
    forward, _ = forward_launch_of(monkeypatch, head_dim, dtype, name)
    backward = kernels_of(backward_launches_of(monkeypatch, head_dim, dtype, name))
    for launch in (forward, *(launch for _, launch in backward)):
        compiled = compile_gluon(launch)
        assert compiled.metadata.shared <= SHARED_MEMORY["sm_90"]
        report = ptxas_report(compiled, tmp_path)
        assert not re.findall(r"C75\d\d", report)  # matrix products that wait for each other
        assert not barriers_among_tiles(instructions_of(compiled, tmp_path), compiled.metadata.shared)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "dtype", "name"), ORDERED_CASES)
def test_the_backward_in_order_compiles(monkeypatch, tmp_path, head_dim, dtype, name):
    preprocess, launch, _ = backward_launches_of(monkeypatch, head_dim, dtype, name)
    compile_launch(*preprocess, TARGETS["sm_90"])
    compiled = compile_gluon(launch)
    assert compiled.metadata.shared <= SHARED_MEMORY["sm_90"]
    report = ptxas_report(compiled, tmp_path)
    assert not re.findall(r"C75\d\d", report)  # matrix products that wait for each other
    # As without an order, which is for the dQ-reduce warp alone, but for dropout.
    of = name if name == "ordered-dropout" else name.removeprefix("ordered-")
    assert spilled_bytes(report) <= allowed_spills("backward", launch, of)
    instructions = instructions_of(compiled, tmp_path)
    assert not barriers_among_tiles(instructions, compiled.metadata.shared)
    waits = sum(line.startswith("LDG.E.STRONG.GPU") for line in instructions)
    ends = sum(line.startswith("STG.E.STRONG.GPU") for line in instructions)
    ranges = RANGES.get(name.removeprefix("ordered-"), 1)
    assert waits >= ranges
    assert ends == 2 * ranges  # of each step but the last, and of that


@pytest.mark.slow
@pytest.mark.parametrize("name", list(LONE_CALLS))
@pytest.mark.parametrize("head_dim", [64, 128, *WIDE], ids=str)
def test_one_head_and_one_sequence_compile(monkeypatch, head_dim, name):
    forward, schedules = forward_launch_of(monkeypatch, head_dim, torch.bfloat16, name)
    launches = backward_launches_of(monkeypatch, head_dim, torch.bfloat16, name)
    for launch in (*schedules, launches[0], launches[-1]):
        compile_launch(*launch, TARGETS["sm_90"])
    for launch in (forward, *(launch for _, launch in kernels_of(launches))):
        assert compile_gluon(launch).metadata.shared <= SHARED_MEMORY["sm_90"]


# What makes them differ: whether and how gradients are turned back, lengths, and packed sequences.
@pytest.mark.parametrize("name", [*GROUP_CALLS, *LONE_CALLS, "starts", "alibi-rows", "dropout-ranges", "lists-spans"])
@pytest.mark.parametrize("head_dim", [128, (192, 128)], ids=str)
def test_no_constant_of_a_group_is_lost(monkeypatch, head_dim, name):
    """By Triton 3.6, where a group that ends with a pointer loses those of the groups in it."""
    if head_dim != 128 and name in ("dropout-ranges", "lists-spans"):
        pytest.skip("kernels of wide heads walk no lists")
    launches = [forward_launch_of(monkeypatch, head_dim, torch.bfloat16, name)[0]]
    launches += [launch for _, launch in kernels_of(backward_launches_of(monkeypatch, head_dim, torch.bfloat16, name))]
    with watch_groups() as lost:
        for launch in launches:
            translate(*source_of(launch))
    assert len(launches) > 1
    assert not lost, lost


@pytest.mark.parametrize("head_dim", [64, 128, *WIDE], ids=str)
@pytest.mark.parametrize(
    "name",
    ["plain", "rope-causal", "decay", "bands-learned", "lengths", "packed", "rerope-causal", "self-extend"],
)
def test_the_passes_of_the_backward_compile(monkeypatch, tmp_path, head_dim, name):
    launches = backward_launches_of(monkeypatch, head_dim, torch.bfloat16, name)
    for launch in (launches[0], launches[-1]):
        compiled = compile_launch(*launch, TARGETS["sm_90"])
        # Triton 3.7.1 spills 16 bytes where it turns back interleaved pairs of 64 features, 3.6 none.
        allowed = 16 if head_dim == 64 and launch[2].get("INTERLEAVED") else 0
        assert spilled_bytes(ptxas_report(compiled, tmp_path)) <= allowed, launch[0].__name__


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_gradient_of_a_bias_compiles(monkeypatch, tmp_path, head_dim):
    compiled = compile_launch(
        *bias_grad_launch_of(monkeypatch, head_dim, torch.bfloat16, "t5-learned"), TARGETS["sm_90"]
    )
    assert compiled.metadata.shared <= SHARED_MEMORY["sm_90"]
    assert spilled_bytes(ptxas_report(compiled, tmp_path)) == 0


def test_every_supported_triton_is_compiled_with_and_has_a_record():
    root = Path(__file__).parents[3]
    others = re.findall(
        r"^(?:OLDEST_TRITON|NEWER_TRITONS) := (.*)$", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    usual = re.search(r"^triton==(.*)$", (root / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    versions = {version.rpartition(".")[0] for version in (usual[1], *" ".join(others).split())}
    assert versions == set(support.TRIED)
    assert versions == set(json.loads(SPILLS.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("tokens", "heads_per_key", "head_dim", "section"),
    [(4096, 1, 128, 6), (8192, 1, 64, 6), (16384, 1, 128, 1), (8192, 4, 128, 2), (1024, 4, 128, 16), (100, 8, 64, 128)],
)
def test_sections_of_the_backward_fill_the_cache_or_the_processors(tokens, heads_per_key, head_dim, section):
    """Of the last three not one, 6 and 61 key heads fit into 24 MiB."""
    q = torch.empty(1, heads_per_key, tokens, head_dim, dtype=torch.bfloat16, device="meta")
    assert hopper_config.key_heads_per_l2_section(q, heads_per_key, tokens, head_dim) == section


@pytest.mark.parametrize("name", ["alibi-learned", "rerope-causal"])
def test_the_pass_behind_waits_before_it_reads(monkeypatch, name):
    """Its launch may begin beside the end of the backward kernel."""
    before, _, behind = backward_launches_of(monkeypatch, 64, torch.bfloat16, name)
    assert behind[2]["launch_pdl"]
    ptx = compile_launch(*behind, TARGETS["sm_90"]).asm["ptx"]
    assert 0 <= ptx.find("griddepcontrol.wait") < ptx.find("ld.global")
    assert "griddepcontrol.launch_dependents" in compile_launch(*before, TARGETS["sm_90"]).asm["ptx"]


def test_no_length_makes_another_binary():
    of_schedule = {"n_tiles", "n_rows", "heads_per_l2_section", "n_work", "workspace_rows"}
    of_lengths = of_schedule | {"n_queries", "n_keys", "window", "far_window", "n_elements", "n_sums", "workspace"}
    passes = (hopper_launch.bwd_preprocess_kernel, hopper_launch.bwd_postprocess_kernel)
    kernels = (hopper_launch.forward_kernel, hopper_launch.backward_kernel, hopper_launch.backward_wide_kernel)
    for kernel in (*kernels, *passes):
        specialised = {parameter.name for parameter in kernel.params if not parameter.do_not_specialize}
        assert not specialised & of_lengths
