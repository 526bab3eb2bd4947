"""Submits runs to targets, and asks targets about them."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from drivetrain import runs
from drivetrain.launch.request import Request
from drivetrain.outcomes import Problem
from drivetrain.recipe import Recipe
from drivetrain.runs import RUNS, Run
from drivetrain.targets.archive import Archive
from drivetrain.targets.base import JobState, Rendering, Target
from drivetrain.targets.config import find_target, make_target
from drivetrain.targets.environment import EnvironmentLock, lock_environment
from drivetrain.targets.record import RECORD, Record, read_record
from drivetrain.targets.submission import Submission, make_code, present_secrets, project_id

CODE = "code.tar.gz"
"""The file of the record that keeps the code of a run for `resume`."""
NOT_RECORDED = ("verb", "target", "settings", "run_dir", "name", "saved_plan", "asked_at", "dry_run")
"""Fields of a request that a record does not keep: they are elsewhere in it, or belong to one command."""


# --- submit ------------------------------------------------------------------------------------


def prepare(target: Target, recipes: Sequence[Recipe], request: Request, run: Run) -> Submission:
    """Returns what a target needs of recipes and a request; raises Problem for what cannot work there."""
    _check(target, recipes, request)
    settings = target.settings
    low = request.min_nodes
    nodes = request.nodes if request.nodes > 1 or settings.nodes is None else settings.nodes
    task, words, code = make_code(recipes, request)
    there = replace(
        request, target="", settings=words or request.settings, nodes=nodes, min_nodes=low, name=None, run_dir=None,
        device=request.device or settings.device, procs=request.procs or settings.procs, dry_run=False, saved_plan=None,
    )  # fmt: skip
    token = secrets.token_urlsafe(32) if nodes > 1 else ""
    names = present_secrets(settings.secrets, os.environ)
    return Submission(run, there, task, code, lock_environment([recipe.task for recipe in recipes]), project_id(), names, token)


def _check(target: Target, recipes: Sequence[Recipe], request: Request) -> None:
    if request.rendezvous is not None or request.node_rank is not None:
        raise Problem("--on starts the command on every machine: leave out --rendezvous and --node-rank")
    if request.run_dir is not None:
        raise Problem("--on keeps the run in runs/ here: give it a name with --name, not --run-dir")
    for recipe in recipes:
        start = recipe.settings["start"]
        if start is not None and not target.shares_files:
            raise Problem(
                f"start={start} is on this machine, not on {target.name}: train there without it, or use a target that shares files"
            )


def named_or_new(recipes: Sequence[Recipe], request: Request) -> Run:
    """Returns the run that the user named, or a new one."""
    name = request.name or (str(recipes[0].name).partition("/")[0] if recipes[0].name else None)
    return Run(RUNS / name) if name else Run(runs.new_path(recipes[0].task.label))


def planned_name(recipes: Sequence[Recipe], request: Request) -> Run:
    """Returns the run as `named_or_new`, without creating a folder."""
    name = request.name or (str(recipes[0].name).partition("/")[0] if recipes[0].name else None)
    return Run(RUNS / (name or f"{recipes[0].task.label}-NNN"))


def submit(target: Target, submission: Submission, notice: Callable[[str], None]) -> Record:
    """Starts a run on a target and writes its record."""
    return submit_array(target, [submission], notice)[0]


def submit_array(target: Target, submissions: list[Submission], notice: Callable[[str], None]) -> list[Record]:
    """Starts several runs on a target and writes their records."""
    earlier = [read_record(submission.run) for submission in submissions]
    records = [begin_record(target, submission) for submission in submissions]
    try:
        handles = target.submit_array(submissions, notice)
    except BaseException:
        for record, old in zip(records, earlier, strict=True):
            _undo(record, old)
        raise
    return [
        record.update(handle=handle, phase="queued" if handle.get("waits") else "running", seen=time.time())
        for record, handle in zip(records, handles, strict=True)
    ]


def _undo(record: Record, earlier: Record | None) -> None:
    """Restores an earlier record after a submission was refused; without one removes the folder, if the run has not begun."""
    if earlier is not None:
        earlier.update()
    elif not runs.is_run(record.run.path):
        shutil.rmtree(record.run.path, ignore_errors=True)


def begin_record(target: Target, submission: Submission) -> Record:
    """Writes what a later command needs to find, resume or explain the run."""
    run, code = submission.run, submission.code
    earlier = read_record(run)
    if earlier is None and runs.is_run(run.path):
        raise Problem(f"{run.name} is a run of this machine: choose another --name, or continue it here: drivetrain resume {run.name}")
    run.path.mkdir(parents=True, exist_ok=True)
    if earlier is None:
        _claim(run)
    if code is not None:
        (run.path / CODE).write_bytes(code.data)
    request = {name: value for name, value in asdict(submission.request).items() if name not in NOT_RECORDED}
    facts: dict[str, Any] = {
        "target": target.name, "kind": target.kind, "settings": asdict(target.settings), "handle": target.known_handle(submission), "phase": "submitting",
        "submitted": time.time(), "submissions": (earlier.facts["submissions"] if earlier else 0) + 1, "pulled": False,
        "project": submission.project, "task": submission.task, "words": list(submission.request.settings), "request": request, "code": code and code.digest,
        "environment": list(submission.lock.requirements), "secrets": list(submission.secrets), "versions": runs.provenance(),
    }  # fmt: skip
    return Record(run, facts).update()


def _claim(run: Run) -> None:
    """Creates the record's file; raises Problem if another command did so at the same time."""
    try:
        open(run.path / RECORD, "x").close()
    except FileExistsError:
        raise Problem(f"{run.name} is being submitted by another command: wait for it, or choose another --name") from None


