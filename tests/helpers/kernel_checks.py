"""What the tests of attention's Triton kernels compare: all that they compute, against float64 and plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.ops.attention import dropout, reference
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.autograd import without_inputs
from ropewalk.ops.attention.backend import KernelBackend, Saved, Wanted
from ropewalk.ops.attention.backends import REFERENCE, backward_of
from ropewalk.ops.attention.call import AttentionCall, existing, token_positions
from ropewalk.testing import assert_close_to_truth, poisoned_memory, unchanged

# Results on the way that are rounded to the dtype: mapped features, scores, probabilities, and what comes of them.
ROUNDINGS = 4
NOTHING_WANTED = Wanted()
LOG2_E = math.log2(math.e)
Results = tuple[Tensor, ...]


def learned_of(call: AttentionCall) -> list[Tensor]:
    """What a call learns beside q, k and v: a scheme's tensors that require a gradient, and sinks."""
    of_scheme = [x for x in vars(call.scheme).values() if isinstance(x, Tensor) and x.requires_grad]
    return of_scheme if call.sinks is None else [*of_scheme, call.sinks]


def in_double(call: AttentionCall) -> AttentionCall:
    """The same call, with all that it learns as leaves in float64."""
    scheme, sinks = call.scheme, call.sinks
    values = {
        name: x.detach().double().requires_grad_() if isinstance(x, Tensor) and x.requires_grad else x
        for name, x in vars(scheme).items()
    }
    return call._replace(
        scheme=type(scheme)(**values), sinks=None if sinks is None else sinks.detach().double().requires_grad_()
    )


def compute(call: AttentionCall, tensors: Sequence[Tensor], grad_out: Tensor, grad_lse: Tensor) -> Results:
    """The reference's output, natural log-sum-exp, and the gradients of q, k, v and what is learned, by autograd."""
    q, k, v = leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = REFERENCE.attend(call._replace(q=q, k=k, v=v))
    total = (out * grad_out).sum() + (torch.where(lse.detach() > -math.inf, lse, 0) * grad_lse).sum()
    grads = torch.autograd.grad(total, (*leaves, *learned_of(call)))
    return out.detach(), lse.detach(), *grads


def compute_plainly(call: AttentionCall, grad_out: Tensor, grad_lse: Tensor) -> Results:
    """The same, each step in the tensors' dtype, with the kernels' backward: from p, which is a power of 2."""
    q, k, v = (x.detach().requires_grad_() for x in (call.q, call.k, call.v))
    groups = q.shape[1] // k.shape[1]
    exist = existing(call)
    if exist is not None:
        k, v = (x.detach().masked_fill(~exist[:, None, :, None], 0).requires_grad_() for x in (k, v))
    call = call._replace(q=q, k=k, v=v)
    positions = token_positions(call)
    distance = (positions[0][:, :, None] - positions[1][:, None])[:, None]
    mapped_q, mapped_k = reference.map_features(call, *positions)
    far = reference.map_far_features(call, *positions)
    scores = reference.scores_of(mapped_q, mapped_k, far, distance, call.scheme.far_window()) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = call.scheme.score_mod(scores, distance)
    may = reference.allowed(slice(0, q.shape[2]), call)
    attends = torch.ones_like(scores, dtype=torch.bool) if may is None else may.expand_as(scores)
    lse = scores.detach().masked_fill(~attends, -math.inf).logsumexp(-1)
    if call.sinks is not None:
        lse = torch.logaddexp(lse, call.sinks.detach().to(lse.dtype)[:, None])
    shift = torch.where(lse.isinf(), 0, lse)[..., None]
    p = torch.where(attends, torch.exp2(scores.detach() * LOG2_E - shift * LOG2_E), 0)
    keep: Tensor | float = 1.0
    if call.dropout_p > 0:
        keep = reference.dropout_mask(slice(0, q.shape[2]), call)
        keep = keep.to(q.dtype) * dropout.rescale(call.dropout_p)
    values = v.detach().repeat_interleave(groups, 1)
    out = p * keep @ values
    delta = (out * grad_out).sum(-1) - torch.where(lse.isinf(), 0, grad_lse.to(out.dtype))
    grad_scores = p * (grad_out @ values.mT * keep - delta[..., None])
    of_sinks = []
    if call.sinks is not None:
        of_sinks = [-(torch.exp(call.sinks.detach().to(lse.dtype)[:, None] - lse) * delta).sum((0, 2))]
    of_scheme = learned_of(call._replace(sinks=None))
    grad_q, grad_k, *grads = torch.autograd.grad(scores, (q, k, *of_scheme), grad_scores)
    grad_v = ((p * keep).mT @ grad_out).unflatten(1, (-1, groups)).sum(2)
    return out, lse, grad_q, grad_k, grad_v, *grads, *of_sinks


def check(
    kernels: KernelBackend, tensors: Sequence[Tensor], *, layout: str = "bhtd", seed: int = 7, **keywords: Any
) -> Any:
    """Everything that the kernels compute, against the reference in float64 and plain PyTorch in the same dtype."""
    call = make_call(*tensors, layout=layout, **keywords)
    if call.dropout_p > 0:
        call = call._replace(seed=torch.tensor([seed * 0x9E3779B97F4A7C1 + seed], device=tensors[0].device))
    q, k, v = call.q, call.k, call.v
    grad_out = torch.randn(*q.shape[:3], v.shape[3], device=q.device).to(q.dtype)
    grad_lse = torch.randn(q.shape[:3], device=q.device)
    doubles = [x.double() for x in (q, k, v, grad_out, grad_lse)]
    truth = compute(in_double(call), doubles[:3], *doubles[3:])
    plain = compute_plainly(call, grad_out, grad_lse)
    with unchanged([q, k, v, grad_out]), poisoned_memory():
        params = call.score_mod_params
        wanted = Wanted(params is not None and params.requires_grad, call.sinks is not None)
        with torch.no_grad():
            launched = call if call.sinks is None else call._replace(sinks=call.sinks.float())
            out, saved = kernels.forward(launched, True)
            grads = launch_backward(kernels, launched, out, saved, grad_out, grad_lse, wanted)
    lse = saved.lse * math.log(2)
    actual = [out, lse, *grads[:3]]
    if wanted.score_mod_params:
        leaves = learned_of(call._replace(sinks=None))
        actual += torch.autograd.grad(params, leaves, grads.score_mod_params)
    if wanted.sinks:
        actual.append(grads.sinks)
    assert torch.equal(lse.isinf(), truth[1].isinf())
    for index, (mine, exact, baseline) in enumerate(zip(actual, truth, plain, strict=True)):
        finite = exact.isfinite()
        dtype, roundings = mine.dtype, ROUNDINGS
        if index >= 5:
            # What else is learned comes in float32, summed over all pairs of what was rounded to the tensors' dtype;
            # most of it cancels.
            dtype, roundings = q.dtype, 8 * ROUNDINGS
        near = (torch.where(finite, x, 0) for x in (mine.to(dtype), exact, baseline.to(dtype)))
        assert_close_to_truth(*near, roundings=roundings)
    return out, lse, grads


def launch_backward(
    kernels: KernelBackend,
    call: AttentionCall,
    out: Tensor,
    saved: Saved,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
    wanted: Wanted = NOTHING_WANTED,
) -> Any:
    """The gradients of what a forward computed, by the backend whose backward follows it."""
    read = without_inputs(call, saved)
    return backward_of(kernels, read, wanted).backward(read, out, saved, grad_out, grad_lse, wanted)
