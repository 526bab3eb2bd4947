"""Tells a task's settings, and what `tune` searches in it, by importing its file: for what reading the source cannot see."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

from drivetrain.outcomes import Problem
from drivetrain.project import package_of
from drivetrain.recipe import TaskRef, load_class
from drivetrain.source import of_class, to_json


def main() -> None:
    path, _, name = sys.argv[1].rpartition(":")
    try:
        found = load_class(TaskRef(path, path, name, package=package_of(Path(path))))
        told = {"settings": to_json(of_class(found)), "search": getattr(found, "search", {})}
    except Problem as problem:
        sys.exit(str(problem))
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
        where = f", line {frames[-1].lineno}" if frames else ""
        sys.exit(f"{path}{where}: {type(error).__name__}: {error}")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
