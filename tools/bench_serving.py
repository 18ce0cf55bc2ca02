"""Time what serving does over pages of every format on a GPU: decoding, appending, prefill, and an append's host time.

python tools/bench_serving.py [decode] [append] [prefill] [host] [--page-size 16] [--out FILE]

Each call is checked against the definition in float64 before it is timed, in CUDA graphs. FlashInfer, where it is
installed, decodes from the same bfloat16 and float8 pages in the same rounds. One table is printed; `--out` writes the
rows as a record, as results/ has them.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import ropewalk.ops.rope.rotary_embedding  # noqa: F401  registers its operator
from ropewalk import QKNorm, append_kv, attention
from ropewalk.bench.attention.peers import ATTENTION_PEERS
from ropewalk.bench.core.gate import is_within, relative_error, worst
from ropewalk.bench.core.peers import find_peer, load_module
from ropewalk.bench.core.records import RecordWriter, describe_run
from ropewalk.bench.core.timing import Call, Quantiles, time_graphs, time_host
from ropewalk.ops.attention.reference import read_pages

HEADS, KV_HEADS, D = 32, 8, 128
FORMATS = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}
BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1 + 4 / D, "int4": 0.5 + 2 / 32}  # of a feature
# Largest error of the output, and of a stored number as its format rounds it, relative to the largest: bfloat16 twice.
ATTEND_ERROR = 2e-2
APPEND_ERROR = {"bf16": 2**-8, "fp8": 2**-4, "int8": 1 / 200, "int4": 1 / 12}
DEVICE = torch.device("cuda")
OURS, FLASHINFER = "ours", "flashinfer"
PEER_FORMATS = ("bf16", "fp8")  # that FlashInfer's decoding reads too


@functools.cache
def find_flashinfer() -> tuple[Any, dict[str, str]]:
    """Return FlashInfer, or None, and what the line about the run says of it."""
    peer = ATTENTION_PEERS[FLASHINFER]
    version, reason = find_peer(peer, DEVICE)
    return None if version is None else load_module(peer.module), {FLASHINFER: version or f"missing: {reason}"}


class Pages(NamedTuple):
    """Pages of a format, and the keywords that they add to a call."""

    k: Tensor
    v: Tensor
    scales: dict[str, Tensor]


class Row(NamedTuple):
    """One measurement, in microseconds."""

    case: str
    kind: str  # the format
    time: Quantiles | None
    error: float
    bytes_moved: float
    peer: str = ""  # another library
    status: str = "ok"  # of another library also "wrong" or "failed"
    reason: str | None = None

    def describe(self) -> dict[str, Any]:
        """Return what a record has of it, as `ropewalk bench` writes it."""
        error = {"error": self.error} if math.isfinite(self.error) else {}
        error |= {"error_budget": ATTEND_ERROR} if error and self.status != "ok" else {}
        reason = {} if self.reason is None else {"reason": self.reason}
        named = {"impl": self.peer or self.kind, "position": self.kind if self.peer else None}
        return {**named, "kind": "peer" if self.peer else "ours", "status": self.status, **reason, **error}


def empty_pages(kind: str, n_pages: int, page_size: int) -> Pages:
    """Return pages (pages, page_size, K, D), without numbers."""
    shape = (n_pages, page_size, KV_HEADS, D // 2 if kind == "int4" else D)
    k, v = (torch.zeros(shape, dtype=torch.uint8 if kind != "bf16" else torch.bfloat16, device=DEVICE) for _ in "kv")
    scales = {}
    if kind == "fp8":
        scales = {name: torch.tensor(0.02, device=DEVICE) for name in ("k_scale", "v_scale")}
    elif kind == "int8":
        scales = {name: torch.zeros(shape[:3], device=DEVICE) for name in ("k_scale", "v_scale")}
    elif kind == "int4":
        groups = torch.zeros(*shape[:3], D // 32, dtype=torch.float16, device=DEVICE)
        scales = {"k_scale": groups, "v_scale": groups.clone()}
    return Pages(k.view(FORMATS[kind]), v.view(FORMATS[kind]), scales)


def full_pages(kind: str, n_pages: int, page_size: int) -> Pages:
    """Return pages of random keys and values."""
    pages = empty_pages(kind, n_pages, page_size)
    one, zero = torch.ones(1, D // 2, device=DEVICE), torch.zeros(1, D // 2, device=DEVICE)
    n_tokens, part = n_pages * page_size, 1 << 16
    for start in range(0, n_tokens, part):
        slots = torch.arange(start, min(start + part, n_tokens), device=DEVICE)
        k, v = torch.randn(2, len(slots), KV_HEADS, D, device=DEVICE).bfloat16()
        positions = torch.zeros_like(slots)
        append_kv(k, v, pages.k, pages.v, slots, cos=one, sin=zero, positions=positions, **pages.scales)
    return pages


def values_of(pages: Pages, index: Tensor) -> list[Tensor]:
    """Return keys and values of some pages, (1, tokens, K, D), float64."""
    found = []
    for name, x in (("k_scale", pages.k), ("v_scale", pages.v)):
        scale = pages.scales.get(name)
        if scale is not None and scale.ndim > 1:
            scale = scale[index]
        x = x[index].transpose(1, 2)
        x = x.double() if scale is None else read_pages(x, scale, torch.float64)
        found.append(x.transpose(1, 2).flatten(0, 1)[None])
    return found


def error_of(out: Tensor, q: Tensor, pages: Pages, table: Tensor, lengths: Tensor, row: int) -> float:
    """Return the largest error of one row of a causal call, relative to its largest output."""
    k, v = (x[:, : int(lengths[row])] for x in values_of(pages, table[row]))
    errors = []
    for start in range(0, q.shape[1], 256):  # queries: the definition holds a matrix of scores
        part = q[row : row + 1, start : start + 256].double()
        starts = lengths[row : row + 1] - q.shape[1] + start
        expected = attention(part, k, v, causal=True, query_starts=starts, impl="reference")
        errors.append(relative_error([out[row : row + 1, start : start + 256]], [expected]))
    return worst(errors)


def time_calls(calls: dict[str, Call]) -> tuple[dict[str, Quantiles], dict[str, str]]:
    """Time calls in CUDA graphs, in the same rounds; return why those of another library cannot be captured, too."""
    times, failures = time_graphs(calls, DEVICE, calls_per_graph=10, replays=30)
    if OURS in failures:
        raise RuntimeError(f"the call cannot be captured: {failures[OURS]}")
    return times, failures


def plan_flashinfer(lib: Any, q: Tensor, pages: Pages, table: Tensor, lengths: Tensor) -> Call:
    """Plan FlashInfer's decoding from pages, as a model does for all its layers, and return the call."""
    page_size = pages.k.shape[1]
    counts = (lengths + page_size - 1) // page_size
    is_there = torch.arange(table.shape[1], device=DEVICE) < counts[:, None]
    last = (lengths - (counts - 1) * page_size).int()
    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=DEVICE)  # as its documentation has it
    wrapper = lib.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=HEADS // KV_HEADS >= 4)
    starts = F.pad(counts.cumsum(0), (1, 0)).int()
    dtypes = {"q_data_type": q.dtype, "kv_data_type": pages.k.dtype}
    wrapper.plan(starts, table[is_there], last, HEADS, KV_HEADS, D, page_size, **dtypes)
    scales = {name: float(scale) for name, scale in pages.scales.items()}
    return lambda: wrapper.run(q[:, 0], (pages.k, pages.v), **scales)[:, None]


