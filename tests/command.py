"""Runs the `drivetrain` command in child processes, as users do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.warm import can_run_warm, run_warm

COMMAND = [sys.executable, "-m", "drivetrain"]

TASK = """\
import torch
from torch import nn
from torch.nn import functional as F
from drivetrain import Task, Tensors, datasets


class Small(Task):
    epochs: int = 2
    global_batch: int = 100
    learning_rate: float = 0.01
    log_every: int = 1
    hidden: int = 32
    \"\"\"Width of the hidden layer.\"\"\"

    def model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, self.hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(self.hidden, 10))

    def train_data(self):
        return datasets.digits("train")

    def eval_data(self):
        return datasets.digits("test")

    def augment(self, batch, rand):
        x, y = batch
        return x + 0.1 * rand.normal(64).view(-1, 8, 8), y

    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model, batch):
        x, y = batch
        return {"accuracy": (model(x).argmax(-1) == y).float()}
"""


def write_task(name: str = "small.py", change: tuple[str, str] = ("", ""), text: str = TASK) -> Path:
    path = Path(name)
    path.write_text(text.replace(*change))
    return path


def environment(**extra: str) -> dict[str, str]:
    """Returns this process's environment without variables of launchers and earlier tests."""
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("DRIVETRAIN_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "ACCELERATE_", "COLUMNS", "LINES"))
    }
    return clean | {"PYTHONDONTWRITEBYTECODE": "1"} | extra


def run_drivetrain(*words: str, seconds: float = 500, **extra: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    if can_run_warm(words, extra):
        return run_warm(words, environment(**extra), seconds)
    return subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=seconds, env=environment(**extra), stdin=subprocess.DEVNULL
    )


def run_ok(*words: str, **extra: Any) -> str:
    """Runs a command that must succeed; returns its output."""
    process = run_drivetrain(*words, **extra)
    assert process.returncode == 0, f"{' '.join(words)} ended with {process.returncode}:\n{process.stdout}\n{process.stderr}"
    return process.stdout


def expect_error(*words: str, code: int = 2, max_lines: int = 2, **extra: Any) -> str:
    """Runs a command that must fail with a short message and no traceback; returns the message."""
    process = run_drivetrain(*words, **extra)
    assert process.returncode == code, f"ended with {process.returncode}:\n{process.stdout}\n{process.stderr}"
    message = process.stderr.strip()
    assert message.startswith("drivetrain: ")
    assert "Traceback" not in message
    assert len(message.splitlines()) <= max_lines, message
    return message
