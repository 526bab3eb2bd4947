"""A worker process: joins the other ranks, does its job with the engine, and reports one result."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from drivetrain.outcomes import Outcome, Problem
from drivetrain.processes import failures
from drivetrain.processes.job import Diagnostics, EvaluateJob, Job, PopulationJob, SmokeJob, TaskJob, TrainJob, VerifyJob, read
from drivetrain.processes.smoke import SMOKE_STEPS, smoke_task
from drivetrain.runs import Run, die_with_parent

if TYPE_CHECKING:
    from drivetrain.engine.group import Group
    from drivetrain.engine.log.observe import Observer
    from drivetrain.engine.loop import Training

HANDLES = "_DRIVETRAIN_WIRE"
"""The environment variable with a worker's event pipe and heartbeat page, and the process ids of its parent and its supervisor."""
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP}  # blocked until the worker has its own handlers


REPEATED_SECONDS = 0.5
"""A launcher may send a signal to a worker and to its watcher, which forwards it: what comes again within this time is the same signal."""


class StopFlag:
    """True after a signal asked this process to stop. It is read between steps."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._first_time = 0.0

    def __bool__(self) -> bool:
        return self.signal is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_repeated = time.monotonic() - self._first_time < REPEATED_SECONDS
        if number == signal.SIGINT and self.signal == signal.SIGINT and not is_repeated:
            os._exit(130)  # a second Ctrl-C ends the process at once
        if self.signal is None:
            self._first_time = time.monotonic()
        self.signal = number

    def install(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def timer(self) -> Callable[[float], None]:
        """Returns a function that makes the flag set itself at a time, in seconds since the epoch."""
        signal.signal(signal.SIGALRM, self._handle)

        def stop_at(stop_time: float) -> None:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, stop_time - time.time()))

        return stop_at


def work(job: Job, group: Group, screen: Observer, stop: StopFlag, observers: Sequence[Observer] = ()) -> dict[str, Any]:
    """Does a job on this rank and returns its result; if it fails, the outcome and the message.

    Only rank 0 reports to `screen`; every rank calls `observers`.
    """
    from drivetrain.engine.faults.out_of_memory import OutOfMemory

    try:
        return _do(job, group, screen, stop, observers)
    except BaseException as error:
        outcome, message = failures.explain(error, Path(job.run), job.plan.workers)
        return {
            "outcome": outcome, "message": message, "smaller": error.smaller if isinstance(error, OutOfMemory) else None,
            "final": isinstance(error, Problem), "lost_peer": message.startswith(failures.LOST_PEER),
        }  # fmt: skip


def _do(job: Job, group: Group, screen: Observer, stop: StopFlag, observers: Sequence[Observer]) -> dict[str, Any]:
    from drivetrain.task_ref import instantiate
    from drivetrain.watch.screen import EventPipe

    if isinstance(job, PopulationJob):
        from drivetrain.processes.population import train_population

        assert isinstance(screen, EventPipe)
        return train_population(job, group, screen.send, stop)
    assert isinstance(job, TaskJob)
    if (
        isinstance(job, TrainJob) and job.diagnostics.check_collectives
    ):  # before the task is imported: it may import functions of torch.distributed by name
        from drivetrain.engine.group.collectives import check_collectives

        check_collectives(group)
    task = instantiate(job.task, job.settings)
    task.run_folder = Path(job.run)
    if isinstance(job, EvaluateJob):
        from drivetrain.engine.inference import evaluate_run

        return {"outcome": Outcome.OK} | evaluate_run(task, job.plan, Run(job.run), group, job.num_resamples)
    return _train(job, task, group, stop, _observer(job, group, screen, stop, observers))


def _observer(job: TaskJob, group: Group, screen: Observer, stop: StopFlag, observers: Sequence[Observer]) -> Observer:
    """Returns all observers of this rank's training as one: files, screen, time limit, heartbeat, injected faults."""
    from drivetrain.engine.faults.injection import injectors
    from drivetrain.engine.log.observe import Observers
    from drivetrain.watch.deadline import Deadline
    from drivetrain.watch.files import MetricsFile, PictureFiles, TensorBoard
    from drivetrain.watch.profile import StepProfiler

    run = Run(job.run)
    main_observers: list[Observer] = []
    if group.is_main:
        main_observers = [MetricsFile(run), PictureFiles(run, screen.notice), TensorBoard(run.path / "tensorboard"), screen]
    if isinstance(job, TrainJob) and group.is_main:
        if job.diagnostics.profile:
            main_observers.append(StepProfiler(run, job.diagnostics.profile, screen.notice, group.device.type == "cuda"))
        if job.end:  # on one rank only: if it requests a stop, all ranks stop
            main_observers.append(Deadline(job.end, stop.timer()))
    return Observers([*main_observers, *observers, *injectors(run)])


