"""Measure what a small language model loses by the type of its cache: train it, then read held-out text over pages.

python tools/cache_quality.py [--steps 1500] [--device cpu] [--out FILE]

All keys and values of the evaluation are appended to pages by `append_kv`, and read there by `attention`. A row has the
perplexity of a byte, and the difference of its loss from that without a cache, in nats, with the standard error of the
difference over windows: each window is its own control.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ropewalk import append_kv, attention, inverse_frequencies, rope_table
from ropewalk.bench.core.records import RecordWriter, describe_run
from ropewalk.bench.core.terminal import default_console
from ropewalk.experiments import byte_model
from ropewalk.experiments.byte_model import ROPE, ByteTransformer, ModelSize, byte_losses, train
from ropewalk.experiments.length_extrapolation import cut_windows, read_corpus

SIZE = ModelSize(3, 192, 3, context=256, batch=16, learning_rate=3e-3, windows=128)
PAGE_SIZE, WINDOWS_AT_ONCE = 16, 16
CACHES = {
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
    "4-bit": torch.uint8,
}
LARGEST_FLOAT8 = 448.0


class PagedAttention:
    """Takes the place of `attention` in the model: appends k and v to pages of a type, and attends to these."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        (rows, tokens, heads, dim), device = q.shape, q.device
        pages_per_row = math.ceil(tokens / PAGE_SIZE)
        shape = (rows * pages_per_row, PAGE_SIZE, heads)
        width = dim // 2 if self.dtype is torch.uint8 else dim
        k_cache, v_cache = (torch.zeros(*shape, width, dtype=self.dtype, device=device) for _ in range(2))
        q_half, k_half, v_half = (x.flatten(0, 1).bfloat16() for x in (q, k, v))
        scales = self._scales(k_half, v_half, shape)
        table = torch.randperm(rows * pages_per_row, device=device).view(rows, pages_per_row)
        index = torch.arange(tokens, device=device)
        slots = table[:, index // PAGE_SIZE] * PAGE_SIZE + index % PAGE_SIZE
        cos, sin = rope_table(tokens, inverse_frequencies("default", dim, ROPE.base)[0], device=device)
        tables = {"cos": cos, "sin": sin, "positions": index.repeat(rows)}
        q_half = append_kv(k_half, v_half, k_cache, v_cache, slots.flatten(), q=q_half, **tables, **scales)
        lengths = torch.full((rows,), tokens, dtype=torch.int32, device=device)
        starts = torch.zeros_like(lengths)
        q_half = q_half.view(q.shape)
        pages = {"block_table": table.int(), "key_lengths": lengths, "query_starts": starts}
        return attention(q_half, k_cache, v_cache, causal=True, **pages, **scales).to(v.dtype)

    def _scales(self, k: Tensor, v: Tensor, shape: tuple[int, int, int]) -> dict[str, Tensor]:
        if self.dtype is torch.float8_e4m3fn:  # one a head, as a calibration gives them; a rotation keeps a pair's norm
            largest = [x.float().abs().amax((0, 2)) for x in (k, v)]
            return {
                "k_scale": largest[0] * (math.sqrt(2) / LARGEST_FLOAT8),
                "v_scale": largest[1] * (1 / LARGEST_FLOAT8),
            }
        if self.dtype is torch.bfloat16:
            return {}
        groups, kind = ((k.shape[2] // 32,), torch.float16) if self.dtype is torch.uint8 else ((), torch.float32)
        return {name: torch.zeros(*shape, *groups, dtype=kind, device=k.device) for name in ("k_scale", "v_scale")}


@torch.no_grad()
def window_losses(model: ByteTransformer, windows: Tensor, attend: Callable[..., Tensor]) -> Tensor:
    """Return the mean loss of each window, (windows,), in nats, where the model attends by `attend`."""
    before, byte_model.attention = byte_model.attention, attend
    try:
        return torch.cat([byte_losses(model, part).double().mean(1).cpu() for part in windows.split(WINDOWS_AT_ONCE)])
    finally:
        byte_model.attention = before


def check_losses(name: str, losses: Tensor) -> tuple[str, Tensor]:
    """Return a cache and its losses, all of which must be finite: a mean of others says nothing."""
    if not bool(losses.isfinite().all()):
        raise SystemExit(f"cache {name}: the losses of windows must be finite, but one is infinite or NaN")
    return name, losses


def main() -> None:
    """Train, and print a row for each cache."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device, console = torch.device(options.device), default_console()
    size = replace(SIZE, steps=options.steps)
    text, training, held_out = read_corpus(None)
    windows = cut_windows(held_out, size.context + 1, size.windows)
    torch.manual_seed(0)
    model = ByteTransformer(size).to(device)
    run = describe_run("cache-quality", device, {}) | {"text": text, "steps": size.steps, "windows": len(windows)}
    run |= {"model": model.title, "context": size.context, "batch": size.batch, "page_size": PAGE_SIZE}
    console.print(f"{model.title} on {run['device']}")
    train(model, training, size, console)
    model.eval()
    exact = window_losses(model, windows, attention)
    rows: list[tuple[str, Tensor]] = [check_losses("none", exact)]
    rows += [check_losses(name, window_losses(model, windows, PagedAttention(dtype))) for name, dtype in CACHES.items()]
    with nullcontext() if options.out is None else RecordWriter(options.out, run) as record:
        for name, losses in rows:
            more = losses - exact
            row = {"cache": name, "perplexity": math.exp(losses.mean()), "loss": float(losses.mean())}
            row |= {"more": float(more.mean()), "standard_error": float(more.std() / len(more) ** 0.5)}
            print(" ".join(f"{x:10.5f}" if isinstance(x, float) else f"{x:14}" for x in row.values()))
            if record is not None:
                record.append(row)
        if record is not None:
            record.end()


if __name__ == "__main__":
    main()
