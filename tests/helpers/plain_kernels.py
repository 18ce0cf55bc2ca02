"""A backend with a backward of its own in plain PyTorch: the way to kernels can be tested where there are none."""

from __future__ import annotations

import torch

from ropewalk.ops.attention.autograd import LN_2
from ropewalk.ops.attention.backend import Gradients, Saved
from ropewalk.ops.attention.tables import map_features, rotate


class PlainKernels:
    """Attention after a rotation, causal or full; nothing else of a call is read."""

    name = "plain"
    backward_reads = ("q", "k", "v", "causal", "scale", "tables", "keys_rotated", "deterministic")
    reads = (*backward_reads, "scheme", "positions_q", "positions_k", "return_lse", "needs_backward")

    def why_not(self, call):
        return None

    def why_no_backward(self, call, wanted):
        return None

    def forward(self, call, save, on=None):
        q, k = map_features(call)
        groups = q.shape[1] // k.shape[1]
        scores = scores_of(q, k.repeat_interleave(groups, dim=1), call)
        out = scores.softmax(-1) @ call.v.repeat_interleave(groups, dim=1)
        return out, Saved(q, k, scores.logsumexp(-1) / LN_2)

    def backward(self, call, out, saved, grad_out, grad_lse, wanted, on=None):
        groups = saved.q.shape[1] // saved.k.shape[1]  # below the dispatcher there is no autograd
        k, v = (x.repeat_interleave(groups, dim=1) for x in (saved.k, call.v))
        p = (scores_of(saved.q, k, call) - LN_2 * saved.lse[..., None]).exp()
        delta = (out * grad_out).sum(-1) - (0 if grad_lse is None else grad_lse)
        ds = p * (grad_out @ v.mT - delta[..., None]) * call.scale
        q = ds @ k
        k, v = (x.unflatten(1, (-1, groups)).sum(2) for x in (ds.mT @ saved.q, p.mT @ grad_out))
        q, k = (
            x if table is None else rotate(x, table, call.tables, inverse=True)
            for x, table in ((q, call.tables.q), (k, call.tables.k))
        )
        return Gradients(q, k, v, None, None)


def scores_of(q, k, call):
    """The scaled scores, −inf where a query may not attend."""
    scores = q @ k.mT * call.scale
    if not call.causal:
        return scores
    allowed = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    return scores.masked_fill(~allowed, -torch.inf)
