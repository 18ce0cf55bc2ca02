"""Write what the compilers say of each kernel into docs/kernels: registers, spills and shared memory, for each target.

python tools/kernel_figures.py        compiles everything (minutes), writes figures.json, and the tables of all pages
python tools/kernel_figures.py PAGE   compiles what a page, or several, shows: attention-backward-hopper, say
python tools/kernel_figures.py tables writes the tables again, from figures.json

It needs no GPU: kernels are compiled as their tests compile them, by the tests' own functions.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

PAGES = Path(__file__).parents[1] / "docs/kernels"
FIGURES = PAGES / "figures.json"
TESTS = Path(__file__).parents[1] / "tests"
if str(TESTS) not in sys.path:
    sys.path.append(str(TESTS))

from helpers import append_launches, attention_launches, compile_hopper, decode_launches  # noqa: E402
from helpers.compile import Recorder, compile_launch, pretend_target  # noqa: E402
from helpers.head_launches import HEAD_KERNELS, specialise_heads  # noqa: E402
from helpers.norm_launches import KERNELS as NORM_KERNELS  # noqa: E402
from helpers.norm_launches import specialise_norm  # noqa: E402
from helpers.paged_launches import launches_of as paged_launches_of  # noqa: E402
from helpers.rope_launches import specialise  # noqa: E402
from helpers.targets import TARGETS, TENSOR_MEMORY, resources, spilled_bytes, tensor_memory  # noqa: E402

from ropewalk import BlockLists  # noqa: E402
from ropewalk import device as gpu  # noqa: E402
from ropewalk.ops.attention.api import make_call  # noqa: E402
from ropewalk.ops.attention.blocks import build_kernel  # noqa: E402
from ropewalk.ops.attention.blocks import kernel as blocks_kernel  # noqa: E402
from ropewalk.ops.attention.blocks import mask_kernel as pack_kernel  # noqa: E402
from ropewalk.ops.attention.blocks.tables import find_tables  # noqa: E402
from ropewalk.ops.attention.gate import kernel as gate  # noqa: E402
from ropewalk.ops.attention.hopper.tiles import BLOCK_N, WG_ROWS  # noqa: E402
from ropewalk.ops.attention.libraries import merge  # noqa: E402
from ropewalk.ops.attention.quantise import launch as quantise_launch  # noqa: E402
from ropewalk.ops.attention.triton import gather, table_rows, weigh  # noqa: E402
from ropewalk.ops.launch.steps import AT_ONCE  # noqa: E402
from ropewalk.ops.rope.cuda import build  # noqa: E402
from ropewalk.ops.rope.pages import launch as page_launch  # noqa: E402
from ropewalk.ops.rope.pages.call import PageRotation  # noqa: E402
from ropewalk.schemes import Rope  # noqa: E402

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
BF16, FP32 = torch.bfloat16, torch.float32
Plan = tuple[Callable[[], Any], str]  # what compiles a kernel, and how its work is cut


@dataclass(frozen=True)
class Row:
    """A kernel in one configuration: what the table calls it, and the arguments of the function that compiles it."""

    kernel: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    for_hopper: bool = False  # of the launchers of the Gluon kernels

    @property
    def targets(self) -> tuple[str, ...]:
        """What it is compiled for."""
        if self.arguments.get("precision") == "int8-fp8" and not self.for_hopper:
            return tuple(target for target in TARGETS if target not in ("sm_80", "gfx942"))  # which lack e4m3
        return ("sm_90",) if self.for_hopper else tuple(TARGETS)

    @property
    def key(self) -> str:
        """What figures.json calls it."""
        return f"{self.kernel}{' for Hopper' if self.for_hopper else ''}: {self.name}"


def _attention_rows(*kernels: str) -> Iterator[Row]:
    for kernel in kernels:
        yield Row(kernel, "no position, D 64", {"call": "plain", "dims": (64, 64)})
        yield Row(kernel, "no position, D 128", {"call": "plain", "dims": (128, 128)})
        yield Row(kernel, "RoPE, causal, D 64", {"call": "rope-causal", "dims": (64, 64)})
        yield Row(kernel, "RoPE, causal, D 128", {"call": "rope-causal", "dims": (128, 128)})
        yield Row(kernel, "RoPE, causal, D 192, Dv 128", {"call": "rope-causal", "dims": (192, 128)})
        yield Row(kernel, "RoPE, causal, D 256", {"call": "rope-causal", "dims": (256, 256)})
        if kernel != "backward_dkdv_kernel":  # which is launched twice there
            yield Row(kernel, "RoPE, causal, D 512", {"call": "rope-causal", "dims": (512, 512)})
        yield Row(kernel, "RoPE, causal, packed, D 128", {"call": "packed", "dims": (128, 128)})
        yield Row(kernel, "learned ALiBi, causal, D 128", {"call": "learned", "dims": (128, 128)})
        yield Row(kernel, "dropout, causal, D 128", {"call": "dropout", "dims": (128, 128)})
        yield Row(kernel, "ReRoPE, causal, D 128", {"call": "rerope", "dims": (128, 128)})
        yield Row(kernel, "RoPE, causal, D 128, float32", {"call": "rope-causal", "dims": (128, 128), "dtype": FP32})


def _hopper_8bit_rows(precision: str, calls: Iterable[str], head_dims: tuple[int, ...], label: str) -> Iterator[Row]:
    for name in calls:
        for head_dim in head_dims:
            arguments = {"call": HOPPER_CALLS[name], "head_dim": head_dim, "precision": precision}
            yield Row("forward_8bit_kernel", f"{label}, {name}, D {head_dim}", arguments, for_hopper=True)


def _hopper_rows(
    kernel: str, calls: dict[str, str], head_dims: tuple[Any, ...] = (64, 128), of: str = ""
) -> Iterator[Row]:
    """A kernel's rows, or those of one of its gradients."""
    for name, call in calls.items():
        for dims in head_dims:
            head_dim = f"D {dims[0]}, Dv {dims[1]}" if isinstance(dims, tuple) else f"D {dims}"
            full_name = f"{of}, {name}, {head_dim}" if of else f"{name}, {head_dim}"
            yield Row(kernel, full_name, {"call": call, "head_dim": dims, "of": of}, for_hopper=True)


