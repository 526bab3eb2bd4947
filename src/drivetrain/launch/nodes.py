"""Trains on several machines: the leader has the run's directory, and the members take part in its attempts."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from drivetrain import runs
from drivetrain.launch import rendezvous
from drivetrain.launch.bucket import mirrored
from drivetrain.launch.ending import finish
from drivetrain.launch.job import make_train_job
from drivetrain.launch.machine import LocalMachine, cluster_of
from drivetrain.launch.opening import OpenedRun, locked, open_run, record_start
from drivetrain.launch.planning import plan_run
from drivetrain.launch.rendezvous import Leader, Member, Membership
from drivetrain.launch.rendezvous.messages import StartAttempt
from drivetrain.launch.report import report_already_finished, report_start
from drivetrain.launch.request import Request
from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan
from drivetrain.recipe import Recipe
from drivetrain.runs import Run
from drivetrain.supervise import JobEnd, Supervisor, WorkerPlacement, supervised
from drivetrain.watch.screen import Screen


def train_on_nodes(recipe: Recipe, request: Request, machine: LocalMachine, own_plan: Plan, screen: Screen) -> tuple[Run, JobEnd]:
    """Joins the other machines and trains with them. `own_plan` is the plan that this machine made by itself."""
    assert request.rendezvous is not None, "check_request asks for it"
    identity = recipe.identity()
    # The weights to start from may be a path of this machine.
    identity["settings"] = {name: value for name, value in identity["settings"].items() if name != "start"}
    node = rendezvous.join(
        rendezvous.parse(request.rendezvous), request.node_range, machine.procs, request.node_rank,
        lambda text: screen.line("nodes", text), identity,
    )  # fmt: skip
    if isinstance(node, Leader):
        return _lead(node, recipe, request, machine, screen)
    return _follow(node, recipe, request, machine, own_plan, screen)


# --- a member ----------------------------------------------------------------------------------


def _follow(member: Member, recipe: Recipe, request: Request, machine: LocalMachine, own_plan: Plan, screen: Screen) -> tuple[Run, JobEnd]:
    """Takes part in the leader's attempts until the run has ended."""
    run = _own_run(request.name or recipe.name or "", request)  # where the leader finds a finished run, no attempt names it

    def make_supervisor(start: StartAttempt, placement: WorkerPlacement) -> Supervisor:
        nonlocal run
        run = _own_run(start.run, request)
        job = make_train_job(recipe, run, start.plan, request)
        job = replace(
            job, task=recipe.task
        )  # its own file, because this machine may have no copy in a run; the digests of the code are equal
        return stack.enter_context(supervised(job, start.plan, placement, screen, machine.gpus, request.verbose, policy=request.policy))

    with contextlib.ExitStack() as stack:
        # The path of the DeepSpeed file is that of this machine, not the leader's.
        ended = rendezvous.follow(member, make_supervisor, lambda plan: replace(plan, deepspeed_config=own_plan.deepspeed_config))
    return run, replace(ended, is_member=True)


def _own_run(name: str, request: Request) -> Run:
    """Returns this machine's directory of the run: its own --run-dir, or the leader's name in this machine's runs/."""
    return Run(Path(request.run_dir) if request.run_dir else runs.RUNS / name)


# --- the leader --------------------------------------------------------------------------------


def _lead(leader: Leader, recipe: Recipe, request: Request, machine: LocalMachine, screen: Screen) -> tuple[Run, JobEnd]:
    """Opens the run, leads its attempts, and sends the members its end."""
    ended = JobEnd(Outcome.INFRA, "the leading machine of the run stopped")
    with contextlib.ExitStack() as stack:  # a bucket gets the last files when the members have gone
        try:
            members = leader.wait_for_members()
            stack.enter_context(mirrored(request, screen))
            opened = open_run(recipe, request)
            leader.log_event = opened.run.log_event
            with locked(opened):
                if opened.is_finished:
                    report_already_finished(opened.run, screen)
                    ended = JobEnd(Outcome.OK)
                else:
                    ended, plan = _lead_opened(leader, members, opened, recipe, request, machine, screen)
                    finish(opened, recipe, plan, ended, screen)
                return opened.run, ended
        except Problem as problem:
            ended = JobEnd(problem.outcome, str(problem))
            raise
        finally:
            leader.end_run(ended.outcome, ended.message)


def _lead_opened(
    leader: Leader, members: Membership, opened: OpenedRun, recipe: Recipe, request: Request, machine: LocalMachine, screen: Screen
) -> tuple[JobEnd, Plan]:
    """Leads attempts until the run has ended; returns its end, and the plan of the last attempt."""

    def plan_attempt(members: Membership) -> Plan:
        """Returns the run's plan; a new one if the number of processes has changed."""
        info = opened.run.read()
        plan = plan_run(recipe, request, cluster_of(machine, members.world_size, members.nodes), info, screen)
        if info["plan"]["world_size"] != members.world_size:
            screen.line("plan", plan.sentence())
            with contextlib.suppress(OSError):  # a full disk
                opened.run.update(plan=plan.to_json())
        return plan

    placement = WorkerPlacement(0, machine.procs, members.world_size, ("", 0))
    plan = plan_run(recipe, request, cluster_of(machine, members.world_size, members.nodes), opened.previous, screen)
    report_start(recipe, machine, plan, screen, opened.note)
    record_start(opened, recipe, plan, machine, request.upload)
    opened.run.log_event("started", world_size=members.world_size, device=plan.device)
    folder = opened.previous["folder"] if opened.previous else None
    job = make_train_job(recipe, opened.run, plan, request, folder)
    with supervised(job, plan, placement, screen, machine.gpus, request.verbose, policy=request.policy) as supervisor:
        supervisor.is_leader = True
        try:
            ended = rendezvous.lead(leader, supervisor, members, plan_attempt, _name_for_members(opened.run))
        except Problem as problem:  # lost machines did not come back
            ended = JobEnd(problem.outcome, str(problem), {"step": opened.run.last_checkpoint_step})
    return ended, supervisor.plan


def _name_for_members(run: Run) -> str:
    """Returns the run's path relative to runs/, or the name of its folder if it is not in runs/."""
    return run.path.name if Path(run.name).is_absolute() or ".." in Path(run.name).parts else run.name
