"""The README's task: one file and one command, in an empty folder outside the repository."""

from __future__ import annotations

import re
from pathlib import Path

from tests.command import run_ok

README = Path(__file__).parent.parent / "README.md"


def example() -> str:
    match = re.search(r"```python\n(# digits\.py\n.*?)```", README.read_text(), re.S)
    assert match, "the README shows the example task"
    return match[1]


def test_the_example_trains_as_printed(folder: Path) -> None:
    Path("digits.py").write_text(example())
    output = run_ok("train", "digits.py")
    accuracy = re.search(r"^eval +accuracy (\d+\.\d) %", output, re.M)
    assert accuracy
    assert float(accuracy[1]) >= 95
    assert (folder / "runs/digits-001/model/model.safetensors").is_file()
    assert "next: drivetrain eval digits-001" in output


def test_the_embedded_digits_reach_97_percent_and_a_confusion_matrix(folder: Path) -> None:
    output = run_ok("train", "digits")
    accuracy = re.search(r"^eval +accuracy (\d+\.\d) %", output, re.M)
    assert accuracy
    assert float(accuracy[1]) >= 97
    summary = Path("runs/digits-001/summary.txt").read_text()
    fields = ["Dataset", "Model", "Classes", "Channels", "Epochs", "Device"] + [
        "Training Accuracy", "Test Accuracy", "Test Loss", "Batch Size", "Learning Rate", "Mixed Precision", "World Size", "Total Parameters",
    ]  # fmt: skip
    assert all(f"{field}:" in summary for field in fields)
    evaluated = run_ok("eval", "digits-001")
    assert accuracy[1] in evaluated
    assert Path("runs/digits-001/confusion.png").read_bytes()[:4] == b"\x89PNG"
