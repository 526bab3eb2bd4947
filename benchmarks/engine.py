"""What the engine costs over a loop written by hand, on this CPU: `python benchmarks/engine.py`.

Both train the same net on the same tensors with the same fused AdamW and cosine schedule; the engine also
shuffles by key, seeds dropout, guards against NaN, computes the gradient norm, and logs. Runs are
interleaved and the median of each is printed.
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

from drivetrain.engine.group import Group
from drivetrain.engine.loop import Training
from drivetrain.engine.observe import Observers
from drivetrain.hardware import cpu_cores, detect
from drivetrain.plan import choose
from drivetrain.runs import Run
from drivetrain.task import Task, Tensors
from drivetrain.tasks.vision.nets import SmallCNN, mlp
from drivetrain.watch.files import MetricsFile, TensorBoard


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


def by_hand(net: str, steps: int) -> float:
    task = Bench(net=net)
    torch.manual_seed(0)
    model = task.model().train()
    x, y = task.train_data().columns
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5 * (1 + math.cos(math.pi * s / steps)))
    begun, done = time.perf_counter(), 0
    while done < steps:
        order = torch.randperm(len(x))
        for start in range(0, len(x), 64):
            rows = order[start : start + 64]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            schedule.step()
            done += 1
            if done % 50 == 0:
                loss.item()
            if done == steps:
                break
    return (time.perf_counter() - begun) / steps


def by_engine(net: str, steps: int) -> float:
    """The loop of `drivetrain train` with its files; model building and the final save are not steps."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder)
        task = Bench(net=net, steps=steps)
        plan = choose(task.settings(), detect(), device="cpu", world_size=1, local_procs=1)
        clock = _Clock()
        observer = Observers([MetricsFile(run), TensorBoard(Path(folder) / "tensorboard"), clock])
        Training(task, plan, run, Group(0, 1, torch.device("cpu")), observer, False).run_to_end()
        observer.close()
        return (clock.ended - clock.begun) / steps


class _Clock(Observers):
    begun = ended = 0.0

    def __init__(self) -> None:
        super().__init__([])

    def moment(self, name: str) -> None:
        if name == "start":
            self.begun = time.perf_counter()
        elif name == "save":
            self.ended = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(cpu_cores())
    rows = []
    for net, steps in (("mlp", 3000), ("cnn", 150)):
        times: dict[str, list[float]] = {"hand": [], "engine": []}
        for function in (by_hand, by_engine):
            function(net, 20)
        for _ in range(args.repeats):
            times["hand"].append(by_hand(net, steps))
            times["engine"].append(by_engine(net, steps))
        hand, engine = (statistics.median(times[k]) * 1e6 for k in ("hand", "engine"))
        rows.append(
            {
                "net": net,
                "by_hand_us": round(hand, 1),
                "engine_us": round(engine, 1),
                "more_us": round(engine - hand, 1),
                "more_percent": round(100 * (engine / hand - 1), 2),
            }
        )
    facts = {
        "date": datetime.now(UTC).date().isoformat(),
        "cores": cpu_cores(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": f"python benchmarks/engine.py --repeats {args.repeats}",
        "rows": rows,
    }
    print(f"{'net':<6}{'by hand':>12}{'engine':>12}{'more':>10}{'':>9}   (microseconds a step, batch 64, median of {args.repeats})")
    for r in rows:
        print(f"{r['net']:<6}{r['by_hand_us']:>12,.1f}{r['engine_us']:>12,.1f}{r['more_us']:>10,.1f}{r['more_percent']:>8.1f}%")
    if args.json:
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
