"""The registry of backends: which one runs a call, by ability and by measurement."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.attention.backend import (
    Backend,
    KernelBackend,
    LibraryBackend,
    Refusal,
    Wanted,
    why_unread,
    why_unread_backward,
)
from ropewalk.ops.attention.call import AttentionCall
from ropewalk.ops.attention.hopper.support import Gluon
from ropewalk.ops.attention.libraries.flash import Flash
from ropewalk.ops.attention.libraries.sdpa import Sdpa
from ropewalk.ops.attention.pages import describe, is_copied
from ropewalk.ops.attention.reference import Reference
from ropewalk.ops.attention.tables import resolve_scheme
from ropewalk.ops.attention.triton.support import Triton, score_mod_has
from ropewalk.ops.attention.validate import Arguments, validate
from ropewalk.ops.tracing import is_transformed

REFERENCE, TRITON = Reference(), Triton()
KERNELS: dict[str, KernelBackend] = {backend.name: backend for backend in (TRITON, Gluon())}
LIBRARIES: dict[str, LibraryBackend] = {backend.name: backend for backend in (Flash(), Sdpa(), REFERENCE)}
BACKENDS: dict[str, Backend] = {**KERNELS, **LIBRARIES}


class Rule(NamedTuple):
    """An order of backends, the fastest first, and the calls that it is for."""

    order: tuple[str, ...]
    tokens: int = 0  # at least so many, of queries and of keys
    below: float = math.inf  # fewer than so many, of queries and of keys
    backward: bool = False  # only where a backward will come
    host_bound: bool = False  # only with a rotation or without a backward, where a library's call costs the host more
    plain: bool = False  # only without a score mod and key lengths
    far: bool = False  # only with a two-range encoding; without, only where there is none
    masked: bool = False  # only with a bool mask
    paged: bool = False  # only with pages that are read in place
    few: bool = False  # only with few queries of so many heads that they fill the GPU
    by_positions: bool = False  # only up to 64 features, with a score mod but a bias that reads positions per token
    dropout: bool = False  # only with dropout
    features: int = 0  # at least so many, of a head of queries and keys or of values

    def fits(self, call: AttentionCall) -> bool:
        """Say whether the rule is for such a call."""
        if self.far is (call.far is None) or (self.masked and call.mask is None):
            return False
        if (self.paged and call.block_table is None) or (self.dropout and call.dropout_p == 0):
            return False
        if (self.few and not _is_few(call)) or (self.by_positions and not _goes_by_positions(call)):
            return False
        if max(call.q.shape[3], call.value_dim) < self.features:
            return False
        tokens = call.q.shape[2], call.k.shape[2]
        if not (min(tokens) >= self.tokens and max(tokens) < self.below):
            return False
        if self.host_bound and call.needs_backward and call.tables.q is None:
            return False
        if self.plain and (call.score_mod is not None or call.key_lengths is not None):
            return False
        return call.needs_backward or not self.backward


FLASH_FIRST = ("flash", "sdpa", "triton", "gluon", "reference")
CUDNN_FIRST = ("sdpa", "flash", "triton", "gluon", "reference")
CUDNN_THEN_GLUON = ("sdpa", "gluon", "triton", "flash", "reference")
CUDNN_THEN_TRITON = ("sdpa", "triton", "gluon", "flash", "reference")
CUDNN_FLASH_GLUON = ("sdpa", "flash", "gluon", "triton", "reference")
GLUON_FIRST = ("gluon", "flash", "sdpa", "triton", "reference")
TRITON_FIRST = ("triton", "flash", "sdpa", "gluon", "reference")
EIGHT_BITS = ("gluon", "triton")  # nobody asks for 8-bit products to wait for the reference
CPU = ("sdpa", "reference")  # Triton is its interpreter there, for tests

# By compute capability, from docs/notes and results/. The first rule that fits counts, and of its backends the first
# that runs the call: windows leave cuDNN out; masks, lengths, score mods and the like leave both libraries out.
ORDER: dict[tuple[int, int], tuple[Rule, ...]] = {
    (9, 0): (
        Rule(TRITON_FIRST, features=257),
        Rule(GLUON_FIRST, paged=True),
        Rule(TRITON_FIRST, far=True, dropout=True),  # not measured
        Rule(GLUON_FIRST, tokens=1024, dropout=True),
        Rule(TRITON_FIRST, dropout=True),
        Rule(GLUON_FIRST, tokens=4096, far=True),
        Rule(TRITON_FIRST, far=True),
        Rule(TRITON_FIRST, below=1024, masked=True),  # to read a mask into lists takes two launches more
        Rule(GLUON_FIRST, tokens=1024, backward=True),
        Rule(TRITON_FIRST, tokens=1024, by_positions=True),
        Rule(GLUON_FIRST, tokens=1024),
        # So short, flash-attn 4 costs the host two to three times as much as the others.
        Rule(GLUON_FIRST, tokens=512, below=1024, host_bound=True),
        Rule(GLUON_FIRST, tokens=256, below=1024, host_bound=True, plain=True),
        Rule(TRITON_FIRST, below=1024, host_bound=True),
        Rule(CUDNN_THEN_GLUON, tokens=512, below=1024),
        Rule(CUDNN_THEN_TRITON, below=1024),
        Rule(CUDNN_FLASH_GLUON, few=True),  # the decode kernels split keys, which gains nothing then
        Rule(CUDNN_FIRST),
    ),
}


FEW_QUERIES = range(4, 64)
FEW_HEADS, FEW_KEYS = 128, 8192  # heads of all batch rows, and their keys, from which on that was measured


def _is_few(call: AttentionCall) -> bool:
    """Say whether a plain call has few queries, and so many heads with keys of their own that they fill a GPU."""
    (batch, heads, queries, _), (kv_heads, keys) = call.q.shape, call.k.shape[1:3]
    if call.needs_backward or call.score_mod is not None or call.cu_seqlens_q is not None:
        return False
    if call.block_table is not None or call.mask is not None or call.blocks is not None:
        return False
    return queries in FEW_QUERIES and kv_heads == heads and batch * heads >= FEW_HEADS and keys >= FEW_KEYS


def _goes_by_positions(call: AttentionCall) -> bool:
    """Say whether kernels compute a score mod of few features from positions per token; a bias is looked up."""
    if call.score_mod is None or call.goes_by_index or max(call.q.shape[3], call.value_dim) > 64:
        return False
    return not score_mod_has(call.score_mod, "bias")


@dataclass(frozen=True)
class Choice:
    """The backend that runs a call, and the reason why each other one does not."""

    name: str
    others: dict[str, str]
    hint: str | None = None  # what looks like a mistake of the caller, though the call runs
    pages: str | None = None  # of paged keys: "copied" into contiguous ones that are attended, or read "in place"

    def __str__(self) -> str:
        lines = [f"{self.name} runs", *(f"not {name}: {reason}" for name, reason in self.others.items())]
        if self.pages is not None:
            lines.insert(1, f"pages: {self.pages}")
        return "\n".join(lines if self.hint is None else [*lines, f"hint: {self.hint}"])


def backend_order(call: AttentionCall) -> tuple[str, ...]:
    """Return the backends in the order in which a call tries them."""
    device = call.q.device
    if device.type != "cuda":
        return CPU
    if call.precision is not None:
        return EIGHT_BITS
    if torch.compiler.is_compiling():
        # The other rules go by lengths, and a graph would be for the lengths that it was traced with.
        return next((rule.order for rule in _rules(device) if rule.features > 256 and rule.fits(call)), CUDNN_FIRST)
    if is_copied(call):
        if call.far is None and call.q.shape[2] >= FEW_QUERIES.stop:
            return GLUON_FIRST
        call = describe(call)
    return measured_order(call, _rules(device))


def measured_order(call: AttentionCall, rules: tuple[Rule, ...]) -> tuple[str, ...]:
    """Return the order of the first rule that fits a call; all other GPUs, and calls, try flash-attn first."""
    return next((rule.order for rule in rules if rule.fits(call)), FLASH_FIRST)


def _rules(device: torch.device) -> tuple[Rule, ...]:
    return ORDER.get(gpu.capability(device), ()) if gpu.is_nvidia(device) else ()


def why_not(backend: Backend, call: AttentionCall) -> Refusal | None:
    """Say why a backend does not run a call; None if it does."""
    if backend is not REFERENCE and not torch.compiler.is_compiling() and is_transformed():
        return Refusal("transform", "torch.func transforms and forward-mode differentiation are not supported")
    refusal = backend.why_not(call)
    if refusal is None:
        refusal = why_unread(call, backend.reads)
    if refusal is None and call.needs_backward and backend.name in KERNELS:
        refusal = why_unread_backward(call, TRITON.backward_reads)  # it follows where their own does not run
    return refusal


def choose(call: AttentionCall, impl: str | None) -> Backend:
    """Return the backend that runs a call: `impl`, or the first in order that can."""
    if impl is None:
        for name in backend_order(call):
            if why_not(BACKENDS[name], call) is None:
                return BACKENDS[name]
        if call.precision is not None and why_not(REFERENCE, call) is None:
            raise ValueError(f"no kernel can run this call with precision: {_list_refusals(call)}")
        refusal = why_not(REFERENCE, call)
        raise ValueError(f"no backend can run this call: {'' if refusal is None else refusal.reason}")
    if not isinstance(impl, str) or impl not in BACKENDS:
        raise ValueError(f"impl is {impl!r}, but must be None or one of {', '.join(map(repr, BACKENDS))}")
    backend = BACKENDS[impl]
    refusal = why_not(backend, call)
    if refusal is not None:
        raise ValueError(f"impl is {impl!r}, but it cannot run this call: {refusal.reason}")
    return backend


def _list_refusals(call: AttentionCall) -> str:
    """Return why each backend but the reference does not run a call, as text."""
    refusals = {name: why_not(backend, call) for name, backend in BACKENDS.items() if backend is not REFERENCE}
    reasons = [f"{name}: {refusal.reason}" for name, refusal in refusals.items() if refusal is not None]
    return "; ".join([*reasons, "impl='reference' runs it in plain PyTorch, and precision=None in 16 bits"])


def takes_gate(backend: Backend, call: AttentionCall, gate: Tensor) -> bool:
    """Say whether a backend's kernels gate the output: where the gate alone needs a gradient, they would need none."""
    needs_grad = torch.is_grad_enabled() and gate.requires_grad
    return "gate" in backend.reads and (call.needs_backward or not needs_grad)


