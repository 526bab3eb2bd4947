"""Creates or opens a run's directory, locks it, and removes it again if the start is refused."""

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
from drivetrain.buckets.layout import read_link
from drivetrain.launch.machine import LocalMachine
from drivetrain.launch.request import Request
from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan
from drivetrain.recipe import MAY_CHANGE, Recipe
from drivetrain.runs import Lock, Run
from drivetrain.task_ref import TaskRef

BEFORE_RUN = (".bucket", "lock", "task", "logs", "job", "code", "code.tar.gz", "target.json")


@dataclass(frozen=True)
class OpenedRun:
    run: Run
    lock: Lock | None = None
    previous: dict[str, Any] | None = None
    """The old run.json of a run that continues; None for a new run."""
    is_finished: bool = False
    note: str = ""
    """A message for the user about the choice of this directory."""
    created: bool = False
    """Whether this start created the directory."""


def open_run(recipe: Recipe, request: Request) -> OpenedRun:
    """Opens the run that the user named, else an unfinished run of the same recipe, else a new one."""
    run = named_run(recipe, request)
    if run is None:
        return _continue_or_create(recipe)
    if not runs.is_run(run.path):
        created = not os.path.exists(run.path)
        return OpenedRun(run, Lock.acquire(run.path), created=created)
    previous = run.read()
    try:
        _check_same_recipe(recipe, previous, run)
    except Problem:  # the run has not begun, or named_run() would have raised this
        note = f"{run.name} stopped before its first step: it starts again, with the new settings"
        return OpenedRun(run, Lock.acquire(run.path), note=note)
    return continue_run(recipe, run, previous)


def named_run(recipe: Recipe, request: Request) -> Run | None:
    """Returns the run that a flag or the recipe names, if any. Raises Problem if it has another recipe, or the folder has other files."""
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
        raise Problem(f"{run.path} is not empty and not a run: choose another --run-dir or --name")
    return run


def _may_precede_run(path: Path) -> bool:
    """Whether a folder without run.json may contain this path. A start that was killed early leaves its lock and a part of the task's
    copy; a program that starts trainings may write their output to logs; and a target has its record there."""
    return path.name in BEFORE_RUN or path.name.startswith((".run.json", ".target.json"))


def _has_begun(run: Run, previous: dict[str, Any]) -> bool:
    """Whether a run is finished or in use, or has a checkpoint or a logged step."""
    return previous["status"] == "finished" or bool(run.checkpoint_steps() or run.last_row() or runs.lock_holder(run.path))


def continue_run(recipe: Recipe, run: Run, previous: dict[str, Any], note: str = "") -> OpenedRun:
    """Opens a run to continue it. A finished run continues only if `epochs` or `steps` changed."""
    is_longer = any(recipe.settings[name] != previous["recipe"]["settings"].get(name) for name in ("epochs", "steps"))
    if previous["status"] == "finished" and not is_longer:
        return OpenedRun(run, previous=previous, is_finished=True)
    if previous["status"] == "finished" and not run.checkpoint_steps():
        raise Problem(
            f"{run.name} is finished and its checkpoints were pruned: begin a new run from its weights, with start={run.name} --name NEW"
        )
    return OpenedRun(run, Lock.acquire(run.path), previous, note=note)


def _continue_or_create(recipe: Recipe) -> OpenedRun:
    """Opens the unfinished run of the same recipe, if there is one, else a new run. Launchers restart a job by repeating its command, and
    since resume is exact, the result equals that of a new run."""
    identity = json.loads(json.dumps(recipe.identity()))
    for run in reversed(runs.all_runs()):
        if not run.path.name.startswith(recipe.task.label) or read_link(run.path):
            continue  # a run in a bucket is continued only by its name or address
        with contextlib.suppress(Problem, ValueError):
            previous = run.read()
            is_resumable = previous["status"] == "running" or Outcome(previous["outcome"]).retryable
            is_same = previous["recipe"]["identity"] == identity
            if is_same and is_resumable and previous["status"] != "finished" and not runs.lock_holder(run.path):
                note = f"continuing {run.name}, an unfinished run of the same recipe (for a new run: --name NAME)"
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
    changed = [
        path for path, file in task.modules().items() if not (copy / path).is_file() or (copy / path).read_bytes() != file.read_bytes()
    ]
    if not changed:
        return task.label
    return changed[0] if len(changed) == 1 else f"{changed[0]} and {len(changed) - 1} more"


def check_changes(new: dict[str, Any], old: dict[str, Any], run: Run) -> None:
    """Raises Problem if a setting changed that must stay the same in a run."""
    changed = [name for name in new if new[name] != old.get(name) and name not in MAY_CHANGE]
    if changed:
        detail = ", ".join(f"{name}={old.get(name)} (now {new[name]})" for name in changed[:3])
        raise Problem(
            f"{run.name} was begun with {detail}: that cannot change in a run; use another --name."
            f"\nThese may: {', '.join(MAY_CHANGE)}, and plan.* choices"
        )


# --- writing and removing ----------------------------------------------------------------------


def record_start(opened: OpenedRun, recipe: Recipe, plan: Plan, machine: LocalMachine, upload: str | None = None) -> None:
    """Writes run.json and the copy of the task's code, before any process is started. `upload`: the address for the finished model."""
    run, previous = opened.run, opened.previous
    status: dict[str, Any] = {"upload": upload} if upload is not None else {}
    status |= {"plan": plan.to_json(), "hardware": machine.hardware.to_json(), "status": "running", "outcome": "", "message": ""}
    try:
        if previous is not None:
            changed_recipe = previous["recipe"] | {"settings": recipe.settings, "pins": recipe.pins}
            run.write(previous | {"recipe": changed_recipe} | status)
            return
        if not recipe.task.built_in and not recipe.task.pickled:
            runs.store_task(run, Path(recipe.task.path), recipe.task.package)
        entry = {
            "task": asdict(recipe.task), "identity": recipe.identity(), "settings": recipe.settings,
            "origin": recipe.origin, "pins": recipe.pins,
        }  # fmt: skip
        run.write({"name": run.name, "recipe": entry, **runs.provenance(), **status})
    except OSError as error:
        raise Problem(f"cannot write the run directory {run.path}: {error.strerror}; choose another with --run-dir") from None


@contextlib.contextmanager
def locked(opened: OpenedRun) -> Iterator[None]:
    """Holds the run's lock; if the start is refused, removes what it created."""
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
    """Removes the directory of a refused start. Does nothing and returns False if it existed before, or if the run has a logged step."""
    path = opened.run.path
    if not opened.created or opened.run.checkpoint_steps() or opened.run.last_row():
        return False
    shutil.rmtree(path, ignore_errors=True)
    for folder in path.parents:  # the folder of a recipe with stages, and runs/, if they are empty
        if not folder.is_relative_to(runs.RUNS):
            break
        with contextlib.suppress(OSError):
            folder.rmdir()
    return True


def wait_for_lock(path: Path, seconds: float) -> Lock:
    """Acquires a lock, waiting for a process that is about to end."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return Lock.acquire(path)
        except Problem:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
