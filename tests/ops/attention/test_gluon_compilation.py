"""The Gluon kernels of attention compile for Hopper: within registers, and in the order that makes work overlap."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton
from targets import SHARED_MEMORY, TARGETS, cuobjdump
from test_attention_compilation import Recorder, compile_launch, describe

from ropewalk.far_positions import ReRope, SelfExtend
from ropewalk.ops.attention import gluon_support, triton_launch
from ropewalk.ops.attention.checks import as_bhtd, check_call
from ropewalk.ops.attention.prepare import prepare
from ropewalk.positions import Alibi, ExpoSB, Rope

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter compiles nothing"),
    pytest.mark.skipif(gluon_support.why_missing() is not None, reason=str(gluon_support.why_missing())),
]
if gluon_support.why_missing() is None and not INTERPRETED:
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from ropewalk.ops.attention import gluon_backward_launch, gluon_launch

H, T = 4, 256
CALLS = {
    "plain": {},
    "ragged": {"tokens": T - 1},
    "rope-causal": {"position": Rope(), "causal": True},
    "window": {"window": 64},
    "causal-window": {"causal": True, "window": 64},
    "lengths": {"key_lengths": torch.tensor([T, 100])},
    "starts": {
        "position": Rope(),
        "causal": True,
        "key_lengths": torch.tensor([T, 100]),
        "key_starts": torch.tensor([0, 3]),
        "query_starts": torch.tensor([0, 0]),
    },
    "packed": {"position": Rope(), "cu_seqlens_q": torch.tensor([0, 128, 512])},
    "packed-causal": {"position": Rope(), "causal": True, "cu_seqlens_q": torch.tensor([0, 128, 512])},
    "alibi": {"position": Alibi()},
    "alibi-causal": {"position": Alibi(), "causal": True},
    "decay": {"position": ExpoSB(distance_decay=True)},
    "decay-causal": {"position": ExpoSB(distance_decay=True), "causal": True},
    "bands-decay": {"position": ExpoSB(band_weights=torch.ones(H), distance_decay=True), "causal": True},
    "negative": {"causal": True, "scale": -0.1},
    "softcap": {"softcap": 50.0},
    "softcap-sinks": {"causal": True, "softcap": 50.0, "sinks": torch.zeros(H)},
}
# The windows are shorter than T: otherwise nothing is far, and the kernels are those of RoPE.
FAR_CALLS = {
    "rerope-causal": {"position": ReRope(48), "causal": True},
    "self-extend": {"position": SelfExtend(48, 4)},
}
WALKS = {"rerope-causal": 2, "self-extend": 3}  # over far pairs behind, those ahead, and near ones
SIDED_WALKS = {"rerope-causal": 2, "self-extend": 2}  # those in which later keys are not attended by the first queries
DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def call_of(monkeypatch, head_dim, dtype, name):
    """Tensors of a call, what is prepared of it, and the launches of schedules, which what follows will add to."""
    keywords = dict((CALLS | FAR_CALLS)[name])
    tokens, layout = keywords.pop("tokens", T), "thd" if "cu_seqlens_q" in keywords else "bthd"
    q, k, v = (torch.randn(2, tokens, heads, head_dim).to(dtype) for heads in (H, 2, 2))
    if layout == "thd":
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    schedules = []
    monkeypatch.setattr(triton_launch, "schedule_kernel", Recorder(triton_launch.schedule_kernel, schedules))
    call = check_call(q, k, v, layout=layout, **keywords)
    q, k, v = (as_bhtd(x, layout) for x in (q, k, v))
    return (q, k, v), prepare(q, k, call), schedules


def launch_of(monkeypatch, head_dim, dtype, name):
    """What the forward of a call would launch: the kernel and its arguments; and the schedules before it."""
    tensors, prepared, schedules = call_of(monkeypatch, head_dim, dtype, name)
    launches = []
    monkeypatch.setattr(gluon_launch, "forward_kernel", Recorder(gluon_launch.forward_kernel, launches))
    monkeypatch.setattr(gluon_launch, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(gluon_launch, "counter_of", lambda device: torch.zeros(1, dtype=torch.int32))
    gluon_launch.forward(*tensors, prepared)
    (launch,) = launches
    return launch, schedules


def backward_launches_of(monkeypatch, head_dim, dtype, name):
    """What the backward of a call would launch: the pass before the kernel, the kernel, and the pass after it."""
    (q, k, v), prepared, _ = call_of(monkeypatch, head_dim, dtype, name)
    launches = []
    for kernel in ("rows_kernel", "backward_kernel", "finish_kernel"):
        monkeypatch.setattr(gluon_backward_launch, kernel, Recorder(getattr(gluon_backward_launch, kernel), launches))
    out, v, saved, _ = triton_launch.begin_forward(q, k, v, prepared, None)
    gluon_backward_launch.backward(torch.randn_like(out), None, v, out, saved, prepared)
    return launches


def compile_gluon(kernel, arguments, keywords):
    """Compile as Gluon's launcher would for these arguments, on Hopper."""
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | keywords
    signature, constants, attributes = {}, {}, {}
    for index, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        value = values[name]
        if parameter.is_constexpr:
            signature[name], constants[index,] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{DTYPES[value.base.dtype]}{value.block_shape},{value.layout!r}>"
        else:
            signature[name] = describe(value, (index,), not parameter.do_not_specialize, constants, attributes)
    source = GluonASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=TARGETS["sm_90"], options={"num_warps": keywords["num_warps"]})


