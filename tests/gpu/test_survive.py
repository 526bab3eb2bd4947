"""Hangs, bottlenecks and faults on a real GPU.

python -m pytest -m gpu tests/gpu/test_survive.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.command import run_drivetrain, run_ok, write_task

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

WIDE = """\
import time
import torch
from torch import nn
from torch.nn import functional as F
from drivetrain import Task


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, i):
        time.sleep({pause})
        return torch.full((4096,), i % 7), i % 10


class Deep(nn.Module):
    # Much work for few weights, so that a checkpoint takes little time compared with a step.
    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(4096, 4096), nn.Linear(4096, 10)

    def forward(self, x):
        for _ in range(100):
            x = torch.relu(self.layer(x))
        return self.last(x)


class Wide(Task):
    steps: int = 150
    global_batch: int = 64
    precision: str = "fp32"

    def model(self):
        return Deep()

    def train_data(self):
        return Rows()

    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x.float()), y)
"""
STUCK = """\
x, y = batch
        self.calls = getattr(self, "calls", 0) + model.training
        if self.calls == 40:
            torch.cuda._sleep(10**13)  # clock cycles: more than an hour
        return F.cross"""


@pytest.mark.alone  # other work on the GPU would raise its power
def test_an_endless_kernel_is_recognised_by_its_low_power(folder: Path) -> None:
    write_task(change=("x, y = batch\n        return F.cross", STUCK))
    command = ["train", "small.py", "epochs=20", "plan.capture=off", "plan.compile=off", "--restarts", "0", "--hang-after", "2s"]
    process = run_drivetrain(*command, "--name", "stuck")
    assert process.returncode == 202, process.stdout + process.stderr
    print(process.stderr)
    assert "rank 0 hangs" in process.stderr and "without a heartbeat" in process.stderr
    assert "busy at" in process.stderr and "it waits in a kernel" in process.stderr


@pytest.mark.parametrize("slow", [False, True])
def test_the_time_breakdown_includes_the_device(slow: bool, folder: Path) -> None:
    """Batches have a megabyte, samples are slow or fast to load, and the net is slow on any GPU."""
    Path("wide.py").write_text(WIDE.format(pause=0.004 if slow else 0.0))
    output = run_ok("train", "wide.py", "plan.workers=2", "--name", "wide")
    breakdown = json.loads(Path("runs/wide/logs/time.json").read_text())
    (rank,) = breakdown["ranks"]
    parts = {part: seconds for part, seconds in rank.items() if part != "start"}
    print(slow, {part: round(seconds, 3) for part, seconds in rank.items()}, breakdown["steps"])
    assert rank["copy"] > 0
    assert max(parts, key=parts.__getitem__) == ("data" if slow else "compute")
    assert ("data loading is" in output) == slow, output


def test_faults_change_nothing(folder: Path) -> None:
    write_task()
    print(run_ok("chaos", "small.py", "--faults", "8", "--steps", "60", "--keep", "results"))
