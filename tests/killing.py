"""Kill -9 real trainings at chosen and at random moments, and compare what comes out with an unbroken run."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import psutil

from tests.command import COMMAND, environment, good, write_task
from tests.patience import until
from tests.samples import rows, weights

MOMENTS = ["save:1", "written:2", "rename:1", "published:1", "evaluate:1", "start:1", "restore:1", "step:1", "step:9", "rename:3"]

SLOW = ("x, y = batch\n        return F.cross", "x, y = batch\n        import time; time.sleep(0.012)\n        return F.cross")
LOADER = ('return datasets.digits("train")', "return Rows()")
ROWS = """

class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.data = datasets.digits("train")

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        x, y = self.data[i]
        return x + 0.1 * torch.randn(8, 8), y
"""
SETTINGS = ["epochs=24", "save_every=7", "eval_every=25", "log_every=1", "clip=1"]


def prepare(loader: bool) -> list[str]:
    """Write the task; gives the words of its training."""
    file = write_task(change=SLOW)
    if loader:
        file.write_text(file.read_text().replace(*LOADER) + ROWS)
    return ["small.py", *SETTINGS, *(["plan.workers=2"] if loader else [])]


def kill_tree(front: subprocess.Popen[bytes]) -> None:
    try:
        tree = [psutil.Process(front.pid), *psutil.Process(front.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        tree = []
    for process in tree:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
    front.wait()


def left_over(name: str) -> list[str]:
    """Processes that still work on a run."""
    found = []
    for process in psutil.process_iter(["cmdline", "name"]):
        try:
            files = [f.path for f in process.open_files()]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if any(f"/runs/{name}/" in f for f in files):
            found.append(f"{process.pid} {process.info['name']}")
    return found


def break_and_compare(procs: int, loader: bool, kills: int, seed: int) -> str:
    """Kill a training `kills` times, let it end, and compare; gives a log of the moments."""
    words = [*prepare(loader), "--procs", str(procs)]
    good("train", *words, "--name", "whole")
    rng = random.Random(seed)
    log = [f"seed {seed}"]
    done, number = 0, 0
    targeted = MOMENTS.copy()
    rng.shuffle(targeted)
    while done < kills:
        number += 1
        name = f"broken-{number}"
        ended = False
        while done < kills and not ended:
            fault = targeted.pop() if targeted else ""
            command = ["train", *words, "--name", name] if done % 2 == 0 else _resume(name, words, procs)
            variables = environment(DRIVETRAIN_FAULTS=f"kill@{fault}") if fault else environment()
            front = subprocess.Popen([*COMMAND, *command, "-q"], env=variables, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
            delay = 60.0 if fault else rng.uniform(0.05, 5.5)
            try:
                front.wait(timeout=delay)
                if front.returncode == 0:
                    ended = True
                    log.append(f"{name} ended by itself")
                    continue
                assert front.returncode == -9, (
                    f"{log}: ended with {front.returncode}: {front.stderr.read().decode() if front.stderr else ''}"
                )
            except subprocess.TimeoutExpired:
                kill_tree(front)
            done += 1
            steps = sorted(p.name for p in Path(f"runs/{name}/checkpoints").glob("step-*"))
            log.append(f"kill {done} of {name}: {fault or f'after {delay:.2f} s'}, last checkpoint {steps[-1] if steps else 'none'}")
            until(lambda name=name: not left_over(name), f"{log}: the end of all workers", 20)
        good("train", *words, "--name", name)
        assert rows(f"runs/{name}") == rows("runs/whole"), "\n".join(log)
        assert weights(f"runs/{name}") == weights("runs/whole"), "\n".join(log)
        steps_logged = [r["step"] for r in rows(f"runs/{name}")]
        assert steps_logged == sorted(set(steps_logged)), "\n".join(log)
    return "\n".join(log)


def _resume(name: str, words: list[str], procs: int) -> list[str]:
    """The other way to go on, once the run exists."""
    if Path(f"runs/{name}/run.json").exists():
        return ["resume", name, "--procs", str(procs)]
    return ["train", *words, "--name", name]
