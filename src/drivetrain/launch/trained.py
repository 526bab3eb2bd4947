"""A run's task and model, with the code that the run keeps; a fault of that code is told by its own lines alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.launch import ending
from drivetrain.outcomes import Problem
from drivetrain.watch.screen import Screen

if TYPE_CHECKING:
    from torch import nn

    from drivetrain.runs import Run
    from drivetrain.task import Task


def trained(found: Run, screen: Screen) -> tuple[Task, nn.Module]:
    """The task and its trained model; the screen says whose code is run."""
    from drivetrain.engine.inference import trained_model
    from drivetrain.launch import start as launch
    from drivetrain.task_ref import instantiate

    recipe = launch.recipe_of_run(found, [])
    if not recipe.task.built_in:
        screen.notice(f"running the code kept in {ending.shown(found)}/task")
    with users_code(found):
        task = instantiate(launch.task_in_run(recipe.task, found), recipe.settings)
        return task, trained_model(task, found)


@contextlib.contextmanager
def users_code(found: Run) -> Iterator[None]:
    """Tell a fault in a task's code as training does: trimmed to the user's own frames."""
    from drivetrain.processes.worker import explain

    try:
        yield
    except (Problem, BrokenPipeError):
        raise
    except Exception as error:
        info = found.read()
        ref = info["recipe"]["task"]
        origin = "" if ref["pickled"] else str(Path(ref["path"]).parent)
        outcome, message = explain(error, {"run": str(found.path.resolve()), "origin": origin, "plan": info["plan"]})
        raise Problem(message, outcome) from error
