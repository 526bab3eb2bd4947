"""Measures algorithm distillation: its speed beside guide 002's way of training, and how well it learns to learn.

    python benchmarks/distill.py                    # on a GPU: speed of both, and of the three variants; two minutes
    python benchmarks/distill.py --seeds 0,1,2      # collects, trains and evaluates the recipe darkroom with each seed
    python benchmarks/distill.py --worlds           # the recipes of the other environments (or some: --worlds key-to-door)
    python benchmarks/distill.py --variants         # key-to-door with the three variants, each with the same number of tokens in its context
    python benchmarks/distill.py --cpu ...          # small forms of the same on any machine: tests that all run, not what they reach

For speed, both programs train the same module on the same histories with the same batch, precision and optimizer (fused AdamW).
The other program does what the guide's intends: Accelerate, a DataLoader with 4 workers whose dataset cuts single sequences out of
memory-mapped arrays, and clipped gradients. Each figure is the median of three windows after a warm-up. Returns are those of the
last ten episodes of held-out tasks. `--settings key=value` are further settings of all trainings. With --json, the file is written after each row.
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
from collections.abc import Iterator
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
GUIDE = {"width": 64, "layers": 4, "heads": 4, "inner": 128, "global_batch": 512, "learning_rate": 3e-4, "region": 80, "window": 80}
SMALL_GUIDE = GUIDE | {"width": 16, "layers": 1, "heads": 2, "inner": 32, "global_batch": 8, "region": 20, "window": 40, "latents": 4}
WORLDS = ("darkroom-permuted", "darkroom-17", "key-to-door")
VARIANTS: dict[str, dict[str, int]] = {
    "ad": {"window": 80}, "compressed": {"region": 40}, "latent": {"region": 40, "latents": 20},
}  # fmt: skip
"""Settings with 80, 82 and 81 tokens in context."""
KEY_TO_DOOR = ["world=key-to-door", "limit=40", "num_tasks=1000", "streams=20", "horizon=40", "global_batch=200000", "region=40"]
"""Episodes of 40 steps: two of them fill the context."""
SMALL_COLLECT = {"size": 5, "streams": 4, "num_tasks": 40, "epochs": 6, "eval_episodes": 4}
SMALL_TRAIN = {
    "steps": 4,
    "warmup": 1,
    "global_batch": 8,
    "width": 16,
    "layers": 1,
    "heads": 2,
    "inner": 32,
    "eval_streams": 2,
    "eval_episodes": 3,
}
MIN_RATIO, MAX_SECONDS, MIN_RETURN, MIN_WORST, MIN_SHARE = 5.0, 600.0, 16.0, 10.0, 0.85
"""What must hold on a GPU: speed beside the other program, time of a recipe, returns in the dark room, share of the optimum elsewhere."""


class Sequences(torch.utils.data.Dataset[dict[str, np.ndarray]]):
    """Single sequences, cut out of memory-mapped histories in Python, as the guide's dataset does."""

    def __init__(self, folder: Path, rows: list[int], length: int, grid: int) -> None:
        self.arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("states", "actions", "rewards", "next_states")}
        self.rows, self.length, self.grid = rows, length, grid
        _, self.streams, steps = self.arrays["actions"].shape
        self.choices = (steps - length) // grid + 1
        self.count = len(rows) * self.streams

    def __len__(self) -> int:
        return self.count * 100

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        index %= self.count
        start = np.random.randint(self.choices) * self.grid
        row, stream = self.rows[index // self.streams], index % self.streams
        return {name: np.array(values[row, stream, start : start + self.length]) for name, values in self.arrays.items()}


def run_accelerate(task: Distill, folder: Path, device: torch.device, window: Window) -> dict[str, Any]:
    from accelerate import Accelerator

    is_gpu = device.type == "cuda"
    accelerator = Accelerator(cpu=not is_gpu, mixed_precision="bf16" if is_gpu else "no")
    found = task.histories()
    facts = found.facts
    data = Sequences(folder, found.split()[0], task._sample_steps(facts), task._grid(facts))
    loader = torch.utils.data.DataLoader(
        data, task.global_batch, shuffle=True, num_workers=4 if is_gpu else 1, pin_memory=is_gpu, persistent_workers=True
    )
    net = task.model()
    optimizer = torch.optim.AdamW(net.parameters(), task.learning_rate, weight_decay=task.weight_decay, fused=True)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    net.train()
    to_cell = torch.tensor([facts.size, 1], device=device)
    while True:
        for batch in loader:
            if window():
                return {"memory_gib": round(peak_gib(), 2)}
            place, after = ((batch[name].long() * to_cell).sum(-1) for name in ("states", "next_states"))
            action = batch["actions"].long()
            with accelerator.autocast():
                logits = net(Steps(place, action, batch["rewards"], after))
            loss = F.cross_entropy(logits.float().flatten(0, 1), action.flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), task.clip)
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


