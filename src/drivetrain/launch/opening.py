"""The run's directory: made anew or opened to go on, locked meanwhile, and removed again if the start is refused."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drivetrain import runs
from drivetrain.launch.machine import LocalMachine
from drivetrain.launch.request import Request
from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan
from drivetrain.recipe import MAY_CHANGE, Recipe
from drivetrain.runs import Lock, Run
from drivetrain.task_ref import TaskRef


@dataclass(frozen=True)
class OpenedRun:
    run: Run
    lock: Lock | None = None
    previous: dict[str, Any] | None = None
    """run.json of a run that goes on; None for a new one."""
    is_finished: bool = False
    note: str = ""
    """What the user is told about the choice of this directory."""
    created: bool = False
    """Whether this start made the directory."""


def open_run(recipe: Recipe, request: Request) -> OpenedRun:
    """Opens the directory that was named, else that of an unfinished run of the same recipe, else a new one."""
    run = named_run(recipe, request)
    if run is None:
        return _continue_or_create(recipe)
    if not runs.is_run(run.path):
        created = not os.path.exists(run.path)
        return OpenedRun(run, Lock.acquire(run.path), created=created)
    previous = run.read()
    try:
        _check_same_recipe(recipe, previous, run)
    except Problem:  # named_run() refuses another recipe for a run that has begun: this one has not
        note = f"{run.name} stopped before its first step: starting it anew, with what is asked for now"
        return OpenedRun(run, Lock.acquire(run.path), note=note)
    return continue_run(recipe, run, previous)


def named_run(recipe: Recipe, request: Request) -> Run | None:
    """Returns the run that a flag or the recipe names, if one does. Raises Problem if it is another recipe's, or the folder is no run."""
    folder = request.run_dir or (str(runs.RUNS / request.name) if request.name else None)
    folder = folder or (str(runs.RUNS / recipe.name) if recipe.name else None)
    if folder is None:
        return None
    run = Run(Path(folder))
    if runs.is_run(run.path):
        previous = run.read()
        if _has_begun(run, previous):
            _check_same_recipe(recipe, previous, run)
    elif os.path.isdir(run.path) and any(not _may_precede_run(path) for path in run.path.iterdir()):
        raise Problem(f"{run.path} is not empty and no run: choose another --run-dir or --name")
    return run


def _may_precede_run(path: Path) -> bool:
    """Whether a folder that is no run yet may contain this: a start that was killed before run.json leaves its lock and perhaps
    a part of the task's copy, and programs that start trainings may keep their output in logs."""
    return path.name in ("lock", "task", "logs") or path.name.startswith(".run.json")


def _has_begun(run: Run, previous: dict[str, Any]) -> bool:
    """Whether a run has taken a step that is worth keeping, or is in use."""
    return previous["status"] == "finished" or bool(run.checkpoint_steps() or run.last_row() or runs.lock_holder(run.path))


def continue_run(recipe: Recipe, run: Run, previous: dict[str, Any], note: str = "") -> OpenedRun:
    """Opens a run to go on with it. A finished one goes on only if it is made longer."""
    is_longer = any(recipe.settings[k] != previous["recipe"]["settings"].get(k) for k in ("epochs", "steps"))
    if previous["status"] == "finished" and not is_longer:
        return OpenedRun(run, previous=previous, is_finished=True)
    if previous["status"] == "finished" and not run.checkpoint_steps():
        raise Problem(
            f"{run.name} is finished and its checkpoints were pruned: begin a new run from its weights, with start={run.name} --name NEW"
        )
    return OpenedRun(run, Lock.acquire(run.path), previous, note=note)


def _continue_or_create(recipe: Recipe) -> OpenedRun:
    """Without a name, a repeated command goes on with its unfinished run: launchers restart a job by repeating its command, and
    since resume is exact, the result is that of a fresh run."""
    identity = json.loads(json.dumps(recipe.identity()))
    for run in reversed(runs.all_runs()):
        if not run.path.name.startswith(recipe.task.label):
            continue
        with contextlib.suppress(Problem, ValueError):
            previous = run.read()
            is_resumable = previous["status"] == "running" or Outcome(previous["outcome"]).retryable
            is_same = previous["recipe"]["identity"] == identity
            if is_same and is_resumable and previous["status"] != "finished" and not runs.lock_holder(run.path):
                note = f"going on with {run.name}, unfinished and of the same recipe (a fresh one: --name NAME)"
                return continue_run(recipe, run, previous, note)
    run = Run(runs.new_path(recipe.task.label))
    return OpenedRun(run, Lock.acquire(run.path), created=True)


