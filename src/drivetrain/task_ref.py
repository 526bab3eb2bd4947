"""Finds the class of a task by its name on the command line, and imports it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from drivetrain.importing import import_module
from drivetrain.outcomes import Problem
from drivetrain.project import find_module, modules_of, package_of
from drivetrain.settings import PACKAGE, nearest
from drivetrain.settings_reader.declaration import TaskDeclaration, read_declaration
from drivetrain.task import Task

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
    "histories": "distill/collect.py:CollectHistories",
    "distill": "distill/distill.py:Distill",
    "cxr": "cxr/cxr.py:Cxr",
}
RECIPES = PACKAGE / "recipes"
"""The folder of the built-in recipes: NAME.yaml."""
STILL_IMPORTING = "still importing"
"""The first words of a notice about a slow import."""
SLOW_IMPORT_SECONDS = 10.0


@dataclass(frozen=True)
class TaskRef:
    """The file and the class of a task."""

    label: str
    """What the user calls it: a built-in's name, or its file's or class's."""
    path: str
    class_name: str
    pickled: bool = False
    """Whether the file is a pickled instance: its class was defined in a notebook or a script."""
    code: str = ""
    """The digest of a pickled instance's source."""
    origin: str = ""
    """The user's own file, if `path` is the run's copy of it."""
    package: str = ""
    """The package that contains the file."""

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> TaskRef:
        names = {f.name for f in fields(TaskRef)}
        task = TaskRef(**{k: v for k, v in values.items() if k in names})
        file, _, class_name = BUILT_IN.get(task.label, "").partition(":")
        if file and class_name == task.class_name and task.path.endswith(f"/{PACKAGE.name}/tasks/{file}"):
            return replace(task, path=str(PACKAGE / "tasks" / file))  # it was recorded on another machine
        return task

    @property
    def built_in(self) -> bool:
        return not self.pickled and Path(self.path).is_relative_to(PACKAGE)

    def declaration(self) -> TaskDeclaration:
        """Returns what the class's source text declares."""
        return read_declaration(Path(self.path), self.class_name)

    def digest(self) -> str:
        """Returns a hash of the task's code: of its file and of the modules of its project that it imports."""
        if self.pickled:
            return self.code
        digests = {path: hashlib.sha256(file.read_bytes()).hexdigest() for path, file in self.modules().items()}
        if len(digests) == 1:
            return next(iter(digests.values()))
        return hashlib.sha256(json.dumps(digests).encode()).hexdigest()

    def modules(self) -> dict[str, Path]:
        """Returns its file and the modules of its project that it imports: path in the run's `task/` -> file."""
        return modules_of(Path(self.path), self.package, is_copy=bool(self.origin))

    @property
    def path_in_run(self) -> str:
        """The path of its file's copy in the run's `task/`."""
        return "/".join([*filter(None, self.package.split(".")), Path(self.path).name])


def built_in_recipes() -> dict[str, Path]:
    """Returns name -> file. `drivetrain train NAME` finds them as it finds built-in tasks."""
    return {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}


def built_in_names() -> list[str]:
    """Returns the names of the built-in tasks and recipes."""
    return [*BUILT_IN, *built_in_recipes()]


def find_task(text: str, folder: Path | None = None) -> TaskRef:
    """Returns the task that a command line names: a built-in, `file.py`, `file.py:Class`, or `package.module:Class`."""
    folder = folder or Path.cwd()
    if text in BUILT_IN:
        file, class_name = BUILT_IN[text].split(":")
        return TaskRef(text, str(PACKAGE / "tasks" / file), class_name)
    if match := re.fullmatch(r"(.+\.py)(?::(\w+))?", text):
        path = folder / Path(match[1]).expanduser()
        if not path.is_file():
            raise Problem(f"there is no file {match[1]} (looked in {path.parent})")
        return _task_in_file(path, match[2])
    if match := re.fullmatch(r"(?=.*[.:])([^\W\d]\w*(?:\.[^\W\d]\w*)*)(?::(\w+))?", text):
        module = find_module(match[1], folder.resolve())
        if module is None:
            raise Problem(f"there is no module {match[1]} here or on Python's path (looked in {folder.absolute()})")
        return _task_in_file(module, match[2])
    if text in built_in_recipes():
        raise Problem(f"{text} is a recipe, not a task: train it with drivetrain train {text}")
    raise Problem(
        f"there is no task {text!r}{nearest(text, built_in_names())} (built in: {', '.join(built_in_names())};"
        f" your own: file.py, file.py:Class or package.module:Class; a recipe: file.yaml)"
    )


def _task_in_file(file: Path, class_name: str | None) -> TaskRef:
    declaration = read_declaration(file, class_name)
    label = file.parent.name if file.stem == "__init__" else file.stem
    return TaskRef(label, str(file.resolve()), declaration.name, package=package_of(file.resolve()))


def load_class(task: TaskRef) -> type[Task]:
    """Returns the task's class: imported from its file, or that of the pickled instance."""
    if task.pickled:
        import cloudpickle

        with open(task.path, "rb") as stream:
            return type(cloudpickle.load(stream))
    path = Path(task.path)
    if task.built_in:
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        return getattr(importlib.import_module(name), task.class_name)  # type: ignore[no-any-return]
    with _notice_of_slow_import(path):
        module = import_module(path, task.package, is_copy=bool(task.origin))
    cls = getattr(module, task.class_name, None)
    if not isinstance(cls, type) or not issubclass(cls, Task):
        raise Problem(f"{task.class_name} in {path} is no task: derive it from drivetrain.Task")
    return cls


def instantiate(task: TaskRef, settings: Mapping[str, Any]) -> Task:
    return load_class(task)(**settings)


@contextlib.contextmanager
def _notice_of_slow_import(path: Path) -> Iterator[None]:
    """Prints on stderr which line of a file is running while its import is slow: a task file may contain an endless loop."""
    importing_thread, done = threading.get_ident(), threading.Event()

    def report() -> None:
        elapsed = pause = SLOW_IMPORT_SECONDS
        while not done.wait(pause):
            stack = traceback.walk_stack(sys._current_frames().get(importing_thread))
            frames_of_file = [frame for frame, _ in stack if frame.f_code.co_filename == str(path)]
            line = f" (line {frames_of_file[0].f_lineno})" if frames_of_file else ""
            print(f"{STILL_IMPORTING} {path.name}{line}, for {elapsed:.0f} s so far", file=sys.stderr, flush=True)
            pause = elapsed  # so each notice comes after twice the time
            elapsed += pause

    threading.Thread(target=report, daemon=True).start()
    try:
        yield
    finally:
        done.set()
