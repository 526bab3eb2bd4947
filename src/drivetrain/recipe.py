"""A recipe: a task and its settings from a file, the environment and the command line, validated."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from drivetrain.importing import import_module
from drivetrain.names import check_name
from drivetrain.outcomes import Problem
from drivetrain.project import find_module, modules_of, package_of
from drivetrain.settings import PACKAGE, Length, Setting, nearest, resolve
from drivetrain.source import TaskSource, from_json, read_source
from drivetrain.structured import parse_yaml, read_text
from drivetrain.task import Task
from drivetrain.terminal import printable

BUILT_IN = {
    "digits": "vision/digits.py:Digits",
    "mnist": "vision/mnist.py:Mnist",
    "fashion-mnist": "vision/mnist.py:FashionMnist",
    "cifar10": "vision/cifar.py:Cifar10",
    "folder": "vision/folder.py:Folder",
    "bandit": "rl/worlds.py:Bandit",
    "cartpole": "rl/worlds.py:CartPole",
    "snake": "rl/worlds.py:Snake",
    "gym": "rl/gym.py:Gym",
    "lora": "lora/lora.py:Lora",
}
RESERVED = ("task", "name", "plan", "stages")
IMPORTING, IMPORT_SECONDS = "still importing", 10.0
VARIABLES = ("OFFLINE", "FAULTS")  # DRIVETRAIN_<these> are not settings

# What a later resume may change: nothing here alters a step already taken.
MAY_CHANGE = ("epochs", "steps", "log_every", "eval_every", "eval_first", "save_every", "keep", "best", "patience")


@dataclass(frozen=True)
class TaskRef:
    """A task by where its class is: a built-in's name, or a file and a class; `pickled` ones came by value."""

    label: str
    path: str
    class_name: str
    pickled: bool = False
    code: str = ""
    """Of a pickled one: the digest of its source."""
    origin: str = ""
    """The user's own file, where `path` is the run's copy of it."""
    package: str = ""
    """The package that its file is a module of."""

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> TaskRef:
        known = {f.name for f in fields(TaskRef)}
        return TaskRef(**{k: v for k, v in values.items() if k in known})

    @property
    def built_in(self) -> bool:
        return not self.pickled and Path(self.path).is_relative_to(PACKAGE)

    def source(self) -> TaskSource:
        return read_source(Path(self.path), self.class_name)

    def settings(self) -> dict[str, Setting]:
        """Its settings, from the text where that tells all, else from a child process that imports the file."""
        source = self.source()
        return source.settings if source.complete else from_json(describe(self)["settings"])

    def search(self) -> dict[str, str]:
        """What `tune` searches in it, read in the same two ways."""
        found = self.source().search
        found = describe(self)["search"] if found is None else found
        for key, text in found.items():
            if not isinstance(text, str):
                raise Problem(f"{self.class_name}.search: {key} is {text!r}: write LOW..HIGH, LOW..HIGH,log or A|B|C, as text")
        return found

    def digest(self) -> str:
        if self.pickled:
            return self.code
        import hashlib

        digests = {place: hashlib.sha256(file.read_bytes()).hexdigest() for place, file in self.modules().items()}
        return next(iter(digests.values())) if len(digests) == 1 else hashlib.sha256(json.dumps(digests).encode()).hexdigest()

    def modules(self) -> dict[str, Path]:
        """Its file, and the modules of its project that it imports: path in the run's `task/` -> file."""
        return modules_of(Path(self.path), self.package, kept=bool(self.origin))

    @property
    def place(self) -> str:
        """Its file's path in the run's `task/`."""
        return "/".join([*filter(None, self.package.split(".")), Path(self.path).name])


@dataclass(frozen=True)
class Recipe:
    task: TaskRef
    settings: dict[str, Any]
    origin: dict[str, str]
    """setting -> default, recipe, environment or command line"""
    pins: dict[str, Any] = field(default_factory=dict)
    name: str | None = None
    notices: tuple[str, ...] = ()

    def identity(self) -> dict[str, Any]:
        """What makes two recipes the same training."""
        task = self.task.label if self.task.built_in else self.task.class_name
        code = "" if self.task.built_in else self.task.digest()
        return {"task": task, "code": code, "settings": self.settings}


