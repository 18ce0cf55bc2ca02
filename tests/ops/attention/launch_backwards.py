"""Launch the Gluon backward again and again, and print in how many launches the gradients of k or v differed.

python launch_backwards.py HEAD_DIM WINDOW LAUNCHES, with window 0 for no position; `test_gluon_shared.py` starts it.
"""

from __future__ import annotations

import sys

import torch

from ropewalk import NoPosition, ReRope
from ropewalk.ops.attention.checks import check_call
from ropewalk.ops.attention.eager import load_kernels
from ropewalk.ops.attention.prepare import prepare


def main(head_dim: int, window: int, launches: int) -> None:
    """Compare each launch with the first."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, 700, head_dim, device="cuda").bfloat16()
    k, v = (torch.randn(2, 2, 700, head_dim, device="cuda").bfloat16() for _ in range(2))
    position = ReRope(window) if window else NoPosition()
    prepared = prepare(q, k, check_call(q, k, v, position=position, causal=True, layout="bhtd"))
    forward, backward = load_kernels("gluon")
    out, saved = forward(q, k, v, prepared)
    grad_out = torch.randn_like(q)
    first = backward(grad_out, None, v, out, saved, prepared)
    differed = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(launches):
        again = backward(grad_out, None, v, out, saved, prepared)
        # NaN is not equal to itself.
        differed += (again.k != first.k).any() | (again.v != first.v).any() | again.q.isnan().any()
    print(int(differed))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
