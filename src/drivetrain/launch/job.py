"""Makes the job of worker processes."""

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


def make_job(job_class: type[JobT], recipe: Recipe, run: Run, plan: Plan, folder: str | None = None, **fields: Any) -> JobT:
    """Returns a job with the run's copy of the task. `folder` is the workers' working directory; `fields` are those of the job's class."""
    task = task_in_run(recipe.task, run)
    return job_class(run=str(run.path.resolve()), task=task, settings=recipe.settings, plan=plan, folder=folder or os.getcwd(), **fields)


def make_train_job(recipe: Recipe, run: Run, plan: Plan, request: Request, folder: str | None = None) -> TrainJob:
    return make_job(TrainJob, recipe, run, plan, folder, end=request.deadline, diagnostics=request.diagnostics)
