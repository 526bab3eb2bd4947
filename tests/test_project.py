"""A task in a project of several modules: all modules that it imports are copied into the run, and imported from there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain import project
from drivetrain.outcomes import Problem
from drivetrain.project import find_module, modules_of, package_of
from drivetrain.runs import Run, store_task
from drivetrain.task_ref import TaskRef, find_task, load_class
from tests.command import TASK, environment, expect_error, run_drivetrain, run_ok, write_task

MODEL = "nn.Sequential(nn.Flatten(), nn.Linear(64, self.hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(self.hidden, 10))"


def write(files: dict[str, str]) -> None:
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)


def copied_modules(file: str) -> list[str]:
    path = Path(file).resolve()
    return list(modules_of(path, package_of(path)))


LAYOUTS = {
    "a script and the modules beside it": (
        "task.py",
        {"task.py": "import a, b.c\nfrom torch import nn\nimport json", "a.py": "import d", "d.py": "", "b/__init__.py": "", "b/c.py": "", "e.py": ""},
        ["a.py", "b/__init__.py", "b/c.py", "d.py", "task.py"],
    ),
    "a package, relative": (
        "pkg/sub/task.py",
        {
            "pkg/__init__.py": "", "pkg/sub/__init__.py": "from . import one", "pkg/sub/one.py": "", "pkg/two.py": "from .three import X",
            "pkg/three.py": "X = 1", "pkg/unused.py": "", "pkg/sub/task.py": "def late():\n    from ..two import X, missing",
        },
        ["pkg/__init__.py", "pkg/sub/__init__.py", "pkg/sub/one.py", "pkg/sub/task.py", "pkg/three.py", "pkg/two.py"],
    ),
    "a package, absolute": (
        "pkg/task.py",
        {"pkg/__init__.py": "", "pkg/other.py": "", "pkg/task.py": "from pkg import other\nfrom pkg.other import x\nimport beside", "pkg/beside.py": ""},
        ["beside.py", "pkg/__init__.py", "pkg/other.py", "pkg/task.py"],
    ),
    "folders without __init__.py": (
        "pkg/sub/task.py",
        {"pkg/sub/task.py": "from ..lib import x\nimport spaces.deep.m", "pkg/lib.py": "", "spaces/deep/m.py": ""},
        ["pkg/lib.py", "pkg/sub/task.py", "spaces/deep/m.py"],
    ),
    "the folders above, and src": (
        "experiments/one/task.py",
        {"experiments/one/task.py": "import common\nfrom lib.net import Net", "common.py": "", "src/lib/__init__.py": "", "src/lib/net.py": "from . import part", "src/lib/part.py": ""},
        ["common.py", "lib/__init__.py", "lib/net.py", "lib/part.py", "task.py"],
    ),
    "names that are computed at run time": (
        "task.py",
        {
            "task.py": "from importlib import import_module as i\nimport importlib\nimportlib.import_module(f'nets.{1}')\nimportlib.import_module('plain')",
            "nets/__init__.py": "", "nets/a.py": "", "nets/deep/b.py": "", "nets/.hidden/c.py": "", "plain.py": "", "other.py": "",
        },
        ["nets/__init__.py", "nets/a.py", "nets/deep/b.py", "plain.py", "task.py"],
    ),
    "installed packages are not the project's": (
        "pkg/deep/task.py",
        {"pkg/deep/task.py": "import torch, numpy, json, drivetrain.task", "torch/__init__.py": "", "json.py": "", "numpy/data.txt": ""},
        ["task.py"],
    ),
    "a circle, and files that cannot be read": (
        "task.py",
        {"task.py": "import a, broken", "a.py": "import task, a", "broken.py": "def ("},
        ["a.py", "broken.py", "task.py"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_project_modules_that_a_task_imports_are_copied(layout: str, folder: Path) -> None:
    file, files, expected = LAYOUTS[layout]
    write(files)
    assert copied_modules(file) == expected
    path = Path(file).resolve()
    task = TaskRef("task", str(path), "T", package=package_of(path))
    run = Run(Path("runs/a"))
    store_task(run, path, task.package)
    copy = TaskRef("task", str((run.path / "task" / task.path_in_run).resolve()), "T", package=task.package, origin=task.path)
    assert copy.digest() == task.digest(), "the copies have the same digest"
    for name in expected:
        changed = next(p for p in (Path(name), Path("src") / name, path.parent / name) if p.is_file())
        before, text = task.digest(), changed.read_text()
        changed.write_text(text + "\n# changed")
        assert task.digest() != before, f"a change of {name} changes the digest"
        changed.write_text(text)
    assert copy.digest() == task.digest()


def test_the_number_and_size_of_copied_modules_are_limited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write({"task.py": "import a, b, c", "a.py": "", "b.py": "", "c.py": "x = 1" * 100})
    monkeypatch.setattr(project, "MAX_FILES", 3)
    with pytest.raises(Problem, match="imports more of its project than a run copies"):
        copied_modules("task.py")
    monkeypatch.setattr(project, "MAX_FILES", 4)
    assert len(copied_modules("task.py")) == 4
    monkeypatch.setattr(project, "MAX_BYTES", 100)
    with pytest.raises(Problem, match="imports more"):
        copied_modules("task.py")


def test_a_task_may_be_named_as_a_module(folder: Path) -> None:
    write({"pkg/__init__.py": TASK, "pkg/deep/task.py": "from .. import Small\nclass Other(Small): pass", "src/lib/one.py": TASK})
    for text, path, package in (
        ("pkg:Small", "pkg/__init__.py", "pkg"),
        ("pkg.deep.task:Other", "pkg/deep/task.py", "pkg.deep"),
        ("lib.one", "src/lib/one.py", ""),
        ("pkg/deep/task.py:Other", "pkg/deep/task.py", "pkg.deep"),
    ):
        task = find_task(text)
        assert (task.path, task.package) == (str(folder / path), package)
    for text in ("pkg.none:Small", "none.task", "pkg.Small:x"):
        with pytest.raises(Problem, match="there is no module"):
            find_task(text)
    assert find_module("json", folder) is not None, "installed modules can be named, too"


def test_two_versions_of_a_module_are_loaded_in_one_process(folder: Path) -> None:
    """As in a notebook: each run's task uses its own copies, and modules that were already imported stay."""
    tasks = []
    for version in ("old", "new"):
        write({"changing/__init__.py": "", "changing/part.py": f"VALUE = {version!r}", "changing/note.txt": version})
        write(
            {
                "changing/task.py": TASK
                + "\n    from pathlib import Path\n    from .part import VALUE\n    note = Path(__file__).parent / 'note.txt'"
            }
        )
        path = Path("changing/task.py").resolve()
        run = Run(Path("runs") / version)
        store_task(run, path, "changing")
        tasks.append(TaskRef("task", str((run.path / "task/changing/task.py").resolve()), "Small", package="changing", origin=str(path)))
    classes = [load_class(task) for task in tasks]
    assert [c.VALUE for c in classes] == ["old", "new"]  # type: ignore[attr-defined]
    assert {str(c.note) for c in classes} == {str(folder / "changing/note.txt")}, "data files are those beside the user's own module"  # type: ignore[attr-defined]
    assert sys.modules["changing.part"].VALUE == "old", "the first one imported stays"
    for name in [n for n in sys.modules if n.split(".")[0] == "changing"]:
        del sys.modules[name]


