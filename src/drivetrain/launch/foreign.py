"""Trains in a worker of another launcher: every process runs the same command, and rank 0 opens the run and makes the plan."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain import hardware, runs, strict
from drivetrain.engine.log.observe import Observer, Observers
from drivetrain.launch.bucket import mirrored
from drivetrain.launch.ending import finish
from drivetrain.launch.job import make_train_job
from drivetrain.launch.machine import LocalMachine, cluster_of
from drivetrain.launch.opening import OpenedRun, discard, open_run, record_start, wait_for_lock
from drivetrain.launch.planning import plan_run
from drivetrain.launch.report import report_already_finished, report_start
from drivetrain.launch.request import Request
from drivetrain.launch.watcher import LaunchedWorker
from drivetrain.launch.watcher.worker_side import LeaderPort
from drivetrain.outcomes import Outcome, Problem
from drivetrain.processes.job import Job, from_json, to_json
from drivetrain.processes.worker import StopFlag, work
from drivetrain.recipe import Recipe
from drivetrain.runs import Run, record_plan, record_total_steps
from drivetrain.supervise import JobEnd, record_out_of_memory
from drivetrain.task_ref import TaskRef
from drivetrain.watch.screen import Screen

if TYPE_CHECKING:
    from drivetrain.engine.group import Group


class _PlanRecorder(Observer):
    """Writes changes of the plan into run.json, as the supervisor does for drivetrain's own processes."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def planned(self, facts: dict[str, Any]) -> None:
        record_plan(self.run, facts)

    def started(self, facts: dict[str, Any]) -> None:
        record_total_steps(self.run, facts["steps"])


def train_in_launcher(recipe: Recipe, request: Request, screen: Screen, worker: LaunchedWorker) -> tuple[Run, JobEnd]:
    """Trains this process's rank, together with the other workers of the launcher."""
    world_size, local_world_size = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if request.procs is not None and request.procs != world_size:
        raise Problem(f"--procs {request.procs}: {worker.launcher} started {world_size} processes; leave --procs out")
    screen.quiet |= int(os.environ["RANK"]) != 0
    machine = _machine(request, local_world_size)

    from drivetrain.engine.group import join_group

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while torch waits for other processes, Python runs no signal handler
    group = join_group(machine.device, "nccl" if machine.device == "cuda" else "gloo")
    stop = StopFlag()
    stop.install()
    with contextlib.ExitStack() as stack:  # rank 0 copies the run to its bucket until the end
        return _train_rank(recipe, request, machine, world_size, screen, worker, group, stop, stack)


def _train_rank(
    recipe: Recipe, request: Request, machine: LocalMachine, world_size: int, screen: Screen, worker: LaunchedWorker, group: Group,
    stop: StopFlag, stack: contextlib.ExitStack,
) -> tuple[Run, JobEnd]:  # fmt: skip
    opened, answer = _open_on_rank_0(recipe, request, machine, world_size, screen, worker, stack) if group.is_main else (None, {})
    answer = group.broadcast_object(answer)
    if "problem" in answer:
        raise Problem(answer["problem"] if group.is_main else "see the message of rank 0", Outcome(answer["outcome"]))
    if "finished" in answer:
        return Run(answer["finished"]), JobEnd(Outcome.OK)
    job = from_json(answer["job"])
    run = Run(job.run)
    heartbeat = worker.begin(run, strict.read(LeaderPort, answer["leader"]))
    result = _work(job, answer["code"], recipe, run, group, screen, stop, heartbeat)
    worker.end()
    screen.close()
    ended = JobEnd(Outcome(result["outcome"]), result.get("message", ""), result)
    if opened is not None:
        finish(opened, recipe, job.plan, ended, screen)
    return run, ended


def _machine(request: Request, local_world_size: int) -> LocalMachine:
    """Returns the devices that this process may use. The launcher decided how many processes share the machine."""
    detected = hardware.detect()
    device = request.device or ("cuda" if detected.gpus else "cpu")
    if request.device is None and os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1"):
        device = "cpu"
    elif device == "cuda":
        hardware.check_torch_can_use(detected, hardware.torch_build(), os.environ)
    return LocalMachine(detected, device, [], local_world_size)


# --- rank 0 ------------------------------------------------------------------------------------


