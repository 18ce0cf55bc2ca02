"""The interface of a backend of attention, and the records that its forward and backward exchange.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.arguments import is_set
from ropewalk.ops.attention.call import NOT_IN_PROGRAM, AttentionCall
from ropewalk.ops.launch.steps import AT_ONCE, Steps

LN_2 = math.log(2)


class Refusal(NamedTuple):
    """The reason why a backend does not run a call: a code for tests and tables, and a sentence for the user.

    It is no subclass of str: torch.compile traces `why_not`, and follows named tuples alone.
    """

    code: str
    reason: str


def why_unread(
    call: AttentionCall, reads: tuple[str, ...], sentences: Mapping[str, str] | None = None
) -> Refusal | None:
    """Refuse a call in which a field is set that is not among those that are read; None if there is none.

    sentences: the reasons for fields that have one of their own, in the order in which they are looked at.
    """
    sentences = {} if sentences is None else sentences
    neutral = call._field_defaults
    for name in _list_unread(call._fields, reads, tuple(sentences)):
        if is_set(getattr(call, name), neutral.get(name)):
            return Refusal(name, sentences.get(name, f"{name} is not supported"))
    return None


@gpu.assume_constant
def _list_unread(fields: tuple[str, ...], reads: tuple[str, ...], first: tuple[str, ...]) -> tuple[str, ...]:
    """Return the fields that are not among those that are read, some of them first."""
    return _find_unread(fields, reads, first)


@functools.cache
def _find_unread(fields: tuple[str, ...], reads: tuple[str, ...], first: tuple[str, ...]) -> tuple[str, ...]:
    rest = (name for name in fields if name not in first)
    return tuple(name for name in (*first, *rest) if name not in reads)


def why_unread_backward(call: AttentionCall, reads: tuple[str, ...]) -> Refusal | None:
    """Refuse a call in which a field is set that a backward would have to read, and does not; None if there is none."""
    return why_unread(call, (*reads, *NOT_IN_PROGRAM, *_FORWARD_FIELDS))


_FORWARD_FIELDS = ("precision",)  # a backward multiplies in 16 bits, whatever the forward did


class Saved(NamedTuple):
    """Tensors that the forward saves for the backward, beside v and the output."""

    q: Tensor  # its features mapped
    k: Tensor  # likewise
    lse: Tensor  # (B, H, Tq), base 2
    q_past: Tensor | None = None  # rotated features of far pairs
    q_future: Tensor | None = None
    k_far: Tensor | None = None


class Wanted(NamedTuple):
    """The gradients that the backward computes beside those of q, k and v."""

    score_mod_params: bool = False
    sinks: bool = False
    gate: bool = False


class Gradients(NamedTuple):
    """The gradients of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    score_mod_params: Tensor | None  # like the parameters
    sinks: Tensor | None  # (H,)
    q_past: Tensor | None = None  # of the features of far pairs, where the call gave them
    q_future: Tensor | None = None
    k_far: Tensor | None = None
    gate: Tensor | None = None  # like the gate


class Backend(Protocol):
    """One implementation of attention. `ropewalk.ops.attention.backends` lists them."""

    name: str  # what `impl=` takes
    reads: tuple[str, ...]  # the fields that it honours, or refuses by itself: a call with another one is refused

    def why_not(self, call: AttentionCall) -> Refusal | None:
        """Say why it does not run a call; None if it does. It imports no Triton."""


class LibraryBackend(Backend, Protocol):
    """A backend whose forward PyTorch differentiates."""

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Return the output, (B, H, Tq, Dv), and the natural log-sum-exp, (B, H, Tq), if the backend has one."""

    def bind(self, call: AttentionCall) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return the output as a function of q, k and v, (B, H, T, D), for eager calls with all else as in one call."""
        rest: list[Any]
        _q, _k, _v, *rest = call
        return lambda q, k, v: self.attend(AttentionCall(q, k, v, *rest))[0]


class KernelBackend(Backend, Protocol):
    """A backend with a forward and a backward of its own. All of them save the same."""

    backward_reads: tuple[str, ...]  # as `reads`; a backward gets no field of `NOT_IN_PROGRAM`

    def why_no_backward(self, call: AttentionCall, wanted: Wanted) -> Refusal | None:
        """Say why its backward does not run where its forward did; None if it does."""

    def forward(self, call: AttentionCall, save: bool, on: Steps = AT_ONCE) -> tuple[Tensor, Saved]:
        """Return the output, (B, H, Tq, Dv), gated if the call has a gate, and what a backward needs.

        Without `save` the lse alone is defined of that.
        """

    def backward(
        self,
        call: AttentionCall,
        out: Tensor,
        saved: Saved,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        wanted: Wanted,
        on: Steps = AT_ONCE,
    ) -> Gradients:
        """Return the gradients; out and grad_out are of the gated output, grad_lse (B, H, Tq) of the natural lse."""
