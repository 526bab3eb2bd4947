"""One worker process: joins the others, runs the engine, and says in one word how it ended."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from drivetrain.importing import read_origins
from drivetrain.outcomes import Outcome, Problem
from drivetrain.project import is_users
from drivetrain.runs import Run, die_with_parent
from drivetrain.settings import PACKAGE

if TYPE_CHECKING:
    from drivetrain.engine.group import Group
    from drivetrain.engine.log.observe import Observer
    from drivetrain.plan import Plan
    from drivetrain.task import Task

SMOKE_STEPS, SMOKE_BATCH = 4, 16
LOST_PEER = "another process of this run was lost"
HELD = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP}  # signals that wait until a worker can answer


class StopFlag:
    """Set by a signal, read at step boundaries. The handler does nothing else."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == signal.SIGINT:
            os._exit(130)  # asked twice: now
        self.signal = number

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def timer(self) -> Callable[[float], None]:
        """Sets the time at which nobody need ask, in seconds since the epoch."""
        signal.signal(signal.SIGALRM, self._handle)

        def stop_at(when: float) -> None:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, when - time.time()))

        return stop_at


def work(job: dict[str, Any], group: Group, screen: Observer, stop: StopFlag, watchers: Sequence[Observer] = ()) -> dict[str, Any]:
    """Run a job on this rank; gives its result, or how and why it failed. Rank 0 alone tells the screen, all tell the watchers."""
    try:
        return _run(job, group, screen, stop, watchers)
    except BaseException as error:
        outcome, message = explain(error, job)
        return {
            "outcome": outcome, "message": message, "smaller": _smaller_plan(error), "final": isinstance(error, Problem),
            "lost_peer": message.startswith(LOST_PEER),
        }  # fmt: skip


def _smaller_plan(error: BaseException) -> dict[str, Any] | None:
    """With which plan the run may start anew, where memory ran out."""
    from drivetrain.engine.faults.out_of_memory import OutOfMemory

    return error.smaller if isinstance(error, OutOfMemory) else None


