"""A run that is submitted again is sent to where it is missing, and never replaces a newer one there."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest

from drivetrain.launch.request import Request
from drivetrain.runs import Run
from drivetrain.targets.environment import EnvironmentLock
from drivetrain.targets.host.checkpoints import newest_complete_step
from drivetrain.targets.host.connection import ReachableHost
from drivetrain.targets.submission import Submission
from drivetrain.targets.transfer import send_run
from tests.command import run_ok, write_task

FAST = ("plan.threads=1", "plan.compile=off")


def write_checkpoint(run: Path, step: int) -> Path:
    """Writes a checkpoint as the engine does, with one file."""
    path = run / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "shard").write_bytes(b"x" * step)
    manifest = {"format": 1, "step": step, "files": {"shard": {"bytes": step, "sha256": "not looked at"}}, "extra": {}}
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest | {"digest": digest}))
    return path


def write_run(path: Path, *steps: int, status: str = "stopped") -> Path:
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"status": status, "from": str(path)}))
    for step in steps:
        write_checkpoint(path, step)
    return path


def send(here: Path, there: Path, nodes: int = 1) -> tuple[bool, list[str]]:
    """Returns whether there is a checkpoint to continue from, and what the user reads."""
    submission = Submission(Run(here), here.name, Request(nodes=nodes), "digits", None, EnvironmentLock(()), "project")
    notices: list[str] = []
    return send_run(ReachableHost(sys.executable), submission, str(there), notices.append), notices


def origin(run: Path) -> str:
    return str(json.loads((run / "run.json").read_text())["from"])


def test_a_checkpoint_that_a_training_wrote_is_complete_until_a_file_is_cut(folder: Path) -> None:
    write_task()
    run_ok("train", "small.py", "steps=4", "save_every=2", *FAST, "--name", "one")
    run = Path("runs/one")
    assert newest_complete_step(run) == 4
    shard = max((run / "checkpoints/step-00000004").glob("*"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-1])
    assert newest_complete_step(run) == 2
    manifest = run / "checkpoints/step-00000002/manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 2', '"step": 3'))
    assert newest_complete_step(run) == 0


@pytest.mark.system  # rsync
def test_a_run_that_is_missing_there_is_sent_without_what_belongs_to_this_machine(tmp_path: Path) -> None:
    here, there = write_run(tmp_path / "here", 5, 10), tmp_path / "base" / "runs" / "x"
    for name in (
        "target.json",
        "lock",
        "code.tar.gz",
        "job/stop",
        "metrics.jsonl",
        "logs/rank-0.log",
        "checkpoints/.new/shard",
        "task/x.py",
        "media/x-00000010.png",
    ):
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(name)
    can_continue, notices = send(here, there)
    assert can_continue
    assert [notice.partition(": ")[2] for notice in notices] == ["sending " + str(here) + " (step 10, 0 MB); it has nothing of it there"]
    names = {path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()}
    assert {"run.json", "metrics.jsonl", "task/x.py", "logs/rank-0.log", "media/x-00000010.png", "checkpoints/step-00000010/shard"} <= names
    assert not {name for name in names if "target" in name or "lock" in name or "code" in name or "job" in name or ".new" in name}
    assert send(here, there) == (True, []), "it is there now"


@pytest.mark.system  # rsync
@pytest.mark.parametrize(
    ("steps_here", "steps_there", "is_sent"), [((10,), (5,), True), ((10,), (10,), False), ((10,), (5, 15), False), ((), (5,), False)]
)
def test_the_newer_checkpoint_wins(steps_here: tuple[int, ...], steps_there: tuple[int, ...], is_sent: bool, tmp_path: Path) -> None:
    here, there = write_run(tmp_path / "here", *steps_here, status="finished"), write_run(tmp_path / "there", *steps_there)
    can_continue, notices = send(here, there)
    assert can_continue and bool(notices) == is_sent
    assert origin(there) == str(here if is_sent else there)


@pytest.mark.system  # rsync
def test_a_checkpoint_that_is_cut_there_does_not_count(tmp_path: Path) -> None:
    """As after a transfer that was interrupted."""
    here, there = write_run(tmp_path / "here", 10), write_run(tmp_path / "there", 10)
    (there / "checkpoints/step-00000010/shard").write_bytes(b"x")
    assert send(here, there)[1]
    assert newest_complete_step(there) == 10


@pytest.mark.system  # rsync
def test_a_later_stage_is_newer_whatever_its_step(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    write_run(here / "1-a", 90, status="finished")
    write_run(here / "2-b", 5)
    write_run(there / "1-a", 80)
    assert send(here, there)[1]
    assert newest_complete_step(there / "2-b") == 5
    shutil.rmtree(here / "2-b")
    assert send(here, there) == (True, [])


@pytest.mark.system  # rsync
def test_several_machines_keep_their_own_logs(tmp_path: Path) -> None:
    here, there = write_run(tmp_path / "here", 10), tmp_path / "there"
    (here / "logs").mkdir()
    for name in ("output.log", "output-1.log", "rank-1.log"):
        (here / "logs" / name).write_text(name)
    assert send(here, there, nodes=2)[0]
    assert [path.name for path in (there / "logs").iterdir()] == ["output.log"]


def test_without_any_checkpoint_the_run_begins_again(tmp_path: Path) -> None:
    assert send(tmp_path / "here", tmp_path / "there") == (False, [])


@pytest.mark.system
def test_resume_says_that_it_starts_at_step_0(folder: Path) -> None:
    write_task()
    run_ok("train", "small.py", "steps=2", *FAST, "--on", "local", "--wait", "--name", "one")
    assert "starts at step 0" not in run_ok("resume", "one", "steps=4", "--wait")
    shutil.rmtree("runs/one/checkpoints")
    Run("runs/one").update(status="stopped", outcome="infra")  # as if a machine had been lost before the first checkpoint
    assert "one has no checkpoint, here or on local: it starts at step 0" in run_ok("resume", "one", "steps=5", "--wait")
