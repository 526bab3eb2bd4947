"""Submits runs to targets, and asks targets about them."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from typing import Any

from drivetrain import runs
from drivetrain.launch.request import Request
from drivetrain.outcomes import Outcome, Problem
from drivetrain.recipe import Recipe
from drivetrain.runs import RUNS, Run
from drivetrain.targets.archive import Archive
from drivetrain.targets.base import POLL_SECONDS, JobState, Target
from drivetrain.targets.config import KINDS, find_target, make_target
from drivetrain.targets.consent import Agree, Consent
from drivetrain.targets.environment import EnvironmentLock, lock_environment
from drivetrain.targets.errors import FolderMissing, FolderStopped, Unsure
from drivetrain.targets.record import RECORD, Record, being_submitted, is_being_submitted, read_record, submission_lock
from drivetrain.targets.submission import RECIPE, Submission, make_code, new_project, present_secrets

CODE = "code.tar.gz"
"""The file of the record that keeps the code of a run for `resume`."""
FLAGS = (
    "procs",
    "nodes",
    "min_nodes",
    "gpus",
    "device",
    "restarts",
    "hang_after",
    "time_limit",
    "find_nan",
    "profile",
    "check_collectives",
    "upload",
)
"""Fields of a request that `resume` may change."""
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
    lock = lock_environment([recipe.task for recipe in recipes])
    return Submission(run, run.name, there, task, code, lock, new_project(), names, token)


def _check(target: Target, recipes: Sequence[Recipe], request: Request) -> None:
    if request.rendezvous is not None or request.node_rank is not None:
        raise Problem("--on starts the command on every machine: leave out --rendezvous and --node-rank")
    if request.run_dir is not None:
        raise Problem("--on keeps the run in runs/ here: give it a name with --name, not --run-dir")
    for recipe in recipes:
        start = recipe.settings["start"]
        if start is not None and "start" not in recipe.references and not target.shares_files:
            raise Problem(
                f"start={start} is on this machine, not on {target.name}: train there without it, or use a target that shares files"
            )


def given_name(recipes: Sequence[Recipe], request: Request) -> str | None:
    """Returns the run's name, if the command or the recipe gives one."""
    return request.name or (str(recipes[0].name).partition("/")[0] if recipes[0].name else None)


def named_or_new(recipes: Sequence[Recipe], request: Request) -> Run:
    """Returns the run that the user named, or a new one."""
    name = given_name(recipes, request)
    return Run(RUNS / name) if name else Run(runs.new_path(recipes[0].task.label))


def planned_name(recipes: Sequence[Recipe], request: Request) -> Run:
    """Returns the run as `named_or_new`, without creating a folder."""
    return Run(RUNS / (given_name(recipes, request) or f"{recipes[0].task.label}-NNN"))


def consent_to(target: Target, submissions: Sequence[Submission], agree: Agree) -> Consent | None:
    """Asks the user once for the cost of the machines that the target starts for runs; None: it starts none that cost money."""
    cost = target.cost_together(submissions)
    return agree(f"start machines on {target.name}", cost) if cost is not None else None


def submit(target: Target, submission: Submission, agree: Agree, notice: Callable[[str], None]) -> Record:
    """Starts a new run on a target and writes its record."""
    try:
        consent = consent_to(target, [submission], agree)
    except BaseException:
        with contextlib.suppress(OSError):
            submission.run.path.rmdir()  # the empty folder of a new run
        raise
    return submit_array(target, [replace(submission, consent=consent)], notice)[0]


def submit_array(target: Target, submissions: list[Submission], notice: Callable[[str], None]) -> list[Record]:
    """Starts several new runs on a target and writes their records. If one is refused, those that have started go on."""
    begun: list[Record] = []
    started: list[Record] = []
    with ExitStack() as locks:
        try:
            for submission in submissions:
                begun.append(begin_record(target, submission, locks))
            for handle in target.submit_array(submissions, notice):
                started.append(_started_record(begun[len(started)], handle))
        except Problem as problem:
            _forget(begun[len(started) :], problem)
            raise
    return started


def _forget(records: list[Record], problem: Problem) -> None:
    """Removes the folders of runs that were not started; if that is not certain, a later command looks for their jobs."""
    for record in records:
        if not isinstance(problem, Unsure) and not runs.is_run(record.run.path):
            shutil.rmtree(record.run.path, ignore_errors=True)


def _started_record(record: Record, handle: dict[str, Any]) -> Record:
    return record.update(handle=handle, phase="queued" if handle.get("waits") else "running", pulled=False, seen=time.time())