def _run(job: dict[str, Any], group: Group, screen: Observer, stop: StopFlag, watchers: Sequence[Observer]) -> dict[str, Any]:
    from drivetrain.engine.faults.injection import SAMPLES_VARIABLE, SampleLog, injectors
    from drivetrain.engine.log.observe import Observers
    from drivetrain.plan import Plan
    from drivetrain.task_ref import TaskRef, instantiate
    from drivetrain.watch.deadline import Deadline
    from drivetrain.watch.files import MetricsFile, TensorBoard

    if job["mode"] == "population":
        from drivetrain.tune.generation import train
        from drivetrain.watch.screen import Wire

        assert isinstance(screen, Wire)
        return train(job, group, screen.send, stop)
    run, plan = Run(job["run"]), Plan.from_json(job["plan"])
    looks = job.get("looks") or {}
    if looks.get("check_collectives"):  # before the task is imported, which may take them by name
        from drivetrain.engine.group.collectives import check_collectives

        check_collectives(group)
    task = instantiate(TaskRef(**job["task"]), job["settings"])
    if job["mode"] == "eval":
        from drivetrain.engine.inference import evaluate_run

        return {"outcome": Outcome.OK} | evaluate_run(task, plan, run, group)
    files: list[Observer] = [MetricsFile(run), TensorBoard(run.path / "tensorboard"), screen] if group.is_main else []
    if looks.get("profile") and group.is_main:
        from drivetrain.watch.profile import Profile

        files.append(Profile(run, looks["profile"], screen.notice, group.device.type == "cuda"))
    if job.get("end") and group.is_main:  # what one rank asks for, all do
        files.append(Deadline(job["end"], stop.timer()))
    observer = Observers([*files, *watchers, *injectors(run)])

    from drivetrain.engine.faults.fingerprint import Fingerprint
    from drivetrain.engine.loop import Training

    if job["mode"] == "smoke":
        task, plan = _smoke(task, plan, job)
        begun = Training(task, plan, run, group, observer, stop)
        begun.looks_closely = True
        begun.run_to_end(stop_after=SMOKE_STEPS // 2)
    training = Training(task, plan, run, group, observer, stop)
    if looks.get("nan_step"):
        from drivetrain.engine.faults.nonfinite import NonFiniteFinder, nothing_found

        NonFiniteFinder(training, looks["nan_step"])
    if os.environ.get(SAMPLES_VARIABLE):
        SampleLog(training, run.path / "logs" / f"samples-{group.rank}.jsonl")
    if job["mode"] == "verify":
        if training.source is not None:  # its state is saved at the end of an epoch: go over one
            task.steps = max(training.total, 2 * training.feed.steps_per_epoch)
            training = Training(task, plan, run, group, observer, stop)
        training.looks_closely = not job["fingerprint"]  # which shall have the steps alone
        if group.is_main and job["fingerprint"]:
            Fingerprint(training, Path(job["fingerprint"]), name_operations=job["look"] == "operations")
    try:
        result = training.run_to_end()
        if looks.get("nan_step") and result.outcome is Outcome.OK:
            raise nothing_found(looks["nan_step"])
    finally:  # also of a failure: nothing that was logged or saved so far may be lost
        if training.writer is not None:
            training.writer.wait()
        observer.close()
    facts = result.facts | {"model": type(training.model).__name__, "summary": task.summary_fields()}
    return {"outcome": result.outcome, "step": result.step, "metrics": result.metrics, "facts": facts}


def _smoke(task: Task, plan: Plan, job: dict[str, Any]) -> tuple[Task, Plan]:
    """A few samples of a data set; of a source, whose batches must fit its groups, two whole epochs."""
    from drivetrain.data import Source
    from drivetrain.plan import Plan
    from drivetrain.task_ref import TaskRef, instantiate

    if not isinstance(task.train_data(), Source):
        _limit_data(task, job["limit"])
        return task, plan
    whole = {"global_batch": job["whole"]["global_batch"], "steps": None, "epochs": 2}
    return instantiate(TaskRef(**job["task"]), job["settings"] | whole), Plan.from_json(job["whole"]["plan"])


def _limit_data(task: Any, samples: int) -> None:
    """Let the task's data sets end after a few samples."""
    from torch.utils.data import Subset

    from drivetrain.data import Source, Tensors

    def limited(give: Any) -> Any:
        def few() -> Any:
            data = give()
            if data is None or isinstance(data, Source) or not hasattr(data, "__len__"):
                return data
            if isinstance(data, Tensors):
                parts = [column[:samples] for column in data.columns]
                return Tensors(*parts) if data.names is None else Tensors(**dict(zip(data.names, parts, strict=True)))
            return Subset(data, range(min(samples, len(data))))

        return few

    task.train_data, task.eval_data = limited(task.train_data), limited(task.eval_data)


# --- failures ----------------------------------------------------------------------------------


def explain(error: BaseException, job: dict[str, Any]) -> tuple[Outcome, str]:
    """The outcome's word and the text for the user: theirs trimmed to their frames, ours whole."""
    import torch
    from torch import distributed as dist

    from drivetrain.engine.data.loader import LoaderDied, SampleError

    text = str(error)
    first = text.splitlines()[0] if text else type(error).__name__
    if isinstance(error, Problem):
        return error.outcome, text
    if isinstance(error, SampleError):  # from a loader's worker it comes inside another traceback
        lines = text.splitlines(keepends=True)
        begin = max(i for i, line in enumerate(lines) if line.rstrip().endswith(" failed:"))
        return Outcome.USER_ERROR, _as_users_see("".join(lines[begin:]).removeprefix("drivetrain.engine.data.loader.SampleError: "), job)
    if isinstance(error, torch.OutOfMemoryError):  # not in a step: those are told as a Problem
        from drivetrain.engine.faults.out_of_memory import WAYS_OUT

        return Outcome.OOM, f"out of memory before the first step: {first}\nModel, optimizer and data do not fit; ways out: {WAYS_OUT}"
    if isinstance(error, MemoryError):
        return Outcome.OOM, f"the host's memory ran out: {first}\nLower plan.workers (now {job['plan']['workers']}) or plan.prefetch"
    if isinstance(error, LoaderDied):
        return Outcome.INFRA, text
    if "DataLoader worker (pid" in text:  # of a loader that the task has made for itself
        return Outcome.INFRA, first
    if "can't start new thread" in text:
        return Outcome.INFRA, "no thread could be started: the machine's limit of processes (ulimit -u), or its memory, is used up"
    if "Expected more than 1 value per channel" in text:
        share = "a last batch or a process's share of one sample"
        return Outcome.USAGE, f"BatchNorm cannot train on a single sample ({share}): choose another global_batch, or fewer processes"
    if "does not have a deterministic implementation" in text:
        return (
            Outcome.USAGE,
            f"deterministic=true: {text.split(' does not have')[0]} has no deterministic form; leave it out, or change that part",
        )
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    lost = ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out waiting", "Connection refused")
    theirs = not frames or "gloo/transport" in text  # sharded models talk to the others from within the user's frames
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and theirs and any(w in text for w in lost)):
        return Outcome.INFRA, f"{LOST_PEER}: {first}"
    if isinstance(error, OSError) and not frames:
        return Outcome.INFRA, f"{error.strerror or error} ({error.filename or 'no file'})"
    kind = "".join(traceback.format_exception_only(error)).rstrip()
    if frames:
        return Outcome.USER_ERROR, _as_users_see("".join(traceback.format_list(frames)), job) + kind
    raised = traceback.extract_tb(error.__traceback__)[-1].filename
    if not Path(raised).is_relative_to(PACKAGE):
        return Outcome.USER_ERROR, f"{kind}\n(raised by {Path(raised).name} while it ran this task, outside of the task's own lines)"
    whole = "".join(traceback.format_exception(error))
    return Outcome.USER_ERROR, f"{whole}This looks like a fault of drivetrain itself: please report it with the lines above."


