"""Trains on this machine alone: a new run, or one that continues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from drivetrain.launch.bucket import mirrored, with_bucket_of
from drivetrain.launch.ending import finish
from drivetrain.launch.job import make_train_job
from drivetrain.launch.machine import LocalMachine, cluster_of, detect_machine
from drivetrain.launch.opening import OpenedRun, continue_run, locked, named_run, open_run, record_start
from drivetrain.launch.planning import make_plan, plan_run
from drivetrain.launch.report import report_already_finished, report_code, report_start
from drivetrain.launch.request import Request
from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan
from drivetrain.recipe import Recipe
from drivetrain.runs import Run
from drivetrain.supervise import JobEnd, local_placement, run_workers
from drivetrain.watch.screen import Screen


def train_locally(
    recipe: Recipe, request: Request, machine: LocalMachine, screen: Screen, store_task: Callable[[Run], Recipe] | None = None
) -> tuple[Run, JobEnd]:
    """Opens the run, makes the plan, trains and records the end. `store_task` writes a task that has no file into the run, and returns
    the recipe with that copy."""
    request = with_bucket_of(named_run(recipe, request), request)
    with mirrored(request, screen):
        return _train_mirrored(recipe, request, machine, screen, store_task)


def _train_mirrored(
    recipe: Recipe, request: Request, machine: LocalMachine, screen: Screen, store_task: Callable[[Run], Recipe] | None
) -> tuple[Run, JobEnd]:
    opened = open_run(recipe, request)
    if opened.is_finished:
        report_already_finished(opened.run, screen)
        return opened.run, JobEnd(Outcome.OK)
    with locked(opened):
        stored = store_task(opened.run) if store_task is not None else recipe
        plan = plan_run(stored, request, cluster_of(machine), opened.previous, screen)
        return opened.run, _train_opened(recipe, request, opened, machine, plan, screen)


def resume_locally(run: Run, recipe: Recipe, request: Request, screen: Screen) -> tuple[Run, JobEnd]:
    """Continues a run."""
    if request.nodes > 1:
        raise Problem("resume runs on one machine: on several, repeat the train command with its --nodes and --name on each")
    with mirrored(request, screen):
        return _resume_mirrored(run, recipe, request, screen)


def _resume_mirrored(run: Run, recipe: Recipe, request: Request, screen: Screen) -> tuple[Run, JobEnd]:
    opened = continue_run(recipe, run, run.read())
    if opened.is_finished:
        report_already_finished(run, screen)
        return run, JobEnd(Outcome.OK)
    with locked(opened):
        machine = _with_procs_of_run(detect_machine(request), request, opened)
        plan = plan_run(recipe, request, cluster_of(machine), opened.previous, screen)
        report_code(recipe, run, screen)
        if not run.checkpoint_steps():
            screen.notice(f"{run.name} has no checkpoint yet: starting at step 0")
        return run, _train_opened(recipe, request, opened, machine, plan, screen)


def _with_procs_of_run(machine: LocalMachine, request: Request, opened: OpenedRun) -> LocalMachine:
    """Returns the machine with as many processes as the run had, or as there are GPUs, unless the request sets the number."""
    old_plan = opened.previous["plan"] if opened.previous else {}
    if request.procs is not None or request.gpus is not None:
        return machine
    if old_plan["device"] != machine.device or old_plan["nodes"] != 1:
        return machine
    procs = old_plan["world_size"]
    if machine.gpus:
        procs = min(procs, len(machine.gpus))
    return replace(machine, procs=procs, gpus=machine.gpus[:procs])


def _train_opened(recipe: Recipe, request: Request, opened: OpenedRun, machine: LocalMachine, plan: Plan, screen: Screen) -> JobEnd:
    placement = local_placement(machine.procs)
    report_start(recipe, machine, plan, screen, opened.note)
    record_start(opened, recipe, plan, machine, request.upload)
    opened.run.log_event("started", world_size=placement.world_size, device=plan.device)
    folder = opened.previous["folder"] if opened.previous else None
    job = make_train_job(recipe, opened.run, plan, request, folder)
    # Without a survey the plan may need too much memory. If memory runs out, the task is surveyed and planned again.
    planned_without_survey = plan.device == "cuda" and not plan.predicted and request.planner == "auto" and request.saved_plan is None
    replan = partial(make_plan, recipe, cluster_of(machine), screen) if planned_without_survey else None
    ended = run_workers(job, plan, placement, screen, machine.gpus, request.verbose, replan, request.policy)
    finish(opened, recipe, plan, ended, screen)
    return ended
