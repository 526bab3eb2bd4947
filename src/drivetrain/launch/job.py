"""The job that worker processes are given."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from drivetrain.launch.recorded import task_in_run
from drivetrain.launch.request import Request
from drivetrain.plan import Plan
from drivetrain.recipe import Recipe
from drivetrain.runs import Run


def make_job(recipe: Recipe, run: Run, plan: Plan, mode: str, folder: str | None = None, request: Request | None = None) -> dict[str, Any]:
    """`folder` is the working directory of the workers: by default this process's."""
    return {
        "mode": mode,
        "run": str(run.path.resolve()),
        "task": asdict(task_in_run(recipe.task, run)),
        "settings": recipe.settings,
        "plan": plan.to_json(),
        "folder": folder or os.getcwd(),
        "end": request.deadline if request else None,
        "looks": request.diagnostics if request else {},
    }
