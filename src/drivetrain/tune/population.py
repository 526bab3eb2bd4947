"""Trains trials as populations: one process trains a generation of trials at once, then the sampler proposes the next generation."""

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
"""With `--population auto`, at most this many trials are trained at once."""
HOW_TO_AVOID = "--population off trains them one by one"


class NoPopulation(Problem):
    """The worker found that the task cannot be trained as a population."""


# --- whether to train populations, and of which size --------------------------------------------


def choose_size(requested: str, recipe: Recipe, space: Space, trials: int, device: str, has_slots: bool) -> tuple[int, str]:
    """Returns how many trials are trained at once (0: trials are ordinary runs), and a message for the user.

    `has_slots`: whether the user set --jobs or --procs.
    """
    if requested == "off":
        return 0, ""
    if requested == "auto":
        return _default_size(recipe, space, trials, device, has_slots)
    if not requested.isdigit() or int(requested) < 1:
        raise Problem(f"--population {requested}: write the number of trials at once (such as 25), auto or off")
    rules = _rules(recipe)
    reason = _unsupported_family(recipe) if rules is None else _why_impossible(rules, recipe, space)
    if has_slots and not reason:
        reason = "it uses one process: leave out --jobs and --procs"
    if reason:
        raise Problem(f"--population {requested}: {reason}; {HOW_TO_AVOID}")
    return int(requested), f"{requested} trials at once as one program, in generations"


def _default_size(recipe: Recipe, space: Space, trials: int, device: str, has_slots: bool) -> tuple[int, str]:
    rules = None if has_slots else _rules(recipe)
    if rules is None:
        return 0, ""
    reason = _why_impossible(rules, recipe, space)
    fixed_names = [name for name in space if name not in rules.VARYING]
    if fixed_names and not reason:
        reason = f"trials with another {fixed_names[0]} cannot be trained at once"
    if device != "cuda":
        reason = "there is no GPU"
    if reason:
        return 0, f"trials one by one: {reason}"
    size = min(MAX_DEFAULT_SIZE, math.ceil(trials / 2))
    return size, f"{size} trials at once as one program, because no searched setting changes its shape ({HOW_TO_AVOID})"


def _rules(recipe: Recipe) -> PopulationRules | None:
    module = tune_facts(recipe.task).tune_population
    return load_rules(module) if module else None


def _unsupported_family(recipe: Recipe) -> str:
    supported = ", ".join(name for name in BUILT_IN if tune_facts(find_task(name)).tune_population)
    return f"{recipe.task.label} is no task whose trials can be one program ({supported}, and your own tasks of their family)"


def _why_impossible(rules: PopulationRules, recipe: Recipe, space: Space) -> str:
    """Returns why the recipe, or a searched value, is impossible in a population; "" if all are possible."""
    reason = rules.why_impossible(recipe.settings)
    for name, dimension in space.items():
        for value in dimension.choices or (dimension.low, dimension.high):
            reason = reason or rules.why_impossible(recipe.settings | {name: dimension.setting.coerce(value)})
    return reason


# --- the tuner ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PopulationContext:
    """What PopulationTuner needs to know about the machine, and how it writes a run's files."""

    size: int
    """The number of trials that are trained at once."""
    gpus: list[str]
    plan: Callable[[Recipe], Plan]
    record: Callable[[Recipe, Run, Plan], None]
    """Writes run.json, and copies the task's code."""
    conclude: Callable[[Run, Recipe, Plan, JobEnd], None]
    """Writes how the run ended."""


class GenerationMember(RunningTrial):
    """A trial of a generation. Its run has the usual files, but no process of its own."""

    def __init__(self, proposal: Proposal, run: Run, recipe: Recipe, plan: Plan, best: str) -> None:
        super().__init__(proposal, run, Request(run_dir=str(run.path)), best)
        self.recipe, self.plan = recipe, plan
        self.lock: Lock | None = None

    def open(self, record: Callable[[Recipe, Run, Plan], None]) -> None:
        """Creates the trial's run; deletes what an interrupted generation left in its directory."""
        shutil.rmtree(self.run.path, ignore_errors=True)
        self.lock = Lock.acquire(self.run.path)
        record(self.recipe, self.run, self.plan)
        self.run.log_event("started", world_size=1, device=self.plan.device, population=True)

    def close(self) -> None:
        if self.lock is not None:
            self.lock.release()
            self.lock = None


