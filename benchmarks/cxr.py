"""Compares training on chest X-rays: a plain loop by hand, eager and compiled, and drivetrain, with the same model and data.

    python benchmarks/cxr.py --json benchmarks/results/cxr-h200.json        # on a GPU: 1 and 4 questions an image, all programs
    python benchmarks/cxr.py --questions 4 --programs compiled drivetrain --json benchmarks/results/cxr-h200.json        # only these rows of the file
    python benchmarks/cxr.py --cpu        # a tiny model on any machine: tests that all run, not their speed

ConvNeXt-Base at 224, a BERT of base size with 12 heads, 128 tokens, bf16, random weights. The data is the synthetic twin, with resized images in
the cache; loader workers read it in all programs. All programs augment the images, clip the gradients and use fused AdamW.

eager-16    the loop by hand without compilation, with guide 004's batch of 16
eager       the same with the full batch
compiled    the same with torch.compile
resident    compiled, but every step has the same batch, which stays on the GPU: a step without reading data
loader      the loader alone, without a step. If it is faster than the steps, and `resident` no faster than `compiled`, reading is no bottleneck
drivetrain  `drivetrain train`

Each figure is the median of three windows after a warm-up. MFU is the share of an H200's measured peak of bf16 matrix products, on an H200.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import statistics
import sys
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
from drivetrain.tasks.cxr.net.model import CxrModel
from drivetrain.tasks.cxr.net.text_encoders import BertSelfAttention
from drivetrain.watch.files import MetricsFile
from lora import PEAK_FLOPS, Clock, Window, peak_gib

NEVER = "100000ep"
PROGRAMS = ("loader", "eager-16", "eager", "compiled", "resident", "drivetrain")
BATCHES = {1: 128, 2: 96, 4: 64, 8: 32}
"""Images of a step by questions an image."""
GUIDE_BATCH = 16
LOADER_STEPS = 4
"""Windows of the loader alone are so many times longer: more batches than its workers read ahead."""
HEADS = 12
"""Attention heads of a BERT of base size."""
LARGE = {
    "encoder": "convnext_base", "image_size": 224, "text_layers": 12, "width": 768, "heads": 12, "layers": 2,
    "max_tokens": 128, "studies": 1000,
}  # fmt: skip
TINY = {"encoder": "nano", "image_size": 64, "text_layers": 1, "width": 32, "heads": 2, "layers": 1, "max_tokens": 16, "studies": 60}


class BenchCxr(Cxr):
    """The task with the heads of a BERT of base size; text=small has one for each 32 channels."""

    def model(self) -> CxrModel:
        model = super().model()
        for module in model.text.modules():
            if isinstance(module, BertSelfAttention) and self.width % HEADS == 0:
                module.heads = HEADS
        return model


class Draws:
    """Random numbers of a batch, for the augmentation of the loops by hand."""

    def __init__(self, batch: dict[str, Tensor]) -> None:
        self.image = batch["image"]

    def uniform(self, k: int = 1) -> Tensor:
        return torch.rand(len(self.image), k, device=self.image.device)


def make_task(is_gpu: bool, questions: int, batch: int) -> BenchCxr:
    sizes = LARGE if is_gpu else TINY
    return BenchCxr(
        text="small", encoder_weights="none", grade="unrated", questions_per_image=questions, global_batch=batch, check=False,
        epochs=100_000, eval_every=NEVER, save_every=NEVER, warmup=0, best=None, **sizes,
    )  # fmt: skip


def batches(task: BenchCxr, device: torch.device) -> Iterator[dict[str, Tensor]]:
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


def total_loss(task: BenchCxr, model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Returns the loss of an augmented batch: the parts that drivetrain adds up, too."""
    draws: Any = Draws(batch)
    parts = task.loss(model, task.augment(batch, draws))[0]
    return torch.stack([total / count.clamp(min=1) for total, count in parts.values()]).sum()


