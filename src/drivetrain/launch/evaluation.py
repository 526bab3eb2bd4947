"""Evaluates a run's model on its task's evaluation data, in worker processes."""

from __future__ import annotations

import json
from dataclasses import replace

from drivetrain import runs
from drivetrain.launch.job import make_job
from drivetrain.launch.machine import cluster_of, detect_machine
from drivetrain.launch.planning import plan_run
from drivetrain.launch.recorded import recorded_recipe
from drivetrain.launch.report import report_code
from drivetrain.launch.request import Request
from drivetrain.outcomes import Outcome
from drivetrain.processes.job import EvaluateJob
from drivetrain.runs import Run
from drivetrain.supervise import JobEnd, local_placement, run_workers
from drivetrain.watch.screen import Screen

RECORDED = ("metrics", "samples", "step", "figures")  # the fields of the result that eval.json contains


def evaluate(run: Run, request: Request, screen: Screen) -> JobEnd:
    """Evaluates the final weights of a finished run, else those of its last good checkpoint, and writes eval.json."""
    recipe, info = recorded_recipe(run), run.read()
    machine = detect_machine(request)
    plan = plan_run(recipe, replace(request, planner="off"), cluster_of(machine), info)
    report_code(recipe, run, screen)
    job = make_job(EvaluateJob, recipe, run, plan, info["folder"])
    ended = run_workers(job, plan, local_placement(machine.procs), screen, machine.gpus, request.verbose)
    if ended.outcome is Outcome.OK:
        facts = {key: ended.result[key] for key in RECORDED}
        runs.write_atomic(run.path / "eval.json", json.dumps({"format": runs.FORMAT} | facts, indent=1) + "\n")
    return ended
