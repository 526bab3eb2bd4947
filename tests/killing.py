"""Kills real trainings with SIGKILL at chosen and at random moments, and compares their results with an uninterrupted run."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import psutil

from tests.command import COMMAND, environment, run_ok, write_task
from tests.sample_tasks import rows, weights
from tests.waiting import wait_until

KILL_POINTS = ["save:1", "written:2", "rename:1", "published:1", "evaluate:1", "start:1", "restore:1", "step:1", "step:9", "rename:3"]

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
    """Writes the task; returns the arguments of `train`."""
    file = write_task(change=SLOW)
    if loader:
        file.write_text(file.read_text().replace(*LOADER) + ROWS)
    return ["small.py", *SETTINGS, *(["plan.workers=2"] if loader else [])]


def kill_with_children(command: subprocess.Popen[bytes]) -> None:
    try:
        processes = [psutil.Process(command.pid), *psutil.Process(command.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        processes = []
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
    command.wait()


def processes_of_run(name: str) -> list[str]:
    """Returns the processes that have files of the run open."""
    processes = []
    for process in psutil.process_iter(["cmdline", "name"]):
        try:
            files = [f.path for f in process.open_files()]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if any(f"/runs/{name}/" in f for f in files):
            processes.append(f"{process.pid} {process.info['name']}")
    return processes


def kill_and_compare(procs: int, loader: bool, kills: int, seed: int) -> str:
    """Kills a training `kills` times, lets it end, and compares its results; returns a log of the kills."""
    words = [*prepare(loader), "--procs", str(procs)]
    run_ok("train", *words, "--name", "uninterrupted")
    rng = random.Random(seed)
    log = [f"seed {seed}"]
    num_kills, num_runs = 0, 0
    kill_points = KILL_POINTS.copy()
    rng.shuffle(kill_points)
    while num_kills < kills:
        num_runs += 1
        name = f"killed-{num_runs}"
        ended = False
        while num_kills < kills and not ended:
            fault = kill_points.pop() if kill_points else ""
            command = ["train", *words, "--name", name] if num_kills % 2 == 0 else _resume(name, words, procs)
            variables = environment(DRIVETRAIN_FAULTS=f"kill@{fault}") if fault else environment()
            process = subprocess.Popen([*COMMAND, *command, "-q"], env=variables, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
            delay = 60.0 if fault else rng.uniform(0.05, 5.5)
            try:
                process.wait(timeout=delay)
                if process.returncode == 0:
                    ended = True
                    log.append(f"{name} ended by itself")
                    continue
                assert process.returncode == -9, (
                    f"{log}: ended with {process.returncode}: {process.stderr.read().decode() if process.stderr else ''}"
                )
            except subprocess.TimeoutExpired:
                kill_with_children(process)
            num_kills += 1
            steps = sorted(p.name for p in Path(f"runs/{name}/checkpoints").glob("step-*"))
            log.append(f"kill {num_kills} of {name}: {fault or f'after {delay:.2f} s'}, last checkpoint {steps[-1] if steps else 'none'}")
            wait_until(lambda name=name: not processes_of_run(name), f"{log}: the end of all workers", 20)
        run_ok("train", *words, "--name", name)
        assert rows(f"runs/{name}") == rows("runs/uninterrupted"), "\n".join(log)
        assert weights(f"runs/{name}") == weights("runs/uninterrupted"), "\n".join(log)
        steps_logged = [r["step"] for r in rows(f"runs/{name}")]
        assert steps_logged == sorted(set(steps_logged)), "\n".join(log)
    return "\n".join(log)


def _resume(name: str, words: list[str], procs: int) -> list[str]:
    """Returns the command `resume`, or `train` as long as the run does not exist."""
    if Path(f"runs/{name}/run.json").exists():
        return ["resume", name, "--procs", str(procs)]
    return ["train", *words, "--name", name]
