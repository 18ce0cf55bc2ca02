"""Launch the Gluon backward again and again, and print in how many launches the gradients of k or v differed.

python launch_backwards.py HEAD_DIM WINDOW LAUNCHES, with window 0 for no position; `test_hopper_shared.py` starts it.
"""

from __future__ import annotations

import sys

import torch

from ropewalk import NoPosition, ReRope
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.autograd import without_inputs
from ropewalk.ops.attention.backend import Wanted
from ropewalk.ops.attention.backends import KERNELS


def main(head_dim: int, window: int, launches: int) -> None:
    """Compare each launch with the first."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, 700, head_dim, device="cuda").bfloat16()
    k, v = (torch.randn(2, 2, 700, head_dim, device="cuda").bfloat16() for _ in range(2))
    position = ReRope(window) if window else NoPosition()
    kernels = KERNELS["gluon"]
    call = make_call(q, k, v, position=position, causal=True, layout="bhtd")
    out, saved = kernels.forward(call, True)
    grad_out = torch.randn_like(q)
    read = without_inputs(call, saved)
    first = kernels.backward(read, out, saved, grad_out, None, Wanted())
    differed = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(launches):
        again = kernels.backward(read, out, saved, grad_out, None, Wanted())
        # NaN is not equal to itself.
        differed += (again.k != first.k).any() | (again.v != first.v).any() | again.q.isnan().any()
    print(int(differed))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
