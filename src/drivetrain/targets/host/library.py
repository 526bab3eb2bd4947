"""What the parts of the program on a machine share: answers, paths, locks, JSON files."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

JOB_VARIABLE = "DRIVETRAIN_JOB"  # marks every process of a job
STOPPED_CODE = 200  # as drivetrain.outcomes: preempted
FIRST_RETRYABLE_CODE = 201  # infra, hang, out of memory; a preempted command was asked to end
PROJECT_MARK = ".drivetrain"  # a file in the folders of projects that drivetrain made
POLL_SECONDS = 0.2
EXECUTE_SECONDS = 60.0
RETRY_SECONDS = 2.0
CHUNK_BYTES = 1 << 18
TAIL_BYTES = 1 << 16
GROWING, REPLACED = (".log", ".jsonl"), (".json", ".txt")  # suffixes of small files: appended to, or written as a whole


class Failure(Exception):
    """Something that the user can fix."""


def reply(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def folder(text: str) -> Path:
    path = Path(os.path.expanduser(text))
    if not path.is_absolute():
        raise Failure(f"{text} is no absolute path")
    return path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_json(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    temporary.write_text(json.dumps(value))
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
