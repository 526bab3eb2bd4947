"""Trials as populations: a generation of trials is trained as one program in one process, then the sampler proposes the next."""

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
from drivetrain.processes.job import PopulationJob, PopulationMember
from drivetrain.processes.population import PopulationRules, load_rules, programs
from drivetrain.recipe import Recipe
from drivetrain.runs import Lock, Run
from drivetrain.supervise import JobEnd, handling_signals, local_placement, run_workers
from drivetrain.task_ref import BUILT_IN, find_task
from drivetrain.tune.folder import StudyFolder
from drivetrain.tune.space import Space
from drivetrain.tune.study import Proposal, Study
from drivetrain.tune.table import Table
from drivetrain.tune.trial import MAX_RESTARTS, RunningTrial
from drivetrain.tune.tuner import Tuner, TunerSettings
from drivetrain.watch.screen import LABEL_WIDTH, Screen

MAX_DEFAULT_SIZE = 64
"""Trials at once with `--population auto`, at most."""
HOW_TO_AVOID = "--population off trains them one by one"


class NoPopulation(Problem):
    """The worker found that the task cannot be trained as a population."""


# --- whether ------------------------------------------------------------------------------------


def choose_size(requested: str, recipe: Recipe, space: Space, trials: int, device: str, has_slots: bool) -> tuple[int, str]:
    """Returns how many trials are trained at once as one program (0: trials are ordinary runs), and a reason worth printing.

    `has_slots`: the user said with --jobs or --procs how trials share the machine.
    """
    if requested == "off":
        return 0, ""
    if requested == "auto":
        return _default_size(recipe, space, trials, device, has_slots)
    if not requested.isdigit() or int(requested) < 1:
        raise Problem(f"--population {requested}: how many trials at once (such as 25), auto or off")
    rules = _rules(recipe)
    reason = _unsupported_family(recipe) if rules is None else _why_impossible(rules, recipe, space)
    if has_slots and not reason:
        reason = "it is one process, and --jobs and --procs say how many there are: leave them out"
    if reason:
        raise Problem(f"--population {requested}: {reason}; {HOW_TO_AVOID}")
    return int(requested), f"{requested} trials at once as one program, in generations"