def measure_speed(program: str, variant: str, folder: Path, device: torch.device) -> dict[str, Any]:
    is_gpu = device.type == "cuda"
    values: dict[str, Any] = (GUIDE if is_gpu else SMALL_GUIDE) | {"variant": variant, "precision": "bf16" if is_gpu else "fp32"}
    task = Distill(data=str(folder), eval_tasks=0, steps=10_000_000, eval_every=NEVER, save_every=NEVER, log_every=100, **values)
    window = Window(100, 100) if is_gpu else Window(2, 2)
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    facts = run_accelerate(task, folder, device, window) if program == "accelerate" else run_drivetrain(task, device, window)
    seconds = statistics.median(window.seconds)
    gc.collect()
    if is_gpu:
        torch.cuda.empty_cache()
    steps = task.global_batch * task._sample_steps(task.facts())
    row = {"kind": "speed", "name": program, "variant": variant, "batch": task.global_batch, "precision": task.precision}
    row |= {"step_ms": round(1000 * seconds, 2), "history_steps_per_second": round(steps / seconds), **facts}
    return row


def measure_speeds(device: torch.device) -> Iterator[dict[str, Any]]:
    is_gpu = device.type == "cuda"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "data"
        size, streams, region = (9, 100, 80) if is_gpu else (5, 4, 20)
        histories.write(folder, histories.noisy_histories("darkroom", size, None, streams, 50, region, None, 0))
        peer = measure_speed("accelerate", "compressed", folder, device)
        yield peer
        for variant in ("compressed", "ad", "latent"):
            row = measure_speed("drivetrain", variant, folder, device)
            if variant == "compressed":
                row["ratio"] = round(row["history_steps_per_second"] / peer["history_steps_per_second"], 2)
                row["holds"] = row["ratio"] >= MIN_RATIO
            yield row


# --- learning ------------------------------------------------------------------------------------


def train(folder: str, *words: str) -> float:
    """Runs `drivetrain train` in a folder; returns its seconds."""
    start = time.perf_counter()
    path = os.pathsep.join(p for p in sys.path if p)
    subprocess.run([sys.executable, "-m", "drivetrain", "train", *words], cwd=folder, check=True, env=os.environ | {"PYTHONPATH": path})
    return time.perf_counter() - start


