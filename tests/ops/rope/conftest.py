"""Every test here that takes `impl` runs once for each implementation that supports the device under test.

`norm_impl` is the same for calls with a norm, `axes_impl` for those with several axes, `blocks_impl` for those with a
pair_block, `heads_impl` for those with tables per head.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.modes import ON_GPU, needs_kernels

from ropewalk.ops.rope.backends import IMPLEMENTATIONS, why_not
from ropewalk.ops.rope.call import RopeCall, RopeFlags

WITH_AXES = RopeCall(torch.empty(0), torch.empty(0), None, None, 0, RopeFlags(), torch.empty(0))
WITH_BLOCKS = WITH_AXES._replace(axes=None, flags=RopeFlags(pair_block=2))
WITH_HEADS = WITH_AXES._replace(axes=None, cos=torch.empty(1, 1, 1, 1))
CALLS: dict[str, dict[str, Any]] = {
    "impl": {},
    "norm_impl": {"has_norm": True},
    "axes_impl": {"call": WITH_AXES},
    "blocks_impl": {"call": WITH_BLOCKS},
    "heads_impl": {"call": WITH_HEADS},
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    device = torch.device("cuda" if ON_GPU else "cpu")
    for fixture in CALLS.keys() & set(metafunc.fixturenames):
        names = [impl for impl in IMPLEMENTATIONS if why_not(impl, device, **CALLS[fixture]) is None]
        marked = [pytest.param(name, marks=needs_kernels) if name == "triton" else name for name in names]
        metafunc.parametrize(fixture, marked)


@pytest.fixture(autouse=True)
def _calls_by_implementations_that_take_them(request: pytest.FixtureRequest) -> None:
    """Skip a call by name that has axes, a pair_block or tables per head, where the implementation takes none."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    for word, call in {"axes": WITH_AXES, "blocks": WITH_BLOCKS, "heads": WITH_HEADS}.items():
        if "impl" in params and word in str(params.get("name")):
            reason = why_not(params["impl"], torch.device("cuda" if ON_GPU else "cpu"), call)
            if reason is not None:
                pytest.skip(f"{params['impl']}: {reason}")
