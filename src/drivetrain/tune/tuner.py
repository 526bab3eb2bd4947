"""The tuner: starts trials, reports their evaluations to the study, and stops bad trials early."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType

from drivetrain.launch.request import Request
from drivetrain.outcomes import Problem
from drivetrain.recipe import Recipe
from drivetrain.runs import Run
from drivetrain.settings import Length, as_text
from drivetrain.supervise import handling_signals
from drivetrain.tune import folder as folders
from drivetrain.tune.folder import Goal, StudyFolder
from drivetrain.tune.study import Proposal, Study
from drivetrain.tune.table import Table
from drivetrain.tune.trial import MAX_RESTARTS, RunningTrial, start_all

POLL_SECONDS = 0.1
NUM_EVALUATIONS = 10
"""If a task would be evaluated fewer than twice, its trials are evaluated this often, so that they can be pruned."""
MAX_FIRST_FAILURES = 3
"""If the first trials fail, the search ends after this many."""


@dataclass(frozen=True)
class TunerSettings:
    """What to train, how many trials, and on which part of the machine."""

    recipe: Recipe
    goal: Goal
    trials: int
    slots: list[Request]
    """One request for each of the trials that run at the same time, with its share of the machine."""
    make_trial: Callable[[Proposal, Run, Request, str], RunningTrial] = RunningTrial
    start: Callable[[list[RunningTrial]], None] = start_all
    """Starts new trials."""


def with_early_evaluations(recipe: Recipe) -> tuple[Recipe, str]:
    """Returns a recipe whose trials can be stopped early, and a message for the user if it differs.

    A trial that would be evaluated only at its end is evaluated ten times, unless the user chose `eval_every`.
    """
    settings, every = recipe.settings, Length.parse(recipe.settings["eval_every"])
    length = settings["steps"] or settings["epochs"]
    unit = "steps" if settings["steps"] else "epochs"
    if recipe.origin["eval_every"] != "default" or every.unit != unit or 2 * every.value <= length or length < 2:
        return recipe, ""
    interval = max(1, length // NUM_EVALUATIONS)
    value = interval if unit == "steps" else f"{interval}ep"
    changed = replace(recipe, settings=settings | {"eval_every": value}, origin=recipe.origin | {"eval_every": "tune"})
    return changed, f"trials are evaluated with eval_every={value}, not {settings['eval_every']}, so that bad ones can be stopped early"


class Tuner:
    """Trains trials as ordinary runs, several at a time."""

    def __init__(self, settings: TunerSettings, folder: StudyFolder, study: Study, table: Table) -> None:
        self.settings, self.folder, self.study, self.table = settings, folder, study, table
        self.free_slots = settings.slots.copy()
        self.running: dict[int, tuple[RunningTrial, Request]] = {}
        """The running trials with their slots, by number."""
        self.num_signals = 0
        self.code_digest = settings.recipe.task.digest()
        self.best = study.best()

    def run(self) -> bool:
        """Trains until there are enough trials; returns False if a signal ended it earlier."""
        waiting = self.study.unfinished()
        num_proposed = len(self.study.trials())
        try:
            with handling_signals(self._on_signal):
                while self.running or (not self.num_signals and (waiting or num_proposed < self.settings.trials)):
                    new: list[RunningTrial] = []
                    while self.free_slots and not self.num_signals and (waiting or num_proposed < self.settings.trials):
                        if not waiting:
                            waiting, num_proposed = self._ask(), num_proposed + 1
                        new.append(self._prepare(waiting.pop(0)))
                    self.settings.start(new)
                    for trial, _ in list(self.running.values()):
                        self._follow(trial)
                    self._show_running()
                    time.sleep(POLL_SECONDS)
        finally:
            self.table.clear()
            for trial, _ in self.running.values():  # only after an error: otherwise all have ended
                trial.kill()
        return not waiting and num_proposed >= self.settings.trials and not self.study.unfinished()

    def _show_running(self) -> None:
        trials = [trial for trial, _ in self.running.values()]
        self.table.show([self._row(trial, "stopping" if trial.is_pruned or self.num_signals else "running") for trial in trials])

    # --- one trial ---

    def _ask(self, count: int = 1) -> list[Proposal]:
        if self.settings.recipe.task.digest() != self.code_digest:
            raise Problem(
                f"{self.settings.recipe.task.path} was changed: its trials cannot be compared; restore it, or choose another --name"
            )
        return self.study.ask(count)

    def _prepare(self, proposal: Proposal) -> RunningTrial:
        """Returns the trial of a proposal, which takes a free slot."""
        recipe, goal, slot = self.settings.recipe, self.settings.goal, self.free_slots.pop(0)
        values = recipe.chosen() | proposal.params | {"best": goal.best}
        values |= {f"plan.{name}": value for name, value in recipe.pins.items()}
        words = [f"{name}={as_text(value)}" for name, value in values.items()]
        run = self.folder.run_of(proposal.number)
        task = folders.task_word(recipe.task)
        request = replace(slot, target=task, settings=(*words, *slot.settings), run_dir=str(run.path))
        trial = self.settings.make_trial(proposal, run, request, goal.best)
        self.running[trial.number] = trial, slot
        return trial

    def _follow(self, trial: RunningTrial) -> None:
        """Reports a trial's new evaluations, stops it if they are bad, and handles its end."""
        code = trial.exit_code  # read before the metrics, so that no row of an ended run is missed
        trial.read_metrics()
        values = [trial.evaluations[step] for step in sorted(trial.evaluations)]
        for count in range(trial.reported + 1, len(values) + 1):
            trial.reported = count
            self.study.report(trial.number, count, values[count - 1])
            should_prune = self.study.should_prune(trial.number)
            if should_prune and code is None and not trial.is_pruned and not self._is_in_last_epoch(trial):
                trial.is_pruned = True
                trial.stop()
        if code is not None:
            self._on_exit(trial, code)

    def _length(self, trial: RunningTrial) -> tuple[int | None, int]:
        """Returns the steps and epochs of a trial; if steps are set, epochs do not count."""
        settings = self.settings.recipe.settings | trial.params
        return settings["steps"], settings["epochs"]

    def _is_in_last_epoch(self, trial: RunningTrial) -> bool:
        """Whether a run has begun its last epoch, where stopping it gains nothing."""
        steps, epochs = self._length(trial)
        return bool(trial.row["step"] >= steps) if steps else bool(trial.row["epoch"] >= epochs)

    def _on_exit(self, trial: RunningTrial, code: int) -> None:
        """Reports to the study how a trial ended, or restarts it if it was killed from outside."""
        best = trial.best()
        facts = {"steps": trial.row.get("step", 0)} | ({"step": best[0]} if best else {})
        if code == 0 and best is not None:
            self.study.finish(trial.number, best[1], **facts)
            self._remove(trial, "finished")
        elif code == 0:
            self._fail(trial, Problem(f"none of its evaluations gave a number for {self.settings.goal.metric}"))
        elif trial.is_pruned:
            self.study.prune(trial.number, **facts)
            self._remove(trial, "pruned")
        elif self.num_signals:
            self._remove(trial, "stopped")
        elif trial.was_killed and trial.num_starts <= MAX_RESTARTS:
            self.table.print(self._row(trial, "restarted"), str(trial.problem()).splitlines()[0])
            self.settings.start([trial])
        else:
            self._fail(trial, trial.problem())

    def _fail(self, trial: RunningTrial, problem: Problem) -> None:
        starts = f" ({trial.num_starts} starts)" if trial.num_starts > 1 else ""
        self.study.fail(trial.number, str(problem), steps=trial.row.get("step", 0))
        self._remove(trial, "failed", str(problem).splitlines()[0] + starts)
        states = [t.state for t in self.study.trials() if t.state != "running"]
        if str(problem).startswith("best="):
            metric = self.settings.goal.metric
            raise Problem(f"{metric} cannot be optimised ({problem}): choose another with --metric", problem.outcome)
        if len(states) >= MAX_FIRST_FAILURES and set(states) == {"failed"}:
            raise Problem(f"the first {len(states)} trials failed, the last one so (log: {self._log(trial)}):\n{problem}", problem.outcome)

    def _log(self, trial: RunningTrial) -> str:
        return str(trial.log)

    def _remove(self, trial: RunningTrial, state: str, note: str = "") -> None:
        """Removes a trial that has ended from the running ones, and prints its row."""
        self.free_slots.append(self.running.pop(trial.number)[1])
        best = self.best = self.study.best()
        if best is not None and best.number == trial.number and best.value is not None:
            folders.write_best(self.folder.path, self.settings.recipe, self.settings.goal, best.number, best.value, trial.params)
        self.table.print(self._row(trial, state), note)

    def _row(self, trial: RunningTrial, state: str) -> str:
        steps, epochs = self._length(trial)
        row = trial.row or {"epoch": 0, "step": 0}
        progress = f"{row['step']}/{steps}" if steps else f"{row['epoch']}/{epochs}"
        own_best, best = trial.best(), self.best
        own_value = own_best[1] if own_best else None
        return self.table.row(trial.number, trial.params, progress, own_value, state, best.value if best else None)

    # --- signals ---

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Stops the running trials after their current step; a second Ctrl-C kills them."""
        self.num_signals += 1
        for trial, _ in self.running.values():
            if self.num_signals > 1 and number == signal.SIGINT:
                trial.kill()
            else:
                trial.stop()