def test_a_run_uses_its_copies_of_modules(folder: Path) -> None:
    """`train` refuses a changed module; resume and eval use the old one; an error in it is shown in the user's own file."""
    task = TASK.replace(MODEL, "net(self.hidden)").replace(
        "class Small", "from .parts.net import net\nfrom common import SCALE\n\n\nclass Small"
    )
    write({
        "exp/pkg/__init__.py": "", "exp/pkg/parts/net.py": f"from torch import nn\nfrom ..other import say\ndef net(hidden):\n    say()\n    return {MODEL.replace('self.', '')}",
        "exp/pkg/other.py": "from pathlib import Path\ndef say():\n    print('version', 1, (Path(__file__).parent / 'note').read_text())",
        "exp/pkg/note": "noted", "common.py": "SCALE = 1", "exp/pkg/task.py": task,
    })  # fmt: skip
    assert "version 1 noted" in run_ok("train", "exp/pkg/task.py:Small", "steps=2", "--name", "a")
    other = Path("exp/pkg/other.py")
    other.write_text(other.read_text().replace("1", "2"))
    assert "began with another version of pkg/other.py" in expect_error("train", "exp/pkg/task.py:Small", "steps=4", "--name", "a")
    text = run_ok("resume", "a", "steps=4")
    assert "version 1 noted" in text
    assert "from step 2 of 4" in text
    other.write_text("def say():\n    raise RuntimeError('no version')\n")
    process = run_drivetrain("train", "exp/pkg/task.py", "steps=2", "--procs", "2", "--name", "b")
    assert f'File "{other.resolve()}", line 2, in say' in process.stderr, process.stderr
    # The run has taken no step, so the corrected command restarts it under the same name.
    other.write_text("def say():\n    print('version 3')\n")
    text = run_ok("train", "exp/pkg/task.py", "steps=3", "hidden=8", "--name", "b")
    assert "b stopped before its first step: it starts again" in text
    assert "version 3" in text
    assert json.loads(Path("runs/b/run.json").read_text())["recipe"]["settings"]["hidden"] == 8
    assert "hidden=8 (now 9)" in expect_error("train", "exp/pkg/task.py", "steps=3", "hidden=9", "--name", "b"), "it has taken steps"


def test_a_task_of_an_imported_package_trains(folder: Path) -> None:
    write({"pkg/__init__.py": "", "pkg/base.py": TASK, "pkg/task.py": "from .base import Small\n\n\nclass Mine(Small):\n    pass\n"})
    Path("script.py").write_text(
        "import drivetrain\nfrom pkg.task import Mine\nif __name__ == '__main__':\n    drivetrain.train(Mine(steps=2), name='a', quiet=True)\n"
    )
    process = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, env=environment())
    assert process.returncode == 0, process.stderr
    assert sorted(p.relative_to("runs/a/task").as_posix() for p in Path("runs/a/task").rglob("*.py")) == [
        "pkg/__init__.py",
        "pkg/base.py",
        "pkg/task.py",
    ]


def test_a_refused_start_leaves_no_run(folder: Path) -> None:
    write_task(change=("def loss(self, model, batch)", "def lost(self, model, batch)"))
    assert "has no loss(model, batch)" in expect_error("train", "small.py")
    assert not Path("runs").exists()
    write_task(name="other.py", change=('return datasets.digits("train")', "return []"))
    Path("two.yaml").write_text("task: other.py\nstages:\n  - name: one\n  - name: two\n")
    assert "empty data set" in expect_error("train", "two.yaml")
    assert not Path("runs").exists()
    Path("mine").mkdir()
    assert "empty data set" in expect_error("train", "other.py", "--run-dir", "mine")
    assert Path("mine").is_dir(), "a folder that existed before stays"
    write_task(name="other.py")
    assert "it starts again" in run_ok("train", "other.py", "--run-dir", "mine", "steps=1")
