"""Decides whether a job is restarted after its workers ended, and with which plan."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from drivetrain.outcomes import Problem
from drivetrain.plan import Plan
from drivetrain.runs import Run, record_plan
from drivetrain.supervise.hang_detector import MIN_LIMIT_SECONDS

MAX_PAUSE_SECONDS = 30.0  # between two restarts


@dataclass(frozen=True)
class RestartPolicy:
    """What the supervisor does after a process was lost or hung."""

    restarts: int = 0
    """The number of successive restarts without a new checkpoint after which the run ends."""
    hang_after: float = MIN_LIMIT_SECONDS
    """A rank may always be this many seconds without a heartbeat."""

    def pause_seconds(self, num_without_progress: int) -> float:
        """Returns the seconds before the next restart: 0 after progress, then longer each time."""
        return 0.0 if num_without_progress <= 1 else min(MAX_PAUSE_SECONDS, 2.0 ** (num_without_progress - 3))


class RestartCount:
    """Counts successive restarts without a new checkpoint."""

    def __init__(self, run: Run) -> None:
        self._run, self._last_step = run, run.last_checkpoint_step
        self.num_without_progress = 0

    def add(self) -> int:
        """Counts one restart; returns the number of successive ones without a new checkpoint."""
        step = self._run.last_checkpoint_step
        self.num_without_progress = 1 if step > self._last_step else self.num_without_progress + 1
        self._last_step = step
        return self.num_without_progress


def plan_after_oom(
    run: Run, plan: Plan, new_plan: Plan | None, smaller: dict[str, Any] | None, may_restart: bool
) -> tuple[Plan, str] | None:
    """Returns the plan for a restart after out of memory, and a sentence about it: a new plan that differs, else the smaller one
    that a worker asked for. Returns None if there is neither, or this process may not restart the run."""
    if new_plan is not None and new_plan.sentence() != plan.sentence():
        run.log_event("oom", step=run.last_checkpoint_step)
        with contextlib.suppress(OSError):  # a full disk
            run.update(plan=new_plan.to_json())
        run.log_event("replanned", why="the task is known by now", strategy=new_plan.strategy, micro_batch=new_plan.micro_batch)
        return new_plan, f"out of memory: {new_plan.sentence()}"
    if not smaller:
        return None
    record_out_of_memory(run, smaller)
    return (Plan.from_json(plan.to_json() | smaller["plan"]), smaller["sentence"]) if may_restart else None


def record_out_of_memory(run: Run, smaller: dict[str, Any]) -> None:
    """Records, once, that memory ran out, and the plan with which the run continues."""
    with contextlib.suppress(Problem):  # run.json may be on another machine
        if any(run.read()["plan"][key] != size for key, size in smaller["sizes"].items()):
            run.log_event("oom", **smaller["oom"])
            record_plan(run, smaller["plan"])
            run.log_event("replanned", step=smaller["oom"]["step"], **smaller["sizes"])
