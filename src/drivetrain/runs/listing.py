"""All runs: finding one by its name, and making a new one."""

from __future__ import annotations

import os
import re
from pathlib import Path

from drivetrain.outcomes import Problem
from drivetrain.runs.layout import RUNS, Run
from drivetrain.settings import nearest


def find(text: str | os.PathLike[str]) -> Run:
    """The run that a name or a path means."""
    for path in (RUNS / text, Path(text)):
        if (path / "run.json").is_file():
            return Run(path)
    if (RUNS / text).is_dir() and (stages := sorted((RUNS / text).glob("*/run.json"))):
        return Run(stages[-1].parent)
    names = [r.name for r in all_runs()]
    raise Problem(f"there is no run {str(text)!r}{nearest(str(text), names)} (drivetrain runs lists them; looked in {RUNS.absolute()})")


def all_runs(root: Path | None = None) -> list[Run]:
    root = root or RUNS
    files = [*root.glob("*/run.json"), *root.glob("*/*/run.json")]
    return [Run(f.parent) for f in sorted(files, key=lambda f: f.parent)]


def new_path(label: str, root: Path | None = None) -> Path:
    """A fresh directory with a readable name: digits-001, digits-002, ..."""
    root = root or RUNS
    label = re.sub(r"[^\w.-]+", "-", label)
    taken = [int(m[1]) for p in root.glob(f"{label}-*") if (m := re.fullmatch(re.escape(label) + r"-(\d+)", p.name))]
    number = max(taken, default=0) + 1
    while True:
        path = root / f"{label}-{number:03d}"
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1
        except OSError as error:
            raise Problem(f"cannot make the run directory {path.absolute()}: {error.strerror}; choose another with --run-dir") from None