HOPPER_CALLS = {
    "no position": "plain",
    "RoPE, causal": "rope-causal",
    "RoPE, causal, packed": "packed-causal",
    "ALiBi, causal": "alibi-causal",
    "ExpoSB with decay, causal": "decay-causal",
    "softcap": "softcap",
    "ReRoPE, causal": "rerope-causal",
}
HOPPER_8BIT = ("no position", "RoPE, causal", "RoPE, causal, packed", "softcap", "ReRoPE, causal")
HOPPER_SCORES = {name: HOPPER_CALLS[name] for name in ("ALiBi, causal", "ExpoSB with decay, causal", "softcap")}
HOPPER_BIASES = {"T5's bias, learned": "t5-learned"}
# Of 256 queries, in many rows.
HOPPER_SHORT = {"RoPE, causal, short": "short-rope-causal", "key lengths, causal, short": "short-starts"}
HOPPER_LEARNED = {
    "ALiBi, learned": "alibi-learned",
    "ALiBi, learned, causal": "alibi-learned-causal",
    **HOPPER_BIASES,
}
WIDE = ((192, 128), 256)  # head dims of q and k, and of v if it differs
ACROSS_HEADS = {"weight": "across", "norm": {"across_heads": True}}
DECODE = {"kind": "offsets", "batch": 8, "tokens": 1}
ROWS: dict[str, list[Row]] = {
    "rotation-triton": [
        Row("rotate_kernel", "half-split"),
        Row("rotate_kernel", "interleaved", {"interleaved": True}),
        Row("rotate_kernel", "half-split, in place", {"inplace": True}),
        Row("rotate_kernel", "half-split, bhtd", {"layout": "bhtd"}),
        Row("rotate_kernel", "half-split, packed", {"kind": "packed"}),
        Row("rotate_kernel", "half-split, 64 of 128 features", {"rotary_dim": 64}),
        Row("rotate_kernel", "half-split, float32", {"dtype": "fp32"}),
        Row("rotate_kernel", "half-split, decode", DECODE),
        Row("rotate_kernel", "interleaved, decode", {**DECODE, "interleaved": True}),
        *(
            Row(kernel, name, arguments)
            for kernel in HEAD_KERNELS
            for name, arguments in {
                "half-split, D 64": {},
                "interleaved, D 128": {"head_dim": 128, "interleaved": True},
                "half-split, 64 of 128 features": {"head_dim": 128, "rotary_dim": 64},
                "half-split, D 64, float32": {"dtype": "fp32"},
            }.items()
        ),
        Row("row_sum_kernel", "12 heads, D 64"),
        *(
            Row(kernel, name, arguments)
            for kernel in NORM_KERNELS
            for name, arguments in {
                "half-split": {},
                "interleaved": {"interleaved": True},
                "half-split, 64 of 256 features": {"head_dim": 256, "rotary_dim": 64},
                "across heads": ACROSS_HEADS,
                "a weight per head": {"weight": "heads"},
                "half-split, float32": {"dtype": "fp32"},
            }.items()
        ),
        Row("weight_sum_kernel", "D 128"),
        *(
            Row("append_kernel", name, arguments)
            for name, arguments in {
                "bfloat16, 64 tokens": {"cache": "own"},
                "bfloat16, 16384 tokens": {"cache": "own", "tokens": 16384},
                "float8, 16384 tokens": {"cache": "fp8", "tokens": 16384},
                "int8, 16384 tokens": {"cache": "int8", "tokens": 16384},
                "4-bit, 16384 tokens": {"cache": "int4", "tokens": 16384},
            }.items()
        ),
        Row("rotate_pages_kernel", "half-split, D 128"),
    ],
    "attention-forward": [
        *_attention_rows("forward_kernel"),
        Row("schedule_kernel", "tiles of 64 queries, packed", {"call": "packed", "dims": (128, 128)}),
        Row("weigh_kernel", "D 128", {"head_dim": 128}),
        Row("table_rows_kernel", "D 128", {"head_dim": 128}),
        Row("mark_kernel", "1024 × 1024 tokens"),
        Row("compact_kernel", "1024 × 1024 tokens"),
        Row("span_kernel", "1024 × 1024 tokens"),
        Row("choose_kernel", "top-k, 1024 × 1024 tokens"),
        Row("mask_kernel", "1024 × 1024 tokens"),
        Row("pack_kernel", "1024 × 1024 tokens"),
    ],
    "attention-forward-hopper": [
        *_hopper_rows("forward_kernel", HOPPER_CALLS, (64, 128, (192, 128), 256)),
        *_hopper_rows("forward_kernel", HOPPER_BIASES),
        *_hopper_rows("forward_kernel", HOPPER_SHORT, (64,)),
        *_hopper_rows("bias_table_kernel", HOPPER_BIASES, (128,)),
        *_hopper_rows("relative_positions_kernel", {"ALiBi, causal": "alibi-positions"}, (128,)),
        *_hopper_rows("mark_ranges_kernel", {"ReRoPE, causal, by positions": "ranges-rerope"}, (128,)),
    ],
    "attention-forward-8bit": [
        *_hopper_8bit_rows("int8", HOPPER_8BIT, (64, 128, 256), "int8"),
        *_hopper_8bit_rows("int8-fp8", HOPPER_8BIT, (64, 128, 256), "int8-fp8"),
        *_hopper_8bit_rows("uncentred", ("RoPE, causal",), (64, 128, 256), "e4m3 without centring"),
    ],
    "attention-quantise": [
        Row("mean_kernel", "RoPE, D 128", {"head_dim": 128, "precision": "int8"}),
        *(
            Row("quantise_kernel", f"{precision}, RoPE, D {head_dim}", {"head_dim": head_dim, "precision": precision})
            for precision in ("int8", "int8-fp8")
            for head_dim in (64, 128, 256)
        ),
    ],
    "attention-backward": [
        *_attention_rows("backward_dq_kernel", "backward_dkdv_kernel"),
        Row("sinks_grad_kernel", "D 128", {"call": "sinks", "dims": (128, 128)}),
        Row("sum_parts_kernel", "learned ALiBi, D 128", {"call": "learned", "dims": (128, 128)}),
    ],
    "attention-backward-hopper": [
        *_hopper_rows("backward_kernel", HOPPER_CALLS),
        *_hopper_rows("backward_kernel", HOPPER_LEARNED),
        *_hopper_rows("backward_wide_kernel", HOPPER_CALLS, (256,), "dV"),
        *_hopper_rows("backward_wide_kernel", HOPPER_SCORES, ((192, 128),), "dV"),  # others compute dV beside dK
        *_hopper_rows("backward_wide_kernel", HOPPER_CALLS, WIDE, "dK"),
        *_hopper_rows("bwd_preprocess_kernel", {"dense": "rope-causal"}),
        *_hopper_rows("bwd_postprocess_kernel", {"RoPE": "rope-causal", "band weights, learned": "bands-learned"}),
        *_hopper_rows("bias_grad_kernel", HOPPER_BIASES),
    ],
    "attention-few-queries": [
        Row("decode_kernel", "1 query, D 64", {"head_dim": 64}),
        Row("decode_kernel", "1 query, D 128", {"head_dim": 128}),
        Row("decode_kernel", "1 query, D 256", {"head_dim": 256}),
        Row("decode_kernel", "1 query, D 512", {"head_dim": 512}),
        Row("decode_kernel", "1 query, D 128, pages of 16", {"head_dim": 128, "page_size": 16}),
        Row("decode_kernel", "1 query, D 128, pages of 64", {"head_dim": 128, "page_size": 64}),
        Row("decode_kernel", "16 queries, causal, D 128", {"head_dim": 128, "queries": 16, "call": "rope-causal"}),
        Row("decode_kernel", "1 query, ReRoPE, D 128", {"head_dim": 128, "call": "rerope"}),
        Row("decode_kernel", "1 query, D 128, float32", {"head_dim": 128, "dtype": FP32}),
        Row("combine_kernel", "D 128", {"head_dim": 128}),
        *(
            Row("decode_pages_kernel", f"{name}, D 128", {"kind": kind}, for_hopper=True)
            for kind, name in (("own", "bfloat16"), ("fp8", "float8"), ("int8", "int8"), ("int4", "4-bit"))
        ),
        Row("combine_shares_kernel", "D 128", {"kind": "own"}, for_hopper=True),
        Row("gather_kernel", "bfloat16, pages of 16, D 128", {"dtype": BF16}),
        Row("gather_kernel", "float8, pages of 16, D 128", {"dtype": torch.float8_e4m3fn, "scale": (8,)}),
        Row("gather_kernel", "int8, pages of 16, D 128", {"dtype": torch.int8, "scale": (9, 16, 8)}),
        Row(
            "gather_kernel",
            "4-bit, pages of 16, D 128",
            {"dtype": torch.uint8, "width": 64, "scale": (9, 16, 8, 4), "scale_dtype": torch.float16},
        ),
    ],
    "attention-merge": [
        Row("merge_kernel", "D 64", {"head_dim": 64}),
        Row("merge_kernel", "D 128", {"head_dim": 128}),
        Row("gate_forward_kernel", "D 128", {"head_dim": 128}),
        Row("gate_backward_kernel", "D 128", {"head_dim": 128}),
    ],
}
CUDA_TARGETS = ("80", "90", "100")
_TYPES = {"6__half": "float16", "13__nv_bfloat16": "bfloat16", "f": "float32", "d": "float64"}
_PAIRINGS = ("half-split", "interleaved", "interleaved, one number an access")


