"""Containers that were started, but not recorded: the command that submits was killed, or the engine's answer was lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivetrain.launch.request import Request
from drivetrain.outcomes import Problem
from drivetrain.runs import Run
from drivetrain.targets import submit
from drivetrain.targets.config import make_target
from drivetrain.targets.docker import target as docker
from drivetrain.targets.docker.engine import Engine
from drivetrain.targets.docker.target import DockerTarget
from drivetrain.targets.environment import EnvironmentLock
from drivetrain.targets.errors import Unsure
from drivetrain.targets.record import Record, read_record
from drivetrain.targets.submission import Submission

RUN = Run(Path("runs/one"))
SUBMISSION = Submission(RUN, "one", Request(device="cpu"), "digits", None, EnvironmentLock(()), "p")


@pytest.fixture
def box(folder: Path) -> DockerTarget:
    made = make_target("box", "docker", {"engine": "docker"}, Path("drivetrain.yaml"))
    assert isinstance(made, DockerTarget)
    return made


def engine_with(status: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a stand-in in the place of the engine, which has the run's container in this state, or none."""
    container = {"Id": "0a1b", "State": {"Status": status, "ExitCode": 0}, "Config": {}}

    def run(self: Engine, *words: str, **named: Any) -> str:
        raise Problem("the connection to the engine was reset")

    found = {"image": {"Size": 1}, "container": container if status else None}
    monkeypatch.setattr(Engine, "facts", lambda self: {"version": "1", "rootless": False, "runtimes": [], "root": "/"})
    monkeypatch.setattr(Engine, "inspect", lambda self, kind, name: found[kind])
    monkeypatch.setattr(Engine, "run", run)
    monkeypatch.setattr(Engine, "try_run", lambda self, *words, **named: None)
    monkeypatch.setattr(docker, "_is_rootless", lambda engine: False)
    monkeypatch.setattr(docker, "find_engine", lambda preferred: Engine("docker"))


def test_a_container_that_was_started_but_not_recorded_is_found(box: DockerTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is not deleted, whatever command comes next."""
    engine_with("running", monkeypatch)
    with pytest.raises(Unsure, match="runs already"):
        submit.submit_array(box, [SUBMISSION], print)
    log = Path("runs/one/logs/output.log")
    log.parent.mkdir()
    log.write_text("before\n")
    record = read_record(RUN)
    assert record is not None and not record.handle
    record = submit.adopt(record)
    assert (record.phase, record.handle["container"], record.handle["offset"]) == ("running", "0a1b", 7)
    assert read_record(RUN) == record


@pytest.mark.parametrize("status", [None, "created"])
def test_a_container_that_never_ran_is_not_adopted(status: str | None, box: DockerTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    engine_with(status, monkeypatch)
    facts = {"name": "one", "target": "box", "handle": {}}
    assert box.find_job(Record(RUN, facts)) == {}


@pytest.mark.parametrize(("status", "is_kept"), [("running", True), ("created", False)])
def test_a_lost_answer_of_the_engine_keeps_what_runs(
    status: str, is_kept: bool, box: DockerTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_with(status, monkeypatch)
    monkeypatch.setattr(DockerTarget, "_remove_earlier", lambda *arguments: None)
    with pytest.raises(Problem, match="was reset"):
        submit.submit_array(box, [SUBMISSION], print)
    assert Path("runs/one/target.json").exists() == is_kept
