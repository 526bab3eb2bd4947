"""Measures the seconds from SIGTERM to the end of a training, with signals at random times of a run.

python benchmarks/preempt.py --json benchmarks/results/preempt-cpu.json

The run is stopped and resumed many times. Its final weights must equal those of a run that was never stopped. Its
evaluations and saves take seconds, and must not delay a stop.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from drivetrain.hardware import cpu_cores
from drivetrain.runs import Run

TASK = """\
import time

from drivetrain.tasks.vision.digits import Digits


class SlowDigits(Digits):
    epochs: int = 1000
    steps: int = 400

    def loss(self, model, batch):
        time.sleep(0.02)
        return super().loss(model, batch)

    def metrics(self, model, batch):
        time.sleep(0.2)
        return super().metrics(model, batch)
"""
LATEST_SIGNAL_SECONDS = 15.0  # after the command's start


def train_command(procs: int, name: str) -> list[str]:
    settings = ["hidden=2048", "eval_every=40", "save_every=25", "plan.micro_batch=16", "plan.compile=off"]
    return [sys.executable, "-m", "drivetrain", "train", "slow.py", *settings, "--procs", str(procs), "--name", name, "-q"]


def stop_at_random(procs: int, times: int, rng: random.Random) -> tuple[list[tuple[float, float]], int]:
    """Returns for each stop (seconds until the signal, seconds from it to the end), and the number of stops before the first step."""
    stops, num_before_first_step = [], 0
    for _ in range(times):
        delay = rng.uniform(0.2, LATEST_SIGNAL_SECONDS)
        process = subprocess.Popen(train_command(procs, "stopped"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(delay)
            break  # the run is finished
        except subprocess.TimeoutExpired:
            pass
        signalled = time.monotonic()
        process.send_signal(signal.SIGTERM)
        code = process.wait()
        if code not in (200, 0, -signal.SIGTERM):
            raise SystemExit(f"ended with {code} after a signal at {delay:.1f} s")
        if code == -signal.SIGTERM:  # Python had not yet set its handler
            num_before_first_step += 1
        stops.append((delay, time.monotonic() - signalled))
        print(f"{procs} processes: signal after {delay:.1f} s, ended {stops[-1][1]:.2f} s later", file=sys.stderr, flush=True)
    return stops, num_before_first_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=30, help="signals for each number of processes (default 30)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    target = Path(args.json).resolve() if args.json else None
    rows = []
    for procs in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            Path("slow.py").write_text(TASK)
            stops, num_before_first_step = stop_at_random(procs, args.times, random.Random(args.seed))
            for name in ("stopped", "uninterrupted"):
                subprocess.run(train_command(procs, name), check=True)
            equal = Run("runs/stopped").model_path.read_bytes() == Run("runs/uninterrupted").model_path.read_bytes()
            os.chdir("/")
        seconds = [duration for _, duration in stops]
        worst = max(stops, key=lambda stop: stop[1])
        rows.append(
            {
                "processes": procs,
                "stops": len(stops),
                "before_anything": num_before_first_step,
                "median": statistics.median(seconds),
                "worst": worst[1],
            }
            | {"worst_at": worst[0], "weights_equal": equal}
        )
        print(
            f"{procs} processes: {len(stops)} stops, median {statistics.median(seconds):.2f} s, worst {worst[1]:.2f} s"
            f" (signal {worst[0]:.1f} s after the start); weights {'equal' if equal else 'DIFFER'}",
            flush=True,
        )
    if target:
        facts = {
            "date": datetime.now(UTC).date().isoformat(), "cores": cpu_cores(), "torch": torch.__version__, "python": platform.python_version(),
            "command": f"python benchmarks/preempt.py --times {args.times} --seed {args.seed}", "rows": rows,
        }  # fmt: skip
        target.write_text(json.dumps(facts, indent=1) + "\n")
    sys.exit(not all(row["weights_equal"] for row in rows))


if __name__ == "__main__":
    main()
