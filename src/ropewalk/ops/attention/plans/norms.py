"""The norm beside a rotation, which comes before a call: q and k normed and rotated in one launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.attention.call import AttentionCall, RopeTable, as_bhtd, from_bhtd
from ropewalk.ops.attention.plans.inputs import UNCHECKED, Inputs, Rows, find_paths, sides_of, tensors_of_caller
from ropewalk.ops.attention.tables import bind_norm, identity_of, norm_call, with_rows
from ropewalk.ops.attention.validate import NO_POSITION, Unchecked, resolve
from ropewalk.ops.launch.kinds import Operation, matches_nothing, may_plan, plan_or_none
from ropewalk.ops.launch.record import Record
from ropewalk.ops.rope.norm import QKNorm
from ropewalk.ops.tracing import is_intercepted, is_plain_eager
from ropewalk.schemes import Rope


class NormedCall(NamedTuple):
    """A call, and the norm that comes before it."""

    call: Unchecked
    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    offset: float
    after: bool
    across_heads: bool


class _Kind:
    """A kind of norms: the tables of its rotation, or the plan that makes them in each call."""

    constants: Any = ()
    matches = staticmethod(matches_nothing)
    switches: tuple[bool, ...] = ()

    def __init__(self, call: AttentionCall, record: NormedCall) -> None:
        unchecked = record.call
        self.tables, self.layout = with_rows(call).tables, unchecked.arguments.layout
        self.impl = norm_impl(unchecked.impl)
        # Kernels give the same bits for views of another layout; sums of PyTorch's do not.
        self.is_viewed = self.layout == "thd" or self.impl is not None or not call.q.is_cuda
        self.plan: Any = None
        self.sides: list[Rows] = []
        placed = (call.positions_q, call.positions_k, call.key_starts, call.query_starts, call.cu_seqlens_q)
        assert call.scheme is not None
        if any(x is not None for x in placed) or identity_of(call.scheme) is None:
            self._plan_rows(call, unchecked)
        table_tensors = [x for table in (self.tables.q, self.tables.k) for x in table or ()]
        self.constants = table_tensors + (self.inputs.all_constants if self.sides else [])
        self.norm = bind_norm(self.tables, "bhtd" if self.is_viewed else self.layout, self.impl)

    def _plan_rows(self, call: AttentionCall, unchecked: Unchecked) -> None:
        from ropewalk.ops.launch.plan import Builder

        paths = find_paths(call, unchecked)
        assert paths is not None  # as `make` found
        builder = Builder(call.q.device)
        self.sides = [Rows(call, *sides) for sides in sides_of(call)]
        self.inputs: Inputs = builder.follow(Inputs, call, paths, self.sides, {})
        tables = self.inputs.meta_call.tables
        self.plan = builder.finish([x for side in self.sides for x in getattr(tables, "qk"[side.side])])
        self.tables = self.tables._replace(q=None, k=None)  # no plan keeps the call's rows

    def run(self, unchecked: Unchecked, norm: QKNorm) -> tuple[Tensor, ...] | None:
        """Return q and k, normed and rotated; None where a tensor is misaligned."""
        q, k, *_ = unchecked
        layout, norm_qk = self.layout, self.norm
        if self.plan is not None:
            found = self.inputs.gather(unchecked)
            if found is None:
                return None
            cos, sin, *k_table = self.plan.run(*found, self.plan.results)
            q_table = RopeTable(cos, sin)
            tables = self.tables._replace(q=q_table, k=RopeTable(*k_table[:2]) if len(self.sides) > 1 else q_table)
            norm_qk = bind_norm(tables, "bhtd" if self.is_viewed else layout, self.impl)
        if not self.is_viewed:
            return norm_qk(q, k, norm)
        q, k = norm_qk(as_bhtd(q, layout), as_bhtd(k, layout), norm)
        return from_bhtd(q, layout), from_bhtd(k, layout)


class _Norms(Operation[NormedCall]):
    def make(self, record: NormedCall) -> _Kind | None:
        """Return the kind of a norm; None where no rotation goes with it, or no plan makes its tables."""
        call = resolve(record.call)
        is_plannable = is_plain_eager(*tensors_of_caller(record.call), record.q_weight, record.k_weight)
        is_plannable = is_plannable and type(call.scheme) is Rope and call.q.device == call.k.device
        is_plannable = is_plannable and gpu.why_no_triton(call.q.device) is None  # whose kernel makes rows of tables
        if not is_plannable or find_paths(call, record.call) is None:
            return None
        return plan_or_none(_Kind, call, record)  # type: ignore[no-any-return]


def _resolve(record: NormedCall) -> Any:
    return resolve(record.call)


NORMS = _Norms(Record(NormedCall, identify=UNCHECKED.identify), _resolve)


def norm_impl(impl: str | None) -> str | None:
    """Return the implementation of the norm beside a backend."""
    return impl if impl == "reference" else None


def norm_first(unchecked: Unchecked, norm: QKNorm) -> Unchecked:
    """Return a call with q and k normed; those of `Rope` are rotated in the same launch, and have no position left."""
    arguments = unchecked.arguments
    found = None
    is_plain = not torch.compiler.is_compiling() and not is_intercepted()
    if is_plain and isinstance(unchecked.q, Tensor) and may_plan(unchecked.q):
        norm_fields = (norm.q_weight, norm.k_weight, norm.eps, norm.offset, norm.after, norm.across_heads)
        kind = NORMS.find(tuple.__new__(NormedCall, (unchecked, *norm_fields)))
        found = None if kind is None else kind.run(unchecked, norm)
    if found is None:
        call = norm_call(resolve(unchecked), norm, norm_impl(unchecked.impl))
        found = from_bhtd(call.q, arguments.layout), from_bhtd(call.k, arguments.layout)
    if type(arguments.position) is Rope:
        arguments = arguments._replace(position=NO_POSITION, positions_q=None, positions_k=None)
    q, k = found
    return unchecked._replace(q=q, k=k, arguments=arguments)
