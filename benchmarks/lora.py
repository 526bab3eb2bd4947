"""Adapters: transformers' Trainer with peft and drivetrain in one run, with the same model, rows, adapters and precision.

    python benchmarks/lora.py              # on a GPU: SmolLM2's shapes of 135M and 1.7B, random weights; about five minutes
    python benchmarks/lora.py --cpu        # a tiny shape on any machine: that both run, not how fast

Rank 16 on all linear layers, fused AdamW, gradients clipped to a norm of 1, rows of 1,024 tokens; one case has texts of 20 to 900
tokens, which the Trainer pads to the longest of a batch and drivetrain packs: what counts there is tokens of texts, and drivetrain
without packing is measured as well. Figures are the median of three windows after a warm-up.
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

PEAK = 790e12  # FLOP/s of bf16 matrix products, measured on this GPU
WINDOWS = 3
WAYS = ("trainer", "drivetrain", "padded")  # the last is drivetrain without packing


class Bench(Lora):
    """The lora task on random tokens: rows that are full, or texts of chat's lengths."""

    rank: int = 16
    clip: float = 1.0
    held_out: float = 0.0
    best: str | None = None
    chats: bool = False
    eval_every: str = "100000ep"
    save_every: str = "100000ep"

    def model(self) -> nn.Module:
        """Random weights, drawn on the GPU where there is one: on a CPU that takes a minute."""
        fast = torch.cuda.is_available() and detect_fake_mode() is None
        with torch.device("cuda" if fast else "cpu"):
            return super().model()

    @cached_property
    def _rows(self) -> PackedRows:
        documents = texts(self.chats, self.context, SHAPES[self.base.removeprefix("shape:")]["vocab_size"])
        return pack(documents, np.arange(len(documents)), self.context, self.packing, "truncate", 0)

    @cached_property
    def _eval_rows(self) -> None:
        return None

    def eval_data(self) -> None:
        return None


def texts(chats: bool, context: int, vocabulary: int) -> Tokens:
    draw = np.random.default_rng(0)
    lengths = draw.integers(20 * context // 1024 + 2, 900 * context // 1024 + 3, 2000) if chats else np.full(512, context)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return Tokens(draw.integers(0, vocabulary, starts[-1]).astype(np.int32), np.ones(starts[-1], bool), starts)


class Window:
    """Called at each step: the time of some, three times over, after a warm-up."""

    def __init__(self, warm: int, steps: int) -> None:
        self.warm, self.steps, self.seconds, self._count, self._begun = warm, steps, list[float](), 0, 0.0

    def __call__(self) -> bool:
        """Whether all has been timed."""
        past = self._count - self.warm
        self._count += 1
        if past < 0 or past % self.steps:
            return False
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if past:
            self.seconds.append((now - self._begun) / self.steps)
        self._begun = now
        return len(self.seconds) == WINDOWS


def peak() -> float:
    """Of the whole run: what a captured step works in counts as free after its capture."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


class Clock(Observer):
    """Times the engine's steps once it has settled how they run."""

    def __init__(self, window: Window) -> None:
        self.window, self.plan, self.done = window, dict[str, Any](), False

    def __bool__(self) -> bool:
        return self.done

    def planned(self, facts: dict[str, Any]) -> None:
        if "capture" in facts:  # else it speaks of threads
            self.plan = facts

    def reached(self, name: str) -> None:
        if name == "step" and self.plan and not self.done:
            self.done = self.window()


def ours(task: Bench, device: torch.device, window: Window) -> dict[str, Any]:
    pins = {"micro_batch": task.global_batch} | ({} if device.type == "cuda" else {"compile": "off"})  # a CPU shows that it runs
    plan = choose(task.settings(), detect(), device=device.type, world_size=1, local_procs=1, pins=pins)
    clock = Clock(window)
    with tempfile.TemporaryDirectory() as folder:
        observer = Observers([MetricsFile(Run(folder)), clock])
        group = Group(0, 1, torch.device("cuda", 0) if device.type == "cuda" else device)
        Training(task, plan, Run(folder), group, observer, clock).run_to_end()
        observer.close()
    return {"memory_gib": round(peak(), 2), "plan": {k: v for k, v in clock.plan.items() if k != "sentence"}}


def trainer(task: Bench, device: torch.device, window: Window) -> dict[str, Any]:
    """As people run it: peft's own layers, rows padded to the longest of their batch, bf16, fused AdamW."""
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

    half = device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=task.global_batch, max_steps=100_000, learning_rate=task.learning_rate, bf16=half,
            use_cpu=not half, logging_steps=50, report_to=[], save_strategy="no", disable_tqdm=True, optim="adamw_torch_fused",
            max_grad_norm=task.clip,
        )  # fmt: skip
        Trainer(model=net, args=options, train_dataset=data, data_collator=collate, callbacks=[Timed()]).train()
    return {"memory_gib": round(peak(), 2)}


