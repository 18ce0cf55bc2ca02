"""Time attention over lists of blocks on a GPU, beside dense calls by the same kernels and FlexAttention.

python tools/bench_blocks.py [topk] [frames] [sinks] [documents] [dense] [masks] [host] [--dim 128] [--out FILE]

Ours is held against FlexAttention's results before both are timed, in turns. A row has milliseconds, and TFLOP/s on the
operations of listed blocks; `masks` times what makes lists, `host` a planned call. `--out` writes a record.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ropewalk import BlockLists, attention
from ropewalk.bench.core.gate import relative_error
from ropewalk.bench.core.records import RecordWriter, describe_run
from ropewalk.bench.core.sustained import PROTOCOLS, time_bursts
from ropewalk.bench.core.timing import time_host
from ropewalk.ops.attention.blocks.tables import find_tables

B, T, H, BLOCK = 1, 32768, 16, 128
N = T // BLOCK
ALLOWED = 2e-2  # between two kernels in bfloat16, of the largest number: each is within 0.8 % of float64's (note 065)
MASKS = ("topk", "frames", "sinks", "documents", "dense")
DEVICE = torch.device("cuda")


def to_lists(mask: Tensor) -> BlockLists:
    """Return lists of a map (1, H or 1, M, N) of blocks."""
    order = torch.argsort(mask.byte(), dim=-1, descending=True, stable=True)
    width = int(mask.sum(-1).max())
    return BlockLists(mask.sum(-1).int(), order[..., :width].int().contiguous())


def to_block_mask(mask: Tensor) -> BlockMask:
    """Return FlexAttention's mask of a map (1, H or 1, M, N) of blocks, all pairs of which it attends."""
    counts = mask.sum(-1).int()
    # All N entries of a row: torch transposes lists in a map with as many columns, and asserts on the device otherwise.
    order = torch.argsort(mask.byte(), dim=-1, descending=True, stable=True).int()
    lengths = (mask.shape[2] * BLOCK, mask.shape[3] * BLOCK)
    none = torch.zeros_like(counts)
    return BlockMask.from_kv_blocks(none, order, counts, order, BLOCK_SIZE=BLOCK, seq_lengths=lengths)