class PopulationTuner(Tuner):
    """Trains generations of trials, one after the other."""

    def __init__(self, settings: TunerSettings, folder: StudyFolder, study: Study, table: Table, context: PopulationContext) -> None:
        super().__init__(settings, folder, study, table)
        self.context, self.size = context, context.size
        rules = _rules(settings.recipe)
        self.varying = () if rules is None else rules.VARYING
        self.num_restarts = 0
        self.members: dict[int, GenerationMember] = {}
        """Trial -> the member of this generation; without those that have ended."""
        self.reported: dict[int, int] = {}
        """Trial -> the number of evaluations that were reported to the study."""

    def run(self) -> bool:
        waiting = self.study.unfinished()
        try:
            with handling_signals(self._on_signal):
                while not self.num_signals:
                    num_missing = self.settings.trials - len(self.study.trials())
                    if not waiting and num_missing <= 0:
                        break
                    if not waiting:
                        waiting = self._ask(min(self.context.size, num_missing))
                        continue  # checks first whether a signal came
                    generation, waiting = waiting[: self.context.size], waiting[self.context.size :]
                    waiting = self._train(generation) + waiting
        finally:
            self.table.clear()
            self._close("the population was stopped before its end")
        trials = self.study.trials()
        return len(trials) >= self.settings.trials and all(trial.state != "running" for trial in trials)

    def _train(self, generation: list[Proposal]) -> list[Proposal]:
        """Trains a generation; returns the proposals that did not finish."""
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
        return [replace(proposal, reported=self.reported.get(proposal.number, proposal.reported)) for proposal in unfinished]

    def _prepare_retry(self, ended: JobEnd, num_unfinished: int) -> None:
        """Decides how a generation that did not finish is trained again; raises Problem if it cannot be."""
        largest = max(map(len, programs(self._job_members(), self.varying, self.size)))
        if ended.outcome is Outcome.OOM and largest > 1:
            self.size = largest // 2
            self.table.screen.line("memory", f"out of memory with {largest} trials at once: {self.size} at once from now on")
        elif ended.outcome in (Outcome.INFRA, Outcome.HANG, Outcome.PREEMPTED) and self.num_restarts < MAX_RESTARTS:
            self.num_restarts += 1
            message = ended.message or "the worker was stopped"
            self.table.screen.line("again", f"{message}: its {num_unfinished} trials are trained again")
        else:
            self._give_up(ended)

    def _give_up(self, ended: JobEnd) -> None:
        if ended.message.startswith("best="):
            metric = self.settings.goal.metric
            raise Problem(f"{metric} cannot be optimised ({ended.message}): choose another with --metric", ended.outcome)
        if ended.outcome in (Outcome.USAGE, Outcome.USER_ERROR):
            for member in self.members.values():  # so that ordinary runs can use these folders
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
        """Closes the members that have not ended. In the study they stay unfinished, so a later command trains them."""
        for member in self.members.values():
            with contextlib.suppress(Problem, OSError):
                member.run.update(**runs.stop_info(Outcome.PREEMPTED, reason))
            member.close()
            self.running.pop(member.number, None)
        self.members.clear()

    def _log(self, trial: RunningTrial) -> str:
        return str(Run(self.folder.path).log_path(0))


class _WorkerScreen(Screen):
    """Gives the rows and ends that the worker reports to the tuner. The task's own output goes only to the log."""

    def __init__(self, tuner: PopulationTuner) -> None:
        super().__init__(tuner.table.screen.stream, tuner.table.screen.quiet)
        self._tuner = tuner

    def member_row(self, value: dict[str, Any]) -> None:
        self._tuner.on_row(value["trial"], value["row"])

    def member_end(self, value: dict[str, Any]) -> None:
        self._tuner.on_end(value["trial"], JobEnd(Outcome(value["outcome"]), value["message"], value["result"]))

    def notice(self, text: str) -> None:
        is_stopping = text.startswith(
            "stopping after this step"
        )  # the supervisor's message after Ctrl-C is wrong here: a population saves nothing
        self._tuner.table.screen.notice("stopping; the next start trains this generation again" if is_stopping else text)

    def worker_output(self, text: str) -> None:
        pass

    def busy(self, text: str) -> None:
        pass
