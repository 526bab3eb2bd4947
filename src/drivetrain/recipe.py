"""A recipe: a task and its settings from a file, the environment and the command line, validated."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from drivetrain.confidential import looks_secret
from drivetrain.describe import task_settings
from drivetrain.names import check_name
from drivetrain.outcomes import Problem
from drivetrain.settings import Length, Setting, as_text, nearest, resolve
from drivetrain.stages import PLAN, check_references, references_in, share_out, with_paths
from drivetrain.structured import parse_yaml, read_text
from drivetrain.task_ref import TaskRef, built_in_recipes, find_task

NOT_SETTINGS = ("task", "name", "plan", "stages")
"""Keys of a recipe file that are not settings."""
ENVIRONMENT_PREFIX = "DRIVETRAIN_"
NOT_SETTINGS_IN_ENVIRONMENT = (
    "BUCKET_LEASE", "BUCKET_PATIENCE", "BUCKET_TIMEOUT", "FAULTS", "JOB", "KUBECTL", "LAUNCH", "OFFLINE", "PACE", "SAMPLES", "TOKEN", "TOKEN_FILE",
)  # fmt: skip
"""Variables with the prefix that belong to drivetrain itself."""
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
    stage: str = ""
    """The name of the stage, if the recipe has stages."""
    references: dict[str, Any] = field(default_factory=dict)
    """Settings that name the run of an earlier stage, with the text of the recipe: `${STAGE.path}`."""

    @property
    def awaits_files(self) -> bool:
        """Whether the task reads files of an earlier stage whose run directory is not known yet."""
        return any(self.settings[name] == value for name, value in self.references.items() if name != "start")

    def with_paths(self, paths: Mapping[str, Path]) -> Recipe:
        """Returns the recipe with the run directories of earlier stages in its settings."""
        return replace(self, settings=self.settings | {name: with_paths(value, paths) for name, value in self.references.items()})

    def chosen(self) -> dict[str, Any]:
        """Returns the settings that are not defaults."""
        return {name: value for name, value in self.settings.items() if self.origin[name] != "default"}

    def identity(self) -> dict[str, Any]:
        """Returns what must be equal for two recipes to be the same training."""
        task = self.task.label if self.task.built_in else self.task.class_name
        code = "" if self.task.built_in else self.task.digest()
        return {"task": task, "code": code, "settings": self.settings | self.references}


def recipe_words(recipe: Recipe) -> list[str]:
    """Returns the key=value words with which a command line gives the recipe's settings and pins."""
    values = recipe.chosen() | {f"plan.{name}": value for name, value in recipe.pins.items()}
    return [f"{name}={as_text(value)}" for name, value in values.items()]


def find_recipe(text: str) -> Path | None:
    """Returns the file of the recipe that a command line names: a file, or a built-in one. None: it names a task."""
    if not text.endswith((".yaml", ".yml")):
        return built_in_recipes().get(text)
    path = Path(text).expanduser()
    if not path.is_file():
        raise Problem(f"there is no file {text} (looked in {path.absolute().parent})")
    return path


def find_tasks(text: str) -> list[TaskRef]:
    """Returns the task that a command line names; of a recipe with stages, the task of each, once each."""
    path = find_recipe(text)
    if path is None:
        return [find_task(text)]
    content = read_file(path)
    return list(dict.fromkeys(find_task(stage.get("task", content["task"]), path.parent) for stage in content.get("stages", [{}])))


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
        if f"{stage.get('name', '')}.".startswith(PLAN):
            raise Problem(
                f"{path}: a stage cannot be called {stage['name']}, because plan.KEY=VALUE is a choice of the plan: choose another name"
            )
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
        stage, dot, name = key.rpartition(".")  # the name of a stage stays as it is
        settings[stage + dot + name.replace("-", "_")] = value
    return settings


def load(text: str, words: list[str], environment: Mapping[str, str] = os.environ) -> list[Recipe]:
    """Returns the recipes of `train TEXT key=value ...`: one for each stage, or a single one."""
    from_command_line = split_words(words)
    path = find_recipe(text)
    if path is None:
        return [make(find_task(text), {}, from_command_line, environment)]
    content = read_file(path)
    if "stages" in content:
        return _load_stages(path, content, from_command_line, environment)
    task = find_task(content["task"], path.parent)
    return [make(task, _settings_in(content), from_command_line, environment, content.get("name"))]


def _settings_in(mapping: Mapping[str, Any]) -> dict[str, object]:
    """Returns the settings of a recipe or a stage, and its choices of the plan as `plan.KEY`."""
    settings = {key: value for key, value in mapping.items() if key not in NOT_SETTINGS}
    return settings | {f"{PLAN}{key}": value for key, value in mapping.get("plan", {}).items()}


def _load_stages(
    path: Path, content: dict[str, Any], from_command_line: Mapping[str, object], environment: Mapping[str, str]
) -> list[Recipe]:
    stages, label = content["stages"], path.name
    run_name = content.get("name") or check_name(path.stem, "the name of the recipe's file,")
    names = [stage.get("name", "stage") for stage in stages]
    tasks = [find_task(stage.get("task", content["task"]), path.parent) for stage in stages]
    settings_of = {task: task_settings(task) for task in dict.fromkeys(tasks)}
    known = [settings_of[task] for task in tasks]
    from_environment, notices = _read_environment(environment, {name: s for settings in known for name, s in settings.items()}, label)
    of_file, of_environment, of_words = (
        share_out(values, names, known, label) for values in (_settings_in(content), from_environment, from_command_line)
    )
    recipes: list[Recipe] = []
    for index, stage in enumerate(stages):
        layers = {"recipe": of_file[index] | _settings_in(stage), "environment": of_environment[index], "command line": of_words[index]}
        recipe = _resolve_layers(tasks[index], known[index], layers, f"{run_name}/{index + 1}-{names[index]}", notices)
        recipes.append(_refer(replace(recipe, stage=names[index]), names[:index], label))
    return recipes


def _refer(recipe: Recipe, earlier: list[str], label: str) -> Recipe:
    """Returns a stage with its references to earlier ones. Without any of its own, it starts from the weights of the stage before."""
    references = references_in(recipe.chosen())
    check_references(references, earlier, label)
    if references or not earlier or recipe.settings["start"] is not None:
        return replace(recipe, references=references)
    start = {"start": f"${{{earlier[-1]}.path}}"}
    return replace(recipe, settings=recipe.settings | start, origin=recipe.origin | {"start": "the stage before"}, references=start)


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
    layers = {"recipe": from_file, "environment": from_environment, "command line": from_command_line}
    return _resolve_layers(task, known, layers, name, notices)


def _resolve_layers(
    task: TaskRef, known: dict[str, Setting], layers: Mapping[str, Mapping[str, object]], name: str | None, notices: list[str]
) -> Recipe:
    """Returns one recipe. `layers`: the values of each origin; a later one wins."""
    values: dict[str, object] = {}
    origin = dict.fromkeys(known, "default")
    pins: dict[str, Any] = {}
    for layer_name, layer in layers.items():
        for key, value in layer.items():
            check_not_secret(key, value)
            if key.startswith(PLAN):
                pins[key.removeprefix(PLAN)] = value
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
