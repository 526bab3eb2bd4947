"""Training speed of guide 001's net: the guide's own loop, Lightning, Accelerate and drivetrain in one run.

    python benchmarks/vision.py                              # on a GPU; about four minutes
    python benchmarks/vision.py --cpu                        # on any machine
    python benchmarks/vision.py --accuracy --data-dir data   # MNIST and Fashion-MNIST: accuracy, and the time to it

All train the same net (Conv4, 463,882 parameters) with AdamW on 60,000 images of 28x28 bytes. Every figure is the
median of three windows after a warm-up. drivetrain runs as `drivetrain train` runs a long training; below it stand
the same steps with parts of that switched off, so that one sees where the gain comes from.
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
from vision_peers import Row, Window, accelerate, guide, images, lightning

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
        return super().augment(batch, rand if self.keyed else _Still(rand.ids))


class _Still:
    """Numbers that cost nothing, to see what keyed ones cost."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def uniform(self, k: int = 1) -> Tensor:
        return torch.full((len(self.ids), k), 0.3, device=self.ids.device)


class Clock(Observer):
    """Times the steps once the engine has settled how they run; then asks to stop."""

    def __init__(self, window: Window, profile: bool) -> None:
        self.window, self.profile, self.settled = window, profile, False
        self.plan: dict[str, Any] = {}
        self.trace: dict[str, float] = {}
        self._done = False
        self._profiler: Any = None
        self._steps = 0

    def __bool__(self) -> bool:
        return self._done

    def planned(self, facts: dict[str, Any]) -> None:
        if "capture" in facts:  # else it speaks of threads
            self.plan, self.settled = facts, True

    def reached(self, name: str) -> None:
        if name != "step" or not self.settled or self._done:
            return
        if self._profiler is None:
            if not self.window():
                return
            if not self.profile:
                self._done = True
                return
            torch.cuda.synchronize()
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profiler.start()
            return
        self._steps += 1
        if self._steps == PROFILED:
            torch.cuda.synchronize()
            self._profiler.stop()
            self.trace = read_trace(self._profiler)
            self._done = True


PROFILED, LEFT_OUT = 120, 20  # steps; the profiler takes its time over the first launches of a graph


