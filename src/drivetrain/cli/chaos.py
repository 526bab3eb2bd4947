"""`chaos`: break a training on purpose, many times, and compare what comes out with one that was left alone."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.chaos import ACTIONS, PACE, SAMPLES, VARIABLE, outages, read
from drivetrain.cli.flags import Parser, add_common, add_placement, folder_flag, seconds, whole_number
from drivetrain.outcomes import EXIT_CODES, Outcome, Problem
from drivetrain.runs import die_with_parent

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
  torn     the newest checkpoint is cut short         full     the disk is full during a save

With --hosts N the training goes over N hosts that are made on this machine (network namespaces: Linux, root or the
right to make them), each with its own command; all but the first are lost in turn, and come back:

  host     all its processes are killed (-9)          agent    only its command is killed
  cut      its cable is cut, and mended"""
STEPS, FAULTS = 120, 20
MOST_HOSTS = 8
LOST = 3  # hosts that are lost, where nothing else is said
PACED = 0.15  # seconds before every step, so that a run on hosts is not over before they are back
SAVES = 12  # checkpoints in the whole run
AGAIN = ("agent", "preempt", "nan", "full")  # faults after which the command is repeated, as a launcher would
USUAL = [kind for kind in ACTIONS if kind != "oom"]  # which changes the plan, and with it the order of sums and dropout's masks