def plan(row: Row, target: str) -> Plan:
    """How a kernel is compiled where its launcher finds the target."""
    if row.kernel == "rotate_kernel":
        noted = specialise(**row.arguments)
        tile = f"{noted['BLOCK_TOKENS']} × {noted['BLOCK_HEADS']}, {noted['threads']} threads"
        return partial(noted.compile, TARGETS[target]), tile
    if row.kernel in (*HEAD_KERNELS, "row_sum_kernel"):
        noted = specialise_heads(row.kernel, **row.arguments)
        if row.kernel == "row_sum_kernel":
            tile = f"{noted['BLOCK_TOKENS']} × {noted['BLOCK_COLUMNS']}, {32 * noted['num_warps']} threads"
        else:
            tile = f"{noted['BLOCK_ROWS']} rows, {noted['threads']} threads"
        return partial(noted.compile, TARGETS[target]), tile
    if row.kernel in (*NORM_KERNELS, "weight_sum_kernel"):
        noted = specialise_norm(row.kernel, **row.arguments)
        if row.kernel == "weight_sum_kernel":
            tile = f"{noted['BLOCK_ROWS']} × {noted['BLOCK_D']}, {32 * noted['num_warps']} threads"
        else:
            tile = f"{noted['BLOCK_TOKENS']} × {noted['BLOCK_HEADS']}, {noted['threads']} threads"
            tile += f", ≤ {noted['maxnreg']} r" if "maxnreg" in noted.arguments else ""
        return partial(noted.compile, TARGETS[target]), tile
    if row.kernel == "append_kernel":
        noted = append_launches.specialise(**row.arguments)
        tile = f"{noted['BLOCK_TOKENS']} × {noted['BLOCK_HEADS']}, {noted['threads']} threads"
        return partial(append_launches.compile_for, target, noted), tile
    with pytest.MonkeyPatch.context() as patch:
        launch = (_launch_of_gluon if row.for_hopper else _LAUNCHES[row.kernel])(patch, row, target)
    if row.for_hopper and row.kernel in (
        "forward_8bit_kernel",
        "forward_kernel",
        "backward_kernel",
        "backward_wide_kernel",
    ):
        return partial(compile_hopper.compile_gluon, launch), _describe_roles(launch[2])
    if row.kernel in ("decode_pages_kernel", "combine_shares_kernel"):
        return partial(compile_hopper.compile_gluon, launch), _describe_paged(launch[2])
    return partial(compile_launch, *launch, TARGETS[target]), _describe_tile(launch[2])


