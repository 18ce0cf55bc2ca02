"""Fixtures of the whole suite, and which of its tests a run takes.

ROPEWALK_TEST_DEVICE says where tests run: cpu (the default) or cuda. `helpers.modes` says which tests a run with
TRITON_INTERPRET=1 takes, `--cover` how many combinations of parameters.
"""

from __future__ import annotations

import gc
import os

import pytest

# Workers side by side have a core each: with as many threads as there are cores they would wait for each other's.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from helpers import cover, interpreter, modes

if modes.INTERPRETED:
    interpreter.make_faster()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cover",
        choices=("few", "some", "most", "all"),
        default="all",
        help="of each test that compiles or interprets kernels take few cases, some, most, or all (the default)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    if cover.target_of(item) != "sm_90":
        item.add_marker("target")


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selected = cover.select(filter(modes.runs_here, items), config.getoption("--cover"))
    kept = set(selected)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = selected


def pytest_collection_finish() -> None:
    gc.freeze()  # all that was imported: accelerate and torch collect garbage often, and walked it in 0.4 s each time


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device under test."""
    return torch.device("cuda" if modes.ON_GPU else "cpu")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
