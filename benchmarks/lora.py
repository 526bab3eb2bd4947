"""Compares LoRA training: transformers' Trainer with peft, and drivetrain, with the same model, rows, adapters and precision.

    python benchmarks/lora.py              # on a GPU: SmolLM2's shapes of 135M and 1.7B, random weights; about five minutes
    python benchmarks/lora.py --cpu        # a tiny shape on any machine: tests that both run, not their speed

Both use rank 16 on all linear layers, fused AdamW, gradients clipped to a norm of 1, and rows of 1,024 tokens. One case has
texts of 20 to 900 tokens: the Trainer pads them to the longest text of a batch, drivetrain packs them, and drivetrain without
packing is measured too. Padding does not count as tokens. Each figure is the median of three windows after a warm-up.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode

from drivetrain import __version__
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observer, Observers
from drivetrain.engine.loop import Training
from drivetrain.hardware import cpu_cores, detect
from drivetrain.plan.choose import choose
from drivetrain.runs import Run
from drivetrain.tasks.lora.base_model import SHAPES
from drivetrain.tasks.lora.lora import Lora
from drivetrain.tasks.lora.text import PackedRows, Tokens, pack
from drivetrain.watch.files import MetricsFile

PEAK_FLOPS = 790e12  # per second: bf16 matrix products, measured on an H200
NUM_WINDOWS = 3
PROGRAMS = ("trainer", "drivetrain", "padded")  # the last is drivetrain without packing


class Bench(Lora):
    """The lora task on random tokens: full rows, or texts as long as chats."""

    rank: int = 16
    clip: float = 1.0
    held_out: float = 0.0
    best: str | None = None
    chats: bool = False
    eval_every: str = "100000ep"
    save_every: str = "100000ep"

    def model(self) -> nn.Module:
        """Draws random weights, on the GPU if there is one: a CPU needs a minute."""
        use_gpu = torch.cuda.is_available() and detect_fake_mode() is None
        with torch.device("cuda" if use_gpu else "cpu"):
            return super().model()

    @cached_property
    def _rows(self) -> PackedRows:
        documents = random_texts(self.chats, self.context, SHAPES[self.base.removeprefix("shape:")]["vocab_size"])
        return pack(documents, np.arange(len(documents)), self.context, self.packing, "truncate", 0)

    @cached_property
    def _eval_rows(self) -> None:
        return None

    def eval_data(self) -> None:
        return None


def random_texts(chats: bool, context: int, vocabulary: int) -> Tokens:
    generator = np.random.default_rng(0)
    lengths = np.full(512, context)
    if chats:  # 20 to 900 tokens for rows of 1,024, and proportionally fewer for shorter rows
        lengths = generator.integers(20 * context // 1024 + 2, 900 * context // 1024 + 3, 2000)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return Tokens(generator.integers(0, vocabulary, starts[-1]).astype(np.int32), np.ones(starts[-1], bool), starts)


class Window:
    """Times several windows of steps, after a warm-up."""

    def __init__(self, num_warm_up: int, num_steps: int) -> None:
        self.num_warm_up, self.num_steps = num_warm_up, num_steps
        self.seconds: list[float] = []
        """Of one step, for each window."""
        self._count, self._started = 0, 0.0

    def __call__(self) -> bool:
        """Counts a step; returns whether all windows are timed."""
        num_steps = self._count - self.num_warm_up
        self._count += 1
        if num_steps < 0 or num_steps % self.num_steps:
            return False
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if num_steps:
            self.seconds.append((now - self._started) / self.num_steps)
        self._started = now
        return len(self.seconds) == NUM_WINDOWS


def peak_gib() -> float:
    """Returns the peak of the complete run, because torch counts a captured graph's memory as free after the capture."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


