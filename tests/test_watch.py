"""TensorBoard files, and the lines on a terminal."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from drivetrain.watch.files import TensorBoard
from drivetrain.watch.screen import Screen, format_duration, format_metric, format_size
from tests.command import COMMAND, environment, write_task


def test_tensorboard_forgets_the_steps_that_a_resume_repeats(tmp_path: Path) -> None:
    for first, last in ((1, 9), (6, 12)):  # the second writer resumes from a checkpoint at step 5
        writer = TensorBoard(tmp_path)
        writer.resumed(first - 1)
        for step in range(first, last + 1):
            writer.row({"step": step, "epoch": 1, "time": 0.1, "eval/loss": step + first / 100})
        writer.close()
        time.sleep(1.1)  # TensorBoard orders files by the second in their name
    reader = EventAccumulator(str(tmp_path)).Reload()
    scalars = reader.Scalars("eval/loss")
    assert [s.step for s in scalars] == list(range(1, 13))
    assert scalars[6].value == pytest.approx(7.06)


def test_tensorboard_gets_ten_rows_a_second_and_the_last(tmp_path: Path) -> None:
    writer = TensorBoard(tmp_path)
    writer.resumed(0)
    for step in range(1, 1001):
        writer.row({"step": step, "epoch": 1, "time": 0.1, "train/loss": 1.0})
    writer.close()
    steps = [s.step for s in EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")]
    assert len(steps) < 20
    assert steps[-1] == 1000


def test_numbers_have_units_and_few_digits() -> None:
    assert (format_metric("accuracy", 0.9784), format_metric("loss", 0.08123), format_metric("reward", 123456.0)) == (
        "accuracy 97.8 %",
        "loss 0.08123",
        "reward 123,456",
    )
    assert (format_duration(3725), format_duration(0.2), format_size(337e6), format_size(12)) == ("1:02:05", "0:00:00", "337 MB", "12 B")


def test_without_a_terminal_there_are_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    screen = Screen(stream)
    screen.started(
        {
            "parameters": 10,
            "trainable": 4,
            "processes": 2,
            "device": "cpu",
            "backend": "gloo",
            "precision": "fp32",
            "accumulation": 3,
            "step": 0,
            "steps": 5,
            "epochs": 1,
        }
    )
    row = {"step": 5, "epoch": 1, "time": 2.0, "train/loss": 0.5, "learning_rate": 0.1, "samples_per_second": 10.0}
    screen.tick(row | {"step": 4})
    screen.row(row)
    text = stream.getvalue()
    assert "10 parameters, 4 trainable; 2 processes on cpu (gloo), fp32, accumulation 3" in text
    assert text.splitlines()[-1].startswith("train   epoch 1/1  step 5/5  loss 0.5")
    assert "\r" not in text
    assert "\x1b" not in text


@pytest.mark.parametrize("columns", [40, pytest.param(100, marks=pytest.mark.system)])
def test_the_live_line_never_wraps(columns: int, folder: Path) -> None:
    """The command runs on a real terminal of this width."""
    write_task()
    terminal, terminal_of_command = pty.openpty()
    os.set_inheritable(terminal_of_command, True)
    subprocess.run(["stty", "cols", str(columns), "rows", "24"], stdin=terminal_of_command, check=True)
    program = subprocess.Popen(
        [*COMMAND, "train", "small.py", "epochs=60"],
        stdout=terminal_of_command,
        stderr=terminal_of_command,
        stdin=terminal_of_command,
        env=environment(TERM="xterm", NO_COLOR="1"),
    )
    os.close(terminal_of_command)
    data = b""
    while True:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:
            break
        if not chunk:
            break
        data += chunk
    assert program.wait() == 0
    lines = [line for line in data.decode().replace("\x1b[2K", "").replace("\n", "\r").split("\r") if line.startswith("train ")]
    assert len(lines) > 3
    assert [line for line in lines[:-1] if len(line) >= columns] == []
    assert all("loss" in line for line in lines)
    assert ("samples/s" in lines[0]) == (columns == 100), "a narrow terminal shows only the most important values"
    assert b"\x1b[1m" not in data
