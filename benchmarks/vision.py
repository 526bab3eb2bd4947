"""Compares the training speed of guide 001's net: the guide's own loop, Lightning, Accelerate and drivetrain.

    python benchmarks/vision.py                              # on a GPU; about four minutes
    python benchmarks/vision.py --cpu                        # on any machine
    python benchmarks/vision.py --accuracy --data-dir data   # MNIST and Fashion-MNIST: accuracy, and the time until it is reached

All train the same net (Conv4, 463,882 parameters) with AdamW on 60,000 images of 28x28 bytes. Every figure is the
median of three windows after a warm-up. drivetrain runs as `drivetrain train` runs a long training. The rows below it
switch off one optimization after another, to show what each gains.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vision_peers import Row, Window, images, measure_accelerate, measure_guide, measure_lightning

from drivetrain import __version__
from drivetrain.data import Rand, Tensors
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observer, Observers
from drivetrain.engine.loop import Training
from drivetrain.hardware import cpu_cores, detect
from drivetrain.plan.choose import choose
from drivetrain.runs import Run
from drivetrain.tasks.vision.mnist import Mnist
from drivetrain.watch.files import MetricsFile, TensorBoard

# --- drivetrain ---------------------------------------------------------------------------------


class Bench(Mnist):
    """The mnist task on images in memory, with guide 001's settings."""

    net: str = "conv4"
    dropout: float = 0.5
    weight_decay: float = 1e-4
    global_batch: int = 128
    save_every: str = "10000ep"
    eval_every: str = "10000ep"
    keyed: bool = True

    def train_data(self) -> Tensors:
        pixels, labels = images()
        return Tensors(pixels.unsqueeze(1), labels)

    def eval_data(self) -> None:
        return None

    def augment(self, batch: Any, rand: Rand) -> Any:
        return super().augment(batch, rand if self.keyed else _ConstantRand(rand.ids))


