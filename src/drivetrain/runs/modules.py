"""Copies a task's code into its run directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from drivetrain.importing import ORIGINS
from drivetrain.project import modules_of
from drivetrain.runs.layout import FORMAT, Run


def store_task(run: Run, file: Path, package: str) -> None:
    """Copies a task's file, and the modules of its project that it imports, into the run. Resume, eval and workers import the copy."""
    modules = modules_of(file, package)
    target = run.path / "task"
    shutil.rmtree(target, ignore_errors=True)  # from a start that was killed
    target.mkdir(parents=True)
    for relative_path, source in modules.items():
        (target / relative_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / relative_path)
    origins = {relative_path: str(source) for relative_path, source in modules.items()}
    (target / ORIGINS).write_text(json.dumps({"format": FORMAT, "files": origins}, indent=1) + "\n")