def attend_rows(
    name: str,
    queries: int,
    lengths: Tensor,
    page_size: int,
    kinds: list[str],
    longest: int = 8192,
    flashinfer: Any = None,
) -> Iterator[Row]:
    """Attend to pages of rows with these lengths, of which the last `queries` tokens ask, by what the choice takes."""
    per_row, n_rows = longest // page_size, len(lengths)
    for kind in kinds:
        pages = full_pages(kind, n_rows * per_row, page_size)
        table = torch.randperm(n_rows * per_row, device=DEVICE).view(n_rows, per_row).int()
        q = torch.randn(n_rows, queries, HEADS, D, device=DEVICE).bfloat16()
        keywords = {"causal": True, "key_lengths": lengths, "query_starts": lengths - queries, "block_table": table}
        call = functools.partial(attention, q, pages.k, pages.v, **keywords, **pages.scales)
        calls: dict[str, Call] = {OURS: call}
        errors = {OURS: error_of(call(), q, pages, table, lengths, n_rows - 1)}
        n_bytes = float(lengths.sum()) * 2 * KV_HEADS * D * BYTES[kind]
        left_out = None
        if flashinfer is not None and kind in PEER_FORMATS:
            try:
                planned = plan_flashinfer(flashinfer, q, pages, table, lengths)
                errors[FLASHINFER] = error_of(planned(), q, pages, table, lengths, n_rows - 1)
            except torch.AcceleratorError:
                raise  # nothing that runs on the GPU after it can be trusted
            except Exception as error:  # the message may hold paths: it is printed, and stays out of records
                print(f"{name}, {kind}: {FLASHINFER} failed: {error}")
                left_out = Row(name, kind, None, math.inf, n_bytes, FLASHINFER, "failed", type(error).__name__)
            else:
                calls[FLASHINFER] = planned
                if not is_within(errors[FLASHINFER], ATTEND_ERROR):
                    print(f"{name}, {kind}: {FLASHINFER}'s error is {errors[FLASHINFER]:.2e}, so it is not timed")
                    reason = "the error is past the budget"
                    left_out = Row(name, kind, None, errors[FLASHINFER], n_bytes, FLASHINFER, "wrong", reason)
                    del calls[FLASHINFER]
        times, failures = check(name, kind, errors[OURS], ATTEND_ERROR, calls)
        for one, time in times.items():
            yield Row(name, kind, time, errors[one], n_bytes, "" if one == OURS else one)
        for one, why in failures.items():
            print(f"{name}, {kind}: {one} cannot be captured: {why}")
            yield Row(name, kind, None, errors[one], n_bytes, one, "failed", why)
        if left_out is not None:
            yield left_out


