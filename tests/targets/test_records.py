"""The record of a run on a target under unlucky circumstances: changed settings, renamed folders, two commands at once, refusals."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from drivetrain.cli.submitted import agree_on
from drivetrain.launch.request import Request
from drivetrain.outcomes import Outcome, Problem
from drivetrain.recipe import load
from drivetrain.runs import Run
from drivetrain.settings import PACKAGE
from drivetrain.targets import submit
from drivetrain.targets.config import find_target
from drivetrain.targets.errors import Unsure
from drivetrain.targets.host.connection import ReachableHost, SshHost, _write_part
from drivetrain.targets.record import Record, read_record
from drivetrain.task_ref import BUILT_IN, TaskRef, find_task
from drivetrain.watch.screen import Screen
from tests.command import expect_error, run_drivetrain, run_ok, write_task
from tests.waiting import wait_until

FAST = ("plan.threads=1", "plan.compile=off")


def record_of(name: str) -> Record:
    record = read_record(Run(f"runs/{name}"))
    assert record is not None
    return record


@pytest.mark.system
def test_changed_settings_stay_changed_and_the_first_ones_are_kept(folder: Path) -> None:
    write_task()
    train = ("train", "small.py", "hidden=8", "steps=3", *FAST, "--on", "local", "--name", "one")
    run_ok(*train, "--wait")
    run_ok("resume", "one", "steps=5", "--wait")
    run_ok("resume", "one", "--wait")
    assert Run("runs/one").last_row()["step"] == 5
    record = record_of("one")
    assert sorted(record.facts["words"]) == sorted(["hidden=8", "steps=3", *FAST])
    assert (record.facts["changes"], record.facts["submissions"]) == (["steps=5"], 3)
    assert "finished already" in run_ok(*train)


def test_the_same_name_with_other_code_or_settings_changes_nothing(folder: Path) -> None:
    write_task(change=("return F.cross", "raise ValueError('x')\n        return F.cross"))
    train = ("train", "small.py", "steps=3", *FAST, "--on", "local", "--name", "one")
    run_ok(*train)
    for _ in submit.follow(record_of("one")):
        pass
    before = Path("runs/one/target.json").read_text()
    assert "began with steps=3" in expect_error("train", "small.py", "steps=4", *FAST, "--on", "local", "--name", "one")
    Path("drivetrain.yaml").write_text("targets: {other: {kind: local}}\n")
    assert "is on local, not on other" in expect_error("train", "small.py", "steps=3", *FAST, "--on", "other", "--name", "one")
    write_task()
    assert "another version" in expect_error(*train)
    assert Path("runs/one/target.json").read_text() == before


def test_a_time_limit_is_not_repeated(folder: Path) -> None:
    write_task(change=("return F.cross", "import time; time.sleep(0.05)\n        return F.cross"))
    run_ok("train", "small.py", "steps=4000", *FAST, "--time-limit", "12s", "--on", "local", "--name", "one")
    for _ in submit.follow(record_of("one")):
        pass
    assert json.loads(Path("runs/one/job/exit.json").read_text())["attempts"] == 1
    assert Run("runs/one").status == "preempted"


def test_a_newer_submission_is_not_overwritten(folder: Path) -> None:
    record = Record(Run("runs/x"), {"submissions": 1, "handle": {"id": "1"}, "phase": "running", "target": "t"})
    record.run.path.mkdir(parents=True)
    record.write()
    newer = replace(record, facts=record.facts | {"submissions": 2, "handle": {"id": "2"}}).write()
    assert record.seen("ended", 0, "").handle == newer.handle
    assert record_of("x").phase == "running"


@pytest.mark.parametrize(
    ("problem", "is_kept"), [(Problem("refused", Outcome.INFRA), False), (Unsure("the connection broke", Outcome.INFRA), True)]
)
def test_a_broken_connection_keeps_the_record(problem: Problem, is_kept: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_task()

    def refuse(*arguments: object, **named: object) -> None:
        raise problem

    monkeypatch.setattr(ReachableHost, "call", refuse)
    target = find_target("local")
    submission = submit.prepare(target, load("small.py", [], {}), Request(name="one"), Run("runs/one"))
    with pytest.raises(Problem):
        submit.submit(target, submission, agree_on(False, Screen(quiet=True)), print)
    assert Path("runs/one/target.json").exists() == is_kept


@pytest.mark.system
def test_a_recipe_with_stages(folder: Path) -> None:
    Path("recipe.yaml").write_text(yaml.safe_dump({"task": "digits", "steps": 2, "stages": [{"name": "a"}, {"name": "b", "steps": 3}]}))
    output = run_ok("train", "recipe.yaml", *FAST, "--on", "local", "--wait")
    assert output.count("done    ") == 2
    assert "finished on local" in run_ok("status", "recipe")
    assert "finished already" in run_ok("train", "recipe.yaml", *FAST, "--on", "local")
    assert "their settings cannot change" in expect_error("resume", "recipe", "steps=9")


def test_a_plan_file_travels_with_a_built_in_task(folder: Path) -> None:
    Path("plan.json").write_text(run_ok("plan", "digits", "--json"))
    output = run_ok("train", "digits", "steps=2", "--plan", "plan.json", "--on", "local", "--wait")
    assert "done    2 steps" in output
    assert ' "train", "digits", ' in run_ok("train", "digits", "--plan", "plan.json", "--on", "local", "--dry-run")


def test_a_built_in_task_that_was_trained_elsewhere_is_this_machines_own() -> None:
    task = find_task("digits")
    file = BUILT_IN["digits"].partition(":")[0]
    elsewhere = replace(task, path=f"/home/you/.drivetrain/code/0a1b/drivetrain/tasks/{file}")
    assert TaskRef.from_json(vars(elsewhere)).path == str(PACKAGE / "tasks" / file)
    own = replace(task, path="/home/you/digits.py")
    assert TaskRef.from_json(vars(own)) == own


def test_down_removes_what_drivetrain_made_and_leaves_files_of_others(folder: Path) -> None:
    """Also where they have the names that drivetrain uses, because `dir` may be a folder that was there before."""
    host, base = ReachableHost(sys.executable), folder / "scratch"
    project, code, environment = base / "projects" / "own-0123456789", base / "code" / ("a1" * 32), base / "environments" / ("b2" * 16)
    others = [
        "thesis.txt",
        "code/thesis/main.py",
        "environments/python/bin/python",
        "projects/mythesis/runs/1/x",
        "projects/x-2024010112/runs/y",
    ]
    own = [
        code / "x.py",
        environment / "ready",
        environment.with_name(f".{environment.name}.lock"),
        environment.with_name(f"{environment.name}.log"),
    ]
    for path in [*(base / name for name in others), *own, project / "runs" / "one" / "run.json"]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("years of work")
    needs = {"base": str(base), "archives": [], "environment": ""}
    job = {"job": f"{project}/jobs/one/0", "words": ["/bin/true"], "variables": {}, "secrets": {}, "retries": 0}
    host.call("start", **job, cwd=str(project), output=str(project / "runs/one/output.log"), needs=needs)
    wait_until(lambda: host.call("job_state", job=job["job"])["phase"] == "ended", "the end of the job")
    assert host.call("remove", base=str(base))["bytes"] > 0
    assert sorted(path.relative_to(base).as_posix() for path in base.rglob("*") if path.is_file()) == sorted(others)
    assert not project.exists()


def test_a_job_that_runs_is_not_removed_and_stop_ends_a_pause(folder: Path) -> None:
    """A job that fails again and again is stopped while it waits for its next attempt."""
    host, base = ReachableHost(sys.executable), str(folder / "base")
    job = f"{base}/projects/p/jobs/one/0"
    start = {"job": job, "variables": {}, "secrets": {}, "cwd": base, "output": f"{base}/output.log", "retries": 99}
    host.call("start", words=["/bin/sh", "-c", "exit 202"], **start)
    with pytest.raises(Problem, match="still runs there: stop it first"):
        host.call("remove", base=base)
    with pytest.raises(Problem, match="it is running already"):
        host.call("start", words=["/bin/true"], **start)
    time.sleep(1)
    begun = time.monotonic()
    state = host.call("stop", job=job, grace=30.0)
    assert state["phase"] == "ended" and time.monotonic() - begun < 10


@pytest.mark.parametrize(
    "message",
    [
        {"file": "../x.log", "offset": 0, "data": ""}, {"file": "/etc/x.log", "offset": 0, "data": ""}, {"file": "target.json", "content": ""},
        {"file": "a/b/c/d.log", "offset": 0, "data": ""}, {"file": "model/x.safetensors", "content": ""}, {"file": "x.log", "offset": "a", "data": ""},
        {"file": "x.log"},
    ],
)  # fmt: skip
def test_a_hostile_machine_writes_only_a_runs_small_files(message: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(Problem):
        _write_part(tmp_path, message)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_two_commands_that_follow_a_run_write_the_same_file(tmp_path: Path) -> None:
    for offset, data in ((0, "YWFh"), (3, "YmJi"), (0, "YWFh"), (3, "YmJi")):
        _write_part(tmp_path, {"file": "output.log", "offset": offset, "data": data})
    assert (tmp_path / "output.log").read_bytes() == b"aaabbb"
    _write_part(tmp_path, {"file": "output.log", "offset": 0, "data": ""})
    assert (tmp_path / "output.log").read_bytes() == b""


@pytest.mark.parametrize("host", ["-oProxyCommand=touch x", "a b", "", "a;b", "$(id)"])
def test_a_host_is_no_option_of_ssh(host: str, folder: Path) -> None:
    Path("drivetrain.yaml").write_text(yaml.safe_dump({"targets": {"box": {"kind": "ssh", "hosts": [host]}}}))
    expect_error("train", "digits", "--on", "box", "--dry-run")
    assert not Path("x").exists()


def test_files_that_others_can_write_are_not_used_and_the_user_is_told(folder: Path) -> None:
    file = folder / "drivetrain.yaml"
    file.write_text("targets: {box: {kind: local}}\n")
    assert "box" in run_ok("train", "digits", "--on", "box", "--dry-run", "--name", "box")
    file.chmod(0o666)
    notice = f"drivetrain: {file} is not used, because every user can write it: chmod o-w {shlex.quote(str(file))}\n"
    failed = run_drivetrain("train", "digits", "--on", "box", "--dry-run")
    assert "there is no target 'box'" in failed.stderr and failed.stderr.count(notice) == 1
    for words in (("targets", "--json"), ("doctor", "--on", "local", "--json")):
        done = run_drivetrain(*words)
        assert done.stderr == notice and json.loads(done.stdout), words
    subprocess.run(["sh", "-c", notice.rpartition(": ")[2]], check=True)
    assert '"box"' in run_ok("targets", "--json")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
def test_a_file_of_another_user_is_not_used_and_the_user_is_told(folder: Path) -> None:
    Path("drivetrain.yaml").write_text("targets: {box: {kind: local}}\n")
    os.chown("drivetrain.yaml", 4711, -1)
    done = run_drivetrain("targets", "--json")
    assert "it belongs to another user, whose commands would run: if you trust it: sudo chown 0 " in done.stderr
    assert '"box"' not in done.stdout


def test_the_command_for_a_login_shell_survives_it() -> None:
    """Also where the shell is not a POSIX shell: the text has no apostrophe but those of shlex.join, and no line break."""
    *_, text = SshHost(None, "box").command()
    assert "\n" not in text and "!" not in text
    done = subprocess.run(["/bin/sh", "-c", text], input=b"10\nprint('a')", capture_output=True)
    assert done.stdout == b"a\n"
