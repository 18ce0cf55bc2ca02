"""Attention is in the making: its kernels run in Triton's interpreter, and have not been brought to a GPU yet."""

from __future__ import annotations

import os

import pytest


def pytest_runtest_setup() -> None:
    if os.environ.get("ROPEWALK_TEST_DEVICE") == "cuda":
        pytest.skip("attention has not been brought to a GPU yet")
