"""Verifies that a task resumes exactly: compares two unbroken runs and one that is killed and resumed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.engine.faults.injection import FAULTS_VARIABLE
from drivetrain.outcomes import Outcome, Problem
from drivetrain.runs import Run

if TYPE_CHECKING:
    from drivetrain.launch.request import Request
    from drivetrain.recipe import Recipe
    from drivetrain.watch.screen import Screen

STEPS, GPU_STEPS = 12, 60  # on a GPU the steps before and after the kill must both reach CUDA graphs


class Detail(StrEnum):
    """How closely a training is recorded."""

    NONE = ""
    STEPS = "close"
    """The batch, every module's output and every gradient of each step."""
    OPERATIONS = "operations"
    """In addition, the operations without a deterministic form."""


@dataclass(frozen=True)
class Verification:
    """The trainings of one verification, each in a folder of its own."""

    recipe: Recipe
    request: Request
    screen: Screen
    folder: Path

    def verify(self) -> bool:
        """Trains three times, compares, and prints whether the resumed run equals the unbroken ones."""
        steps = self.recipe.settings["steps"]
        self.screen.line("verify", f"training {steps} steps")
        first = self._train("first")
        self.screen.line("verify", "the same again")
        second = self._train("second")
        self.screen.line("verify", "again, killed and resumed")
        broken = self._train("broken", kill=True)
        for event in Run(first / "run").events():
            if event["event"] == "depends-on-plan":
                self.screen.line("note", event["text"])
        if difference := first_difference(first, second):
            self._explain_no_repeat(difference)
            return False
        resumed_steps = [e["step"] for e in Run(broken / "run").events() if e["event"] == "resumed"]
        if not resumed_steps:
            raise Problem("the killed run did not go on from a checkpoint, so nothing is proven: raise --steps", Outcome.INFRA)
        if difference := first_difference(first, broken):
            self.screen.line("no", f"resume is not exact: {self._detailed_difference(kill=True) or difference}")
            self.screen.line(
                "",
                "state outside of the model, the optimizer and the data set is not saved: keep it in buffers, or derive it from the step",
            )
            return False
        self.screen.line(
            "yes", f"killed and resumed from step {resumed_steps[0]}: every loss, gradient and weight is bit-equal to the unbroken run"
        )
        return True

    def _explain_no_repeat(self, difference: str) -> None:
        self.screen.line("no", f"training itself does not repeat: {self._detailed_difference(kill=False) or difference}")
        rows = _read_rows(self._train("look-operations", detail=Detail.OPERATIONS) / "fingerprint.jsonl")
        for operation in sorted({row["operation"] for row in rows if "operation" in row}):
            self.screen.line("", f"{operation} has no deterministic form on this device")
        self.screen.line(
            "",
            "two unbroken runs differ already; deterministic=true removes this on a GPU, keyed randomness (rand, torch's generators) elsewhere",
        )

    def _detailed_difference(self, kill: bool) -> str:
        """Trains twice more with every step recorded, and returns the first difference."""
        self.screen.line("verify", "they differ: again, recording every step")
        first = self._train("look-first", detail=Detail.STEPS)
        return first_difference(first, self._train("look-second", kill=kill, detail=Detail.STEPS))

    def _train(self, name: str, kill: bool = False, detail: Detail = Detail.NONE) -> Path:
        """Trains in child processes, as the command does. With `kill`, all are killed after the first checkpoint, and resumed."""
        from drivetrain.launch.ending import raise_failure
        from drivetrain.launch.job import make_job
        from drivetrain.launch.machine import cluster_of, detect_machine
        from drivetrain.launch.opening import open_run, record_start
        from drivetrain.launch.planning import plan_run
        from drivetrain.processes.job import VerifyJob, to_json
        from drivetrain.supervise import local_placement, run_workers
        from drivetrain.watch.screen import Screen

        folder = self.folder / name
        request = replace(self.request, run_dir=str(folder / "run"))
        machine = detect_machine(request)
        opened = open_run(self.recipe, request)
        plan = plan_run(self.recipe, request, cluster_of(machine), None)
        if detail is not Detail.NONE:
            plan = replace(plan, capture="off", compile="off")  # nothing inside a CUDA graph can be recorded
        record_start(opened, self.recipe, plan, machine)
        fingerprint = folder / "fingerprint.jsonl"
        job = make_job(
            VerifyJob, self.recipe, opened.run, plan,
            fingerprint=None if detail is Detail.NONE else str(fingerprint), names_operations=detail is Detail.OPERATIONS,
        )  # fmt: skip
        if kill:
            _run_until_killed([to_json(job), machine.procs, machine.gpus], folder / "killed.json")
            if detail is not Detail.NONE:
                fingerprint.rename(folder / "before.jsonl")
        ended = run_workers(job, plan, local_placement(machine.procs), Screen(quiet=True), machine.gpus)
        raise_failure(ended, Run(opened.run.path))
        return folder


