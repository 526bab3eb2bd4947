"""`train --smoke`: does everything that a run does, in a few seconds and in a temporary folder."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from drivetrain.launch.ending import raise_failure
from drivetrain.launch.job import make_job
from drivetrain.launch.machine import cluster_of, detect_machine
from drivetrain.launch.opening import open_run, record_start
from drivetrain.launch.planning import plan_run
from drivetrain.launch.report import report_start
from drivetrain.launch.request import Request
from drivetrain.outcomes import Outcome
from drivetrain.processes.job import SmokeJob
from drivetrain.processes.smoke import SMOKE_BATCH, SMOKE_STEPS
from drivetrain.recipe import Recipe
from drivetrain.supervise import JobEnd, local_placement, run_workers
from drivetrain.watch.screen import Screen


def train_smoke(recipe: Recipe, request: Request, screen: Screen) -> JobEnd:
    """Trains a few steps on a few samples, saves, resumes and evaluates. Raises Problem if anything fails."""
    machine = detect_machine(request)
    cluster, request = cluster_of(machine), replace(request, planner="off")  # a few samples need no plan
    full_batch, full_plan = recipe.settings["global_batch"], plan_run(recipe, request, cluster, None)
    batch = min(SMOKE_BATCH, full_batch)
    changes = {"global_batch": batch, "steps": SMOKE_STEPS, "log_every": 1, "eval_every": SMOKE_STEPS, "save_every": SMOKE_STEPS // 2}
    recipe = replace(recipe, settings=recipe.settings | changes)
    folder = tempfile.mkdtemp(prefix="drivetrain-smoke-")
    try:
        opened = open_run(recipe, replace(request, name=None, run_dir=str(Path(folder) / "smoke")))
        plan = plan_run(recipe, request, cluster, None)
        report_start(recipe, machine, plan, screen)
        record_start(opened, recipe, plan, machine)
        job = make_job(
            SmokeJob, recipe, opened.run, plan, max_samples=SMOKE_STEPS * batch, full_global_batch=full_batch, full_plan=full_plan
        )
        ended = run_workers(job, plan, local_placement(machine.procs), screen, machine.gpus, request.verbose)
        raise_failure(ended, opened.run)
        if ended.outcome is Outcome.OK:
            screen.line("smoke", "train, save, resume and eval work; nothing was kept")
        return ended
    finally:
        shutil.rmtree(folder, ignore_errors=True)
