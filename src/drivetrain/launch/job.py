"""The job that worker processes are given."""

from __future__ import annotations

import os
from typing import Any, TypeVar

from drivetrain.launch.recorded import task_in_run
from drivetrain.launch.request import Request
from drivetrain.plan import Plan
from drivetrain.processes.job import TaskJob, TrainJob
from drivetrain.recipe import Recipe
from drivetrain.runs import Run

JobT = TypeVar("JobT", bound=TaskJob)


def make_job(kind: type[JobT], recipe: Recipe, run: Run, plan: Plan, folder: str | None = None, **fields: Any) -> JobT:
    """Returns a job on the run's copy of the task. `folder` is the workers' working directory, by default this process's; `fields` are the kind's own."""
    task = task_in_run(recipe.task, run)
    return kind(run=str(run.path.resolve()), task=task, settings=recipe.settings, plan=plan, folder=folder or os.getcwd(), **fields)


def make_train_job(recipe: Recipe, run: Run, plan: Plan, request: Request, folder: str | None = None) -> TrainJob:
    return make_job(TrainJob, recipe, run, plan, folder, end=request.deadline, diagnostics=request.diagnostics)
