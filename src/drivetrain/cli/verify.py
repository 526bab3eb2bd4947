"""`verify-resume`: prove on the user's own task that a killed and resumed run equals an unbroken one."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.chaos import VARIABLE
from drivetrain.cli.flags import Parser, add_common, add_placement, whole_number
from drivetrain.outcomes import Outcome, Problem

if TYPE_CHECKING:
    from drivetrain.recipe import Recipe
    from drivetrain.watch.screen import Screen

TEXT = """\
Train K steps twice without a break and once with a kill -9 in the middle and a resume, as the plan has it, and
compare: every loss, every gradient norm and all final weights, bit for bit. Where they differ, it trains again
with a close look at every step, and says whether training itself does not repeat or the resume is to blame,
at which step, and in which operation it began."""
STEPS, GPU_STEPS = 12, 60  # on a GPU both sides of the kill shall be captured


def run(verb: str, words: list[str]) -> int:
    parser = Parser("drivetrain verify-resume", TEXT)
    parser.add_argument("target", metavar="TASK", help="as for train")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    parser.add_argument(
        "--steps",
        type=whole_number(2),
        metavar="K",
        help=f"steps to train (default {STEPS}, on a GPU {GPU_STEPS}; at least 2: a checkpoint and the kill come after half)",
    )
    add_placement(parser)
    add_common(parser)
    args = parser.parse(words)

    from drivetrain.launch import start as launch
    from drivetrain.recipe import load
    from drivetrain.watch.screen import Screen

    recipe = load(args.target, args.settings)[0]
    machine = launch.look_at_machine(launch.Request(procs=args.procs, gpus=args.gpus, device=args.device))
    args.steps = args.steps or (GPU_STEPS if machine.device == "cuda" else STEPS)
    few = {"steps": args.steps, "log_every": 1, "save_every": args.steps // 2} | _where_allowed(recipe, best=None, patience=0, keep=1000)
    recipe = replace(recipe, settings=recipe.settings | few, name=None)
    screen = Screen(quiet=args.quiet)
    folder = Path(tempfile.mkdtemp(prefix="drivetrain-verify-"))
    try:
        runs = {}
        for name, text in (
            ("first", f"training {args.steps} steps"),
            ("second", "the same again"),
            ("broken", "again, killed and resumed"),
        ):
            screen.line("verify", text)
            runs[name] = _train(recipe, args, folder / name, kill=name == "broken")
        return _judge(runs, screen, recipe, args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _where_allowed(recipe: Recipe, **values: Any) -> dict[str, Any]:
    """Returns those values that the task's own types allow: `best: str` is never None. All runs here keep its value alike."""
    from drivetrain.describe import task_settings

    known = task_settings(recipe.task)
    allowed = {}
    for name, value in values.items():
        with contextlib.suppress(Problem):
            allowed[name] = known[name].coerce(value)
    return allowed


def _train(recipe: Recipe, args: argparse.Namespace, folder: Path, kill: bool, look: str = "") -> Path:
    """Train in child processes, as the command does; with `kill`, end them all once a checkpoint is out, and resume.
    With a `look` every step leaves its fingerprint."""
    from drivetrain.launch import ending, opening
    from drivetrain.launch import start as launch
    from drivetrain.runs import Run
    from drivetrain.supervise import local_place, run_workers
    from drivetrain.watch.screen import Screen

    request = launch.Request(procs=args.procs, gpus=args.gpus, device=args.device, run_dir=str(folder / "run"))
    machine = launch.look_at_machine(request)
    opened = opening.open_run(recipe, request)
    plan = launch.make_plan(recipe, machine, local_place(machine.procs), 1, None, request)
    if look:
        plan = replace(plan, capture="off", compile="off")  # nothing can be looked at inside of a graph
    launch.record(recipe, opened, plan, machine)
    job = launch.make_job(recipe, opened.run, plan, "verify") | {
        "fingerprint": str(folder / "fingerprint.jsonl") if look else "",
        "look": look,
    }
    if kill:
        file = folder / "killed.json"
        file.write_text(json.dumps([job, plan.to_json(), machine.procs, machine.gpus]))
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(file)], env=os.environ | {VARIABLE: "kill@published:1"}, capture_output=True, text=True
        )
        if done.returncode >= 0:
            raise Problem(f"the kill did not come: {done.stderr.strip() or done.stdout.strip()}", Outcome.INFRA)
        if look:
            (folder / "fingerprint.jsonl").rename(folder / "before.jsonl")
    ended = run_workers(job, plan, local_place(machine.procs), Screen(quiet=True), machine.gpus)
    ending.raise_failure(ended, Run(opened.run.path))
    return folder


