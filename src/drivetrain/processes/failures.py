"""The outcome and the message of an exception that ends a worker: the user's code trimmed to the user's frames, ours in full."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

from drivetrain.importing import read_origins
from drivetrain.outcomes import Outcome, Problem
from drivetrain.project import is_users
from drivetrain.settings import PACKAGE

LOST_PEER = "another process of this run was lost"
LOST_CONNECTION = ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out waiting", "Connection refused")


def explain(error: BaseException, run: Path, loader_workers: int) -> tuple[Outcome, str]:
    """Returns the outcome and the message for the user; `run` is the directory with the task's copy."""
    if isinstance(error, Problem):
        return error.outcome, str(error)
    return (
        _of_sample(error, run)
        or _of_memory(error, loader_workers)
        or _of_text(error)
        or _of_machine(error)
        or _of_code(error, run)
    )  # fmt: skip


def _of_sample(error: BaseException, run: Path) -> tuple[Outcome, str] | None:
    """A sample's own code failed, in the loader."""
    from drivetrain.engine.data.loader_workers import LoaderDied, SampleError

    if isinstance(error, SampleError):  # from a loader worker it comes inside another traceback
        lines = str(error).splitlines(keepends=True)
        begin = max(i for i, line in enumerate(lines) if line.rstrip().endswith(" failed:"))
        text = "".join(lines[begin:]).removeprefix("drivetrain.engine.data.loader_workers.SampleError: ")
        return Outcome.USER_ERROR, _with_users_paths(text, run)
    return (Outcome.INFRA, str(error)) if isinstance(error, LoaderDied) else None


def _of_memory(error: BaseException, loader_workers: int) -> tuple[Outcome, str] | None:
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


def _of_text(error: BaseException) -> tuple[Outcome, str] | None:
    """Errors that torch and Python tell apart by their text alone."""
    text = str(error)
    explanations: dict[str, tuple[Outcome, Callable[[], str]]] = {
        "DataLoader worker (pid": (Outcome.INFRA, lambda: _first_line(error)),  # of a DataLoader that the task made itself
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
    return next(((outcome, explained()) for part, (outcome, explained) in explanations.items() if part in text), None)


def _of_machine(error: BaseException) -> tuple[Outcome, str] | None:
    """A lost connection to another rank, or an error of the operating system outside of the user's code."""
    from torch import distributed as dist

    text = str(error)
    has_users_frames = bool(_users_frames(error))
    may_be_connection = not has_users_frames or "gloo/transport" in text  # sharded models communicate from within the user's frames
    is_lost = isinstance(error, RuntimeError) and may_be_connection and any(sign in text for sign in LOST_CONNECTION)
    if isinstance(error, dist.DistError) or is_lost:
        return Outcome.INFRA, f"{LOST_PEER}: {_first_line(error)}"
    if isinstance(error, OSError) and not has_users_frames:
        return Outcome.INFRA, f"{error.strerror or error} ({error.filename or 'no file'})"
    return None


def _of_code(error: BaseException, run: Path) -> tuple[Outcome, str]:
    last = "".join(traceback.format_exception_only(error)).rstrip()
    if frames := _users_frames(error):
        return Outcome.USER_ERROR, _with_users_paths("".join(traceback.format_list(frames)), run) + last
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    if not Path(raised_in).is_relative_to(PACKAGE):
        return (
            Outcome.USER_ERROR,
            f"{last}\n(raised by {Path(raised_in).name} while it ran this task, outside of the task's own lines)",
        )
    text = "".join(traceback.format_exception(error))
    return Outcome.USER_ERROR, f"{text}This looks like a fault of drivetrain itself: please report it with the lines above."


def _users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _with_users_paths(text: str, run: Path) -> str:
    """Returns the text with the user's own paths in place of the run's copies."""
    for copy, file in read_origins(run / "task").items():
        text = text.replace(str(copy), file)
    return text