def outcome(run: Path) -> dict[str, Any]:
    """Returns the figures of a run's last evaluation, its steps, seconds and memory."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluation = next(row for row in reversed(rows) if "eval/return" in row)
    figures = {name.removeprefix("eval/"): round(value, 4) for name, value in evaluation.items() if name.startswith("eval/")}
    memory = max(row.get("memory_bytes", 0) for row in rows)
    return {"steps": rows[-1]["step"], "run_seconds": round(rows[-1]["time"], 1), "memory_gib": round(memory / 2**30, 2), **figures}


def words_of(values: dict[str, int], prefix: str = "") -> list[str]:
    return [f"{prefix}{name}={value}" for name, value in values.items()]


def train_recipe(recipe: str, seed: int, is_small: bool, settings: list[str]) -> dict[str, Any]:
    """Collects, trains and evaluates a built-in recipe."""
    small = []
    if is_small:
        horizon = {"darkroom": 20, "darkroom-17": 40}.get(recipe, 50)
        num_tasks = 25 if recipe in ("darkroom", "darkroom-17") else 40  # a room of 5 x 5 has no more goals
        small = words_of(SMALL_COLLECT | {"global_batch": 4 * num_tasks * horizon}, "collect.") + words_of(SMALL_TRAIN, "train.")
    with tempfile.TemporaryDirectory() as folder:
        seconds = train(folder, recipe, f"seed={seed}", *small, *settings)
        runs = Path(folder) / "runs" / recipe
        row = {"kind": "recipe", "name": recipe, "seed": seed, "seconds": round(seconds, 1), **outcome(runs / "2-train")}
        row["collected_return"] = outcome(runs / "1-collect")["return"]
    if recipe == "darkroom":
        row["holds"] = row["return"] >= MIN_RETURN and row["worst_return"] >= MIN_WORST
    else:
        row["holds"] = row["of_optimum"] >= MIN_SHARE
    return row | {"in_time": seconds < MAX_SECONDS}


def compare_variants(names: list[str], seeds: list[int], is_small: bool, settings: list[str]) -> Iterator[dict[str, Any]]:
    """Trains variants on the same histories of key-to-door, whose rewards are rare; each has as many tokens in its context."""
    small_collect = words_of(SMALL_COLLECT | {"global_batch": 4 * 40 * 40}) if is_small else []
    with tempfile.TemporaryDirectory() as folder:
        train(folder, "histories", *KEY_TO_DOOR, *small_collect, "--name", "h")
        for seed in seeds:
            for variant in names:
                words = [f"variant={variant}", *words_of(VARIANTS[variant]), "global_batch=64", f"seed={seed}"]
                words += [*(words_of(SMALL_TRAIN) if is_small else []), *settings]
                name = f"{variant}-{seed}"
                seconds = train(folder, "distill", "data=runs/h", *words, "--name", name)
                task = Distill(data=f"{folder}/runs/h", variant=variant, **VARIANTS[variant])
                row = {"kind": "variant", "name": variant, "seed": seed, "tokens": task.model().transformer.capacity}
                row |= {"sample_steps": task._sample_steps(task.facts()), "seconds": round(seconds, 1)}
                yield row | outcome(Path(folder) / "runs" / name)


# --- the command ---------------------------------------------------------------------------------


def show(row: dict[str, Any]) -> None:
    names = ("variant", "seed", "tokens", "step_ms", "history_steps_per_second", "ratio", "seconds", "memory_gib", "first_return", "return", "worst_return",
             "of_optimum", "holds", "in_time")  # fmt: skip
    print(f"{row['kind']:<8} {row['name']:<18}", *(f"{name} {row[name]}" for name in names if name in row), sep="  ", flush=True)


def all_rows(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    seeds = [int(seed) for seed in (args.seeds or "0").split(",")]
    if args.speed or not (args.seeds or args.worlds or args.variants):
        yield from measure_speeds(device)
    if args.seeds and not (args.worlds or args.variants):
        yield from (train_recipe("darkroom", seed, args.cpu, args.settings) for seed in seeds)
    if args.worlds:
        yield from (train_recipe(recipe, seed, args.cpu, args.settings) for recipe in args.worlds.split(",") for seed in seeds)
    if args.variants:
        yield from compare_variants(args.variants.split(","), seeds, args.cpu, args.settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="small forms, on a CPU")
    parser.add_argument("--speed", action="store_true", help="measure speed besides what else is asked for")
    parser.add_argument("--seeds", metavar="0,1,2", help="seeds of the recipe darkroom, or of --worlds or --variants")
    parser.add_argument("--worlds", nargs="?", const=",".join(WORLDS), metavar="RECIPE,...", help="train these recipes")
    parser.add_argument("--variants", nargs="?", const=",".join(VARIANTS), metavar="NAME,...", help="compare these variants")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--settings", nargs="*", default=[], metavar="key=value", help="further settings of the trainings")
    args = parser.parse_args()
    device = torch.device("cpu" if args.cpu or not torch.cuda.is_available() else "cuda")
    if device.type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else f"{os.cpu_count()} CPU cores ({platform.machine()})"
    result: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(), "hardware": hardware, "torch": torch.__version__, "python": platform.python_version(),
        "drivetrain": __version__, "command": " ".join(["python", "benchmarks/distill.py", *sys.argv[1:]]), "rows": [],
    }  # fmt: skip
    for row in all_rows(args, device):
        show(row)
        result["rows"].append(row)
        if args.json:
            Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
