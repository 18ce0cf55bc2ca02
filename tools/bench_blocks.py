"""Time attention over lists of blocks on a GPU, beside dense calls by the same kernels and FlexAttention.

python tools/bench_blocks.py [topk] [video] [sinks] [documents] [dense] [lists] [--flex] [--dim 128]

Each row has milliseconds and TFLOP/s on the operations of listed blocks, forward and backward; the median of runs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ropewalk import BlockLists, attention

B, T, H, BLOCK = 1, 32768, 16, 128
N = T // BLOCK


def time_ms(run: Callable[[], Any], rounds: int = 7) -> float:
    """Return the median time of a call on the device."""
    run()
    times = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


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


def maps() -> dict[str, Tensor]:
    """Return maps of listed blocks, (1, H or 1, M, N)."""
    i, j = torch.arange(N, device="cuda")[:, None], torch.arange(N, device="cuda")[None]
    scores = torch.rand(1, H, N, N, device="cuda")
    topk = torch.zeros_like(scores, dtype=torch.bool).scatter(3, scores.topk(N // 8).indices, True)
    per_frame = N // 20  # a frame sees itself and its neighbour
    video = ((i // per_frame) == (j // per_frame)) | ((i // per_frame) == (j // per_frame) + 1)
    sinks = ((i >= j) & (i - j <= 16)) | (j == 0)
    documents = (i // 32) == (j // 32)
    return {
        "topk": topk,
        "video": video[None, None],
        "sinks": sinks[None, None],
        "documents": documents[None, None],
        "dense": torch.ones(1, 1, N, N, dtype=torch.bool, device="cuda"),
    }


def draw(dim: int) -> list[Tensor]:
    """Return q, k, v and the output's gradient, (B, H, T, D)."""
    tensors = [torch.randn(B, H, T, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    return [*(x.requires_grad_() for x in tensors[:3]), tensors[3]]


def measure(name: str, call: Callable[..., Tensor], tensors: list[Tensor], listed: float, dim: int) -> None:
    """Print the times of a call's forward and backward; listed: pairs of blocks over all heads and rows."""
    q, k, v, grad = tensors
    out = call(q, k, v)
    with torch.no_grad():
        forward = time_ms(lambda: call(q, k, v))
    backward = time_ms(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    flop = 4 * listed * BLOCK * BLOCK * dim
    print(
        f"{name:28} forward {forward:8.3f} ms {flop / forward / 1e9:6.1f} TFLOP/s"
        f"   backward {backward:8.3f} ms {2.5 * flop / backward / 1e9:6.1f} TFLOP/s",
        flush=True,
    )


def main() -> None:
    """Run the rows that are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=["topk"])
    parser.add_argument("--flex", action="store_true")
    parser.add_argument("--dim", type=int, default=128)
    options = parser.parse_args()
    tensors, found = draw(options.dim), maps()
    flex = torch.compile(flex_attention, dynamic=False)
    torch._functorch.config.donated_buffer = False  # a compiled backward that may run again
    every = float(B * H * N * N)
    print(torch.cuda.get_device_name(), "D", options.dim)
    measure("no lists", lambda q, k, v: attention(q, k, v, layout="bhtd", impl="triton"), tensors, every, options.dim)
    for name in options.names:
        if name == "lists":
            continue
        mask = found[name]
        listed = float(mask.sum()) * (H // mask.shape[1])
        lists = to_lists(mask)
        call = lambda q, k, v: attention(q, k, v, layout="bhtd", impl="triton", blocks=lists)  # noqa: B023, E731
        measure(f"{name} {100 * listed / every:.1f} %", call, tensors, listed, options.dim)
        if options.flex:
            block_mask = to_block_mask(mask)
            call = lambda q, k, v: flex(q, k, v, block_mask=block_mask)  # noqa: B023, E731
            measure(f"{name} FlexAttention", call, tensors, listed, options.dim)
    if "lists" in options.names:
        lists = to_lists(found["topk"])

        def make() -> None:
            vars(lists).pop("_ropewalk_tables", None)
            from ropewalk.ops.attention.blocks.tables import find_tables

            find_tables(lists, tensors[0], tensors[1], "bhtd", None)

        print(f"tables of top-k lists: {1000 * time_ms(make):.0f} us")


if __name__ == "__main__":
    main()
