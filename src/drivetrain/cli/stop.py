"""`stop`: ask a run to save and end, on this machine or on a target."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time

from drivetrain import runs
from drivetrain.cli.flags import Parser, seconds
from drivetrain.outcomes import Outcome, Problem
from drivetrain.runs import Run
from drivetrain.terminal import show

POLL_SECONDS = 0.1


def parser(verb: str) -> Parser:
    parser = Parser(
        "drivetrain stop", "Stop runs, on this machine or on a target: each finishes its step, saves and ends; `resume` goes on with it."
    )
    parser.add_argument("targets", nargs="+", metavar="RUN", help="names or folders of runs")
    parser.add_argument(
        "--within", type=seconds, default=60.0, metavar="TIME", help="kill what has not ended after this time (default 60s)"
    )  # fmt: skip
    return parser


def run(verb: str, words: list[str]) -> int:
    args = parser(verb).parse(words)
    problems = []
    for text in args.targets:
        try:
            show(_stop(text, args.within))
        except Problem as problem:
            problems.append(problem)
    if problems:
        raise Problem("\n".join(map(str, problems)), problems[0].outcome)
    return 0


def _stop(text: str, within: float) -> str:
    """Stops one run; returns a line that tells how it ended."""
    from drivetrain.targets import submit
    from drivetrain.targets.record import find_recorded

    record = find_recorded(text)
    if record is not None:
        record = submit.stop(record, within)
        if record.is_active:
            raise Problem(
                f"{record.run.name} is still {record.phase} on {record.target}: try again, or give it more time with --within",
                Outcome.INFRA,
            )
        status = record.run.status if runs.is_run(record.run.path) else "before its first step"
        if status == "finished":
            return f"{record.run.name} is finished"
        return f"{record.run.name} stopped on {record.target} ({status}); go on with: drivetrain resume {record.run.name}"
    run = runs.find(text)
    pid = runs.lock_holder(run.path)
    if pid is None:
        return f"{run.name} does not run ({run.status})"
    return _stop_process(run, pid, within)


def _stop_process(run: Run, pid: int, within: float) -> str:
    """Stops the command that trains a run on this machine."""
    host = (runs.parse_row((run.path / "lock").read_bytes()) or {}).get("host")
    if host != socket.gethostname():
        raise Problem(f"{run.name} is being trained by process {pid} on {host}: stop it there", Outcome.INFRA)
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return f"{run.name} has ended just now ({run.status})"
    except PermissionError:
        raise Problem(f"{run.name} is being trained by process {pid} of another user: ask them, or root, to stop it") from None
    deadline = time.monotonic() + within
    while runs.lock_holder(run.path) == pid and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    if runs.lock_holder(run.path) == pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return f"{run.name} did not end within {within:.0f} s and was killed; go on with: drivetrain resume {run.name}"
    return f"{run.name} stopped ({run.status}); go on with: drivetrain resume {run.name}"
