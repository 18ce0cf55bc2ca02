"""The interface of a backend of attention, and the records that its forward and backward exchange.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from ropewalk.ops.attention.call import AttentionCall


class Refusal(NamedTuple):
    """The reason why a backend does not run a call: a code for tests and tables, and a sentence for the user.

    It is no subclass of str: torch.compile traces `why_not`, and follows named tuples alone.
    """

    code: str
    reason: str


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


class Backend(Protocol):
    """One implementation of attention. `ropewalk.ops.attention.backends` lists them."""

    name: str  # what `impl=` takes

    def why_not(self, call: AttentionCall) -> Refusal | None:
        """Say why it does not run a call; None if it does. It imports no Triton."""


class LibraryBackend(Backend, Protocol):
    """A backend whose forward PyTorch differentiates."""

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Return the output, (B, H, Tq, Dv), and the natural log-sum-exp, (B, H, Tq), if the backend has one."""


class KernelBackend(Backend, Protocol):
    """A backend with a forward and a backward of its own. All of them save the same."""

    def why_no_backward(self, call: AttentionCall, wanted: Wanted) -> Refusal | None:
        """Say why its backward does not run where its forward did; None if it does."""

    def forward(self, call: AttentionCall, save: bool) -> tuple[Tensor, Saved]:
        """Return the output, (B, H, Tq, Dv), and what a backward needs; without `save` its lse alone is defined."""

    def backward(
        self, call: AttentionCall, out: Tensor, saved: Saved, grad_out: Tensor, grad_lse: Tensor | None, wanted: Wanted
    ) -> Gradients:
        """Return the gradients; grad_lse (B, H, Tq) is that of the natural log-sum-exp."""
