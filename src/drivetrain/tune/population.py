"""Trials as a population: generations of them are trained at once, as one program in one process; the sampler is told after each."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from drivetrain import runs
from drivetrain.describe import tune_facts
from drivetrain.launch.request import Request
from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan
from drivetrain.processes.generation import grouped
from drivetrain.processes.job import PopulationJob, PopulationMember
from drivetrain.recipe import Recipe
from drivetrain.runs import Lock, Run
from drivetrain.supervise import Ended, handled, local_place, run_workers
from drivetrain.tasks.rl import shape
from drivetrain.tune.folder import Folder
from drivetrain.tune.space import Space
from drivetrain.tune.study import Proposal, Study
from drivetrain.tune.table import Table
from drivetrain.tune.trial import RETRIES, Trial
from drivetrain.tune.tuner import Order, Tuner
from drivetrain.watch.screen import LABEL, Screen

MOST = 64  # trials at once, where nobody says how many
OUT = "--population off trains them one by one"


class NoPopulation(Problem):
    """The task turned out not to be one that can be trained so."""


# --- whether ------------------------------------------------------------------------------------


def choose(asked: str, recipe: Recipe, space: Space, trials: int, device: str, shared_out: bool) -> tuple[int, str]:
    """How many trials are trained at once as one program (0: they are ordinary runs), and why, where that is worth a line.
    `shared_out`: it was said how trials share the machine (--jobs, --procs)."""
    if asked == "off":
        return 0, ""
    if asked == "auto":
        return _by_itself(recipe, space, trials, device, shared_out)
    if not asked.isdigit() or int(asked) < 1:
        raise Problem(f"--population {asked}: how many trials at once (such as 25), auto or off")
    why = _obstacle(recipe, space)
    if shared_out and not why:
        why = "it is one process, and --jobs and --procs say how many there are: leave them out"
    if why:
        raise Problem(f"--population {asked}: {why}; {OUT}")
    return int(asked), f"{asked} trials at once as one program, in generations"


def _by_itself(recipe: Recipe, space: Space, trials: int, device: str, shared_out: bool) -> tuple[int, str]:
    if shared_out or not tune_facts(recipe.task).tune_population:
        return 0, ""
    changing = [name for name in space if name not in shape.VARIED]
    why = _obstacle(recipe, space) or (f"{changing[0]} changes the program" if changing else "")
    if device != "cuda":
        why = "there is no GPU"
    if why:
        return 0, f"trials one by one: {why}"
    size = min(MOST, -(-trials // 2))
    return size, f"{size} trials at once as one program, since none of what is searched changes its shape ({OUT})"


def _obstacle(recipe: Recipe, space: Space) -> str:
    label = recipe.task.label
    if not tune_facts(recipe.task).tune_population:
        return f"{label} is no task of the PPO family (bandit, cartpole, snake, your own Ppo), whose small policies can be trained so"
    found = shape.obstacle(recipe.settings)
    for name, dimension in space.items():
        for value in dimension.choices or (dimension.low, dimension.high):
            found = found or shape.obstacle(recipe.settings | {name: dimension.setting.coerce(value)})
    return found


# --- the tuner ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How generations are trained: what the command line knows of the machine, and how it writes runs."""

    size: int
    """Trials at once."""
    gpus: list[str]
    plan: Callable[[Recipe], Plan]
    record: Callable[[Recipe, Run, Plan], None]
    """Write run.json, and keep the task's code."""
    conclude: Callable[[Run, Recipe, Plan, Ended], None]
    """Note how the run ended."""


class Member(Trial):
    """A trial of a generation: its run is written as any other's, though it has no process of its own."""

    def __init__(self, proposal: Proposal, run: Run, recipe: Recipe, plan: Plan, best: str) -> None:
        super().__init__(proposal, run, Request(run_dir=str(run.path)), best)
        self.recipe, self.plan = recipe, plan
        self.lock: Lock | None = None

    def open(self, record: Callable[[Recipe, Run, Plan], None]) -> None:
        """Begin its run anew: of a generation that was broken off nothing counts."""
        shutil.rmtree(self.run.path, ignore_errors=True)
        self.lock = Lock.acquire(self.run.path)
        record(self.recipe, self.run, self.plan)
        self.run.log_event("started", world_size=1, device=self.plan.device, population=True)

    def close(self) -> None:
        if self.lock is not None:
            self.lock.release()
            self.lock = None


