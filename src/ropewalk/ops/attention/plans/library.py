"""Kinds of calls of `attention` that a library runs, after a planned rotation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.attention.backend import LibraryBackend
from ropewalk.ops.attention.call import NO_TABLES, AttentionCall, as_bhtd, flatten, from_bhtd
from ropewalk.ops.attention.plans import cache
from ropewalk.ops.attention.plans.cache import (
    CALLS,
    UNKNOWN,
    addresses_of,
    existing,
    keep_backward,
    may_plan,
    plan_or_none,
)
from ropewalk.ops.attention.plans.leaves import N_GIVEN, of_given, pick_tensors, shares_table
from ropewalk.ops.attention.tables import differentiable_rope, pairing_of, with_rows
from ropewalk.ops.tracing import make_matcher, with_memory

_qkv = of_given("q", "k", "v")


class LibraryCall:
    """A kind of call of `attention` that a library runs: all of the call but q, k and v."""

    gates = False  # no library applies a gate

    def __init__(self, call: AttentionCall, backend: LibraryBackend, layout: str, *, is_plain: bool) -> None:
        rotate = plan_or_none(_PlannedRotation, call) if _rotates_both(call) else None
        _, *of_scheme = pick_tensors(flatten(call))[N_GIVEN:]  # the first is the seed
        self.layout, self.constants = layout, existing(of_scheme) + ([] if rotate is None else rotate.tables)
        self.attend = backend.bind(call) if rotate is None else _after(rotate, backend.bind(_mapped(call)))
        self.plain = (call.causal, call.scale) if is_plain else None
        self.matches: Callable[..., bool] = _matches_nothing
        self.records = False

    def run(self, given: Sequence[Any]) -> Tensor | None:
        """Return what `attention` does; None where a tensor is misaligned, which libraries refuse."""
        q, k, v = _qkv(given)
        if addresses_of((q, k, v)) is None:
            return None
        if self.plain is not None and not torch._C._is_any_autocast_enabled():  # which would cast
            if len(CALLS.plain) >= cache.MAX_PLAIN:
                CALLS.plain.clear()
            if not self.matches(q, k, v):
                self.matches = make_matcher(q, k, v)
            self.records = torch.is_grad_enabled()
            CALLS.plain[self.plain] = self
        if self.layout == "bhtd":
            return self.attend(q, k, v)
        if self.layout == "bthd":
            return self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)
        layout = self.layout
        return from_bhtd(self.attend(*[as_bhtd(x, layout) for x in (q, k, v)]), layout)


def _matches_nothing(*tensors: Tensor) -> bool:
    return False


def is_plain(call: AttentionCall, layout: str, impl: str | None) -> bool:
    """Say whether q, k, v, causality and scale are all that a call of a library has, in (B, H, T, D)."""
    is_mapped = call.tables.q is not None or call.far is not None
    chooses = impl is None and not call.deterministic
    return layout == "bhtd" and chooses and not (is_mapped or call.has_window)


def _rotates_both(call: AttentionCall) -> bool:
    """Say whether q and k are rotated by one table, and our kernels rotate them."""
    tables = call.tables
    is_one = tables.q is not None and shares_table(call) and tables.feature_weights is None
    return is_one and not call.q.is_meta and gpu.why_no_triton(call.q.device) is None


def _mapped(call: AttentionCall) -> AttentionCall:
    """Return a call whose features are mapped already."""
    return call._replace(tables=NO_TABLES)


def _after(rotate: Callable[..., Any], attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v: attend(*rotate(q, k), v)


def _rotate_on(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, on: Any, **keywords: Any) -> Any:
    return on.rope(q, k, cos, sin, **keywords)


class _PlannedRotation:
    """The rotation of q and k before a library's kernels, by a plan, and that of their gradients."""

    def __init__(self, call: AttentionCall) -> None:
        tables = with_rows(call).tables
        assert tables.q is not None
        self.tables = list(tables.q)
        self.addresses = [x.data_ptr() for x in self.tables]
        self.pairing = pairing_of(tables)
        self.plan = self._make(call.q, call.k, inverse=False)
        self.inverse: dict[Any, Any] = {}  # by the strides of the gradients

    def __call__(self, q: Tensor, k: Tensor) -> Any:
        """Rotate q and k at aligned addresses."""
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
            return _rotate(q, k, self)
        return self.run(self.plan, q, k)

    def _make(self, q: Tensor, k: Tensor, *, inverse: bool) -> Any:
        from ropewalk.ops.attention.triton.plan import Builder

        builder = Builder(q.device)
        twins = [builder.input(x) for x in (q, k, *self.tables)]
        rotate = functools.partial(_rotate_on, inverse=inverse, **self.pairing)
        return builder.finish(builder.follow(rotate, *twins))

    def run(self, plan: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Run a plan of it."""
        addresses = [q.data_ptr(), k.data_ptr(), *self.addresses]
        rotated_q, rotated_k, *_ = plan.run((q, k, *self.tables), addresses, plan.results)
        return rotated_q, rotated_k

    def differentiate(self, grad_q: Tensor, grad_k: Tensor) -> Any:
        """Rotate gradients back."""
        if not torch.is_grad_enabled():
            grad_q, grad_k = with_memory(grad_q), with_memory(grad_k)
        if not torch.is_grad_enabled() and may_plan(grad_q) and addresses_of((grad_q, grad_k)) is not None:
            key = (grad_q.stride(), grad_k.stride())
            plan = self.inverse.get(key, UNKNOWN)
            if plan is UNKNOWN:
                plan = plan_or_none(functools.partial(self._make, inverse=True), grad_q, grad_k)
                keep_backward(self.inverse, key, plan)
            if plan is not None:
                return self.run(plan, grad_q, grad_k)
        return differentiable_rope(grad_q, grad_k, *self.tables, inverse=True, **self.pairing)


class _Rotate(torch.autograd.Function):
    """A planned rotation; its backward can be differentiated, as it is linear."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, rotation: _PlannedRotation) -> tuple[Tensor, Tensor]:
        ctx.rotation = rotation
        return rotation.run(rotation.plan, q, k)

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_q, grad_k = ctx.rotation.differentiate(grad_q, grad_k)
        return grad_q, grad_k, None


# Without tests for active transforms, under which no plan runs.
_rotate: Callable[..., Any] = super(torch.autograd.Function, _Rotate).apply
