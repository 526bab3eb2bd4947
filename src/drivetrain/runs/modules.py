"""The code of a task, kept with its run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from drivetrain.importing import ORIGINS
from drivetrain.project import modules_of
from drivetrain.runs.layout import FORMAT, Run


def store_task(run: Run, file: Path, package: str) -> None:
    """Copy a task's file, and the modules of its project that it imports, into the run: what resume, eval and workers import."""
    modules = modules_of(file, package)
    target = run.path / "task"
    shutil.rmtree(target, ignore_errors=True)  # of a start that was killed
    target.mkdir(parents=True)
    for place, source in modules.items():
        (target / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / place)
    origins = {place: str(source) for place, source in modules.items()}
    (target / ORIGINS).write_text(json.dumps({"format": FORMAT, "files": origins}, indent=1) + "\n")
