"""Kinds of calls of `attention` that a library runs, after a rotation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ropewalk.ops.attention.backend import LibraryBackend
from ropewalk.ops.attention.call import RECORD, AttentionCall, as_bhtd, flatten, from_bhtd
from ropewalk.ops.attention.validate import Unchecked
from ropewalk.ops.launch import kinds
from ropewalk.ops.launch.kinds import KINDS, addresses_of, matches_nothing
from ropewalk.ops.tracing import make_matcher

_SCHEME_PREFIXES = ("score_mod_params", "tables_", "far_")  # beginnings of the names of tensors that a scheme makes


class LibraryCall:
    """A kind of call of `attention` that a library runs: all of the call but q, k and v."""

    gates = False  # no library applies a gate
    extents: Any = None
    switches: Any = ()
    matches = staticmethod(matches_nothing)

    def __init__(self, call: AttentionCall, backend: LibraryBackend, layout: str, *, is_plain: bool) -> None:
        leaves = zip(RECORD.names, flatten(call), strict=True)
        self.constants = [x for name, x in leaves if name.startswith(_SCHEME_PREFIXES) and isinstance(x, Tensor)]
        self.layout, self.attend = layout, backend.bind(call)
        self.plain = (call.causal, call.scale) if is_plain else None
        self.matches_qkv: Callable[..., bool] = matches_nothing
        self.records = False

    def run(self, unchecked: Unchecked) -> Tensor | None:
        """Return what `attention` does before a gate; None where a tensor is misaligned, which libraries refuse."""
        q, k, v, *_ = unchecked
        if addresses_of((q, k, v)) is None:
            return None
        if self.plain is not None:
            if len(KINDS.plain) >= kinds.MAX_PLAIN:
                KINDS.plain.clear()
            if not self.matches_qkv(q, k, v):
                self.matches_qkv = make_matcher(q, k, v)
            self.records = torch.is_grad_enabled()
            KINDS.plain[self.plain] = self
        if self.layout == "bhtd":
            return self.attend(q, k, v)
        if self.layout == "bthd":
            return self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)
        layout = self.layout
        return from_bhtd(self.attend(*[as_bhtd(x, layout) for x in (q, k, v)]), layout)


def is_plain(call: AttentionCall, layout: str, impl: str | None) -> bool:
    """Say whether q, k, v, causality and scale are all that a call of a library has, in (B, H, T, D)."""
    is_mapped = call.tables.q is not None or call.far is not None
    chooses = impl is None and not call.deterministic
    return layout == "bhtd" and chooses and not (is_mapped or call.has_window)
