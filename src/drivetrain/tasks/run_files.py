"""JSON files that a task keeps in its run's folder: what its trained model needs to know of the training data, for example."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from drivetrain.outcomes import Problem
from drivetrain.runs import write_atomic


def write_run_file(run_folder: Path | None, name: str, content: object) -> None:
    """Writes a file on rank 0; if it cannot be written, a notice says so. Without a run's folder, as in planning, nothing is written."""
    if run_folder is None or os.environ.get("RANK", "0") != "0":
        return
    try:
        write_atomic(run_folder / name, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        print(f"note    {run_folder / name} cannot be written: {error.strerror or error}", file=sys.stderr, flush=True)


def read_run_file(run_folder: Path | None, name: str) -> Any | None:
    """Returns the content of a file; None if there is none."""
    if run_folder is None:
        return None
    path = run_folder / name
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise Problem(f"{path} cannot be read ({error}): remove it, and its content is read from the data") from None
