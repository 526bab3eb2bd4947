"""Task files: where a task's class may be defined, the notice about a slow import, and data sets that are refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from drivetrain import describe, task_ref
from drivetrain.data import Tensors
from drivetrain.engine.data.make_feed import check_data
from drivetrain.outcomes import Problem
from drivetrain.settings_reader.declaration import read_declaration
from drivetrain.task_ref import find_task, load_class

BASE = """\
from drivetrain import Task

class Small(Task):
    hidden: int = 3
    \"\"\"Width.\"\"\"

class _Part(Task):
    pass
"""
FILES = {
    "star.py": ("from base import *", "Small"),
    "plain.py": ("import torch\nfrom base import Small", "Small"),
    "alias.py": ("from base import Small as Tiny", "Tiny"),
    "chain.py": ("from star import *", "Small"),
    "package.py": ("from pack import Small", "Small"),
    "derived.py": ("from base import *\nclass Mine(Small):\n    hidden: int = 3\n", "Mine"),
    "everything.py": ("from drivetrain import *\nclass Own(Task):\n    hidden: int = 3\n", "Own"),
    "one.py": ("from two import *\nfrom base import *", "Small"),
    "two.py": ("from one import *\nfrom base import *", "Small"),
}


@pytest.fixture
def files(folder: Path) -> Path:
    Path("base.py").write_text(BASE)
    Path("pack").mkdir()
    Path("pack/__init__.py").write_text("from .inner import *")
    Path("pack/inner.py").write_text(BASE)
    for name, (text, _) in FILES.items():
        Path(name).write_text(text)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_a_task_may_be_imported_into_the_file(name: str, files: Path) -> None:
    task = find_task(name)
    assert task.class_name == FILES[name][1]
    assert describe.task_settings(task)["hidden"].default == 3
    assert find_task(f"{name}:{FILES[name][1]}") == task


def test_the_imported_class_is_loaded(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert load_class(find_task("star.py"))().settings()["hidden"] == 3
    for name in ("base", "star"):
        sys.modules.pop(name, None)


def test_files_without_one_clear_task_are_refused(files: Path) -> None:
    Path("wide.py").write_text("from base import *\nclass Own(Small): pass\n")
    assert read_declaration(Path("wide.py")).name == "Own", "a file's own task comes before those that it imports"
    Path("hidden.py").write_text("__all__ = []\n" + BASE)
    Path("none.py").write_text("from hidden import *\nfrom drivetrain import Task, Tensors\nimport base\n")
    Path("circle.py").write_text("class A(B): pass\nclass B(A): pass\n")
    for name in ("none.py", "circle.py"):
        with pytest.raises(Problem, match="defines no task"):
            read_declaration(Path(name))
    Path("both.py").write_text("from base import Small\nfrom pack import Small as Other\n")
    with pytest.raises(Problem, match="2 tasks: name one"):
        read_declaration(Path("both.py"))
    Path("deep.py").write_text("x = " + "(" * 5000 + ")" * 5000)
    with pytest.raises(Problem):
        read_declaration(Path("deep.py"))


def test_a_slow_import_says_which_line_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(task_ref, "SLOW_IMPORT_SECONDS", 0.2)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("looping.py").write_text("import time\nend = time.monotonic() + 1.5\nwhile time.monotonic() < end:\n    pass\n" + BASE)
    load_class(find_task("looping.py"))
    sys.modules.pop("looping", None)
    first, *more = capsys.readouterr().err.splitlines()
    assert first.startswith(("still importing looping.py (line 3), for", "still importing looping.py (line 4), for"))
    assert 1 <= len(more) <= 3, "the notice comes less and less often"


def test_the_command_shows_the_notice_of_its_child_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    description = json.dumps({"settings": [], "tune_facts": {}})
    Path("python").write_text(f"#!/bin/sh\necho 'still importing t.py (line 3)' >&2\necho other >&2\necho '{description}'\n")
    os.chmod("python", 0o755)
    Path("t.py").write_text(BASE)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    assert describe.describe_in_child(find_task("t.py")) == json.loads(description)
    assert capfd.readouterr().err == "note    still importing t.py (line 3)\n"


X, Y = torch.zeros(50, 8), torch.zeros(50, dtype=torch.long)


@pytest.mark.parametrize("data", [(X, Y), (X,), [X, Y], (np.zeros((5, 3)), np.zeros(5))], ids=["tuple", "one", "list", "arrays"])
def test_columns_that_are_not_in_tensors_are_refused(data: object) -> None:
    with pytest.raises(Problem, match=r"train_data\(\) gave a (tuple|list) of . tensors.*return Tensors\(x, y\)"):
        check_data(data, "train_data()")


@pytest.mark.parametrize("data", [Tensors(X, Y), [(X[0], Y[0])] * 5, [X[0]] * 5, [torch.zeros(3), torch.zeros(4)], ((X[0], Y[0]),) * 2])
def test_data_sets_are_accepted(data: object) -> None:
    check_data(data, "train_data()")
