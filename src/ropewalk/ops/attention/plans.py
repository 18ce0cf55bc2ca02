"""Plans of eager calls by kernels: found by what a call's launches depend on, made at the second call of a kind.

A plan depends neither on values on a device nor on a tensor's version: whatever derives from tensors is an input of it.
Calls that no plan is for, such as those with misaligned tensors, run without one, by the same launchers.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.attention.backend import (
    LN_2,
    Backend,
    Gradients,
    KernelBackend,
    LibraryBackend,
    Saved,
    UnplannableError,
    Wanted,
)
from ropewalk.ops.attention.backends import KERNELS, LIBRARIES, REFERENCE, backward_of
from ropewalk.ops.attention.call import (
    IS_TENSOR,
    LEAVES,
    NO_TABLES,
    AttentionCall,
    RopeTable,
    as_bhtd,
    flatten,
    from_bhtd,
    unflatten,
)
from ropewalk.ops.attention.dropout import make_seed
from ropewalk.ops.attention.tables import (
    bind_norm,
    differentiable_rope,
    identity_of,
    pairing_of,
    row_source,
    signature_of,
    with_rows,
)
from ropewalk.ops.tracing import is_intercepted, is_plain_eager, make_matcher
from ropewalk.schemes import Alibi, ExpoSB, PositionScheme, Rope, T5Bias

MAX_PLANS = 1024
MAX_TABLE_BYTES = 1 << 30  # of the schemes' tables that plans read, and so keep alive
MAX_PLAIN = 64  # causalities and scales of models' layers
MAX_BACKWARDS = 32  # of one forward: gradients that are slices of ever-new lengths have ever-new strides
on_gpu = not gpu.is_rocm()  # plans launch by NVIDIA's driver
on_cpu = False  # in Triton's interpreter, for tests

_UNKNOWN = object()
# One call each, where loops over all leaves would cost the host microseconds.
_TENSORS = [index for index in range(len(LEAVES)) if IS_TENSOR[index]]
_NUMBERS = [index for index in range(len(LEAVES)) if not IS_TENSOR[index]]
pick_tensors, pick_numbers = itemgetter(*_TENSORS), itemgetter(*_NUMBERS)
_put_back = itemgetter(*sorted(range(len(LEAVES)), key=[*_TENSORS, *_NUMBERS].__getitem__))


def call_of(tensors: Sequence[Tensor | None], numbers: Sequence[Any]) -> AttentionCall:
    """Undo `pick_tensors` and `pick_numbers` of a call's leaves."""
    return unflatten(_put_back((*tensors, *numbers)))


