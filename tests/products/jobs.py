"""What packs are made of: runs of rows, as JSON names them."""

from __future__ import annotations

import torch

from products import calls, compare
from products.table import NEUTRAL, Row


def run_row(values: Row, impls: list[str | None], n_variants: int) -> None:
    """Run a row by each backend, in all sizes of its class; values: those that are not neutral."""
    for variant in range(n_variants):
        call = calls.build({**NEUTRAL, **values}, variant, torch.device("cpu"), calls.GPU, variant, is_empty=True)
        for impl in impls:
            if compare.backend_of(call, impl) not in (None, "reference"):
                compare.attend_by(call, impl)
