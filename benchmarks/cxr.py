"""Compares training on chest X-rays: a plain loop by hand, eager and compiled, and drivetrain, with the same model and data.

    python benchmarks/cxr.py            # on a GPU: ConvNeXt-Base at 224, a BERT of base size, 128 tokens, bf16, 1 and 4 questions an image; minutes
    python benchmarks/cxr.py --cpu      # a tiny model on any machine: tests that all run, not their speed

The data is the synthetic twin, with resized images in the cache, read by loader workers in all programs. Weights are random.
Each figure is the median of three windows after a warm-up. MFU is the share of the GPU's measured peak of bf16 matrix products.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from drivetrain import __version__
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observers
from drivetrain.engine.loop import Training
from drivetrain.hardware import cpu_cores, detect
from drivetrain.plan.choose import choose
from drivetrain.runs import Run
from drivetrain.tasks.cxr.cxr import Cxr
from drivetrain.watch.files import MetricsFile
from lora import PEAK_FLOPS, Clock, Window, peak_gib

NEVER = "100000ep"
PROGRAMS = ("eager", "compiled", "drivetrain")
LARGE = {
    "encoder": "convnext_base", "image_size": 224, "text_layers": 12, "width": 768, "heads": 12, "layers": 2,
    "max_tokens": 128, "studies": 4000,
}  # fmt: skip
TINY = {"encoder": "nano", "image_size": 64, "text_layers": 1, "width": 32, "heads": 2, "layers": 1, "max_tokens": 16, "studies": 60}


class FullLengthCxr(Cxr):
    """The task with all token rows at full length, whatever the questions: the length of the published comparison."""

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        batch = super().collate(samples)
        missing = self.max_tokens - batch["tokens"].shape[-1]
        return batch | {"tokens": torch.nn.functional.pad(batch["tokens"], (0, missing))}


def make_task(is_gpu: bool, questions: int, batch: int) -> FullLengthCxr:
    sizes = LARGE if is_gpu else TINY
    return FullLengthCxr(
        text="small", encoder_weights="none", grade="unrated", questions_per_image=questions, global_batch=batch, check=False,
        epochs=100_000, eval_every=NEVER, save_every=NEVER, warmup=0, best=None, **sizes,
    )  # fmt: skip


def batches(task: FullLengthCxr, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Yields batches on the device for ever, as a DataLoader with workers reads them."""
    is_gpu = device.type == "cuda"
    workers = min(12, cpu_cores() - 1) if is_gpu else 1
    loader: Any = torch.utils.data.DataLoader(
        task.train_data(), task.global_batch, shuffle=True, drop_last=True, num_workers=workers, pin_memory=is_gpu,
        persistent_workers=True, collate_fn=task.collate, prefetch_factor=4,
    )  # fmt: skip
    while True:
        for batch in loader:
            yield {name: value.to(device, non_blocking=True) for name, value in batch.items()}


def total_loss(task: FullLengthCxr, model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    use_graph = torch.rand(len(batch["image"]), device=batch["image"].device) >= task.graph_dropout
    parts = task.loss(model, batch | {"use_graph": use_graph})[0]
    return torch.stack([total / count.clamp(min=1) for total, count in parts.values()]).sum()


def run_by_hand(task: FullLengthCxr, device: torch.device, window: Window, is_compiled: bool) -> dict[str, Any]:
    model = task.model().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), task.learning_rate, weight_decay=task.weight_decay, fused=device.type == "cuda")
    step_loss = torch.compile(total_loss) if is_compiled else total_loss
    for batch in batches(task, device):
        if window():
            return {"memory_gib": round(peak_gib(), 2)}
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = step_loss(task, model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError("batches never end")


def run_drivetrain(task: FullLengthCxr, device: torch.device, window: Window) -> dict[str, Any]:
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


def step_flops(task: FullLengthCxr, device: torch.device) -> int:
    """Returns the floating-point operations of a forward and a backward pass."""
    model, batch = task.model().to(device).train(), next(batches(task, device))
    with FlopCounterMode(display=False) as counter:
        total_loss(task, model, batch).backward()
    return int(counter.get_total_flops())


def measure(program: str, task: FullLengthCxr, device: torch.device, num_steps: int) -> dict[str, Any]:
    window = Window(num_steps, num_steps)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if program == "drivetrain":
        facts = run_drivetrain(task, device, window)
    else:
        facts = run_by_hand(task, device, window, program == "compiled")
    seconds = statistics.median(window.seconds)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    questions = task.questions_per_image
    row = {"name": program, "questions_per_image": questions, "batch": task.global_batch, "step_ms": round(1000 * seconds, 2)}
    return row | {"pairs_per_second": round(task.global_batch * questions / seconds), **facts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    device = torch.device("cpu" if args.cpu or not torch.cuda.is_available() else "cuda")
    is_gpu = device.type == "cuda"
    rows = []
    for questions, batch in ((1, 128), (4, 64)) if is_gpu else ((1, 4), (2, 4)):
        task = make_task(is_gpu, questions, batch)
        flops = step_flops(task, device)
        for program in PROGRAMS if is_gpu else ("eager", "drivetrain"):
            row = measure(program, task, device, 30 if is_gpu else 2)
            row["mfu"] = round(flops / (row["step_ms"] / 1000) / PEAK_FLOPS, 3) if is_gpu else None
            rows.append(row)
            mfu = f"   MFU {row['mfu']:.0%}" if is_gpu else ""
            print(
                f"{program:<11} K = {questions}   batch {batch:>3}   {row['step_ms']:>9,.2f} ms   {row['pairs_per_second']:>7,} pairs/s{mfu}",
                flush=True,
            )
    hardware = torch.cuda.get_device_name() if is_gpu else f"{os.cpu_count()} CPU cores ({platform.machine()})"
    facts = {
        "date": datetime.now(UTC).date().isoformat(), "hardware": hardware, "torch": torch.__version__, "python": platform.python_version(),
        "drivetrain": __version__, "command": "python benchmarks/cxr.py" + (" --cpu" if args.cpu else ""), "rows": rows,
    }  # fmt: skip
    if args.json:
        Path(args.json).write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
