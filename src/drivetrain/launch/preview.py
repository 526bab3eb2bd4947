"""What the verb `plan` predicts: the cluster to plan for, the totals of a run, and the speed of another plan."""

from __future__ import annotations

from typing import Any

from drivetrain.hardware.described import parse
from drivetrain.launch.machine import Cluster, cluster_of, detect_machine
from drivetrain.launch.profiling import total_steps
from drivetrain.launch.request import Request
from drivetrain.outcomes import Problem
from drivetrain.plan import Plan
from drivetrain.plan.candidates import Candidate
from drivetrain.plan.capacity import MachineCapacity
from drivetrain.plan.profile import Profile
from drivetrain.plan.rating import RatedCandidate, Rater
from drivetrain.recipe import Recipe


def cluster_to_plan_for(request: Request, description: str | None) -> Cluster:
    """Returns this machine, or the described one, with the nodes and processes that the request names."""
    if description is None:
        return cluster_of(detect_machine(request), nodes=request.nodes)
    hardware = parse(description)
    procs = request.procs or max(1, len(hardware.gpus))
    if hardware.gpus and procs > len(hardware.gpus):
        raise Problem(f"--procs {procs}: {description} has {len(hardware.gpus)} GPUs a machine; at most one process each")
    if hardware.nodes > 1 and request.nodes not in (1, hardware.nodes):
        raise Problem(f"--nodes {request.nodes} and {description!r} do not agree: leave out one of them")
    nodes = max(request.nodes, hardware.nodes)
    device = request.device or ("cuda" if hardware.gpus else "cpu")
    return Cluster(hardware, device, procs * nodes, procs, nodes)


def run_totals(recipe: Recipe, plan: Plan, cluster: Cluster, num_samples: int | None, gpu_hour_price: float | None) -> dict[str, Any]:
    """Returns the samples, steps, seconds and, with a price, the cost of a run; {} if its speed is unknown."""
    if num_samples is None or "step_seconds" not in plan.predicted:
        return {}
    steps = total_steps(recipe, num_samples, plan.global_batch)
    seconds = steps * plan.predicted["step_seconds"]
    cost = {} if gpu_hour_price is None else {"cost": seconds / 3600 * cluster.world_size * gpu_hour_price, "price": gpu_hour_price}
    return {"samples": num_samples, "steps": steps, "seconds": seconds} | cost


def rate_plan(plan: Plan, profile: Profile, cluster: Cluster) -> RatedCandidate:
    """Predicts the memory and speed of a plan that was made without predictions."""
    machine = MachineCapacity.of(cluster.hardware, cluster.device, cluster.local_procs)
    rater = Rater(profile, machine, plan.global_batch, cluster.world_size, cluster.nodes)
    candidate = Candidate(
        plan.strategy, plan.micro_batch, plan.accumulation, plan.world_size, plan.nodes, plan.zero_stage,
        plan.activation_checkpointing and profile.checkpointed is not None, plan.offload,
    )  # fmt: skip
    return rater.rate(candidate, plan.micro_batch)
