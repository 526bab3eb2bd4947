"""Ranks on machines without a shared file system, simulated by a mount that gives the second rank another folder."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launching import TASK, StartedCommand, free_port, losses, only_run, run, start, write_task

pytestmark = pytest.mark.system

TRAIN = ("drivetrain", "train", "small.py", "plan.threads=1")


@pytest.fixture
def task(tmp_path: Path) -> Path:
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0:
        pytest.skip("needs root with the right to mount")
    return write_task(tmp_path / "a folder")


@contextlib.contextmanager
def two_disks(folder: Path, second: Path) -> Iterator[tuple[StartedCommand, StartedCommand]]:
    """Starts two ranks in the same path; a mount gives the second rank another folder."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": 2}
    words = shlex.join(map(str, [folder, *TRAIN]))
    script = f'mount --bind {shlex.quote(str(second))} {shlex.quote(str(folder))} && set -- {words} && cd "$1" && shift && exec "$@"'
    with (
        start(*TRAIN, folder=folder, RANK=0, **common) as first,
        start("unshare", "--mount", "sh", "-c", script, folder=folder, RANK=1, **common) as other,
    ):
        yield first, other


def test_each_machine_has_the_task_file_and_only_the_first_has_the_run(task: Path, tmp_path: Path) -> None:
    """A run of the same name with other code on the second machine is ignored."""
    reference_folder = write_task(tmp_path / "reference")
    run("drivetrain", "train", "small.py", "--procs", 2, folder=reference_folder)
    second = write_task(tmp_path / "second")
    stale = second / "runs" / "small-001" / "task"
    stale.mkdir(parents=True)
    (stale / "small.py").write_text(TASK.replace("F.cross_entropy", "3 * F.cross_entropy"))
    with two_disks(task, second) as (first, other):
        first.succeed()
        other.succeed()
    assert losses(only_run(task)) == pytest.approx(losses(only_run(reference_folder)), rel=1e-6)
    assert sorted(path.name for path in only_run(second).iterdir()) == ["logs", "task"], "its own rank's log, and what was there before"


def test_a_second_machine_with_another_version_of_the_task_file_is_refused(task: Path, tmp_path: Path) -> None:
    second = write_task(tmp_path / "second")
    (second / "small.py").write_text(TASK.replace("F.cross_entropy", "3 * F.cross_entropy"))
    with two_disks(task, second) as (first, other):
        assert (first.wait(), other.wait()) == (2, 2)
        assert "small.py is not the file that rank 0 trains" in first.output
    assert not list((task / "runs").glob("*")), "a refused start leaves no run"