def reports_of_ptxas(compiled, tmp_path):
    """What the assembler says as it assembles a kernel."""
    tool = get_ptxas(90).path
    ptx = tmp_path / "kernel.ptx"
    ptx.write_text(compiled.asm["ptx"])
    command = [tool, "-v", "--gpu-name=sm_90a", "-o", tmp_path / "kernel.cubin", ptx]
    return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def spilled_bytes(reports):
    """Bytes of registers that a thread stores, by the assembler's reports."""
    (stored,) = re.findall(r"(\d+) bytes spill stores", reports)
    return int(stored)


def instructions_of(compiled, tmp_path):
    """The machine code, an instruction a line, without addresses and predicates."""
    cubin = tmp_path / "compiled.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z].*?) ;", cuobjdump(cubin, "--dump-sass"))


def barriers_among_tiles(instructions, shared):
    """Of the barriers that a kernel makes, those that do not lie behind all tiles, as addresses in shared memory.

    Those that do are in the last 512 bytes: no tile is as small, and what else is small comes last.
    The compiler gives the memory of a barrier that nobody waits at to a tile; such a barrier may come back over it.
    """
    made = [line for line in instructions if line.startswith("SYNCS.EXCH")]
    assert made
    places = [int((re.findall(r"\+(0x[0-9a-f]+)\]", line) or ["0"])[0], 16) for line in made]
    return [place for place in places if place < shared - 512]


def exponentials_in_main_loops(instructions):
    """Of each consumer's main loops, one a walk: exponentials before and after the wait for the product with values.

    The one wait that leaves a product going, the one with values, marks a loop: there its scores are done. What follows
    it is a step's exponentials and, among them, the wait for that product.
    """
    found = []
    for place, instruction in enumerate(instructions):
        if re.match(r"WARPGROUP\.DEPBAR\S* gsb0, 0x1$", instruction):
            counts, waits = [0, 0], 0
            for following in instructions[place + 1 :]:
                if following.startswith("WARPGROUP.DEPBAR"):
                    waits += 1
                if waits == 2:
                    break
                counts[waits] += following.startswith("MUFU.EX2")
            found.append(tuple(counts))
    return found


def order_of_work(instructions):
    """Beginnings of products, as P, and waits, as how many they leave going; and how many exponentials follow each."""
    found = []
    for instruction in instructions:
        wait = re.match(r"WARPGROUP\.DEPBAR\S* gsb0, 0x(\d)$", instruction)
        if wait or instruction.startswith("WARPGROUP.ARRIVE"):
            found.append([wait.group(1) if wait else "P", 0])
        elif instruction.startswith("MUFU.EX2") and found:
            found[-1][1] += 1
    return found