def _describe_paged(keywords: dict[str, Any]) -> str:
    """How a tile of the kernel for pages is cut, or the warps of the one that combines shares."""
    if "maxnreg" not in keywords:
        return f"{keywords['num_warps']} warp"
    config = keywords["CONFIG"]
    keys = 16 * config.BLOCKS * config.WARPS // config.HEADS
    heads = f" of {config.HEADS} heads" if config.HEADS > 1 else ""
    return f"{config.N} × {keys}{heads}, {config.WARPS} w, {config.STAGES} s, ≤ {keywords['maxnreg']} r"


def _describe_tile(keywords: dict[str, Any]) -> str:
    if "CONFIG" in keywords:
        keywords = keywords | keywords["CONFIG"]._asdict()
    if "BLOCK_M" not in keywords and "BLOCK_N" in keywords:
        return f"{keywords['BLOCK_N']} keys, {keywords['num_warps']} w"
    if "BLOCK_M" not in keywords:
        registers = f", ≤ {keywords['maxnreg']} r" if "maxnreg" in keywords else ""
        return f"{keywords.get('num_warps', 4)} warps{registers}"
    if "BLOCK_N" not in keywords:
        return f"{keywords['BLOCK_M']} rows, {keywords.get('num_warps', 4)} w"
    tile = f"{keywords['BLOCK_M']} × {keywords['BLOCK_N']}, {keywords['num_warps']} w, {keywords['num_stages']} s"
    return tile + (f", ≤ {keywords['maxnreg']} r" if "maxnreg" in keywords else "")


