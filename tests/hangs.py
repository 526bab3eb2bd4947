"""Thirty ways to hang, each planted in a task of its own: what the verdict must name is the second rank and the marked line."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

from tests.command import drivetrain

WAYS = {
    "sleep": "time.sleep(1e6)",
    "loop": "while True: pass",
    "pattern": "re.match('(a+)+$', 'a' * 60 + 'b')",  # in C, with the interpreter's lock held
    "pipe": "os.read(os.pipe()[0], 1)",
    "lock": "LOCK.acquire(); LOCK.acquire()",
    "queue": "queue.Queue().get()",
    "child": "subprocess.run(['sleep', '1000'])",
    "stop": "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(5)",
    "receive": "dist.recv(torch.zeros(1), src=0)",  # out of step: the others are in a collective
}
PLACES = ("forward", "loss", "backward", "augment", "sample", "worker", "metrics")
CASES = [
    (way, place) for way in WAYS for place in PLACES
    if not (place in ("worker", "sample", "augment", "metrics") and way == "receive") and not (place == "worker" and way in ("stop", "child"))
]  # fmt: skip
THIRTY = random.Random(0).sample(CASES, 30)

TASK = """\
import os, queue, re, signal, subprocess, threading, time
import torch
from torch import distributed as dist, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from drivetrain import Task, Tensors

PLACE, CALLS, LOCK = "{place}", 12, threading.Lock()
seen = 0

def stick():
    open("stuck", "w").close()
    {code}  # here

def at(place):
    global seen
    if place == PLACE and os.environ["RANK"] == "{rank}":
        seen += 1
        if seen >= CALLS:
            stick()

class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        at("backward")
        return gradient

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        if self.training:
            at("forward")
        return Through.apply(self.layer(x))

class Rows(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        at("sample" if PLACE == "sample" else "worker")
        return torch.randn(4), i % 2

class Stuck(Task):
    steps: int = 400
    global_batch: int = 8
    log_every: int = 1
    eval_every: int = 3

    def model(self):
        return Net()

    def train_data(self):
        return Rows() if PLACE in ("sample", "worker") else Tensors(torch.randn(64, 4), torch.arange(64) % 2)

    def eval_data(self):
        return Tensors(torch.randn(16, 4), torch.arange(16) % 2)

    def augment(self, batch, rand):
        at("augment")
        return batch

    def loss(self, model, batch):
        at("loss")
        time.sleep(0.01)
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model, batch):
        at("metrics")
        return {{"loss": F.cross_entropy(model(batch[0]), batch[1], reduction="none")}}
"""


def write(way: str, place: str, rank: int = 1) -> int:
    """The task that hangs so; gives the number of the line."""
    text = TASK.format(place=place, rank=rank, code=WAYS[way].replace("src=0", f"src={1 - rank}"))
    Path("stuck.py").write_text(text)
    return next(number for number, line in enumerate(text.splitlines(), 1) if "# here" in line)


def hang(way: str, place: str) -> subprocess.CompletedProcess[str]:
    workers = {"sample": ["plan.workers=0"], "worker": ["plan.workers=1"]}.get(place, [])
    command = ["stuck.py", *workers, "--procs", "2", "--restarts", "0", "--hang-after", "2s"]
    return drivetrain("train", *command, "--name", f"{way}-{place}")


def check(way: str, place: str) -> None:
    line = write(way, place)
    done = hang(way, place)
    told = f"{way} in {place}: ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 202, told
    assert "rank 1 hangs" in done.stderr or "rank 1 is stopped (state T)" in done.stderr, told
    assert f"stuck.py:{line} in stick" in done.stderr, told
    assert f"stuck.py:{line}" in Path(f"runs/{way}-{place}/logs/hang-1.txt").read_text().split("\n")[0], told
