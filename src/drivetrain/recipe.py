"""A recipe: a task and its settings from a file, the environment and the command line, validated."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.confidential import looks_secret
from drivetrain.describe import task_settings
from drivetrain.names import check_name
from drivetrain.outcomes import Problem
from drivetrain.settings import Length, Setting, as_text, nearest, resolve
from drivetrain.structured import parse_yaml, read_text
from drivetrain.task_ref import TaskRef, find_task

NOT_SETTINGS = ("task", "name", "plan", "stages")
"""Keys of a recipe file that are not settings."""
ENVIRONMENT_PREFIX = "DRIVETRAIN_"
NOT_SETTINGS_IN_ENVIRONMENT = ("OFFLINE", "FAULTS", "TOKEN", "TOKEN_FILE", "JOB")
MAY_CHANGE = ("epochs", "steps", "log_every", "eval_every", "eval_first", "save_every", "keep", "best", "patience")
"""Settings that a resume may change: they do not affect steps already taken."""


@dataclass(frozen=True)
class Recipe:
    """A task, and the values of all its settings."""

    task: TaskRef
    settings: dict[str, Any]
    origin: dict[str, str]
    """setting -> default, recipe, environment or command line"""
    pins: dict[str, Any] = field(default_factory=dict)
    """Keys of the plan that the user chose."""
    name: str | None = None
    """The run's name, if the recipe gives one."""
    notices: tuple[str, ...] = ()

    def chosen(self) -> dict[str, Any]:
        """Returns the settings that are not defaults."""
        return {name: value for name, value in self.settings.items() if self.origin[name] != "default"}

    def identity(self) -> dict[str, Any]:
        """Returns what must be equal for two recipes to be the same training."""
        task = self.task.label if self.task.built_in else self.task.class_name
        code = "" if self.task.built_in else self.task.digest()
        return {"task": task, "code": code, "settings": self.settings}


def recipe_words(recipe: Recipe) -> list[str]:
    """Returns the key=value words with which a command line gives the recipe's settings and pins."""
    values = recipe.chosen() | {f"plan.{name}": value for name, value in recipe.pins.items()}
    return [f"{name}={as_text(value)}" for name, value in values.items()]


def is_recipe_file(text: str) -> bool:
    return text.endswith((".yaml", ".yml"))


def read_file(path: Path) -> dict[str, Any]:
    """Returns the content of a recipe file. Checks the types of its keys; settings are checked against the task later."""
    values = parse_yaml(read_text(path, "the recipe"), path)
    if not isinstance(values, dict) or not isinstance(values.get("task"), str):
        raise Problem(f"{path} is no recipe: it needs a line such as `task: digits`, then `setting: value` lines")
    stages = values.get("stages", [{}])
    if not isinstance(stages, list) or not stages or not all(isinstance(s, dict) for s in stages):
        raise Problem(f"{path}: stages is a list of mappings, each with a `name` and settings")
    for mapping in (values, *stages):
        _check_keys(mapping, path)
    for stage in stages:
        if "/" in stage.get("name", "") or "stages" in stage:
            raise Problem(f"{path}: a stage has a name without / and no stages of its own")
    return values


def _check_keys(mapping: dict[Any, Any], path: Path) -> None:
    """Raises Problem if a recipe or a stage has a key that is not text, or a `task`, `plan` or `name` of the wrong type."""
    for key in mapping:
        if not isinstance(key, str):
            raise Problem(f"{path}: the key {str(key)[:80]!r} is no name of a setting: write `setting: value` lines")
    if not isinstance(mapping.get("task", ""), str):
        raise Problem(f"{path}: task is text, such as `task: digits`, not {str(mapping['task'])[:80]}")
    if not isinstance(mapping.get("plan", {}), dict):
        raise Problem(f"{path}: plan is a mapping, such as `plan: {{micro_batch: 8}}`")
    if "name" in mapping:
        check_name(mapping["name"], f"{path}: name")