def _train(job: TaskJob, task: Any, group: Group, stop: StopFlag, observer: Observer) -> dict[str, Any]:
    from drivetrain.engine.loop import Training

    run, plan = Run(job.run), job.plan
    diagnostics = job.diagnostics if isinstance(job, TrainJob) else Diagnostics()
    if isinstance(job, SmokeJob):
        task, plan = smoke_task(task, job)
        first_half = Training(task, plan, run, group, observer, stop)
        first_half.always_checks_dependence = True
        first_half.run_to_end(stop_after=SMOKE_STEPS // 2)
    training = Training(task, plan, run, group, observer, stop)
    if isinstance(job, VerifyJob) and training.setup.source is not None:
        # Two epochs, because a Source's state is saved only at the end of an epoch.
        task.steps = max(training.setup.total_steps, 2 * training.setup.steps_per_epoch)
        training = Training(task, plan, run, group, observer, stop)
    _attach_diagnostics(job, diagnostics, training)
    try:
        result = training.run_to_end()
        if diagnostics.nan_step and result.outcome is Outcome.OK:
            from drivetrain.engine.faults.nonfinite import nothing_found_error

            raise nothing_found_error(diagnostics.nan_step)
    finally:  # also after a failure: rows and checkpoints may still have to be written
        training.saver.close()
        observer.close()
    facts = result.facts | {"model": type(training.setup.model).__name__, "summary": task.summary_fields()}
    return {"outcome": result.outcome, "step": result.step, "metrics": result.metrics, "facts": facts}


def _attach_diagnostics(job: TaskJob, diagnostics: Diagnostics, training: Training) -> None:
    """Attaches the checks and recorders that were asked for."""
    from drivetrain.engine.faults.fingerprint import Fingerprint
    from drivetrain.engine.faults.injection import SAMPLES_VARIABLE, SampleLog
    from drivetrain.engine.faults.nonfinite import NonFiniteFinder

    run, rank = Run(job.run), training.setup.group.rank
    if diagnostics.nan_step:
        NonFiniteFinder(training.setup, training.execution.step, diagnostics.nan_step)
    if os.environ.get(SAMPLES_VARIABLE):
        SampleLog(training, run.path / "logs" / f"samples-{rank}.jsonl")
    if isinstance(job, VerifyJob):
        training.always_checks_dependence = not job.fingerprint  # this check would change the steps that the fingerprint compares
        if training.setup.group.is_main and job.fingerprint:
            Fingerprint(training.execution.step, Path(job.fingerprint), name_operations=job.names_operations)


def main() -> None:
    from drivetrain.engine.faults.injection import FRONT_VARIABLE
    from drivetrain.processes.stack_dumps import dump_stacks_on_signal, stacks_path

    event_pipe, page, parent, supervisor = map(int, os.environ.pop(HANDLES).split())
    die_with_parent(parent)
    os.environ[FRONT_VARIABLE] = str(supervisor)
    stop = StopFlag()
    stop.install()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    file = Path(sys.argv[1])
    stacks_file = open(stacks_path(file.parent, int(os.environ["RANK"])), "a")  # noqa: SIM115 (open as long as the process)
    dump_stacks_on_signal(stacks_file)
    job = read(Job, file)
    if job.scratch:  # for the sockets of loader workers, which a killed process cannot remove
        multiprocessing.current_process()._config["tempdir"] = job.scratch  # type: ignore[attr-defined]
    if os.path.isdir(job.folder):
        os.chdir(job.folder)
    result = _join_and_work(job, file.parent, event_pipe, page, stop)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(Outcome(result["outcome"]).code)  # after the loss of a rank, the normal exit could hang in the process group


def _join_and_work(job: Job, folder: Path, event_pipe: int, page: int, stop: StopFlag) -> dict[str, Any]:
    """Joins the process group, does the job, and sends the result to the supervisor."""
    from drivetrain.engine.group import join_group
    from drivetrain.engine.log.deviceclock import DeviceClock
    from drivetrain.processes.stack_dumps import dump_collectives_on_request
    from drivetrain.watch.heartbeat import PARTS, HeartbeatWriter
    from drivetrain.watch.screen import EventPipe

    events, heartbeat = EventPipe(event_pipe), HeartbeatWriter(page)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dump_collectives_on_request(folder, int(os.environ["RANK"]))
    try:
        group = join_group(job.plan.device, job.plan.backend, own_port=True)
    except Problem as problem:
        result: dict[str, Any] = {"outcome": problem.outcome, "message": str(problem)}
    except Exception as error:  # such as a busy GPU, or a process that has died
        message = f"could not join the other processes: {str(error).splitlines()[0]}"
        result = {"outcome": Outcome.INFRA, "lost_peer": True, "message": message}
    else:
        if group.device_counters:
            heartbeat.device = DeviceClock(len(PARTS))
        result = work(job, group, events, stop, [heartbeat])
    events.send("result", result)
    return result


if __name__ == "__main__":
    main()