def _default_size(recipe: Recipe, space: Space, trials: int, device: str, has_slots: bool) -> tuple[int, str]:
    rules = None if has_slots else _rules(recipe)
    if rules is None:
        return 0, ""
    changing = [name for name in space if name not in rules.VARYING]
    reason = _why_impossible(rules, recipe, space) or (f"{changing[0]} changes the program" if changing else "")
    if device != "cuda":
        reason = "there is no GPU"
    if reason:
        return 0, f"trials one by one: {reason}"
    size = min(MAX_DEFAULT_SIZE, -(-trials // 2))
    return size, f"{size} trials at once as one program, since none of what is searched changes its shape ({HOW_TO_AVOID})"


def _rules(recipe: Recipe) -> PopulationRules | None:
    module = tune_facts(recipe.task).tune_population
    return load_rules(module) if module else None


def _unsupported_family(recipe: Recipe) -> str:
    supported = ", ".join(name for name in BUILT_IN if tune_facts(find_task(name)).tune_population)
    return f"{recipe.task.label} is no task whose trials can be one program ({supported}, and your own tasks of their family)"


def _why_impossible(rules: PopulationRules, recipe: Recipe, space: Space) -> str:
    """Returns why the recipe, or a value that is searched, does not fit a population; empty if all fit."""
    reason = rules.why_impossible(recipe.settings)
    for name, dimension in space.items():
        for value in dimension.choices or (dimension.low, dimension.high):
            reason = reason or rules.why_impossible(recipe.settings | {name: dimension.setting.coerce(value)})
    return reason


# --- the tuner ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PopulationContext:
    """What the tuner of populations needs of the machine and of the run's files."""

    size: int
    """Trials at once."""
    gpus: list[str]
    plan: Callable[[Recipe], Plan]
    record: Callable[[Recipe, Run, Plan], None]
    """Writes run.json, and copies the task's code."""
    conclude: Callable[[Run, Recipe, Plan, JobEnd], None]
    """Writes how the run ended."""


class GenerationMember(RunningTrial):
    """A trial of a generation: its run has the files of any other run, but no process of its own."""

    def __init__(self, proposal: Proposal, run: Run, recipe: Recipe, plan: Plan, best: str) -> None:
        super().__init__(proposal, run, Request(run_dir=str(run.path)), best)
        self.recipe, self.plan = recipe, plan
        self.lock: Lock | None = None

    def open(self, record: Callable[[Recipe, Run, Plan], None]) -> None:
        """Begins its run anew: nothing of an interrupted generation counts."""
        shutil.rmtree(self.run.path, ignore_errors=True)
        self.lock = Lock.acquire(self.run.path)
        record(self.recipe, self.run, self.plan)
        self.run.log_event("started", world_size=1, device=self.plan.device, population=True)

    def close(self) -> None:
        if self.lock is not None:
            self.lock.release()
            self.lock = None


class PopulationTuner(Tuner):
    """Trains one generation of trials after the other."""

    def __init__(self, settings: TunerSettings, folder: StudyFolder, study: Study, table: Table, context: PopulationContext) -> None:
        super().__init__(settings, folder, study, table)
        self.context, self.size = context, context.size
        rules = _rules(settings.recipe)
        self.varying = () if rules is None else rules.VARYING
        self.num_restarts = 0
        self.members: dict[int, GenerationMember] = {}
        """Members of this generation that have not ended, by trial."""
        self.reported: dict[int, int] = {}
        """Evaluations that were reported to the study, by trial."""

    def run(self) -> bool:
        waiting = self.study.unfinished()
        try:
            with handling_signals(self._on_signal):
                while not self.num_signals:
                    missing = self.settings.trials - len(self.study.trials())
                    if not waiting and missing <= 0:
                        break
                    if not waiting:
                        waiting = self._ask(min(self.context.size, missing))
                        continue  # a signal may have come meanwhile
                    generation, waiting = waiting[: self.context.size], waiting[self.context.size :]
                    waiting = self._train(generation) + waiting
        finally:
            self.table.clear()
            self._close("the population was stopped before its end")
        trials = self.study.trials()
        return len(trials) >= self.settings.trials and all(t.state != "running" for t in trials)

    def _train(self, generation: list[Proposal]) -> list[Proposal]:
        """Trains a generation; returns the proposals that are still to be trained."""
        for proposal in generation:
            member = self._member(proposal)
            member.open(self.context.record)
            self.members[member.number] = member
            self.running[member.number] = member, member.request
        plan = next(iter(self.members.values())).plan
        ended = run_workers(self._job(plan), plan, local_placement(1), _WorkerScreen(self), self.context.gpus)
        unfinished = [proposal for proposal in generation if proposal.number in self.members]
        self.num_signals += ended.stopped
        if unfinished and not self.num_signals:
            self._prepare_retry(ended, len(unfinished))
        if unfinished:
            self._close(ended.message or "the population was stopped before its end")
        return [replace(p, reported=self.reported.get(p.number, p.reported)) for p in unfinished]

    def _prepare_retry(self, ended: JobEnd, num_unfinished: int) -> None:
        """Decides, after a generation that did not finish, how it is trained again; raises if it is not."""
        largest = max(map(len, programs(self._job_members(), self.varying, self.size)))
        if ended.outcome is Outcome.OOM and largest > 1:
            self.size = largest // 2
            self.table.screen.line("memory", f"out of memory with {largest} trials at once: {self.size} at once from here on")
        elif ended.outcome in (Outcome.INFRA, Outcome.HANG, Outcome.PREEMPTED) and self.num_restarts < MAX_RESTARTS:
            self.num_restarts += 1
            message = ended.message or "the worker was stopped"
            self.table.screen.line("again", f"{message}: its {num_unfinished} trials are trained anew")
        else:
            self._give_up(ended)

    def _give_up(self, ended: JobEnd) -> None:
        if ended.message.startswith("best="):
            metric = self.settings.goal.metric
            raise Problem(f"{metric} cannot be optimised ({ended.message}): choose another with --metric", ended.outcome)
        if ended.outcome in (Outcome.USAGE, Outcome.USER_ERROR):
            for member in self.members.values():  # so that ordinary runs can begin in these folders
                member.close()
                shutil.rmtree(member.run.path, ignore_errors=True)
            self.members.clear()
            raise NoPopulation(f"these trials cannot be a population: {ended.message}\n{HOW_TO_AVOID}", ended.outcome)
        raise Problem(f"the population failed: {ended.message}", ended.outcome)

    def _member(self, proposal: Proposal) -> GenerationMember:
        recipe, chosen = self.settings.recipe, proposal.params | {"best": self.settings.goal.best}
        own = replace(
            recipe, settings=recipe.settings | chosen, origin=recipe.origin | dict.fromkeys(chosen, "command line"), name=None, notices=()
        )
        return GenerationMember(proposal, self.folder.run_of(proposal.number), own, self.context.plan(own), self.settings.goal.best)

    def _job(self, plan: Plan) -> PopulationJob:
        run, task = str(self.folder.path.resolve()), self.settings.recipe.task
        return PopulationJob(run=run, task=task, plan=plan, folder=".", members=self._job_members(), size=self.size)

    def _job_members(self) -> list[PopulationMember]:
        return [PopulationMember(m.number, str(m.run.path.resolve()), m.recipe.settings) for m in self.members.values()]

    # --- what the worker reports ---

    def on_row(self, number: int, row: dict[str, Any]) -> None:
        member = self.members[number]
        member.row = row
        value = row[f"eval/{member.name}"]
        if math.isfinite(value):
            member.evaluations[row["step"]] = value
            if len(member.evaluations) > member.reported:
                member.reported = self.reported[number] = len(member.evaluations)
                self.study.report(number, member.reported, value)
        self.table.show([self._progress()])

    def on_end(self, number: int, ended: JobEnd) -> None:
        member = self.members.pop(number)
        self.context.conclude(member.run, member.recipe, member.plan, ended)
        member.close()
        best = member.best()
        if ended.outcome is not Outcome.OK:
            self._fail(member, Problem(ended.message, ended.outcome))
        elif best is None:
            self._fail(member, Problem(f"none of its evaluations gave a number for {self.settings.goal.metric}"))
        else:
            self.study.finish(number, best[1], steps=member.row["step"], step=best[0])
            self._remove(member, "finished")

    def _progress(self) -> str:
        """Returns one line about all trials that are trained at once."""
        training = sorted((m for m in self.members.values() if m.row), key=lambda m: m.number)
        row = max((m.row for m in training), key=lambda row: row["time"])
        step, epoch = row["step"], row["epoch"]
        numbers = f"{training[0].number}-{training[-1].number}"
        speed = row["samples_per_second"] * len(training)
        return f"{'train':<{LABEL_WIDTH}}trials {numbers}   epoch {epoch}, step {step:,}   {speed:,.0f} samples/s"

    # --- the end ---

    def _close(self, reason: str) -> None:
        """Closes the members that have not ended; in the study they stay unfinished."""
        for member in self.members.values():
            with contextlib.suppress(Problem, OSError):
                member.run.update(**runs.stop_info(Outcome.PREEMPTED, reason))
            member.close()
            self.running.pop(member.number, None)
        self.members.clear()

    def _log(self, trial: RunningTrial) -> str:
        return str(Run(self.folder.path).log_path(0))


class _WorkerScreen(Screen):
    """Receives what the worker reports: rows and ends go to the tuner, what a task prints stays in the log."""

    def __init__(self, tuner: PopulationTuner) -> None:
        super().__init__(tuner.table.screen.stream, tuner.table.screen.quiet)
        self._tuner = tuner

    def member_row(self, value: dict[str, Any]) -> None:
        self._tuner.on_row(value["trial"], value["row"])

    def member_end(self, value: dict[str, Any]) -> None:
        self._tuner.on_end(value["trial"], JobEnd(Outcome(value["outcome"]), value["message"], value["result"]))

    def notice(self, text: str) -> None:
        is_stopping = text.startswith("stopping after this step")  # after a Ctrl-C; but a population has nothing to save
        self._tuner.table.screen.notice("stopping; this generation will be trained anew" if is_stopping else text)

    def worker_output(self, text: str) -> None:
        pass

    def busy(self, text: str) -> None:
        pass
