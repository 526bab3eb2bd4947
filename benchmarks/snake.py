"""Trains four snakes (guide 003's variant) with the default settings; measures the time, the curve and the final policy.

    python benchmarks/snake.py --json benchmarks/results/snake-h200.json

The training has 32.8 million agent-steps (guide 003's 1,000 epochs). `win` is the share of episodes in which two snakes with
the final policy beat two snakes with the policy from a tenth of the training.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from drivetrain import __version__
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observer, Observers
from drivetrain.engine.loop import Training
from drivetrain.hardware import detect
from drivetrain.plan.choose import choose
from drivetrain.runs import Run
from drivetrain.tasks.rl.worlds import Snake

CURVE = ("train/return", "train/length", "train/entropy", "train/explained_variance")


class Curve(Observer):
    """Collects and prints the logged rows, with the time since the start."""

    def __init__(self) -> None:
        self.start_time, self.rows, self.notices = time.perf_counter(), list[dict[str, Any]](), list[str]()

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def row(self, row: dict[str, Any]) -> None:
        seconds = round(time.perf_counter() - self.start_time, 1)
        figures = {name.removeprefix("train/"): round(row[name], 3) for name in CURVE}
        self.rows.append({"seconds": seconds, "epoch": row["epoch"], **figures})
        print(self.rows[-1], flush=True)


def draw(facts: dict[str, Any], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, million_steps_per_epoch = facts["rows"], facts["steps"] / facts["epochs"] / 1e6
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3))
    for axes, name, label in ((left, "return", "return of a snake's episode"), (right, "length", "steps of an episode")):
        axes.plot([r["epoch"] * million_steps_per_epoch for r in rows], [r[name] for r in rows], color="#2a6f97")
        axes.set(xlabel="million steps of snakes", ylabel=label, ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a few small collections, to test the program")
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--picture", help="also draw the curve to this file (PNG)")
    args = parser.parse_args()
    settings: dict[str, Any] = {"eval_episodes": 200, "log_every": "25ep", "eval_every": "100000ep", "save_every": "100000ep"}
    if args.quick:
        settings |= {"envs": 16, "horizon": 8, "global_batch": 128, "epochs": 4, "eval_episodes": 4, "grid": 6}
    task = Snake(**settings)
    plan = choose(task.settings(), detect(), device=args.device, world_size=1, local_procs=1, pins=None)
    curve = Curve()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        result = Training(task, plan, Run(folder), Group(0, 1, device), Observers([curve]), False).run_to_end()
    seconds = time.perf_counter() - curve.start_time
    steps = task.epochs * task.envs * task.horizon * task.agents
    metrics = {name: round(value, 3) for name, value in result.metrics.items()}
    print(f"{steps:,} agent-steps in {seconds:.1f} s, with start and evaluation: {metrics}")
    facts = {
        "date": datetime.now(UTC).date().isoformat(), "hardware": torch.cuda.get_device_name(0) if args.device == "cuda" else platform.machine(),
        "python": platform.python_version(), "torch": torch.__version__, "drivetrain": __version__, "command": "python benchmarks/snake.py",
        "steps": steps, "epochs": task.epochs, "seconds": round(seconds, 1), "judged": result.metrics, "rows": curve.rows,
    }  # fmt: skip
    if args.json:
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")
    if args.picture:
        draw(facts, args.picture)


if __name__ == "__main__":
    main()
