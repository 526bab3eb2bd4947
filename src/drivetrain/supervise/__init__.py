"""Runs a job on this machine's workers.

If a worker is lost or hangs, all workers restart from the last good checkpoint; if memory runs out, they restart with a smaller plan.
"""

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
    job: Job, plan: Plan, placement: WorkerPlacement, screen: Screen, gpus: list[str], verbose: bool = False,
    replan: Callable[[], Plan] | None = None, policy: RestartPolicy | None = None,
) -> JobEnd:  # fmt: skip
    """Runs a job on this machine, with restarts, until it has ended."""
    with supervised(job, plan, placement, screen, gpus, verbose, replan, policy) as supervisor:
        return supervisor.run()


@contextlib.contextmanager
def supervised(
    job: Job, plan: Plan, placement: WorkerPlacement, screen: Screen, gpus: list[str], verbose: bool = False,
    replan: Callable[[], Plan] | None = None, policy: RestartPolicy | None = None,
) -> Iterator[Supervisor]:  # fmt: skip
    """Yields a supervisor, which handles this process's signals until the end."""
    supervisor = Supervisor(job, plan, placement, screen, gpus, verbose, replan, policy or RestartPolicy())
    with handling_signals(supervisor.on_signal):
        try:
            yield supervisor
        finally:
            supervisor.close()


@contextlib.contextmanager
def handling_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Installs a handler for the signals that ask a process to end; only in the main thread, because Python allows it only there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, previous_handler in previous.items():
            signal.signal(number, previous_handler)
