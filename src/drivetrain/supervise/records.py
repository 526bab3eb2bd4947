"""What the supervisor of workers records in the run: hangs, and how long first steps take."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from drivetrain.runs import Run, write_atomic
from drivetrain.supervise.verdicts import Verdict


def record_hang(run: Run, verdict: Verdict) -> Path:
    """Writes a hang into the run's events, and the stacks into a file, whose path it returns."""
    number = sum(event["event"] == "hang" for event in run.events()) + 1
    path = run.log_path(0).with_name(f"hang-{number}.txt")
    with contextlib.suppress(OSError):
        path.write_text(f"{verdict.message}\n\n{verdict.evidence}")
    run.log_event("hang", ranks=verdict.ranks, step=verdict.step, line=verdict.line, detail=verdict.message)
    return path


class FirstSteps:
    """How long the first step took in this run's starts on this machine: the limit for the first step of the next start."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.seconds = self._read()
        """By phase."""
        self._has_new = False

    def _read(self) -> dict[str, float]:
        with contextlib.suppress(OSError, ValueError):
            first_step = json.loads(self._run.first_steps_path.read_text())
            return {str(phase): float(seconds) for phase, seconds in first_step.items()}
        return {}

    def begin_attempt(self) -> None:
        self._has_new = False

    def update(self, first_step: dict[str, float]) -> None:
        """Writes the seconds of an attempt's first step, once they are known."""
        if self._has_new or not first_step:
            return
        self._has_new = True
        self.seconds |= self._read()  # another process of this machine may have written it meanwhile
        self.seconds |= {phase: max(seconds, self.seconds.get(phase, 0.0)) for phase, seconds in first_step.items()}
        with contextlib.suppress(OSError):
            write_atomic(self._run.first_steps_path, json.dumps(self.seconds) + "\n")
