"""Tests marked `alone` run while no other test runs, where several processes of pytest-xdist share the tests."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def turn(folder: Path, alone: bool) -> Iterator[None]:
    """Waits until no test runs that this one must not run beside.

    Whoever waits keeps the door closed for those who come later, so a test that is to be alone waits only for the tests under way.
    """
    with open(folder / "room", "a") as room:
        with open(folder / "door", "a") as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if session is None or item.config.cache is None:
        return (yield)
    with turn(item.config.cache.mkdir(f"turns-{session}"), item.get_closest_marker("alone") is not None):
        return (yield)
