"""One experiment: trains without faults, trains again with faults, and compares."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.chaos import outages
from drivetrain.chaos.report import compare, injected
from drivetrain.engine.faults.injection import ACTIONS, FAULTS_VARIABLE, PACE_VARIABLE, SAMPLES_VARIABLE, read_fault
from drivetrain.launch.request import Request
from drivetrain.outcomes import EXIT_CODES, Outcome, Problem, outcome_of_code
from drivetrain.runs import Run, die_with_parent

if TYPE_CHECKING:
    from drivetrain.watch.screen import Screen

NUM_FAULTS, NUM_OUTAGES = 20, 3  # the defaults of --faults, without and with --hosts
NUM_SAVES = 12  # checkpoints of a run
NUM_RESTARTS = 5  # the run's --restarts
STEP_DELAY_SECONDS = 0.15  # added to each step with --hosts, so that a lost host can come back before the run ends
COMMAND_ENDING_KINDS = ("agent", "preempt", "nan", "full")  # the command is repeated after these, as a launcher does
USUAL_KINDS = [kind for kind in ACTIONS if kind != "oom"]  # oom changes the plan, and with it the order of sums and the dropout masks


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A training and the faults to inject into it."""

    task: str
    settings: Sequence[str] = ()
    steps: int
    procs: int
    """Processes on each host."""
    num_hosts: int | None = None
    """The number of hosts to create on this machine; None: train on this machine itself."""
    num_faults: int | None = None
    schedule: Sequence[str] = ()
    """The faults; empty: they are drawn at random."""
    kinds: Sequence[str] = ()
    seed: int
    hang_after: float
    """Seconds."""
    device: str | None = None
    gpus: str | None = None

    @property
    def save_every(self) -> int:
        return max(1, self.steps // NUM_SAVES)

    def request(self, procs: int, run_dir: Path) -> Request:
        """Returns the training command, for `procs` processes on this machine or on each host."""
        settings = (
            *self.settings, f"steps={self.steps}", "log_every=1", f"save_every={self.save_every}", f"eval_every={4 * self.save_every}",
        )  # fmt: skip
        return Request(
            target=self.task, settings=settings, procs=procs, device=self.device, gpus=self.gpus, run_dir=str(run_dir),
            hang_after=self.hang_after, restarts=NUM_RESTARTS, quiet=True,
        )  # fmt: skip

    def faults(self) -> list[str]:
        """Returns the scheduled faults, or draws them; raises Problem for an invalid fault."""
        usual_kinds = USUAL_KINDS if self.num_hosts is None else list(outages.KINDS)
        known_kinds = list(ACTIONS) if self.num_hosts is None else list(outages.KINDS)
        for kind in self.kinds:
            if kind not in known_kinds:
                others = " (and others with --hosts)" if self.num_hosts is None else ""
                raise Problem(f"--kinds {kind}: there are {', '.join(known_kinds)}{others}")
        kinds = list(self.kinds) or usual_kinds
        if self.num_hosts is None:
            for fault in self.schedule:
                read_fault(fault, rank=0)
            return list(self.schedule) or draw_faults(self.seed, _default(self.num_faults, NUM_FAULTS), self.steps, self.procs, kinds)
        scheduled = [outages.read_outage(text, self.num_hosts) for text in self.schedule]
        num_outages = _default(self.num_faults, NUM_OUTAGES)
        first_step = self.save_every + 1
        return [
            str(outage)
            for outage in scheduled or outages.draw_outages(self.seed, num_outages, first_step, self.steps, self.num_hosts, kinds)
        ]


def _default(value: int | None, default: int) -> int:
    return default if value is None else value


def draw_faults(seed: int, count: int, steps: int, procs: int, kinds: list[str]) -> list[str]:
    """Draws faults: all kinds equally often, each at another random step and on a random rank."""
    rng = random.Random(seed)
    if count > steps - 2:
        raise Problem(f"--faults {count}: at most one a step, so {steps - 2} in {steps} steps; raise --steps")
    drawn_steps = sorted(rng.sample(range(2, steps), count))
    drawn_kinds = [kinds[i % len(kinds)] for i in range(count)]
    rng.shuffle(drawn_kinds)
    faults = []
    for kind, step in zip(drawn_kinds, drawn_steps, strict=True):
        phase = "save" if kind == "full" else "step"
        rank = 0 if kind in ("full", "torn") else rng.randrange(procs)
        faults.append(f"{kind}@{phase}:{step}:rank={rank}")
    return faults


def run_experiment(experiment: Experiment, folder: Path | None, screen: Screen) -> dict[str, Any]:
    """Trains twice and returns the report. Both runs and report.json stay in `folder`, if one is given."""
    faults = experiment.faults()
    working_folder = folder.resolve() if folder else Path(tempfile.mkdtemp(prefix="drivetrain-chaos-"))
    try:
        undisturbed, broken = _train_twice(experiment, faults, working_folder, screen)
        report = compare(undisturbed, broken, faults)
        report |= {"seed": experiment.seed, "processes": experiment.procs, "steps": experiment.steps}
        if folder:
            (working_folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        return report
    finally:
        if not folder:
            shutil.rmtree(working_folder, ignore_errors=True)


def _train_twice(experiment: Experiment, faults: list[str], folder: Path, screen: Screen) -> tuple[Run, Run]:
    num_hosts = experiment.num_hosts
    world_size = experiment.procs * (num_hosts or 1)
    screen.line("chaos", f"{experiment.steps} steps on {world_size} process{'' if world_size == 1 else 'es'}, undisturbed")
    undisturbed = _train(experiment.request(world_size, folder / "whole"), [], screen)
    on_hosts, plural = f" on {num_hosts} hosts" if num_hosts else "", "" if len(faults) == 1 else "s"
    screen.line("chaos", f"the same{on_hosts} with {len(faults)} fault{plural} (seed {experiment.seed})")
    request = experiment.request(experiment.procs, folder / "broken")
    if num_hosts is None:
        return undisturbed, _train(request, faults, screen)
    return undisturbed, _train_on_hosts(request, faults, screen, num_hosts)


def _environment(folder: Path, **variables: str) -> dict[str, str]:
    """Returns the environment of a training that logs its samples and keeps its temporary files beside its run."""
    (folder.parent / "tmp").mkdir(parents=True, exist_ok=True)
    inherited = {name: value for name, value in os.environ.items() if name not in (FAULTS_VARIABLE, PACE_VARIABLE)}
    return inherited | {SAMPLES_VARIABLE: "1", "TMPDIR": str(folder.parent / "tmp")} | variables


def _train_on_hosts(request: Request, faults: list[str], screen: Screen, num_hosts: int) -> Run:
    """Trains on hosts of which all but the first are lost and come back."""
    from drivetrain.chaos.hosts import hosts

    run = Run(str(request.run_dir))
    environment = _environment(run.path, **{PACE_VARIABLE: str(STEP_DELAY_SECONDS)})
    with hosts(num_hosts) as created:
        training = outages.TrainingOnHosts(created, request, run, environment, lambda text: screen.line("", text))
        training.train([outages.read_outage(fault, num_hosts) for fault in faults])
    return run


def _train(request: Request, faults: list[str], screen: Screen) -> Run:
    """Trains with the `train` command; repeats it, as launchers do, until the run is finished."""
    run = Run(str(request.run_dir))
    environment = _environment(run.path, **({FAULTS_VARIABLE: ",".join(faults)} if faults else {}))
    for _ in range(1 + sum(fault.startswith(COMMAND_ENDING_KINDS) for fault in faults)):
        num_before = len(injected(run))
        done = subprocess.run(
            [sys.executable, "-P", "-m", "drivetrain", *request.command()], env=environment, capture_output=True, text=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )  # fmt: skip
        if done.returncode == 0:
            return run
        new_faults = injected(run)[num_before:]
        if done.returncode not in _expected_exit_codes(new_faults):
            message = f"the training ended with {done.returncode} after {new_faults or 'no fault'}:\n{done.stderr.strip()}"
            raise Problem(message, outcome_of_code(done.returncode))
        screen.line("", f"{len(injected(run))} of {len(faults)} faults so far; the command ended after {new_faults[-1]}, and is repeated")
    raise Problem("the training did not finish", Outcome.INFRA)


def _expected_exit_codes(faults: list[str]) -> list[int]:
    """Returns the exit codes that the command may have after these faults."""
    if not faults:
        return []
    codes = [-9, Outcome.PREEMPTED.code, Outcome.NAN.code]
    if any(fault.startswith(("preempt", "full")) for fault in faults):  # the command ended early, or its last save found no space
        codes += [code for outcome, code in EXIT_CODES.items() if outcome.retryable]
    return codes
