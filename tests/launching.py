"""Start commands and launchers as a user does, end what is left of them, and read what they logged."""

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

# NAP slows every step down, so that a signal comes in the middle; FAIL names the rank that fails at step 5.
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
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM", "ACCELERATE_", "TORCHELASTIC_", "PET_", "OMP_", "CROSS_", "DRIVETRAIN_")
BIN = Path(sys.executable).parent


def write_task(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small.py").write_text(TASK)
    return folder


def environment(**variables: object) -> dict[str, str]:
    """This process's, without what a launcher around the tests may have left, and with the installed commands first."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    return clean | {"PATH": f"{BIN}:{os.environ['PATH']}"} | {k: str(v) for k, v in variables.items()}


@dataclass
class Started:
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
def start(*words: object, folder: Path, **variables: object) -> Iterator[Started]:
    """A command with both its outputs in one file; whatever of it is left at the end is killed, by pid."""
    with tempfile.TemporaryDirectory() as scratch, open(Path(scratch) / "output", "wb") as file:
        process = subprocess.Popen(
            [str(word) for word in words], cwd=folder, env=environment(**variables), stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
        started = Started(process, Path(file.name))
        try:
            yield started
        finally:
            left = started.children() if process.poll() is None else []
            for one in [*left, process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait()


def run(*words: object, folder: Path, **variables: object) -> str:
    """The output of a command that succeeds."""
    with start(*words, folder=folder, **variables) as started:
        return started.succeed()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- what a run wrote --------------------------------------------------------------------------


def only_run(folder: Path) -> Path:
    (found,) = (folder / "runs").iterdir()
    return found


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    """The loss of each step; fails where a step is missing or was logged twice."""
    logged = [(row["step"], row["train/loss"]) for row in rows(run) if "train/loss" in row]
    assert [step for step, _ in logged] == list(range(1, STEPS + 1))
    return [loss for _, loss in logged]


def info(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "run.json").read_text()))


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["event"] == kind]


def is_training(folder: Path) -> bool:
    """A run in this folder has logged some steps."""
    return any((folder / "runs").glob("*/metrics.jsonl")) and len(rows(only_run(folder))) >= 3
