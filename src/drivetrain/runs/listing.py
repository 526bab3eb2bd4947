"""Finds runs by name, lists all runs, and makes the directory of a new run."""

from __future__ import annotations

import os
import re
from pathlib import Path

from drivetrain.outcomes import Problem
from drivetrain.runs.layout import RUNS, Run
from drivetrain.settings import nearest


def find(text: str | os.PathLike[str]) -> Run:
    """Returns the run of a name or a path; for a recipe with stages, the run of the last stage."""
    for path in (*_paths_of_name(text), *([Path(text)] if os.fspath(text) else [])):
        if is_run(path):
            return Run(path)
    if stages := [stage for path in _paths_of_name(text) for stage in stages_of(path)]:
        return stages[-1]
    shown = os.fspath(text) if len(os.fspath(text)) <= 100 else f"{os.fspath(text)[:100]}..."
    names = [run.name for run in all_runs()]
    raise Problem(f"there is no run {shown!r}{nearest(shown, names)} (drivetrain runs lists them; looked in {RUNS.absolute()})")


def _paths_of_name(text: str | os.PathLike[str]) -> list[Path]:
    """Returns the path in `runs/` of a name; an empty list for text that is no name (empty, ".", or with "..")."""
    path = Path(text)
    return [RUNS / path] if path.parts and ".." not in path.parts and not path.is_absolute() else []


def is_run(path: Path) -> bool:
    return os.path.isfile(path / "run.json")  # also false for names that no file system takes


def is_study(path: Path) -> bool:
    return os.path.isfile(path / "tune.json")


def stages_of(path: Path) -> list[Run]:
    """Returns the runs of a recipe's stages, in order."""

    def order(file: Path) -> tuple[int, str]:
        number = file.parent.name.partition("-")[0]
        return int(number) if number.isdecimal() else 0, file.parent.name

    return [Run(file.parent) for file in sorted(path.glob("*/run.json"), key=order)] if os.path.isdir(path) else []


def find_deletable(text: str) -> list[Run]:
    """Returns what deleting a name deletes: one run, one study, or the runs of a recipe's stages. Links are refused."""
    path = Path(text)
    if not path.parts or ".." in path.parts:
        raise Problem(f"{text!r} is not the name of a run: name the runs to delete as `drivetrain runs` lists them")
    for candidate in (*_paths_of_name(text), path):
        deletable: list[Run] = []
        if is_run(candidate) or is_study(candidate) or os.path.isfile(candidate / "target.json"):
            deletable = [Run(candidate)]
        elif candidate != path:
            deletable = stages_of(candidate)
        for run in deletable:
            _check_deletable(run.path)
        if deletable:
            return deletable
    return [find(text)]  # raises the error for an unknown name


def _check_deletable(path: Path) -> None:
    """Raises Problem where deleting a path would delete more than a run: a link, a parent of this folder, other runs."""
    allowed_root = RUNS.resolve() if path.is_relative_to(RUNS) else path.parent.resolve()
    if path.is_symlink() or not path.resolve().is_relative_to(allowed_root):
        raise Problem(f"{path} is a link to {path.resolve()}: delete that by its own path, and the link by hand")
    if Path.cwd().is_relative_to(path.resolve()) or RUNS.resolve().is_relative_to(path.resolve()):
        raise Problem(f"{path} contains the current folder or {RUNS}/: delete it by hand")
    if is_run(path) and (others := [run for run in all_runs(path) if run.path.resolve().is_relative_to(path.resolve())]):
        raise Problem(f"{path} contains other runs: delete {others[0].path} first")


def all_runs(root: Path | None = None) -> list[Run]:
    root = root or RUNS
    files = [*root.glob("*/run.json"), *root.glob("*/*/run.json")]
    return [Run(file.parent) for file in sorted(files, key=lambda f: f.parent) if file.is_file()]


def new_path(label: str, root: Path | None = None) -> Path:
    """Makes a new directory with the next free name: digits-001, digits-002, ..."""
    root = root or RUNS
    label = re.sub(r"[^\w.-]+", "-", label)
    matches = [re.fullmatch(re.escape(label) + r"-(\d+)", path.name) for path in root.glob(f"{label}-*")]
    number = max((int(match[1]) for match in matches if match), default=0) + 1
    while True:
        path = root / f"{label}-{number:03d}"
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1
        except OSError as error:
            raise Problem(f"cannot make the run directory {path.absolute()}: {error.strerror}; choose another with --run-dir") from None
