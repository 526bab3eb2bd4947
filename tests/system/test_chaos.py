"""Sixty mixed faults on one to four processes do not change the result; `make chaos` injects two hundred."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import run_ok, write_task

FAULTS = 15


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("procs", [1, 2, 3, 4])
def test_mixed_faults_change_nothing(procs: int, folder: Path) -> None:
    write_task()
    words = ["small.py", "--procs", str(procs), "--faults", str(FAULTS), "--steps", "60", "--seed", str(procs), "--keep", "results"]
    output = run_ok("chaos", *words, seconds=1100)
    print(output)
    report = json.loads(Path("results/report.json").read_text())
    assert report["struck"] >= FAULTS - 1, report["missed"]  # a fault of a save may fall after the last save
    assert report["weights_equal"] and report["rows_equal"] and not report["samples_lost"] + report["samples_repeated"]
    assert not report["processes_left"] and not report["files_left"]


@pytest.mark.timeout(1200)
def test_hosts_that_come_and_go_lose_no_sample(folder: Path) -> None:
    write_task()
    print(run_ok("chaos", "small.py", "--hosts", "2", "--keep", "results", seconds=1100))
    report = json.loads(Path("results/report.json").read_text())
    assert report["struck"] == report["faults"] == 3 and set(report["seconds"]) == {"host", "agent", "cut"}
    assert report["resized"] and not report["samples_lost"] + report["samples_repeated"]
    assert not report["processes_left"] and not report["files_left"]
