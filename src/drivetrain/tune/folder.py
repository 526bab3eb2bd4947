"""A study's folder: its files and its lock. Decides whether a command resumes the study in a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from drivetrain import runs
from drivetrain.outcomes import Problem
from drivetrain.recipe import Recipe
from drivetrain.runs import Lock, Run
from drivetrain.task_ref import TaskRef
from drivetrain.tune.space import Space
from drivetrain.tune.study import JOURNAL

FORMAT = 1
VALUE = "the best of the trial's evaluations"
"""The description of a trial's value in tune.json."""


@dataclass(frozen=True)
class Goal:
    """What is optimised: an evaluation's metric, and its direction."""

    metric: str
    """eval/NAME, as in the rows of metrics.jsonl."""
    direction: str
    """max or min"""

    @property
    def best(self) -> str:
        """The value of the setting `best`, with which trials keep the weights of their best evaluation."""
        return f"{self.direction}:{self.metric.removeprefix('eval/')}"


@dataclass(frozen=True)
class StudyFolder:
    path: Path
    lock: Lock
    earlier: dict[str, Any] | None
    """The old content of tune.json, if a study is resumed."""
    notice: str = ""
    """What to tell the user about the choice of the folder."""

    def read(self) -> dict[str, Any]:
        return read(self.path)

    def write_tune_json(self, **facts: Any) -> None:
        runs.write_atomic(self.path / "tune.json", json.dumps({"format": FORMAT} | facts, indent=1) + "\n")

    def run_of(self, number: int) -> Run:
        return Run(self.path / "trials" / f"trial-{number:04d}")


def read(path: Path) -> dict[str, Any]:
    """Returns the content of a study's tune.json."""
    try:
        content = json.loads((path / "tune.json").read_text())
    except (OSError, ValueError) as error:
        raise Problem(f"{path / 'tune.json'} cannot be read: {error}") from None
    if content.get("format") != FORMAT:
        raise Problem(f"{path} has format {content.get('format')}; this drivetrain reads format {FORMAT}")
    return dict(content)


def identity(recipe: Recipe, space: Space, goal: Goal) -> dict[str, Any]:
    """Returns what must be equal in two studies so that their trials can be compared."""
    training = recipe.identity()
    fixed = {name: value for name, value in training["settings"].items() if name not in space and name != "best"}
    study = training | {
        "settings": fixed,
        "search": {name: dimension.text for name, dimension in space.items()},
        "metric": goal.metric,
        "direction": goal.direction,
    }
    return dict(json.loads(json.dumps(study)))


def is_same_study(earlier: Mapping[str, Any], study: Mapping[str, Any]) -> bool:
    return all(earlier[key] == study[key] for key in study)


def provenance() -> dict[str, Any]:
    """Returns the provenance of a run, with the version of Optuna."""
    provenance = runs.provenance()
    return provenance | {"versions": provenance["versions"] | {"optuna": metadata.version("optuna")}}


# --- opening -----------------------------------------------------------------------------------


def open_folder(named: str | None, label: str, study: Mapping[str, Any]) -> StudyFolder:
    """Opens the named folder, else the folder of an unfinished study with the same identity, else a new one."""
    if named is None:
        for file in sorted(runs.RUNS.glob(f"tune-{label}-*/tune.json"), reverse=True):
            earlier = read(file.parent)
            if is_same_study(earlier, study) and earlier["status"] != "finished" and not runs.lock_holder(file.parent):
                notice = f"continuing {file.parent}, an unfinished study of the same search (a new one: --name NAME)"
                return StudyFolder(file.parent, Lock.acquire(file.parent), earlier, notice)
        path = runs.new_path(f"tune-{label}")
        return StudyFolder(path, Lock.acquire(path), None)
    path = Path(named)
    if pid := runs.lock_holder(path):
        raise Problem(f"{path} is being tuned by process {pid}: wait for it, stop it (kill {pid}), or choose another --name")
    if runs.is_study(path):
        earlier = read(path)
        _check_same(earlier, study, path)
        return StudyFolder(path, Lock.acquire(path), earlier)
    if os.path.isdir(path) and any(not _may_precede_study(file.name) for file in path.iterdir()):
        raise Problem(f"{path} is not empty and not a study: choose another --run-dir or --name")
    return StudyFolder(path, Lock.acquire(path), None)


def _may_precede_study(file_name: str) -> bool:
    """Whether a start that was killed before tune.json was written may leave this file."""
    return file_name in ("lock", JOURNAL) or file_name.startswith(".tune.json")


def _check_same(earlier: Mapping[str, Any], study: Mapping[str, Any], path: Path) -> None:
    """Raises Problem if a folder has a study with another identity."""
    if earlier["task"] != study["task"]:
        raise Problem(f"{path} is a study of {earlier['task']}, not of {study['task']}: choose another --name")
    if earlier["code"] != study["code"]:
        raise Problem(f"{path} began with another version of {study['task']}: restore that version, or choose another --name")
    _refuse_changes(f"{path} searches", earlier["search"], study["search"])
    _refuse_changes(f"{path} has the settings", earlier["settings"], study["settings"])
    goals = [{"metric": facts["metric"], "direction": facts["direction"]} for facts in (earlier, study)]
    _refuse_changes(f"{path} optimises", *goals)


def _refuse_changes(subject: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if changed:
        detail = ", ".join(f"{name}={old.get(name, 'nothing')} (now {new.get(name, 'nothing')})" for name in changed[:3])
        raise Problem(f"{subject} {detail}: trials of both cannot be compared; choose another --name")


# --- recipes -----------------------------------------------------------------------------------


def task_word(task: TaskRef, base: Path | None = None) -> str:
    """Returns the name of a task for `drivetrain train`, or for a recipe file in the folder `base`."""
    if task.built_in:
        return task.label
    return f"{os.path.relpath(task.path, base) if base else task.path}:{task.class_name}"


def write_best(folder: Path, recipe: Recipe, goal: Goal, number: int, value: float, params: Mapping[str, Any]) -> Path:
    """Writes a recipe that trains the best trial again; returns its path."""
    import yaml

    content: dict[str, Any] = {"task": task_word(recipe.task, folder.resolve())} | recipe.chosen() | dict(params) | {"best": goal.best}
    if recipe.pins:
        content["plan"] = dict(recipe.pins)
    header = f"# Trial {number} of {folder.name}: {goal.metric} {value:.6g}\n"
    runs.write_atomic(folder / "best.yaml", header + yaml.safe_dump(content, sort_keys=False))
    return folder / "best.yaml"