def _describe_roles(keywords: dict[str, Any]) -> str:
    """How a Gluon kernel's tile is cut, by the configuration that it was launched with."""
    if "CONSUMERS" in keywords:
        queries, keys = keywords["CONSUMERS"] * WG_ROWS.value, keywords["BLOCK_N"]
    else:
        queries, keys = keywords["BLOCK_M"], BLOCK_N.value
    names = [name for name in ("PIN_EXP2", "CONVERT_P_EARLY", "PINGPONG", "DEFER_DQ") if keywords.get(name)]
    names += [f"FLUSH {keywords['FLUSH']}"] if keywords.get("FLUSH") else []
    return ", ".join(
        [f"{queries} × {keys}", f"{_stages_of(keywords)} s", f"≤ {keywords['CONSUMER_REGISTERS']} r", *names]
    )


def _stages_of(keywords: dict[str, Any]) -> str:
    """The stages of what is loaded: one number, or one for each tensor."""
    stages = [
        keywords[name] for name in ("STAGES", "Q_STAGES", "DO_STAGES", "K_STAGES", "V_STAGES") if name in keywords
    ]
    return str(stages[0]) if len(set(stages)) == 1 else " and ".join(map(str, stages))


def _launch_of_gluon(patch: pytest.MonkeyPatch, row: Row, target: str) -> tuple[Any, ...]:
    if "kind" in row.arguments:
        return _find(row.kernel, paged_launches_of(patch, row.arguments["kind"], 128, "one"))
    call, head_dim = row.arguments["call"], row.arguments["head_dim"]
    if row.kernel == "forward_8bit_kernel":
        return compile_hopper.forward_8bit_launches_of(patch, head_dim, BF16, call, row.arguments["precision"])[0]
    if row.kernel == "forward_kernel":
        launch, _before = compile_hopper.forward_launch_of(patch, head_dim, BF16, call)
        return _find(row.kernel, [launch])
    if row.kernel in ("bias_table_kernel", "relative_positions_kernel", "mark_ranges_kernel"):
        return _find(row.kernel, compile_hopper.forward_launch_of(patch, head_dim, BF16, call)[1])
    if row.kernel == "bias_grad_kernel":
        return compile_hopper.bias_grad_launch_of(patch, head_dim, BF16, call)
    launches = compile_hopper.backward_launches_of(patch, head_dim, BF16, call)
    if row.kernel == "backward_wide_kernel":
        return dict(compile_hopper.kernels_of(launches))[f"backward of {row.arguments['of']}"]
    return _find(row.kernel, launches)


def _launch_of_attention(patch: pytest.MonkeyPatch, row: Row, target: str) -> tuple[Any, ...]:
    call, dims, dtype = row.arguments["call"], row.arguments["dims"], row.arguments.get("dtype", BF16)
    launches, schedules = attention_launches.launches_of(patch, target, *dims, dtype, call)
    return _find(row.kernel, [*launches, *schedules[:1]])


def _launch_of_blocks(patch: pytest.MonkeyPatch, row: Row, target: str) -> tuple[Any, ...]:
    launches: list[Any] = []
    for module, kernels in (
        (blocks_kernel, ("mark_kernel", "compact_kernel")),
        (build_kernel, ("span_kernel", "choose_kernel", "mask_kernel")),
        (pack_kernel, ("pack_kernel",)),
    ):
        for kernel in kernels:
            patch.setattr(module, kernel, Recorder(getattr(module, kernel), launches))
    patch.setattr(gpu, "why_no_triton", lambda device: None)
    BlockLists.causal(1024)
    BlockLists.top_k(torch.zeros(1, 4, 8, 8), 2, n_queries=1024)
    mask = torch.ones(1, 1, 1024, 1024, dtype=torch.bool)
    BlockLists.from_mask(mask)
    q = torch.empty(1, 1024, 4, 128)
    find_tables(BlockLists(torch.zeros(1, 1, 8).int(), torch.zeros(1, 1, 8, 8).int()), q, q, "bthd", None)
    pack_kernel.list_mask(mask, "rows")
    return next(launch for launch in launches if launch[0].__name__ == row.kernel)  # rows are compacted, then columns


def _launch_of_decode(patch: pytest.MonkeyPatch, row: Row, target: str) -> tuple[Any, ...]:
    head_dim, dtype = row.arguments["head_dim"], row.arguments.get("dtype", BF16)
    queries, page_size = row.arguments.get("queries", 1), row.arguments.get("page_size")
    call = decode_launches.CALLS[row.arguments.get("call", "rope")]
    launches = decode_launches.launches_of(patch, target, head_dim, dtype, queries, page_size, **call)
    return _find(row.kernel, launches)


