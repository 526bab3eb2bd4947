"""Trains as a request says: on this machine alone, on several machines, or in the workers of another launcher."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

from drivetrain import runs
from drivetrain.launch import rendezvous
from drivetrain.launch.ending import raise_failure
from drivetrain.launch.foreign import train_in_launcher
from drivetrain.launch.local import resume_locally, train_locally
from drivetrain.launch.machine import cluster_of, detect_machine
from drivetrain.launch.nodes import train_on_nodes
from drivetrain.launch.opening import named_run
from drivetrain.launch.planning import plan_run, with_global_batch_of
from drivetrain.launch.request import Request
from drivetrain.launch.watcher import LaunchedWorker
from drivetrain.outcomes import Outcome, Problem
from drivetrain.processes.worker import REPEATED_SECONDS
from drivetrain.recipe import Recipe
from drivetrain.runs import Run
from drivetrain.supervise import JobEnd, handling_signals
from drivetrain.watch.screen import Screen


def train(recipe: Recipe, request: Request, screen: Screen, worker: LaunchedWorker | None = None) -> tuple[Run, JobEnd]:
    """Trains one recipe, in a new or an existing run. `worker`: what this process needs if it is a worker of another launcher."""
    if worker is not None:
        return train_in_launcher(recipe, request, screen, worker)
    machine = detect_machine(request)
    # Planned before anything is written, so that a wrong setting leaves no files. Planning again later is fast, because of the cache.
    plan = plan_run(recipe, request, cluster_of(machine, nodes=request.nodes), None, screen)
    recipe = with_global_batch_of(plan, recipe)
    check_request(recipe, request)
    if request.nodes > 1:
        return train_on_nodes(recipe, request, machine, plan, screen)
    return train_locally(recipe, request, machine, screen)


def resume(run: Run, recipe: Recipe, request: Request, screen: Screen, worker: LaunchedWorker | None = None) -> tuple[Run, JobEnd]:
    """Continues a run."""
    if worker is not None:
        return train_in_launcher(recipe, replace(request, run_dir=str(run.path)), screen, worker)
    return resume_locally(run, recipe, request, screen)


@contextlib.contextmanager
def ending_as_preempted() -> Iterator[None]:
    """Before there are workers, SIGTERM, SIGUSR1 and SIGHUP end the command with the outcome `preempted`: repeating it is right."""

    ended_at = -math.inf

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal ended_at
        if time.monotonic() - ended_at < REPEATED_SECONDS:
            return
        ended_at = time.monotonic()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Problem("stopped before the first step; the same command starts it again", Outcome.PREEMPTED)

    with handling_signals(end):
        yield


def train_stages(recipes: list[Recipe], request: Request, screen: Screen, worker: LaunchedWorker | None = None) -> tuple[Run, JobEnd]:
    """Trains the stages of a recipe, in order; a stage may use the run directories of earlier ones. Finished stages are not trained again.
    Returns the last run; raises Problem if a stage fails."""
    assert recipes, "a recipe has at least one stage"
    paths: dict[str, Path] = {}
    for recipe in recipes:
        own_request = request if recipe is recipes[-1] else replace(request, upload=None)
        run, ended = train(recipe.with_paths(paths), request_of_stage(recipe, recipes, own_request), screen, worker)
        raise_failure(ended, run)
        if ended.outcome is not Outcome.OK:
            break
        paths[recipe.stage] = run.path.resolve()
    return run, ended


def request_of_stage(recipe: Recipe, recipes: list[Recipe], request: Request) -> Request:
    """Returns the request for one stage: if there are several, its folder is in the folder that the user named."""
    if len(recipes) == 1 or not recipe.name or not (request.name or request.run_dir):
        return request
    base = Path(request.run_dir) if request.run_dir else runs.RUNS / str(request.name)
    return replace(request, name=None, run_dir=str(base / recipe.name.rpartition("/")[2]))


def check_request(recipe: Recipe, request: Request) -> None:
    """Raises Problem for requests that `train` refuses before it writes or locks anything."""
    if request.nodes == 1:
        named_run(recipe, request)
    elif request.rendezvous is None:
        raise Problem(f"--nodes {request.nodes} needs --rendezvous HOST:PORT, the same on each machine (HOST is one of them)")
    else:  # the run's folder may be on another machine
        rendezvous.parse(request.rendezvous)


def check_start(recipe: Recipe) -> None:
    """Raises Problem if the weights that the setting `start` names do not exist. Those of an earlier stage may come later."""
    start = recipe.settings["start"]
    if start is None or "start" in recipe.references:
        return
    if not start.endswith(".safetensors"):
        runs.find(start)
    elif not Path(start).is_file():
        raise Problem(f"start={start}: there is no such file")
