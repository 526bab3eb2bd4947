"""Thirty tasks, each of which hangs in its own way: the verdict must name rank 1 and the line marked `# here`."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

from tests.command import run_drivetrain

HANGS = {
    "sleep": "time.sleep(1e6)",
    "loop": "while True: pass",
    "pattern": "re.match('(a+)+$', 'a' * 60 + 'b')",  # in C code that holds the GIL
    "pipe": "os.read(os.pipe()[0], 1)",
    "lock": "LOCK.acquire(); LOCK.acquire()",
    "queue": "queue.Queue().get()",
    "child": "subprocess.run(['sleep', '1000'])",
    "stop": "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(5)",
    "receive": "dist.recv(torch.zeros(1), src=0)",  # the other rank is in a collective and sends nothing
}
HOOKS = (
    "forward",
    "loss",
    "backward",
    "augment",
    "sample",
    "worker",
    "metrics",
)  # "sample" in the rank's process, "worker" in a loader worker


def _is_possible(hang: str, hook: str) -> bool:
    if hang == "receive":
        return hook not in ("worker", "sample", "augment", "metrics")
    return not (hook == "worker" and hang in ("stop", "child"))


CASES = [(hang, hook) for hang in HANGS for hook in HOOKS if _is_possible(hang, hook)]
THIRTY_CASES = random.Random(0).sample(CASES, 30)

TASK = """\
import os, queue, re, signal, subprocess, threading, time
import torch
from torch import distributed as dist, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from drivetrain import Task, Tensors

HOOK, HANGS_AT_CALL, LOCK = "{hook}", 12, threading.Lock()
num_calls = 0

def stick():
    open("stuck", "w").close()
    {code}  # here

def reached(hook):
    global num_calls
    if hook == HOOK and os.environ["RANK"] == "{rank}":
        num_calls += 1
        if num_calls >= HANGS_AT_CALL:
            stick()

class HangsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        reached("backward")
        return gradient

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        if self.training:
            reached("forward")
        return HangsInBackward.apply(self.layer(x))

class Rows(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        reached("sample" if HOOK == "sample" else "worker")
        return torch.randn(4), i % 2

class Stuck(Task):
    steps: int = 400
    global_batch: int = 8
    log_every: int = 1
    eval_every: int = 3

    def model(self):
        return Net()

    def train_data(self):
        return Rows() if HOOK in ("sample", "worker") else Tensors(torch.randn(64, 4), torch.arange(64) % 2)

    def eval_data(self):
        return Tensors(torch.randn(16, 4), torch.arange(16) % 2)

    def augment(self, batch, rand):
        reached("augment")
        return batch

    def loss(self, model, batch):
        reached("loss")
        time.sleep(0.01)
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model, batch):
        reached("metrics")
        return {{"loss": F.cross_entropy(model(batch[0]), batch[1], reduction="none")}}
"""


def write_hanging_task(hang: str, hook: str, rank: int = 1) -> int:
    """Writes a task that hangs on one rank; returns the number of the line that hangs."""
    text = TASK.format(hook=hook, rank=rank, code=HANGS[hang].replace("src=0", f"src={1 - rank}"))
    Path("stuck.py").write_text(text)
    return next(number for number, line in enumerate(text.splitlines(), 1) if "# here" in line)


def train_until_it_hangs(hang: str, hook: str) -> subprocess.CompletedProcess[str]:
    workers = {"sample": ["plan.workers=0"], "worker": ["plan.workers=1"]}.get(hook, [])
    command = ["stuck.py", *workers, "--procs", "2", "--restarts", "0", "--hang-after", "2s"]
    return run_drivetrain("train", *command, "--name", f"{hang}-{hook}")


def check_verdict(hang: str, hook: str) -> None:
    line = write_hanging_task(hang, hook)
    process = train_until_it_hangs(hang, hook)
    report = f"{hang} in {hook}: ended with {process.returncode}\n{process.stdout}\n{process.stderr}"
    assert process.returncode == 202, report
    assert "rank 1 hangs" in process.stderr or "rank 1 is stopped (state T)" in process.stderr, report
    assert f"stuck.py:{line} in stick" in process.stderr, report
    assert f"stuck.py:{line}" in Path(f"runs/{hang}-{hook}/logs/hang-1.txt").read_text().split("\n")[0], report