def _launch_of_pages(patch: pytest.MonkeyPatch, row: Row, target: str) -> tuple[Any, ...]:
    launches: list[Any] = []
    patch.setattr(page_launch, row.kernel, Recorder(page_launch.rotate_pages_kernel, launches))
    table, positions = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 48, dtype=torch.int64)
    cos, sin = torch.zeros(2, 64, 64)
    pages = torch.empty(9, 16, 8, 128, dtype=BF16)
    page_launch.rotate(PageRotation(pages, table, positions, cos, sin, None, 128, 0, False), AT_ONCE)
    return _find(row.kernel, launches)


def _launch_of_gather(patch: pytest.MonkeyPatch, row: Row, target: str) -> tuple[Any, ...]:
    launches: list[Any] = []
    patch.setattr(gather, row.kernel, Recorder(gather.gather_kernel, launches))
    pages = torch.zeros(9, 16, 8, row.arguments.get("width", 128), dtype=row.arguments["dtype"])
    scales = {}
    if "scale" in row.arguments:
        scale = torch.ones(row.arguments["scale"], dtype=row.arguments.get("scale_dtype", FP32))
        scales = {"k_scale": scale, "v_scale": scale}
    where = {"block_table": torch.zeros(2, 4, dtype=torch.int32), "key_lengths": torch.tensor([60, 50])}
    q = torch.empty(2, 32, 32, 128, dtype=BF16)
    gather.copy_pages(make_call(q, pages, pages, causal=True, **where, **scales))
    return _find(row.kernel, launches)


def _launch_of_merge(patch: pytest.MonkeyPatch, row: Row, target: str) -> tuple[Any, ...]:
    launches: list[Any] = []
    patch.setattr(merge, "merge_kernel", Recorder(merge.merge_kernel, launches))
    out = torch.empty(2, 128, 4, row.arguments["head_dim"], dtype=BF16)
    lse = torch.empty(2, 4, 128)
    merge.merge(out, lse, out[:, 64:].contiguous(), lse[..., 64:].contiguous())
    return _find(row.kernel, launches)


def _launch_of_gate(patch: pytest.MonkeyPatch, row: Row, target: str) -> tuple[Any, ...]:
    launches: list[Any] = []
    steps: Any = SimpleNamespace(launch=lambda kernel, n, /, **given: launches.append((kernel, (), given)))
    out = torch.empty(2, 128, 4, row.arguments["head_dim"], dtype=BF16)
    gate.forward(gate.GatedOutput(out, out), steps)
    gate.backward(gate.GateGradients(out, out, out, True, True), steps)
    return _find(row.kernel, launches)


def _launch_of_quantise(patch: pytest.MonkeyPatch, row: Row, target: str) -> tuple[Any, ...]:
    pretend_target(patch, target)
    launches: list[Any] = []
    steps: Any = SimpleNamespace(launch=lambda kernel, n, /, **given: launches.append((kernel, (), given)))
    head_dim = row.arguments["head_dim"]
    q, k = torch.empty(2, 4096, 16, head_dim, dtype=BF16), torch.empty(2, 4096, 4, head_dim, dtype=BF16)
    call = make_call(q, k, k, position=Rope(), causal=True, precision=row.arguments["precision"])
    quantise_launch.quantise(call, steps, permuted=target == "sm_90")
    return _find(row.kernel, launches)


def _launch_of_weigh(patch: pytest.MonkeyPatch, row: Row, target: str) -> tuple[Any, ...]:
    launches: list[Any] = []
    steps: Any = SimpleNamespace(launch=lambda kernel, n, /, **given: launches.append((kernel, (), given)))
    head_dim = row.arguments["head_dim"]
    weigh.weigh_features(torch.empty(2, 4, 128, head_dim, dtype=BF16), torch.empty(head_dim), steps)
    return _find(row.kernel, launches)