def explain(call: AttentionCall, impl: str | None) -> Choice:
    """Return what `choose` chooses, and why."""
    chosen, device = choose(call, impl).name, call.q.device
    if impl is not None:
        rest = f"impl is {impl!r}"
    elif device.type != "cuda":
        rest = "it is no faster here, or for tests alone"
    elif call.precision is not None:
        rest = "it is expected to be slower; its 8-bit products were not measured"
    elif _rules(device):
        rest = "it is slower here, by measurement"
    else:
        rest = "it is expected to be slower; this kind of GPU was not measured"
    copies = chosen not in KERNELS or is_copied(call)  # the reference lays pages out too
    pages = None if call.block_table is None else "copied" if copies else "in place"
    refusals = {name: why_not(backend, call) for name, backend in BACKENDS.items() if name != chosen}
    others = {name: rest if refusal is None else refusal.reason for name, refusal in refusals.items()}
    return Choice(chosen, others, pages=pages)


def why_missing(impl: str, device: torch.device) -> str | None:
    """Say why a backend cannot run the plainest call on a device; None if it can."""
    x = torch.empty(1, 1, 128, 64, dtype=torch.float16, device=device)
    refusal = why_not(BACKENDS[impl], resolve_scheme(validate(x, x, x, Arguments(layout="bhtd"))))
    return None if refusal is None else refusal.reason


def backward_of(backend: KernelBackend, call: AttentionCall, wanted: Wanted) -> KernelBackend:
    """Return the backend whose backward follows a forward: its own, or Triton's, which runs whatever others refuse."""
    if backend.why_no_backward(call, wanted) is None and why_unread_backward(call, backend.backward_reads) is None:
        return backend
    return TRITON
