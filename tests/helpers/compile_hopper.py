"""Compile the Gluon kernels of attention for Hopper as their launchers would, and read what the compiler made."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from pathlib import Path

import torch
import triton
from torch.nn.attention.flex_attention import create_block_mask
from triton.backends.nvidia.compiler import get_ptxas
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from helpers.compile import Recorder, compile_source, describe, describe_launch, pretend_target, rotate_anywhere
from helpers.targets import TARGETS, cuobjdump
from ropewalk import BlockLists, QuantizedProducts
from ropewalk import device as gpu
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.autograd import without_inputs
from ropewalk.ops.attention.backend import Wanted
from ropewalk.ops.attention.blocks import kernel as kernel_of_lists
from ropewalk.ops.attention.hopper import launch as hopper_launch
from ropewalk.ops.attention.hopper import launch_8bit, ranges
from ropewalk.ops.attention.quantise import launch as quantise_launch
from ropewalk.ops.attention.triton import launch_common
from ropewalk.ops.launch.steps import AT_ONCE
from ropewalk.schemes import Alibi, ExpoSB, ReRope, Rope, SelfExtend, T5Bias

H, T = 4, 1152  # whole tiles of 128 and of 192 queries
CALLS = {
    "plain": {},
    "ragged": {"tokens": T - 1},
    "rope-causal": {"position": Rope(), "causal": True},
    "window": {"window": 64},
    "causal-window": {"causal": True, "window": 64},
    "window-sides": {"window": (1100, 20)},
    "lengths": {"key_lengths": torch.tensor([T, 100])},
    "starts": {
        "position": Rope(),
        "causal": True,
        "key_lengths": torch.tensor([200, 100]),
        "key_starts": torch.tensor([0, 3]),
        "query_starts": torch.tensor([0, 0]),
    },
    "packed": {"position": Rope(), "cu_seqlens_q": torch.tensor([0, 128, 2 * T])},
    "packed-causal": {"position": Rope(), "causal": True, "cu_seqlens_q": torch.tensor([0, 128, 2 * T])},
    "alibi": {"position": Alibi()},
    "alibi-causal": {"position": Alibi(), "causal": True},
    "t5": {"position": T5Bias(torch.zeros(32, H))},
    "t5-learned": {"position": T5Bias(torch.zeros(32, H).requires_grad_())},
    "t5-causal": {"position": T5Bias(torch.zeros(32, H), bidirectional=False), "causal": True},
    "alibi-positions": {"position": Alibi(), "causal": True, "positions_q": torch.arange(T)[None]},
    "t5-positions": {"position": T5Bias(torch.zeros(32, H)), "positions_q": torch.arange(T)[None]},
    "alibi-rows": {"position": Alibi(torch.ones(2, H)), "causal": True},
    "alibi-learned": {"position": Alibi(torch.ones(H).requires_grad_())},
    "alibi-learned-causal": {"position": Alibi(torch.ones(2, H).requires_grad_()), "causal": True},
    "decay": {"position": ExpoSB(distance_decay=True)},
    "decay-causal": {"position": ExpoSB(distance_decay=True), "causal": True},
    "bands-decay": {"position": ExpoSB(band_weights=torch.ones(H), distance_decay=True), "causal": True},
    "bands-learned": {"position": ExpoSB(band_weights=torch.ones(H).requires_grad_())},
    "negative": {"causal": True, "scale": -0.1},
    "softcap": {"softcap": 50.0},
    "dropout": {"dropout_p": 0.1},
    "dropout-causal": {"position": Rope(), "causal": True, "dropout_p": 0.1},
    "softcap-sinks": {"causal": True, "softcap": 50.0, "sinks": torch.zeros(H)},
}
# Groups of 8 heads alternate in the backward, where those of the other calls follow each other.
SHARED_CALLS = {
    "shared-rope-causal": CALLS["rope-causal"] | {"heads": 16},
    "shared-starts": CALLS["starts"] | {"heads": 16},
    "shared-softcap": {"causal": True, "softcap": 50.0, "heads": 16},
}
# Whose forward has another configuration, and whose backward is the same: with many keys, with few queries.
_SHORT = ("plain", "rope-causal", "causal-window", "starts", "alibi-causal", "t5", "t5-causal", "bands-learned")
FORWARD_CALLS = {"long-lengths": {"key_lengths": torch.tensor([2 * T, 100]), "tokens": 2 * T}} | {
    f"short-{name}": CALLS[name] | {"tokens": 256, "n_sms": 1} for name in (*_SHORT, "softcap", "softcap-sinks")
}
LISTS = BlockLists(torch.ones(1, H, T // 128, dtype=torch.int32), torch.zeros(1, H, T // 128, 1, dtype=torch.int32))
# Of each head; cut by spans, and by bits.
LIST_CALLS = {
    "lists": {"blocks": LISTS},
    "lists-causal": {"position": Rope(), "causal": True, "blocks": LISTS},
    "lists-lengths": {"key_lengths": torch.tensor([T, 100]), "blocks": LISTS},
    "lists-spans": {"position": Rope(), "blocks": BlockLists.sliding_window(T, window=130)},
    "lists-bits": {
        "position": Rope(),
        "causal": True,
        "blocks": create_block_mask(lambda b, h, m, n: m % 2 == n % 2, None, None, T, T, device="cpu"),
    },
    "lists-alibi": {"position": Alibi(), "causal": True, "blocks": LISTS},
    "lists-alibi-learned": {"position": Alibi(torch.ones(H).requires_grad_()), "blocks": LISTS},
    "lists-rerope": {"position": ReRope(48), "causal": True, "blocks": LISTS},
}
# Numbers that are 1 are constants in a group.
LONE_CALLS = {
    "one-head": {"position": Alibi(), "causal": True, "batch": 1, "heads": 1},
    "one-sequence": {"position": Alibi(), "heads": 1, "cu_seqlens_q": torch.tensor([0, 2 * T])},
}
# Groups that hold constants, such as a stride of 1, beside what follows them.
GROUP_CALLS = {
    "gate-sinks": {"causal": True, "sinks": torch.zeros(H), "gate": torch.zeros(2, H, T, 128).bfloat16()},
    "head-gate-sinks": {"sinks": torch.zeros(H), "gate": torch.zeros(2, T, H).bfloat16().transpose(1, 2)},
    "one-sequence-dropout": {
        "position": ExpoSB(),
        "heads": 1,
        "cu_seqlens_q": torch.tensor([0, 2 * T]),
        "dropout_p": 0.1,
    },
}
# The windows are shorter than T: otherwise nothing is far, and the kernels are those of RoPE.
FAR_CALLS = {
    "rerope-causal": {"position": ReRope(48), "causal": True},
    "self-extend": {"position": SelfExtend(48, 4)},
}
# Positions per token say which pairs are far, and lists where each range has some.
RANGE_CALLS = {
    "ranges-rerope": {"position": ReRope(48), "causal": True, "positions_q": torch.arange(T)[None]},
    "ranges-self-extend": {"position": SelfExtend(48, 4), "positions_q": torch.arange(T)[None]},
    "ranges-packed": {
        "position": SelfExtend(48, 4),
        "causal": True,
        "cu_seqlens_q": torch.tensor([0, 128, 2 * T]),
        "positions_q": torch.arange(2 * T),
    },
}
# With each of what takes registers or shared memory of its own.
_DROPPED = (
    *("window-sides", "starts", "packed-causal", "alibi-causal", "bands-decay", "softcap-sinks", "rerope-causal"),
    *("self-extend", "lists-bits", "lists-alibi", "lists-rerope", "alibi-learned-causal", "lists-alibi-learned"),
)
DROPOUT_CALLS = {
    f"dropout-{name}": {**(CALLS | FAR_CALLS | LIST_CALLS)[name], "dropout_p": 0.1} for name in _DROPPED
} | {
    "dropout-lists-self-extend": {"position": SelfExtend(48, 4), "blocks": LISTS, "dropout_p": 0.1},
    "dropout-ranges": {
        "position": ReRope(48),
        "positions_k": torch.arange(T)[None].int(),
        "key_lengths": torch.tensor([T, 100]),
        "dropout_p": 0.1,
    },
}
RANGES = {"rerope-causal": 2, "self-extend": 3, "lists-rerope": 2}  # of pairs: far ones behind, those ahead, near ones
RANGES |= dict.fromkeys(RANGE_CALLS, 3)
# Deterministic backwards, whose programs add dQ in one order.
ORDERED_CALLS = {
    f"ordered-{name}": {**(CALLS | FAR_CALLS)[name], "deterministic": True}
    for name in ("rope-causal", "starts", "packed-causal", "bands-decay", "dropout", "self-extend")
}
# By 8-bit products, whose precision is named beside them.
PRECISIONS = {
    "int8": "int8",
    "int8-fp8": "int8-fp8",
    "uncentred": QuantizedProducts(values="float8", centre=False),
}
CALLS_8BIT = {"max-logits": {"position": Rope(), "causal": True, "max_logits": True}}
DTYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
}


def call_of(monkeypatch, head_dim, dtype, name, precision=None):
    """Return a call, and a list to which launches of small kernels before the others will be added.

    A pair of head dims is of q and of v.
    """
    every = CALLS_8BIT | CALLS | SHARED_CALLS | FORWARD_CALLS | LONE_CALLS | GROUP_CALLS | FAR_CALLS
    every = every | RANGE_CALLS | LIST_CALLS | DROPOUT_CALLS | ORDERED_CALLS
    keywords = dict(every[name])
    batch, tokens, heads = keywords.pop("batch", 2), keywords.pop("tokens", T), keywords.pop("heads", H)
    n_sms, gate = keywords.pop("n_sms", 132), keywords.pop("gate", None)
    has_max_logits = keywords.pop("max_logits", False)
    layout = "thd" if "cu_seqlens_q" in keywords else "bthd"
    kv_heads = min(heads, 2)
    dims = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    shapes = ((heads, dims[0]), (kv_heads, dims[0]), (kv_heads, dims[1]))
    q, k, v = (torch.randn(batch, tokens, *shape).to(dtype) for shape in shapes)
    if layout == "thd":
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    schedules = []
    rotate_anywhere(monkeypatch)
    monkeypatch.setattr(launch_common, "schedule_kernel", Recorder(launch_common.schedule_kernel, schedules))
    monkeypatch.setattr(launch_common, "sum_parts_kernel", Recorder(launch_common.sum_parts_kernel, []))
    monkeypatch.setattr(gpu, "num_sms", lambda device: n_sms)
    for kernel in ("bias_table_kernel", "relative_positions_kernel"):
        monkeypatch.setattr(hopper_launch, kernel, Recorder(getattr(hopper_launch, kernel), schedules))
    monkeypatch.setattr(ranges, "mark_ranges_kernel", Recorder(ranges.mark_ranges_kernel, schedules))
    monkeypatch.setattr(kernel_of_lists, "compact_kernel", Recorder(kernel_of_lists.compact_kernel, schedules))
    call = make_call(q, k, v, layout=layout, precision=precision, **keywords)._replace(gate=gate)
    if has_max_logits:
        call = call._replace(row_logits=torch.empty(call.q.shape[:3]))
    if call.dropout_p > 0:
        call = call._replace(seed=torch.zeros(1, dtype=torch.int64))
    return call, schedules


def forward_launch_of(monkeypatch, head_dim, dtype, name):
    """Return what the forward of a call would launch: the kernel and its arguments; and what comes before it."""
    call, schedules = call_of(monkeypatch, head_dim, dtype, name)
    launches = []
    monkeypatch.setattr(hopper_launch, "forward_kernel", Recorder(hopper_launch.forward_kernel, launches))
    monkeypatch.setattr(hopper_launch, "counter_of", lambda device: torch.zeros(1, dtype=torch.int32))
    hopper_launch.forward(call)
    (launch,) = launches
    return launch, schedules


def forward_8bit_launches_of(monkeypatch, head_dim, dtype, name, precision):
    """Return what the forward of a call by 8-bit products would launch: the kernel; and those that quantise before."""
    pretend_target(monkeypatch, "sm_90")
    call, _ = call_of(monkeypatch, head_dim, dtype, name, PRECISIONS[precision])
    before, launches = [], []
    for kernel in ("mean_kernel", "quantise_kernel"):
        monkeypatch.setattr(quantise_launch, kernel, Recorder(getattr(quantise_launch, kernel), before))
    recorder = Recorder(launch_8bit.forward_8bit_kernel, launches)
    monkeypatch.setattr(launch_8bit, "forward_8bit_kernel", recorder)
    monkeypatch.setattr(launch_8bit, "counter_of", lambda device: torch.zeros(1, dtype=torch.int32))
    launch_8bit.forward(call, False)
    (launch,) = launches
    return launch, before


def backward_launches_of(monkeypatch, head_dim, dtype, name):
    """Return what the backward of a call would launch: preprocess, the kernel or, if wide, both, and postprocess."""
    return _run_backward(monkeypatch, head_dim, dtype, name)[0]


def bias_grad_launch_of(monkeypatch, head_dim, dtype, name):
    """Return what the backward of a call would launch for the gradient of a bias."""
    (launch,) = _run_backward(monkeypatch, head_dim, dtype, name)[1]
    return launch


def _run_backward(monkeypatch, head_dim, dtype, name):
    call, _ = call_of(monkeypatch, head_dim, dtype, name)
    launches, of_bias = [], []
    for kernel in ("bwd_preprocess_kernel", "backward_kernel", "backward_wide_kernel", "bwd_postprocess_kernel"):
        monkeypatch.setattr(hopper_launch, kernel, Recorder(getattr(hopper_launch, kernel), launches))
    monkeypatch.setattr(hopper_launch, "bias_grad_kernel", Recorder(hopper_launch.bias_grad_kernel, of_bias))
    out, _, saved, _ = launch_common.begin_forward(call, AT_ONCE)
    read = without_inputs(call, saved)
    params = call.score_mod_params
    wanted = Wanted(score_mod_params=params is not None and params.requires_grad)
    hopper_launch.backward(read, out, saved, torch.randn_like(out), None, wanted)
    return launches, of_bias


def kernels_of(launches):
    """Return the launches of Gluon's kernels among those of a backward, with the names of their directions."""
    narrow = [("backward", launch) for launch in launches if "DEFER_DQ" in launch[2]]
    wide = [launch for launch in launches if "DO_STAGES" in launch[2]]
    return [*narrow, *(("backward of dV" if launch[2]["v"] is None else "backward of dK", launch) for launch in wide)]


