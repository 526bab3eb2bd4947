"""What dies or hangs on a real GPU.

python -m pytest -m gpu tests/gpu/test_survive.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.command import drivetrain, good, write_task

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
    # Much work for few weights, so that a checkpoint is nothing beside a step.
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


def test_a_kernel_that_never_ends_is_told_by_its_power(folder: Path) -> None:
    write_task(change=("x, y = batch\n        return F.cross", STUCK))
    command = ["train", "small.py", "epochs=20", "plan.capture=off", "plan.compile=off", "--restarts", "0", "--hang-after", "2s"]
    done = drivetrain(*command, "--name", "stuck")
    assert done.returncode == 202, done.stdout + done.stderr
    print(done.stderr)
    assert "rank 0 hangs" in done.stderr and "without a heartbeat" in done.stderr
    assert "busy at" in done.stderr and "it waits in a kernel" in done.stderr


@pytest.mark.parametrize("slow", [False, True])
def test_where_the_time_goes_is_asked_of_the_device(slow: bool, folder: Path) -> None:
    """Batches of a megabyte, whose samples take their time or do not, and a net that is work for any GPU."""
    Path("wide.py").write_text(WIDE.format(pause=0.004 if slow else 0.0))
    out = good("train", "wide.py", "plan.workers=2", "--name", "wide")
    spent = json.loads(Path("runs/wide/logs/time.json").read_text())
    (rank,) = spent["ranks"]
    parts = {part: seconds for part, seconds in rank.items() if part != "start"}
    print(slow, {part: round(seconds, 3) for part, seconds in rank.items()}, spent["steps"])
    assert rank["copy"] > 0
    assert max(parts, key=parts.__getitem__) == ("data" if slow else "compute")
    assert ("data loading is" in out) == slow, out


def test_faults_change_nothing(folder: Path) -> None:
    write_task()
    print(good("chaos", "small.py", "--faults", "8", "--steps", "60", "--keep", "kept"))
