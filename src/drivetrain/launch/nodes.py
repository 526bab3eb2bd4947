"""Training on several machines: one leads, and keeps the run; the others follow."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, replace
from pathlib import Path

from drivetrain import runs
from drivetrain.launch import opening, rendezvous
from drivetrain.launch import start as launch
from drivetrain.launch.rendezvous import Leader, Membership
from drivetrain.launch.rendezvous.messages import StartAttempt
from drivetrain.launch.start import Machine, Request
from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan
from drivetrain.recipe import Recipe
from drivetrain.runs import Run
from drivetrain.supervise import Ended, Place, Supervisor, supervised
from drivetrain.watch.screen import Screen


def train(recipe: Recipe, request: Request, machine: Machine, own: Plan, screen: Screen) -> tuple[Run, Ended]:
    """`own` is the plan that this machine made by itself: a member takes no paths from the leader's."""
    assert request.rendezvous is not None, "check_request asks for it"
    same = recipe.identity()
    same["settings"] = {k: v for k, v in same["settings"].items() if k != "start"}  # stages put a path of this machine there
    nodes = (request.least_nodes or request.nodes, request.nodes)
    me = rendezvous.join(
        rendezvous.parse(request.rendezvous), nodes, machine.procs, request.node_rank, lambda text: screen.line("nodes", text), same
    )
    if isinstance(me, Leader):
        return _lead(me, recipe, request, machine, screen)
    run = Run("")

    def supervisor_of(start: StartAttempt, place: Place) -> Supervisor:
        nonlocal run
        run = _own_run(start.run, request)
        job = launch.make_job(recipe, run, start.plan, "train", request=request)
        job["task"] = asdict(recipe.task)  # the same code, and surely here
        return stack.enter_context(supervised(job, start.plan, place, screen, machine.gpus, request.verbose, policy=request.policy))

    with contextlib.ExitStack() as stack:
        ended = rendezvous.follow(me, supervisor_of, lambda plan: replace(plan, deepspeed_config=own.deepspeed_config))
    return run, ended


def _own_run(name: str, request: Request) -> Run:
    """Where this machine keeps the run: its own --run-dir, or that name in its own folder of runs. The leader names no path."""
    return Run(Path(request.run_dir) if request.run_dir else runs.RUNS / name)


def _lead(leader: Leader, recipe: Recipe, request: Request, machine: Machine, screen: Screen) -> tuple[Run, Ended]:
    """On the machine that owns the rendezvous: open the run, plan each attempt, and write how it all ended."""
    ended = Ended(Outcome.INFRA, "the machine that led the run stopped")
    try:
        members = leader.gather()
        opened = opening.open_run(recipe, request)
        leader.event = opened.run.log_event
        with opening.held(opened):
            if opened.finished:
                ended = launch.already_finished(opened, screen)
                return opened.run, ended

            def plan_for(members: Membership) -> Plan:
                """The plan of the run so far, where the machines are the same; else a new one."""
                place = Place(0, machine.procs, members.world_size, ("", 0))
                before = opened.run.read()
                plan = launch.make_plan(recipe, machine, place, members.nodes, before, request, screen)
                if before["plan"]["world_size"] != members.world_size:
                    screen.line("plan", plan.sentence())
                    with contextlib.suppress(OSError):  # a full disk
                        opened.run.update(plan=plan.to_json())
                return plan

            place = Place(0, machine.procs, members.world_size, ("", 0))
            plan = launch.make_plan(recipe, machine, place, members.nodes, opened.before, request, screen)
            launch.header(recipe, machine, plan, screen, opened.why)
            launch.record(recipe, opened, plan, machine)
            opened.run.log_event("started", world_size=members.world_size, device=plan.device)
            folder = opened.before["folder"] if opened.before else None
            job = launch.make_job(recipe, opened.run, plan, "train", folder, request)
            with supervised(job, plan, place, screen, machine.gpus, request.verbose, policy=request.policy) as supervisor:
                supervisor.leads = True
                try:
                    ended = rendezvous.lead(leader, supervisor, members, plan_for, run_name(opened.run))
                except Problem as problem:  # machines that did not come back
                    ended = Ended(problem.outcome, str(problem), {"step": opened.run.last_checkpoint_step})
            launch.finish(opened, recipe, supervisor.plan, ended, screen)
            return opened.run, ended
    except Problem as problem:
        ended = Ended(problem.outcome, str(problem))
        raise
    finally:
        leader.end(ended.outcome, ended.message)


def run_name(run: Run) -> str:
    """The run's name for other machines: its place in the folder of runs, or its folder's own name where it is elsewhere."""
    return run.path.name if Path(run.name).is_absolute() or ".." in Path(run.name).parts else run.name
