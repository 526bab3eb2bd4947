"""Where a run lives: its directory, opened anew or to go on, and given back where a start is refused."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain import runs
from drivetrain.outcomes import Outcome, Problem
from drivetrain.recipe import MAY_CHANGE, Recipe
from drivetrain.runs import Lock, Run
from drivetrain.task_ref import TaskRef

if TYPE_CHECKING:
    from drivetrain.launch.start import Request


@dataclass
class Opened:
    run: Run
    lock: Lock | None
    before: dict[str, Any] | None
    """run.json of the run that goes on; None for a new one."""
    finished: bool = False
    why: str = ""
    made: bool = False
    """Whether this start made the directory."""


def named_run(recipe: Recipe, request: Request) -> Run | None:
    """Returns the run that a flag or the recipe names, if one does; another recipe's, or a folder that is no run, is refused."""
    named = request.run_dir or (str(runs.RUNS / request.name) if request.name else None)
    named = named or (str(runs.RUNS / recipe.name) if recipe.name else None)
    if named is None:
        return None
    run = Run(Path(named))
    if runs.is_run(run.path):
        before = run.read()
        if not _has_begun(run, before):
            return run
        _check_same(recipe, before, run)
        return run
    # A start that was killed before run.json leaves its lock and perhaps a part of the task's copy; whoever starts
    # trainings may keep their output in logs.
    if os.path.isdir(run.path) and any(
        p.name not in ("lock", "task", "logs") and not p.name.startswith(".run.json") for p in run.path.iterdir()
    ):
        raise Problem(f"{run.path} is not empty and no run: choose another --run-dir or --name")
    return run


def open_run(recipe: Recipe, request: Request) -> Opened:
    """Decide where the run lives: a directory that was named, an unfinished run of the same recipe, or a new one."""
    run = named_run(recipe, request)
    if run is None:
        return _continue_or_new(recipe)
    if not runs.is_run(run.path):
        made = not os.path.exists(run.path)
        return Opened(run, Lock.acquire(run.path), None, made=made)
    before = run.read()
    try:
        _check_same(recipe, before, run)
    except Problem:  # of one that has begun, named_run() has raised it
        why = f"{run.name} stopped before its first step: starting it anew, with what is asked for now"
        return Opened(run, Lock.acquire(run.path), None, why=why)
    return go_on(recipe, run, before)


def _has_begun(run: Run, before: dict[str, Any]) -> bool:
    """Whether a run has taken a step that is worth keeping, or is about to: one that is in use counts."""
    return before["status"] == "finished" or bool(run.checkpoint_steps() or run.last_row() or runs.lock_holder(run.path))


def go_on(recipe: Recipe, run: Run, before: dict[str, Any], why: str = "") -> Opened:
    """Go on with a run, unless it is finished: only a longer one goes on after its end."""
    longer = any(recipe.settings[k] != before["recipe"]["settings"].get(k) for k in ("epochs", "steps"))
    if before["status"] == "finished" and not longer:
        return Opened(run, None, before, finished=True)
    if before["status"] == "finished" and not run.checkpoint_steps():
        raise Problem(
            f"{run.name} is finished and its checkpoints were pruned: begin a new run from its weights, with start={run.name} --name NEW"
        )
    return Opened(run, Lock.acquire(run.path), before, why=why)


def _continue_or_new(recipe: Recipe) -> Opened:
    """Without a name, repeating a command goes on with its unfinished run: launchers restart just so, and
    since resume is exact the result is the one a fresh run would give."""
    mine = recipe.identity()
    for run in reversed(runs.all_runs()):
        if not run.path.name.startswith(recipe.task.label):
            continue
        with contextlib.suppress(Problem, ValueError):
            before = run.read()
            resumable = before["status"] == "running" or Outcome(before["outcome"]).retryable
            same = before["recipe"]["identity"] == json.loads(json.dumps(mine))
            if same and resumable and before["status"] != "finished" and not runs.lock_holder(run.path):
                return go_on(
                    recipe, run, before, why=f"going on with {run.name}, unfinished and of the same recipe (a fresh one: --name NAME)"
                )
    run = Run(runs.new_path(recipe.task.label))
    return Opened(run, Lock.acquire(run.path), None, made=True)


def _check_same(recipe: Recipe, before: dict[str, Any], run: Run) -> None:
    """Refuse to mix two recipes in one directory."""
    mine, theirs = json.loads(json.dumps(recipe.identity())), before["recipe"]["identity"]
    if mine["task"] != theirs["task"]:
        raise Problem(f"{run.name} is a run of {theirs['task']}, not of {mine['task']}: choose another --name")
    if mine["code"] != theirs["code"]:
        raise Problem(
            f"{run.name} began with another version of {_changed_code(recipe.task, run)}: choose another --name,"
            f" or go on with the code it began with: drivetrain resume {run.name}"
        )
    check_changes(mine["settings"], theirs["settings"], run)


def _changed_code(task: TaskRef, run: Run) -> str:
    """Names the modules that differ from those a run began with; the task where none does, as it came by value."""
    if task.pickled:
        return task.label
    kept = run.path / "task"
    changed = [p for p, file in task.modules().items() if not (kept / p).is_file() or (kept / p).read_bytes() != file.read_bytes()]
    return f"{changed[0]}{f' and {len(changed) - 1} more' if len(changed) > 1 else ''}" if changed else task.label


def check_changes(now: dict[str, Any], before: dict[str, Any], run: Run) -> None:
    changed = [k for k in now if now[k] != before.get(k) and k not in MAY_CHANGE]
    if changed:
        detail = ", ".join(f"{k}={before.get(k)} (now {now[k]})" for k in changed[:3])
        raise Problem(
            f"{run.name} was begun with {detail}: that cannot change in a run; use another --name."
            f"\nThese may: {', '.join(MAY_CHANGE)}, and plan.* choices"
        )


@contextlib.contextmanager
def held(opened: Opened) -> Iterator[None]:
    """Holds the run's lock; where its start is refused, what it made is removed."""
    try:
        yield
    except BaseException as error:
        if not runs.is_run(opened.run.path) or (isinstance(error, Problem) and error.outcome is Outcome.USAGE):
            discard(opened)
        raise
    finally:
        if opened.lock is not None:
            opened.lock.release()


def discard(opened: Opened) -> bool:
    """Removes the directory that a refused start has made; False where it was there before, or the run has taken a step."""
    path = opened.run.path
    if not opened.made or opened.run.checkpoint_steps() or opened.run.last_row():
        return False
    shutil.rmtree(path, ignore_errors=True)
    for folder in path.parents:  # of stages, and runs/
        if not folder.is_relative_to(runs.RUNS):
            break
        with contextlib.suppress(OSError):
            folder.rmdir()
    return True


def wait_for_lock(path: Path, seconds: float) -> Lock:
    """Take a lock that a dying predecessor may still hold for a moment."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return Lock.acquire(path)
        except Problem:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
