"""A run with a long first step, long evaluations and saves, and uneven steps is never reported as hung.

It takes two rounds, about six minutes; with DRIVETRAIN_MINUTES=20 it takes twenty minutes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.command import run_drivetrain

ROUND_SECONDS = 150  # 150 steps, a save and an evaluation
ROUNDS = max(2, int(os.environ.get("DRIVETRAIN_MINUTES", 0)) * 60 // ROUND_SECONDS + 1)
TIMEOUT_SECONDS = 300 + 2 * ROUNDS * ROUND_SECONDS

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
        self.register_state_dict_post_hook(lambda *_: time.sleep(15))  # each save calls it twice

    def forward(self, x):
        if self.first and self.training:
            self.first = False
            time.sleep(40)  # as if a compiler ran
        return self.layer(x)

class Slow(Task):
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


@pytest.mark.timeout(2 * TIMEOUT_SECONDS)
def test_slow_is_not_hung(folder: Path) -> None:
    Path("patient.py").write_text(TASK)
    words = [f"steps={150 * ROUNDS}", "--procs", "2", "--restarts", "0", "--hang-after", "5s", "--name", "patient"]
    process = run_drivetrain("train", "patient.py", *words, seconds=TIMEOUT_SECONDS)
    output = f"{process.stdout}\n{process.stderr}"
    assert process.returncode == 0, output
    assert not list(Path("runs/patient/logs").glob("hang-*")), output
    events = [json.loads(line) for line in Path("runs/patient/events.jsonl").read_text().splitlines()]
    assert not {"hang", "restarted"} & {event["event"] for event in events}
    seconds = events[-1]["time"] - events[0]["time"]
    assert seconds > 40 + 90 * ROUNDS, "it was slow as planned"
    print(f"{seconds / 60:.0f} minutes, {ROUNDS} evaluations and saves, no verdict")
