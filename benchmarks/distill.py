"""Compares the training of algorithm distillation: guide 002's way of training (Accelerate, a loader of single samples), and drivetrain.

    python benchmarks/distill.py            # on a GPU: speed of both with the guide's model and batch, and of the three variants; a minute
    python benchmarks/distill.py --whole    # also collects, trains and evaluates the recipe darkroom, and times each stage
    python benchmarks/distill.py --cpu      # small batches on any machine

Both train the same module on the same histories with the same batch, precision and optimizer. The other program does what the
guide's program intends: Accelerate, a DataLoader with 4 workers whose dataset cuts single sequences out of memory-mapped arrays,
and clipped gradients. Each figure is the median of three windows after a warm-up.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from drivetrain import __version__
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observers
from drivetrain.engine.loop import Training
from drivetrain.hardware import detect
from drivetrain.plan.choose import choose
from drivetrain.runs import Run
from drivetrain.tasks.distill import histories
from drivetrain.tasks.distill.distill import Distill
from drivetrain.tasks.distill.model import Steps
from drivetrain.watch.files import MetricsFile
from lora import Clock, Window, peak_gib

NEVER = "100000ep"
GUIDE = {"width": 64, "layers": 4, "heads": 4, "inner": 128, "variant": "compressed", "global_batch": 512, "learning_rate": 3e-4}


class Sequences(torch.utils.data.Dataset[dict[str, np.ndarray]]):
    """Single sequences, cut out of memory-mapped histories in Python, as the guide's dataset does."""

    def __init__(self, folder: Path, rows: list[int], length: int, region: int) -> None:
        self.arrays = {
            name: np.load(folder / f"{name}.npy", mmap_mode="r")[rows] for name in ("states", "actions", "rewards", "next_states")
        }
        self.length, self.region = length, region
        tasks, self.streams, self.steps = self.arrays["actions"].shape
        self.choices = (self.steps - length) // region + 1
        self.count = tasks * self.streams

    def __len__(self) -> int:
        return self.count * 100

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        index %= self.count
        start = np.random.randint(self.choices) * self.region
        return {
            name: np.array(values[index // self.streams, index % self.streams, start : start + self.length])
            for name, values in self.arrays.items()
        }


def run_accelerate(task: Distill, folder: Path, device: torch.device, window: Window) -> dict[str, Any]:
    from accelerate import Accelerator

    is_gpu = device.type == "cuda"
    accelerator = Accelerator(cpu=not is_gpu, mixed_precision="bf16" if is_gpu else "no")
    found = task.histories()
    length = task.region * (2 if task.variant == "compressed" else 1)
    data = Sequences(folder, found.split()[0], length, task.region)
    loader = torch.utils.data.DataLoader(
        data, task.global_batch, shuffle=True, num_workers=4 if is_gpu else 1, pin_memory=is_gpu, persistent_workers=True
    )
    net = task.model_for(found)
    optimizer = torch.optim.AdamW(net.parameters(), task.learning_rate, betas=(0.9, 0.99), weight_decay=0.01)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    net.train()
    size = found.facts.size
    while True:
        for batch in loader:
            if window():
                return {"memory_gib": round(peak_gib(), 2)}
            place, after = ((batch[name].long() * torch.tensor([size, 1], device=device)).sum(-1) for name in ("states", "next_states"))
            action = batch["actions"].long()
            with accelerator.autocast():
                logits = net(Steps(place, action, batch["rewards"], after))
            loss = F.cross_entropy(logits.float().flatten(0, 1), action.flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def run_drivetrain(task: Distill, device: torch.device, window: Window) -> dict[str, Any]:
    # What a run of many minutes gets, without the trials before it.
    pins: dict[str, Any] = {"micro_batch": task.global_batch, "compile": "on" if device.type == "cuda" else "off"}
    plan = choose(task.settings(), detect(), device=device.type, world_size=1, local_procs=1, pins=pins)
    clock = Clock(window)
    with tempfile.TemporaryDirectory() as run:
        observer = Observers([MetricsFile(Run(run)), clock])
        group = Group(0, 1, torch.device("cuda", 0) if device.type == "cuda" else device)
        Training(task, plan, Run(run), group, observer, clock).run_to_end()
        observer.close()
    return {"memory_gib": round(peak_gib(), 2), "plan": {k: v for k, v in clock.plan.items() if k != "sentence"}}


def measure(name: str, folder: Path, device: torch.device, num_steps: int, batch: int | None, **settings: Any) -> dict[str, Any]:
    values = GUIDE | settings | ({"global_batch": batch} if batch else {})
    task = Distill(data=str(folder), eval_tasks=0, steps=10_000_000, eval_every=NEVER, save_every=NEVER, log_every=100, **values)
    window = Window(num_steps, num_steps)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    facts = run_accelerate(task, folder, device, window) if name == "accelerate" else run_drivetrain(task, device, window)
    seconds = statistics.median(window.seconds)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    steps = task.global_batch * task._sample_steps()
    row = {"name": name, "variant": task.variant, "batch": task.global_batch, "context": task.model_for(task.histories()).context_length}
    row |= {"step_ms": round(1000 * seconds, 2), "history_steps_per_second": round(steps / seconds), **facts}
    print(
        f"{name:<12} {task.variant:<11} batch {task.global_batch:>4}   {row['step_ms']:>9,.2f} ms   {row['history_steps_per_second']:>12,} steps of history/s",
        flush=True,
    )
    return row


def whole(settings: list[str]) -> dict[str, Any]:
    """Runs the recipe in a folder of its own, and times its stages."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        command = [sys.executable, "-m", "drivetrain", "train", "darkroom", *settings]
        subprocess.run(command, cwd=folder, check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)})
        seconds = time.perf_counter() - started
        stages = {}
        for run in sorted(Path(folder, "runs", "darkroom").iterdir()):
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            stages[run.name] = {k: v for k, v in rows[-1].items() if k in ("time", "step") or k.startswith("eval/")}
    return {"seconds": round(seconds, 1), "stages": stages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("settings", nargs="*", help="with --whole: settings of the recipe")
    args = parser.parse_args()
    device = torch.device("cpu" if args.cpu or not torch.cuda.is_available() else "cuda")
    is_gpu = device.type == "cuda"
    num_steps, batch = (100, None) if is_gpu else (5, 64)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "data"
        histories.write(folder, histories.noisy_histories("darkroom", 9, None, 100, 50, 80, None, 0))
        rows = [measure(name, folder, device, num_steps, batch) for name in ("accelerate", "drivetrain")]
        rows += [measure("drivetrain", folder, device, num_steps, batch, variant=variant) for variant in ("ad", "latent")]
    ratio = rows[1]["history_steps_per_second"] / rows[0]["history_steps_per_second"]
    print(f"drivetrain is {ratio:.1f} times as fast")
    result: dict[str, Any] = {"ratio": round(ratio, 2), "rows": rows}
    if args.whole:
        result["whole"] = whole(args.settings)
        print(json.dumps(result["whole"], indent=2))
    hardware = torch.cuda.get_device_name() if is_gpu else f"{os.cpu_count()} CPU cores ({platform.machine()})"
    facts = {"date": datetime.now(UTC).date().isoformat(), "hardware": hardware, "torch": torch.__version__, "drivetrain": __version__}
    if args.json:
        Path(args.json).write_text(json.dumps(facts | {"command": " ".join(["python", *sys.argv])} | result, indent=2) + "\n")


if __name__ == "__main__":
    main()