# A front end of its own, so that the kill of "everything" does not end the one that compares.
KILLED = """
import json, sys
from drivetrain.plan import Plan
from drivetrain.supervise import local_place, run_workers
from drivetrain.watch.screen import Screen

job, plan, procs, gpus = json.load(open(sys.argv[1]))
print(run_workers(job, Plan.from_json(plan), local_place(procs), Screen(quiet=True), gpus).message)
"""


def _judge(folders: dict[str, Path], screen: Screen, recipe: Recipe, args: argparse.Namespace, folder: Path) -> int:
    from drivetrain.runs import Run

    def look_closer(kill: bool) -> str:
        screen.line("verify", "they differ: again, with a close look at every step")
        first = _train(recipe, args, folder / "look-first", False, "close")
        return _first_difference(first, _train(recipe, args, folder / "look-second", kill, "close"))

    for event in Run(folders["first"] / "run").events():
        if event["event"] == "depends-on-plan":
            screen.line("note", event["text"])
    again = _first_difference(folders["first"], folders["second"])
    if again:
        screen.line("no", f"training itself does not repeat: {look_closer(False) or again}")
        for operation in _operations(_train(recipe, args, folder / "look-operations", False, "operations")):
            screen.line("", f"{operation} has no deterministic form on this device")
        screen.line(
            "",
            "two unbroken runs differ already; deterministic=true removes this on a GPU, keyed randomness (rand, torch's generators) elsewhere",
        )
        return Outcome.USER_ERROR.code
    went_on = [e["step"] for e in Run(folders["broken"] / "run").events() if e["event"] == "resumed"]
    if not went_on:
        raise Problem("the killed run did not go on from a checkpoint, so nothing is proven: raise --steps", Outcome.INFRA)
    resumed = _first_difference(folders["first"], folders["broken"])
    if resumed:
        screen.line("no", f"resume is not exact: {look_closer(True) or resumed}")
        screen.line(
            "", "state outside of the model, the optimizer and the data set is not saved: keep it in buffers, or derive it from the step"
        )
        return Outcome.USER_ERROR.code
    screen.line("yes", f"killed and resumed from step {went_on[0]}: every loss, gradient and weight is bit-equal to the unbroken run")
    return 0


def _operations(folder: Path) -> list[str]:
    """The operations that torch itself says to be without a deterministic form."""
    return sorted({row["operation"] for row in _rows(folder / "fingerprint.jsonl") if "operation" in row})


def _first_difference(one: Path, two: Path) -> str:
    """Where two runs part: the step, and the first thing in it that differs."""
    marks = [{row["step"]: row for row in _rows(f / "fingerprint.jsonl") if "step" in row} for f in (one, two)]
    for step in sorted(marks[0].keys() & marks[1].keys()):
        a, b = marks[0][step], marks[1][step]
        if a["batch"] != b["batch"]:
            return f"at step {step} the batch differs (the data set, collate or augment gives other values for the same samples)"
        for name in a["outputs"]:
            if a["outputs"][name] != b["outputs"].get(name):
                return f"at step {step} the output of module {name} differs for the same batch"
        for name in a["gradients"]:
            if a["gradients"][name] != b["gradients"].get(name):
                return f"at step {step} the gradient of {name} differs, though batch and outputs are equal"
    rows = [
        [{k: r[k] for k in r if k.startswith(("train/", "eval/", "grad_norm"))} for r in _rows(f / "run" / "metrics.jsonl")]
        for f in (one, two)
    ]
    for number, (a, b) in enumerate(zip(*rows, strict=False), 1):
        for name in a:
            if a[name] != b.get(name):
                return f"at row {number} {name} is {a[name]} and {b.get(name)}"
    weights = [(f / "run" / "model" / "model.safetensors").read_bytes() for f in (one, two)]
    return "" if weights[0] == weights[1] else "the final weights differ"


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
