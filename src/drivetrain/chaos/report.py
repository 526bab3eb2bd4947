"""What came out of a training that was broken on purpose, beside one that was left alone."""

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

APART = 0.5  # how far losses may differ where sums were added up in another order, and dropout fell otherwise


def injected(run: Run) -> list[str]:
    """The faults that struck so far."""
    return [event["fault"] for event in run.events() if event["event"] == "injected"]


def judge(whole: Run, broken: Run, schedule: list[str]) -> dict[str, Any]:
    lost, repeated = compare_samples(whole, broken)
    struck = injected(broken)
    return {
        "faults": len(schedule),
        "struck": len(struck),
        "missed": sorted((Counter(schedule) - Counter(struck)).elements()),
        "replanned": any(event["event"] == "replanned" for event in broken.events()),
        "resized": any(event["event"] == "resumed" and event["world_size"] != event["was"] for event in broken.events()),
        "weights_equal": _weights(whole) == _weights(broken),
        "rows_equal": _rows(whole) == _rows(broken),
        "losses_apart": _apart(whole, broken),
        "samples_lost": lost,
        "samples_repeated": repeated,
        "processes_left": _left(broken.path),
        "files_left": sorted(str(p.relative_to(broken.path)) for p in [*broken.path.glob(".*"), *broken.checkpoints.glob(".*")])
        + sorted(p.name for p in (broken.path.parent / "tmp").glob("drivetrain-*")),
        "seconds": _seconds(broken),
    }


def _weights(run: Run) -> bytes:
    return run.model_path.read_bytes()


def _rows(run: Run) -> list[dict[str, Any]]:
    """Every logged figure that is no measure of time or memory."""
    clock = ("time", "memory_bytes")
    return [{k: v for k, v in row.items() if k not in clock and not k.endswith("_per_second")} for row in read_lines(run.metrics_path)]


def _apart(whole: Run, broken: Run) -> float:
    """The largest difference between two losses of the same step, as a share of the loss."""
    theirs = {row["step"]: row["train/loss"] for row in _rows(whole) if "train/loss" in row}
    mine = {row["step"]: row["train/loss"] for row in _rows(broken) if "train/loss" in row}
    return max((abs(mine[step] - loss) / max(1e-12, abs(loss)) for step, loss in theirs.items() if step in mine), default=0.0)


def compare_samples(whole: Run, broken: Run) -> tuple[int, int]:
    """(samples that the broken run did not train on though the whole one did, and those it took too often)"""
    lost = repeated = 0
    mine, theirs = _taken(broken), _taken(whole)
    for step in theirs.keys() | mine.keys():
        lost += (theirs[step] - mine[step]).total()
        repeated += (mine[step] - theirs[step]).total()
    return lost, repeated


def _taken(run: Run) -> dict[int, Counter[int]]:
    """By step, the samples that all ranks took when it was taken for the last time."""
    ranks: list[dict[int, tuple[int, list[int]]]] = []
    while (file := run.path / "logs" / f"samples-{len(ranks)}.jsonl").exists():
        last = {}
        for line in file.read_text().splitlines():
            try:
                step, world, samples = json.loads(line)
            except ValueError:
                continue  # half a line: the process was killed while it wrote; the step was taken again
            last[step] = world, samples
        ranks.append(last)
    steps: dict[int, Counter[int]] = defaultdict(Counter)
    for step, (world, _) in ranks[0].items() if ranks else ():
        for rank in ranks[:world]:
            steps[step].update(rank.get(step, (0, []))[1])
    return steps


def _left(folder: Path, patience: float = 3.0) -> list[str]:
    """Processes that still have files of a run open."""
    import psutil

    deadline = time.monotonic() + patience
    while True:
        found = []
        for process in psutil.process_iter(["name"]):
            try:
                if any(f.path.startswith(f"{folder}{os.sep}") for f in process.open_files()):
                    found.append(f"{process.pid} {process.info['name']}")
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def _seconds(run: Run) -> dict[str, list[float]]:
    """By kind of fault: seconds from the fault to the first step after the fresh start it led to."""
    costs: dict[str, list[float]] = defaultdict(list)
    open_faults: list[tuple[str, float]] = []
    fresh = False
    for event in run.events():
        if event["event"] == "injected":
            open_faults.append((event["fault"].partition("@")[0], event["time"]))
        elif event["event"] in ("restarted", "started"):
            fresh = True
        elif event["event"] == "stepped" and fresh:
            for kind, when in open_faults:
                if kind not in ("slow", "oom", "full"):  # those start nothing anew
                    costs[kind].append(event["time"] - when)
            open_faults, fresh = [], False
    return dict(costs)


def show(report: dict[str, Any], screen: Screen) -> int:
    same = {
        "weights": (report["weights_equal"], "equal, bit for bit", "differ"),
        "figures": (report["rows_equal"], "every logged loss and metric is the same", "differ"),
    }
    why = "the plan changed (oom)" if report["replanned"] else "the number of processes changed"
    apart = f"losses differ by {100 * report['losses_apart']:.2g} % at most"
    alike = {"figures": (report["losses_apart"] <= APART, f"{why}, so sums are added up in another order; {apart}", f"{why}, and {apart}")}
    checks = (alike if report["replanned"] or report["resized"] else same) | {
        "samples": (not report["samples_lost"] + report["samples_repeated"], "none lost, none repeated",
                    f"{report['samples_lost']} lost, {report['samples_repeated']} repeated"),
        "left": (not report["processes_left"] and not report["files_left"], "no process, no stray file",
                 ", ".join([*report["processes_left"], *report["files_left"]])),
    }  # fmt: skip
    for name, (fine, yes, no) in checks.items():
        screen.line(name, yes if fine else f"NOT SO: {no}")
    for kind, seconds in sorted(report["seconds"].items()):
        middle, worst = statistics.median(seconds), max(seconds)
        screen.line("lost", f"{kind:<8} {len(seconds):>3} x, {middle:.1f} s each to the next step (worst {worst:.1f} s)")
    for fault in report["missed"]:
        screen.line("missed", f"{fault} did not strike (it came after the last save, or cannot be had in a step that is replayed)")
    passed = bool(report["struck"]) and all(fine for fine, _, _ in checks.values())
    screen.line("chaos", f"{report['struck']} of {report['faults']} faults struck: {'passed' if passed else 'FAILED'}")
    return 0 if passed else 1