def _launch_of_rows(patch: pytest.MonkeyPatch, row: Row, target: str) -> tuple[Any, ...]:
    launches: list[Any] = []
    steps: Any = SimpleNamespace(launch=lambda kernel, n, /, **given: launches.append((kernel, (), given)))
    cos, sin = torch.empty(2, 1, 4096, row.arguments["head_dim"] // 2)
    positions = torch.zeros(2, 128, dtype=torch.int64)
    inputs = table_rows.RowInputs(cos, sin, None, None, positions, None, None, None, None, None)
    table_rows.make_rows(inputs, 128, 0, 0, on=steps)
    return _find(row.kernel, launches)


_LAUNCHES = {
    "rotate_pages_kernel": _launch_of_pages,
    **dict.fromkeys(
        (
            *("forward_kernel", "backward_dq_kernel", "backward_dkdv_kernel"),
            *("schedule_kernel", "sinks_grad_kernel", "sum_parts_kernel"),
        ),
        _launch_of_attention,
    ),
    **dict.fromkeys(
        ("mark_kernel", "compact_kernel", "span_kernel", "choose_kernel", "mask_kernel", "pack_kernel"),
        _launch_of_blocks,
    ),
    **dict.fromkeys(("decode_kernel", "combine_kernel"), _launch_of_decode),
    "gather_kernel": _launch_of_gather,
    "merge_kernel": _launch_of_merge,
    **dict.fromkeys(("gate_forward_kernel", "gate_backward_kernel"), _launch_of_gate),
    "weigh_kernel": _launch_of_weigh,
    "table_rows_kernel": _launch_of_rows,
    **dict.fromkeys(("mean_kernel", "quantise_kernel"), _launch_of_quantise),
}


def _find(name: str, launches: list[Any]) -> tuple[Any, ...]:
    found: list[tuple[Any, ...]] = [launch for launch in launches if launch[0].__name__ == name]
    if len(found) != 1:
        raise RuntimeError(f"{name} is launched {len(found)} times, but must be once")
    return found[0]


def measure(row: Row, target: str) -> dict[str, Any]:
    """Registers of a thread, bytes of spills of a thread, bytes of shared memory of a program, and its tile."""
    compile_it, tile = plan(row, target)
    compiled = compile_it()
    with tempfile.TemporaryDirectory() as folder:
        used = resources(compiled, Path(folder))
    spills, columns = spilled_bytes(used, target), tensor_memory(compiled)
    measured = {"registers": used["registers"], "spills": spills, "shared": compiled.metadata.shared, "tile": tile}
    return measured if columns <= TENSOR_MEMORY else {**measured, "tensor_memory": columns}


def measure_cuda(architecture: str) -> dict[str, dict[str, Any]]:
    """The same of the CUDA kernels, by what they read at once: how many there are, and the range of their registers."""
    nvcc = build.find_compilers().nvcc
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    source = build.SOURCES / "rotate.cu"
    with tempfile.TemporaryDirectory() as folder:
        command = [str(nvcc), "-O3", "-std=c++17", "--resource-usage", target, "-c", str(source), "-o"]
        done = subprocess.run([*command, f"{folder}/rotate.o"], capture_output=True, text=True, check=True)
    found: dict[str, dict[str, Any]] = {}
    for report in (done.stdout + done.stderr).split("Compiling entry function")[1:]:
        name = _describe_cuda(report)
        registers, spills = int(_search(r"Used (\d+) registers", report)), int(_search(r"(\d+) bytes spill st", report))
        shared = re.search(r"(\d+) bytes smem", report)
        entry = found.setdefault(name, {"kernels": 0, "least": 1 << 10, "most": 0, "spills": 0, "shared": 0})
        entry["kernels"] += 1
        entry["least"], entry["most"] = min(entry["least"], registers), max(entry["most"], registers)
        entry["spills"] = max(entry["spills"], spills)
        entry["shared"] = max(entry["shared"], int(shared.group(1)) if shared else 0)
    return dict(sorted(found.items()))


def _search(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"nvcc's report has no “{pattern}”: {text[:500]}")
    return match.group(1)


def _describe_cuda(report: str) -> str:
    """What a kernel reads at once, by its mangled name: rotate_kernel<T, TableT, Pairing, lanes, …>."""
    match = re.search(r"rotate_kernelI(6__half|13__nv_bfloat16|f|d)\w*?PairingE(\d)ELi(\d)E", report)
    if match is None:
        raise RuntimeError(f"nvcc's report has a kernel of another name: {report[:500]}")
    dtype, pairing, lanes = match.groups()
    size = {"6__half": 2, "13__nv_bfloat16": 2, "f": 4, "d": 8}[dtype]
    return f"{_TYPES[dtype]}, {_PAIRINGS[int(pairing)]}, accesses of {size * int(lanes)} bytes"


def nvcc_version() -> str | None:
    """The release of the nvcc that is found; None without one."""
    nvcc = build.find_compilers().nvcc
    if nvcc is None:
        return None
    report = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True).stdout
    return _search(r"release ([\d.]+)", report)


_TILE_LEGEND = (
    "A tile is so many queries × keys, in so many warps (w) and stages of loads (s), with at most r registers."
)
_TILE_LEGENDS = {
    "rotation-triton": (
        "A tile is so many tokens × heads.\n"
        "With tables per head it is rows, and of their sum tokens × columns; of the weights' sum, "
        "programs × features.\n"
        "r: registers of a thread."
    ),
    "attention-merge": "A tile is 32 rows.",
    "attention-quantise": (
        "A tile is 128 tokens of some heads, one after another, by so many warps, with at most r registers a thread."
    ),
}


