"""The code of a task: its file and the modules of the same project that it imports."""

from __future__ import annotations

import shutil
from pathlib import Path

from drivetrain.runs.layout import Run
from drivetrain.settings import PACKAGE


def store_task(run: Run, file: Path) -> None:
    """Copy a task's file, and the modules beside it that it imports, into the run."""
    target = run.path / "task"
    shutil.rmtree(target, ignore_errors=True)  # of a start that was killed
    target.mkdir(parents=True)
    for source in modules_of(file):
        copy = target / source.relative_to(file.parent)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)


def modules_of(file: Path) -> list[Path]:
    """A task's file, and the modules beside it that it imports, and those that they do."""
    import ast

    waiting: list[Path] = [file]
    done: dict[Path, None] = {}
    while waiting:
        source = waiting.pop()
        if source in done:
            continue
        done[source] = None
        try:
            tree = ast.parse(source.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue  # of a package beside the task; perhaps never imported
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                top = file.parent / name.split(".")[0]
                if top.is_dir() and top != PACKAGE:
                    waiting += sorted(top.rglob("*.py"))
                elif top.with_suffix(".py").is_file() and top != PACKAGE:
                    waiting.append(top.with_suffix(".py"))
    return list(done)
