"""One trial: an ordinary run, trained by `drivetrain train` in its own process."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from drivetrain import runs
from drivetrain.engine.state.best import Best
from drivetrain.launch.request import Request
from drivetrain.outcomes import Outcome, Problem, outcome_of_code
from drivetrain.runs import Run
from drivetrain.tune.study import Proposal

MAX_RESTARTS = 3
"""How often a trial is restarted after it was killed from outside."""


class RunningTrial:
    """Starts the run of a proposal, reads its evaluations, and can stop it."""

    def __init__(self, proposal: Proposal, run: Run, request: Request, best: str) -> None:
        """`request` is the `train` command of the run; `best` is the value of the setting `best`."""
        self.number, self.params, self.reported = proposal.number, proposal.params, proposal.reported
        self.run, self.request, self.name = run, request, Best(best).name
        self.sign = Best(best).sign
        self.evaluations: dict[int, float] = {}
        """Step -> value of each evaluation so far."""
        self.row: dict[str, Any] = {}
        """The newest row of the run's metrics."""
        self.is_pruned = False
        self.num_starts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._follower = runs.Follower(run.metrics_path)

    @property
    def log(self) -> Path:
        """The file with what the command prints."""
        return self.run.path / "logs" / "train.log"

    # --- the process ---

    def start(self) -> None:
        """Starts the run, or resumes it."""
        self.num_starts += 1
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "drivetrain", *self.request.command()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must reach the tuner only
                preexec_fn=partial(runs.die_with_parent, os.getpid()),
            )

    def stop(self) -> None:
        """Asks the run to finish its step, save and end."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while the process runs."""
        assert self.process is not None
        return self.process.poll()

    @property
    def was_killed(self) -> bool:
        """Whether the process was ended from outside, so that the same command resumes the run."""
        code = self.exit_code
        return code is not None and (code < 0 or code >= 128)

    def problem(self) -> Problem:
        """Returns why it failed, as `train` printed it."""
        code = self.exit_code or 0
        text = self.log.read_text(errors="replace") if self.log.is_file() else ""
        message = text.rpartition("\ndrivetrain: ")[2] if "\ndrivetrain: " in text else text.removeprefix("drivetrain: ")
        if code < 0:
            message = f"its process was killed by {signal.Signals(-code).name}"
        outcome = outcome_of_code(code) if code > 0 else Outcome.INFRA
        return Problem(message.strip() or f"it ended with code {code}", outcome)

    # --- its metrics ---

    def read_metrics(self) -> None:
        """Reads the rows that the run logged since the last call; all rows if a resume truncated the file."""
        if self._follower.was_truncated():
            self.evaluations.clear()
        line = b""
        for line in self._follower.new_lines():
            if b'"eval/' in line and (row := runs.parse_row(line)) is not None:
                value = row.get(f"eval/{self.name}")
                if value is not None:
                    self.evaluations[row["step"]] = value
        self.row = runs.parse_row(line) or self.row

    def best(self) -> tuple[int, float] | None:
        """Returns the step and value of its best evaluation; the earliest of equal ones."""
        numbers = [(step, value) for step, value in self.evaluations.items() if not math.isnan(value)]
        return min(numbers, key=lambda evaluation: (-self.sign * evaluation[1], evaluation[0]), default=None)


def start_all(trials: list[RunningTrial]) -> None:
    for trial in trials:
        trial.start()
