"""Compares predictions with real training steps, for candidates that save memory and micro-batches that nearly fill it.

It uses one process: FSDP then makes all its copies, and each shard is the full tensor.

    python benchmarks/plan_ways.py --json benchmarks/results/plan-ways-h200.json     # on the described GPU
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from plan_further import FURTHER
from plan_models import NAMED

from drivetrain import __version__
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observer
from drivetrain.engine.loop import Training
from drivetrain.engine.measure.survey import survey
from drivetrain.hardware import Hardware
from drivetrain.hardware.described import parse
from drivetrain.plan import Plan
from drivetrain.plan.candidates import Candidate
from drivetrain.plan.capacity import MachineCapacity
from drivetrain.plan.choose import choose
from drivetrain.plan.profile import Profile
from drivetrain.plan.rating import Rater
from drivetrain.runs import Run
from plan import kendall

SINGLE: dict[str, Any] = {"strategy": "single", "activation_checkpointing": False}
CHECKPOINTING = SINGLE | {"activation_checkpointing": True}
ZERO2, ZERO3 = ({"strategy": "fsdp", "zero_stage": stage, "activation_checkpointing": False, "offload": "none"} for stage in (2, 3))
OFFLOAD = ZERO3 | {"offload": "all"}
LARGEST = 0  # means the largest micro-batch that is predicted to fit
CASES: list[tuple[str, dict[str, Any], int]] = [
    ("SmolLM2-135M shape", SINGLE, 16),
    ("SmolLM2-135M shape", CHECKPOINTING, 16),
    ("SmolLM2-135M shape", ZERO2, 16),
    ("SmolLM2-135M shape", ZERO3, 16),
    ("SmolLM2-135M shape", ZERO3 | {"activation_checkpointing": True}, 16),
    ("SmolLM2-135M shape", OFFLOAD, 16),
    ("SmolLM2-135M shape", SINGLE, LARGEST),
    ("ViT-B/16", SINGLE, 192),
    ("ViT-B/16", CHECKPOINTING, 192),
    ("ViT-B/16", ZERO3, 192),
    ("ViT-B/16", SINGLE, LARGEST),
    ("SmolLM2-1.7B shape", SINGLE, 6),
    ("SmolLM2-1.7B shape", CHECKPOINTING, 6),
    ("SmolLM2-1.7B shape", ZERO2, 6),
    ("SmolLM2-1.7B shape", ZERO3, 6),
    ("SmolLM2-1.7B shape", CHECKPOINTING, LARGEST),
    ("BERT layers, dropout", SINGLE, 64),
    ("BERT layers, dropout", CHECKPOINTING, 64),
    ("BERT layers, dropout", ZERO2, 64),
    ("BERT layers, dropout", ZERO3, 64),
    ("MLP-Mixer", SINGLE, 192),
    ("MLP-Mixer", CHECKPOINTING, 192),
    ("MLP-Mixer", ZERO3, 192),
]
MODELS = NAMED | FURTHER
# In its first steps the engine chooses how steps run and captures a graph; only the last steps are timed.
NUM_STEPS, NUM_EAGER_STEPS, NUM_TIMED_STEPS = 40, 8, 5


class AllStepsTaken(Exception):
    """Ends the training before it saves anything."""


class StepTimer(Observer):
    """Records the time of each step, how steps run, and notices about missing memory."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps, self.times, self.memory_notice, self.kind = num_steps, list[float](), "", "eager"

    def planned(self, facts: dict[str, Any]) -> None:
        if "capture" not in facts:  # the engine also reports its choice of threads here
            return
        if facts["compile"] == "on":
            self.kind = "compiled"
        elif facts["capture"] == "on":
            self.kind = "captured"

    def reached(self, name: str) -> None:
        if name == "step":
            torch.cuda.synchronize()
            if not self.times:
                torch.cuda.reset_peak_memory_stats()
            self.times.append(time.perf_counter())
            if len(self.times) > self.num_steps:
                raise AllStepsTaken

    def notice(self, text: str) -> None:
        if "memory" in text:
            self.memory_notice = text


@dataclass(frozen=True)
class Case:
    """A model with pinned choices of the plan: these leave one candidate."""

    model: str
    pins: dict[str, Any]
    profile: Profile
    hardware: Hardware

    @property
    def rater(self) -> Rater:
        return Rater(self.profile, MachineCapacity.of(self.hardware, "cuda", 1), 1 << 14, 1, 1)

    @property
    def candidate(self) -> Candidate:
        [candidate] = self.rater.candidates(self.pins, deepspeed=False)
        return candidate

    def largest_micro_batch(self) -> int:
        rater, candidate = self.rater, self.candidate
        size = max(s for s in range(1, 4097) if rater.rate(candidate, s).fits)
        return size - size % 8 if size > 16 else size

    def task(self, size: int) -> Any:
        return on_gpu(MODELS[self.model])(global_batch=size, steps=1000, log_every=1000, save_every=1000, samples=max(4 * size, 64))

    def plan(self, size: int) -> Plan:
        pins = self.pins | {"micro_batch": size}
        return choose(
            self.task(size).settings(), self.hardware, device="cuda", world_size=1, local_procs=1, pins=pins, profile=self.profile
        )


