"""Starts commands and launchers as a user does, kills the processes that remain, and reads the files of the runs."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

# The variable NAP slows every step down, so that a signal arrives during training; FAIL names the rank that fails at step 5.
TASK = """\
import os
import time

from torch import nn
from torch.nn import functional as F

from drivetrain import Task, datasets


class Small(Task):
    steps = 30
    global_batch = 32
    learning_rate = 0.02
    log_every = 1
    calls = 0

    def model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))

    def train_data(self):
        return datasets.digits("train")

    def loss(self, model, batch):
        images, labels = batch
        self.calls += 1
        time.sleep(float(os.environ.get("NAP", 0)))
        if self.calls == 5 and os.environ.get("FAIL") == os.environ.get("RANK", "0"):
            raise ValueError("the fifth batch is bad")
        return F.cross_entropy(model(images), labels)
"""
STEPS = 30
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "SLURM",
    "ACCELERATE_",
    "TORCHELASTIC_",
    "PET_",
    "OMP_",
    "CROSS_",
    "DRIVETRAIN_",
)
BIN = Path(sys.executable).parent


def write_task(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small.py").write_text(TASK)
    return folder


def environment(**variables: object) -> dict[str, str]:
    """Returns this process's environment without variables of launchers, and with this Python's folder of commands first in PATH."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    return clean | {"PATH": f"{BIN}:{os.environ['PATH']}"} | {k: str(v) for k, v in variables.items()}


@dataclass
class StartedCommand:
    process: subprocess.Popen[bytes]
    file: Path

    @property
    def output(self) -> str:
        return self.file.read_text(errors="replace")

    def wait(self, seconds: float = 400.0) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:.0f} s:\n{self.output}") from None

    def succeed(self, seconds: float = 400.0) -> str:
        code = self.wait(seconds)
        assert code == 0, f"ended with code {code}:\n{self.output}"
        return self.output

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextlib.contextmanager
def start(*words: object, folder: Path, **variables: object) -> Iterator[StartedCommand]:
    """Starts a command with stdout and stderr in one file; at the end kills the processes that still run."""
    with tempfile.TemporaryDirectory() as scratch, open(Path(scratch) / "output", "wb") as file:
        process = subprocess.Popen(
            [str(word) for word in words], cwd=folder, env=environment(**variables), stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
        started = StartedCommand(process, Path(file.name))
        try:
            yield started
        finally:
            children = started.children() if process.poll() is None else []
            for running in [*children, process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    running.kill()
            process.wait()


def run(*words: object, folder: Path, **variables: object) -> str:
    """Runs a command that must succeed; returns its output."""
    with start(*words, folder=folder, **variables) as started:
        return started.succeed()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- files of a run --------------------------------------------------------------------------


def only_run(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    """Returns the loss of each step; fails if a step is missing or was logged twice."""
    logged = [(row["step"], row["train/loss"]) for row in rows(run) if "train/loss" in row]
    assert [step for step, _ in logged] == list(range(1, STEPS + 1))
    return [loss for _, loss in logged]


def info(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "run.json").read_text()))


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    all_events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in all_events if event["event"] == kind]


def is_training(folder: Path) -> bool:
    """Returns whether a run in this folder has logged at least three rows."""
    return any((folder / "runs").glob("*/metrics.jsonl")) and len(rows(only_run(folder))) >= 3