def resubmit(record: Record, changes: Sequence[str], target: Target | None, nodes: int | None, notice: Callable[[str], None]) -> Record:
    """Submits a run again: it continues from its last checkpoint."""
    target = target or target_of(record)
    facts = record.facts
    code = Archive((record.run.path / CODE).read_bytes()) if facts["code"] else None
    if code is not None and code.digest != facts["code"]:
        raise Problem(f"{record.run.path / CODE} was changed: it is not the code that the run began with")
    request = Request(**facts["request"] | {"settings": tuple(facts["words"])})
    if changes:
        request = replace(request, verb="resume", settings=tuple(changes))
    if nodes is not None:
        request = replace(request, nodes=nodes, min_nodes=None)
    lock = EnvironmentLock(tuple(facts["environment"]))
    token = secrets.token_urlsafe(32) if request.nodes > 1 else ""
    names = present_secrets(target.settings.secrets, os.environ)
    return submit(target, Submission(record.run, request, facts["task"], code, lock, facts["project"], names, token), notice)


def dry_run(target: Target, recipes: Sequence[Recipe], request: Request) -> Rendering:
    return target.render(prepare(target, recipes, request, planned_name(recipes, request)))


# --- ask ---------------------------------------------------------------------------------------


def target_of(record: Record) -> Target:
    """Returns the target of a run, with the settings that it had when the run was submitted."""
    return make_target(record.target, str(record.facts["kind"]), record.facts["settings"], record.path)


def _started(record: Record) -> Record:
    """Returns the record; raises Problem if the target never accepted the run."""
    if not record.handle:
        raise Problem(f"{record.run.name} was not started on {record.target}: repeat the command that submits it")
    return record


def refresh(record: Record) -> Record:
    """Asks the target how the run is doing and copies its small files here; when it has ended, all of it."""
    if not record.handle:
        return record
    target = target_of(record)
    state = target.state(record)  # before the files, so that no line of a run that has ended is missed
    for _ in target.mirror(record, follow=False):
        pass
    return _pulled_at_end(target, record.seen(state.phase, state.code, state.reason), state)


def follow(record: Record) -> Iterator[Record]:
    """Copies the run's small files here until it has ended; yields after each change. At the end pulls the run."""
    target = target_of(_started(record))
    for _ in target.mirror(record, follow=True):
        yield record
    state = target.state(record)
    yield _pulled_at_end(target, record.seen(state.phase, state.code, state.reason), state)


def _pulled_at_end(target: Target, record: Record, state: JobState) -> Record:
    if state.phase not in ("ended", "lost") or record.facts["pulled"]:
        return record
    target.pull(record)
    return record.update(pulled=True)


def pull(record: Record) -> Record:
    """Copies the whole run here."""
    target = target_of(_started(record))
    state = target.state(record)
    target.pull(record)
    return record.seen(state.phase, state.code, state.reason).update(pulled=state.phase in ("ended", "lost"))


def stop(record: Record, seconds: float) -> Record:
    """Stops a run: it saves, and `resume` continues it. What does not end within `seconds` is killed."""
    target_of(_started(record)).stop(record, seconds)
    return refresh(record)


__all__ = [
    "begin_record", "dry_run", "find_target", "follow", "named_or_new", "prepare", "pull", "refresh", "resubmit", "stop", "submit", "submit_array", "target_of",
]  # fmt: skip