def begin_record(target: Target, submission: Submission, locks: ExitStack) -> Record:
    """Writes what a later command needs to find, resume or explain the run. Until `locks` end, no other command submits or deletes it."""
    run, code = submission.run, submission.code
    if runs.is_run(run.path):
        raise Problem(f"{run.name} is a run of this machine: choose another --name, or continue it here: drivetrain resume {run.name}")
    try:
        handle = target.known_handle(submission)
    except Problem:  # such as a target without machines
        with contextlib.suppress(OSError):
            run.path.rmdir()
        raise
    run.path.mkdir(parents=True, exist_ok=True)
    locks.enter_context(submission_lock(run))
    _claim(run)
    if code is not None:
        (run.path / CODE).write_bytes(code.data)
    request = {name: value for name, value in asdict(submission.request).items() if name not in NOT_RECORDED}
    facts: dict[str, Any] = {
        "target": target.name, "kind": target.kind, "settings": asdict(target.settings), "handle": handle, "phase": "submitting",
        "submitted": time.time(), "submissions": 1, "pulled": False, "name": submission.name, "project": submission.project, "task": submission.task,
        "words": list(submission.request.settings), "changes": [], "request": request, "code": code and code.digest,
        "environment": list(submission.lock.requirements), "secrets": list(submission.secrets), "versions": runs.provenance(),
    }  # fmt: skip
    return Record(run, facts).write()


def _claim(run: Run) -> None:
    """Creates the record's file; raises Problem if another command has done so."""
    try:
        open(run.path / RECORD, "x").close()
    except FileExistsError:
        raise Problem(
            f"another command has submitted {run.name} meanwhile: drivetrain status {run.name}, or choose another --name"
        ) from None


def continue_same(record: Record, submission: Submission, target: Target, agree: Agree, notice: Callable[[str], None]) -> Record:
    """Submits a run again for a command that repeats its first one; raises Problem if the code or the settings differ."""
    if record.target != target.name:
        raise Problem(f"{record.run.name} is on {record.target}, not on {target.name}: choose another --name")
    if record.facts["code"] != (submission.code and submission.code.digest):
        raise Problem(
            f"{record.run.name} began with another version of {record.facts['task']}: choose another --name, or drivetrain resume {record.run.name}"
        )
    if [*record.facts["words"], *record.facts["changes"]] != list(submission.request.settings):
        raise Problem(
            f"{record.run.name} began with {' '.join(record.facts['words']) or 'the default settings'}: choose another --name,"
            f" or drivetrain resume {record.run.name} key=value for what may change"
        )
    return resubmit(record, (), Request(), agree, notice)


def resubmit(record: Record, changes: Sequence[str], flags: Request, agree: Agree, notice: Callable[[str], None]) -> Record:
    """Submits a run again: it continues from its last checkpoint. Of `flags` those count that are not defaults."""
    with submission_lock(record.run):
        newest = read_record(record.run)
        if newest is None or newest.facts["submissions"] != record.facts["submissions"]:
            raise Problem(f"another command has submitted {record.run.name} again meanwhile: drivetrain status {record.run.name}")
        return _resubmit(record, changes, flags, agree, notice)


def _resubmit(record: Record, changes: Sequence[str], flags: Request, agree: Agree, notice: Callable[[str], None]) -> Record:
    target, facts = _current_target(record), record.facts
    code = Archive((record.run.path / CODE).read_bytes()) if facts["code"] else None
    if code is not None and code.digest != facts["code"]:
        raise Problem(f"{record.run.path / CODE} was changed: it is not the code that the run began with")
    if changes and facts["task"] == RECIPE:
        raise Problem(f"{record.run.name} has stages: their settings cannot change in a run on a target")
    changed_flags = {name: getattr(flags, name) for name in FLAGS if getattr(flags, name) != getattr(Request(), name)}
    request = Request(**facts["request"] | {"settings": (*facts["words"], *facts["changes"], *changes)} | changed_flags)
    if runs.is_run(record.run.path) and request.nodes == 1:
        request = replace(request, verb="resume", settings=tuple(changes))  # with the settings that the run has recorded
    token = secrets.token_urlsafe(32) if request.nodes > 1 else ""
    names = present_secrets(target.settings.secrets, os.environ)
    submission = Submission(
        record.run,
        facts["name"],
        request,
        facts["task"],
        code,
        EnvironmentLock(tuple(facts["environment"])),
        facts["project"],
        names,
        token,
    )
    submission = replace(submission, consent=consent_to(target, [submission], agree))
    is_finished = runs.is_run(record.run.path) and record.run.is_finished
    if not target.bring_run(submission, notice) and not is_finished:
        notice(f"{record.run.name} has no checkpoint, here or on {target.name}: it starts at step 0")
    again = {
        "settings": asdict(target.settings), "handle": target.known_handle(submission), "phase": "submitting", "submitted": time.time(),
        "submissions": facts["submissions"] + 1, "pulled": False, "exit_code": None, "reason": "",
    }  # fmt: skip
    begun = Record(record.run, facts | again | {"changes": [*facts["changes"], *changes]}).write()
    try:
        (handle,) = target.submit_array([submission], notice)
    except Problem as problem:
        if not isinstance(problem, Unsure):
            record.write()
        raise
    return _started_record(begun, handle)


def _current_target(record: Record) -> Target:
    """Returns the target as drivetrain.yaml describes it now; if it has no such target any more, as it was."""
    with contextlib.suppress(Problem):
        target = find_target(record.target)
        if target.kind == record.facts["kind"]:
            return target
    return target_of(record)


