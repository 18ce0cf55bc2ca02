"""Fixtures of the whole suite. ROPEWALK_TEST_DEVICE says where it runs: cpu (the default) or cuda."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device under test."""
    return torch.device(os.environ.get("ROPEWALK_TEST_DEVICE", "cpu"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