def render(page: str, figures: dict[str, Any]) -> str:
    """The table of a page."""
    if page == "rotation-cuda":
        return _render_cuda(figures)
    if all(row.for_hopper for row in ROWS[page]):
        return _render_hopper(page, figures)
    targets = list(TARGETS)
    lines = [
        f"Compiled by Triton {figures['triton']}: registers of a thread / bytes of spills of a thread / KiB of shared"
        " memory of a program.",
        _TILE_LEGENDS.get(page, _TILE_LEGEND),
        "A cell names its own where it is not sm_90's.",
        "",
        f"| kernel | tile on sm_90 | {' | '.join(targets)} |",
        f"| --- | --- {'| --- ' * len(targets)}|",
    ]
    for row in ROWS[page]:
        measured = figures["kernels"][row.key]
        tile = measured["sm_90"]["tile"]
        cells = [_cell(measured[target], tile) if target in measured else "–" for target in targets]
        lines.append(f"| `{row.kernel}`, {row.name} | {tile} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _render_hopper(page: str, figures: dict[str, Any]) -> str:
    lines = [
        f"Compiled by Triton {figures['triton']} for sm_90.",
        "A tile is so many queries × keys, in so many stages of loads (s).",
        "Its consumers take at most r registers a thread, whatever the binary starts with.",
        "",
        "| kernel | tile | registers of a thread at the start | bytes of spills of a thread | KiB of shared memory |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in ROWS[page]:
        used = figures["kernels"][row.key]["sm_90"]
        shared = f"{round(used['shared'] / 1024, 1):g}"
        lines.append(
            f"| `{row.kernel}`, {row.name} | {used['tile']} | {used['registers']} | {used['spills']} | {shared} |"
        )
    return "\n".join(lines)


def _cell(used: dict[str, Any], usual_tile: str) -> str:
    if "tensor_memory" in used:
        return f"**does not run**: wants {used['tensor_memory']} of {TENSOR_MEMORY} columns of tensor memory"
    cell = f"{used['registers']} / {used['spills']} / {round(used['shared'] / 1024, 1):g}"
    return cell if used["tile"] == usual_tile else f"{cell} ({used['tile']})"


def _render_cuda(figures: dict[str, Any]) -> str:
    measured = figures["cuda"]
    lines = [
        f"Compiled by nvcc {figures['nvcc']}, all instances of `rotate_kernel`: registers of a thread, from the least"
        " to the most / bytes of spills / bytes of shared memory.",
        "",
        f"| instances | of them | {' | '.join(f'sm_{x}' for x in CUDA_TARGETS)} |",
        f"| --- | --- {'| --- ' * len(CUDA_TARGETS)}|",
    ]
    for name, first in measured[CUDA_TARGETS[0]].items():
        used = [measured[target][name] for target in CUDA_TARGETS]
        cells = [f"{_range(x['least'], x['most'])} / {x['spills']} / {x['shared']}" for x in used]
        lines.append(f"| {name} | {first['kernels']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _range(least: int, most: int) -> str:
    return str(least) if least == most else f"{least}–{most}"


def replace_table(text: str, table: str) -> str:
    """A page with another table between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"a page has no “{BEGIN}” with “{END}” after it")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def page_names() -> list[str]:
    """The pages that have a table."""
    return [*ROWS, "rotation-cuda"]


def measure_pages(pages: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Compile what pages show."""
    kernels: dict[str, dict[str, Any]] = {}
    for row in (row for page in pages for row in ROWS[page]):
        for target in row.targets:
            print(f"{row.key}, {target}", flush=True)
            kernels.setdefault(row.key, {})[target] = measure(row, target)
    return kernels


def measure_all() -> dict[str, Any]:
    """Compile everything."""
    kernels = measure_pages(ROWS)
    cuda = {architecture: measure_cuda(architecture) for architecture in CUDA_TARGETS}
    return {"triton": triton.__version__, "nvcc": nvcc_version(), "kernels": kernels, "cuda": cuda}


def _measure_again(pages: list[str]) -> dict[str, Any]:
    """The figures that there are, with those of some pages anew."""
    figures: dict[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8"))
    if figures["triton"] != triton.__version__:
        raise SystemExit(f"figures.json is of Triton {figures['triton']}, and {triton.__version__} is installed")
    kernels = figures["kernels"] | measure_pages(pages)
    return {**figures, "kernels": {row.key: kernels[row.key] for rows in ROWS.values() for row in rows}}


def main(arguments: list[str]) -> None:
    """Compile, unless only tables are asked for, and write."""
    if arguments != ["tables"]:
        unknown = [name for name in arguments if name not in ROWS]
        if unknown:
            raise SystemExit(f"the arguments are {arguments}, but must be none, “tables”, or of {', '.join(ROWS)}")
        figures = _measure_again(arguments) if arguments else measure_all()
        FIGURES.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    for name in page_names():
        page = PAGES / f"{name}.md"
        page.write_text(replace_table(page.read_text(encoding="utf-8"), render(name, figures)), encoding="utf-8")
    print(f"wrote the tables of {len(page_names())} pages")


if __name__ == "__main__":
    main(sys.argv[1:])
