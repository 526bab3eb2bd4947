"""The Python API: each function does the same as the verb with its name, and raises Problem if that fails."""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.launch import evaluation, start
from drivetrain.launch.ending import raise_failure
from drivetrain.launch.local import train_locally
from drivetrain.launch.machine import cluster_of, detect_machine
from drivetrain.launch.planning import Measure, make_plan
from drivetrain.launch.recorded import recorded_recipe, task_in_run
from drivetrain.launch.request import Request
from drivetrain.outcomes import Outcome, Problem
from drivetrain.project import package_of
from drivetrain.recipe import Recipe, make
from drivetrain.runs import Run, find
from drivetrain.settings_reader.live import class_text, settings_of_class
from drivetrain.supervise import JobEnd
from drivetrain.task import Task
from drivetrain.task_ref import TaskRef, find_task, instantiate
from drivetrain.watch.screen import Screen

if TYPE_CHECKING:
    from torch import nn

    from drivetrain.plan import Plan


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
    """Trains a task, or a built-in by its name, and returns the run. `plan__KEY=VALUE` pins a choice of the plan.

    A task whose class is defined in a notebook or a script is pickled for the workers, and the pickle stays in the run.
    """
    request = Request(procs=procs, device=device, gpus=gpus, name=name, run_dir=None if run_dir is None else str(run_dir), quiet=quiet)
    screen = Screen(quiet=quiet)
    recipe = _recipe(task, settings)
    if recipe.task.pickled:
        assert isinstance(task, Task)
        store_task = partial(_store_pickled, task, recipe)
        run, ended = train_locally(recipe, request, detect_machine(request), screen, store_task)
    else:
        run, ended = start.train(recipe, request, screen)
    return _checked(run, ended)


def resume(
    run: Run | str | os.PathLike[str], *, procs: int | None = None, device: str | None = None, gpus: str | None = None, quiet: bool = False,
    **settings: Any,
) -> Run:  # fmt: skip
    """Continues a run from its last good checkpoint, with the code and settings it began with. `settings` are those that may change,
    such as `epochs`."""
    run_dir = _find(run)
    request = Request(verb="resume", procs=procs, device=device, gpus=gpus, quiet=quiet)
    words = [f"{key}={value}" for key, value in _dotted(settings).items()]
    return _checked(*start.resume(run_dir, recorded_recipe(run_dir, words), request, Screen(quiet=quiet)))


def plan(
    task: Task | str,
    *,
    procs: int | None = None,
    device: str | None = None,
    gpus: str | None = None,
    measure: bool = False,
    **settings: Any,
) -> Plan:
    """Returns the plan of a task on this machine. Nothing is trained; with `measure`, a few micro-batches are timed."""
    recipe = _recipe(task, settings)
    if recipe.task.pickled:
        raise Problem(f"{recipe.task.label} is defined in a notebook or a script: put its class into a file of its own to plan it")
    machine = detect_machine(Request(procs=procs, device=device, gpus=gpus))
    return make_plan(recipe, cluster_of(machine), Screen(quiet=True), measure=Measure.ALWAYS if measure else Measure.NEVER)


def evaluate(
    run: Run | str | os.PathLike[str], *, procs: int | None = None, device: str | None = None, gpus: str | None = None, quiet: bool = False
) -> dict[str, float]:
    """Returns the metrics of a run's model on its task's evaluation data, and writes eval.json in the run."""
    run_dir, request = _find(run), Request(procs=procs, device=device, gpus=gpus, quiet=quiet)
    ended = evaluation.evaluate(run_dir, request, Screen(quiet=quiet))
    _checked(run_dir, ended)
    if ended.outcome is not Outcome.OK:
        raise Problem(f"the evaluation of {run_dir.name} was stopped", ended.outcome)
    return dict(ended.result["metrics"])


def load(run: Run | str | os.PathLike[str]) -> nn.Module:
    """Returns the trained model of a run in evaluation mode: final weights, or those of the last good checkpoint."""
    from drivetrain.engine.inference import trained_model

    run_dir = _find(run)
    recipe = recorded_recipe(run_dir)
    return trained_model(instantiate(recipe.task, recipe.settings), run_dir)


# --- helpers -----------------------------------------------------------------------------------


def _find(run: Run | str | os.PathLike[str]) -> Run:
    return run if isinstance(run, Run) else find(run)


def _checked(run: Run, ended: JobEnd) -> Run:
    """Returns the run; raises Problem if it failed, KeyboardInterrupt if it was interrupted."""
    raise_failure(ended, run)
    if ended.interrupted and ended.outcome is not Outcome.OK:
        raise KeyboardInterrupt
    return run


def _dotted(settings: dict[str, Any]) -> dict[str, Any]:
    """Renames plan__KEY to plan.KEY, which is no valid keyword in Python."""
    return {name.replace("__", ".", 1) if name.startswith("plan__") else name: value for name, value in settings.items()}


def _recipe(task: Task | str, settings: dict[str, Any]) -> Recipe:
    values = _dotted(settings)
    if isinstance(task, str):
        return make(find_task(task), {}, values)
    declared = settings_of_class(type(task))
    values = task.chosen_settings() | values
    module, name = type(task).__module__, type(task).__name__
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" or file is None or "<locals>" in type(task).__qualname__:
        ref = TaskRef(name.lower(), "task.pkl", name, pickled=True, code=_digest(task))
        return make(ref, {}, values, known=declared)
    path = Path(file).resolve()
    return make(TaskRef(name.lower(), str(path), name, package=package_of(path)), {}, values, known=declared)


def _store_pickled(task: Task, recipe: Recipe, run: Run) -> Recipe:
    """Writes the pickled task into the run, and its source for people to read; returns the recipe with that copy."""
    import cloudpickle

    file = run.path / "task" / "task.pkl"
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "wb") as stream:
        cloudpickle.dump(task, stream)
    if text := class_text(type(task)):
        file.with_name("task.py").write_text(text + "\n")
    return replace(recipe, task=task_in_run(recipe.task, run))


def _digest(task: Task) -> str:
    """Returns the digest of a class's source; pickles of equal classes may differ."""
    import cloudpickle

    text = class_text(type(task))
    return hashlib.sha256(text.encode() if text else cloudpickle.dumps(type(task))).hexdigest()
