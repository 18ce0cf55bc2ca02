"""Attention with two scores: checked against float64, then timed against eager PyTorch.

python examples/rerope_benchmark.py [--tokens N] [--heads H] [--head-dim D] [--window W] [--heads-at-once N]

Eager PyTorch holds whole matrices of scores. So that they fit in memory, it goes a few heads at a time, each time
forward and then backward, by the same autograd. Without a GPU a small shape is timed, on the CPU.
"""

import argparse
import math

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.benchmark import Timer

from ropewalk import rerope_attention, torch_attention
from ropewalk.bench.core.records import describe_run
from ropewalk.ops.attention.backends import why_missing
from ropewalk.testing import assert_close_to_truth, error_budget

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_gpu = device.type == "cuda"
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--tokens", type=int, default=8192 if on_gpu else 512)
parser.add_argument("--heads", type=int, default=32 if on_gpu else 4)
parser.add_argument("--head-dim", type=int, default=64)
parser.add_argument("--window", type=int, default=2048 if on_gpu else 128, help="where far pairs of tokens begin")
parser.add_argument("--heads-at-once", type=int, default=4, metavar="N", help="of eager PyTorch")
options = parser.parse_args()

missing = why_missing("triton", device) if on_gpu else "there is no GPU here"
IMPLS = (None,) if missing else (None, "triton")
DTYPES = (torch.float16, torch.bfloat16)
console = Console()


def make_tensors(shape, dtype):
    """q1, q2, k1, k2 and v, and the gradient of the output, all (Z, H, N, D)."""
    generator = torch.Generator(device).manual_seed(0)
    *tensors, grad = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(6))
    return tensors, grad


def eager_attention(q1, q2, k1, k2, v, causal, sm_scale, window):
    """What `torch_attention` computes, in the tensors' dtype: near and far scores as whole matrices."""
    m = torch.arange(q1.shape[2], device=q1.device)[:, None]
    n = torch.arange(k1.shape[2], device=q1.device)
    scores = torch.where((m - n).abs() < window, q1 @ k1.mT, q2 @ k2.mT) * sm_scale
    if causal:
        scores = scores.masked_fill(n > m, -math.inf)
    return scores.softmax(-1, dtype=torch.promote_types(v.dtype, torch.float32)).to(v.dtype) @ v


def as_leaves(tensors):
    return [x.detach().requires_grad_() for x in tensors]


def compute(attend, tensors, grad, *arguments, **keywords):
    """The output and the gradients of all five tensors."""
    leaves = as_leaves(tensors)
    out = attend(*leaves, *arguments, **keywords)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def name_of(impl):
    return "rerope_attention" if impl is None else f"rerope_attention, {impl}"


# Right first, fast later. An error may be twice that of eager PyTorch in the dtype, and as many units in the last place
# as there are results rounded to it on the way: probabilities, their gradients, and what comes of them.
ROUNDINGS = 3
SHAPE, WINDOW = (2, 3, 300, 64), 100
shape = f"Z{SHAPE[0]} H{SHAPE[1]} N{SHAPE[2]} D{SHAPE[3]}, window {WINDOW}"
print(f"{shape}, on {device}: the errors of the output and of the gradients of q1,")
print("q2, k1, k2 and v, against float64, as parts of what they may be:")
for dtype in DTYPES:
    tensors, grad = make_tensors(SHAPE, dtype)
    wide, wide_grad = [x.double() for x in tensors], grad.double()
    for causal in (True, False):
        arguments = causal, SHAPE[3] ** -0.5, WINDOW
        truths = compute(torch_attention, wide, wide_grad, *arguments)
        baselines = compute(eager_attention, tensors, grad, *arguments)
        for impl in IMPLS:
            actual = compute(rerope_attention, tensors, grad, *arguments, impl=impl)
            shares = []
            for result, truth, baseline in zip(actual, truths, baselines, strict=True):
                assert_close_to_truth(result, truth, baseline, ROUNDINGS)
                error = (result.double() - truth).abs().max().item()
                shares.append(f"{error / error_budget(truth, baseline, ROUNDINGS):.2f}")
            order = "causal" if causal else "not causal"
            print(f"  {name_of(impl)}, {str(dtype).removeprefix('torch.')}, {order}: {', '.join(shares)}")

H, N, D, window = options.heads, options.tokens, options.head_dim, options.window
arguments = True, D**-0.5, window
operations = 2 * 7 * H * D * N**2 / 2  # two matrix products forward, five backward, of the causal half


def time_step(step):
    """Seconds of a call, the median."""
    step()  # what is compiled, is compiled here
    return Timer("step()", globals={"step": step}).blocked_autorange(min_run_time=1.0 if on_gpu else 0.2).median


def step_of(attend, tensors, grad, **keywords):
    """A forward and a backward."""
    leaves = as_leaves(tensors)
    return lambda: torch.autograd.grad(attend(*leaves, *arguments, **keywords), leaves, grad)


def step_of_parts(tensors, grad):
    """Forwards and backwards of eager PyTorch, a few heads at a time."""
    parts = zip(*(x.split(options.heads_at_once, dim=1) for x in (*tensors, grad)), strict=True)
    steps = [step_of(eager_attention, part[:5], part[5]) for part in parts]
    return lambda: [step() for step in steps]


run = describe_run("rerope-benchmark", device, {})
table = Table(
    title=f"Z1 H{H} N{N} D{D}, window {window}, causal, forward and backward, on {run['device']}",
    caption=f"medians; eager PyTorch goes {min(options.heads_at_once, H)} heads at a time; torch {run['torch']}",
)
table.add_column("implementation", no_wrap=True)
for column in ("dtype", "ms", "TFLOP/s", "× as fast as eager"):
    table.add_column(column, justify="right")
for dtype in DTYPES:
    tensors, grad = make_tensors((1, H, N, D), dtype)
    steps = {"eager PyTorch": step_of_parts(tensors, grad)}
    steps |= {name_of(impl): step_of(rerope_attention, tensors, grad, impl=impl) for impl in IMPLS}
    times = {name: time_step(step) for name, step in steps.items()}
    for name, seconds in times.items():
        faster = times["eager PyTorch"] / seconds
        cells = f"{seconds * 1e3:.3f}", f"{operations / seconds / 1e12:.3g}", f"{faster:.2f}"
        table.add_row(name, str(dtype).removeprefix("torch."), *cells)
console.print(table)
if not on_gpu:
    console.print("No GPU here: a small shape, on the CPU, where by the reference in plain PyTorch.")
if missing:
    console.print(f"{name_of('triton')}: not run, {missing}")