def arguments_of(launch):
    """Return a recorded launch's arguments by their names."""
    kernel, arguments, keywords = launch
    return dict(zip(kernel.arg_names, arguments, strict=False)) | keywords


def describe_gluon(value, path, specialised, constants, attributes):
    """Return a value's type as Gluon's compiler writes it."""
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{DTYPES[value.base.dtype]}{value.block_shape},{value.layout!r}>"
    return describe(value, path, specialised, constants, attributes)


def source_of(launch, **changed):
    """Return what Gluon's launcher would compile for a recorded launch, and its options."""
    kernel, arguments, keywords = launch
    signature, constants, attributes = describe_launch(kernel, arguments, keywords | changed, describe_gluon)
    source = GluonASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return source, {name: keywords[name] for name in ("num_warps", "maxnreg") if name in keywords}


def compile_gluon(launch, **changed):
    """Compile as Gluon's launcher would for a recorded launch on Hopper, but for the arguments that are changed."""
    source, options = source_of(launch, **changed)
    return compile_source(source, TARGETS["sm_90"], options)


def ptxas_report(compiled, tmp_path):
    """Return the assembler's report on a kernel."""
    tool = get_ptxas(90).path
    ptx = tmp_path / "kernel.ptx"
    ptx.write_text(compiled.asm["ptx"])
    command = [tool, "-v", "--gpu-name=sm_90a", "-o", tmp_path / "kernel.cubin", ptx]
    return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def spilled_bytes(report):
    """Return the bytes of registers that a thread spills, by the assembler's report."""
    (stored,) = re.findall(r"(\d+) bytes spill stores", report)
    return int(stored)