class Cache:
    """Plans by key, made at a key's second call: a length that never comes again is not worth one."""

    def __init__(self) -> None:
        self.found: dict[Any, Any] = {}
        self.seen: set[int] = set()
        self.plain: dict[Any, LibraryCall] = {}  # the last one for a causality and a scale: `repeat_plain`
        self.tables: dict[int, int] = {}  # bytes that plans keep alive, by the storages' addresses
        self.lock = threading.Lock()

    def find(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the plan of a key; None where there is none yet, or none is possible."""
        plan = self.found.get(key, _UNKNOWN)
        if plan is not _UNKNOWN:
            return plan
        digest = hash(key)
        with self.lock:
            if digest not in self.seen:
                if len(self.seen) >= 8 * MAX_PLANS:
                    self.seen.clear()
                self.seen.add(digest)
                return None
        plan = make()
        tables = {x.data_ptr(): x.nbytes() for x in (y.untyped_storage() for y in getattr(plan, "constants", ()))}
        with self.lock:
            if len(self.found) >= MAX_PLANS or sum((self.tables | tables).values()) > MAX_TABLE_BYTES:
                self.found.clear()
                self.plain.clear()
                self.tables.clear()
            self.found[key] = plan
            self.tables |= tables
        return plan

    def clear(self) -> None:
        """Drop all plans."""
        with self.lock:
            self.found.clear()
            self.plain.clear()
            self.seen.clear()
            self.tables.clear()


FORWARDS = Cache()


class ForwardPlan:
    """The plan of a forward, and those of its backward by the gradients that come."""

    def __init__(self, call: AttentionCall, backend: KernelBackend, save: bool, longest: int | None = None) -> None:
        from ropewalk.ops.attention.triton.plan import Builder

        builder = Builder(call.q.device, longest)
        twin = _twin(call, builder)
        out, saved = builder.follow(backend.forward, twin, save)
        features = (saved.q, saved.k, *saved[3:]) if save else (None,) * 5
        results = [out, saved.lse] if save or call.return_lse else [out]
        results += [x for x in features if x is not None and not builder.is_input(x)]
        self.plan = builder.finish(results)
        # Indices among inputs and results.
        self.out = builder.slot_of(out)
        self.lse = builder.slot_of(saved.lse) if len(results) > 1 else None
        self.features = tuple(None if x is None else builder.slot_of(x) for x in features)
        self.backend, self.sizes = backend, builder.sizes
        self.backwards: dict[Any, BackwardPlan | None] = {}

    def run(self, call: AttentionCall) -> tuple[Tensor, Saved] | None:
        """Do what the backend's forward does; return None where a tensor is misaligned."""
        inputs = _existing(pick_tensors(flatten(call)))
        addresses = addresses_of(inputs)
        if addresses is None:
            return None
        results = self.plan.run(inputs, addresses, self.plan.results)
        memory = (*inputs, *results)
        q, k, *far = [None if index is None else memory[index] for index in self.features]
        return memory[self.out], Saved(q, k, None if self.lse is None else memory[self.lse], *far)  # type: ignore[arg-type]


class BackwardPlan:
    """The plan of a backward. Its inputs: the call's tensors, those saved but q and k, the output, the gradients."""

    def __init__(
        self,
        call: AttentionCall,
        backend: KernelBackend,
        out: Tensor,
        saved: Saved,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        wanted: Wanted,
    ) -> None:
        from ropewalk.ops.attention.triton.plan import Builder

        builder = Builder(call.q.device)
        twin = _twin(call, builder)
        twin_saved = Saved(twin.q, twin.k, *map(builder.input, saved[2:]))  # type: ignore[arg-type]
        gradients = builder.follow(
            backend.backward, twin, builder.input(out), twin_saved, *map(builder.input, (grad_out, grad_lse)), wanted
        )
        n_inputs = builder.n_slots
        self.plan = builder.finish(_existing(gradients))
        # Of the results, and of None behind them.
        self.pick = itemgetter(*[-1 if x is None else builder.slot_of(x) - n_inputs for x in gradients])

    def run(self, inputs: Sequence[Tensor]) -> Gradients | None:
        """Do what the backend's backward does; return None where a tensor is misaligned."""
        addresses = addresses_of(inputs)
        return None if addresses is None else self.run_at(inputs, addresses, self.plan.results)

    def run_at(self, inputs: Sequence[Tensor], addresses: list[int], results: Sequence[Tensor]) -> Gradients:
        """Do it at aligned addresses, with results of another layout."""
        return Gradients._make(self.pick((*self.plan.run(inputs, addresses, results), None)))


def forward(call: AttentionCall, backend: KernelBackend, save: bool) -> tuple[Tensor, Saved, ForwardPlan | None]:
    """Run a backend's forward, by a plan where there is one, and return that too."""
    if call.row_logits is None and _may_plan(call.q):
        plan = FORWARDS.find(*_forward_key(call, backend, save))
        done = None if plan is None else plan.run(call)
        if done is not None:
            return *done, plan
    return *backend.forward(call, save), None


def _forward_key(call: AttentionCall, backend: KernelBackend, save: bool) -> tuple[Any, Callable[[], Any]]:
    """Return the key of a forward's plan, and the function that makes it."""
    leaves = flatten(call)
    shapes = [None if x is None else (x.shape, x.stride(), x.dtype) for x in pick_tensors(leaves)]
    flags = (backend.name, save, call.return_lse, _shares_table(call), torch._C._get_cublas_allow_tf32())
    key = (*shapes, *pick_numbers(leaves), *flags, call.q.get_device())
    return key, lambda: _plan(ForwardPlan, call, backend, save)


def backward(
    plan: ForwardPlan | None,
    call: AttentionCall,
    backend: KernelBackend,
    out: Tensor,
    saved: Saved,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    wanted: Wanted,
) -> Gradients:
    """Run a backend's backward, by a plan where the forward had one."""
    if plan is not None and _may_plan(grad_out):
        grad_out, grad_lse = _dense(grad_out), None if grad_lse is None else grad_lse.contiguous()
        inputs = _existing((*pick_tensors(flatten(call)), *saved[2:], out, grad_out, grad_lse))
        found = find_backward(plan, grad_out, grad_lse, wanted, lambda: (call, out, saved))
        done = None if found is None else found.run(inputs)
        if done is not None:
            return done
    return backward_of(backend, call, wanted).backward(call, out, saved, grad_out, grad_lse, wanted)


def find_backward(
    plan: ForwardPlan,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    wanted: Wanted,
    describe: Callable[[], tuple[AttentionCall, Tensor, Saved]],
) -> BackwardPlan | None:
    """Return the plan of a backward after a planned forward; None where none is possible."""
    key = (grad_out.stride(), grad_out.dtype, None if grad_lse is None else grad_lse.stride(), wanted)
    found = plan.backwards.get(key, _UNKNOWN)
    if found is _UNKNOWN:
        call, out, saved = describe()
        backend = backward_of(plan.backend, call, wanted)
        found = _plan(BackwardPlan, call, backend, out, saved, grad_out, grad_lse, wanted)
        _keep(plan.backwards, key, found)
    return found  # type: ignore[return-value]


def _keep(backwards: dict[Any, Any], key: Any, found: Any) -> None:
    """Keep the plan of a backward, and not too many of them."""
    if len(backwards) >= MAX_BACKWARDS:
        backwards.clear()
    backwards[key] = found


def addresses_of(inputs: Sequence[Tensor]) -> list[int] | None:
    """Return the addresses of tensors; None where one is no multiple of 16 bytes, which kernels are compiled for."""
    try:
        addresses = list(map(Tensor.data_ptr, inputs))
    except RuntimeError:  # a tensor that outlived its transform of torch.func: autograd unwraps it, a plan does not
        return None
    return None if functools.reduce(operator.or_, addresses) & 15 else addresses


def _dense(grad: Tensor) -> Tensor:
    """Return a gradient, or a copy of one that is expanded, as that of a sum is."""
    return grad.contiguous() if 0 in grad.stride() else grad


def _plan(kind: Callable[..., Any], *arguments: Any) -> Any:
    """Make a plan; None where a launcher takes a step that no plan can repeat."""
    try:
        return kind(*arguments)
    except UnplannableError:
        return None


def _twin(call: AttentionCall, builder: Any) -> AttentionCall:
    """Return a call whose tensors have no memory."""
    leaves = flatten(call)
    twin = call_of([builder.input(x) for x in pick_tensors(leaves)], pick_numbers(leaves))
    twin = twin._replace(return_lse=call.return_lse, needs_backward=call.needs_backward)
    if _shares_table(call):
        twin = twin._replace(tables=twin.tables._replace(k=twin.tables.q))
    return twin


def _shares_table(call: AttentionCall) -> bool:
    """Say whether q and k have one table: launchers then rotate both at once."""
    q, k = call.tables.q, call.tables.k
    return q is not None and k is not None and q.cos is k.cos


def _existing(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def _may_plan(x: Tensor) -> bool:
    """Say whether a call may run by a plan now: nothing captures or watches launches, and its device is the current."""
    if not x.is_cuda:
        return on_cpu and x.device.type == "cpu"
    return (
        on_gpu
        and x.get_device() == torch._C._cuda_getDevice()
        and not torch._C._cuda_isCurrentStreamCapturing()
        and not gpu.is_launch_watched()
    )


def run_launcher(
    cache: Cache, launcher: Callable[..., list[Tensor | None]], tensors: Sequence[Tensor], *flags: bool
) -> list[Tensor | None]:
    """Run a launcher of tensors, flags and `Steps`, by a plan where there is one."""
    like = tensors[0]
    if _may_plan(like):
        key = (*[(x.shape, x.stride(), x.dtype) for x in tensors], flags, like.get_device())
        found = cache.find(key, lambda: _plan(_plan_launcher, launcher, tensors, flags))
        addresses = None if found is None else addresses_of(tensors)
        if addresses is not None:
            plan, wanted = found
            made = iter(plan.run(tensors, addresses, plan.results))
            return [next(made) if is_wanted else None for is_wanted in wanted]
    return launcher(*tensors, *flags)


def _plan_launcher(
    launcher: Callable[..., list[Tensor | None]], tensors: Sequence[Tensor], flags: tuple[bool, ...]
) -> tuple[Any, list[bool]]:
    """Return the plan of a launcher, and which of its results it makes."""
    from ropewalk.ops.attention.triton.plan import Builder

    builder = Builder(tensors[0].device)
    results = builder.follow(launcher, *map(builder.input, tensors), *flags)
    return builder.finish(_existing(results)), [x is not None for x in results]


# === calls of `attention`, found by its arguments, before they are validated ===

CALLS = Cache()
# The tensors of a call's leaves before the seed are the caller's, the last one of them its sinks; those after it are
# the scheme's.
_SEED, _GATE = (_TENSORS.index(LEAVES.index(name)) for name in ("seed", "gate"))
_GATE_GRADIENT = Gradients._fields.index("gate")


class PlannedCall:
    """A kind of call of `attention`: its plan, and the tensors that the plan reads beside the caller's."""

    def __init__(self, call: AttentionCall, plan: ForwardPlan, layout: str) -> None:
        tensors = pick_tensors(flatten(call))
        self.plan, self.layout, self.return_lse = plan, layout, call.return_lse
        self.given = [index for index, x in enumerate(tensors[:_SEED]) if x is not None]
        self.constants = _existing(tensors[_SEED + 1 :])
        self.constant_addresses = [x.data_ptr() for x in self.constants]
        self.numbers, self.is_given = pick_numbers(flatten(call)), [x is not None for x in tensors]
        self.needs_backward, self.drops = call.needs_backward, call.dropout_p > 0
        self.gates = call.gate is not None
        self.results = [_lay_out(plan.plan.results[0], layout), *plan.plan.results[1:]]
        self.n_inputs = len(self.given) + self.drops + len(self.constants)
        if self.needs_backward:
            later = range(2, self.n_inputs)
            saved = (*plan.features[:2], *later, plan.lse, *plan.features[2:], plan.out)
            self.pick_saved = itemgetter(*_existing(saved))
        self.backwards: dict[Any, Any] = {}  # a `BackwardPlan` and its results in the caller's layout; or None

    def inputs_of(self, given: Sequence[Tensor | None]) -> tuple[list[Any], list[int]] | None:
        """Return the plan's inputs for a call's tensors, and their addresses; None where one is misaligned."""
        inputs: list[Any] = [given[index] for index in self.given]
        addresses = addresses_of(inputs)
        if addresses is None:
            return None
        if self.drops:
            seed = make_seed(inputs[0])
            inputs.append(seed)
            addresses.append(seed.data_ptr())
        return inputs + self.constants, addresses + self.constant_addresses

    def returned(self, results: Sequence[Tensor]) -> Any:
        """Return what `attention` returns."""
        if not self.return_lse:
            return results[0]
        lse = results[1] * LN_2
        return results[0], lse[0] if self.layout == "thd" else lse

    def describe(self, saved: Sequence[Tensor]) -> tuple[AttentionCall, Tensor, Saved]:
        """Return the call whose backward comes, its output and what was saved, as `backward` takes them."""
        layout, n_inputs = self.layout, self.n_inputs
        *tensors, out = saved
        leaves = iter(tensors[:n_inputs])
        every = [next(leaves) if is_given else None for is_given in self.is_given]
        # The caller's tensors are in its layout; q and k that were mapped are not the caller's.
        for index, slot in enumerate((*self.plan.features[:2], 2)):
            if slot == index:
                every[index] = as_bhtd(every[index], layout)  # type: ignore[arg-type]
        if self.gates:
            every[_GATE] = as_bhtd(every[_GATE], layout)  # type: ignore[arg-type]
        others = iter(tensors[n_inputs + 1 :])
        far = [None if slot is None else next(others) for slot in self.plan.features[2:]]
        far = [
            as_bhtd(x, layout) if slot == 1 and x is not None else x
            for x, slot in zip(far, self.plan.features[2:], strict=True)
        ]
        call = call_of(every, self.numbers)
        return call, as_bhtd(out, layout), Saved(call.q, call.k, tensors[n_inputs], *far)

    def differentiate(
        self, saved: Sequence[Tensor], grad_out: Tensor, grad_lse: Tensor | None, wanted: Wanted
    ) -> Gradients:
        """Return the gradients, those of q, k, v and the gate in the caller's layout."""
        grad_out = _dense(grad_out)
        if grad_lse is not None:
            grad_lse = (grad_lse[None] if self.layout == "thd" else grad_lse).contiguous()
        key = (grad_out.stride(), None if grad_lse is None else grad_lse.stride(), wanted)
        found = self.backwards.get(key, _UNKNOWN)
        inputs = [*saved, grad_out] if grad_lse is None else [*saved, grad_out, grad_lse]
        if found is _UNKNOWN:
            found = self._plan_backward(saved, grad_out, grad_lse, wanted)
            _keep(self.backwards, key, found)
        addresses = None if found is None or not _may_plan(grad_out) else addresses_of(inputs)
        if addresses is not None:
            backward_plan, results = found
            gradients: Gradients = backward_plan.run_at(inputs, addresses, results)
            return gradients
        call, out, rest = self.describe(saved)
        backend = backward_of(self.plan.backend, call, wanted)
        gradients = backend.backward(call, out, rest, as_bhtd(grad_out, self.layout), grad_lse, wanted)
        grad_q, grad_k, grad_v = (from_bhtd(x, self.layout) for x in gradients[:3])
        grad_gate = None if gradients.gate is None else from_bhtd(gradients.gate, self.layout)
        return gradients._replace(q=grad_q, k=grad_k, v=grad_v, gate=grad_gate)

    def _plan_backward(
        self, saved: Sequence[Tensor], grad_out: Tensor, grad_lse: Tensor | None, wanted: Wanted
    ) -> tuple[BackwardPlan, list[Tensor]] | None:
        """Return the plan of a backward, and its results in the caller's layout."""
        grad_out = as_bhtd(grad_out, self.layout)
        made = find_backward(self.plan, grad_out, grad_lse, wanted, lambda: self.describe(saved))
        if made is None:
            return None
        results = list(made.plan.results)
        indices = made.pick((*range(len(results)), None))
        for index in (*indices[:3], indices[_GATE_GRADIENT]):
            if index is not None:
                results[index] = _lay_out(results[index], self.layout)
        return made, results


def _lay_out(result: Tensor, layout: str) -> Tensor:
    """Return a result (B, H, T, D) or (B, H, T), which has no memory, in a layout."""
    like = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=result.device)
    laid_out = from_bhtd(like, layout)
    laid_out.untyped_storage().resize_(0)
    return laid_out


class GrowingCall(PlannedCall):
    """A kind of call over caches of all lengths between two powers of two, and its plan."""

    def __init__(self, call: AttentionCall, plan: ForwardPlan, layout: str) -> None:
        super().__init__(call, plan, layout)
        assert plan.sizes is not None
        self.measure, self.work, indices = plan.sizes
        self.pick_given, self.pick_sizes = itemgetter(*self.given), itemgetter(*indices)
        self.head, self.token = (2, 1) if layout == "bthd" else (1, 2)

    def inputs_of(self, given: Sequence[Any]) -> tuple[list[Any], list[int]] | None:
        """Return the plan's inputs, and their addresses; None where one is misaligned, or the cache too large."""
        inputs = list(self.pick_given(given)) + self.constants
        addresses = addresses_of(inputs)
        if addresses is None:
            return None
        _, k, v, mask, *_ = given
        numbers = [*self.pick_sizes(self.measure(self.work, k, v, mask, k.shape[self.token], self.head))]
        return None if max(numbers) > _MOST else (inputs + numbers, addresses + numbers)


FIXED = object()  # in place of the plan of caches of all lengths, where a call is planned by its own length alone
_MOST = 2**31 - 1  # numbers of a launch are int32
# As the kernels for few queries: their most rows that share a key, and so many keys, but for one query.
_MOST_ROWS, _FEWEST_KEYS = 64, 257


def _growing_key(given: Sequence[Any], position: PositionScheme, flags: tuple[Any, ...]) -> Any:
    """Return the key of a call over a cache, without its length; None if the call is no such one.

    It holds the powers of two, from 256 on, that the length lies between: they decide the size of tables and whether
    there are splits, and the rules of the choice of a backend are by them.
    """
    q, k, v, mask, *others = given
    layout = flags[7]
    if not flags[5] and type(position).rotation is not PositionScheme.rotation:  # a call maps all keys' features
        return None
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or (layout != "bthd" and layout != "bhtd"):
        return None
    head, token = (2, 1) if layout == "bthd" else (1, 2)
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    queries, keys = q_shape[token], k_shape[token]
    if keys < (_FEWEST_KEYS if queries > 1 else 2) or keys < queries or v_shape[token] != keys:
        return None
    if queries * q_shape[head] > _MOST_ROWS * k_shape[head]:
        return None
    of_mask = None
    if mask is not None:
        if mask.ndim != 4 or mask.shape[3] != keys:
            return None
        strides = mask.stride()
        is_expanded = (strides[0] == 0, strides[1] == 0, strides[2] == 0)
        of_mask = (type(mask), mask.shape[:3], is_expanded, strides[3], mask.dtype, mask.device, mask.is_neg())
    key_lengths, key_starts, query_starts, bounds_q, bounds_k, block_table, *rest, gate, sinks = others
    if not (bounds_q is bounds_k is block_table is rest[0] is rest[1] is rest[2] is None):  # rest[2] is of blocks
        return None
    bounds = (key_lengths, key_starts, query_starts, gate, sinks)
    window, k_strides, v_strides = flags[1], k.stride(), v.stride()
    # Those that are not in the key are multiples of 16 bytes.
    if (k_strides[0] | k_strides[head] | v_strides[0] | v_strides[head]) * q.element_size() & 15:
        return None
    return (
        *("cache", max(8, (keys - 1).bit_length()), max(8, keys.bit_length())),
        *(type(q), q_shape, q.stride(), q.dtype, q.get_device(), q.is_neg()),
        *(type(k), k_shape[0], k_shape[head], k_shape[3], k_strides[token], k_strides[3], k.dtype, k.get_device()),
        *(type(v), v_shape[0], v_shape[head], v_shape[3], v_strides[token], v_strides[3], v.dtype, v.get_device()),
        *(k.is_neg(), v.is_neg(), of_mask),
        *[None if x is None else (type(x), x.shape, x.stride(), x.dtype, x.device, x.is_neg()) for x in bounds],
        identity_of(position),
        flags,
        *map(type, flags),
        *(map(type, window) if type(window) is tuple else ()),
        torch._C._get_deterministic_algorithms(),
        torch._C._get_cublas_allow_tf32(),
        torch._C._get_cudnn_sdp_enabled(),
    )


class Rows:
    """The launch that makes cos and sin of all tokens of one side, or of both, in each call."""

    def __init__(self, call: AttentionCall, side: int, slots: Sequence[int]) -> None:
        from ropewalk.ops.attention.triton.plan import Builder
        from ropewalk.ops.attention.triton.table_rows import RowInputs, make_rows

        source = row_source(call, side)
        if source is None:
            raise UnplannableError("rows of tables that no kernel makes")
        queries, keys = call.q.shape[2], call.k.shape[2]
        positions = (call.positions_q, call.positions_k)[side]
        bounds = key_starts = query_starts = of_keys = None
        if positions is None and call.cu_seqlens_q is not None:
            bounds = (call.cu_seqlens_q, call.cu_seqlens_k)[side]
            if side == 0 and not (call.cu_seqlens_q is call.cu_seqlens_k and queries == keys):
                of_keys = call.cu_seqlens_k
        elif positions is None:
            key_starts, query_starts = call.key_starts, call.query_starts if side == 0 else None
        self.slots, self.reads = slots, source.table is None and source.frequencies is None
        frequencies = call.scheme.inv_freq if self.reads else source.frequencies  # type: ignore[union-attr]
        factor = None
        if source.factor != 1.0:
            factor = torch.tensor([source.factor], dtype=torch.float64, device=call.q.device)
        builder = Builder(call.q.device)
        table = source.table or (None, None)
        of_call = (positions, bounds, of_keys, key_starts, query_starts)
        inputs = RowInputs(*map(builder.input, (*table, frequencies, factor, *of_call)))
        first = 0 if side else keys - queries
        made = builder.follow(make_rows, inputs, (queries, keys)[side], first, source.lowest)
        self.plan = builder.finish(made)
        # In the order of the plan's inputs; each call gives the frequencies that are read, and its own tensors.
        self.fixed = _existing((*table, None if self.reads else frequencies, factor))
        self.reads_at = len(_existing(table))
        given = (_POSITIONS[side], _BOUNDS[side], _BOUNDS[1], *_STARTS)
        self.of_given = [index for index, x in zip(given, of_call, strict=True) if x is not None]

    def make(self, given: Sequence[Any], position: Any) -> list[Tensor] | None:
        """Return cos and sin; None where a tensor is misaligned."""
        inputs = [*self.fixed, *[given[index] for index in self.of_given]]
        if self.reads:
            inputs.insert(self.reads_at, position.inv_freq)
        addresses = addresses_of(inputs)
        return None if addresses is None else self.plan.run(inputs, addresses, self.plan.results)[:2]


# Indices among the caller's tensors.
_STARTS, _BOUNDS, _POSITIONS = (5, 6), (7, 8), (10, 11)
# Of the tensors after the seed: a scheme's parameters, then the tables of q and of k.
_PARAMS, _TABLES = 0, range(1, 5)


class MadeCall(PlannedCall):
    """A kind of call whose tables, parameters or sinks are made in each call, of values that no key holds."""

    def __init__(
        self, call: AttentionCall, plan: ForwardPlan, layout: str, *, has_rows: bool, is_learned: bool
    ) -> None:
        super().__init__(call, plan, layout)
        of_scheme = pick_tensors(flatten(call))[_SEED + 1 :]
        present = [index for index, x in enumerate(of_scheme) if x is not None]
        self.of_scheme: list[Any] = self.constants
        self.rows: list[Rows] = []
        if has_rows:
            sides = ((0, _TABLES),) if _shares_table(call) else ((0, _TABLES[:2]), (1, _TABLES[2:]))
            for side, leaves in sides:
                slots = [present.index(leaf) for leaf in leaves if leaf in present]
                if slots:
                    self.rows.append(Rows(call, side, slots))
        self.make_params: Callable[[Any], Tensor] | None = None
        if is_learned:
            assert call.score_mod_params is not None
            self.make_params, self.params_like = _maker_of_params(call), _metadata(call.score_mod_params)
        made = {slot for rows in self.rows for slot in rows.slots} | ({_PARAMS} if is_learned else set())
        self.of_scheme = [None if slot in made else x for slot, x in enumerate(self.constants)]
        self.constants = _existing([*self.of_scheme, *(x for rows in self.rows for x in rows.fixed)])  # kept alive
        self.pick_given = itemgetter(*self.given)
        self.casts_sinks = call.sinks is not None  # a cast of float32 is none

    def make_inputs(self, given: Sequence[Any], position: Any) -> tuple[list[Any], list[int], Any, Any] | None:
        """Return the plan's inputs and their addresses, the parameters and the sinks.

        None where a tensor is misaligned.
        """
        params, sinks, of_scheme = None, given[-1], self.of_scheme.copy()
        inputs = [*self.pick_given(given)]
        if self.casts_sinks:
            sinks = inputs[-1] = sinks.float()
        for rows in self.rows:
            made = rows.make(given, position)
            if made is None:
                return None
            for index, slot in enumerate(rows.slots):
                of_scheme[slot] = made[index % 2]
        if self.make_params is not None:
            params = of_scheme[_PARAMS] = self.make_params(position)
            if _metadata(params) != self.params_like:
                return None
        if self.drops:
            inputs.append(make_seed(inputs[0]))
        inputs += of_scheme
        addresses = addresses_of(inputs)
        return None if addresses is None else (inputs, addresses, params, sinks)


def _metadata(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device


def _maker_of_params(call: AttentionCall) -> Callable[[Any], Tensor]:
    """Return the parameters of a call's scheme as a differentiable function of the scheme."""
    heads, device, scheme, params = call.q.shape[1], call.q.device, call.scheme, call.score_mod_params
    if type(scheme) is T5Bias and params is not None:  # all but the biases are the same in each call
        stop = call.n_learned_params
        before, after = (x.detach().clone() for x in (params[:, :2], params[:, stop:]))
        return lambda position: torch.cat((before, position.table.to(device, torch.float32).T, after), dim=1)
    return lambda position: position.score_mod_params(heads, device)


def find_call(
    given: Sequence[Any], position: PositionScheme, flags: tuple[Any, ...]
) -> tuple[Any, PlannedCall | LibraryCall | None]:
    """Return the key of a call, None for one that no plan is for, and its plan if there is one.

    given: the caller's tensors, in the order of a call's leaves. Arguments are not validated yet: the key holds all
    that decides whether they are valid.
    """
    if is_intercepted():
        return None, None
    q, k, v, *others = given
    gate, sinks = others[-2:]
    window = flags[1]
    try:
        if not _may_plan(q):
            return None, None
        grads = None
        if torch.is_grad_enabled():
            of_gate, of_sinks = gate is not None and gate.requires_grad, sinks is not None and sinks.requires_grad
            grads = (q.requires_grad, k.requires_grad, v.requires_grad, of_gate, of_sinks)
            # Hooks, as those of checkpoints, count what a forward saves: with a plan that differs.
            if True in grads and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
                return None, None
        if grads is None or True not in grads:
            key = _growing_key(given, position, flags)
            found = None if key is None else CALLS.found.get(key)
            if key is not None and found is not FIXED:
                return key, found
        identity = identity_of(position)
        if identity is None:
            identity = ("read", signature_of(position))
            if grads is not None and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
                return None, None
        # One tuple, as each * costs the host.
        key = (
            type(q),
            q.shape,
            q.stride(),
            q.dtype,
            q.get_device(),
            q.is_neg(),
            type(k),
            k.shape,
            k.stride(),
            k.dtype,
            k.get_device(),
            k.is_neg(),
            type(v),
            v.shape,
            v.stride(),
            v.dtype,
            v.get_device(),
            v.is_neg(),
            tuple([x if x is None else (type(x), x.shape, x.stride(), x.dtype, x.device, x.is_neg()) for x in others]),
            identity,
            grads,
            flags,
            tuple(map(type, flags)),  # True is 1 to a dict, and no window
            tuple(map(type, window)) if type(window) is tuple else None,
            torch._C._get_deterministic_algorithms(),
            torch._C._get_cublas_allow_tf32(),
            torch._C._get_cudnn_sdp_enabled(),
        )
        return key, CALLS.found.get(key)
    except (RuntimeError, TypeError, AttributeError):  # sparse tensors have no strides, lists no hash, None no shape
        return None, None


NORMS = Cache()


class NormedCall:
    """A kind of call whose q and k are normed and rotated in one launch, and then attend without positions."""

    def __init__(self, call: AttentionCall, impl: str | None, layout: str) -> None:
        self.tables = with_rows(call).tables
        # Kernels give the same bits for views of another layout; sums of PyTorch's do not.
        self.is_viewed = layout == "thd" or impl is not None or not call.q.is_cuda
        self.layout, self.impl = layout, impl
        placed = (call.positions_q, call.positions_k, call.key_starts, call.query_starts, call.cu_seqlens_q)
        self.rows: list[Rows] = []
        assert call.scheme is not None
        if any(x is not None for x in placed) or identity_of(call.scheme) is None:
            self.rows = [Rows(call, side, ()) for side in ((0,) if _shares_table(call) else (0, 1))]
            self.tables = self.tables._replace(q=None, k=None)  # no plan keeps what the call made
        self.norm = bind_norm(self.tables, "bhtd" if self.is_viewed else layout, impl)
        tables = (x for table in (self.tables.q, self.tables.k) for x in table or ())
        self.constants = [*tables, *(x for rows in self.rows for x in rows.fixed)]

    def run(self, norm: Any, given: Sequence[Any], position: Any) -> tuple[Tensor, ...] | None:
        """Return q and k, normed and rotated; None where a tensor is misaligned."""
        q, k, *_ = given
        layout, norm_qk = self.layout, self.norm
        if self.rows:
            made = [rows.make(given, position) for rows in self.rows]
            if None in made:
                return None
            of_q, of_k = (RopeTable(*made[index]) for index in (0, -1))  # type: ignore[misc]
            tables = self.tables._replace(q=of_q, k=of_q if len(made) == 1 else of_k)
            norm_qk = bind_norm(tables, "bhtd" if self.is_viewed else layout, self.impl)
        if not self.is_viewed:
            return norm_qk(q, k, norm)
        q, k = norm_qk(as_bhtd(q, layout), as_bhtd(k, layout), norm)
        return from_bhtd(q, layout), from_bhtd(k, layout)


def find_norm(
    given: Sequence[Any], position: PositionScheme, norm: Any, flags: tuple[Any, ...]
) -> tuple[Any, NormedCall | None]:
    """Return the key of a call with a norm beside a rotation, None for one that no plan is for, and its plan."""
    if is_intercepted():
        return None, None
    window = flags[1]
    try:
        if not _may_plan(given[0]):
            return None, None
        identity = identity_of(position)
        tensors = (*given, norm.q_weight, norm.k_weight)
        key = (
            *[None if x is None else (type(x), x.shape, x.stride(), x.dtype, x.device, x.is_neg()) for x in tensors],
            ("read", signature_of(position)) if identity is None else identity,
            *(norm.eps, norm.offset, norm.after, norm.across_heads),
            *(type(norm.eps), type(norm.offset), type(norm.after), type(norm.across_heads)),
            flags,
            *map(type, flags),
            *(map(type, window) if type(window) is tuple else ()),
        )
        return key, NORMS.found.get(key)
    except (RuntimeError, TypeError, AttributeError):  # as in `find_call`
        return None, None


def note_norm(
    key: Any, call: AttentionCall, norm: Any, given: Sequence[Tensor | None], impl: str | None, layout: str
) -> None:
    """Plan the norms of a key, from its second call on; `call` is as it was before."""
    NORMS.find(key, lambda: _plan(_plan_norm, call, norm, given, impl, layout))


def _plan_norm(
    call: AttentionCall, norm: Any, given: Sequence[Tensor | None], impl: str | None, layout: str
) -> NormedCall | None:
    is_kept = is_plain_eager(*given, norm.q_weight, norm.k_weight) and type(call.scheme) is Rope
    return NormedCall(call, impl, layout) if is_kept and call.q.device == call.k.device else None


class LibraryCall:
    """A kind of call of `attention` that a library runs: all of the call but q, k and v."""

    gates = False  # no library applies a gate

    def __init__(self, call: AttentionCall, backend: LibraryBackend, layout: str, *, is_plain: bool) -> None:
        rotate = _plan(_PlannedRotation, call) if _rotates_both(call) else None
        self.layout, self.constants = layout, [] if rotate is None else rotate.tables
        self.attend = backend.bind(call) if rotate is None else _after(rotate, backend.bind(_mapped(call)))
        self.plain = (call.causal, call.scale) if is_plain else None
        self.matches: Callable[..., bool] = _matches_nothing
        self.records = False

    def run(self, given: Sequence[Any]) -> Tensor | None:
        """Return what `attention` does; None where a tensor is misaligned, which libraries refuse."""
        q, k, v = given[:3]
        if addresses_of((q, k, v)) is None:
            return None
        if self.plain is not None and not torch._C._is_any_autocast_enabled():  # which would cast
            if len(CALLS.plain) >= MAX_PLAIN:
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


def _is_plain(call: AttentionCall, layout: str, impl: str | None) -> bool:
    """Say whether q, k, v, causality and scale are all that a call of a library has, in (B, H, T, D)."""
    is_mapped = call.tables.q is not None or call.far is not None
    chooses = impl is None and not call.deterministic
    return layout == "bhtd" and chooses and not (is_mapped or call.has_window)


def _rotates_both(call: AttentionCall) -> bool:
    """Say whether q and k are rotated by one table, and our kernels rotate them."""
    tables = call.tables
    is_one = tables.q is not None and _shares_table(call) and tables.feature_weights is None
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
        made = plan.run((q, k, *self.tables), [q.data_ptr(), k.data_ptr(), *self.addresses], plan.results)
        return made[0], made[1]

    def differentiate(self, grad_q: Tensor, grad_k: Tensor) -> Any:
        """Rotate gradients back."""
        if not torch.is_grad_enabled() and _may_plan(grad_q) and addresses_of((grad_q, grad_k)) is not None:
            key = (grad_q.stride(), grad_k.stride())
            plan = self.inverse.get(key, _UNKNOWN)
            if plan is _UNKNOWN:
                plan = _plan(functools.partial(self._make, inverse=True), grad_q, grad_k)
                _keep(self.inverse, key, plan)
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


def note_call(
    key: Any, call: AttentionCall, backend: Backend, given: Sequence[Tensor | None], layout: str, impl: str | None
) -> None:
    """Plan calls of a key, from its second call on, where nothing but the caller's tensors differs between them."""
    if key[0] == "cache":
        CALLS.find(key, lambda: _plan_growing(call, backend, given, layout))
    else:
        CALLS.find(key, lambda: _plan_call(call, backend, given, layout, impl))


def _plan_growing(call: AttentionCall, backend: Backend, given: Sequence[Tensor | None], layout: str) -> Any:
    """Return the plan of a call over caches of all lengths; `FIXED` where something else depends on the length."""
    tables, scheme = call.tables, call.scheme
    rotates_rows = tables.k is not None or (tables.q is not None and tables.q_start is None)
    if not _may_keep(call, given) or rotates_rows or scheme is None or scheme.far_window() is not None:
        return FIXED
    if backend.name in KERNELS:
        longest = max(256, 1 << (call.k.shape[2] - 1).bit_length())
        plan = _plan(ForwardPlan, call, KERNELS[backend.name], False, longest)
        return FIXED if plan is None or plan.sizes is None else GrowingCall(call, plan, layout)
    if backend is REFERENCE or tables.q is not None or any(x is not None for x in _but_gate(given)[3:]):
        return FIXED
    return LibraryCall(call, LIBRARIES[backend.name], layout, is_plain=False)  # its length changes in each call


def _may_keep(call: AttentionCall, given: Sequence[Tensor | None], *, reads: bool = False) -> bool:
    """Say whether nothing but the tensors' addresses and values differs between calls of a key.

    reads: each call reads the scheme's tensors, and casts sinks.
    """
    of_call = pick_tensors(flatten(call))
    return (
        is_plain_eager(*given)
        and addresses_of(_existing(of_call)) is not None
        and [x is None for x in _but_gate(given)] == [x is None for x in _but_gate(of_call[:_SEED])]
        and call.q.data_ptr() == given[0].data_ptr()  # type: ignore[union-attr]
        and (reads or call.scheme is None or identity_of(call.scheme) is not None)
        and (reads or call.sinks is None or call.sinks.dtype == torch.float32)
    )


def _but_gate(tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return a call's tensors without its gate, which may act after the call."""
    return (*tensors[:_GATE], *tensors[_GATE + 1 :])


def _plan_call(
    call: AttentionCall, backend: Backend, given: Sequence[Tensor | None], layout: str, impl: str | None
) -> PlannedCall | LibraryCall | None:
    """Return the plan of a call; None where it reads what no key knows, or what no plan makes in each call."""
    if backend.name in KERNELS:
        return _plan(_plan_kernels, call, KERNELS[backend.name], given, layout)  # type: ignore[no-any-return]
    placed = (call.positions_q, call.positions_k, call.key_starts, call.query_starts, call.cu_seqlens_q)
    has_rows = (call.tables.q is not None and call.tables.q_start is None) or call.far is not None
    # Rows of tables may depend on values on the device.
    if not _may_keep(call, given) or (has_rows and any(x is not None for x in placed)):
        return None
    if backend is REFERENCE or any(x is not None for x in _but_gate(given)[3:]):
        return None
    return LibraryCall(call, LIBRARIES[backend.name], layout, is_plain=_is_plain(call, layout, impl))


def _plan_kernels(
    call: AttentionCall, backend: KernelBackend, given: Sequence[Tensor | None], layout: str
) -> PlannedCall | None:
    """Return the plan of a call that kernels run."""
    scheme, tables = call.scheme, call.tables
    assert scheme is not None
    is_read = identity_of(scheme) is None
    placed = (call.positions_q, call.positions_k, call.key_starts, call.query_starts, call.cu_seqlens_q)
    is_placed = any(x is not None for x in placed)
    is_learned = is_read and call.score_mod_params is not None
    has_rows = tables.q is not None and tables.q_start is None
    has_rows = has_rows and (is_placed or (is_read and type(scheme) is not ExpoSB))
    casts_sinks = call.sinks is not None and call.sinks.dtype != torch.float32
    if casts_sinks:
        call = call._replace(sinks=call.sinks.float())  # type: ignore[union-attr]
    is_made = has_rows or is_learned or casts_sinks
    if not _may_keep(call, given, reads=is_made) or (call.far is not None and (is_placed or is_read)):
        return None
    if is_read and not (has_rows or (is_learned and type(scheme) in _LEARNED)):
        return None
    plan = FORWARDS.find(*_forward_key(call, backend, call.needs_backward))
    if plan is None and is_placed and tables.q_start is not None:  # short caches: their kernel reads a row a query
        call, has_rows, is_made = with_rows(call), True, True
        plan = ForwardPlan(call, backend, call.needs_backward)
    if plan is None:
        return None
    if is_made:
        return MadeCall(call, plan, layout, has_rows=has_rows, is_learned=is_learned)
    return PlannedCall(call, plan, layout)


_LEARNED = (Alibi, T5Bias, ExpoSB)  # what kernels these schemes name depends on no value of their tensors