def _as_users_see(text: str, job: dict[str, Any]) -> str:
    """The user's own paths instead of the run's copies."""
    for copy, file in read_origins(Path(job["run"]) / "task").items():
        text = text.replace(str(copy), file)
    return text


def main() -> None:
    from drivetrain.engine.faults.injection import FRONT_VARIABLE
    from drivetrain.supervise.nursery import WIRE
    from drivetrain.supervise.stacks import answer_about_collectives, answer_to

    handle, page, parent, front = map(int, os.environ.pop(WIRE).split())
    die_with_parent(parent)
    os.environ[FRONT_VARIABLE] = str(front)
    stop = StopFlag()
    stop.install()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
    file = Path(sys.argv[1])
    answers = open(file.with_name(f"stacks-{os.environ['RANK']}"), "a")  # noqa: SIM115 (open as long as the process)
    answer_to(answers)
    job = json.loads(file.read_text())
    if job["scratch"]:  # for the sockets of loader workers, which one that is killed cannot remove
        multiprocessing.current_process()._config["tempdir"] = job["scratch"]  # type: ignore[attr-defined]
    os.chdir(job["folder"]) if os.path.isdir(job["folder"]) else None

    from drivetrain.engine.group import join_group
    from drivetrain.engine.log.deviceclock import DeviceClock
    from drivetrain.watch.pulse import PARTS, Heart
    from drivetrain.watch.screen import Wire

    wire, heart = Wire(handle), Heart(page)
    if int(os.environ["WORLD_SIZE"]) > 1:
        answer_about_collectives(file.parent, int(os.environ["RANK"]))
    try:
        group = join_group(job["plan"]["device"], job["plan"]["backend"], own_port=True)
    except Problem as problem:
        result: dict[str, Any] = {"outcome": problem.outcome, "message": str(problem)}
    except Exception as error:  # of the machine: a busy GPU, a process that died meanwhile
        result = {
            "outcome": Outcome.INFRA, "lost_peer": True,
            "message": f"could not join the other processes: {str(error).splitlines()[0]}",
        }  # fmt: skip
    else:
        if group.device_counters:
            heart.device = DeviceClock(len(PARTS))
        result = work(job, group, wire, stop, [heart])
    wire.send("result", result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(Outcome(result["outcome"]).code)  # interpreters with a broken process group can hang on the way out


if __name__ == "__main__":
    main()