# --- what may not differ -----------------------------------------------------------------------


def _check_same_recipe(recipe: Recipe, previous: dict[str, Any], run: Run) -> None:
    """Raises Problem if a directory holds a run of another recipe."""
    new, old = json.loads(json.dumps(recipe.identity())), previous["recipe"]["identity"]
    if new["task"] != old["task"]:
        raise Problem(f"{run.name} is a run of {old['task']}, not of {new['task']}: choose another --name")
    if new["code"] != old["code"]:
        raise Problem(
            f"{run.name} began with another version of {_changed_code(recipe.task, run)}: choose another --name,"
            f" or go on with the code it began with: drivetrain resume {run.name}"
        )
    check_changes(new["settings"], old["settings"], run)


def _changed_code(task: TaskRef, run: Run) -> str:
    """Names the modules that differ from the run's copy; the task if none does, or if it was pickled."""
    if task.pickled:
        return task.label
    copy = run.path / "task"
    changed = [p for p, file in task.modules().items() if not (copy / p).is_file() or (copy / p).read_bytes() != file.read_bytes()]
    return f"{changed[0]}{f' and {len(changed) - 1} more' if len(changed) > 1 else ''}" if changed else task.label


def check_changes(new: dict[str, Any], old: dict[str, Any], run: Run) -> None:
    """Raises Problem if a setting changed that must stay the same in a run."""
    changed = [k for k in new if new[k] != old.get(k) and k not in MAY_CHANGE]
    if changed:
        detail = ", ".join(f"{k}={old.get(k)} (now {new[k]})" for k in changed[:3])
        raise Problem(
            f"{run.name} was begun with {detail}: that cannot change in a run; use another --name."
            f"\nThese may: {', '.join(MAY_CHANGE)}, and plan.* choices"
        )


# --- writing and removing ----------------------------------------------------------------------


def record_start(opened: OpenedRun, recipe: Recipe, plan: Plan, machine: LocalMachine) -> None:
    """Writes run.json and the copy of the task's code, before any process is started."""
    run, previous = opened.run, opened.previous
    current = {"plan": plan.to_json(), "hardware": machine.hardware.to_json(), "status": "running", "outcome": "", "message": ""}
    try:
        if previous is not None:
            run.write(previous | {"recipe": previous["recipe"] | {"settings": recipe.settings, "pins": recipe.pins}} | current)
            return
        if not recipe.task.built_in and not recipe.task.pickled:
            runs.store_task(run, Path(recipe.task.path), recipe.task.package)
        entry = {
            "task": asdict(recipe.task), "identity": recipe.identity(), "settings": recipe.settings,
            "origin": recipe.origin, "pins": recipe.pins,
        }  # fmt: skip
        run.write({"name": run.name, "recipe": entry, **runs.provenance(), **current})
    except OSError as error:
        raise Problem(f"cannot write the run directory {run.path}: {error.strerror}; choose another with --run-dir") from None


@contextlib.contextmanager
def locked(opened: OpenedRun) -> Iterator[None]:
    """Holds the run's lock; if the start is refused, removes what it made."""
    try:
        yield
    except BaseException as error:
        if not runs.is_run(opened.run.path) or (isinstance(error, Problem) and error.outcome is Outcome.USAGE):
            discard(opened)
        raise
    finally:
        if opened.lock is not None:
            opened.lock.release()


def discard(opened: OpenedRun) -> bool:
    """Removes the directory that a refused start has made; returns False if it existed before, or the run has taken a step."""
    path = opened.run.path
    if not opened.created or opened.run.checkpoint_steps() or opened.run.last_row():
        return False
    shutil.rmtree(path, ignore_errors=True)
    for folder in path.parents:  # of a recipe with stages, and runs/
        if not folder.is_relative_to(runs.RUNS):
            break
        with contextlib.suppress(OSError):
            folder.rmdir()
    return True


def wait_for_lock(path: Path, seconds: float) -> Lock:
    """Takes a lock that a process which is about to end may still hold."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return Lock.acquire(path)
        except Problem:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