def check(
    name: str, kind: str, error: float, most: float, calls: dict[str, Call]
) -> tuple[dict[str, Quantiles], dict[str, str]]:
    """Time calls, ours with an error within bounds."""
    if not is_within(error, most):
        raise SystemExit(f"{name}, {kind}: the error is {error:.2e}, but must be up to {most:.2e}")
    return time_calls(calls)


def decode(page_size: int, kinds: list[str]) -> Iterator[Row]:
    """Decode 64 and eight rows of 1024 to 8192 keys, and one and eight rows of 8192."""
    for n_rows in (64, 8):
        lengths = torch.randint(1024, 8193, (n_rows,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
        name = f"decode {n_rows} rows, 1k to 8k keys"
        yield from attend_rows(name, 1, lengths, page_size, kinds, flashinfer=find_flashinfer()[0])
    for n_rows in (1, 8):
        lengths = torch.full((n_rows,), 8192, device=DEVICE)
        name = f"decode {n_rows} rows, 8192 keys"
        yield from attend_rows(name, 1, lengths, page_size, kinds, flashinfer=find_flashinfer()[0])


def prefill(page_size: int, kinds: list[str]) -> Iterator[Row]:
    """Attend with 2048 queries to 8192 keys, in pages and contiguous."""
    lengths = torch.tensor([8192], device=DEVICE)
    yield from attend_rows("prefill 2048 over 8192 keys", 2048, lengths, page_size, kinds)
    pages = full_pages("bf16", 8192 // page_size, page_size)
    table = torch.arange(8192 // page_size, device=DEVICE)[None]
    q = torch.randn(1, 2048, HEADS, D, device=DEVICE).bfloat16()
    k, v = (x.flatten(0, 1)[None] for x in pages[:2])
    call = functools.partial(attention, q, k, v, causal=True)
    error = error_of(call(), q, pages, table, lengths, 0)
    name = "prefill 2048 over 8192 keys"
    yield Row(name, "contiguous", check(name, "contiguous", error, ATTEND_ERROR, {OURS: call})[0][OURS], error, 0.0)


def append_call(kind: str, n_tokens: int, page_size: int) -> tuple[Pages, Tensor, dict[str, Any], Callable[[], Any]]:
    """Return pages, slots, tensors and the call that normalises, rotates and writes tokens of one projection."""
    pages = empty_pages(kind, n_tokens // page_size + 8, page_size)
    projected = torch.randn(n_tokens, HEADS + 2 * KV_HEADS, D, device=DEVICE).bfloat16()
    q, k, v = projected.split([HEADS, KV_HEADS, KV_HEADS], 1)
    angles = torch.rand(32768, D // 2, device=DEVICE) * 6.28
    weight = torch.ones(D, device=DEVICE).bfloat16()
    positions = torch.randint(0, 32768, (n_tokens,), device=DEVICE)
    slots = torch.randperm(pages.k.shape[0] * page_size, device=DEVICE)[:n_tokens]
    keywords: dict[str, Any] = {"cos": angles.cos(), "sin": angles.sin(), "q": q, "positions": positions}
    norm = QKNorm(weight, weight)
    call = functools.partial(append_kv, k, v, pages.k, pages.v, slots, norm=norm, **keywords, **pages.scales)
    return pages, slots, {"k": k, "v": v, **keywords}, call


def append(page_size: int, kinds: list[str]) -> Iterator[Row]:
    """Append 64 and 16,384 tokens."""
    for n_tokens in (64, 16384):
        for kind in kinds:
            pages, slots, tensors, call = append_call(kind, n_tokens, page_size)
            call()
            k, v = (x[0][slots] for x in values_of(pages, torch.arange(len(pages.k), device=DEVICE)))
            x = tensors["k"].double()
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
            cos, sin = (tensors[name].double()[tensors["positions"]][:, None] for name in ("cos", "sin"))
            a, b = x.chunk(2, -1)
            expected = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
            pairs = ((k, expected), (v, tensors["v"].double()))
            error = relative_error(*zip(*pairs, strict=True))
            n_bytes = n_tokens * D * (4 * HEADS + 2 * KV_HEADS * (2 + BYTES[kind]))
            name = f"append {n_tokens} tokens"
            time = check(name, kind, error, APPEND_ERROR[kind], {OURS: call})[0][OURS]
            yield Row(name, kind, time, error, n_bytes)


def host(page_size: int, kinds: list[str]) -> Iterator[Row]:
    """Time the host part of an eager append of 64 tokens, beside `rotary_embedding`'s."""
    for kind in kinds:
        least = time_host(append_call(kind, 64, page_size)[3], DEVICE).least
        yield Row("host, append 64 tokens", kind, Quantiles(least, least, least), 0.0, 0.0)
    query, key = (torch.randn(64, heads * D, device=DEVICE).bfloat16() for heads in (HEADS, KV_HEADS))
    cache, positions = torch.randn(32768, D, device=DEVICE).bfloat16(), torch.arange(64, device=DEVICE)
    rotate = functools.partial(torch.ops.ropewalk.rotary_embedding, positions, query, key, D, cache, True)
    least = time_host(rotate, DEVICE).least
    yield Row("host, append 64 tokens", "rotary_embedding", Quantiles(least, least, least), 0.0, 0.0)


GROUPS = {"decode": decode, "append": append, "prefill": prefill, "host": host}


def main() -> None:
    """Measure the groups that are named, or all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("groups", nargs="*", default=list(GROUPS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), f"pages of {options.page_size}; time in µs, beside bf16's; GB/s")
    record = None
    if options.out is not None:
        asks = "decode" in options.groups
        run = describe_run("serving", DEVICE, find_flashinfer()[1] if asks else {})
        record = RecordWriter(options.out, {**run, "seed": 0, "options": {"page_size": options.page_size}})
    for group in options.groups:
        of_bf16: dict[str, float] = {}
        for row in GROUPS[group](options.page_size, options.formats):
            kind = f"{row.kind} {row.peer}".strip()
            timed: dict[str, Any] = {}
            if row.time is None:
                print(f"{row.case:30} {kind:16} {row.status}: {row.reason}", flush=True)
            else:
                time = row.time.p50
                of_bf16.setdefault(row.case, time)
                ratio, rate = time / of_bf16[row.case], row.bytes_moved / time / 1e3
                print(f"{row.case:30} {kind:16} {time:9.2f} {ratio:6.3f} {rate:7.0f} error {row.error:.1e}", flush=True)
                timed = {"time": row.time, "ratio": ratio, "gb_per_s": rate}
            if record is not None:
                record.append(
                    {
                        "case": {"name": row.case, "page_size": options.page_size, "q_heads": HEADS,
                                 "k_heads": KV_HEADS, "head_dim": D, "dtype": "bfloat16"},
                        "mode": group, **row.describe(), **timed,
                    }
                )  # fmt: skip
    if record is not None:
        record.end()


if __name__ == "__main__":
    main()
