"""Workers that another launcher started: torchrun, accelerate, deepspeed, srun, a PyTorchJob.

Each process runs the whole command; they meet, rank 0 opens the run and plans, and all train.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
from collections.abc import MutableMapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain import hardware, runs
from drivetrain.launch import opening
from drivetrain.launch import start as launch
from drivetrain.launch.opening import Opened
from drivetrain.launch.start import Machine, Request
from drivetrain.outcomes import Outcome, Problem
from drivetrain.processes.worker import StopFlag, work
from drivetrain.recipe import Recipe
from drivetrain.runs import Run
from drivetrain.supervise import Ended, Place, record_shortage
from drivetrain.task_ref import TaskRef
from drivetrain.watch.screen import Screen

if TYPE_CHECKING:
    from drivetrain.engine.group import Group


def launcher(environment: MutableMapping[str, str]) -> str | None:
    """The launcher that started this process as one of its workers, if one did; completes its variables."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        environment.setdefault("LOCAL_RANK", "0")
        environment.setdefault("LOCAL_WORLD_SIZE", environment.get("LOCAL_SIZE", "1"))  # LOCAL_SIZE is DeepSpeed's
        environment.setdefault("MASTER_ADDR", "127.0.0.1")
        environment.setdefault("MASTER_PORT", "29500")
        if "TORCHELASTIC_RUN_ID" in environment:
            return "accelerate" if "ACCELERATE_MIXED_PRECISION" in environment else "torchrun"
        return "deepspeed" if "CROSS_SIZE" in environment else "the environment (RANK, WORLD_SIZE)"
    if "SLURM_STEP_ID" in environment and int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and "SLURM_PROCID" in environment:
        _from_slurm(environment)
        return "srun"
    return None


def _from_slurm(environment: MutableMapping[str, str]) -> None:
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = environment["SLURM_STEP_NUM_TASKS"]
    environment["LOCAL_RANK"] = environment.get("SLURM_LOCALID", "0")
    tasks = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", environment["WORLD_SIZE"]))
    environment["LOCAL_WORLD_SIZE"] = str(tasks[int(environment.get("SLURM_NODEID", 0))])
    first = first_host(environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_NODELIST", "")))
    if environment.get("SLURM_STEP_NUM_NODES", "1") == "1":
        first = "127.0.0.1"
    else:
        try:
            socket.gethostbyname(first)
        except OSError:  # a name only Slurm knows: the machine that runs srun is one all can reach
            first = environment.get("SLURM_LAUNCH_NODE_IPADDR", first)
    environment.setdefault("MASTER_ADDR", first)
    number = int(environment.get("SLURM_JOB_ID", 0)) * 31 + int(environment["SLURM_STEP_ID"])
    environment.setdefault("MASTER_PORT", str(20000 + number % 10000))


def first_host(nodes: str) -> str:
    """The first name of a Slurm node list: n[01-03,7],m2 -> n01."""
    match = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\])?([^,]*)", nodes)
    return f"{match[1]}{match[2] or ''}{match[3]}" if match else nodes


def tasks_per_node(text: str) -> list[int]:
    """Slurm's short form, written out: 2(x3),1 -> 2, 2, 2, 1."""
    parts = (part.rstrip(")").split("(x") for part in text.split(","))
    return [int(count) for count, *times in parts for _ in range(int(times[0]) if times else 1)]


def accelerate_choices(recipe: Recipe, environment: MutableMapping[str, str], started: str | None) -> Recipe:
    """Honour what `accelerate launch` was told, where the recipe leaves it open, and say so."""
    notices = list(recipe.notices)
    settings, origin, pins = dict(recipe.settings), dict(recipe.origin), dict(recipe.pins)
    if "ACCELERATE_MIXED_PRECISION" not in environment:
        return recipe
    asked = environment["ACCELERATE_MIXED_PRECISION"]
    if asked in ("fp16", "bf16") and origin["precision"] == "default":
        settings["precision"], origin["precision"] = asked, "accelerate"
        notices.append(f"precision={asked}, as accelerate launch was told")
    steps = environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps.isdigit() and int(steps) > 1 and not {"accumulation", "micro_batch"} & pins.keys():
        pins["accumulation"] = steps
        notices.append(f"plan.accumulation={steps}, as accelerate launch was told (the global batch stays {settings['global_batch']})")
    if started is None:
        notices.append(
            "accelerate launch started one process (on a CPU it does so whatever --num_processes says): for more, use --procs N here, or torchrun"
        )
    return replace(recipe, settings=settings, origin=origin, pins=pins, notices=tuple(notices))


