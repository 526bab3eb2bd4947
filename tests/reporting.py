"""Names the flaky tests at the end of a test run, and writes its results to a file."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

OUTCOMES = ("passed", "failed", "error", "skipped")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--second-try", action="store_true", help="name the tests that pass now as flaky: they failed while others ran")
    parser.addoption("--write-results", metavar="FILE", help="write date, commit, versions and counts as JSON")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    passed = [report.nodeid for report in terminalreporter.stats.get("passed", [])]
    if config.getoption("--second-try") and passed:
        terminalreporter.section("flaky: failed while other tests ran, passed alone")
        for name in passed:
            terminalreporter.line(f"FLAKY {name}")
        if file := os.environ.get("DRIVETRAIN_FLAKY_FILE"):
            with open(file, "a") as flaky:
                flaky.writelines(f"{name}\n" for name in passed)
    if file := config.getoption("--write-results"):
        rows = [{"outcome": outcome, "tests": len(terminalreporter.stats.get(outcome, []))} for outcome in OUTCOMES]
        command = "python -m pytest " + " ".join(config.invocation_params.args)
        Path(file).write_text(json.dumps(environment() | {"command": command, "rows": rows}, indent=1) + "\n")


def environment() -> dict[str, Any]:
    """Returns the date, commit, versions and device of this test run."""
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed_files = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True).stdout.strip()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit + ("+changes" if changed_files else "") or None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
    }
