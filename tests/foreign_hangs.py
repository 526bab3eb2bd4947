"""A task that hangs once on rank 1 under another launcher, and the checks of its verdict."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.launching import events, info, only_run

# It hangs at step 6 on rank 1, unless it has already hung. With SLOW, the first step and the first evaluation of rank 1 take seconds.
TASK = """\
import os, re, time
import torch
from torch import distributed as dist, nn
from torch.nn import functional as F
from drivetrain import Task, Tensors

IS_RANK_1 = os.environ["RANK"] == "1"
SLOW = 3 if IS_RANK_1 and os.environ.get("SLOW") else 0

class Hanging(Task):
    steps: int = 12
    global_batch: int = 8
    log_every: int = 1
    save_every: int = 4
    eval_every: int = 4
    calls = 0

    def model(self):
        return nn.Linear(4, 2)

    def train_data(self):
        return Tensors(torch.randn(64, 4), torch.arange(64) % 2)

    def eval_data(self):
        return Tensors(torch.randn(16, 4), torch.arange(16) % 2)

    def loss(self, model, batch):
        self.calls += 1
        if self.calls == 1:
            print(f"rank {os.environ['RANK']} computes")
            time.sleep(SLOW)
        if self.calls == 6 and IS_RANK_1 and not os.path.exists("hung"):
            open("hung", "w").close()
            HANG  # here
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model, batch):
        time.sleep(SLOW if self.calls == 4 else 0)
        return {"loss": F.cross_entropy(model(batch[0]), batch[1], reduction="none")}
"""
HOLDS_GIL = "re.match('(a+)+$', 'a' * 60 + 'b')"
LEFT_COLLECTIVE = "dist.recv(torch.zeros(1), src=0)"  # rank 0 is in an all-reduce and sends nothing


def write_hanging_task(folder: Path, hang: str) -> int:
    """Writes the task; returns the number of the line that hangs."""
    text = TASK.replace("HANG ", hang + " ")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hanging.py").write_text(text)
    return next(number for number, line in enumerate(text.splitlines(), 1) if "# here" in line)


def check_hang_event(folder: Path, line: int) -> str:
    """Checks that the run has exactly one hang, and of rank 1 at this line; returns the message."""
    run = only_run(folder)
    (hang,) = events(run, "hang")
    assert (hang["ranks"], hang["step"]) == ([1], 6)
    assert "rank 1 hangs in step 6 (forward pass)" in hang["detail"] and f"at hanging.py:{line} in loss; rank 0 waits in" in hang["detail"]
    assert f"hanging.py:{line}" in (run / "logs" / "hang-1.txt").read_text().split("\n")[0]
    (stopped,) = events(run, "stopped")
    assert (stopped["outcome"], stopped["message"]) == ("hang", hang["detail"])
    return str(hang["detail"])


def check_hung_run(folder: Path, line: int) -> None:
    """Checks that the run ended with the outcome `hang`, and that the files of its processes are removed."""
    message = check_hang_event(folder, line)
    ended = info(only_run(folder))
    assert (ended["status"], ended["outcome"], ended["message"]) == ("stopped", "hang", message)
    assert not list(folder.glob("drivetrain-scratch-*")), "the test sets TMPDIR to this folder"
    assert not processes_in(folder)


def processes_in(folder: Path) -> list[psutil.Process]:
    """Returns the processes whose working directory is a folder."""
    return [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(folder.resolve())]
