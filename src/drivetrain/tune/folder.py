"""A study's folder: its files, its lock, and whether a command resumes the study in it."""

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
"""What tune.json says of a trial's value."""


@dataclass(frozen=True)
class Goal:
    """What is optimised: an evaluation's metric, and its direction."""

    metric: str
    """As in the rows of metrics.jsonl: eval/NAME."""
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
    """The content of tune.json, if a study is resumed."""
    notice: str = ""
    """What to tell the user about the choice of the folder."""

    def read(self) -> dict[str, Any]:
        return read(self.path)

    def write(self, **facts: Any) -> None:
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
    """Returns what two studies must have in common for their trials to be comparable."""
    training = recipe.identity()
    fixed = {k: v for k, v in training["settings"].items() if k not in space and k != "best"}
    study = training | {
        "settings": fixed,
        "search": {k: d.text for k, d in space.items()},
        "metric": goal.metric,
        "direction": goal.direction,
    }
    return dict(json.loads(json.dumps(study)))


def is_same_study(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return all(earlier[key] == now[key] for key in now)


def provenance() -> dict[str, Any]:
    """Returns the provenance of a run, with the version of Optuna."""
    provenance = runs.provenance()
    return provenance | {"versions": provenance["versions"] | {"optuna": metadata.version("optuna")}}


# --- opening -----------------------------------------------------------------------------------


def open_folder(named: str | None, label: str, study: Mapping[str, Any]) -> StudyFolder:
    """Opens the named folder, the folder of an unfinished study with the same identity, or a new one."""
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
    if os.path.isdir(path) and any(p.name not in ("lock", JOURNAL) and not p.name.startswith(".tune.json") for p in path.iterdir()):
        raise Problem(f"{path} is not empty and no study: choose another --run-dir or --name")
    return StudyFolder(path, Lock.acquire(path), None)


def _check_same(earlier: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    """Refuses to mix two studies in one folder."""
    if earlier["task"] != now["task"]:
        raise Problem(f"{path} is a study of {earlier['task']}, not of {now['task']}: choose another --name")
    if earlier["code"] != now["code"]:
        raise Problem(f"{path} began with another version of {now['task']}: put that back, or choose another --name")
    _refuse_changes(f"{path} searches", earlier["search"], now["search"])
    _refuse_changes(f"{path} has the settings", earlier["settings"], now["settings"])
    goals = [{"metric": one["metric"], "direction": one["direction"]} for one in (earlier, now)]
    _refuse_changes(f"{path} optimises", *goals)


def _refuse_changes(subject: str, earlier: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    changed = [k for k in {**earlier, **now} if earlier.get(k) != now.get(k)]
    if changed:
        detail = ", ".join(f"{k}={earlier.get(k, 'nothing')} (now {now.get(k, 'nothing')})" for k in changed[:3])
        raise Problem(f"{subject} {detail}: trials of both cannot be compared; choose another --name")


# --- recipes -----------------------------------------------------------------------------------


def task_word(task: TaskRef, base: Path | None = None) -> str:
    """Returns the argument of `train` that names a task, or its name in a recipe in the folder `base`."""
    if task.built_in:
        return task.label
    return f"{os.path.relpath(task.path, base) if base else task.path}:{task.class_name}"


def chosen_settings(recipe: Recipe) -> dict[str, Any]:
    """Returns the settings that are not defaults."""
    return {k: v for k, v in recipe.settings.items() if recipe.origin[k] != "default"}


def write_best(folder: Path, recipe: Recipe, goal: Goal, number: int, value: float, params: Mapping[str, Any]) -> Path:
    """Writes a recipe that trains the best trial again; returns its path."""
    import yaml

    content: dict[str, Any] = (
        {"task": task_word(recipe.task, folder.resolve())} | chosen_settings(recipe) | dict(params) | {"best": goal.best}
    )
    if recipe.pins:
        content["plan"] = dict(recipe.pins)
    header = f"# Trial {number} of {folder.name}: {goal.metric} {value:.6g}\n"
    runs.write_atomic(folder / "best.yaml", header + yaml.safe_dump(content, sort_keys=False))
    return folder / "best.yaml"
