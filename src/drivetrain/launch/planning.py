"""Returns the plan for a recipe and a cluster: the run's old plan, the one in `--plan FILE`, or a new one."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from enum import Enum
from typing import Any

from drivetrain.launch.machine import Cluster
from drivetrain.launch.plan_cache import profile_cache
from drivetrain.launch.profiling import MAX_SHARE, SurveyBudget, cached_points, measure_points, profile_task, total_steps
from drivetrain.launch.request import Planner, Request
from drivetrain.outcomes import Problem
from drivetrain.plan import Plan
from drivetrain.plan.capacity import MachineCapacity
from drivetrain.plan.choose import choose
from drivetrain.plan.deepspeed import is_deepspeed_installed
from drivetrain.plan.environment import allowed_variables
from drivetrain.plan.profile import Profile
from drivetrain.plan.table import ORIGIN, table
from drivetrain.recipe import Recipe
from drivetrain.watch.screen import Screen

MIN_MEASURING_SECONDS = 15.0  # with less time, starting CUDA and loading the data would leave none to measure


class Measure(Enum):
    """Whether steps are measured on this machine."""

    NEVER = "never"
    ALWAYS = "always"
    IF_WORTHWHILE = "if worthwhile"
    """Only if surveying and measuring take a small share of the run's time."""


# --- the plan of a run -------------------------------------------------------------------------


def plan_run(recipe: Recipe, request: Request, cluster: Cluster, previous: dict[str, Any] | None, screen: Screen | None = None) -> Plan:
    """Returns the plan of a run. `previous` is the run.json of a run that continues: it keeps its plan, unless processes, device or pins
    changed."""
    if previous is not None:
        old_plan = Plan.from_json(previous["plan"])
        has_same_pins = previous["recipe"]["pins"] == json.loads(json.dumps(recipe.pins))
        if has_same_pins and _is_for(old_plan, cluster):
            return old_plan
        recipe = replace(recipe, settings=recipe.settings | {"precision": old_plan.precision})  # a run never changes its precision
    if request.saved_plan is not None:
        return _check_saved_plan(request.saved_plan, cluster)
    # The table may change the global batch, which must not change in a run.
    planner = "off" if request.planner == "table" and previous is not None else request.planner
    # On a CPU a survey costs more than it gains: a process takes its whole share of the batch, unless a cached profile shows that it does not fit.
    on_gpu = cluster.device == "cuda"
    return make_plan(recipe, cluster, screen or Screen(quiet=True), planner, Measure.IF_WORTHWHILE, survey=on_gpu)


def _is_for(plan: Plan, cluster: Cluster) -> bool:
    return (plan.world_size, plan.nodes, plan.device) == (cluster.world_size, cluster.nodes, cluster.device)


def _check_saved_plan(plan: Plan, cluster: Cluster) -> Plan:
    if not _is_for(plan, cluster):
        raise Problem(
            f"--plan is for {plan.world_size} processes on {plan.nodes} machines ({plan.device}), but there are {cluster.world_size} on"
            f" {cluster.nodes} ({cluster.device}): make one for this machine with drivetrain plan TASK --json"
        )
    return replace(plan, reasons=plan.reasons | {"plan": "as saved"})


def with_global_batch_of(plan: Plan, recipe: Recipe) -> Recipe:
    """Returns the recipe with the plan's global batch, which differs only if the guide's table (`--planner table`) set it."""
    if plan.global_batch == recipe.settings["global_batch"]:
        return recipe
    notice = f"global_batch={plan.global_batch}, not {recipe.settings['global_batch']}: {plan.reasons['global_batch']}"
    return replace(
        recipe, settings=recipe.settings | {"global_batch": plan.global_batch}, origin=recipe.origin | {"global_batch": ORIGIN},
        notices=(*recipe.notices, notice),
    )  # fmt: skip


# --- a new plan --------------------------------------------------------------------------------


