"""Which implementation of attention serves a call: who can, and who was measured to be the fastest.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ropewalk.ops.attention.checks import check_call
from ropewalk.ops.attention.cores import HALF, Request, capability, constant, why_not_flash, why_not_sdpa
from ropewalk.ops.attention.prepare import prepare, tables_of
from ropewalk.ops.rope import eager as rotation
from ropewalk.ops.rope.operator import is_transformed

IMPLEMENTATIONS = ("triton", "gluon", "flash", "sdpa", "reference")
FEWEST_QUERIES = 64  # of the Gluon kernels: a consumer's rows. Fewer are the split-keys kernels' matter
# The score functions that the Gluon kernels were tried with.
SCORES_IN_GLUON = {
    f"ropewalk.ops.attention.triton_scores:{name}"
    for name in ("UNCHANGED", "ALIBI", "EXPOSB_DECAY", "EXPOSB_BANDS", "EXPOSB_BANDS_DECAY")
}


class Row(NamedTuple):
    """An order of implementations, the fastest first, and the calls that it is for."""

    order: tuple[str, ...]
    tokens: int = 0  # where there are at least so many, of queries and of keys
    backward: bool = False  # where a backward will come
    far: bool = False  # where pairs of tokens that are far apart have another encoding

    def fits(self, request: Request) -> bool:
        """Whether the row is for such a call."""
        tokens = min(request.q.shape[2], request.k.shape[2])
        if self.far is (request.prepared.far_window is None):
            return False
        return tokens >= self.tokens and (request.backward or not self.backward)


FLASH_FIRST = ("flash", "sdpa", "triton", "gluon", "reference")
FLASH_THEN_GLUON = ("flash", "gluon", "sdpa", "triton", "reference")
CUDNN_FIRST = ("sdpa", "flash", "triton", "gluon", "reference")
TRITON_FIRST = ("triton", "flash", "sdpa", "gluon", "reference")

# By compute capability, from docs/log.md and results/. The first row that fits counts, and of its implementations the
# first that can serve the call: windows leave cuDNN out; masks, lengths, changed scores and what else a model may ask
# for, both libraries.
MEASURED: dict[tuple[int, int], tuple[Row, ...]] = {
    (9, 0): (
        Row(FLASH_THEN_GLUON, tokens=4096, far=True),  # flash-attn takes two calls, which cost the host time
        Row(TRITON_FIRST, far=True),
        Row(FLASH_THEN_GLUON, tokens=1024),
        Row(FLASH_FIRST, tokens=512, backward=True),
        Row(CUDNN_FIRST),
    ),
}


@dataclass(frozen=True)
class Choice:
    """Which implementation serves a call, and why each other one does not."""

    name: str
    others: dict[str, str]

    def __str__(self) -> str:
        return "\n".join([f"{self.name} serves", *(f"not {name}: {reason}" for name, reason in self.others.items())])


def preference(request: Request) -> tuple[str, ...]:
    """The implementations in the order in which a call tries them."""
    device = request.q.device
    if device.type != "cuda":
        return ("sdpa", "reference")  # Triton means its interpreter here, which is for tests
    if torch.compiler.is_compiling():
        return CUDNN_FIRST  # the rows go by lengths, and a graph that asked them would be for those lengths alone
    rows = MEASURED.get(capability(device), ()) if torch.version.hip is None else ()
    return next((row.order for row in rows if row.fits(request)), FLASH_FIRST)


def choose(request: Request, impl: str | None) -> str:
    """Name the implementation that serves a call: `impl`, or the first in order that can."""
    if impl is None:
        return next(name for name in preference(request) if why_not(name, request) is None)
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}, but must be None or one of {', '.join(map(repr, IMPLEMENTATIONS))}")
    reason = why_not(impl, request)
    if reason is not None:
        raise ValueError(f"impl is {impl!r}, but it cannot serve this call: {reason}")
    return impl


def explain(request: Request, impl: str | None) -> Choice:
    """What `choose` chooses, and why."""
    chosen = choose(request, impl)
    device = request.q.device
    if impl is not None:
        rest = f"{impl!r} was asked for"
    elif device.type != "cuda":
        rest = "it is no faster here, or for tests alone"
    elif torch.version.hip is None and capability(device) in MEASURED:
        rest = "slower here, by what was measured"
    else:
        rest = "expected to be slower; this kind of GPU was not measured"
    others = (name for name in IMPLEMENTATIONS if name != chosen)
    return Choice(chosen, {name: why_not(name, request) or rest for name in others})


def why_missing(impl: str, device: torch.device) -> str | None:
    """Say why an implementation cannot serve the plainest call on a device; None if it can."""
    x = torch.empty(1, 1, 128, 64, dtype=torch.float16, device=device)
    call = check_call(x, x, x, layout="bhtd")
    return why_not(impl, Request(x, x, x, call, prepare(x, x, call), False, False, False))


def why_not(impl: str, request: Request) -> str | None:
    """Say why an implementation cannot serve a call; None if it can."""
    if impl == "reference":
        return None
    if not torch.compiler.is_compiling() and is_transformed():
        return "under torch.func transforms and forward-mode differentiation only the reference serves"
    if impl == "sdpa":
        return why_not_sdpa(request)
    if impl == "flash":
        return why_not_flash(request)
    if impl == "gluon":
        return _why_not_gluon(request)
    return _why_not_triton(request)


def _why_not_triton(request: Request) -> str | None:
    q, prepared, scheme = request.q, request.prepared, request.call.position
    if q.dtype not in (*HALF, torch.float32):
        return f"its kernels take float16, bfloat16 and float32, not {str(q.dtype).removeprefix('torch.')}"
    if prepared.score is None and scheme.changes_scores():
        return f"{type(scheme).__name__} changes scores, and names no score functions for Triton"
    learned = tables_of(prepared)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in learned):
        return "the scheme's tables are to be learned, and its kernels do not differentiate them"
    reason = _why_not_far(request)
    if reason is not None:
        return reason
    if request.call.block_table is not None:
        if prepared.weights is not None and not request.call.keys_rotated:
            return f"{type(scheme).__name__} weighs features, and its kernels read pages as they are: keys_rotated=True"
        if prepared.far_window is not None and not (prepared.causal and prepared.positions_q is None):
            return "near and far keys in pages go by index, and are causal alone"
    reason = why_not_triton_on(q.device)
    if reason is not None or prepared.score is None or prepared.parameters is None:
        return reason
    if torch.is_grad_enabled() and prepared.parameters.requires_grad and not _learns_parameters(prepared.score):
        return f"{type(scheme).__name__}'s parameters are to be learned, and {prepared.score} has no parameter_gradient"
    return None


def _why_not_far(request: Request) -> str | None:
    """Say why the Triton kernels do not know a scheme's encoding of far pairs; None if they do, or there is none."""
    prepared, name = request.prepared, type(request.call.position).__name__
    if prepared.far_window is None:
        return None
    if prepared.score is not None:
        return f"{name} changes scores and has another encoding of far pairs"
    if request.far is None and (prepared.cos_past is None or prepared.cos_q is None):
        return (
            f"{name} leaves queries alone in near pairs or in far ones, and its kernels turn them from one to the other"
        )
    return None


