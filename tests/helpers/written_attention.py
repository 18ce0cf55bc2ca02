"""Attention of one sequence as formulas write it: a truth for what the reference may share with kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def attend_plainly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attends: Tensor,
    bias: Tensor | float = 0.0,
    sinks: Tensor | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output (Tq, H, Dv) and the natural log-sum-exp (H, Tq), of q (Tq, H, D), k and v (Tk, K, D or Dv).

    attends: which pairs are, (Tq, Tk) or (H, Tq, Tk). bias: added to scores, -inf too. A row without a pair gives 0.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("mhd,nhd->hmn", q, k) * q.shape[-1] ** -0.5 + bias
    scores = scores.masked_fill(~attends, -torch.inf)
    top = scores.detach().amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks.detach()[:, None, None])
    top = top.masked_fill(top == -torch.inf, 0)
    p = (scores - top).exp()
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks[:, None, None] - top).exp()
    nothing = total == 0
    total = total.masked_fill(nothing, 1)
    out = torch.einsum("hmn,nhd->mhd", (p / total).to(v.dtype), v)
    if gate is not None:
        out = out * torch.sigmoid(gate if gate.ndim == 3 else gate[..., None])
    return out, (top + total.log()).masked_fill(nothing, -torch.inf).squeeze(-1).to(
        torch.promote_types(q.dtype, torch.float32)
    )


def compute(
    function: Callable[..., tuple[Tensor, Tensor]], tensors: Sequence[Tensor], weights: Tensor, of_lse: Tensor
) -> list[Tensor]:
    """A function's output, its log-sum-exp with 0 in rows that attend nothing, and the gradients of all its tensors."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = function(*leaves)
    lse = lse.masked_fill(lse.detach() == -torch.inf, 0)
    total = (out.double() * weights).sum() + (lse.double() * of_lse).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(total, leaves)]
