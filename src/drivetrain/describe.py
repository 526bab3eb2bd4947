"""A task's settings, and what `tune` searches in it: from its source text, or from a child process that imports its file.

The child (`python -m drivetrain.describe FILE:CLASS`) is slower but sees everything, such as defaults that are computed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from drivetrain.outcomes import Problem
from drivetrain.project import package_of
from drivetrain.settings import Setting
from drivetrain.settings_reader.live import settings_from_json, settings_of_class, settings_to_json
from drivetrain.task_ref import STILL_IMPORTING, TaskRef, load_class
from drivetrain.terminal import printable


def task_settings(task: TaskRef) -> dict[str, Setting]:
    """Returns the settings of a task."""
    declaration = task.declaration()
    return declaration.settings if declaration.complete else settings_from_json(describe_in_child(task)["settings"])


def task_search(task: TaskRef) -> dict[str, str]:
    """Returns what `tune` searches in a task: setting -> range or choices."""
    declared = task.declaration().search
    search: dict[str, str] = describe_in_child(task)["search"] if declared is None else declared
    for name, values in search.items():
        if not isinstance(values, str):
            raise Problem(f"{task.class_name}.search: {name} is {values!r}: write LOW..HIGH, LOW..HIGH,log or A|B|C, as text")
    return search


def describe_in_child(task: TaskRef) -> dict[str, Any]:
    """Returns what a child process that imports the task's file reports: its `settings` and `search`."""
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
    """The child: imports the task's file, and prints its settings and `search` as one line of JSON."""
    path, _, name = sys.argv[1].rpartition(":")
    try:
        cls = load_class(TaskRef(path, path, name, package=package_of(Path(path))))
        description = {"settings": settings_to_json(settings_of_class(cls)), "search": cls.search}
    except Problem as problem:
        sys.exit(str(problem))
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
        line = f", line {frames[-1].lineno}" if frames else ""
        sys.exit(f"{path}{line}: {type(error).__name__}: {error}")
    print(json.dumps(description))


if __name__ == "__main__":
    main()