class _ConstantRand:
    """Gives constants instead of random numbers keyed by sample, to measure what the keyed ones cost."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def uniform(self, k: int = 1) -> Tensor:
        return torch.full((len(self.ids), k), 0.3, device=self.ids.device)


class Clock(Observer):
    """Times the steps after the engine has chosen how they run. Its truth value asks the engine to stop."""

    def __init__(self, window: Window, profile: bool) -> None:
        self.window, self.profile, self.is_planned = window, profile, False
        self.plan: dict[str, Any] = {}
        self.trace: dict[str, float] = {}
        self._is_done = False
        self._profiler: Any = None
        self._steps = 0

    def __bool__(self) -> bool:
        return self._is_done

    def planned(self, facts: dict[str, Any]) -> None:
        if "capture" in facts:  # the engine also reports its choice of threads here
            self.plan, self.is_planned = facts, True

    def reached(self, name: str) -> None:
        if name != "step" or not self.is_planned or self._is_done:
            return
        if self._profiler is None:
            if not self.window():
                return
            if not self.profile:
                self._is_done = True
                return
            torch.cuda.synchronize()
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profiler.start()
            return
        self._steps += 1
        if self._steps == NUM_PROFILED_STEPS:
            torch.cuda.synchronize()
            self._profiler.stop()
            self.trace = read_trace(self._profiler)
            self._is_done = True


NUM_PROFILED_STEPS = 120
NUM_IGNORED_STEPS = 20  # the profiler slows the first launches of a graph


def read_trace(profiler: Any) -> dict[str, float]:
    """Returns host syncs per step, kernels per step, and the device's idle time, from a profile of captured steps."""
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    sync_calls = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
    device = sorted((e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")), key=lambda e: e["ts"])
    launches = sorted((e for e in events if e.get("name") == "cudaGraphLaunch"), key=lambda e: e["ts"])[NUM_IGNORED_STEPS:]
    graph_ids = {e["args"]["correlation"] for e in launches}
    first = next(i for i, e in enumerate(device) if e["args"].get("correlation") in graph_ids)
    device, steps = device[first:], len(launches)
    calls = [e for e in events if e.get("cat") == "cuda_runtime" and launches[0]["ts"] <= e["ts"] < launches[-1]["ts"]]
    syncs = sum(e["name"] in sync_calls for e in calls)  # the end of the profile makes one more
    span = device[-1]["ts"] + device[-1]["dur"] - device[0]["ts"]
    end, idle, idle_between_steps = device[0]["ts"], 0.0, 0.0
    previous_id = device[0]["args"].get("correlation")
    for event in device:
        gap, graph_id = max(0.0, event["ts"] - end), event["args"].get("correlation")
        idle += gap
        if graph_id != previous_id or graph_id not in graph_ids:  # the gap is not inside one graph
            idle_between_steps += gap
        end, previous_id = max(end, event["ts"] + event["dur"]), graph_id
    return {
        "host_syncs_per_step": syncs / steps,
        "device_operations_per_step": round(len(device) / steps, 1),
        "device_idle_between_steps_percent": round(100 * idle_between_steps / span, 2),
        "device_idle_percent": round(100 * idle / span, 2),
    }


def measure_drivetrain(
    device: torch.device, batch: int, augmented: bool, name: str, window: Window,
    pins: dict[str, Any] | None = None, profile: bool = False, keyed: bool = True,
) -> Row:  # fmt: skip
    """Times the engine with all files of `drivetrain train`, in a training that is long enough for every optimization."""
    task = Bench(
        global_batch=batch, rotation=10.0 if augmented else 0.0, translation=0.1 if augmented else 0.0, keyed=keyed,
        epochs=2000 * batch // 128 if device.type == "cuda" else 20,
    )  # fmt: skip
    plan = choose(task.settings(), detect(), device=device.type, world_size=1, local_procs=1, pins=pins)
    clock = Clock(window, profile)
    with tempfile.TemporaryDirectory() as folder:
        observer = Observers([MetricsFile(Run(folder)), TensorBoard(Path(folder) / "tensorboard"), clock])
        group = Group(0, 1, torch.device("cuda", 0) if device.type == "cuda" else device)
        training = Training(task, plan, Run(folder), group, observer, clock)
        training.run_to_end()
        observer.close()
    facts = {"plan": {k: v for k, v in clock.plan.items() if k != "sentence"}} if clock.plan else {}
    return window.row("augmented" if augmented else "not augmented", name, batch, **facts, **clock.trace)


# --- tables -------------------------------------------------------------------------------------


def speed_rows(device: torch.device, quick: bool) -> Iterator[Row]:
    gpu = device.type == "cuda"

    def window(seconds: float = 1.0, num_warm_up: int = 60) -> Window:
        if gpu:
            return Window(device, num_warm_up, 0.4 if quick else seconds)
        return Window(device, 3, 0.2 if quick else 4.0)

    loader_seconds = 3.0  # longer windows, because the speed of loops with loader workers varies
    small = 128
    workers = 4 if gpu else 0
    eager = {"capture": "off", "compile": "off"}
    usual = {"compile": "off"} if quick and not gpu else None  # the C++ compiler would take most of a quick run's time
    yield measure_guide(device, small, workers, window(loader_seconds))
    yield measure_drivetrain(device, small, True, "drivetrain", window(), usual, profile=gpu)
    if gpu:
        yield measure_drivetrain(device, small, True, "  captured, not compiled", window(), {"compile": "off"}, profile=True)
        yield measure_drivetrain(device, small, True, "  captured, random numbers not keyed", window(), {"compile": "off"}, keyed=False)
        yield measure_drivetrain(device, small, True, "  eager", window(), eager)
    yield measure_lightning(device, small, workers, window(loader_seconds))
    yield measure_accelerate(device, small, workers, window(loader_seconds))
    yield measure_drivetrain(device, small, False, "drivetrain", window(), usual)
    if gpu:
        yield measure_drivetrain(device, small, False, "  captured, not compiled", window(), {"compile": "off"})
        yield measure_drivetrain(device, small, False, "  eager", window(), eager)
        yield measure_accelerate(device, 2048, 16, window(loader_seconds, 20))
        yield measure_drivetrain(device, 2048, False, "drivetrain", window())


def accuracy_rows(data_dir: str, device: str) -> Iterator[dict[str, Any]]:
    """Trains guide 001's net on real data, by the command."""
    recipes = Path(__file__).parent.parent / "recipes"
    for name, required_accuracy in (("guide-001", 0.993), ("fashion-mnist", 0.92)):
        with tempfile.TemporaryDirectory() as folder:
            arguments = ["train", str(recipes / f"{name}.yaml"), f"data_dir={data_dir}", "--run-dir", f"{folder}/run", "--device", device]
            started = time.perf_counter()
            process = subprocess.run([sys.executable, "-m", "drivetrain", *arguments], text=True, capture_output=True)
            seconds = time.perf_counter() - started
            if process.returncode:
                raise SystemExit(process.stdout + process.stderr)
            rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
            evaluated = [(r["time"], r["eval/accuracy"]) for r in rows if "eval/accuracy" in r]
            reached = next((seconds for seconds, accuracy in evaluated if accuracy >= required_accuracy), None)
            yield {
                "recipe": f"recipes/{name}.yaml", "accuracy": evaluated[-1][1], "best": max(a for _, a in evaluated), "bar": required_accuracy,
                "seconds_to_bar": reached, "seconds_of_training": rows[-1]["time"], "seconds_of_the_command": round(seconds, 1), "steps": rows[-1]["step"],
                "plan": json.loads((Path(folder) / "run" / "run.json").read_text())["plan"]["measured"],
            }  # fmt: skip


def merge_rounds(rows: list[Row]) -> list[Row]:
    """Returns one row for each program: the median of its rounds."""
    rows_of_program: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        rows_of_program.setdefault((row.work, row.name, row.batch), []).append(row)
    merged = []
    for rounds in rows_of_program.values():
        speeds = [r.images_per_second for r in rounds]
        spread = max([r.spread for r in rounds] + [max(speeds) / min(speeds) - 1])
        merged.append(replace(rounds[-1], images_per_second=round(statistics.median(speeds), 1), spread=round(spread, 3)))
    return merged


def environment(device: torch.device, arguments: list[str]) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": torch.cuda.get_device_name() if device.type == "cuda" else f"{cpu_cores()} CPU cores ({platform.machine()})",
        "cpu_cores": cpu_cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "drivetrain": __version__,
        "command": "python benchmarks/vision.py" + "".join(f" {argument}" for argument in arguments),
    }
    for name in ("lightning", "accelerate", "torchvision"):
        with contextlib.suppress(Exception):
            facts[name] = __import__(name).__version__
    return facts


def show(rows: list[Row]) -> None:
    print(f"\n{'batch':>6}  {'images/s':>10}  {'spread':>6}  {'ratio':>6}")
    for work in ("augmented", "not augmented"):
        for batch in sorted({r.batch for r in rows if r.work == work}):
            group = [r for r in rows if (r.work, r.batch) == (work, batch)]
            ours = next((r.images_per_second for r in group if r.name == "drivetrain"), None)
            for r in group:
                ratio = f"{ours / r.images_per_second:.1f}x" if ours else ""
                print(f"{batch:>6}  {r.images_per_second:>10,.0f}  {100 * r.spread:>5.1f}%  {ratio:>6}  {work}: {r.name}")
    for r in rows:
        if "host_syncs_per_step" in r.facts:
            traced = {k: v for k, v in r.facts.items() if k != "plan"}
            print(f"{r.name.strip()} (batch {r.batch}): {traced}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="use the CPU, even if there is a GPU")
    parser.add_argument("--quick", action="store_true", help="short windows, to test the program")
    parser.add_argument("--accuracy", action="store_true", help="instead, train guide 001's net on MNIST and Fashion-MNIST to its accuracy")
    parser.add_argument("--rounds", type=int, default=1, help="measure all programs this many times: for a machine with other load")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = torch.device("cuda" if torch.cuda.is_available() and not args.cpu else "cpu")
    arguments = [w for w in sys.argv[1:] if w not in ("--json", args.json, "--data-dir", args.data_dir)]
    facts = environment(device, arguments)
    if args.accuracy:
        facts["rows"] = list(accuracy_rows(args.data_dir, device.type))
        for r in facts["rows"]:
            to_bar = "never" if r["seconds_to_bar"] is None else f"after {r['seconds_to_bar']:.1f} s"
            print(
                f"{r['recipe']:<28} {100 * r['accuracy']:.2f} % at the end, {100 * r['best']:.2f} % at best; {100 * r['bar']:.1f} % {to_bar};"
                f" {r['seconds_of_training']:.1f} s of training, {r['seconds_of_the_command']:.1f} s for the command"
            )
    else:
        rows: list[Row] = []
        for _ in range(args.rounds):
            for row in speed_rows(device, args.quick):
                rows.append(row)
                print(f"{row.work}: {row.name}, batch {row.batch}: {row.images_per_second:,.0f} images/s", flush=True)
                facts["rows"] = [asdict(r) for r in merge_rounds(rows)]
                write(facts, args.json)
        show(merge_rounds(rows))
    write(facts, args.json)


def write(facts: dict[str, Any], path: str | None) -> None:
    if path:
        Path(path).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
