"""Fixtures and hooks of pytest: tests that run on several gloo processes, and skips that fail in CI."""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # tests share the cores: threads that spin while they wait slow each other down tenfold

# Killed runs leave their tokens in this folder. Each process of pytest-xdist has its own, because tests with several hosts use the same addresses.
if "XDG_STATE_HOME" not in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="drivetrain-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

import pytest

from tests.processes import on_ranks
from tests.reporting import pytest_addoption, pytest_terminal_summary  # noqa: F401 (hooks of pytest)
from tests.run_alone import pytest_runtest_protocol  # noqa: F401 (a hook of pytest)


@pytest.fixture
def group() -> None:
    """Is replaced by this process's Group in tests marked `world_size(n)`."""


def _call(module: str, name: str, arguments: dict[str, Any], group: Any) -> None:
    test = getattr(importlib.import_module(module), name)
    if "group" in arguments:
        arguments["group"] = group
    test(**arguments)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("world_size")
    if marker is None:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    on_ranks(marker.args[0], _call, pyfuncitem.module.__name__, pyfuncitem.function.__name__, arguments)
    return True


SLOW_TESTS = (
    "README.md",
    "test_slow_is_not_hung",
    "test_killed_at_every_observation_point",
    "test_golden_plans",
)  # they start first: started last, they would run alone while the other pytest worker has nothing to do
SLOW_FILES = ("test_kubernetes.py", "test_slurm_target.py", "test_ssh.py")
"""Their tests start first, too: one worker runs all system tests of a file."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/tests/system/" in str(item.path):
            item.add_marker("system")
        if item.path.stem.endswith("_long"):
            item.add_marker("long")
    items.sort(key=lambda item: not (item.path.name in SLOW_FILES or any(name in item.name for name in SLOW_TESTS)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    """A skipped test fails in CI, which can install what is missing."""
    report = yield
    if report.skipped and os.environ.get("DRIVETRAIN_NO_SKIPS") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not accept: {report.longrepr}"
    return report


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, with a space in its name."""
    path = tmp_path / "a folder"
    path.mkdir()
    monkeypatch.chdir(path)
    return path
