"""Training on several machines: one leads, and keeps the run; the others follow."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import Any

from drivetrain import rendezvous
from drivetrain.cli import launch, opening
from drivetrain.cli.launch import Machine, Request
from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan
from drivetrain.recipe import Recipe
from drivetrain.rendezvous import Crew, Host
from drivetrain.runs import Run
from drivetrain.supervise import Ended, Place, Supervisor, supervised
from drivetrain.watch.screen import Screen


def train(recipe: Recipe, request: Request, machine: Machine, screen: Screen) -> tuple[Run, Ended]:
    assert request.rendezvous is not None, "check_request asks for it"
    same = recipe.identity()
    same["settings"] = {k: v for k, v in same["settings"].items() if k != "start"}  # stages put a path of this machine there
    nodes = (request.least_nodes or request.nodes, request.nodes)
    me = rendezvous.come(
        rendezvous.parse(request.rendezvous), nodes, machine.procs, request.node_rank, lambda text: screen.line("nodes", text), same
    )
    if isinstance(me, rendezvous.Host):
        return _lead(me, recipe, request, machine, screen)

    def supervisor_of(offer: dict[str, Any], plan: Plan, place: Place) -> Supervisor:
        job = launch.make_job(recipe, Run(offer["path"]), plan, "train", request=request)
        job["task"] = asdict(recipe.task)  # the same code, and surely here
        return stack.enter_context(supervised(job, plan, place, screen, machine.gpus, request.verbose, policy=request.policy))

    with contextlib.ExitStack() as stack:
        offer, ended = rendezvous.follow(me, supervisor_of)
    return Run(offer.get("path", "")), ended


def _lead(host: Host, recipe: Recipe, request: Request, machine: Machine, screen: Screen) -> tuple[Run, Ended]:
    """On the machine that owns the rendezvous: open the run, plan each attempt, and write how it all ended."""
    ended = Ended(Outcome.INFRA, "the machine that led the run stopped")
    try:
        crew = host.gather()
        opened = opening.open_run(recipe, request)
        with opening.held(opened):
            if opened.finished:
                ended = launch.already_finished(opened, screen)
                return opened.run, ended

            def plan_for(crew: Crew) -> Plan:
                """The plan of the run so far, where the machines are the same; else a new one."""
                place = Place(0, machine.procs, crew.world, ("", 0))
                before = opened.run.read()
                plan = launch.make_plan(recipe, machine, place, crew.nodes, before, request, screen)
                if before["plan"]["world_size"] != crew.world:
                    screen.line("plan", plan.sentence())
                    with contextlib.suppress(OSError):  # a full disk
                        opened.run.update(plan=plan.to_json())
                return plan

            place = Place(0, machine.procs, crew.world, ("", 0))
            plan = launch.make_plan(recipe, machine, place, crew.nodes, opened.before, request, screen)
            launch.header(recipe, machine, plan, screen, opened.why)
            launch.record(recipe, opened, plan, machine)
            opened.run.event("started", world_size=crew.world, device=plan.device)
            folder = opened.before["folder"] if opened.before else None
            job = launch.make_job(recipe, opened.run, plan, "train", folder, request)
            with supervised(job, plan, place, screen, machine.gpus, request.verbose, policy=request.policy) as supervisor:
                supervisor.leads = True
                offer = {"run": opened.run.name, "path": str(opened.run.path)}
                try:
                    ended = rendezvous.lead(host, supervisor, crew, plan_for, lambda plan: offer | {"plan": plan.to_json()})
                except Problem as problem:  # machines that did not come back
                    ended = Ended(problem.outcome, str(problem), {"step": opened.run.last_step})
            launch.finish(opened, recipe, supervisor.plan, ended, screen)
            return opened.run, ended
    except Problem as problem:
        ended = Ended(problem.outcome, str(problem))
        raise
    finally:
        host.end(ended.outcome, ended.message)