CASES = [
    *((head_dim, torch.bfloat16, name) for head_dim in (64, 128) for name in CALLS),
    *((head_dim, torch.float16, "rope-causal") for head_dim in (64, 128)),
    (96, torch.bfloat16, "rope-causal"),
]
FAR_CASES = [(head_dim, torch.bfloat16, name) for head_dim in (64, 128) for name in FAR_CALLS]
# Bytes of registers that a thread stored when last looked at, by version of Triton: many in the backward, whose sums
# take 128 of a thread's registers throughout, or 64 beside steps twice as large. `record_gluon_spills.py` writes them.
SPILLS = Path(__file__).with_name("gluon_spills.json")
VERSION = ".".join(triton.__version__.split(".")[:2])


def key_of(direction, launch, name):
    """What the record of spills calls a launch of the forward or the backward."""
    _, arguments, _ = launch
    return f"{direction}, D {arguments[0].block_shape[3]}, {name}"


def recorded_spills(direction, launch, name):
    """Of a launch, with this Triton."""
    return json.loads(SPILLS.read_text(encoding="utf-8"))[VERSION].get(key_of(direction, launch, name), 0)


@pytest.mark.parametrize(("head_dim", "dtype", "name"), CASES + FAR_CASES)
def test_the_forward_compiles_as_it_was_tuned(monkeypatch, tmp_path, head_dim, dtype, name):
    launch, schedules = launch_of(monkeypatch, head_dim, dtype, name)
    kernel, arguments, keywords = launch
    for schedule in schedules:
        compile_launch(*schedule, TARGETS["sm_90"])
    compiled = compile_gluon(kernel, arguments, keywords)
    assert compiled.metadata.shared <= SHARED_MEMORY["sm_90"]
    block, consumers, block_n = arguments[0].block_shape[3], keywords["CONSUMERS"], keywords["BLOCK_N"]

    reports = reports_of_ptxas(compiled, tmp_path)
    assert not re.findall(r"C75\d\d", reports)  # matrix products that wait for each other
    assert spilled_bytes(reports) <= recorded_spills("forward", launch, name)

    instructions = instructions_of(compiled, tmp_path)
    assert not barriers_among_tiles(instructions, compiled.metadata.shared)
    # Rows of packed outputs go 16 bytes at a time.
    assert not any(line.startswith("STG.E.U16") for line in instructions)
    # Steps of 16: of the products with keys over features, of those with values over keys; each stands twice in a walk.
    products = sum(line.startswith("HGMMA") for line in instructions)
    walks = WALKS.get(name, 1)
    assert products == walks * consumers * 2 * (block // 16 + block_n // 16)
    loops = exponentials_in_main_loops(instructions)
    assert len(loops) == walks * consumers
    if keywords["PIN"]:
        assert min(before for before, _ in loops) >= block_n // 2  # a thread's scores, of 64 rows among 128 threads


@pytest.mark.parametrize("pinned", [False, True])
def test_exponentials_sink_unless_they_are_pinned(monkeypatch, tmp_path, pinned):
    """What the check above looks for is there to be found."""
    (kernel, arguments, keywords), _ = launch_of(monkeypatch, 128, torch.bfloat16, "rope-causal")
    compiled = compile_gluon(kernel, arguments, {**keywords, "PIN": pinned})
    for before, after in exponentials_in_main_loops(instructions_of(compiled, tmp_path)):
        scores, others = (before, after) if pinned else (after, before)
        assert scores >= keywords["BLOCK_N"] // 2
        assert others == 0


@pytest.mark.parametrize(("head_dim", "dtype", "name"), CASES + FAR_CASES)
def test_the_backward_compiles_as_it_was_tuned(monkeypatch, tmp_path, head_dim, dtype, name):
    _, launch, _ = backward_launches_of(monkeypatch, head_dim, dtype, name)
    kernel, arguments, keywords = launch
    compiled = compile_gluon(kernel, arguments, keywords)
    assert compiled.metadata.shared <= SHARED_MEMORY["sm_90"]
    (queries, block), keys = arguments[0].block_shape[2:], arguments[1].block_shape[2]

    reports = reports_of_ptxas(compiled, tmp_path)
    assert not re.findall(r"C75\d\d", reports)  # matrix products that wait for each other
    assert spilled_bytes(reports) <= recorded_spills("backward", launch, name)

    instructions = instructions_of(compiled, tmp_path)
    assert not barriers_among_tiles(instructions, compiled.metadata.shared)
    # Steps of 16, of two consumers: over features for the scores and for the gradients of probabilities; over queries
    # for the gradients of keys and of values; over keys for those of queries, and once more after the loop if late, or
    # of one consumer before it in a walk that may begin with queries which attend none of its keys.
    products = sum(line.startswith("HGMMA") for line in instructions)
    walks = WALKS.get(name, 1)
    handed = 0 if keywords["APART"] else SIDED_WALKS.get(name, int(keywords["CAUSAL"] or keywords["WINDOWED"]))
    once_more = 2 * walks if keywords["APART"] else handed
    assert products == (walks * 2 * (2 * block + 2 * queries + keys) + once_more * keys) // 16
    # Of each consumer, in a step: scores and the gradients of probabilities; gradients of values and queries; of keys.
    # Or scores and the gradients of queries of the step before; those of probabilities and of values; of keys.
    order = "PP10PP1P0" + "P0" if keywords["APART"] else "PP10PP1P10"
    work = order_of_work(instructions)
    marks = "".join(mark for mark, _ in work)
    assert re.sub(order, "", marks) == handed * "P0"
    # The probabilities are taken behind the scores, before the next product: a thread's, of 64 keys' scores.
    steps = [match.start() for match in re.finditer(order, marks)]
    assert len(steps) == walks * 2
    for place in steps:
        assert work[place + 2][1] + work[place + 3][1] >= 64 * queries // 128


# What makes them differ: whether and how gradients are turned back, lengths, and packed sequences.
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["plain", "rope-causal", "decay", "lengths", "packed", "rerope-causal", "self-extend"])
def test_the_passes_of_the_backward_compile(monkeypatch, tmp_path, head_dim, name):
    rows, _, finish = backward_launches_of(monkeypatch, head_dim, torch.bfloat16, name)
    for launch in (rows, finish):
        compiled = compile_launch(*launch, TARGETS["sm_90"])
        # Triton 3.7.1 spills 16 bytes where it turns back interleaved pairs of 64 features, 3.6 none.
        allowed = 16 if head_dim == 64 and launch[2].get("INTERLEAVED") else 0
        assert spilled_bytes(reports_of_ptxas(compiled, tmp_path)) <= allowed, launch[0].__name__


