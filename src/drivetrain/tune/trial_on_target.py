"""Trials on a target: each is a run there, whose metrics are copied here while it trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from drivetrain.launch.request import Request
from drivetrain.outcomes import Outcome, Problem
from drivetrain.recipe import Recipe, make, split_words
from drivetrain.runs import Run
from drivetrain.targets import submit
from drivetrain.targets.base import STOP_SECONDS, Target
from drivetrain.targets.consent import Agree, Consent, Cost
from drivetrain.targets.record import Record, read_record
from drivetrain.targets.submission import Submission
from drivetrain.tune.study import Proposal
from drivetrain.tune.trial import RunningTrial

JOBS = {"slurm": 4}
"""Trials at a time, unless --jobs is given; elsewhere one."""


class TrialOnTarget(RunningTrial):
    """A trial that runs on a target. A thread follows it."""

    def __init__(
        self, proposal: Proposal, run: Run, request: Request, best: str, target: Target, recipe: Recipe, consent: Consent | None
    ) -> None:
        super().__init__(proposal, run, request, best)
        self.target, self.task, self.consent = target, recipe.task, consent
        self.record: Record | None = None
        self._code: int | None = None
        self._problem: Problem | None = None

    @property
    def log(self) -> Path:
        return self.run.path / "logs" / "output.log"

    def submission(self) -> Submission:
        recipe = make(self.task, {}, split_words(list(self.request.settings)), {})
        return replace(_prepare(self.target, recipe, self.request, self.run), consent=self.consent)

    def agree(self, action: str, cost: Cost) -> Consent:
        """Returns the consent that the user gave for all trials."""
        if self.consent is None:
            raise Problem(f"{action}: there was no price when the search began; repeat the command")
        return self.consent

    def begin(self, record: Record) -> None:
        """Follows the run, which has been submitted."""
        self.num_starts += 1
        self.record, self._code, self._problem = record, None, None
        threading.Thread(target=self._follow, args=(record,), daemon=True).start()

    def _follow(self, record: Record) -> None:
        try:
            for newest in submit.follow(record):
                record = newest
            code = record.facts.get("exit_code")
            self._code = Outcome.INFRA.code if code is None else int(code)
        except Problem as problem:
            self._problem, self._code = problem, problem.outcome.code

    def start(self) -> None:
        start_on_target([self])

    def stop(self) -> None:
        if self.record is not None and self._code is None:
            threading.Thread(target=self._stop, args=(STOP_SECONDS,), daemon=True).start()

    def kill(self) -> None:
        if self.record is not None and self._code is None:
            self._stop(0.0)

    def _stop(self, seconds: float) -> None:
        assert self.record is not None
        try:
            self.target.stop(self.record, seconds)
        except Problem as problem:
            self._problem = problem

    @property
    def exit_code(self) -> int | None:
        return self._code

    def problem(self) -> Problem:
        if self._problem is not None:
            return self._problem
        problem = super().problem()
        lines = [line for line in str(problem).splitlines() if not line.startswith(("srun: ", "slurmstepd: "))]
        return Problem("\n".join(lines) or str(problem), problem.outcome)


def start_on_target(trials: list[RunningTrial]) -> None:
    """Submits trials, those that are new at once as an array; continues to follow those that run there already."""
    new: list[TrialOnTarget] = []
    for trial in trials:
        assert isinstance(trial, TrialOnTarget)
        record = read_record(trial.run)
        if record is not None and not record.handle:
            record = submit.adopt(record)
        if record is None or not record.handle:
            if record is not None:
                submit.forget(record)  # of a submission that was killed before the target accepted it
            new.append(trial)
        elif (record := submit.refresh(record)).is_active:
            trial.begin(record)
        else:
            trial.begin(submit.resubmit(record, (), Request(), trial.agree, _ignore))
    if new:
        try:
            submit.submit_array(new[0].target, [trial.submission() for trial in new], _ignore)
        finally:  # also if one was refused: the search stops the others only if it knows them
            for trial in new:
                if (record := read_record(trial.run)) is not None and record.handle:
                    trial.begin(record)


def _ignore(text: str) -> None:
    """Progress of a submission, for which a table of trials has no line."""


def _prepare(target: Target, recipe: Recipe, request: Request, run: Run) -> Submission:
    return submit.prepare(target, [recipe], Request(device=request.device, procs=request.procs), run)


def consent_to_trials(target: Target, recipe: Recipe, slots: list[Request], folder: Path, agree: Agree) -> Consent | None:
    """Asks the user once for the cost of all trials that run at a time."""
    trials = [_prepare(target, recipe, slot, Run(folder / "trials" / str(number))) for number, slot in enumerate(slots)]
    return submit.consent_to(target, trials, agree)


def trial_maker(target: Target, recipe: Recipe, consent: Consent | None) -> Callable[[Proposal, Run, Request, str], RunningTrial]:
    def make_trial(proposal: Proposal, run: Run, request: Request, best: str) -> RunningTrial:
        return TrialOnTarget(proposal, run, request, best, target, recipe, consent)

    return make_trial