def make_plan(
    recipe: Recipe, cluster: Cluster, screen: Screen, planner: Planner = "auto", measure: Measure = Measure.NEVER, fresh: bool = False,
    survey: bool = True,
) -> Plan:  # fmt: skip
    """Makes a plan. It uses cached profiles and measured points, unless `fresh`. `survey`: whether a task without a cached profile may
    be surveyed."""
    # The user's environment variables override the plan's. In a launcher's worker they are the launcher's, so they do not count.
    users_variables = {} if cluster.hardware.described or "RANK" in os.environ else allowed_variables(os.environ)
    threads = users_variables.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > 0 and "threads" not in recipe.pins:
        recipe = replace(recipe, pins=recipe.pins | {"threads": int(threads)})
    plan = _plan(recipe, cluster, screen, planner, measure, fresh, survey)
    overridden = ("PYTORCH_CUDA_ALLOC_CONF",) if "PYTORCH_ALLOC_CONF" in users_variables else ()  # the old name of the same variable
    env = {name: value for name, value in plan.env.items() if name not in overridden}
    return replace(plan, env=env | users_variables)


def _plan(recipe: Recipe, cluster: Cluster, screen: Screen, planner: Planner, measure: Measure, fresh: bool, survey: bool) -> Plan:
    if planner == "table":
        return table(
            recipe.settings, cluster.hardware, **_cluster_arguments(cluster), pins=recipe.pins,
            deepspeed_installed=is_deepspeed_installed(),
        )  # fmt: skip
    start_time = time.monotonic()
    unpredicted_plan = _choose(recipe, cluster)
    if recipe.awaits_files:
        return _with_note(unpredicted_plan, "not predicted: the task reads files of an earlier stage, which is not trained yet")
    if planner == "off" or (not survey and profile_cache(recipe, unpredicted_plan).read() is None):
        return unpredicted_plan
    machine = MachineCapacity.of(cluster.hardware, cluster.device, cluster.local_procs)
    budget = SurveyBudget(recipe, machine, cluster.world_size) if measure is Measure.IF_WORTHWHILE else None
    profile = profile_task(recipe, unpredicted_plan, screen, fresh, budget)
    if profile is None or not profile.parameters:
        why = "that would take longer than it gains; the next plan will have it" if profile is None else profile.traced
        return _with_note(unpredicted_plan, f"not predicted: {why}")
    if profile.plain is None:
        why = f"could not be traced: {profile.traced}; the memory counts parameters, gradients and optimizer state, but not activations"
        return _with_note(_choose(recipe, cluster, profile), why)
    cached = cached_points(recipe, unpredicted_plan, cluster, fresh)
    plan = _choose(recipe, cluster, profile, cached.points)
    if measure is Measure.NEVER or not survey or plan.strategy not in ("single", "ddp"):
        return plan
    limit_seconds = None
    if measure is not Measure.ALWAYS:
        limit_seconds = MAX_SHARE * _total_seconds(recipe, profile, plan) - (time.monotonic() - start_time)
    if cached.suffices(limit_seconds) or (limit_seconds is not None and limit_seconds < MIN_MEASURING_SECONDS):
        return plan
    points = measure_points(recipe, plan, cluster, machine, profile, screen, limit_seconds)
    return _choose(recipe, cluster, profile, points) if points else plan


def _cluster_arguments(cluster: Cluster) -> dict[str, Any]:
    return {"device": cluster.device, "world_size": cluster.world_size, "local_procs": cluster.local_procs, "nodes": cluster.nodes}


def _choose(recipe: Recipe, cluster: Cluster, profile: Profile | None = None, points: Any = ()) -> Plan:
    return choose(recipe.settings, cluster.hardware, **_cluster_arguments(cluster), pins=recipe.pins, profile=profile, points=points)


def _with_note(plan: Plan, why: str) -> Plan:
    return replace(plan, reasons=plan.reasons | {"predicted": why})


def _total_seconds(recipe: Recipe, profile: Profile, plan: Plan) -> float:
    return total_steps(recipe, profile.samples, plan.global_batch) * float(plan.predicted["step_seconds"])
