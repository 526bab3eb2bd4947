"""`chaos`: break a training on purpose, many times, and compare what comes out with one that was left alone."""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.chaos import ACTIONS, SAMPLES, VARIABLE
from drivetrain.cli.flags import Parser, add_common, add_placement
from drivetrain.outcomes import EXIT_CODES, Outcome, Problem

if TYPE_CHECKING:
    from drivetrain.runs import Run
    from drivetrain.watch.screen import Screen

TEXT = """\
Train a task twice for K steps: once left alone, once with faults at random steps and on random processes (or those of
--schedule). Then say whether anything came out otherwise: the weights, every logged figure, the samples that each step
took, processes or files that were left behind; and how much time each kind of fault cost.

  die      a process is killed (-9)                   agent    the command itself is killed (-9), and repeated
  hang     a process sleeps for ever                  stop     a process is stopped (state T)
  slow     a process takes a second longer            preempt  the command gets SIGTERM, and is repeated
  oom      memory runs out (only if asked for)        nan      a loss is not a number: the run ends, and is resumed
  torn     the newest checkpoint is cut short         full     the disk is full during a save"""
STEPS, FAULTS = 120, 20
SAVES = 12  # checkpoints in the whole run
AGAIN = ("agent", "preempt", "nan")  # faults after which the command is repeated, as a launcher would
USUAL = [kind for kind in ACTIONS if kind != "oom"]  # which changes the plan, and with it the order of sums and dropout's masks


