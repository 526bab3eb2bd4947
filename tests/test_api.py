"""drivetrain used from Python: in a script, in a notebook, and with the trained model."""

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

TASK_TEXT = TASK.replace("class Small(Task):", "class Cell(Task):")


@pytest.mark.system
def test_a_notebook_cell_trains_on_two_processes(folder: Path) -> None:
    notebook = nbformat.v4.new_notebook()
    cells = [
        TASK_TEXT,
        "import drivetrain\nrun = drivetrain.train(Cell(hidden=16), procs=2, steps=20)",
        "model = drivetrain.load(run)\n(run.name, run.status, len(run.rows()), run.rows()[-1]['step'], model[1].out_features)",
        "type(run.model()).__name__",
    ]
    notebook.cells = [nbformat.v4.new_code_cell(c) for c in cells]
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    assert "2 processes (ddp, gloo)" in "".join(o.text for o in notebook.cells[1].outputs)
    assert notebook.cells[2].outputs[0]["data"]["text/plain"] == "('cell-001', 'finished', 20, 20, 16)"
    assert "class Cell(Task)" in Path("runs/cell-001/task/task.py").read_text(), "the run has a copy of the task's code"
    # another process can evaluate the run without the notebook
    process = subprocess.run([sys.executable, "-m", "drivetrain", "eval", "cell-001"], capture_output=True, text=True, env=environment())
    assert "accuracy" in process.stdout, process.stderr


def test_a_script_trains_its_own_class_and_may_run_twice(folder: Path) -> None:
    program = (
        TASK_TEXT
        + "\n\nif __name__ == '__main__':\n    import drivetrain\n    print(drivetrain.train(Cell(), name='a', quiet=True, steps=6).rows()[-1]['step'])\n"
    )
    Path("script.py").write_text(program)
    for expected in ("6", "6"):  # the second time, the run is already finished
        process = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, env=environment())
        assert process.returncode == 0, process.stderr
        assert process.stdout.strip().splitlines()[-1] == expected


def test_a_task_of_a_module_equals_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_task("mine.py")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # another test may have imported such a module
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
    last_row = run.rows()[-1]
    assert accuracy == pytest.approx(last_row["eval/accuracy"])
    assert not model.training
    assert isinstance(run.model(), torch.nn.Module)


def test_a_run_is_resumed_and_evaluated(folder: Path) -> None:
    run = drivetrain.train("digits", steps=5, name="a", quiet=True)
    resumed = drivetrain.resume("a", steps=8, quiet=True)
    assert (resumed.path, resumed.rows()[-1]["step"]) == (run.path, 8)
    metrics = drivetrain.evaluate(resumed, quiet=True)
    assert metrics["accuracy"] == pytest.approx(resumed.rows()[-1]["eval/accuracy"])
    with pytest.raises(drivetrain.Problem, match="was begun with hidden"):
        drivetrain.resume("a", hidden=3)


def test_a_plan_from_python_is_that_of_the_command(folder: Path) -> None:
    plan = api.plan("digits", device="cpu", procs=1, plan__micro_batch=16)
    assert (plan.world_size, plan.micro_batch, plan.accumulation) == (1, 16, 4)


def test_mistakes_raise_the_messages_of_the_command(folder: Path) -> None:
    with pytest.raises(drivetrain.Problem, match="did you mean hidden"):
        drivetrain.train("digits", hiden=3)
    with pytest.raises(drivetrain.Problem, match="at least one process"):
        drivetrain.train("digits", procs=0)
    with pytest.raises(drivetrain.Problem, match="there is no run"):
        drivetrain.load("nothing")