def measured(way: Callable[..., dict[str, Any]], task: Bench, device: torch.device, warm: int, steps: int) -> dict[str, Any]:
    rows = Bench(**(task.settings() | {"packing": task.packing and way is ours}))._rows
    per_row = float((rows.document > 0).sum(1).mean())
    window = Window(warm, steps)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    facts = way(task, device, window)
    seconds = statistics.median(window.seconds)
    spread = (max(window.seconds) - min(window.seconds)) / seconds
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    speed = task.global_batch * per_row / seconds
    return facts | {"tokens_per_second": round(speed), "step_ms": round(1000 * seconds, 2), "spread_percent": round(100 * spread, 1)}


def flops_a_token(task: Bench) -> float:
    shape = SHAPES[task.base.removeprefix("shape:")]
    with FakeTensorMode():  # a shape needs no values
        frozen = sum(p.numel() for p in task._base.model(torch.bfloat16).parameters())
    return 4.0 * frozen + 6.0 * task.context * shape["hidden_size"] * shape["num_hidden_layers"]


def compare(shape: str, batch: int, context: int, chats: bool, device: torch.device, warm: int, steps: int) -> dict[str, Any]:
    precision = "bf16" if device.type == "cuda" else "fp32"
    made = {"base": f"shape:{shape}", "global_batch": batch, "context": context, "chats": chats, "precision": precision, "epochs": 100_000}
    theirs = measured(trainer, Bench(**made), device, warm, steps)
    own = measured(ours, Bench(**made), device, warm, steps)
    row = {
        "shape": shape,
        "batch": batch,
        "context": context,
        "texts": "20 to 900 tokens" if chats else "full rows",
        "trainer": theirs,
        "drivetrain": own,
    }
    row["ratio"] = round(own["tokens_per_second"] / theirs["tokens_per_second"], 2)
    if chats:
        row["padded"] = measured(ours, Bench(**made, packing=False), device, warm, steps)
        row["packing_ratio"] = round(own["tokens_per_second"] / row["padded"]["tokens_per_second"], 2)
    if device.type == "cuda":
        for found in (row[who] for who in WAYS if who in row):
            found["mfu_percent"] = round(100 * found["tokens_per_second"] * flops_a_token(Bench(**made)) / PEAK, 1)
    return row


def show(row: dict[str, Any]) -> None:
    name = f"{row['shape']} {row['batch']} x {row['context']}, {row['texts']}"
    ratios = {"drivetrain": f"   {row['ratio']:.2f}x", "padded": f"   packing alone: {row.get('packing_ratio', 0.0):.2f}x"}
    for who in (who for who in WAYS if who in row):
        f = row[who]
        print(
            f"{name:<36}{who:<12}{f['tokens_per_second']:>10,} tokens/s {f['memory_gib']:>7.1f} GiB {f.get('mfu_percent', 0.0):>6.1f} % MFU"
            f"  spread {f['spread_percent']:.0f} %{ratios.get(who, '')}",
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
    parser.add_argument("--only", nargs="*", metavar="SHAPE", help="just these: 135m, 1.7b")
    parser.add_argument("--steps", type=int, default=10, help="steps of a window, and of the warm-up (default 10)")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = torch.device("cpu" if args.cpu or not torch.cuda.is_available() else "cuda")
    cases = [("135m", 8, 1024, False), ("1.7b", 8, 1024, False), ("135m", 8, 1024, True), ("135m", 32, 1024, False)]
    warm, steps = (args.steps, args.steps) if device.type == "cuda" else (3, 3)
    if device.type == "cpu":
        cases = [("tiny", 4, 64, False), ("tiny", 4, 64, True)]
    rows = []
    for case in (c for c in cases if not args.only or c[0] in args.only):
        rows.append(compare(*case, device, warm, steps))
        show(rows[-1])
        if args.json:
            write(args.json, device, rows)
    print(
        "MFU: (4 x base parameters + 6 x context x width x layers) FLOPs a token over 790 TFLOP/s; without packing, padding is not counted"
    )


if __name__ == "__main__":
    main()