def split_words(words: list[str]) -> dict[str, str]:
    """Returns the settings of a command line's `key=value` words."""
    settings: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise Problem(f"{word!r} is no setting: settings are written key=value, such as epochs=5")
        settings[key.replace("-", "_")] = value
    return settings


def load(text: str, words: list[str], environment: Mapping[str, str] = os.environ) -> list[Recipe]:
    """Returns the recipes of `train TEXT key=value ...`: one for each stage, or a single one."""
    from_command_line = split_words(words)
    if not is_recipe_file(text):
        return [make(find_task(text), {}, from_command_line, environment)]
    path = Path(text).expanduser()
    if not path.is_file():
        raise Problem(f"there is no file {text} (looked in {path.absolute().parent})")
    content = read_file(path)
    name = content.get("name")
    if "stages" in content and name is None:
        name = check_name(path.stem, "the name of the recipe's file,")
    recipes = []
    for number, stage in enumerate(content.get("stages", [{}]), 1):
        task = find_task(stage.get("task", content["task"]), path.parent)
        values = {k: v for k, v in (content | stage).items() if k not in NOT_SETTINGS}
        pins = content.get("plan", {}) | stage.get("plan", {})
        values |= {f"plan.{k}": v for k, v in pins.items()}
        run_name = f"{name}/{number}-{stage.get('name', 'stage')}" if "stages" in content else name
        recipes.append(make(task, values, from_command_line, environment, run_name))
    return recipes


def make(
    task: TaskRef,
    from_file: Mapping[str, object],
    from_command_line: Mapping[str, object],
    environment: Mapping[str, str] = os.environ,
    name: str | None = None,
    known: dict[str, Setting] | None = None,
) -> Recipe:
    """Returns one recipe. The command line wins over the environment, the environment over the recipe's file, the file over defaults."""
    known = known if known is not None else task_settings(task)
    from_environment, notices = _read_environment(environment, known, task.label)
    values: dict[str, object] = {}
    origin = dict.fromkeys(known, "default")
    pins: dict[str, Any] = {}
    for layer_name, layer in (("recipe", from_file), ("environment", from_environment), ("command line", from_command_line)):
        for key, value in layer.items():
            check_not_secret(key, value)
            if key.startswith("plan."):
                pins[key.removeprefix("plan.")] = value
            else:
                values[key], origin[key] = value, layer_name
    settings = resolve(known, values, task.label)
    check_agreement(settings)
    return Recipe(task, settings, origin, pins, name, tuple(notices))


def check_not_secret(key: str, value: object) -> None:
    """Raises Problem for a password or a key: settings are written into run.json, logs and job scripts."""
    if looks_secret(key, str(value)):
        raise Problem(
            f"{key} looks like a secret: settings are written into run.json and logs. Let the task read an environment variable"
            " (os.environ), and name that under secrets: in the target"
        )


def _read_environment(environment: Mapping[str, str], known: Mapping[str, Setting], label: str) -> tuple[dict[str, str], list[str]]:
    """Returns the settings of DRIVETRAIN_* variables, and a notice for each such variable that names no setting."""
    values, notices = {}, []
    for variable, value in environment.items():
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if name == variable or name in NOT_SETTINGS_IN_ENVIRONMENT:
            continue
        if name.lower() in known:
            values[name.lower()] = value
        else:
            notices.append(f"{variable} is set, but {label} has no setting {name.lower()}{nearest(name.lower(), known)}")
    return values, notices


def check_agreement(settings: Mapping[str, Any]) -> None:
    """Raises Problem if two settings of a task contradict each other."""
    if settings["patience"] and not settings["best"]:
        raise Problem(f"patience={settings['patience']} needs a metric to watch: give best=NAME of an evaluation metric")
    with contextlib.suppress(ValueError):  # a task may declare `warmup` with another type
        if Length.parse(settings["warmup"]).unit == "seconds":
            raise Problem(f"warmup={settings['warmup']}: give steps or epochs (1ep), not a time")