class Clock(Observer):
    """Times the steps after the engine has chosen how they run. Its truth value asks the engine to stop."""

    def __init__(self, window: Window) -> None:
        self.window, self.plan, self.is_done = window, dict[str, Any](), False

    def __bool__(self) -> bool:
        return self.is_done

    def planned(self, facts: dict[str, Any]) -> None:
        if "capture" in facts:  # the engine also reports its choice of threads here
            self.plan = facts

    def reached(self, name: str) -> None:
        if name == "step" and self.plan and not self.is_done:
            self.is_done = self.window()


def run_drivetrain(task: Bench, device: torch.device, window: Window) -> dict[str, Any]:
    pins: dict[str, Any] = {"micro_batch": task.global_batch}
    if device.type == "cpu":
        pins["compile"] = "off"  # speed does not matter on a CPU
    plan = choose(task.settings(), detect(), device=device.type, world_size=1, local_procs=1, pins=pins)
    clock = Clock(window)
    with tempfile.TemporaryDirectory() as folder:
        observer = Observers([MetricsFile(Run(folder)), clock])
        group = Group(0, 1, torch.device("cuda", 0) if device.type == "cuda" else device)
        Training(task, plan, Run(folder), group, observer, clock).run_to_end()
        observer.close()
    return {"memory_gib": round(peak_gib(), 2), "plan": {k: v for k, v in clock.plan.items() if k != "sentence"}}


def run_trainer(task: Bench, device: torch.device, window: Window) -> dict[str, Any]:
    """Runs the Trainer as its users do: peft's own layers, rows padded to the longest of their batch, bf16, fused AdamW."""
    from peft import get_peft_model
    from transformers import Trainer, TrainerCallback, TrainingArguments

    rows = Bench(**(task.settings() | {"packing": False}))._rows
    labels = np.where(rows.learned, rows.tokens, -100)
    columns = {"input_ids": rows.tokens, "attention_mask": rows.document > 0, "labels": labels}
    data = [{name: torch.from_numpy(column[i].astype(np.int64)) for name, column in columns.items()} for i in range(len(labels))]
    with device:
        net = get_peft_model(task._base.model(torch.bfloat16 if device.type == "cuda" else torch.float32), task.adapter())

    def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        longest = max(int(sample["attention_mask"].sum()) for sample in samples)
        return {name: torch.stack([sample[name][:longest] for sample in samples]) for name in columns}

    class Timed(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if window():
                control.should_training_stop = True

    is_gpu = device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=task.global_batch, max_steps=100_000, learning_rate=task.learning_rate, bf16=is_gpu,
            use_cpu=not is_gpu, logging_steps=50, report_to=[], save_strategy="no", disable_tqdm=True, optim="adamw_torch_fused",
            max_grad_norm=task.clip,
        )  # fmt: skip
        Trainer(model=net, args=options, train_dataset=data, data_collator=collate, callbacks=[Timed()]).train()
    return {"memory_gib": round(peak_gib(), 2)}


def measure(run: Callable[..., dict[str, Any]], task: Bench, device: torch.device, num_steps: int) -> dict[str, Any]:
    rows = Bench(**(task.settings() | {"packing": task.packing and run is run_drivetrain}))._rows
    tokens_per_row = float((rows.document > 0).sum(1).mean())
    window = Window(num_steps, num_steps)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    facts = run(task, device, window)
    seconds = statistics.median(window.seconds)
    spread = (max(window.seconds) - min(window.seconds)) / seconds
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    speed = task.global_batch * tokens_per_row / seconds
    return facts | {"tokens_per_second": round(speed), "step_ms": round(1000 * seconds, 2), "spread_percent": round(100 * spread, 1)}


def flops_per_token(task: Bench) -> float:
    shape = SHAPES[task.base.removeprefix("shape:")]
    with FakeTensorMode():  # no memory is needed to count parameters
        frozen = sum(p.numel() for p in task._base.model(torch.bfloat16).parameters())
    return 4.0 * frozen + 6.0 * task.context * shape["hidden_size"] * shape["num_hidden_layers"]


