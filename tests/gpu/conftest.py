"""Fixtures of the GPU tests."""

from __future__ import annotations

import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def _compile_from_the_start() -> None:
    """Drops compiled code of earlier tests in this process: beyond a limit, torch runs the same function eager without a word."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
