"""A study's folder: what it holds, who may write it, and whether a command goes on with it."""

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


@dataclass(frozen=True)
class Goal:
    """What is optimised: an evaluation's metric, and which way."""

    metric: str
    """As in the rows of metrics.jsonl: eval/NAME."""
    direction: str
    """max or min"""

    @property
    def best(self) -> str:
        """The same as the setting `best`, with which trials keep the weights that had their value."""
        return f"{self.direction}:{self.metric.removeprefix('eval/')}"


@dataclass(frozen=True)
class Folder:
    path: Path
    lock: Lock
    before: dict[str, Any] | None
    """tune.json of the study that goes on; None for a new one."""
    why: str = ""

    def read(self) -> dict[str, Any]:
        return read(self.path)

    def write(self, **facts: Any) -> None:
        runs.write_atomic(self.path / "tune.json", json.dumps({"format": FORMAT} | facts, indent=1) + "\n")

    def run_of(self, number: int) -> Run:
        return Run(self.path / "trials" / f"trial-{number:04d}")


def read(path: Path) -> dict[str, Any]:
    try:
        told = json.loads((path / "tune.json").read_text())
    except (OSError, ValueError) as error:
        raise Problem(f"{path / 'tune.json'} cannot be read: {error}") from None
    if told.get("format") != FORMAT:
        raise Problem(f"{path} has format {told.get('format')}; this drivetrain reads format {FORMAT}")
    return dict(told)


def identity(recipe: Recipe, space: Space, goal: Goal) -> dict[str, Any]:
    """What makes two studies the same: their trials can be compared."""
    same = recipe.identity()
    fixed = {k: v for k, v in same["settings"].items() if k not in space and k != "best"}
    told = same | {"settings": fixed, "search": {k: d.text for k, d in space.items()}, "metric": goal.metric, "direction": goal.direction}
    return dict(json.loads(json.dumps(told)))


def same_study(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return all(before[key] == now[key] for key in now)


def provenance() -> dict[str, Any]:
    told = runs.provenance()
    return told | {"versions": told["versions"] | {"optuna": metadata.version("optuna")}}


# --- opening -----------------------------------------------------------------------------------


def open_folder(named: str | None, label: str, same: Mapping[str, Any]) -> Folder:
    """The folder that was named, that of an unfinished study of the same search, or a new one."""
    if named is None:
        for file in sorted(runs.RUNS.glob(f"tune-{label}-*/tune.json"), reverse=True):
            before = read(file.parent)
            if same_study(before, same) and before["status"] != "finished" and not runs.lock_holder(file.parent):
                why = f"going on with {file.parent}, unfinished and of the same search (a fresh one: --name NAME)"
                return Folder(file.parent, Lock.acquire(file.parent), before, why)
        path = runs.new_path(f"tune-{label}")
        return Folder(path, Lock.acquire(path), None)
    path = Path(named)
    if pid := runs.lock_holder(path):
        raise Problem(f"{path} is being tuned by process {pid}: wait for it, stop it (kill {pid}), or choose another --name")
    if runs.is_study(path):
        before = read(path)
        _check_same(before, same, path)
        return Folder(path, Lock.acquire(path), before)
    if os.path.isdir(path) and any(p.name not in ("lock", JOURNAL) and not p.name.startswith(".tune.json") for p in path.iterdir()):
        raise Problem(f"{path} is not empty and no study: choose another --run-dir or --name")
    return Folder(path, Lock.acquire(path), None)


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    """Refuse to mix two studies in one folder."""
    if before["task"] != now["task"]:
        raise Problem(f"{path} is a study of {before['task']}, not of {now['task']}: choose another --name")
    if before["code"] != now["code"]:
        raise Problem(f"{path} began with another version of {now['task']}: put that back, or choose another --name")
    _refuse_changes(f"{path} searches", before["search"], now["search"])
    _refuse_changes(f"{path} has the settings", before["settings"], now["settings"])
    goals = [{"metric": one["metric"], "direction": one["direction"]} for one in (before, now)]
    _refuse_changes(f"{path} optimises", *goals)


def _refuse_changes(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    changed = [k for k in {**before, **now} if before.get(k) != now.get(k)]
    if changed:
        detail = ", ".join(f"{k}={before.get(k, 'nothing')} (now {now.get(k, 'nothing')})" for k in changed[:3])
        raise Problem(f"{what} {detail}: trials of both cannot be compared; choose another --name")


# --- recipes -----------------------------------------------------------------------------------


def task_word(task: TaskRef, base: Path | None = None) -> str:
    """The word that names a task to `train`, or in a recipe that lies in `base`."""
    if task.built_in:
        return task.label
    return f"{os.path.relpath(task.path, base) if base else task.path}:{task.class_name}"


def given(recipe: Recipe) -> dict[str, Any]:
    """The settings that somebody chose."""
    return {k: v for k, v in recipe.settings.items() if recipe.origin[k] != "default"}


def write_best(folder: Path, recipe: Recipe, goal: Goal, number: int, value: float, params: Mapping[str, Any]) -> Path:
    """A recipe that trains the best trial again."""
    import yaml

    told: dict[str, Any] = {"task": task_word(recipe.task, folder.resolve())} | given(recipe) | dict(params) | {"best": goal.best}
    if recipe.pins:
        told["plan"] = dict(recipe.pins)
    head = f"# Trial {number} of {folder.name}: {goal.metric} {value:.6g}\n"
    runs.write_atomic(folder / "best.yaml", head + yaml.safe_dump(told, sort_keys=False))
    return folder / "best.yaml"
