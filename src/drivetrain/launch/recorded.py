"""The recipe that a run recorded, with the copy of the task's code in the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from drivetrain import recipe as recipes
from drivetrain.describe import task_settings
from drivetrain.launch.opening import check_changes
from drivetrain.outcomes import Problem
from drivetrain.recipe import Recipe
from drivetrain.runs import Run
from drivetrain.settings import nearest
from drivetrain.task_ref import TaskRef


def task_in_run(task: TaskRef, run: Run) -> TaskRef:
    """Returns the copy of the task in the run, which resume, eval and workers import."""
    if task.built_in or task.origin:
        return task
    return replace(task, path=str((run.path / "task" / task.path_in_run).resolve()), origin=task.path)


def recorded_task(run: Run) -> TaskRef:
    """Returns the task of a run; raises Problem if its code is missing."""
    task = task_in_run(TaskRef.from_json(run.read()["recipe"]["task"]), run)
    if not Path(task.path).is_file():
        raise Problem(f"{run.name} lacks its task's code ({task.path})")
    return task


def recorded_recipe(run: Run, words: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Returns the recipe that a run began with, changed by key=value words."""
    task, entry = recorded_task(run), run.read()["recipe"]
    values, origin, pins = dict(entry["settings"]), dict(entry["origin"]), dict(entry["pins"])
    changes = {}
    for key, text in recipes.split_words(list(words)).items():
        if key.startswith("plan."):
            pins[key.removeprefix("plan.")] = text
        else:
            changes[key] = text
    if changes:
        known = task_settings(task) if not task.pickled else {}
        for key, text in changes.items():
            if key not in values:
                raise Problem(f"{entry['identity']['task']} has no setting {key!r}{nearest(key, values)}")
            values[key] = known[key].coerce(text) if key in known else _like(values[key], text)
            origin[key] = "command line"
        check_changes(values, entry["settings"], run)
        recipes.check_agreement(values)
    return Recipe(task, values, origin, pins, None)


def _like(old: Any, text: str) -> Any:
    """Returns the text as a value of the old value's type."""
    return type(old)(text) if isinstance(old, (int, float, str)) and not isinstance(old, bool) else text