def map_of(name: str) -> Tensor:
    """Return a map of listed blocks, (1, H or 1, M, N)."""
    i, j = torch.arange(N, device=DEVICE)[:, None], torch.arange(N, device=DEVICE)[None]
    if name == "topk":
        scores = torch.rand(1, H, N, N, device=DEVICE)
        return torch.zeros_like(scores, dtype=torch.bool).scatter(3, scores.topk(N // 8).indices, True)
    per_frame = N // 20  # a frame sees itself and the one before
    ago = i // per_frame - j // per_frame
    shared = {
        "frames": (ago == 0) | (ago == 1),
        "sinks": ((i >= j) & (i - j <= 16)) | (j == 0),
        "documents": i // 32 == j // 32,
        "dense": torch.ones(N, N, dtype=torch.bool, device=DEVICE),
    }
    return shared[name][None, None]


def attend(mask: str, dim: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a mask: without lists, by ours, by our Triton kernels, and by FlexAttention."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(B, H, T, dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    blocks = map_of(mask)
    share = float(blocks.sum()) / blocks.numel()
    lists, block_mask = to_lists(blocks), to_block_mask(blocks)
    flex = torch.compile(flex_attention, dynamic=False)

    def ours(lists: BlockLists | None, impl: str | None) -> Callable[[], Tensor]:
        return lambda: attention(*leaves, layout="bhtd", blocks=lists, impl=impl)

    kinds = {
        "no lists": ours(None, "gluon"),
        "ropewalk": ours(lists, None),
        "triton": ours(lists, "triton"),
        "flex": lambda: flex(*leaves, block_mask=block_mask),
    }
    results, calls = {}, {}
    for kind, call in kinds.items():
        out = call()
        results[kind] = [out, *torch.autograd.grad(out, leaves, grad, retain_graph=True)]
        calls[kind, "forward"] = torch.no_grad()(call)
        calls[kind, "backward"] = lambda out=out: torch.autograd.grad(out, leaves, grad, retain_graph=True)
    errors = {kind: relative_error(results[kind], results["flex"]) for kind in ("ropewalk", "triton")}
    if not max(errors.values()) <= ALLOWED:
        raise RuntimeError(
            f"{mask}, D {dim}: ours differs from FlexAttention by {errors}, but at most {ALLOWED} may be"
        )
    del results
    named = {f"{kind} {way}": call for (kind, way), call in calls.items()}
    times = {name: statistics.median(x) / 1e3 for name, x in time_bursts(named, DEVICE, PROTOCOLS["hot"]).items()}
    for kind in kinds:
        flop = 4 * (1.0 if kind == "no lists" else share) * B * H * T * T * dim
        forward, backward = times[f"{kind} forward"], times[f"{kind} backward"]
        yield {
            "row": mask,
            "dim": dim,
            "impl": kind,
            "share": share,
            "forward_ms": forward,
            "backward_ms": backward,
            "forward_tflops": flop / forward / 1e9,
            "backward_tflops": 2.5 * flop / backward / 1e9,
        }


def make_masks() -> Iterator[dict[str, Any]]:
    """Yield the times of making lists and their tables, and FlexAttention's mask; the host may not be waited for."""
    starts = torch.arange(0, T + 1, T // 8, device=DEVICE, dtype=torch.int32)
    scores = torch.rand(1, H, N, N, device=DEVICE)
    document = torch.arange(T, device=DEVICE) // (T // 8)
    q = torch.empty(B, T, H, 128, device=DEVICE, dtype=torch.bfloat16)
    makers: dict[str, Callable[[], Any]] = {
        "documents": lambda: BlockLists.documents(starts, T),
        "top-k": lambda: BlockLists.top_k(scores, N // 8, n_queries=T),
        "tables of new top-k lists": lambda: find_tables(
            BlockLists.top_k(scores, N // 8, n_queries=T), q, q, "bthd", None
        ),
        "create_block_mask of documents": lambda: create_block_mask(
            lambda b, h, m, n: (document[m] == document[n]) & (m >= n), None, None, T, T, device="cuda"
        ),
    }
    for name, make in makers.items():
        make()
        torch.cuda.synchronize()
        ours = not name.startswith("create")
        if ours:
            torch.cuda.set_sync_debug_mode("error")
        try:
            make()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        device = statistics.median(time_bursts({name: make}, DEVICE, PROTOCOLS["hot"])[name]) if ours else None
        yield {"row": name, "device_us": device, "eager_us": _eager(make)}


def _eager(call: Callable[[], Any], calls: int = 50) -> float:
    """Return the microseconds of a call in a loop, with the host's part."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e3 / calls


def plan_calls() -> Iterator[dict[str, Any]]:
    """Yield the host's part of a planned call, without lists and with."""
    q, k, v = (torch.randn(1, 1024, 4, 64, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    lists = BlockLists.sliding_window(1024, window=256, device=DEVICE)
    for name, blocks in (("no lists", None), ("lists", lists)):
        for way, grads in (("forward", torch.no_grad), ("forward, recording", nullcontext)):

            def call(blocks: BlockLists | None = blocks, grads: Any = grads) -> None:
                with grads():
                    attention(q, k, v, blocks=blocks, impl="gluon")

            yield {"row": f"host, {way}", "impl": name, "host_us": time_host(call, DEVICE).least}


def main() -> None:
    """Run the rows that are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=["topk"])
    parser.add_argument("--dim", type=int, nargs="+", default=[128])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch._functorch.config.donated_buffer = False  # a compiled backward that may run again
    run = describe_run("blocks", DEVICE, {})
    print(run["device"])
    with nullcontext() if options.out is None else RecordWriter(options.out, run) as record:
        for name in options.names:
            kinds = {"masks": [make_masks], "host": [plan_calls]}
            attends = [lambda dim=dim, name=name: attend(name, dim) for dim in options.dim]
            for make in kinds.get(name, attends):
                for row in make():
                    print(
                        " ".join(f"{x:10.4g}" if isinstance(x, float) else f"{x!s:12}" for x in row.values()),
                        flush=True,
                    )
                    if record is not None:
                        record.append(row)
        if record is not None:
            record.end()


if __name__ == "__main__":
    main()
