"""What the mirror process is told, and its waiting times."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from drivetrain.outcomes import Problem

PASS_SECONDS = 2.0
"""Between two looks at the run."""
LEASE_SECONDS = 120.0
PATIENCE_SECONDS = 120.0
ANSWER_SECONDS = 20.0


@dataclass(frozen=True)
class MirrorSettings:
    scheme: str
    path: str
    folder: str
    lease_seconds: float
    """A machine that shows no sign of life for so long loses the right to write."""
    patience_seconds: float
    """At the end of a run, the last files are tried for so long without success."""
    wait_seconds: float = 0.0
    """A machine that still has the right to write is waited for so long."""
    is_restart: bool = False
    """Whether a mirror of the same command was lost: nothing is fetched then."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def lease_seconds() -> float:
    return _seconds("DRIVETRAIN_BUCKET_LEASE", LEASE_SECONDS)


def patience_seconds() -> float:
    return _seconds("DRIVETRAIN_BUCKET_PATIENCE", PATIENCE_SECONDS)


def wait_seconds() -> float:
    """Returns how long a command waits for another machine's lease: a job of a target waits until a machine that has died has lost it."""
    return 1.5 * lease_seconds() if "DRIVETRAIN_JOB" in os.environ else 0.0


def answer_seconds() -> float:
    """Returns how long a request waits for an answer before it is repeated."""
    return _seconds("DRIVETRAIN_BUCKET_TIMEOUT", ANSWER_SECONDS)


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable, "")
    try:
        value = float(text or default)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 86_400:
        raise Problem(f"{variable}={text[:40]}: write a number of seconds from 1 to 86400")
    return value