def test_every_version_that_is_served_is_compiled_with_and_has_its_record():
    root = Path(__file__).parents[3]
    others = re.search(r"^OTHER_TRITONS := (.*)$", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    usual = re.search(r"^triton==(.*)$", (root / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    versions = {version.rpartition(".")[0] for version in (usual[1], *others[1].split())}
    assert versions == set(gluon_support.TRIED)
    assert versions == set(json.loads(SPILLS.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("tokens", "heads_per_key", "head_dim", "together"),
    [(4096, 1, 128, 6), (8192, 1, 64, 6), (16384, 1, 128, 1), (8192, 4, 128, 2), (1024, 4, 128, 16), (100, 8, 64, 128)],
)
def test_sections_of_the_backward_fill_the_cache_or_the_processors(tokens, heads_per_key, head_dim, together):
    """Of the last three not one, 6 and 61 key heads fit into 24 MiB."""
    q = torch.empty(1, heads_per_key, tokens, head_dim, dtype=torch.bfloat16, device="meta")
    assert gluon_backward_launch._heads_together(q, heads_per_key, tokens, head_dim) == together


def test_no_length_makes_another_binary():
    of_lengths = {"n_tiles", "n_rows", "rows_of_head", "heads_together", "n_queries", "n_keys", "total"}
    of_lengths |= {"window", "far_window"}
    passes = (gluon_backward_launch.rows_kernel, gluon_backward_launch.finish_kernel)
    for kernel in (gluon_launch.forward_kernel, gluon_backward_launch.backward_kernel, *passes):
        specialised = {parameter.name for parameter in kernel.params if not parameter.do_not_specialize}
        assert not specialised & of_lengths