class Generations(Tuner):
    def __init__(self, order: Order, folder: Folder, study: Study, table: Table, way: Way) -> None:
        super().__init__(order, folder, study, table)
        self.way, self.size = way, way.size
        self.kills = 0
        self.open: dict[int, Member] = {}
        """Members of this generation that have not ended."""
        self.reported: dict[int, int] = {}
        """Evaluations that the study was told of, by trial."""

    def run(self) -> bool:
        waiting = self.study.unfinished()
        try:
            with handled(self._on_signal):
                while not self.signals:
                    missing = self.order.trials - len(self.study.tried())
                    if not waiting and missing <= 0:
                        break
                    if not waiting:
                        waiting = self._ask(min(self.way.size, missing))
                        continue  # a signal may have come meanwhile
                    generation, waiting = waiting[: self.way.size], waiting[self.way.size :]
                    waiting = self._train(generation) + waiting
        finally:
            self.table.clear()
            self._close("the population was stopped before its end")
        tried = self.study.tried()
        return len(tried) >= self.order.trials and all(t.state != "running" for t in tried)

    def _train(self, generation: list[Proposal]) -> list[Proposal]:
        """Train a generation; gives those that are still to be trained."""
        for proposal in generation:
            member = self._member(proposal)
            member.open(self.way.record)
            self.open[member.number] = member
            self.running[member.number] = member, member.request
        plan = next(iter(self.open.values())).plan
        ended = run_workers(self._job(plan), plan, local_place(1), _Listener(self), self.way.gpus)
        left = [proposal for proposal in generation if proposal.number in self.open]
        self.signals += ended.stopped
        if left and not self.signals:
            self._look_into(ended, len(left))
        if left:
            self._close(ended.message or "the population was stopped before its end")
        return [replace(p, reported=self.reported.get(p.number, p.reported)) for p in left]

    def _look_into(self, ended: Ended, left: int) -> None:
        """Why a generation did not come to its end, and whether to try again."""
        largest = max(map(len, grouped(self._job_members(), self.size)))
        if ended.outcome is Outcome.OOM and largest > 1:
            self.size = largest // 2
            self.table.screen.line("memory", f"out of memory with {largest} trials at once: {self.size} at once from here on")
        elif ended.outcome in (Outcome.INFRA, Outcome.HANG, Outcome.PREEMPTED) and self.kills < RETRIES:
            self.kills += 1
            self.table.screen.line("again", f"{ended.message or 'the worker was stopped'}: its {left} trials are trained anew")
        else:
            self._give_up(ended)

    def _give_up(self, ended: Ended) -> None:
        if ended.message.startswith("best="):
            raise Problem(f"{self.order.goal.metric} cannot be optimised ({ended.message}): choose another with --metric", ended.outcome)
        if ended.outcome in (Outcome.USAGE, Outcome.USER_ERROR):
            for member in self.open.values():  # so that ordinary runs can begin there
                member.close()
                shutil.rmtree(member.run.path, ignore_errors=True)
            self.open.clear()
            raise NoPopulation(f"these trials cannot be a population: {ended.message}\n{OUT}", ended.outcome)
        raise Problem(f"the population failed: {ended.message}", ended.outcome)

    def _member(self, proposal: Proposal) -> Member:
        recipe, chosen = self.order.recipe, proposal.params | {"best": self.order.goal.best}
        own = replace(
            recipe, settings=recipe.settings | chosen, origin=recipe.origin | dict.fromkeys(chosen, "command line"), name=None, notices=()
        )
        return Member(proposal, self.folder.run_of(proposal.number), own, self.way.plan(own), self.order.goal.best)

    def _job(self, plan: Plan) -> PopulationJob:
        run, task = str(self.folder.path.resolve()), self.order.recipe.task
        return PopulationJob(run=run, task=task, plan=plan, folder=".", members=self._job_members(), size=self.size)

    def _job_members(self) -> list[PopulationMember]:
        return [PopulationMember(m.number, str(m.run.path.resolve()), m.recipe.settings) for m in self.open.values()]

    # --- what the worker tells ---

    def heard_row(self, number: int, row: dict[str, Any]) -> None:
        member = self.open[number]
        member.row = row
        value = row[f"eval/{member.name}"]
        if math.isfinite(value):
            member.evaluations[row["step"]] = value
            if len(member.evaluations) > member.reported:
                member.reported = self.reported[number] = len(member.evaluations)
                self.study.note(number, member.reported, value)
        self.table.show([self._progress()])

    def heard_end(self, number: int, ended: Ended) -> None:
        member = self.open.pop(number)
        self.way.conclude(member.run, member.recipe, member.plan, ended)
        member.close()
        best = member.best()
        if ended.outcome is not Outcome.OK:
            self._failed(member, Problem(ended.message, ended.outcome))
        elif best is None:
            self._failed(member, Problem(f"none of its evaluations gave a number for {self.order.goal.metric}"))
        else:
            self.study.finish(number, best[1], steps=member.row["step"], step=best[0])
            self._leave(member, "finished")

    def _progress(self) -> str:
        """One line for all that are trained at once."""
        going = sorted((m for m in self.open.values() if m.row), key=lambda m: m.number)
        row = max((m.row for m in going), key=lambda row: row["time"])
        step, epoch = row["step"], row["epoch"]
        numbers = f"{going[0].number}-{going[-1].number}"
        speed = row["samples_per_second"] * len(going)
        return f"{'train':<{LABEL}}trials {numbers}   epoch {epoch}, step {step:,}   {speed:,.0f} samples/s"

    # --- the end ---

    def _close(self, why: str) -> None:
        """Leave what has not ended as it is: the study still has it to do."""
        for member in self.open.values():
            with contextlib.suppress(Problem, OSError):
                member.run.update(**runs.stop_info(Outcome.PREEMPTED, why))
            member.close()
            self.running.pop(member.number, None)
        self.open.clear()

    def _log(self, trial: Trial) -> str:
        return str(Run(self.folder.path).log_path(0))


class _Listener(Screen):
    """Hears the worker: rows and ends go to the tuner, what a task prints stays in the log."""

    def __init__(self, tuner: Generations) -> None:
        super().__init__(tuner.table.screen.stream, tuner.table.screen.quiet)
        self._tuner = tuner

    def member_row(self, value: dict[str, Any]) -> None:
        self._tuner.heard_row(value["trial"], value["row"])

    def member_end(self, value: dict[str, Any]) -> None:
        self._tuner.heard_end(value["trial"], Ended(Outcome(value["outcome"]), value["message"], value["result"]))

    def notice(self, text: str) -> None:
        stopping = text.startswith("stopping after this step")  # of a Ctrl-C; but there is nothing to save
        self._tuner.table.screen.notice("stopping; this generation will be trained anew" if stopping else text)

    def passed_on(self, text: str) -> None:
        pass

    def busy(self, text: str) -> None:
        pass
