"""Profile the rotation of 4096 tokens in fp32: compiled PyTorch, our operators, and a copy of the same bytes.

python examples/profile_rotary.py [--json PATH]

The profiler's "CUDA total" counts a kernel once more for each operator and annotation around it. Here kernels alone are
summed, each once. Without a GPU there are none: a small shape is timed on the CPU, by the clock.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ropewalk import apply_rope, inverse_frequencies, rope_table, rotary_embedding
from ropewalk.bench.core.records import describe_run
from ropewalk.ops.rope.backends import choose, why_not
from ropewalk.testing import assert_close_to_truth

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures there")
options = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_gpu = device.type == "cuda"
T, HQ, HK, D = (4096, 32, 16, 128) if on_gpu else (512, 8, 4, 64)
WARMUP, CALLS = (10, 50) if on_gpu else (3, 10)
torch.manual_seed(0)

inv_freq, _ = inverse_frequencies("default", rotary_dim=D, base=10000.0)
cos_sin_cache = torch.cat(rope_table(T, inv_freq, device=device), dim=-1)
cos, sin = cos_sin_cache.chunk(2, dim=-1)
positions = torch.arange(T, device=device)


def make_inputs(memory):
    """`memory` itself, and in it q (T, HQ, D) and k (T, HK, D)."""
    q, k = memory.split([T * HQ * D, T * HK * D])
    return memory, q.view(T, HQ, D), k.view(T, HK, D)


# Calls take these in turns, so that none finds in the GPU's cache what the one before it left there.
inputs = [make_inputs(torch.randn(T * (HQ + HK) * D, device=device)) for _ in range(4)]
target = torch.empty_like(inputs[0][0])


def rotate(positions, q, k, cos_sin_cache):
    """The rotation as one writes it in PyTorch."""
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)

    def turn(x):
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)

    return turn(q), turn(k)


compiled_rotate = torch.compile(rotate)


def copy_(memory, q, k):
    target.copy_(memory)


def compiled_pytorch(memory, q, k):
    return compiled_rotate(positions, q, k, cos_sin_cache)


def by_rotary_embedding(memory, q, k):
    rotary_embedding(positions, q, k, D, cos_sin_cache, True)
    return q, k


def by_triton(memory, q, k):
    return apply_rope(q, k, cos, sin, positions=positions, layout="thd", inplace=True, impl="triton")


by_rotary_embedding(*make_inputs(torch.zeros_like(target)))  # the first call may build the backend of the others
calls = {
    "copy_ of the same bytes": copy_,
    "compiled PyTorch": compiled_pytorch,
    f"rotary_embedding ({choose(None, device)})": by_rotary_embedding,
}
missing = why_not("triton", device) if on_gpu else "there is no GPU here"
if missing is None:
    calls["apply_rope (triton)"] = by_triton


def profile_calls(call):
    """How many kernels a call launches, and the median of what they take together, in µs."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for index in range(CALLS):
            call(*inputs[index % len(inputs)])
            # Our kernel begins while the one before it ends: it would be charged with waiting for that.
            torch.cuda.synchronize()
    # Annotations too have a time on the GPU, from the first of their kernels to the last: they are left out.
    kernels = [x for x in profiler.events() if x.device_type == DeviceType.CUDA and not x.is_user_annotation]
    kernels.sort(key=lambda kernel: kernel.time_range.start)
    each, lost = divmod(len(kernels), CALLS)
    if lost or not each:
        raise RuntimeError(f"{CALLS} equal calls cannot launch {len(kernels)} kernels: the profiler lost some")
    times = [kernel.time_range.elapsed_us() for kernel in kernels]
    return each, statistics.median(sum(times[first : first + each]) for first in range(0, len(times), each))


def time_host(call, repeats=8):
    """What a call costs the host, without the profiler: the median in µs. On a CPU it is all that a call costs."""
    times = []
    for _ in range(CALLS):
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for index in range(repeats):
            call(*inputs[index % len(inputs)])
        times.append((time.perf_counter() - start) * 1e6 / repeats)
    return statistics.median(times)


# Right first, fast later.
memory, q, k = inputs[0]
baseline = rotate(positions, q, k, cos_sin_cache)
truth = rotate(positions, q.double(), k.double(), cos_sin_cache.double())
for call in calls.values():
    if call is not copy_:
        for results in zip(call(*make_inputs(memory.clone())), truth, baseline, strict=True):
            assert_close_to_truth(*results)

n_bytes = 2 * memory.nbytes  # every element of q and k is read once and written once
rows = []
for name, call in calls.items():
    for index in range(WARMUP):
        call(*inputs[index % len(inputs)])
    row = {"implementation": name, "kernels": None, "device_us": None, "host_us": time_host(call)}
    if on_gpu:
        profile_calls(call)  # the first time it runs, the profiler misses what comes early
        row["kernels"], row["device_us"] = profile_calls(call)
    row["gb_per_s"] = n_bytes / (row["device_us"] or row["host_us"]) / 1e3
    rows.append(row)

run = describe_run("profile-rotary", device, {})
what = "self time of kernels" if on_gpu else "no GPU here: a small shape, CPU times by the clock"
table = Table(
    title=f"T{T}, {HQ} and {HK} heads, D{D}, fp32, on {run['device']}",
    caption=f"{what}; medians of {CALLS}; torch {run['torch']}",
)
table.add_column("implementation", no_wrap=True)
for column in ("kernels", "device µs", "host µs", "GB/s", "of copy"):
    table.add_column(column, justify="right")
for row in rows:
    kernels, device_us = ("–", "–") if row["kernels"] is None else (str(row["kernels"]), f"{row['device_us']:.1f}")
    rates = f"{row['gb_per_s']:.0f}", f"{row['gb_per_s'] / rows[0]['gb_per_s']:.3f}"
    table.add_row(row["implementation"], kernels, device_us, f"{row['host_us']:.1f}", *rates)
console = Console()
console.print(table)
if missing is not None:
    console.print(f"apply_rope (triton): not run, {missing}")
if options.json is not None:
    shape = {"tokens": T, "q_heads": HQ, "k_heads": HK, "head_dim": D, "dtype": "float32"}
    record = {**run, "shape": shape, "calls": CALLS, "rows": rows}
    options.json.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    console.print(f"written: {options.json}")
