"""Compares a training with injected faults with an undisturbed one."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.runs import Run, read_lines

if TYPE_CHECKING:
    from drivetrain.watch.screen import Screen

MAX_LOSS_DIFFERENCE = 0.5  # relative; allowed if the plan changed, so that the order of sums and the dropout masks differ
CLOCK_KEYS = ("time", "memory_bytes")  # these always differ between runs
FAULTS_WITHOUT_RESTART = ("slow", "oom", "full")


def injected(run: Run) -> list[str]:
    """Returns the faults that were injected so far."""
    return [event["fault"] for event in run.events() if event["event"] == "injected"]


def compare(undisturbed: Run, broken: Run, schedule: list[str]) -> dict[str, Any]:
    """Returns the contents of report.json."""
    num_lost, num_repeated = compare_samples(undisturbed, broken)
    struck = injected(broken)
    return {
        "faults": len(schedule),
        "struck": len(struck),
        "missed": sorted((Counter(schedule) - Counter(struck)).elements()),
        "replanned": any(event["event"] == "replanned" for event in broken.events()),
        "resized": any(event["event"] == "resumed" and event["world_size"] != event["was"] for event in broken.events()),
        "weights_equal": _weights(undisturbed) == _weights(broken),
        "rows_equal": _rows(undisturbed) == _rows(broken),
        "losses_apart": _max_loss_difference(undisturbed, broken),
        "samples_lost": num_lost,
        "samples_repeated": num_repeated,
        "processes_left": _processes_with_open_files(broken.path),
        "files_left": sorted(str(p.relative_to(broken.path)) for p in [*broken.path.glob(".*"), *broken.checkpoints.glob(".*")])
        + sorted(p.name for p in (broken.path.parent / "tmp").glob("drivetrain-*")),
        "seconds": _recovery_seconds(broken),
    }


def _weights(run: Run) -> bytes:
    return run.model_path.read_bytes()


def _rows(run: Run) -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl without times, speeds and memory."""
    return [{k: v for k, v in row.items() if k not in CLOCK_KEYS and not k.endswith("_per_second")} for row in read_lines(run.metrics_path)]


def _max_loss_difference(undisturbed: Run, broken: Run) -> float:
    """Returns the largest relative difference between two losses of the same step."""
    expected, actual = (
        {row["step"]: row["train/loss"] for row in _rows(run) if "train/loss" in row} for run in (undisturbed, broken)
    )  # fmt: skip
    return max((abs(actual[step] - loss) / max(1e-12, abs(loss)) for step, loss in expected.items() if step in actual), default=0.0)


def compare_samples(undisturbed: Run, broken: Run) -> tuple[int, int]:
    """Returns how many samples the broken run lost, and how many it repeated, over all steps."""
    num_lost = num_repeated = 0
    actual, expected = _samples_by_step(broken), _samples_by_step(undisturbed)
    for step in expected.keys() | actual.keys():
        num_lost += (expected[step] - actual[step]).total()
        num_repeated += (actual[step] - expected[step]).total()
    return num_lost, num_repeated


def _samples_by_step(run: Run) -> dict[int, Counter[int]]:
    """Returns step -> samples of all ranks; if a step was repeated, those of the last time."""
    ranks: list[dict[int, tuple[int, list[int]]]] = []
    while (file := run.path / "logs" / f"samples-{len(ranks)}.jsonl").exists():
        last = {}
        for line in file.read_text().splitlines():
            try:
                step, world_size, samples = json.loads(line)
            except ValueError:
                continue  # an incomplete line: the process was killed while it wrote, and the step was repeated
            last[step] = world_size, samples
        ranks.append(last)
    samples_by_step: dict[int, Counter[int]] = defaultdict(Counter)
    for step, (world_size, _) in ranks[0].items() if ranks else ():
        for rank in ranks[:world_size]:
            samples_by_step[step].update(rank.get(step, (0, []))[1])
    return samples_by_step


def _processes_with_open_files(folder: Path, patience_seconds: float = 3.0) -> list[str]:
    """Returns the processes that still have files of a folder open after a short wait."""
    import psutil

    deadline = time.monotonic() + patience_seconds
    while True:
        processes = []
        for process in psutil.process_iter(["name"]):
            try:
                if any(f.path.startswith(f"{folder}{os.sep}") for f in process.open_files()):
                    processes.append(f"{process.pid} {process.info['name']}")
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        if not processes or time.monotonic() > deadline:
            return processes
        time.sleep(0.1)


def _recovery_seconds(run: Run) -> dict[str, list[float]]:
    """Returns for each kind of fault the times from a fault to the first step after the restart it caused."""
    seconds: dict[str, list[float]] = defaultdict(list)
    open_faults: list[tuple[str, float]] = []
    has_restarted = False
    for event in run.events():
        if event["event"] == "injected":
            open_faults.append((event["fault"].partition("@")[0], event["time"]))
        elif event["event"] in ("restarted", "started"):
            has_restarted = True
        elif event["event"] == "stepped" and has_restarted:
            for kind, fault_time in open_faults:
                if kind not in FAULTS_WITHOUT_RESTART:
                    seconds[kind].append(event["time"] - fault_time)
            open_faults, has_restarted = [], False
    return dict(seconds)


def show(report: dict[str, Any], screen: Screen) -> bool:
    """Prints a report; returns whether the experiment passed."""
    checks = _checks(report)
    for name, (passed, yes, no) in checks.items():
        screen.line(name, yes if passed else f"NOT SO: {no}")
    for kind, seconds in sorted(report["seconds"].items()):
        screen.line(
            "lost", f"{kind:<8} {len(seconds):>3} x, {statistics.median(seconds):.1f} s each to the next step (worst {max(seconds):.1f} s)"
        )
    for fault in report["missed"]:
        screen.line("missed", f"{fault} did not strike (it was due after the last save, or at a point that a CUDA graph skips)")
    has_passed = bool(report["struck"]) and all(passed for passed, _, _ in checks.values())
    screen.line("chaos", f"{report['struck']} of {report['faults']} faults struck: {'passed' if has_passed else 'FAILED'}")
    return has_passed


def _checks(report: dict[str, Any]) -> dict[str, tuple[bool, str, str]]:
    """Returns for each check whether it passed, and the text for both cases."""
    leftovers = [*report["processes_left"], *report["files_left"]]
    lost, repeated = report["samples_lost"], report["samples_repeated"]
    common = {
        "samples": (not lost + repeated, "none lost, none repeated", f"{lost} lost, {repeated} repeated"),
        "left": (not leftovers, "no process, no stray file", ", ".join(leftovers)),
    }
    if not report["replanned"] and not report["resized"]:
        return {
            "weights": (report["weights_equal"], "equal, bit for bit", "differ"),
            "figures": (report["rows_equal"], "every logged loss and metric is the same", "differ"),
        } | common
    reason = "the plan changed (oom)" if report["replanned"] else "the number of processes changed"
    difference = f"losses differ by {100 * report['losses_apart']:.2g} % at most"
    is_close = report["losses_apart"] <= MAX_LOSS_DIFFERENCE
    return {"figures": (is_close, f"{reason}, so sums are added up in another order; {difference}", f"{reason}, and {difference}")} | common
