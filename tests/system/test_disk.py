"""A full disk only prevents the save, with a message; with free space again the run resumes exactly."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain.outcomes import Outcome
from tests.command import run_drivetrain, run_ok, write_task
from tests.sample_tasks import rows, weights

BIG_MODEL = ("Linear(64, self.hidden)", "Linear(64, self.hidden), nn.Linear(self.hidden, self.hidden)")


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of 12 MB, large enough for two checkpoints of 3.5 MB but not for three."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fills_up(small_disk: Path) -> None:
    write_task(change=BIG_MODEL)
    words = ["train", "small.py", "hidden=512", "epochs=3", "save_every=10", "keep=2"]
    run_ok(*words, "--name", "reference")
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(6_000_000))
    process = run_drivetrain(*words, "--run-dir", str(small_disk / "run"))
    assert (
        "was not saved: the disk is full: " in process.stdout
        and "MB are missing" in process.stdout
        and "training goes on" in process.stdout
    )
    assert process.returncode == Outcome.INFRA.code
    assert "Make room, then: drivetrain resume" in process.stderr
    run = small_disk / "run"
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-00000010"], (
        "the old checkpoint stays, and no half-written one is left"
    )
    assert json.loads((run / "run.json").read_text())["outcome"] == "infra"
    ballast.unlink()
    run_ok("resume", str(run))
    assert rows(run) == rows("runs/reference")
    assert weights(run) == weights("runs/reference")


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed"])
def test_a_disk_that_fills_up_with_the_shards_of_several_ranks(strategy: str, small_disk: Path) -> None:
    """The message counts the shards of all ranks."""
    if strategy == "deepspeed":
        pytest.importorskip("deepspeed")
    write_task(change=BIG_MODEL)
    words = ["train", "small.py", "hidden=512", "epochs=3", "save_every=10", "keep=2", f"plan.strategy={strategy}", "--procs", "2"]
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(6_000_000))
    process = run_drivetrain(*words, "--run-dir", str(small_disk / "run"))
    assert process.returncode == Outcome.INFRA.code, process.stdout + process.stderr
    missing = re.search(
        r"at step 20 \(([\d.]+) MB\) was not saved: the disk is full: ([\d.]+) MB are missing \(([\d.]+) MB free\)", process.stdout
    )
    assert missing is not None, process.stdout
    needed_mb, missing_mb, free_mb = map(float, missing.groups())
    assert needed_mb > 3.3 and needed_mb - free_mb == pytest.approx(missing_mb, abs=0.2)
    run = small_disk / "run"
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-00000010"]
    ballast.unlink()
    run_ok("resume", str(run))


def test_a_disk_that_is_full_from_the_start(small_disk: Path) -> None:
    write_task()
    try:
        (small_disk / "ballast").write_bytes(bytes(20_000_000))
    except OSError:
        pass
    process = run_drivetrain("train", "small.py", "--run-dir", str(small_disk / "run"))
    assert process.returncode == 2
    assert "cannot write the run directory" in process.stderr
    assert "No space left" in process.stderr
    assert "Traceback" not in process.stderr
