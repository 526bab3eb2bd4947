"""How a job ended: of all workers' results, the one that caused the others."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from drivetrain.outcomes import Outcome
from drivetrain.runs import Run
from drivetrain.supervise.fork_server import WorkerProcess
from drivetrain.watch.heartbeat import HeartbeatReader
from drivetrain.watch.time_breakdown import TimeBreakdown

# If workers end with different outcomes, the first of these is the cause.
SEVERITY = [
    Outcome.USER_ERROR, Outcome.USAGE, Outcome.DATA, Outcome.NAN, Outcome.OOM, Outcome.HANG, Outcome.INFRA, Outcome.PREEMPTED, Outcome.OK,
]  # fmt: skip


@dataclass
class JobEnd:
    outcome: Outcome
    message: str = ""
    result: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    """Whether the user pressed Ctrl-C."""
    stopped: bool = False
    """Whether this process got any signal to stop."""
    spent: TimeBreakdown | None = None
    """How the ranks spent their time."""
    lost: bool = False
    """Whether a process was lost or hung, so that a restart may succeed."""
    is_member: bool = False
    """Whether another machine leads the run, and has its directory."""


@dataclass
class Worker:
    """One worker of an attempt, as the supervisor sees it."""

    rank: int
    process: WorkerProcess
    heartbeat: HeartbeatReader
    log: BinaryIO | None
    event_pipe: int
    """The reading end of its event pipe; -1 after that was closed."""
    result: dict[str, Any] | None = None
    """None until it has sent one."""
    num_ended_before: int | None = None
    """The number of workers that ended before it; None while it runs."""
    was_killed_here: bool = False
    """Whether this supervisor killed it because of another worker."""
    unfinished_line: dict[str, bytes] = field(default_factory=lambda: {"events": b"", "output": b""})


def end_of_workers(workers: list[Worker], run: Run, can_restart: bool) -> JobEnd:
    """Returns the end of the job: that of the worker that caused the others to end."""
    orders_of_deaths = [
        worker.num_ended_before or 0
        for worker in workers
        if worker.result is None and not worker.was_killed_here and worker.process.code != -signal.SIGABRT
    ]
    ends = []
    for worker in workers:
        result, order = worker.result or {}, worker.num_ended_before or 0
        outcome = Outcome(result["outcome"]) if result else Outcome.INFRA  # without a result the worker died, whatever its exit code
        is_consequence = bool(result.get("lost_peer")) if result else worker.was_killed_here
        if (
            outcome is Outcome.USER_ERROR and orders_of_deaths and min(orders_of_deaths) < order
        ):  # an exception about another worker's death
            outcome, is_consequence = Outcome.INFRA, True
        ends.append(((SEVERITY.index(outcome), is_consequence, order), outcome, result, worker))
    _, outcome, result, worker = min(ends, key=lambda end: end[0])
    message = result.get("message", "") if result else death_message(worker, run)
    return JobEnd(outcome, message, result, lost=outcome is Outcome.INFRA and not result.get("final") and can_restart)


def death_message(worker: Worker, run: Run) -> str:
    """Returns the message about a worker that ended without a result."""
    if worker.process.start_error:
        return f"worker {worker.rank} could not be started: {worker.process.start_error}"
    code = worker.process.code or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code} and without a result"
    return f"worker {worker.rank} {how} (see {run.log_path(worker.rank)})"
