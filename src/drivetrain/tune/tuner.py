"""The tuner: keeps trials running, reports their evaluations, stops bad ones early, and can be taken up after any end."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, replace
from types import FrameType

from drivetrain.launch.request import Request
from drivetrain.outcomes import Problem
from drivetrain.recipe import Recipe
from drivetrain.settings import Length
from drivetrain.supervise import handled
from drivetrain.tune import folder as folders
from drivetrain.tune.folder import Folder, Goal
from drivetrain.tune.space import as_text
from drivetrain.tune.study import Proposal, Study
from drivetrain.tune.table import Table
from drivetrain.tune.trial import RETRIES, Trial

POLL_SECONDS = 0.1
JUDGED = 10  # times, at least, where pruning is to have something to go by
HOPELESS = 3  # failures, before any trial has finished


@dataclass(frozen=True)
class Order:
    """What to do: which trainings, how many trials, and where each runs."""

    recipe: Recipe
    goal: Goal
    trials: int
    slots: list[Request]
    """For each of the trials that run at the same time: a request with its share of the machine."""


def judged_along_the_way(recipe: Recipe) -> tuple[Recipe, str]:
    """The recipe of trials that can be stopped early: one that would be judged at its end alone is judged ten times, unless
    somebody chose `eval_every`; and what to say of it."""
    settings, every = recipe.settings, Length.parse(recipe.settings["eval_every"])
    whole = settings["steps"] or settings["epochs"]
    unit = "steps" if settings["steps"] else "epochs"
    if recipe.origin["eval_every"] != "default" or every.unit != unit or 2 * every.value <= whole or whole < 2:
        return recipe, ""
    often = max(1, whole // JUDGED)
    value = often if unit == "steps" else f"{often}ep"
    changed = replace(recipe, settings=settings | {"eval_every": value}, origin=recipe.origin | {"eval_every": "tune"})
    return changed, f"trials are judged with eval_every={value}, not {settings['eval_every']}, so that bad ones can be stopped early"


class Tuner:
    def __init__(self, order: Order, folder: Folder, study: Study, table: Table) -> None:
        self.order, self.folder, self.study, self.table = order, folder, study, table
        self.free = order.slots.copy()
        self.running: dict[int, tuple[Trial, Request]] = {}
        self.signals = 0
        self.code = order.recipe.task.digest()
        self.best = study.best()

    def run(self) -> bool:
        """Try until enough were tried; False where a signal ended it before."""
        waiting = self.study.unfinished()
        asked = len(self.study.tried())
        try:
            with handled(self._on_signal):
                while self.running or (not self.signals and (waiting or asked < self.order.trials)):
                    while self.free and not self.signals and (waiting or asked < self.order.trials):
                        if not waiting:
                            waiting, asked = self._ask(), asked + 1
                        self._begin(waiting.pop(0))
                    for trial, _ in list(self.running.values()):
                        self._follow(trial)
                    self.table.show([self._row(t, "stopping" if t.pruned or self.signals else "running") for t, _ in self.running.values()])
                    time.sleep(POLL_SECONDS)
        finally:
            self.table.clear()
            for trial, _ in self.running.values():  # of an end that nobody asked for
                trial.kill()
        return not waiting and asked >= self.order.trials and not self.study.unfinished()

    # --- one trial ---

    def _ask(self, count: int = 1) -> list[Proposal]:
        if self.order.recipe.task.digest() != self.code:
            raise Problem(
                f"{self.order.recipe.task.path} was changed: its trials cannot be compared; put it back, or choose another --name"
            )
        return self.study.ask(count)

    def _begin(self, proposal: Proposal) -> None:
        order, slot = self.order, self.free.pop(0)
        settings = folders.given(order.recipe) | proposal.params | {"best": order.goal.best}
        settings |= {f"plan.{k}": v for k, v in order.recipe.pins.items()}
        run, words = self.folder.run_of(proposal.number), [f"{k}={as_text(v)}" for k, v in settings.items()]
        task = folders.task_word(order.recipe.task)
        request = replace(slot, target=task, settings=(*words, *slot.settings), run_dir=str(run.path))
        trial = Trial(proposal, run, request, order.goal.best)
        self.running[trial.number] = trial, slot
        trial.start()

    def _follow(self, trial: Trial) -> None:
        code = trial.code  # before looking, so that nothing is missed of a run that has ended
        trial.look()
        values = [trial.evaluations[step] for step in sorted(trial.evaluations)]
        for count in range(trial.reported + 1, len(values) + 1):
            trial.reported = count
            worse = self.study.report(trial.number, count, values[count - 1])
            if worse and code is None and not trial.pruned and not self._at_the_end(trial):
                trial.pruned = True
                trial.stop()
        if code is not None:
            self._ended(trial, code)

    def _at_the_end(self, trial: Trial) -> bool:
        """Nothing is saved by stopping a run in its last epoch."""
        steps = trial.params.get("steps", self.order.recipe.settings["steps"])
        epochs = trial.params.get("epochs", self.order.recipe.settings["epochs"])
        return bool(trial.row["step"] >= steps) if steps else bool(trial.row["epoch"] >= epochs)

    def _ended(self, trial: Trial, code: int) -> None:
        """Tell the study, or start the trial again where something else than its training ended it."""
        best = trial.best()
        facts = {"steps": trial.row.get("step", 0)} | ({"step": best[0]} if best else {})
        if code == 0 and best is not None:
            self.study.finish(trial.number, best[1], **facts)
            self._leave(trial, "finished")
        elif code == 0:
            self._failed(trial, Problem(f"none of its evaluations gave a number for {self.order.goal.metric}"))
        elif trial.pruned:
            self.study.prune(trial.number, **facts)
            self._leave(trial, "pruned")
        elif self.signals:
            self._leave(trial, "stopped")
        elif trial.interrupted and trial.starts <= RETRIES:
            self.table.keep(self._row(trial, "restarted"), str(trial.problem()).splitlines()[0])
            trial.start()
        else:
            self._failed(trial, trial.problem())

    def _failed(self, trial: Trial, problem: Problem) -> None:
        again = f" ({trial.starts} starts)" if trial.starts > 1 else ""
        self.study.fail(trial.number, str(problem), steps=trial.row.get("step", 0))
        self._leave(trial, "failed", str(problem).splitlines()[0] + again)
        states = [t.state for t in self.study.tried() if t.state != "running"]
        if str(problem).startswith("best="):
            raise Problem(f"{self.order.goal.metric} cannot be optimised ({problem}): choose another with --metric", problem.outcome)
        if len(states) >= HOPELESS and set(states) == {"failed"}:
            raise Problem(f"the first {len(states)} trials failed, the last one so (log: {self._log(trial)}):\n{problem}", problem.outcome)

    def _log(self, trial: Trial) -> str:
        return str(trial.run.path / "logs" / "train.log")

    def _leave(self, trial: Trial, state: str, note: str = "") -> None:
        self.free.append(self.running.pop(trial.number)[1])
        best = self.best = self.study.best()
        if best is not None and best.number == trial.number and best.value is not None:
            folders.write_best(self.folder.path, self.order.recipe, self.order.goal, best.number, best.value, trial.params)
        self.table.keep(self._row(trial, state), note)

    def _row(self, trial: Trial, state: str) -> str:
        steps = trial.params.get("steps", self.order.recipe.settings["steps"])
        epochs = trial.params.get("epochs", self.order.recipe.settings["epochs"])
        row = trial.row or {"epoch": 0, "step": 0}
        progress = f"{row['step']}/{steps}" if steps else f"{row['epoch']}/{epochs}"
        own, best = trial.best(), self.best
        return self.table.row(trial.number, trial.params, progress, own[1] if own else None, state, best.value if best else None)

    # --- signals ---

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Stop the running trials as `kill -TERM` of each would; a second Ctrl-C ends them at once."""
        self.signals += 1
        for trial, _ in self.running.values():
            if self.signals > 1 and number == signal.SIGINT:
                trial.kill()
            else:
                trial.stop()
