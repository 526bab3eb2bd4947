"""`verify-resume`: prove on the user's own task that a killed and resumed run equals an unbroken one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from drivetrain.chaos import VARIABLE
from drivetrain.cli.flags import Parser, add_common, add_placement
from drivetrain.outcomes import Outcome

TEXT = """\
Train K steps twice without a break and once with a kill -9 in the middle and a resume, and compare: every
loss, every gradient norm and all final weights, bit for bit. Where they differ, it says whether training
itself does not repeat or the resume is to blame, and at which step and in what it began."""


def run(verb: str, words: list[str]) -> int:
    parser = Parser("drivetrain verify-resume", TEXT)
    parser.add_argument("target", metavar="TASK", help="as for train")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, default=12, metavar="K", help="steps to train (default 12; the kill comes after half)")
    add_placement(parser)
    add_common(parser)
    args = parser.parse(words)

    from drivetrain.recipe import load
    from drivetrain.watch.screen import Screen

    recipe = load(args.target, args.settings)[0]
    half = max(1, args.steps // 2)
    few = {"steps": args.steps, "log_every": 1, "save_every": max(1, half // 2), "keep": 1000, "best": None}
    recipe = replace(recipe, settings=recipe.settings | few, name=None)
    screen = Screen(quiet=args.quiet)
    folder = Path(tempfile.mkdtemp(prefix="drivetrain-verify-"))
    try:
        runs = {}
        for name, kill in (("first", None), ("second", None), ("broken", half)):
            screen.line(
                "verify",
                {
                    "first": f"training {args.steps} steps",
                    "second": "the same again",
                    "broken": f"again, killed at step {half} and resumed",
                }[name],
            )
            runs[name] = _train(recipe, args, folder / name, kill)
        return _compare(runs, half, screen)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _train(recipe: Any, args: Any, folder: Path, kill: int | None) -> Path:
    """Train in child processes, as the command does; with `kill`, end them all at that step and resume."""
    from drivetrain.cli import launch
    from drivetrain.runs import Run
    from drivetrain.supervise import local_place, run_workers
    from drivetrain.watch.screen import Screen

    request = launch.Request(procs=args.procs, gpus=args.gpus, device=args.device, run_dir=str(folder / "run"))
    machine = launch.look_at_machine(request)
    opened = launch.open_run(recipe, request)
    place = local_place(machine.procs)
    plan = launch.make_plan(recipe, machine, place, 1, None)
    launch.record(recipe, opened, plan, machine)
    job = launch.make_job(recipe, opened.run, plan, "train") | {"fingerprint": str(folder / "fingerprint.jsonl")}
    if opened.lock:
        opened.lock.release()
    if kill is not None:
        file = folder / "killed.json"
        file.write_text(json.dumps([job, plan.to_json(), machine.procs, machine.gpus]))
        program = (
            "import json, sys\nfrom drivetrain.plan import Plan\nfrom drivetrain.supervise import *\nfrom drivetrain.watch.screen import Screen\n"
            "job, plan, procs, gpus = json.load(open(sys.argv[1]))\n"
            "run_workers(job, Plan.from_json(plan), local_place(procs), Screen(quiet=True), gpus)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(file)], env=os.environ | {VARIABLE: f"kill@step:{kill}"}, capture_output=True
        )
        assert done.returncode < 0, "the kill did not come"
        (folder / "fingerprint.jsonl").rename(folder / "before.jsonl")
        place = local_place(machine.procs)
    ended = run_workers(job, plan, place, Screen(quiet=True), machine.gpus)
    launch.raise_failure(ended, Run(opened.run.path))
    return folder


def _compare(folders: dict[str, Path], half: int, screen: Any) -> int:
    again = _first_difference(folders["first"], folders["second"])
    if again:
        screen.line("no", f"training itself does not repeat: {again}")
        screen.line(
            "",
            "two unbroken runs differ already; deterministic=true removes this on a GPU, keyed randomness (rand, torch's generators) elsewhere",
        )
        return Outcome.USER_ERROR.code
    resumed = _first_difference(folders["first"], folders["broken"])
    if resumed:
        screen.line("no", f"resume is not exact: {resumed}")
        screen.line(
            "", "state outside of the model, the optimizer and the data set is not saved: keep it in buffers, or derive it from the step"
        )
        return Outcome.USER_ERROR.code
    screen.line("yes", f"killed at step {half} and resumed: every loss, gradient and weight is bit-equal to the unbroken run")
    return 0


def _first_difference(one: Path, two: Path) -> str:
    """Where two runs part: the step, and the first thing in it that differs."""
    marks = [{row["step"]: row for row in _rows(f / "fingerprint.jsonl")} for f in (one, two)]
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
    return [json.loads(line) for line in path.read_text().splitlines()]