def run(verb: str, words: list[str]) -> int:
    parser = Parser("drivetrain chaos", TEXT)
    parser.add_argument("target", metavar="TASK", help="as for train")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    parser.add_argument("--faults", type=whole_number(0), metavar="N", help=f"how many (default {FAULTS}; {LOST} with --hosts)")
    parser.add_argument("--kinds", metavar="A,B", help="only of these kinds (default: all but oom)")
    parser.add_argument(
        "--hosts", type=whole_number(2, MOST_HOSTS), metavar="N", help="over so many hosts, made on this machine; --procs processes on each"
    )
    parser.add_argument("--schedule", metavar="FAULTS", help="just these, such as die@step:7:rank=1,hang@step:20 (see DRIVETRAIN_FAULTS)")
    parser.add_argument("--steps", type=whole_number(3), default=STEPS, metavar="K", help=f"optimizer steps to train (default {STEPS})")
    parser.add_argument("--seed", type=whole_number(0), default=0, help="of the faults (default 0)")
    parser.add_argument("--hang-after", type=seconds, default=2.0, metavar="TIME", help="as for train (default 2s)")
    parser.add_argument("--keep", type=folder_flag("--keep"), metavar="DIR", help="keep both runs, and report.json, in this folder")
    add_placement(parser)
    add_common(parser)
    args = parser.parse(words)

    from drivetrain.chaos.report import judge, show
    from drivetrain.watch.screen import Screen

    screen = Screen(quiet=args.quiet)
    procs = args.procs or 1
    save_every = max(1, args.steps // SAVES)
    schedule = _schedule(args, procs, save_every)
    settings = [*args.settings, f"steps={args.steps}", "log_every=1", f"save_every={save_every}", f"eval_every={4 * save_every}"]
    placement = [*(["--device", args.device] if args.device else []), *(["--gpus", args.gpus] if args.gpus else [])]
    folder = Path(args.keep).resolve() if args.keep else Path(tempfile.mkdtemp(prefix="drivetrain-chaos-"))
    try:
        command = ["train", args.target, *settings, *placement, "-q", "--hang-after", f"{args.hang_after:f}s", "--restarts", "5"]
        every = procs * (args.hosts or 1)
        screen.line("chaos", f"{args.steps} steps on {every} process{'' if every == 1 else 'es'}, left alone")
        whole = _train([*command, "--procs", str(every)], folder / "whole", [], screen)
        where, plural = f" on {args.hosts} hosts" if args.hosts else "", "" if len(schedule) == 1 else "s"
        screen.line("chaos", f"the same{where} with {len(schedule)} fault{plural} (seed {args.seed})")
        command += ["--procs", str(procs)]
        if args.hosts:
            broken = _train_on_hosts(command, folder / "broken", schedule, screen, args.hosts, procs)
        else:
            broken = _train(command, folder / "broken", schedule, screen)
        report = judge(whole, broken, schedule) | {"seed": args.seed, "processes": procs, "steps": args.steps}
        if args.keep:
            (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        return show(report, screen)
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


def _schedule(args: argparse.Namespace, procs: int, first: int) -> list[str]:
    """What is to happen, as asked for or drawn."""
    given = args.schedule.split(",") if args.schedule else []
    known, usual = (outages.KINDS, list(outages.KINDS)) if args.hosts else (tuple(ACTIONS), USUAL)
    kinds = args.kinds.split(",") if args.kinds else usual
    for kind in kinds:
        if kind not in known:
            raise Problem(f"--kinds {kind}: there are {', '.join(known)}{'' if args.hosts else ' (and others with --hosts)'}")
    if args.hosts:
        lost = LOST if args.faults is None else args.faults
        found = [outages.read(text, args.hosts) for text in given]
        return [str(o) for o in found or outages.draw(args.seed, lost, first + 1, args.steps, args.hosts, kinds)]
    for fault in given:
        read(fault, 0)
    return given or draw(args.seed, FAULTS if args.faults is None else args.faults, args.steps, procs, kinds)


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


def _environment(folder: Path, **extra: str) -> dict[str, str]:
    """This process's, with samples noted and what is temporary where it can be looked for."""
    (folder.parent / "tmp").mkdir(parents=True, exist_ok=True)
    mine = {k: v for k, v in os.environ.items() if k not in (VARIABLE, PACE)}
    return mine | {SAMPLES: "1", "TMPDIR": str(folder.parent / "tmp")} | extra


def _train_on_hosts(command: list[str], folder: Path, faults: list[str], screen: Screen, count: int, procs: int) -> Run:
    """Train on hosts of which all but one come and go."""
    from drivetrain.chaos.hosts import hosts
    from drivetrain.runs import Run

    run = Run(folder)
    environment = _environment(folder, **{PACE: str(PACED)})
    with hosts(count) as made:
        training = outages.Outages(made, procs, [*command, "--run-dir", str(folder)], run, environment, lambda text: screen.line("", text))
        training.train([outages.read(fault, count) for fault in faults])
    return run


def _train(command: list[str], folder: Path, faults: list[str], screen: Screen) -> Run:
    """Train as users do, and repeat the command as launchers do, until the run is finished."""
    from drivetrain.chaos.report import injected
    from drivetrain.runs import Run

    run = Run(folder)
    environment = _environment(folder, **({VARIABLE: ",".join(faults)} if faults else {}))
    words = [*command, "--run-dir", str(folder)]
    for _ in range(1 + sum(fault.startswith(AGAIN) for fault in faults)):
        begun = len(injected(run))
        done = subprocess.run(
            [sys.executable, "-P", "-m", "drivetrain", *words], env=environment, capture_output=True, text=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )  # fmt: skip
        if done.returncode == 0:
            return run
        struck = injected(run)[begun:]
        expected = [-9, Outcome.PREEMPTED.code, Outcome.NAN.code]
        if any(fault.startswith(("preempt", "full")) for fault in struck):  # it ended early, or without room for its last save
            expected += [code for outcome, code in EXIT_CODES.items() if outcome.retryable]
        if done.returncode not in expected or not struck:
            word = next((o for o, code in EXIT_CODES.items() if code == done.returncode), Outcome.INFRA)
            raise Problem(f"the training ended with {done.returncode} after {struck or 'no fault'}:\n{done.stderr.strip()}", word)
        screen.line("", f"{len(injected(run))} of {len(faults)} faults so far; the command ended after {struck[-1]}, and is repeated")
    raise Problem("the training did not come to its end", Outcome.INFRA)
