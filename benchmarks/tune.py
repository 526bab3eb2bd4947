"""Tuning small policies as a population: 50 trials of 3.5 million steps of CartPole, from the command to its last line.

    python benchmarks/tune.py --json benchmarks/results/tune-h200.json
    python benchmarks/tune.py --quick                 # a small one, on any machine

The clock runs around `drivetrain tune ...` as a user types it: Python's and torch's start, the proposals, all generations,
the runs' folders and the pictures are in it. The speed of the training alone is printed beside it, from the times in the runs' metrics.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from drivetrain import __version__
from drivetrain.hardware import detect
from drivetrain.runs import Run

SEARCH = ["learning_rate=1e-4..1e-2,log", "gamma=0.95..0.999", "gae=0.8..1", "entropy_weight=0..0.02", "ratio_clip=0.1..0.3"]
ENVS, HORIZON = 1024, 16
WHOLE, QUICK = {"epochs": 214, "envs": ENVS}, {"epochs": 2, "envs": 64, "global_batch": 256, "eval_episodes": 5}


@dataclass(frozen=True)
class Row:
    """One study: seconds of the whole command, and the part of them in which the generations were trained and evaluated."""

    trials: int
    population: int
    steps_each: int
    seconds: float
    steps_per_second: float
    seconds_of_training: float
    steps_per_second_of_training: float
    best: float
    finished: int


def study(trials: int, population: int, settings: dict[str, Any]) -> Row:
    words = ["cartpole", *(f"{k}={v}" for k, v in settings.items()), "--trials", str(trials), "--population", str(population)]
    words += [word for text in SEARCH for word in ("--search", text)]
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "drivetrain", "tune", *words, "--metric", "eval/return", "--name", "timed", "--json"],
            stdout=subprocess.PIPE, text=True, cwd=folder,
        )  # fmt: skip
        seconds = time.perf_counter() - begun
        if done.returncode:
            sys.exit(done.returncode)
        result = json.loads(done.stdout)
        ends = [Run(Path(folder) / trial["run"]).rows()[-1]["time"] for trial in result["trials"]]
    training = sum(max(ends[i : i + population]) for i in range(0, trials, population))
    each = settings["epochs"] * settings["envs"] * HORIZON
    return Row(
        trials, population, each, round(seconds, 1), round(trials * each / seconds), round(training, 1), round(trials * each / training),
        result["best"]["value"], sum(trial["state"] == "finished" for trial in result["trials"]),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--population", type=int, default=25, help="trials at once")
    parser.add_argument("--quick", action="store_true", help="four trials of 2,048 steps, two at once")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    row = study(4, 2, QUICK) if args.quick else study(args.trials, args.population, WHOLE)
    print(
        f"{row.trials} trials of {row.steps_each:,} steps, {row.population} at once: {row.seconds:.1f} s, {row.steps_per_second:,} steps/s"
    )
    print(f"of it training and judging: {row.seconds_of_training:.1f} s, {row.steps_per_second_of_training:,} steps/s")
    print(f"best: a return of {row.best:.1f}; {row.finished} finished")
    if args.json:
        facts = {
            "date": datetime.now(UTC).date().isoformat(), "hardware": detect().sentence(), "python": platform.python_version(),
            "torch": metadata.version("torch"), "optuna": metadata.version("optuna"), "drivetrain": __version__,
            "command": "python benchmarks/tune.py", "rows": [asdict(row)],
        }  # fmt: skip
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