def instructions_of(compiled, tmp_path):
    """Return the machine code, an instruction a line, without addresses and predicates."""
    cubin = tmp_path / "compiled.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z].*?) ;", cuobjdump(cubin, "--dump-sass"))


def barriers_among_tiles(instructions, shared, halves=1):
    """Of the barriers that a kernel makes, those that do not lie behind all tiles, as addresses in shared memory.

    Those that do are in the last 512 bytes, of each half: no tile is as small, and what else is small comes last.
    The compiler gives the memory of a barrier that nobody waits at to a tile; such a barrier may come back over it.
    """
    made = [line for line in instructions if line.startswith("SYNCS.EXCH")]
    assert made
    places = [int((re.findall(r"\+(0x[0-9a-f]+)\]", line) or ["0"])[0], 16) for line in made]
    return [place for place in places if place < shared - 512 * halves]


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


def local_memory_in_main_loops(instructions):
    """Of each consumer's main loops: accesses to local memory between a step's scores and its wait for values."""
    found = []
    for place, instruction in enumerate(instructions):
        if re.match(r"WARPGROUP\.DEPBAR\S* gsb0, 0x1$", instruction):
            step = itertools.takewhile(lambda line: not line.startswith("WARPGROUP.DEPBAR"), instructions[place + 1 :])
            found.append(sum(line.startswith(("LDL", "STL")) for line in step))
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
    *((96, torch.bfloat16, name) for name in ("rope-causal", "dropout-causal")),
    *((128, torch.bfloat16, name) for name in SHARED_CALLS),
]
FORWARD_CASES = [
    *((64, torch.bfloat16, name) for name in FORWARD_CALLS),
    *((128, torch.bfloat16, name) for name in ("short-plain", "short-rope-causal", "short-t5")),
]
WIDE = [(192, 128), 256]  # head dims above 128
WIDE_CALLS = (
    *("plain", "rope-causal", "window-sides", "starts", "packed-causal", "alibi-causal", "bands-decay"),
    *("dropout", "dropout-causal", *SHARED_CALLS),
)
WIDE_CASES = [
    *((head_dim, torch.bfloat16, name) for head_dim in WIDE for name in (*WIDE_CALLS, "softcap-sinks", *FAR_CALLS)),
    ((136, 8), torch.float16, "rope-causal"),
]
_WIDE_DROPPED = [name for name in DROPOUT_CALLS if "lists" not in name and "learned" not in name]
DROPOUT_CASES = [
    *((head_dim, torch.bfloat16, name) for head_dim in (64, 128) for name in DROPOUT_CALLS),
    *((head_dim, torch.bfloat16, name) for head_dim in WIDE for name in _WIDE_DROPPED),
]
ORDERED_CASES = [(head_dim, torch.bfloat16, name) for head_dim in (64, 128) for name in ORDERED_CALLS]
LIST_CASES = [(head_dim, torch.bfloat16, name) for head_dim in (64, 128) for name in LIST_CALLS]
FAR_CASES = [(head_dim, torch.bfloat16, name) for head_dim in (64, 128) for name in FAR_CALLS]
RANGE_CASES = [
    (128, torch.bfloat16, "ranges-rerope"),
    *((64, torch.bfloat16, name) for name in ("ranges-self-extend", "ranges-packed")),
]
# Head dims, dtype, call and precision: all features of a call at 128, and those that cost most elsewhere.
_FEW = ("plain", "rope-causal", "starts", "alibi-causal")
CASES_8BIT = [
    *((128, torch.bfloat16, name, "int8-fp8") for name in (*_FEW, "window-sides", "lengths", "packed-causal", "t5")),
    *((128, torch.bfloat16, name, "int8-fp8") for name in ("softcap", "gate-sinks", "max-logits", "rerope-causal")),
    *((128, torch.bfloat16, name, "int8-fp8") for name in ("self-extend", "lists-bits", "ranges-rerope")),
    *((128, torch.bfloat16, name, "int8") for name in (*_FEW, "packed-causal", "t5", "rerope-causal")),
    *((64, torch.bfloat16, name, "int8-fp8") for name in (*_FEW, "lists-rerope")),
    *((64, torch.bfloat16, name, "int8") for name in (*_FEW, "lists-rerope")),
    *((256, torch.bfloat16, name, "int8-fp8") for name in ("plain", "rope-causal", "packed-causal", "rerope-causal")),
    *((256, torch.bfloat16, name, "int8") for name in ("plain", "rope-causal", "packed-causal", "softcap")),
    *((head_dim, torch.bfloat16, "rope-causal", "uncentred") for head_dim in (64, 128, 256)),
    ((192, 128), torch.bfloat16, "rope-causal", "int8-fp8"),
    ((64, 128), torch.bfloat16, "starts", "int8"),
    (128, torch.float16, "rope-causal", "int8"),
]
# Bytes of registers that a thread spilled when last recorded, by version of Triton: many in the backward, whose
# accumulators take 128 of a thread's registers throughout, or 64 beside steps twice as large.
# `record_hopper_spills.py` writes them.
SPILLS = Path(__file__).parents[1] / "ops/attention/hopper_spills.json"
VERSION = ".".join(triton.__version__.split(".")[:2])


def spill_key(direction, launch, name):
    """Return the name of a launch in the record of spills."""
    arguments = arguments_of(launch)
    return f"{direction}, D {arguments['q'].block_shape[3] * arguments.get('D_CHUNKS', 1)}, {name}"


def allowed_spills(direction, launch, name):
    """Return how many bytes a launch may spill with this Triton: none where none were recorded, otherwise a few more.

    The assembler's choice of registers varies by some bytes with the order of independent instructions.
    """
    recorded = json.loads(SPILLS.read_text(encoding="utf-8"))[VERSION].get(spill_key(direction, launch, name), 0)
    return recorded and recorded + 32