def on_gpu(kind: Any) -> Any:
    """Returns the same task, which makes its weights on the GPU: this is faster."""

    def model(self: Any) -> Any:
        with torch.device("cuda"):
            return kind.model(self)

    return type(kind.__name__, (kind,), {"model": model, "__module__": kind.__module__})


def run(case: Case, size: int) -> dict[str, Any]:
    """Takes real steps; returns their peak memory and the median seconds of a step."""
    task, plan = case.task(size), case.plan(size)
    torch._C._accelerator_setAllocatorSettings(plan.env.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False"))
    timer = StepTimer(NUM_STEPS if case.pins == SINGLE else NUM_EAGER_STEPS)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            Training(task, plan, Run(Path(folder)), Group(0, 1, torch.device("cuda", 0)), timer, False).run_to_end()
        except AllStepsTaken:
            pass
    seconds = statistics.median(end - start for start, end in pairwise(timer.times[-NUM_TIMED_STEPS - 1 :]))
    return {
        "peak_bytes": torch.cuda.max_memory_allocated() - before, "step_seconds": seconds, "kind": timer.kind, "shortage": timer.memory_notice
    }  # fmt: skip


def with_predictions(case: Case, size: int, largest: bool, measured: dict[str, Any]) -> dict[str, Any]:
    """Adds the predictions and their errors to a measurement."""
    plan = case.plan(size)
    predicted, memory = plan.predicted["step_seconds"], sum(plan.predicted["memory_bytes"].values())
    return measured | {
        "model": case.model, "way": case.candidate.name(), "micro_batch": size, "largest": largest, "predicted_bytes": memory, "predicted_seconds": predicted,
        "memory_error": memory / measured["peak_bytes"] - 1, "time_factor": predicted / measured["step_seconds"],
    }  # fmt: skip


def order(rows: list[dict[str, Any]], sweep: str) -> float:
    """Returns Kendall's tau of one model's speeds: of the candidates in `rows` and of the micro-batches of plan.py's sweep."""
    measured = [r["micro_batch"] / r["step_seconds"] for r in rows]
    predicted = [r["micro_batch"] / r["predicted_seconds"] for r in rows]
    for model in json.loads(Path(sweep).read_text())["rows"]:
        if model["model"] == rows[0]["model"]:
            measured += [r["micro_batch"] / r["step_seconds"] for r in model["sizes"]]
            predicted += [r["micro_batch"] / r["step_seconds"] / r["time_factor"] for r in model["sizes"]]
    return kendall(measured, predicted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="1xH200-141GB", help="the description of this machine")
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--only", nargs="*", help="models to measure")
    parser.add_argument(
        "--again", help="a results file: predict again the models that --only does not name, with its measurements (needs no GPU)"
    )
    parser.add_argument(
        "--sweep",
        default="benchmarks/results/plan-h200.json",
        help="the results of plan.py, whose micro-batches are ordered together with these candidates",
    )
    args = parser.parse_args()
    hardware, profiles, rows = parse(args.hardware), dict[str, Profile](), list[dict[str, Any]]()
    earlier_rows = json.loads(Path(args.again).read_text())["rows"] if args.again else []
    earlier_of_case = {(r["model"], r["way"], r["largest"]): r for r in earlier_rows}
    for model, pins, micro_batch in CASES:
        if args.only and model not in args.only and not args.again:
            continue
        if model not in profiles:
            profiles[model] = survey(MODELS[model](), "bf16")
        case, largest = Case(model, pins, profiles[model], hardware), micro_batch == LARGEST
        size = micro_batch or case.largest_micro_batch()
        earlier = earlier_of_case.get((model, case.candidate.name(), largest))
        measure_again = bool(args.only) and model in args.only
        if earlier is not None and not measure_again:
            rows.append(with_predictions(case, earlier["micro_batch"], largest, earlier))
        elif torch.cuda.is_available():
            rows.append(with_predictions(case, size, largest, run(case, size)))
        else:
            continue
        row = rows[-1]
        print(
            f"{row['model']:<20} {row['way']:<46} {row['micro_batch']:>5}: {row['peak_bytes'] / 2**30:6.1f} GiB ({row['memory_error']:+.1%}),"
            f" {1e3 * row['step_seconds']:7.1f} ms (x{row['time_factor']:.2f}) {row['kind']} {row['shortage']}",
            flush=True,
        )
    orders = {model: order([r for r in rows if r["model"] == model], args.sweep) for model in profiles}
    print("order of the candidates and of the sweep's micro-batches: " + ", ".join(f"{model} {tau:.2f}" for model, tau in orders.items()))
    if args.json and torch.cuda.is_available():
        facts = {
            "date": date.today().isoformat(), "hardware": torch.cuda.get_device_name(0), "described": args.hardware,
            "python": platform.python_version(), "torch": torch.__version__, "drivetrain": __version__,
            "command": " ".join(["python benchmarks/plan_ways.py", *sys.argv[1:]]), "orders": orders, "rows": rows,
        }  # fmt: skip
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