def run(verb: str, words: list[str]) -> int:
    parser = Parser("drivetrain chaos", TEXT)
    parser.add_argument("target", metavar="TASK", help="as for train")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    parser.add_argument("--faults", type=int, default=FAULTS, metavar="N", help=f"how many (default {FAULTS})")
    parser.add_argument("--kinds", metavar="A,B", help="only of these kinds (default: all but oom)")
    parser.add_argument("--schedule", metavar="FAULTS", help="just these, such as die@step:7:rank=1,hang@step:20 (see DRIVETRAIN_FAULTS)")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="K", help=f"optimizer steps to train (default {STEPS})")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default 0)")
    parser.add_argument("--hang-after", default="2s", metavar="TIME", help="as for train (default 2s)")
    parser.add_argument("--keep", metavar="DIR", help="keep both runs, and report.json, in this folder")
    add_placement(parser)
    add_common(parser)
    args = parser.parse(words)

    from drivetrain.watch.screen import Screen

    screen = Screen(quiet=args.quiet)
    procs = args.procs or 1
    schedule = args.schedule.split(",") if args.schedule else draw(args.seed, args.faults, args.steps, procs, _kinds(args.kinds))
    save_every = max(1, args.steps // SAVES)
    settings = [*args.settings, f"steps={args.steps}", "log_every=1", f"save_every={save_every}", f"eval_every={4 * save_every}"]
    placement = ["--procs", str(procs), *(["--device", args.device] if args.device else []), *(["--gpus", args.gpus] if args.gpus else [])]
    folder = Path(args.keep).resolve() if args.keep else Path(tempfile.mkdtemp(prefix="drivetrain-chaos-"))
    try:
        command = ["train", args.target, *settings, *placement, "-q"]
        screen.line("chaos", f"{args.steps} steps on {procs} process{'' if procs == 1 else 'es'}, left alone")
        whole = _train(command, folder / "whole", [], args.hang_after, screen)
        screen.line("chaos", f"the same with {len(schedule)} faults (seed {args.seed})")
        broken = _train(command, folder / "broken", schedule, args.hang_after, screen)
        report = judge(whole, broken, schedule) | {"seed": args.seed, "processes": procs, "steps": args.steps}
        if args.keep:
            (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        return show(report, screen)
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


def _kinds(text: str | None) -> list[str]:
    kinds = text.split(",") if text else USUAL
    for kind in kinds:
        if kind not in ACTIONS:
            raise Problem(f"--kinds {kind}: there are {', '.join(ACTIONS)}")
    return kinds


def draw(seed: int, count: int, steps: int, procs: int, kinds: list[str]) -> list[str]:
    """Faults of all kinds in turn, at random steps and on random ranks; each at a step of its own."""
    rng = random.Random(seed)
    if count > steps - 2:
        raise Problem(f"--faults {count}: at most one a step, so {steps - 2} in {steps} steps; raise --steps")
    at = sorted(rng.sample(range(2, steps), count))
    dealt = [kinds[i % len(kinds)] for i in range(count)]
    rng.shuffle(dealt)
    faults = []
    for kind, step in zip(dealt, at, strict=True):
        place = "save" if kind == "full" else "step"
        rank = 0 if kind in ("full", "torn") else rng.randrange(procs)
        faults.append(f"{kind}@{place}:{step}:rank={rank}")
    return faults


def _train(command: list[str], folder: Path, faults: list[str], hang_after: str, screen: Screen) -> Run:
    """Train as users do, and repeat the command as launchers do, until the run is finished."""
    from drivetrain.runs import Run

    run = Run(folder)
    environment = {k: v for k, v in os.environ.items() if k != VARIABLE} | {SAMPLES: "1", "TMPDIR": str(folder.parent / "tmp")}
    (folder.parent / "tmp").mkdir(parents=True, exist_ok=True)
    if faults:
        environment[VARIABLE] = ",".join(faults)
    words = [*command, "--run-dir", str(folder), "--hang-after", hang_after, "--restarts", "5"]
    for _ in range(1 + sum(fault.startswith(AGAIN) for fault in faults)):
        begun = len(_injected(run))
        done = subprocess.run([sys.executable, "-P", "-m", "drivetrain", *words], env=environment, capture_output=True, text=True)
        if done.returncode == 0:
            return run
        struck = _injected(run)[begun:]
        expected = [-9, Outcome.PREEMPTED.code, Outcome.NAN.code]
        if any(fault.startswith("preempt") for fault in struck):  # while something else was wrong too: its word, and it is repeated
            expected += [code for outcome, code in EXIT_CODES.items() if outcome.retryable]
        if done.returncode not in expected or not struck:
            word = next((o for o, code in EXIT_CODES.items() if code == done.returncode), Outcome.INFRA)
            raise Problem(f"the training ended with {done.returncode} after {struck or 'no fault'}:\n{done.stderr.strip()}", word)
        screen.line("", f"{len(_injected(run))} of {len(faults)} faults so far; the command ended after {struck[-1]}, and is repeated")
    raise Problem("the training did not come to its end", Outcome.INFRA)


def _injected(run: Run) -> list[str]:
    return [event["fault"] for event in run.events() if event["event"] == "injected"]


# --- what came out -----------------------------------------------------------------------------


def judge(whole: Run, broken: Run, schedule: list[str]) -> dict[str, Any]:
    lost, repeated = compare_samples(whole, broken)
    struck = _injected(broken)
    return {
        "faults": len(schedule),
        "struck": len(struck),
        "missed": sorted((Counter(schedule) - Counter(struck)).elements()),
        "replanned": any(event["event"] == "replanned" for event in broken.events()),
        "weights_equal": _weights(whole) == _weights(broken),
        "rows_equal": _rows(whole) == _rows(broken),
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
    from drivetrain.runs import read_lines

    clock = ("time", "samples_per_second", "memory_bytes")
    return [{k: v for k, v in row.items() if k not in clock} for row in read_lines(run.metrics_path)]


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
    checks = {
        "weights": (report["weights_equal"], "equal, bit for bit", "differ"),
        "figures": (report["rows_equal"], "every logged loss and metric is the same", "differ"),
        "samples": (not report["samples_lost"] + report["samples_repeated"], "none lost, none repeated",
                    f"{report['samples_lost']} lost, {report['samples_repeated']} repeated"),
        "left": (not report["processes_left"] and not report["files_left"], "no process, no stray file",
                 ", ".join([*report["processes_left"], *report["files_left"]])),
    }  # fmt: skip
    for name, (fine, yes, no) in checks.items():
        screen.line(name, yes if fine else f"NOT SO: {no}")
    for kind, seconds in sorted(report["seconds"].items()):
        middle, worst = statistics.median(seconds), max(seconds)
        screen.line("lost", f"{kind:<8} {len(seconds):>3} times, {middle:.1f} s each to the next step (worst {worst:.1f} s)")
    for fault in report["missed"]:
        screen.line("missed", f"{fault} did not strike (it came after the last save, or cannot be had in a step that is replayed)")
    if report["replanned"]:
        screen.line("", "the plan changed on the way (oom): weights and figures are not expected to be equal to the bit")
    passed = bool(report["struck"]) and all(
        fine for name, (fine, _, _) in checks.items() if not (report["replanned"] and name in ("weights", "figures"))
    )
    screen.line("chaos", f"{report['struck']} of {report['faults']} faults struck: {'passed' if passed else 'FAILED'}")
    return 0 if passed else 1