def find_task(text: str, base: Path | None = None) -> TaskRef:
    """The task that a word names: a built-in, `file.py`, `file.py:Class`, or `package.module:Class`."""
    if text in BUILT_IN:
        file, class_name = BUILT_IN[text].split(":")
        return TaskRef(text, str(PACKAGE / "tasks" / file), class_name)
    match = re.fullmatch(r"(.+\.py)(?::(\w+))?", text)
    dotted = re.fullmatch(r"(?=.*[.:])([^\W\d]\w*(?:\.[^\W\d]\w*)*)(?::(\w+))?", text) if match is None else None
    if dotted is not None:
        module = find_module(dotted[1], (base or Path.cwd()).resolve())
        if module is None:
            raise Problem(f"there is no module {dotted[1]} here or on Python's path (looked in {(base or Path.cwd()).absolute()})")
        return _task_of(module, dotted[2])
    if match is None:
        raise Problem(
            f"there is no task {text!r}{nearest(text, BUILT_IN)} (built in: {', '.join(BUILT_IN)};"
            f" your own: file.py, file.py:Class or package.module:Class; a recipe: file.yaml)"
        )
    path = (base or Path.cwd()) / Path(match[1]).expanduser()
    if not path.is_file():
        raise Problem(f"there is no file {match[1]} (looked in {path.parent})")
    return _task_of(path, match[2])


def _task_of(file: Path, class_name: str | None) -> TaskRef:
    source = read_source(file, class_name)
    label = file.parent.name if file.stem == "__init__" else file.stem
    return TaskRef(label, str(file.resolve()), source.name, package=package_of(file.resolve()))


def is_recipe_file(text: str) -> bool:
    return text.endswith((".yaml", ".yml"))


def read_file(path: Path) -> dict[str, Any]:
    """Returns a recipe file's mapping, its keys checked for form (settings are checked against the task later)."""
    values = parse_yaml(read_text(path, "the recipe"), path)
    if not isinstance(values, dict) or not isinstance(values.get("task"), str):
        raise Problem(f"{path} is no recipe: it needs a line such as `task: digits`, then `setting: value` lines")
    stages = values.get("stages", [{}])
    if not isinstance(stages, list) or not stages or not all(isinstance(s, dict) for s in stages):
        raise Problem(f"{path}: stages is a list of mappings, each with a `name` and settings")
    for part in (values, *stages):
        for key in part:
            if not isinstance(key, str):
                raise Problem(f"{path}: the key {str(key)[:80]!r} is no name of a setting: write `setting: value` lines")
        if not isinstance(part.get("task", ""), str):
            raise Problem(f"{path}: task is text, such as `task: digits`, not {str(part['task'])[:80]}")
        if not isinstance(part.get("plan", {}), dict):
            raise Problem(f"{path}: plan is a mapping, such as `plan: {{micro_batch: 8}}`")
        if "name" in part:
            check_name(part["name"], f"{path}: name")
    for stage in stages:
        if "/" in stage.get("name", "") or "stages" in stage:
            raise Problem(f"{path}: a stage has a name without / and no stages of its own")
    return values


def split_words(words: list[str]) -> dict[str, str]:
    """`key=value` words of a command line."""
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise Problem(f"{word!r} is no setting: settings are written key=value, such as epochs=5")
        given[key.replace("-", "_")] = value
    return given


def load(text: str, words: list[str], environment: Mapping[str, str] = os.environ) -> list[Recipe]:
    """The recipes that `train TEXT key=value ...` means: one, or one a stage."""
    given = split_words(words)
    if not is_recipe_file(text):
        return [make(find_task(text), {}, given, environment)]
    path = Path(text).expanduser()
    if not path.is_file():
        raise Problem(f"there is no file {text} (looked in {path.absolute().parent})")
    top = read_file(path)
    name = top.get("name")
    common = {k: v for k, v in top.items() if k not in RESERVED}
    stages = top.get("stages")
    recipes = []
    for number, stage in enumerate(stages or [{}], 1):
        ref = find_task(stage.get("task", top["task"]), path.parent)
        values = common | {k: v for k, v in stage.items() if k not in RESERVED}
        values |= {f"plan.{k}": v for k, v in {**top.get("plan", {}), **stage.get("plan", {})}.items()}
        stage_name = f"{number}-{stage.get('name', 'stage')}" if stages else None
        if stages and name is None:
            name = check_name(path.stem, "the name of the recipe's file,")
        recipes.append(make(ref, values, given, environment, "/".join(filter(None, [name, stage_name])) or None))
    return recipes


