"""Seeds for different purposes, all from the one that a run is given."""

from __future__ import annotations

import hashlib


def derive_seed(*what: object) -> int:
    """A seed for one purpose: of other words or numbers, another, unrelated one.

    Generators on the CPU look at 32 bits of a seed alone, so all its bits depend on all of `what`.
    """
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "little") >> 1
