"""Fixtures of the whole suite. ROPEWALK_TEST_DEVICE says where it runs: cpu (the default) or cuda."""

from __future__ import annotations

import os

import pytest

# Workers side by side have a core each: with as many threads as there are cores they would wait for each other's.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device under test."""
    return torch.device(os.environ.get("ROPEWALK_TEST_DEVICE", "cpu"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
