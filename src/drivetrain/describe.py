"""Reads a task's settings and its options for `tune`: from its source text, or in a child process that imports its file.

The child (`python -m drivetrain.describe FILE:CLASS`) is slower, but also reads computed defaults.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.hooks import TUNE_FACTS
from drivetrain.outcomes import Problem
from drivetrain.project import package_of
from drivetrain.settings import MISSING, Setting
from drivetrain.settings_reader.declaration import UNKNOWN
from drivetrain.settings_reader.live import settings_from_json, settings_of_class, settings_to_json
from drivetrain.task import Task
from drivetrain.task_ref import STILL_IMPORTING, TaskRef, load_class
from drivetrain.terminal import printable


def task_settings(task: TaskRef) -> dict[str, Setting]:
    """Returns the settings of a task."""
    declaration = task.declaration()
    return declaration.settings if declaration.complete else settings_from_json(describe_in_child(task)["settings"])


@dataclass(frozen=True)
class TuneFacts:
    """A task's options for `tune`."""

    search: dict[str, str]
    """setting -> range or choices"""
    tune_metric: str
    tune_population: str


def tune_facts(task: TaskRef) -> TuneFacts:
    """Returns a task's options for `tune`."""
    declared = task.declaration().tune_facts
    if UNKNOWN in declared.values():
        facts = TuneFacts(**describe_in_child(task)["tune_facts"])
    else:
        facts = TuneFacts(**{name: getattr(Task, name) if value is MISSING else value for name, value in declared.items()})
    for name, values in facts.search.items():
        if not isinstance(values, str):
            raise Problem(f"{task.class_name}.search: {name} is {values!r}: write LOW..HIGH, LOW..HIGH,log or A|B|C, as text")
    return facts


def describe_in_child(task: TaskRef) -> dict[str, Any]:
    """Returns the task's `settings` and `tune_facts`, which a child process reads by importing the task's file."""
    command = [sys.executable, "-P", "-m", "drivetrain.describe", f"{task.path}:{task.class_name}"]
    with tempfile.TemporaryFile("w+") as output:
        errors = []
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, errors="replace")
        try:
            assert child.stderr is not None
            for line in child.stderr:
                if line.startswith(STILL_IMPORTING):
                    print(f"note    {printable(line)}", end="", file=sys.stderr, flush=True)
                else:
                    errors.append(line)
            child.wait()
        except BaseException:
            child.kill()
            child.wait()
            raise
        output.seek(0)
        if child.returncode != 0:
            raise Problem("".join(errors).strip() or f"{task.path} could not be imported")
        return dict(json.loads(output.read().splitlines()[-1]))


def main() -> None:
    """Imports the task's file and prints its settings and `tune_facts` as one line of JSON. Runs in the child process."""
    path, _, name = sys.argv[1].rpartition(":")
    try:
        cls = load_class(TaskRef(path, path, name, package=package_of(Path(path))))
        description = {
            "settings": settings_to_json(settings_of_class(cls)),
            "tune_facts": {fact: getattr(cls, fact) for fact in TUNE_FACTS},
        }
    except Problem as problem:
        sys.exit(str(problem))
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
        line = f", line {frames[-1].lineno}" if frames else ""
        sys.exit(f"{path}{line}: {type(error).__name__}: {error}")
    print(json.dumps(description))


if __name__ == "__main__":
    main()
