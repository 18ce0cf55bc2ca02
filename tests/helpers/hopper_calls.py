"""Calls that the tests of the Gluon kernels make."""

from __future__ import annotations

import pytest
import torch

from helpers.kernel_checks import check, launch_backward
from helpers.modes import ON_GPU
from ropewalk import (
    explain_choice,
)
from ropewalk.ops.attention import backends
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.hopper.support import Gluon

WHY_MISSING = backends.why_missing("gluon", torch.device("cuda")) if ON_GPU else "needs a GPU"


on_hopper = pytest.mark.skipif(WHY_MISSING is not None, reason=str(WHY_MISSING))


GLUON = backends.KERNELS["gluon"]


B, H, K, TQ, TK = 2, 4, 2, 200, 333
HEAD_DIMS = [64, 128, (192, 128), 256]  # one for each configuration; of q and k, and of v if it differs


def draw(device, dtype=torch.bfloat16, queries=TQ, keys=TK, head_dim=64, v_head_dim=None, heads=H, key_heads=K):
    """q, k and v in layout "bhtd"; the head dim may be a pair, that of v second."""
    if isinstance(head_dim, tuple):
        head_dim, v_head_dim = head_dim
    q = torch.randn(B, heads, queries, head_dim, device=device).to(dtype)
    k, v = (torch.randn(B, key_heads, keys, dim, device=device).to(dtype) for dim in (head_dim, v_head_dim or head_dim))
    return q, k, v


class Deterministic(Gluon):
    """As if every call were deterministic: with a backward whose programs add dQ in one order, or Triton's."""

    def why_no_backward(self, call, wanted):
        return super().why_no_backward(call._replace(deterministic=True), wanted)

    def backward(self, call, *arguments):
        return super().backward(call._replace(deterministic=True), *arguments)


VARIANTS = {"gluon": GLUON, "deterministic": Deterministic()}


def is_equal(kernels, x, y):
    """Whether gradients are the same: bit by bit, unless the order of their sums differs."""
    return is_near(x, y) if kernels is GLUON else torch.equal(x, y)


def is_near(x, y):
    """Whether what is summed in another order is the same but for a rounding."""
    torch.testing.assert_close(x, y)
    return True


def check_supported(kernels, tensors, *, layout="bhtd", **call):
    """That a call is not refused, and all that it computes."""
    explain_choice(*tensors, impl="gluon", layout=layout, **call)
    return check(kernels, tensors, layout=layout, **call)


def compute(kernels, call, grad_out):
    """The output, its log-sum-exp and the gradients of q, k and v."""
    out, saved = kernels.forward(call, True)
    return out, saved.lse, *launch_backward(kernels, call, out, saved, grad_out)[:3]


def random_grad(call):
    """A gradient of a call's output."""
    return torch.randn(*call.q.shape[:3], call.v.shape[3], device=call.q.device, dtype=call.q.dtype)


def integers(device, *numbers):
    return torch.tensor(numbers, device=device)


LENGTHS = {
    "equal": ([128, 128, 128], [128, 128, 128]),
    "different": ([65, 0, 300, 1, 17, 0, 3], [90, 4, 400, 1, 0, 0, 70]),
    "one": ([200], [640]),
    "empty": ([0, 0], [0, 0]),
}


def pack(device, lengths_q, lengths_k, head_dim=64, rest=70):
    """q, k and v of packed sequences, some rows that belong to none, and cu_seqlens."""
    total_q, total_k = sum(lengths_q) + rest, sum(lengths_k) + 2 * rest
    head_dim, v_head_dim = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    shapes = [(total_q, H, head_dim), (total_k, K, head_dim), (total_k, K, v_head_dim)]
    starts = {
        f"cu_seqlens_{name}": torch.tensor([0, *lengths], device=device).cumsum(0).int()
        for name, lengths in (("q", lengths_q), ("k", lengths_k))
    }
    return [torch.randn(shape, device=device).bfloat16() for shape in shapes], starts


def check_what_is_read(kernels, tensors, position, **keywords):
    """That NaN in keys and values outside starts and lengths shows nowhere, and that their gradients are zero."""
    device = tensors[0].device
    starts, lengths = integers(device, 0, 140), integers(device, 20, 300)
    call = make_call(*tensors, position=position, key_starts=starts, key_lengths=lengths, layout="bhtd", **keywords)
    grad_out = random_grad(call)
    expected = compute(kernels, call, grad_out)
    for x in tensors[1:]:
        x[0, :, 20:] = x[1, :, :140] = x[1, :, 300:] = torch.nan
    results = compute(kernels, call, grad_out)
    assert all(is_equal(kernels, mine, clean) for mine, clean in zip(results, expected, strict=True))
    for grad in results[3:]:
        assert not any(bool(rows.any()) for rows in (grad[0, :, 20:], grad[1, :, :140], grad[1, :, 300:]))
