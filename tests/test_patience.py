"""patience=N ends a run after N evaluations without a better metric."""

from __future__ import annotations

import json
from pathlib import Path

from drivetrain.engine.state.best import Best
from tests.command import expect_error, run_ok, write_task


def test_a_run_ends_after_evaluations_without_a_better_metric(folder: Path) -> None:
    write_task()
    words = ["train", "small.py", "epochs=40", "learning_rate=0", "best=accuracy"]
    output = run_ok(*words, "patience=3", "--name", "short")
    assert "3 evaluations without a better accuracy" in output
    info = json.loads((folder / "runs" / "short" / "run.json").read_text())
    assert info["status"] == "finished"
    rows = [json.loads(line) for line in (folder / "runs" / "short" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["epoch"] == 4 and "eval/accuracy" in rows[-1]
    assert (folder / "runs" / "short" / "model" / "model.safetensors").is_file()
    assert "give best=NAME" in expect_error("train", "small.py", "patience=3")
    run_ok(*words, "patience=3", "--procs", "2", "--name", "two")
    rows = [json.loads(line) for line in (folder / "runs" / "two" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["epoch"] == 4


def test_a_resumed_run_has_the_patience_that_was_left() -> None:
    best = Best("min:loss", patience=3)
    for step, loss in enumerate((2.0, 1.0, 1.0, 1.5)):  # an equal one is no better
        best.update({"loss": loss}, step)
    resumed = Best("min:loss", patience=3)
    resumed.load(json.loads(json.dumps(best.to_json())))
    assert (resumed.value, resumed.step, resumed.out_of_patience) == (1.0, 1, False)
    assert not resumed.update({"loss": 1.2}, 4) and resumed.out_of_patience