def compare(shape: str, batch: int, context: int, chats: bool, device: torch.device, num_steps: int) -> dict[str, Any]:
    precision = "bf16" if device.type == "cuda" else "fp32"
    settings = {
        "base": f"shape:{shape}",
        "global_batch": batch,
        "context": context,
        "chats": chats,
        "precision": precision,
        "epochs": 100_000,
    }
    peer = measure(run_trainer, Bench(**settings), device, num_steps)
    ours = measure(run_drivetrain, Bench(**settings), device, num_steps)
    row = {
        "shape": shape,
        "batch": batch,
        "context": context,
        "texts": "20 to 900 tokens" if chats else "full rows",
        "trainer": peer,
        "drivetrain": ours,
    }
    row["ratio"] = round(ours["tokens_per_second"] / peer["tokens_per_second"], 2)
    if chats:
        row["padded"] = measure(run_drivetrain, Bench(**settings, packing=False), device, num_steps)
        row["packing_ratio"] = round(ours["tokens_per_second"] / row["padded"]["tokens_per_second"], 2)
    if device.type == "cuda":
        flops = flops_per_token(Bench(**settings))
        for figures in (row[program] for program in PROGRAMS if program in row):
            figures["mfu_percent"] = round(100 * figures["tokens_per_second"] * flops / PEAK_FLOPS, 1)
    return row


def show(row: dict[str, Any]) -> None:
    name = f"{row['shape']} {row['batch']} x {row['context']}, {row['texts']}"
    ratios = {"drivetrain": f"   {row['ratio']:.2f}x", "padded": f"   packing alone: {row.get('packing_ratio', 0.0):.2f}x"}
    for program in (program for program in PROGRAMS if program in row):
        f = row[program]
        print(
            f"{name:<36}{program:<12}{f['tokens_per_second']:>10,} tokens/s {f['memory_gib']:>7.1f} GiB {f.get('mfu_percent', 0.0):>6.1f} % MFU"
            f"  spread {f['spread_percent']:.0f} %{ratios.get(program, '')}",
            flush=True,
        )
    plan = row["drivetrain"]["plan"]
    print(
        f"  capture {plan['capture']}: {plan['reasons'].get('capture')}; compile {plan['compile']}: {plan['reasons'].get('compile')}",
        flush=True,
    )


def write(path: str, device: torch.device, rows: list[dict[str, Any]]) -> None:
    import peft
    import transformers

    facts = {
        "date": datetime.now(UTC).date().isoformat(), "hardware": torch.cuda.get_device_name() if device.type == "cuda" else f"{cpu_cores()} CPU cores",
        "torch": torch.__version__, "python": platform.python_version(), "drivetrain": __version__,
        "transformers": transformers.__version__, "peft": peft.__version__,
        "command": "python benchmarks/lora.py" + (" --cpu" if device.type == "cpu" else ""), "rows": rows,
    }  # fmt: skip
    Path(path).write_text(json.dumps(facts, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="a tiny shape on the CPU")
    parser.add_argument("--only", nargs="*", metavar="SHAPE", help="measure only these: 135m, 1.7b")
    parser.add_argument("--steps", type=int, default=10, help="steps of a window, and of the warm-up (default 10)")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = torch.device("cpu" if args.cpu or not torch.cuda.is_available() else "cuda")
    cases = [("135m", 8, 1024, False), ("1.7b", 8, 1024, False), ("135m", 8, 1024, True), ("135m", 32, 1024, False)]
    num_steps = args.steps if device.type == "cuda" else 3
    if device.type == "cpu":
        cases = [("tiny", 4, 64, False), ("tiny", 4, 64, True)]
    rows = []
    for case in (c for c in cases if not args.only or c[0] in args.only):
        rows.append(compare(*case, device, num_steps))
        show(rows[-1])
        if args.json:
            write(args.json, device, rows)
    print(
        "MFU: (4 x base parameters + 6 x context x width x layers) FLOPs a token over 790 TFLOP/s; without packing, padding is not counted"
    )


if __name__ == "__main__":
    main()