# --- ask ---------------------------------------------------------------------------------------


def target_of(record: Record) -> Target:
    """Returns the target of a run, with the settings that it had when the run was submitted."""
    kind = str(record.facts["kind"])
    known = {field.name for field in fields(KINDS[kind].settings_class)} if kind in KINDS else set()
    if not known:
        raise Problem(f"{record.run.name} is on a target of kind {kind}, which this drivetrain does not have")
    settings = {name: value for name, value in record.facts["settings"].items() if name in known}
    return make_target(record.target, kind, settings, record.path)


def _started(record: Record) -> Record:
    """Returns the record; raises Problem if the target has not accepted the run."""
    if is_being_submitted(record.run):
        raise being_submitted(record.run)
    if not record.handle:
        raise Problem(f"{record.run.name} was not started on {record.target}: repeat the command that submits it")
    return record


def adopt(record: Record) -> Record:
    """Returns the record with the job that a command submitted and, because it was killed, did not record; the same record if there is none."""
    with ExitStack() as locks:
        try:
            locks.enter_context(submission_lock(record.run))
        except Problem:
            return _waiting(record)
        record = read_record(record.run) or record
        handle = {} if record.handle else target_of(record).find_job(record)
        return _started_record(record, handle) if handle else record


def _waiting(record: Record) -> Record:
    """Returns the record of a run that another command submits now. It is not written, because that command writes it."""
    return replace(record, facts=record.facts | {"phase": "queued", "reason": "another command submits it now"})


def forget(record: Record) -> None:
    """Deletes the record of a run that the target has never accepted."""
    with submission_lock(record.run):
        newest = read_record(record.run)
        if newest is not None and newest.handle:
            raise Problem(f"another command has submitted {record.run.name} meanwhile: drivetrain status {record.run.name}")
        record.path.unlink(missing_ok=True)


def refresh(record: Record) -> Record:
    """Asks the target how the run is doing and copies its small files here; when it has ended, all of it."""
    if is_being_submitted(record.run):
        return _waiting(record)
    record = record if record.handle else adopt(record)
    if not record.handle or record.is_complete:
        return record
    target = target_of(record)
    state = target.state(record)  # before the files, so that no line of a run that has ended is missed
    for _ in target.mirror(record, follow=False):
        pass
    return _pulled_at_end(target, record.seen(state.phase, state.code, state.reason), state)


def refresh_or_leave(record: Record, notice: Callable[[str], None]) -> Record:
    """Asks as `refresh`, before a run is submitted again. If its machines do not answer, but drivetrain.yaml has others now, the run leaves them."""
    try:
        return refresh(record)
    except Problem as problem:
        if problem.outcome is not Outcome.INFRA or not _current_target(record).has_left(record):
            raise
        reason = f"its machines do not answer, and {record.target} has others now"
        notice(f"{record.run.name}: {reason}: it continues there with what is here")
        return record.seen("lost", None, reason)


def follow(record: Record) -> Iterator[Record]:
    """Copies the run's small files here until it has ended; yields after each change. At the end pulls the run."""
    while is_being_submitted(record.run):
        yield _waiting(record)
        time.sleep(POLL_SECONDS)
        record = _read_again(record)
    target = target_of(_started(record))
    if record.is_complete:
        yield record
        return
    while True:
        for _ in target.mirror(record, follow=True):
            yield record
        state = target.patient_state(record)
        if state.phase not in ("queued", "running"):  # of several machines, one may end a little later
            break
        time.sleep(POLL_SECONDS)
    yield _pulled_at_end(target, record.seen(state.phase, state.code, state.reason), state)


def _read_again(record: Record) -> Record:
    newest = read_record(record.run)
    if newest is None:
        raise Problem(f"{record.run.name} was refused: the command that submitted it has printed why")
    return newest


def _pulled_at_end(target: Target, record: Record, state: JobState) -> Record:
    if state.phase not in ("ended", "lost") or record.facts["pulled"]:
        return record
    try:
        target.pull(record)
    except FolderStopped:  # its disk may have the only copy: the run counts as not copied
        return record
    except FolderMissing:  # `down`, or a machine that was installed again: what is here is all there is
        pass
    return record.update(pulled=True)


def pull(record: Record) -> Record:
    """Copies the whole run here."""
    target = target_of(_started(record))
    state = target.state(record)
    target.pull(record)
    return record.seen(state.phase, state.code, state.reason).update(pulled=state.phase in ("ended", "lost"))


def stop(record: Record, seconds: float) -> Record:
    """Stops a run: it saves, and `resume` continues it. What does not end within `seconds` is killed."""
    record = _started(record if record.handle else adopt(record))
    target_of(record).stop(record, seconds)
    return refresh(record)


__all__ = [
    "adopt", "begin_record", "consent_to", "continue_same", "find_target", "follow", "forget", "named_or_new", "prepare", "pull", "refresh", "refresh_or_leave", "resubmit", "stop", "submit", "submit_array", "target_of",
]  # fmt: skip
