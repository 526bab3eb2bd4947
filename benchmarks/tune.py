"""Measures `drivetrain tune` with a population of small policies: 50 trials of CartPole, 3.5 million steps each.

    python benchmarks/tune.py --json benchmarks/results/tune-h200.json
    python benchmarks/tune.py --quick                 # a small study, on any machine

It times the complete command: the start of Python and torch, the choice of settings, all generations, the runs' folders and
the pictures. It also prints the time of training and evaluation alone, from the times in the runs' metrics.
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
FULL = {"epochs": 214, "envs": ENVS}
QUICK = {"epochs": 2, "envs": 64, "global_batch": 256, "eval_episodes": 5}


@dataclass(frozen=True)
class Row:
    """One study: the seconds of the complete command, and of training and evaluation alone."""

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
    arguments = ["cartpole", *(f"{k}={v}" for k, v in settings.items()), "--trials", str(trials), "--population", str(population)]
    for search in SEARCH:
        arguments += ["--search", search]
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        process = subprocess.run(
            [sys.executable, "-m", "drivetrain", "tune", *arguments, "--metric", "eval/return", "--name", "timed", "--json"],
            stdout=subprocess.PIPE, text=True, cwd=folder,
        )  # fmt: skip
        seconds = time.perf_counter() - started
        if process.returncode:
            sys.exit(process.returncode)
        result = json.loads(process.stdout)
        trial_seconds = [Run(Path(folder) / trial["run"]).rows()[-1]["time"] for trial in result["trials"]]
    # The trials of a generation run at the same time, so the slowest one is the generation's time.
    training = sum(max(trial_seconds[i : i + population]) for i in range(0, trials, population))
    steps_each = settings["epochs"] * settings["envs"] * HORIZON
    return Row(
        trials, population, steps_each, round(seconds, 1), round(trials * steps_each / seconds),
        round(training, 1), round(trials * steps_each / training),
        result["best"]["value"], sum(trial["state"] == "finished" for trial in result["trials"]),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--population", type=int, default=25, help="trials at once")
    parser.add_argument("--quick", action="store_true", help="four trials of 2,048 steps, two at once")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    row = study(4, 2, QUICK) if args.quick else study(args.trials, args.population, FULL)
    print(
        f"{row.trials} trials of {row.steps_each:,} steps, {row.population} at once: {row.seconds:.1f} s, {row.steps_per_second:,} steps/s"
    )
    print(f"training and evaluation alone: {row.seconds_of_training:.1f} s, {row.steps_per_second_of_training:,} steps/s")
    print(f"best return: {row.best:.1f}; {row.finished} finished")
    if args.json:
        facts = {
            "date": datetime.now(UTC).date().isoformat(), "hardware": detect().sentence(), "python": platform.python_version(),
            "torch": metadata.version("torch"), "optuna": metadata.version("optuna"), "drivetrain": __version__,
            "command": "python benchmarks/tune.py", "rows": [asdict(row)],
        }  # fmt: skip
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
