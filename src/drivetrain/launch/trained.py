"""Loads a run's task and trained model with the code in the run. Errors in that code show only the user's lines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from drivetrain.launch.recorded import recorded_recipe
from drivetrain.launch.report import report_code
from drivetrain.outcomes import Problem
from drivetrain.runs import Run
from drivetrain.task_ref import instantiate
from drivetrain.watch.screen import Screen

if TYPE_CHECKING:
    from torch import nn

    from drivetrain.task import Task


def load_trained(run: Run, screen: Screen) -> tuple[Task, nn.Module]:
    """Returns the task and its trained model in evaluation mode: final weights, or those of the last good checkpoint."""
    from drivetrain.engine.inference import trained_model

    recipe = recorded_recipe(run)
    report_code(recipe, run, screen)
    with user_code(run):
        task = instantiate(recipe.task, recipe.settings)
        return task, trained_model(task, run)


@contextlib.contextmanager
def user_code(run: Run) -> Iterator[None]:
    """Turns an exception of the task's code into a Problem, with the traceback trimmed to the user's frames, as training does."""
    from drivetrain.processes.failures import explain

    try:
        yield
    except (Problem, BrokenPipeError):
        raise
    except Exception as error:
        outcome, message = explain(error, run.path.resolve(), run.read()["plan"]["workers"])
        raise Problem(message, outcome) from error