def _open_on_rank_0(
    recipe: Recipe, request: Request, machine: LocalMachine, world_size: int, screen: Screen, worker: LaunchedWorker,
    stack: contextlib.ExitStack,
) -> tuple[OpenedRun | None, dict[str, Any]]:  # fmt: skip
    """Opens the run and makes the plan. Returns the answer for all ranks: the job, that the run is finished, or the problem."""
    opened: OpenedRun | None = None
    try:
        stack.enter_context(mirrored(request, screen))
        opened = _open(recipe, request)
        if opened.is_finished:
            report_already_finished(opened.run, screen)
            return opened, {"finished": str(opened.run.path.resolve())}
        nodes = math.ceil(world_size / machine.procs)
        plan = plan_run(recipe, request, cluster_of(machine, world_size, nodes), opened.previous, screen)
        notice = f"{world_size} processes, started by {worker.launcher}{_ignored_flags(request)}"
        report_start(recipe, machine, plan, screen, "; ".join(filter(None, [opened.note, notice])))
        record_start(opened, recipe, plan, machine, request.upload)
        opened.run.log_event("started", world_size=world_size, launcher=worker.launcher)
        job = make_train_job(recipe, opened.run, plan, request)
        return opened, {"job": to_json(job), "code": job.task.digest(), "leader": asdict(worker.leader)}
    except Problem as problem:
        if opened is not None:
            discard(opened)
        return opened, {"problem": str(problem), "outcome": problem.outcome}


def _open(recipe: Recipe, request: Request) -> OpenedRun:
    if request.run_dir or request.name or recipe.name:
        folder = Path(request.run_dir) if request.run_dir else runs.RUNS / str(request.name or recipe.name)
        if os.path.exists(folder / "lock"):  # a launcher may repeat the command before the old processes have ended
            wait_for_lock(folder, 5.0).release()
    return open_run(recipe, request)


def _ignored_flags(request: Request) -> str:
    """Returns a note about the flags that work only with drivetrain's own processes."""
    note = ""
    if request.restarts != Request.restarts:
        note += "; --restarts is ignored, because only the launcher can restart them (torchrun: --max-restarts)"
    if request.find_nan:
        note += "; --find-nan is ignored, because only drivetrain's own processes (--procs N) support it"
    return note


# --- every rank --------------------------------------------------------------------------------


def _work(
    job: Job, code: str, recipe: Recipe, run: Run, group: Group, screen: Screen, stop: StopFlag, heartbeat: Observer
) -> dict[str, Any]:
    """Trains this rank; returns its result, on rank 0 that of the run."""
    try:
        observer = Observers([screen, _PlanRecorder(run)]) if group.is_main else screen
        result = work(replace(job, task=_task_with_code(job, code, recipe)), group, observer, stop, [heartbeat])
    except Problem as problem:
        result = {"outcome": problem.outcome, "message": str(problem)}
    if result.get("smaller"):  # recorded by any rank: rank 0 may wait for this one until the launcher kills it
        record_out_of_memory(run, result["smaller"])
    result = _share_cause(result, group)
    if group.is_main and result.get("smaller"):
        record_out_of_memory(run, result["smaller"])
    return result


def _task_with_code(job: Job, code: str, recipe: Recipe) -> TaskRef:
    """Returns the task whose code has rank 0's digest: the run's copy, or without a shared file system this machine's own file."""
    for task in (job.task, recipe.task):
        with contextlib.suppress(OSError):
            if task.digest() == code:
                return task
    raise Problem(f"{recipe.task.path} is not the file that rank 0 trains: copy the same file to every machine")


def _share_cause(result: dict[str, Any], group: Group) -> dict[str, Any]:
    """Makes rank 0 return the cause of a failure: other ranks write their results into torch's store, and rank 0 reads them."""
    from torch import distributed as dist

    if group.size == 1 or Outcome(result["outcome"]) in (Outcome.OK, Outcome.PREEMPTED):
        return result
    store = dist.distributed_c10d._get_default_store()
    with contextlib.suppress(RuntimeError):  # the machine of the store may be lost
        if not group.is_main:
            store.set(f"drivetrain/{group.rank}", json.dumps({key: result.get(key) for key in ("outcome", "message", "smaller")}))
        elif result["outcome"] == Outcome.INFRA:
            keys = [f"drivetrain/{rank}" for rank in range(1, group.size)]
            others = [json.loads(store.get(key)) for key in keys if store.check([key])]
            return next((other for other in others if other["outcome"] != Outcome.INFRA), result)
    return result
