"""Whether the installed Triton has the Gluon that the kernels for Hopper are written in."""

from __future__ import annotations

import functools

TRIED = ("3.6", "3.7", "3.8", "3.9")


@functools.cache
def why_missing() -> str | None:
    """Say why the kernels are not there with the installed Triton; None if they are."""
    import triton

    if ".".join(triton.__version__.split(".")[:2]) not in TRIED:
        return f"its kernels were tried with Triton {', '.join(TRIED)}, and {triton.__version__} is installed"
    try:
        from ropewalk.ops.attention import gluon_launch  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"Triton {triton.__version__} lacks something of Gluon that its kernels take: {error}"
    return None
