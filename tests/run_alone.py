"""A test marked `alone` runs while no other test runs, even with several workers of pytest-xdist."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def wait_for_other_tests(folder: Path, runs_alone: bool) -> Iterator[None]:
    """Waits for the tests that must not run at the same time as this one.

    A waiting test holds the queue lock, so that no later test can start: a test that runs alone waits only for the tests that run now.
    """
    with open(folder / "running", "a") as running:
        with open(folder / "queue", "a") as queue:
            fcntl.flock(queue, fcntl.LOCK_EX)
            fcntl.flock(running, fcntl.LOCK_EX if runs_alone else fcntl.LOCK_SH)
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    test_run_id = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    cache = getattr(item.config, "cache", None)  # -p no:cacheprovider
    if test_run_id is None or cache is None:
        return (yield)
    with wait_for_other_tests(cache.mkdir(f"running-{test_run_id}"), item.get_closest_marker("alone") is not None):
        return (yield)
