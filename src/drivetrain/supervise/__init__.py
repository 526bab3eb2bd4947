"""Runs a job on this machine's workers: a lost or hung one is restarted from the last good checkpoint, one that ran out of memory
with a smaller plan."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from drivetrain.plan import Plan
from drivetrain.processes.job import Job
from drivetrain.supervise.attempt import WorkerPlacement
from drivetrain.supervise.ending import JobEnd
from drivetrain.supervise.placement import local_placement
from drivetrain.supervise.restarts import RestartPolicy, record_out_of_memory
from drivetrain.supervise.supervisor import Supervisor
from drivetrain.watch.screen import Screen

__all__ = [
    "JobEnd",
    "RestartPolicy",
    "Supervisor",
    "WorkerPlacement",
    "handling_signals",
    "local_placement",
    "record_out_of_memory",
    "run_workers",
    "supervised",
]


def run_workers(
    job: Job, plan: Plan, place: WorkerPlacement, screen: Screen, gpus: list[str], verbose: bool = False,
    replan: Callable[[], Plan] | None = None, policy: RestartPolicy | None = None,
) -> JobEnd:  # fmt: skip
    """Runs a job on this machine's processes until all have ended for good."""
    with supervised(job, plan, place, screen, gpus, verbose, replan, policy) as supervisor:
        return supervisor.run()


@contextlib.contextmanager
def supervised(
    job: Job, plan: Plan, place: WorkerPlacement, screen: Screen, gpus: list[str], verbose: bool = False,
    replan: Callable[[], Plan] | None = None, policy: RestartPolicy | None = None,
) -> Iterator[Supervisor]:  # fmt: skip
    """A supervisor that handles this process's signals meanwhile."""
    supervisor = Supervisor(job, plan, place, screen, gpus, verbose, replan, policy or RestartPolicy())
    with handling_signals(supervisor.on_signal):
        try:
            yield supervisor
        finally:
            supervisor.close()


@contextlib.contextmanager
def handling_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Sends the signals that ask for an end to a handler; only in a process's main thread, where Python allows it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {n: signal.signal(n, handler) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
