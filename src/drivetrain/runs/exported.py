"""Checks exported files against the SHA-256 sums in export.json in the same folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from drivetrain.outcomes import Problem

EXPORT_CARD = "export.json"


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_exported(path: Path) -> None:
    """Raises Problem if the file's SHA-256 differs from that in export.json. Without export.json nothing is checked."""
    try:
        expected = json.loads((path.parent / EXPORT_CARD).read_text())["sha256"][path.name]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if sha256_of(path) != expected:
        raise Problem(
            f"{path} is broken: its SHA-256 is not the one in {EXPORT_CARD}; copy it again, or export the run again: drivetrain export RUN"
        )
