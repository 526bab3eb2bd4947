"""How a run's job ended: kept in the run's job folder here, because the cluster may have deleted the job."""

from __future__ import annotations

import json
from pathlib import Path

from drivetrain import runs
from drivetrain.targets.base import JobState
from drivetrain.targets.record import Record

ENDED = "kubernetes.json"


def _ended_file(record: Record) -> Path:
    return record.run.path / "job" / ENDED


def write_ended(record: Record, state: JobState) -> None:
    path = _ended_file(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    runs.write_atomic(path, json.dumps({"uid": record.handle["uid"], "code": state.code, "reason": state.reason}) + "\n")


def read_ended(record: Record) -> JobState | None:
    """Returns the end of the run's job, if this machine has seen it."""
    try:
        ended = json.loads(_ended_file(record).read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(ended, dict) or ended.get("uid") != record.handle["uid"]:
        return None
    return JobState("ended", int(ended["code"]), str(ended["reason"]))
