"""Gets a task's profile and its measured points, from the cache or from a child process."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from drivetrain.launch.machine import Cluster
from drivetrain.launch.plan_cache import points_cache, profile_cache
from drivetrain.launch.survey_process import WALL_LIMIT_SECONDS, SurveyProcess
from drivetrain.outcomes import Problem
from drivetrain.plan import Plan
from drivetrain.plan.capacity import MachineCapacity
from drivetrain.plan.fit import Point, sizes_to_measure
from drivetrain.plan.predict_time import step_seconds
from drivetrain.plan.profile import MAX_PARAMETERS_WITH_VALUES, Profile
from drivetrain.plan.rating import Rater
from drivetrain.processes.job import ProbeJob, SurveyJob
from drivetrain.recipe import Recipe
from drivetrain.watch.screen import Screen

MAX_SHARE = 0.05  # `train` may spend this share of the run's time on planning
MIN_SECONDS = 3.0  # or this much, if the share is less


@dataclass(frozen=True)
class SurveyBudget:
    """How long a training may wait for the survey of its task."""

    recipe: Recipe
    machine: MachineCapacity
    world_size: int

    def limit_seconds(self, sizes: dict[str, Any] | None) -> float:
        """Returns a share of the run's shortest possible time, which follows from the model's sizes. If the model's state takes half of
        a device, planning matters most, and the limit is an hour."""
        if sizes is None:
            return MIN_SECONDS
        if sizes["parameter_bytes"] + sizes["trained_bytes"] + sizes["optimizer_bytes"] > 0.5 * self.machine.usable_bytes:
            return WALL_LIMIT_SECONDS
        global_batch = self.recipe.settings["global_batch"]
        steps = total_steps(self.recipe, sizes["samples"], global_batch)
        flops = 6.0 * sizes["trained"] * steps * global_batch / self.world_size
        return float(MAX_SHARE * flops / (0.5e12 * max(self.machine.card.fp32, self.machine.card.bf16)))


def total_steps(recipe: Recipe, num_samples: int, global_batch: int) -> int:
    """Returns the number of optimizer steps of a run."""
    return int(recipe.settings["steps"] or recipe.settings["epochs"] * -(-num_samples // global_batch))


# --- the profile -------------------------------------------------------------------------------


def profile_task(recipe: Recipe, plan: Plan, screen: Screen, fresh: bool = False, budget: SurveyBudget | None = None) -> Profile | None:
    """Returns the task's profile, from the cache (unless `fresh`) or from a child process. Returns None if that takes longer than the
    budget: the child then finishes during the training, and the next plan finds the profile in the cache."""
    cache = profile_cache(recipe, plan)
    cached = None if fresh else cache.read()
    if cached is not None:
        return Profile.from_json(cached)
    screen.busy("measuring the task's memory and work ...")
    sizes: dict[str, Any] = {}
    crash = ""
    for with_values in (False, True):
        child = SurveyProcess(SurveyJob, recipe, plan, {"CUDA_VISIBLE_DEVICES": ""}, with_values=with_values)  # tracing needs shapes only
        if not ended_in_time(child, budget):
            child.finish_in_background(cache.write)
            return None
        sizes = child.sizes() or sizes
        if (result := child.result()) is not None:
            cache.write(result)
            return Profile.from_json(result)
        crash = crash or f"the process that traced it {child.failure()}"
        if child.was_killed or sizes.get("parameters", 0) > MAX_PARAMETERS_WITH_VALUES:
            break
    return Profile.of_sizes(sizes, crash)


def ended_in_time(child: SurveyProcess, budget: SurveyBudget | None) -> bool:
    """Waits until the child ends; returns False if it exceeds the budget. Raises Problem if it seems to hang."""
    start_time = time.monotonic()
    while not child.wait(0.05):
        waited = time.monotonic() - start_time
        if child.seems_to_hang(waited):
            child.kill()
            raise Problem(f"tracing the task's model, data and loss took longer than {waited:.0f} s: --planner off skips it")
        if budget is not None and waited > MIN_SECONDS and waited > budget.limit_seconds(child.sizes()):
            return False
    return True


# --- measured points ---------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuredPoints:
    points: list[Point]
    limit_seconds: float | None
    """The time limit that ended the measuring; None: it ran to its end."""

    def suffices(self, limit_seconds: float | None) -> bool:
        """Whether measuring again with this limit would give few or no more points."""
        return self.limit_seconds is None or (limit_seconds is not None and limit_seconds < 2 * self.limit_seconds)


def cached_points(recipe: Recipe, plan: Plan, cluster: Cluster, fresh: bool = False) -> MeasuredPoints:
    cached = None if fresh or cluster.hardware.described else points_cache(recipe, plan, cluster.hardware).read()
    if not cached:
        return MeasuredPoints([], 0.0)
    return MeasuredPoints([Point(**point) for point in cached["points"]], cached["limit"])


def measure_points(
    recipe: Recipe, plan: Plan, cluster: Cluster, machine: MachineCapacity, profile: Profile, screen: Screen, limit_seconds: float | None
) -> list[Point]:
    """Measures a few micro-batches and caches the points. It uses a child process, because memory may run out."""
    rater = Rater(profile, machine, plan.global_batch, cluster.world_size, cluster.nodes)
    candidate = rater.candidates({}, deepspeed=False)[0]
    fitting = [size for size in sorted(rater.micro_batches({})) if rater.rate(candidate, size).fits]
    sizes = sizes_to_measure(fitting, plan.micro_batch)

    def work_seconds(size: int) -> float:
        return step_seconds(profile, replace(candidate, micro_batch=size, accumulation=1), machine)["work"]

    predicted = [(size, work_seconds(size)) for size in {*fitting, *sizes}]
    screen.busy(f"measuring steps with micro-batches of {', '.join(map(str, sizes))} ...")
    environment = {"CUDA_VISIBLE_DEVICES": cluster.gpu} if cluster.gpu else {}
    child = SurveyProcess(ProbeJob, recipe, plan, environment, micro_batches=sizes, predicted=predicted)
    has_ended = child.wait(limit_seconds)
    if not has_ended:
        child.kill()
    points = child.result()
    if has_ended and points is None:
        screen.notice(f"nothing was measured: the process that took steps {child.failure()}")
    points = points or []
    points_cache(recipe, plan, cluster.hardware).write({"points": points, "limit": None if has_ended else limit_seconds})
    return [Point(**point) for point in points]
