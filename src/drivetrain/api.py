"""The Python interface: `drivetrain.train` does what the command does; `drivetrain.load` gives the model."""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.launch import ending, opening
from drivetrain.launch import start as launch
from drivetrain.outcomes import Outcome, Problem
from drivetrain.project import package_of
from drivetrain.recipe import Recipe, make
from drivetrain.runs import Run, find
from drivetrain.settings_reader.live import class_text, settings_of_class
from drivetrain.supervise import local_place
from drivetrain.task import Task
from drivetrain.task_ref import TaskRef, find_task, instantiate
from drivetrain.watch.screen import Screen

if TYPE_CHECKING:
    from torch import nn


def train(
    task: Task | str,
    *,
    procs: int | None = None,
    device: str | None = None,
    gpus: str | None = None,
    name: str | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Run:
    """Train a task (or a built-in by name) and give its Run. Raises Problem where the command would fail.

    A task whose class lives in a notebook or a script is sent to the workers by value and kept in the run.
    """
    request = launch.Request(procs=procs, device=device, gpus=gpus, name=name, run_dir=None if run_dir is None else str(run_dir))
    screen = Screen(quiet=quiet)
    recipe = _recipe(task, settings)
    if recipe.task.pickled:
        assert isinstance(task, Task)
        run, ended = _train_by_value(task, recipe, request, screen)
    else:
        run, ended = launch.train_recipe(recipe, request, screen)
    ending.raise_failure(ended, run)
    if ended.interrupted and ended.outcome is not Outcome.OK:
        raise KeyboardInterrupt
    return run


def _recipe(task: Task | str, settings: dict[str, Any]) -> Recipe:
    plain = {k.replace("__", ".", 1) if k.startswith("plan__") else k: v for k, v in settings.items()}
    if isinstance(task, str):
        return make(find_task(task), {}, plain)
    known = settings_of_class(type(task))
    given = task.chosen_settings() | plain
    module, name = type(task).__module__, type(task).__name__
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" or file is None or "<locals>" in type(task).__qualname__:
        ref = TaskRef(name.lower(), "task.pkl", name, pickled=True, code=_digest(task))
        return make(ref, {}, given, known=known)
    path = Path(file).resolve()
    return make(TaskRef(name.lower(), str(path), name, package=package_of(path)), {}, given, known=known)


def _train_by_value(task: Task, recipe: Recipe, request: launch.Request, screen: Screen) -> tuple[Run, Any]:
    """Keep the pickled class in the run, then train as ever."""
    import cloudpickle

    machine = launch.look_at_machine(request)
    opened = opening.open_run(recipe, request)
    if opened.finished:
        return opened.run, launch.already_finished(opened, screen)
    with opening.held(opened):
        place = local_place(machine.procs)
        file = opened.run.path / "task" / "task.pkl"
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "wb") as stream:
            cloudpickle.dump(task, stream)
        if text := class_text(type(task)):
            file.with_name("task.py").write_text(text + "\n")  # for people to read
        kept = replace(recipe, task=launch.task_in_run(recipe.task, opened.run))
        plan = launch.make_plan(kept, machine, place, 1, opened.before, request, screen)
        return opened.run, launch.train_opened(recipe, request, opened, machine, place, plan, screen)


def _digest(task: Task) -> str:
    """Tells one version of a class from the next; by its text, since pickles of equal classes may differ."""
    import cloudpickle

    text = class_text(type(task))
    return hashlib.sha256(text.encode() if text else cloudpickle.dumps(type(task))).hexdigest()


def load(run: Run | str | os.PathLike[str]) -> nn.Module:
    """The trained model of a run: final weights, or the last good checkpoint's, in evaluation mode."""
    from drivetrain.engine.inference import trained_model

    found = run if isinstance(run, Run) else find(run)
    told = found.read()["recipe"]
    ref = launch.task_in_run(TaskRef.from_json(told["task"]), found)
    if not Path(ref.path).is_file():
        raise Problem(f"{found.name} lacks its task's code ({ref.path})")
    return trained_model(instantiate(ref, told["settings"]), found)