def _why_not_gluon(request: Request) -> str | None:
    q, _, v, call, prepared, *_ = request
    reason = why_not_gluon_on(q.device) or _why_not_triton(request)
    if reason is not None:
        return reason
    if q.dtype not in HALF:
        return f"its kernels take float16 and bfloat16, not {str(q.dtype).removeprefix('torch.')}"
    for name, x in (("q", q), ("v", v)):
        if x.shape[3] % 8 or x.shape[3] > 128:
            return f"{name}'s head dim is {x.shape[3]}, and its kernels need a multiple of 8 up to 128"
    if call.mask is not None:
        return "its kernels read no mask"
    if call.block_table is not None:
        return "its kernels read no pages, by block_table"
    if call.dropout_p > 0:
        return "dropout_p is above 0, and its kernels drop nothing"
    if prepared.far_window is not None and (prepared.positions_q is not None or prepared.positions_k is not None):
        return "near and far pairs of tokens go by positions_q and positions_k, and its kernels know indices alone"
    if prepared.score is not None:
        scheme = type(call.position).__name__
        if prepared.score not in SCORES_IN_GLUON:
            return f"{scheme} changes scores by {prepared.score}, and its kernels were not tried with that"
        if prepared.positions_q is not None or prepared.positions_k is not None:
            return f"{scheme} changes scores by positions_q and positions_k, and its kernels know indices alone"
    # The last one asked: torch.compile makes another graph on the other side of it.
    if q.shape[2] < FEWEST_QUERIES:
        return f"there are {q.shape[2]} queries, and its kernels are for {FEWEST_QUERIES} or more"
    return None


@constant
def _learns_parameters(score: str) -> bool:
    """Whether score functions, “module:NAME”, differentiate what they read. They are imported: Triton must be there."""
    module, _, name = score.partition(":")
    functions = getattr(importlib.import_module(module), name)
    return getattr(functions, "parameter_gradient", None) is not None


@constant
def why_not_triton_on(device: torch.device) -> str | None:
    """Say why the Triton kernels cannot run on a device; None if they can."""
    return rotation.why_not("triton", device)  # what the rotation's need, these need


@constant
def why_not_gluon_on(device: torch.device) -> str | None:
    """Say why the Gluon kernels cannot run on a device; None if they can."""
    reason = why_not_triton_on(device)
    if reason is not None:
        return reason
    needed = "its kernels are for NVIDIA GPUs of compute capability 9.0"
    if device.type != "cuda":  # Triton's interpreter, which knows no Gluon
        return f"{needed}, and the tensors are on {device.type}"
    if torch.version.hip is not None:
        return f"{needed}, and this one is AMD's"
    major, minor = capability(device)
    if (major, minor) != (9, 0):
        return f"{needed}, and this one has {major}.{minor}"
    from ropewalk.ops.attention import gluon_support

    return gluon_support.why_missing()
