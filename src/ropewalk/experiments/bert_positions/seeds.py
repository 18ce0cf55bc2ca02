"""Seeds for different purposes, all from the one that a run is given."""

from __future__ import annotations

import hashlib


def derive_seed(*what: object) -> int:
    """Derive a seed for one purpose: other words or numbers give another, unrelated one.

    Generators on the CPU look at 32 bits of a seed alone, so all its bits depend on all of `what`.
    """
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "little") >> 1
