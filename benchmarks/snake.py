"""Four snakes, guide 003's variant: the default training on this machine, its time, its curve and what the policy then does.

    python benchmarks/snake.py --json benchmarks/results/snake-h200.json

32.8 million steps of snakes (guide 003's thousand epochs). `win` is the share of episodes that two of the final policy win
against two of the policy of a tenth of the training.
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
    def __init__(self) -> None:
        self.begun, self.rows, self.notices = time.perf_counter(), list[dict[str, Any]](), list[str]()

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def row(self, row: dict[str, Any]) -> None:
        spent = round(time.perf_counter() - self.begun, 1)
        self.rows.append({"seconds": spent, "epoch": row["epoch"], **{k.removeprefix("train/"): round(row[k], 3) for k in CURVE}})
        print(self.rows[-1], flush=True)


def picture(facts: dict[str, Any], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, each = facts["rows"], facts["steps"] / facts["epochs"] / 1e6
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3))
    for axes, name, label in ((left, "return", "return of a snake's episode"), (right, "length", "steps of an episode")):
        axes.plot([r["epoch"] * each for r in rows], [r[name] for r in rows], color="#2a6f97")
        axes.set(xlabel="million steps of snakes", ylabel=label, ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a few small collections, to try the program")
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--picture", help="also draw the curve to this file (PNG)")
    args = parser.parse_args()
    small: dict[str, Any] = (
        {"envs": 16, "horizon": 8, "global_batch": 128, "epochs": 4, "eval_episodes": 4, "grid": 6} if args.quick else {}
    )
    task = Snake(**({"eval_episodes": 200, "log_every": "25ep", "eval_every": "100000ep", "save_every": "100000ep"} | small))
    plan = choose(task.settings(), detect(), device=args.device, world_size=1, local_procs=1, pins=None)
    curve = Curve()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        result = Training(task, plan, Run(folder), Group(0, 1, device), Observers([curve]), False).run_to_end()
    spent = time.perf_counter() - curve.begun
    steps = task.epochs * task.envs * task.horizon * task.agents
    print(
        f"{steps:,} steps of snakes in {spent:.1f} s, with starting up and judging: { ({k: round(v, 3) for k, v in result.metrics.items()}) }"
    )
    facts = {
        "date": datetime.now(UTC).date().isoformat(), "hardware": torch.cuda.get_device_name(0) if args.device == "cuda" else platform.machine(),
        "python": platform.python_version(), "torch": torch.__version__, "drivetrain": __version__, "command": "python benchmarks/snake.py",
        "steps": steps, "epochs": task.epochs, "seconds": round(spent, 1), "judged": result.metrics, "rows": curve.rows,
    }  # fmt: skip
    if args.json:
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")
    if args.picture:
        picture(facts, args.picture)


if __name__ == "__main__":
    main()