def make(
    task: TaskRef,
    recipe: Mapping[str, object],
    given: Mapping[str, object],
    environment: Mapping[str, str] = os.environ,
    name: str | None = None,
    known: dict[str, Setting] | None = None,
) -> Recipe:
    """One recipe: command line over environment over file over default."""
    known = known if known is not None else task.settings()
    values: dict[str, object] = {}
    origin = dict.fromkeys(known, "default")
    pins: dict[str, Any] = {}
    notices = []
    from_environment = {}
    for variable, value in environment.items():
        key = variable.removeprefix("DRIVETRAIN_")
        if key != variable and key not in VARIABLES:
            if key.lower() in known:
                from_environment[key.lower()] = value
            else:
                notices.append(f"{variable} is set, but {task.label} has no setting {key.lower()}{nearest(key.lower(), known)}")
    for source, layer in (("recipe", recipe), ("environment", from_environment), ("command line", given)):
        for key, entry in layer.items():
            if key.startswith("plan."):
                pins[key.removeprefix("plan.")] = entry
            else:
                values[key], origin[key] = entry, source
    settings = resolve(known, values, task.label)
    check_agreement(settings)
    return Recipe(task, settings, origin, pins, name, tuple(notices))


def check_agreement(settings: Mapping[str, Any]) -> None:
    """Raises Problem where two settings of a task do not go together."""
    if settings["patience"] and not settings["best"]:
        raise Problem(f"patience={settings['patience']} needs a metric that gets better: say best=NAME of one the evaluation gives")
    with contextlib.suppress(ValueError):  # a task may give it a type of its own
        if Length.parse(settings["warmup"]).unit == "seconds":
            raise Problem(f"warmup={settings['warmup']}: give steps or epochs (1ep), not a time")


def describe(task: TaskRef) -> dict[str, Any]:
    """Ask a child process that imports the file; slower, but it sees everything."""
    import subprocess
    import tempfile

    command = [sys.executable, "-P", "-m", "drivetrain.processes.describe", f"{task.path}:{task.class_name}"]
    with tempfile.TemporaryFile("w+") as told:
        said = []
        child = subprocess.Popen(command, stdout=told, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, errors="replace")
        try:
            assert child.stderr is not None
            for line in child.stderr:
                if line.startswith(IMPORTING):
                    print(f"note    {printable(line)}", end="", file=sys.stderr, flush=True)
                else:
                    said.append(line)
            child.wait()
        except BaseException:
            child.kill()
            child.wait()
            raise
        told.seek(0)
        if child.returncode != 0:
            raise Problem("".join(said).strip() or f"{task.path} could not be imported")
        return dict(json.loads(told.read().splitlines()[-1]))


@contextlib.contextmanager
def progress_of_import(path: Path) -> Iterator[None]:
    """Says where an import is, on stderr, while it takes long: a loop at the top of a task file would end never and silently."""
    importing, done = threading.get_ident(), threading.Event()

    def say() -> None:
        spent = pause = IMPORT_SECONDS
        while not done.wait(pause):
            frames = [f for f, _ in traceback.walk_stack(sys._current_frames().get(importing)) if f.f_code.co_filename == str(path)]
            line = f" (line {frames[0].f_lineno})" if frames else ""
            print(f"{IMPORTING} {path.name}{line}, for {spent:.0f} s so far", file=sys.stderr, flush=True)
            pause = spent
            spent += pause

    threading.Thread(target=say, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def load_class(task: TaskRef) -> type:
    """The task's class: imported from its file, or unpickled where it came by value."""
    if task.pickled:
        import cloudpickle

        with open(task.path, "rb") as file:
            return type(cloudpickle.load(file))
    path = Path(task.path)
    if task.built_in:
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        return getattr(importlib.import_module(name), task.class_name)  # type: ignore[no-any-return]
    with progress_of_import(path):
        module = import_module(path, task.package, kept=bool(task.origin))
    found = getattr(module, task.class_name, None)
    if not isinstance(found, type) or not issubclass(found, Task):
        raise Problem(f"{task.class_name} in {path} is no task: derive it from drivetrain.Task")
    return found


def instantiate(task: TaskRef, settings: Mapping[str, Any]) -> Task:
    return load_class(task)(**settings)  # type: ignore[no-any-return]
