"""From Python: a script, a notebook, and the trained model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
import torch

import drivetrain
from drivetrain import api
from tests.command import TASK, environment, write_task

HEAD = TASK.replace("class Small(Task):", "class Cell(Task):")


def test_a_notebook_cell_trains_on_two_processes(folder: Path) -> None:
    book = nbformat.v4.new_notebook()
    calls = [
        HEAD,
        "import drivetrain\nrun = drivetrain.train(Cell(hidden=16), procs=2, steps=20)",
        "model = drivetrain.load(run)\n(run.name, run.status, len(run.rows()), run.rows()[-1]['step'], model[1].out_features)",
        "type(run.model()).__name__",
    ]
    book.cells = [nbformat.v4.new_code_cell(c) for c in calls]
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    assert "2 processes (ddp, gloo)" in "".join(o.text for o in book.cells[1].outputs)
    assert book.cells[2].outputs[0]["data"]["text/plain"] == "('cell-001', 'finished', 20, 20, 16)"
    assert "class Cell(Task)" in Path("runs/cell-001/task/task.py").read_text(), "people can read what was trained"
    # the run stands on its own: another process evaluates it
    done = subprocess.run([sys.executable, "-m", "drivetrain", "eval", "cell-001"], capture_output=True, text=True, env=environment())
    assert "accuracy" in done.stdout, done.stderr


def test_a_script_trains_its_own_class_and_goes_on(folder: Path) -> None:
    program = (
        HEAD
        + "\n\nif __name__ == '__main__':\n    import drivetrain\n    print(drivetrain.train(Cell(), name='a', quiet=True, steps=6).rows()[-1]['step'])\n"
    )
    Path("script.py").write_text(program)
    for expected in ("6", "6"):  # the second time it is finished already
        done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, env=environment())
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip().splitlines()[-1] == expected


def test_a_task_of_a_module_equals_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_task("mine.py")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # of another test
    import mine  # type: ignore[import-not-found]

    from tests.command import run_ok
    from tests.sample_tasks import rows

    run = drivetrain.train(mine.Small(hidden=8), steps=5, name="api", quiet=True)
    run_ok("train", "mine.py", "hidden=8", "steps=5", "--name", "cli")
    assert rows(run.path) == rows("runs/cli")
    assert (run.path / "task" / "mine.py").is_file()
    del sys.modules["mine"]


def test_loading_a_run_gives_the_trained_model(folder: Path) -> None:
    run = drivetrain.train("digits", epochs=3, quiet=True)
    model = drivetrain.load(run.name)
    x, y = drivetrain.datasets.digits("test")[:]
    accuracy = (model(x).argmax(-1) == y).float().mean().item()
    last = run.rows()[-1]
    assert accuracy == pytest.approx(last["eval/accuracy"])
    assert not model.training
    assert isinstance(run.model(), torch.nn.Module)


def test_a_run_goes_on_and_is_evaluated(folder: Path) -> None:
    run = drivetrain.train("digits", steps=5, name="a", quiet=True)
    longer = drivetrain.resume("a", steps=8, quiet=True)
    assert (longer.path, longer.rows()[-1]["step"]) == (run.path, 8)
    metrics = drivetrain.evaluate(longer, quiet=True)
    assert metrics["accuracy"] == pytest.approx(longer.rows()[-1]["eval/accuracy"])
    with pytest.raises(drivetrain.Problem, match="was begun with hidden"):
        drivetrain.resume("a", hidden=3)


def test_a_plan_from_python_is_that_of_the_command(folder: Path) -> None:
    plan = api.plan("digits", device="cpu", procs=1, plan__micro_batch=16)
    assert (plan.world_size, plan.micro_batch, plan.accumulation) == (1, 16, 4)


def test_mistakes_raise_what_the_command_would_say(folder: Path) -> None:
    with pytest.raises(drivetrain.Problem, match="did you mean hidden"):
        drivetrain.train("digits", hiden=3)
    with pytest.raises(drivetrain.Problem, match="at least one process"):
        drivetrain.train("digits", procs=0)
    with pytest.raises(drivetrain.Problem, match="there is no run"):
        drivetrain.load("nothing")
