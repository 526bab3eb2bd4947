"""Reads the recipe of an existing run, with the run's copy of the task's code."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from drivetrain import recipe as recipes
from drivetrain.describe import task_settings
from drivetrain.launch.opening import check_changes
from drivetrain.outcomes import Problem
from drivetrain.recipe import Recipe
from drivetrain.runs import Run, is_run
from drivetrain.settings import nearest
from drivetrain.stages import references_in, with_paths
from drivetrain.task_ref import TaskRef


def task_in_run(task: TaskRef, run: Run) -> TaskRef:
    """Returns a reference to the run's copy of the task, which resume, eval and workers import."""
    if task.built_in or task.origin:
        return task
    return replace(task, path=str((run.path / "task" / task.path_in_run).resolve()), origin=task.path)


def recorded_task(run: Run) -> TaskRef:
    """Returns the task of a run; raises Problem if its code is missing."""
    task = task_in_run(TaskRef.from_json(run.read()["recipe"]["task"]), run)
    if not Path(task.path).is_file():
        raise Problem(f"{run.name} has no copy of its task's code ({task.path})")
    return task


def _present_paths(run: Run, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings that name an earlier stage, with the folder beside this run where it now is: the project may have moved."""
    own_folder = run.path.resolve()
    number = own_folder.name.partition("-")[0]
    paths: dict[str, Path] = {}
    for folder in sorted(own_folder.parent.glob("[0-9]*-*")) if number.isdecimal() else ():
        earlier, _, stage = folder.name.partition("-")
        if earlier.isdecimal() and int(earlier) < int(number) and is_run(folder):
            paths[stage] = folder
    present = {}
    for name, text in references_in(settings).items():
        with contextlib.suppress(KeyError):  # the earlier stage is no longer there: its recorded path stays
            present[name] = with_paths(text, paths)
    return present


def recorded_recipe(run: Run, words: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Returns the recipe that a run began with, changed by key=value words."""
    task, old_recipe = recorded_task(run), run.read()["recipe"]
    old_settings = old_recipe["settings"] | _present_paths(run, old_recipe["identity"]["settings"])
    values, origin, pins = dict(old_settings), dict(old_recipe["origin"]), dict(old_recipe["pins"])
    changes = {}
    for key, text in recipes.split_words(list(words)).items():
        if key.startswith("plan."):
            pins[key.removeprefix("plan.")] = text
        else:
            changes[key] = text
    if changes:
        declared = {} if task.pickled else task_settings(task)
        for key, text in changes.items():
            if key not in values:
                raise Problem(f"{old_recipe['identity']['task']} has no setting {key!r}{nearest(key, values)}")
            values[key] = declared[key].coerce(text) if key in declared else _with_type_of(values[key], text)
            origin[key] = "command line"
        check_changes(values, old_settings, run)
        recipes.check_agreement(values)
    return Recipe(task, values, origin, pins, None)


def _with_type_of(old: Any, text: str) -> Any:
    """Converts the text to the type of the old value, if that is a number."""
    is_number = isinstance(old, (int, float)) and not isinstance(old, bool)
    return type(old)(text) if is_number else text