def verify(recipe: Recipe, request: Request, steps: int | None, screen: Screen) -> bool:
    """Verifies a task in a temporary folder; prints the verdict and returns whether resume is exact."""
    from drivetrain.launch.machine import detect_machine

    machine = detect_machine(request)
    steps = steps or (GPU_STEPS if machine.device == "cuda" else STEPS)
    changes = {"steps": steps, "log_every": 1, "save_every": steps // 2} | _allowed(recipe, best=None, patience=0, keep=1000)
    recipe = replace(recipe, settings=recipe.settings | changes, name=None)
    folder = Path(tempfile.mkdtemp(prefix="drivetrain-verify-"))
    try:
        return Verification(recipe, request, screen, folder).verify()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _allowed(recipe: Recipe, **values: Any) -> dict[str, Any]:
    """Returns the values that the task's own types allow: `best: str` is never None. The others stay as the recipe has them."""
    from drivetrain.describe import task_settings

    known = task_settings(recipe.task)
    allowed = {}
    for name, value in values.items():
        with contextlib.suppress(Problem):
            allowed[name] = known[name].coerce(value)
    return allowed


# A front end in a process of its own, so that the kill of all its processes does not end this one.
KILLED_FRONT_END = """
import json, sys
from drivetrain.processes.job import from_json
from drivetrain.supervise import local_placement, run_workers
from drivetrain.watch.screen import Screen

values, procs, gpus = json.load(open(sys.argv[1]))
job = from_json(values)
print(run_workers(job, job.plan, local_placement(procs), Screen(quiet=True), gpus).message)
"""


def _run_until_killed(arguments: list[Any], file: Path) -> None:
    """Trains until the first checkpoint is published, then kills all processes of the training."""
    file.write_text(json.dumps(arguments))
    environment = os.environ | {FAULTS_VARIABLE: "kill@published:1"}
    done = subprocess.run([sys.executable, "-c", KILLED_FRONT_END, str(file)], env=environment, capture_output=True, text=True)
    if done.returncode >= 0:
        raise Problem(f"the kill did not come: {done.stderr.strip() or done.stdout.strip()}", Outcome.INFRA)


# --- comparing ---------------------------------------------------------------------------------


def first_difference(first: Path, second: Path) -> str:
    """Returns where two trainings differ first: in a recorded step, a row of metrics, or the final weights; "" if nowhere."""
    fingerprints = [{row["step"]: row for row in _read_rows(folder / "fingerprint.jsonl") if "step" in row} for folder in (first, second)]
    for step in sorted(fingerprints[0].keys() & fingerprints[1].keys()):
        if difference := _step_difference(step, fingerprints[0][step], fingerprints[1][step]):
            return difference
    rows = [
        [{k: row[k] for k in row if k.startswith(("train/", "eval/", "grad_norm"))} for row in _read_rows(folder / "run" / "metrics.jsonl")]
        for folder in (first, second)
    ]
    for number, (row, other) in enumerate(zip(*rows, strict=False), 1):
        for name in row:
            if row[name] != other.get(name):
                return f"at row {number} {name} is {row[name]} and {other.get(name)}"
    weights = [(folder / "run" / "model" / "model.safetensors").read_bytes() for folder in (first, second)]
    return "" if weights[0] == weights[1] else "the final weights differ"


def _step_difference(step: int, first: dict[str, Any], second: dict[str, Any]) -> str:
    if first["batch"] != second["batch"]:
        return f"at step {step} the batch differs (the data set, collate or augment gives other values for the same samples)"
    for name in first["outputs"]:
        if first["outputs"][name] != second["outputs"].get(name):
            return f"at step {step} the output of module {name} differs for the same batch"
    for name in first["gradients"]:
        if first["gradients"][name] != second["gradients"].get(name):
            return f"at step {step} the gradient of {name} differs, though batch and outputs are equal"
    return ""


def _read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