def train(recipe: Recipe, request: Request, screen: Screen, started: str) -> tuple[Run, Ended]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_world = int(os.environ["LOCAL_WORLD_SIZE"])
    if request.procs is not None and request.procs != world:
        raise Problem(f"--procs {request.procs}: {started} started {world} processes; leave --procs out")
    screen.quiet |= rank != 0
    machine = _machine(request, local_world)

    from drivetrain.engine.group import join_group
    from drivetrain.engine.log.observe import Observers
    from drivetrain.launch.recorder import Recorder

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while torch waits for the others, no handler of Python's runs
    group = join_group(machine.device, "nccl" if machine.device == "cuda" else "gloo")
    stop = StopFlag()
    stop.install()
    opened: Opened | None = None
    told: dict[str, Any] = {}
    if group.is_main:
        try:
            opened = _open(recipe, request)
            if opened.finished:
                launch.already_finished(opened, screen)
                told = {"finished": str(opened.run.path.resolve())}
            else:
                place = Place(0, machine.procs, world, ("", 0))
                plan = launch.make_plan(recipe, machine, place, -(-world // local_world), opened.before, request, screen)
                notice = f"{world} processes, started by {started}{_left_to_launcher(request)}"
                launch.header(recipe, machine, plan, screen, "; ".join(filter(None, [opened.why, notice])))
                launch.record(recipe, opened, plan, machine)
                opened.run.log_event("started", world_size=world, launcher=started)
                told = {"job": launch.make_job(recipe, opened.run, plan, "train", request=request)}
                told["code"] = TaskRef(**told["job"]["task"]).digest()
        except Problem as problem:
            told = {"problem": str(problem), "outcome": problem.outcome}
            if opened is not None:
                opening.discard(opened)
    told = group.broadcast_object(told)
    if "problem" in told:
        raise Problem(told["problem"] if group.is_main else "rank 0 said why", Outcome(told["outcome"]))
    if "finished" in told:
        return Run(told["finished"]), Ended(Outcome.OK)
    job, run = told["job"], Run(told["job"]["run"])
    try:
        watchers = Observers([screen, Recorder(run)]) if group.is_main else screen
        result = work(job | {"task": _task_here(job, told["code"], recipe)}, group, watchers, stop)
    except Problem as problem:
        result = {"outcome": problem.outcome, "message": str(problem)}
    if result.get("smaller"):  # whichever rank it is: the others may wait for it until the launcher ends them
        record_shortage(run, result["smaller"])
    result = _cause(result, group)
    if group.is_main and result.get("smaller"):
        record_shortage(run, result["smaller"])
    screen.close()
    ended = Ended(Outcome(result["outcome"]), result.get("message", ""), result)
    if opened is not None:
        from drivetrain.plan import Plan

        launch.finish(opened, recipe, Plan.from_json(job["plan"]), ended, screen)
    return run, ended


def _left_to_launcher(request: Request) -> str:
    """The flags that ask for what only drivetrain's own processes get."""
    usual, policy = Request().policy, request.policy
    asked = {
        "--find-nan": request.looks.get("find_nan"), "--restarts": policy.restarts != usual.restarts,
        "--hang-after": policy.hang_after != usual.hang_after,
    }  # fmt: skip
    ignored = [flag for flag, given in asked.items() if given]
    if not ignored:
        return ""
    return f"; without effect, for it needs drivetrain's own processes (--procs N): {', '.join(ignored)}"


def _task_here(job: dict[str, Any], code: str, recipe: Recipe) -> dict[str, Any]:
    """The task as rank 0 has it: the copy in the run, or this machine's own file where they share no file system."""
    for task in (TaskRef(**job["task"]), recipe.task):
        with contextlib.suppress(OSError):
            if task.digest() == code:
                return asdict(task)
    raise Problem(f"{recipe.task.path} is not the file that rank 0 trains: bring the same one to every machine")


def _cause(result: dict[str, Any], group: Group) -> dict[str, Any]:
    """How the run ended: a rank that fails tells rank 0, which itself sees no more than a lost connection."""
    from torch import distributed as dist

    if group.size == 1 or Outcome(result["outcome"]) in (Outcome.OK, Outcome.PREEMPTED):
        return result
    store = dist.distributed_c10d._get_default_store()
    with contextlib.suppress(RuntimeError):  # the store is gone where its machine is
        if not group.is_main:
            told_by_me = {key: result.get(key) for key in ("outcome", "message", "smaller")}
            store.set(f"drivetrain/{group.rank}", json.dumps(told_by_me))
        elif result["outcome"] == Outcome.INFRA:
            told = [json.loads(store.get(key)) for rank in range(1, group.size) if store.check([key := f"drivetrain/{rank}"])]
            return next((other for other in told if other["outcome"] != Outcome.INFRA), result)
    return result


def _open(recipe: Recipe, request: Request) -> Opened:
    if request.run_dir or request.name or recipe.name:
        where = Path(request.run_dir) if request.run_dir else runs.RUNS / str(request.name or recipe.name)
        if os.path.exists(where / "lock"):
            opening.wait_for_lock(where, 5.0).release()
    return opening.open_run(recipe, request)


def _machine(request: Request, local_world: int) -> Machine:
    """What this process may use: the launcher decided how many processes share the machine."""
    found = hardware.detect()
    device = request.device or ("cuda" if found.gpus else "cpu")
    if request.device is None and os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1"):
        device = "cpu"
    elif device == "cuda":
        hardware.check_torch_can_use(found, hardware.torch_build(), os.environ)
    return Machine(found, device, [], local_world)
