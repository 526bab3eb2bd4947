"""Turns an exception that ends a worker into an outcome and a message.

The traceback of an error in the user's code shows only the user's frames; that of an error in drivetrain shows all.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

from drivetrain.importing import read_origins
from drivetrain.outcomes import Outcome, Problem
from drivetrain.project import is_users
from drivetrain.settings import PACKAGE

LOST_PEER = "another process of this run was lost"
CONNECTION_ERRORS = ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out waiting", "Connection refused")


def explain(error: BaseException, run: Path, loader_workers: int) -> tuple[Outcome, str]:
    """Returns the outcome and the message for the user. `run` is the run's directory, which has a copy of the task's code."""
    if isinstance(error, Problem):
        return error.outcome, str(error)
    return (
        _sample_error(error, run)
        or _memory_error(error, loader_workers)
        or _error_with_known_text(error)
        or _machine_error(error)
        or _code_error(error, run)
    )  # fmt: skip


def _sample_error(error: BaseException, run: Path) -> tuple[Outcome, str] | None:
    """Explains an error in the code that makes a sample, or the death of a loader worker."""
    from drivetrain.engine.data.loader_workers import LoaderDied, SampleError

    if isinstance(error, SampleError):  # a loader worker's error is inside another traceback
        lines = str(error).splitlines(keepends=True)
        begin = max(number for number, line in enumerate(lines) if line.rstrip().endswith(" failed:"))
        text = "".join(lines[begin:]).removeprefix("drivetrain.engine.data.loader_workers.SampleError: ")
        return Outcome.USER_ERROR, _with_users_paths(text, run)
    return (Outcome.INFRA, str(error)) if isinstance(error, LoaderDied) else None


def _memory_error(error: BaseException, loader_workers: int) -> tuple[Outcome, str] | None:
    import torch

    from drivetrain.engine.faults.out_of_memory import WAYS_OUT

    if isinstance(error, torch.OutOfMemoryError):  # outside of a step: inside of one it becomes a Problem
        return (
            Outcome.OOM,
            f"out of memory before the first step: {_first_line(error)}\nModel, optimizer and data do not fit; ways out: {WAYS_OUT}",
        )
    if isinstance(error, MemoryError):
        return (
            Outcome.OOM,
            f"the host's memory ran out: {_first_line(error)}\nLower plan.workers (now {loader_workers}) or plan.prefetch",
        )
    return None


def _error_with_known_text(error: BaseException) -> tuple[Outcome, str] | None:
    """Explains errors that only their text identifies."""
    text = str(error)
    explanations: dict[str, tuple[Outcome, Callable[[], str]]] = {
        "DataLoader worker (pid": (Outcome.INFRA, lambda: _first_line(error)),  # the task made its own DataLoader
        "can't start new thread": (
            Outcome.INFRA,
            lambda: "no thread could be started: the machine's limit of processes (ulimit -u), or its memory, is used up",
        ),
        "Expected more than 1 value per channel": (
            Outcome.USAGE,
            lambda: (
                "BatchNorm cannot train on a single sample (a last batch or a process's share of one sample):"
                " choose another global_batch, or fewer processes"
            ),
        ),
        "does not have a deterministic implementation": (
            Outcome.USAGE,
            lambda: f"deterministic=true: {text.split(' does not have')[0]} has no deterministic form; leave it out, or change that part",
        ),
    }
    for part, (outcome, message) in explanations.items():
        if part in text:
            return outcome, message()
    return None


def _machine_error(error: BaseException) -> tuple[Outcome, str] | None:
    """Explains a lost connection to another rank, or an error of the operating system outside of the user's code."""
    from torch import distributed as dist

    text = str(error)
    has_users_frames = bool(_users_frames(error))
    may_be_connection = not has_users_frames or "gloo/transport" in text  # sharded models communicate inside of the user's forward()
    is_lost = isinstance(error, RuntimeError) and may_be_connection and any(sign in text for sign in CONNECTION_ERRORS)
    if isinstance(error, dist.DistError) or is_lost:
        return Outcome.INFRA, f"{LOST_PEER}: {_first_line(error)}"
    if isinstance(error, OSError) and not has_users_frames:
        return Outcome.INFRA, f"{error.strerror or error} ({error.filename or 'no file'})"
    return None


def _code_error(error: BaseException, run: Path) -> tuple[Outcome, str]:
    """Explains an error in the user's code, in a library that it calls, or in drivetrain."""
    error_text = "".join(traceback.format_exception_only(error)).rstrip()
    if frames := _users_frames(error):
        return Outcome.USER_ERROR, _with_users_paths("".join(traceback.format_list(frames)), run) + error_text
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    if not Path(raised_in).is_relative_to(PACKAGE):
        return (
            Outcome.USER_ERROR,
            f"{error_text}\n(raised by {Path(raised_in).name} while it ran this task, outside of the task's own lines)",
        )
    text = "".join(traceback.format_exception(error))
    return Outcome.USER_ERROR, f"{text}This looks like a bug in drivetrain: please report it with the lines above."


def _users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _with_users_paths(text: str, run: Path) -> str:
    """Replaces the paths of the run's copies by those of the user's own files."""
    for copy, file in read_origins(run / "task").items():
        text = text.replace(str(copy), file)
    return text
