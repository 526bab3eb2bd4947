"""Compares the engine's step time with that of a hand-written loop, on this CPU: `python benchmarks/engine.py`.

Both train the same net on the same tensors with the same fused AdamW and cosine schedule. The engine also shuffles by key,
seeds dropout, checks for NaN, computes the gradient norm, logs, and writes heartbeats and timers. The two loops alternate
every few steps, so that other load on the machine affects both. The result is the median difference over pairs of turns.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from drivetrain.data import Tensors
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observer, Observers
from drivetrain.engine.loop import Training
from drivetrain.hardware import cpu_cores, detect
from drivetrain.plan.choose import choose
from drivetrain.runs import Run
from drivetrain.task import Task
from drivetrain.tasks.vision.nets import SmallCNN, mlp
from drivetrain.watch.files import MetricsFile, TensorBoard
from drivetrain.watch.heartbeat import HeartbeatWriter, open_heartbeat_page


class Bench(Task):
    global_batch: int = 64
    learning_rate: float = 1e-3
    net: str = "mlp"
    eval_every: str = "1000ep"
    save_every: str = "1000ep"

    def model(self) -> nn.Module:
        return SmallCNN() if self.net == "cnn" else mlp(64, 128, 10)

    def train_data(self) -> Tensors:
        generator = torch.Generator().manual_seed(0)
        shape = (1, 28, 28) if self.net == "cnn" else (8, 8)
        return Tensors(torch.rand(64 * 50, *shape, generator=generator), torch.randint(10, (64 * 50,), generator=generator))

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)


class ByHand:
    """A plain training loop; each call takes a few steps."""

    def __init__(self, net: str, steps: int) -> None:
        task = Bench(net=net)
        torch.manual_seed(0)
        self.model = task.model().train()
        self.x, self.y = task.train_data().columns
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: 0.5 * (1 + math.cos(math.pi * s / steps)))
        self.step = 0

    def __call__(self, steps: int) -> None:
        for _ in range(steps):
            start = self.step * 64 % len(self.x)
            if start == 0:
                self.order = torch.randperm(len(self.x))
            rows = self.order[start : start + 64]
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(self.x[rows]), self.y[rows])
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.step += 1
            if self.step % 50 == 0:
                loss.item()  # as for a log line


class Turns(Observer):
    """Runs the plain loop after every `block` steps of the engine, for as many steps, and times both."""

    def __init__(self, by_hand: ByHand, block: int) -> None:
        self.by_hand, self.block = by_hand, block
        self.times: dict[str, list[float]] = {"hand": [], "engine": []}
        self._steps = 0
        self._started = time.perf_counter()

    def reached(self, name: str) -> None:
        if name != "step":
            return
        if self._steps and self._steps % self.block == 0:
            engine_end = time.perf_counter()
            self.by_hand(self.block)
            by_hand_end = time.perf_counter()
            self.times["engine"].append((engine_end - self._started) / self.block)
            self.times["hand"].append((by_hand_end - engine_end) / self.block)
            self._started = time.perf_counter()
        self._steps += 1


def compare(net: str, steps: int, block: int) -> dict[str, list[float]]:
    """Runs the engine with all files of `drivetrain train`, and the plain loop between its steps. The first turns are warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        run, task = Run(folder), Bench(net=net, steps=steps)
        plan = choose(task.settings(), detect(), device="cpu", world_size=1, local_procs=1)
        turns = Turns(ByHand(net, steps), block)
        heartbeat = HeartbeatWriter(open_heartbeat_page())
        observer = Observers([MetricsFile(run), TensorBoard(Path(folder) / "tensorboard"), heartbeat, turns])
        training = Training(task, plan, run, Group(0, 1, torch.device("cpu")), observer, False)
        training.execution.step.reached = heartbeat.reached  # the plain loop runs between steps, not inside them
        training.run_to_end()
        observer.close()
        return {name: times[3:] for name, times in turns.times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--turns", type=int, default=150, help="how often the two loops alternate with the CNN; the MLP gets four times as many"
    )
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(cpu_cores())
    rows = []
    for net, turns, block in (("mlp", 4 * args.turns, 25), ("cnn", args.turns, 4)):
        times = compare(net, turns * block, block)
        by_hand = statistics.median(times["hand"]) * 1e6
        differences = [engine - hand for engine, hand in zip(times["engine"], times["hand"], strict=True)]
        more = statistics.median(differences) * 1e6
        rows.append(
            {
                "net": net,
                "by_hand_us": round(by_hand, 1),
                "engine_us": round(by_hand + more, 1),
                "more_us": round(more, 1),
                "more_percent": round(100 * more / by_hand, 2),
            }
        )
    facts = {
        "date": datetime.now(UTC).date().isoformat(),
        "cores": cpu_cores(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": f"python benchmarks/engine.py --turns {args.turns}",
        "rows": rows,
    }
    print(f"{'net':<6}{'by hand':>12}{'engine':>12}{'more':>10}{'':>9}   (microseconds a step, batch 64, median over pairs of turns)")
    for r in rows:
        print(f"{r['net']:<6}{r['by_hand_us']:>12,.1f}{r['engine_us']:>12,.1f}{r['more_us']:>10,.1f}{r['more_percent']:>8.1f}%")
    if args.json:
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
