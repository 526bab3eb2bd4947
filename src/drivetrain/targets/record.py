"""The record of a run on a target: target.json in the run's folder on the machine that submitted it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain import runs
from drivetrain.outcomes import Problem
from drivetrain.runs import FORMAT, RUNS, Run

ACTIVE = ("queued", "running")
RECORD = "target.json"
SUBMISSION_LOCK = f".{RECORD}.submission"
"""Begins as all files of the record, which may be in a folder in which a run begins."""
WAIT_SECONDS = 1.0
"""Another command may hold the lock for a moment, only to see whether it is free."""
JOB_VARIABLE = "DRIVETRAIN_JOB"
"""The job's folder, in the processes of a run on a target: there, `resume` trains."""


def is_inside(run: Run) -> bool:
    """Whether this process belongs to a run on a target, with this folder."""
    return os.environ.get(JOB_VARIABLE) == str(run.path.absolute() / "job")


@contextlib.contextmanager
def submission_lock(run: Run) -> Iterator[None]:
    """Takes the right to submit a run; raises Problem while another command has it. It ends with the process at the latest."""
    path, deadline = run.path / SUBMISSION_LOCK, time.monotonic() + WAIT_SECONDS
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            if time.monotonic() > deadline:
                raise being_submitted(run) from None
            time.sleep(0.05)
            continue
        if os.fstat(file).st_nlink:
            break
        os.close(file)  # the command that had the lock deleted the file
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(file)


def is_being_submitted(run: Run) -> bool:
    """Whether a command submits the run at this moment."""
    try:
        file = os.open(run.path / SUBMISSION_LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def being_submitted(run: Run) -> Problem:
    return Problem(f"{run.name} is being submitted by another command: wait for it, or end that command")


@dataclass(frozen=True)
class Record:
    """Where a run executes, and how it was submitted."""

    run: Run
    """The run's folder on this machine."""
    facts: dict[str, Any]

    @property
    def path(self) -> Path:
        return self.run.path / RECORD

    @property
    def target(self) -> str:
        return str(self.facts["target"])

    @property
    def handle(self) -> dict[str, Any]:
        """What the target needs to find the run again."""
        return dict(self.facts["handle"])

    @property
    def phase(self) -> str:
        """The phase when the target was last asked."""
        return str(self.facts["phase"])

    @property
    def is_active(self) -> bool:
        return self.phase in ACTIVE

    @property
    def is_complete(self) -> bool:
        """Whether the run has ended with an exit code and was copied here: there is nothing more to ask for."""
        return self.phase == "ended" and bool(self.facts["pulled"])

    def write(self) -> Record:
        runs.write_atomic(self.path, json.dumps({"format": FORMAT} | self.facts, indent=1) + "\n")
        return self

    def update(self, **changes: Any) -> Record:
        """Writes changes; returns the new record. Changes nothing if another command has submitted the run again meanwhile."""
        with self._locked():
            newest = read_record(self.run)
            if newest is not None and newest.facts["submissions"] != self.facts["submissions"]:
                return newest
            return Record(self.run, (newest or self).facts | changes).write()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self.run.path / f".{RECORD}.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def seen(self, phase: str, code: int | None, reason: str) -> Record:
        """Notes what the target answered."""
        if (phase, code, reason) == (self.phase, self.facts.get("exit_code"), self.facts.get("reason")):
            return self
        is_pulled = bool(self.facts.get("pulled")) and phase == self.phase  # after another phase there is more to copy
        return self.update(phase=phase, exit_code=code, reason=reason, seen=time.time(), pulled=is_pulled)


def read_record(run: Run) -> Record | None:
    """Returns the record of a run; None for a run that was started on this machine."""
    try:
        with open(run.path / RECORD, "rb") as file:
            text, owner = file.read(), os.fstat(file.fileno()).st_uid
    except OSError:
        return None
    if owner not in (0, os.geteuid()):
        raise Problem(f"{run.path / RECORD} belongs to another user: its commands are not run; copy the run's files without it")
    facts = runs.parse_row(text)
    if facts is None and is_being_submitted(run):
        raise being_submitted(run)
    if facts is None or facts.get("format") != FORMAT or not isinstance(facts.get("handle"), dict):
        raise Problem(f"{run.path / RECORD} is damaged: drivetrain runs rm {run.name}, then submit the run again")
    return Record(run, facts)


def find_recorded(text: str) -> Record | None:
    """Returns the record of the run with this name or folder, if it was submitted to a target."""
    path = Path(text)
    candidates = [path]
    if path.parts and ".." not in path.parts and not path.is_absolute():
        candidates.insert(0, RUNS / path)
    for candidate in candidates:
        if os.path.isfile(candidate / RECORD):  # also false for names that no file system takes
            return read_record(Run(candidate))
        if runs.is_run(candidate):
            return None
    return None


def all_records() -> list[Record]:
    """Returns the records of the runs in runs/; damaged ones are left out."""
    records = []
    for file in sorted([*RUNS.glob(f"*/{RECORD}"), *RUNS.glob(f"*/*/{RECORD}"), *RUNS.glob(f"*/trials/*/{RECORD}")]):
        try:
            record = read_record(Run(file.parent))
        except Problem:
            continue
        if record is not None:
            records.append(record)
    return records
