"""A run that is slow where runs are slow is never called hung: a long first step, long evaluations and saves, uneven steps.

Two rounds, about six minutes; DRIVETRAIN_MINUTES=20 goes on for that long.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.command import run_drivetrain

ROUND = 150  # seconds: 150 steps, a save and an evaluation
ROUNDS = max(2, int(os.environ.get("DRIVETRAIN_MINUTES", 0)) * 60 // ROUND + 1)
LIMIT = 300 + 2 * ROUNDS * ROUND

TASK = """\
import os, random, time
import torch
from torch import nn
from torch.nn import functional as F
from drivetrain import Task, Tensors

RANK = int(os.environ["RANK"])
uneven = random.Random(RANK)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.first = nn.Linear(4, 2), True
        self.register_state_dict_post_hook(lambda *_: time.sleep(15))  # twice a save

    def forward(self, x):
        if self.first and self.training:
            self.first = False
            time.sleep(40)  # as a compiler would
        return self.layer(x)

class Patient(Task):
    global_batch: int = 8
    eval_every: int = 150
    save_every: int = 150

    def model(self):
        return Net()

    def train_data(self):
        return Tensors(torch.randn(64, 4), torch.arange(64) % 2)

    def eval_data(self):
        return Tensors(torch.randn(16, 4), torch.arange(16) % 2)

    def loss(self, model, batch):
        time.sleep(2.5 if uneven.random() < 0.01 else 0.05)
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model, batch):
        time.sleep(60 if RANK else 0)
        return {"loss": F.cross_entropy(model(batch[0]), batch[1], reduction="none")}
"""


@pytest.mark.timeout(2 * LIMIT)
def test_slow_is_not_hung(folder: Path) -> None:
    Path("patient.py").write_text(TASK)
    words = [f"steps={150 * ROUNDS}", "--procs", "2", "--restarts", "0", "--hang-after", "5s", "--name", "patient"]
    done = run_drivetrain("train", "patient.py", *words, seconds=LIMIT)
    told = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, told
    assert not list(Path("runs/patient/logs").glob("hang-*")), told
    events = [json.loads(line) for line in Path("runs/patient/events.jsonl").read_text().splitlines()]
    assert not {"hang", "restarted"} & {event["event"] for event in events}
    lasted = events[-1]["time"] - events[0]["time"]
    assert lasted > 40 + 90 * ROUNDS, "it was slow as planned"
    print(f"{lasted / 60:.0f} minutes, {ROUNDS} evaluations and saves, no verdict")