def read_trace(profiler: Any) -> dict[str, float]:
    """From a profile of captured steps: host syncs a step, kernels a step, and how long the device had nothing to do."""
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    waits = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
    device = sorted((e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")), key=lambda e: e["ts"])
    launches = sorted((e for e in events if e.get("name") == "cudaGraphLaunch"), key=lambda e: e["ts"])[LEFT_OUT:]
    graph_ids = {e["args"]["correlation"] for e in launches}
    begun = next(i for i, e in enumerate(device) if e["args"].get("correlation") in graph_ids)
    device, steps = device[begun:], len(launches)
    calls = [e for e in events if e.get("cat") == "cuda_runtime" and launches[0]["ts"] <= e["ts"] < launches[-1]["ts"]]
    syncs = sum(e["name"] in waits for e in calls)  # the profile itself ends with one more
    span = device[-1]["ts"] + device[-1]["dur"] - device[0]["ts"]
    end, idle, between = device[0]["ts"], 0.0, 0.0
    previous = device[0]["args"].get("correlation")
    for event in device:
        gap, mine = max(0.0, event["ts"] - end), event["args"].get("correlation")
        idle += gap
        if mine != previous or mine not in graph_ids:  # not inside of one graph
            between += gap
        end, previous = max(end, event["ts"] + event["dur"]), mine
    return {
        "host_syncs_per_step": syncs / steps,
        "device_operations_per_step": round(len(device) / steps, 1),
        "device_idle_between_steps_percent": round(100 * between / span, 2),
        "device_idle_percent": round(100 * idle / span, 2),
    }


def ours(
    device: torch.device, batch: int, augmented: bool, name: str, window: Window,
    pins: dict[str, Any] | None = None, profile: bool = False, keyed: bool = True,
) -> Row:  # fmt: skip
    """`drivetrain train` of a training long enough for every means to pay, with its files, until it is timed."""
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

    def window(seconds: float = 1.0, warm: int = 60) -> Window:
        return Window(device, warm if gpu else 3, (0.4 if quick else seconds) if gpu else (0.2 if quick else 4.0))

    fed = 3.0  # seconds: loops that loader workers feed come in waves

    small = 128
    workers = 4 if gpu else 0
    plain = {"capture": "off", "compile": "off"}
    usual = {"compile": "off"} if quick and not gpu else None  # a C++ compiler takes longer than all else here
    yield guide(device, small, workers, window(fed))
    yield ours(device, small, True, "drivetrain", window(), usual, profile=gpu)
    if gpu:
        yield ours(device, small, True, "  captured, not compiled", window(), {"compile": "off"}, profile=True)
        yield ours(device, small, True, "  captured, random numbers not keyed", window(), {"compile": "off"}, keyed=False)
        yield ours(device, small, True, "  eager", window(), plain)
    yield lightning(device, small, workers, window(fed))
    yield accelerate(device, small, workers, window(fed))
    yield ours(device, small, False, "drivetrain", window(), usual)
    if gpu:
        yield ours(device, small, False, "  captured, not compiled", window(), {"compile": "off"})
        yield ours(device, small, False, "  eager", window(), plain)
        yield accelerate(device, 2048, 16, window(fed, 20))
        yield ours(device, 2048, False, "drivetrain", window())


def accuracy_rows(data_dir: str, device: str) -> Iterator[dict[str, Any]]:
    """Guide 001's net on real data, through the command."""
    recipes = Path(__file__).parent.parent / "recipes"
    for name, bar in (("guide-001", 0.993), ("fashion-mnist", 0.92)):
        with tempfile.TemporaryDirectory() as folder:
            words = ["train", str(recipes / f"{name}.yaml"), f"data_dir={data_dir}", "--run-dir", f"{folder}/run", "--device", device]
            begun = time.perf_counter()
            done = subprocess.run([sys.executable, "-m", "drivetrain", *words], text=True, capture_output=True)
            wall = time.perf_counter() - begun
            if done.returncode:
                raise SystemExit(done.stdout + done.stderr)
            rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
            evaluated = [(r["time"], r["eval/accuracy"]) for r in rows if "eval/accuracy" in r]
            reached = next((t for t, a in evaluated if a >= bar), None)
            yield {
                "recipe": f"recipes/{name}.yaml", "accuracy": evaluated[-1][1], "best": max(a for _, a in evaluated), "bar": bar, "seconds_to_bar": reached,
                "seconds_of_training": rows[-1]["time"], "seconds_of_the_command": round(wall, 1), "steps": rows[-1]["step"],
                "plan": json.loads((Path(folder) / "run" / "run.json").read_text())["plan"]["measured"],
            }  # fmt: skip


def merged(seen: list[Row]) -> list[Row]:
    """One row a contestant: the median of its rounds."""
    found: dict[tuple[str, str, int], list[Row]] = {}
    for row in seen:
        found.setdefault((row.work, row.name, row.batch), []).append(row)
    merged = []
    for rounds in found.values():
        speeds = [r.images_per_second for r in rounds]
        spread = max([r.spread for r in rounds] + [max(speeds) / min(speeds) - 1])
        merged.append(replace(rounds[-1], images_per_second=round(statistics.median(speeds), 1), spread=round(spread, 3)))
    return merged


def environment(device: torch.device, words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": torch.cuda.get_device_name() if device.type == "cuda" else f"{cpu_cores()} CPU cores ({platform.machine()})",
        "cpu_cores": cpu_cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "drivetrain": __version__,
        "command": "python benchmarks/vision.py" + "".join(f" {w}" for w in words),
    }
    for name in ("lightning", "accelerate", "torchvision"):
        with contextlib.suppress(Exception):
            found[name] = __import__(name).__version__
    return found


def show(rows: list[Row]) -> None:
    print(f"\n{'batch':>6}  {'images/s':>10}  {'spread':>6}  {'ratio':>6}")
    for work in ("augmented", "not augmented"):
        for batch in sorted({r.batch for r in rows if r.work == work}):
            group = [r for r in rows if (r.work, r.batch) == (work, batch)]
            best = next((r.images_per_second for r in group if r.name == "drivetrain"), None)
            for r in group:
                ratio = f"{best / r.images_per_second:.1f}x" if best else ""
                print(f"{batch:>6}  {r.images_per_second:>10,.0f}  {100 * r.spread:>5.1f}%  {ratio:>6}  {work}: {r.name}")
    for r in rows:
        if "host_syncs_per_step" in r.facts:
            traced = {k: v for k, v in r.facts.items() if k != "plan"}
            print(f"{r.name.strip()} (batch {r.batch}): {traced}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="on the CPU, whatever this machine has")
    parser.add_argument("--quick", action="store_true", help="short windows: to see that it runs")
    parser.add_argument("--accuracy", action="store_true", help="guide 001's recipe on MNIST and Fashion-MNIST instead")
    parser.add_argument("--rounds", type=int, default=1, help="go over all contestants so often: on a machine with neighbours")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = torch.device("cuda" if torch.cuda.is_available() and not args.cpu else "cpu")
    kept = [w for w in sys.argv[1:] if w not in ("--json", args.json, "--data-dir", args.data_dir)]
    facts = environment(device, kept)
    if args.accuracy:
        facts["rows"] = list(accuracy_rows(args.data_dir, device.type))
        for r in facts["rows"]:
            to_bar = "never" if r["seconds_to_bar"] is None else f"after {r['seconds_to_bar']:.1f} s"
            print(
                f"{r['recipe']:<28} {100 * r['accuracy']:.2f} % at the end, {100 * r['best']:.2f} % at best; {100 * r['bar']:.1f} % {to_bar};"
                f" {r['seconds_of_training']:.1f} s of training, {r['seconds_of_the_command']:.1f} s for the command"
            )
    else:
        seen: list[Row] = []
        for _ in range(args.rounds):
            for row in speed_rows(device, args.quick):
                seen.append(row)
                print(f"{row.work}: {row.name}, batch {row.batch}: {row.images_per_second:,.0f} images/s", flush=True)
                facts["rows"] = [asdict(r) for r in merged(seen)]
                write(facts, args.json)
        show(merged(seen))
    write(facts, args.json)


def write(facts: dict[str, Any], path: str | None) -> None:
    if path:
        Path(path).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