def run_by_hand(task: BenchCxr, device: torch.device, window: Window, program: str) -> dict[str, Any]:
    model = task.model().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), task.learning_rate, weight_decay=task.weight_decay, fused=device.type == "cuda")
    is_compiled = program in ("compiled", "resident") and device.type == "cuda"
    step_loss = torch.compile(total_loss) if is_compiled else total_loss
    stream = batches(task, device)
    for batch in itertools.repeat(next(stream)) if program == "resident" else stream:
        if window():
            return {"memory_gib": round(peak_gib(), 2)}
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = step_loss(task, model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError("batches never end")


def run_loader(task: BenchCxr, device: torch.device, window: Window) -> dict[str, Any]:
    """Reads batches without a step; the first windows also fill the cache of resized images."""
    data = task.train_data()
    for row in data.selection.image:
        data.images.read(int(row))
    for _ in batches(task, device):
        if window():
            return {"workers": min(12, cpu_cores() - 1) if device.type == "cuda" else 1}
    raise AssertionError("batches never end")


def run_drivetrain(task: BenchCxr, device: torch.device, window: Window) -> dict[str, Any]:
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


def step_flops(task: BenchCxr, device: torch.device) -> int:
    """Returns the floating-point operations of a forward and a backward pass."""
    model, batch = task.model().to(device).train(), next(batches(task, device))
    with FlopCounterMode(display=False) as counter:
        total_loss(task, model, batch).backward()
    return int(counter.get_total_flops())


def measure(program: str, questions: int, device: torch.device, num_steps: int) -> dict[str, Any]:
    """Returns the row of a program."""
    is_gpu = device.type == "cuda"
    batch = GUIDE_BATCH if program == "eager-16" else BATCHES[questions]
    task = make_task(is_gpu, questions, batch if is_gpu else 4)
    num_flops = step_flops(task, device) if program != "loader" and is_h200(device) else 0
    if program == "loader":
        num_steps *= LOADER_STEPS
    window = Window(num_steps, num_steps)
    free_memory(device)
    if program == "drivetrain":
        facts = run_drivetrain(task, device, window)
    elif program == "loader":
        facts = run_loader(task, device, window)
    else:
        facts = run_by_hand(task, device, window, program)
    free_memory(device)
    seconds = statistics.median(window.seconds)
    row = {"name": program, "questions_per_image": questions, "batch": task.global_batch, "step_ms": round(1000 * seconds, 2)}
    row |= {"spread_percent": round(100 * (max(window.seconds) - min(window.seconds)) / seconds, 1)}
    row |= {"pairs_per_second": round(task.global_batch * questions / seconds)}
    return row | {"mfu": round(num_flops / seconds / PEAK_FLOPS, 3) if num_flops else None, **facts}


def is_h200(device: torch.device) -> bool:
    """Returns whether PEAK_FLOPS is this device's peak: on another one there is no MFU."""
    return device.type == "cuda" and "H200" in torch.cuda.get_device_name(device)


def free_memory(device: torch.device) -> None:
    """Frees what an earlier program left, so that the peak of memory is that of the next one."""
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def show(row: dict[str, Any]) -> None:
    mfu = f"   MFU {row['mfu']:.0%}" if row["mfu"] else ""
    print(
        f"{row['name']:<11} K = {row['questions_per_image']}   batch {row['batch']:>3}   {row['step_ms']:>9,.2f} ms"
        f"   {row['pairs_per_second']:>7,} pairs/s   spread {row['spread_percent']:.0f} %{mfu}",
        flush=True,
    )


def write(path: Path, row: dict[str, Any], device: torch.device) -> None:
    """Writes a row into the file; rows of other programs and numbers of questions stay as they are."""
    old = json.loads(path.read_text()) if path.is_file() else {"rows": []}
    rows = {key_of(each): each for each in old["rows"]} | {key_of(row): row}
    facts = {
        "date": datetime.now(UTC).date().isoformat(), "hardware": hardware_of(device), "torch": torch.__version__,
        "python": platform.python_version(), "drivetrain": __version__, "command": "python benchmarks/cxr.py",
    }  # fmt: skip
    if any(old[name] != facts[name] for name in ("hardware", "torch") if name in old):
        raise SystemExit(f"{path} holds rows of {old['hardware']}, torch {old['torch']}: give another file")
    path.write_text(json.dumps(facts | {"rows": [rows[key] for key in sorted(rows)]}, indent=1) + "\n")


def key_of(row: dict[str, Any]) -> tuple[int, int]:
    return row["questions_per_image"], PROGRAMS.index(row["name"])


def hardware_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{cpu_cores()} CPU cores ({platform.machine()})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--questions", type=int, nargs="+", choices=BATCHES, default=[1, 4], help="questions an image (default 1 4)")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--steps", type=int, default=30, help="steps of a window, and of the warm-up (default 30; 2 on a CPU)")
    parser.add_argument("--json", metavar="FILE", help="write the rows to this file, each as soon as it is measured")
    args = parser.parse_args()
    device = torch.device("cpu" if args.cpu or not torch.cuda.is_available() else "cuda")
    if device.type == "cpu":
        torch.set_num_threads(1)  # speed does not matter, and several threads wait for each other on a busy machine
    command = " ".join(["python benchmarks/cxr.py", *sys.argv[1:]])
    for questions in args.questions:
        for program in args.programs:
            row = measure(program, questions, device, args.steps if device.type == "cuda" else 2)
            show(row)
            if args.json:
                write(Path(args.json), row | {"command": command}, device)


if __name__ == "__main__":
    main()
