"""A search of a task's settings: opens a study, trains until there are enough trials, and prints them as a table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from drivetrain import __version__, runs
from drivetrain.describe import task_settings, tune_facts
from drivetrain.engine.state.best import Best
from drivetrain.launch.ending import record_end
from drivetrain.launch.machine import LocalMachine, detect_machine
from drivetrain.launch.opening import OpenedRun, record_start
from drivetrain.launch.request import Request
from drivetrain.outcomes import Problem
from drivetrain.plan.choose import choose
from drivetrain.recipe import Recipe, split_words
from drivetrain.targets.config import find_target
from drivetrain.targets.consent import Agree
from drivetrain.tune import folder as folders
from drivetrain.tune import pictures, population
from drivetrain.tune.folder import Goal, StudyFolder
from drivetrain.tune.population import NoPopulation, PopulationContext, PopulationTuner
from drivetrain.tune.space import make_space, short
from drivetrain.tune.study import Study, need_optuna
from drivetrain.tune.table import Table, format_value
from drivetrain.tune.trial_on_target import JOBS, consent_to_trials, start_on_target, trial_maker
from drivetrain.tune.tuner import Tuner, TunerSettings, with_early_evaluations
from drivetrain.watch.screen import Screen


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """The arguments of `drivetrain tune`. Fields without a docstring are described by the flag's help."""

    trials: int = 50
    search: Sequence[str] = ()
    """KEY=RANGE words; empty: the task's own search space."""
    words: Sequence[str] = ()
    """key=value words: settings that are the same in all trials."""
    metric: str | None = None
    direction: str | None = None
    prune: str | None = None
    sampler: str = "tpe"
    seed: int = 0
    jobs: int | None = None
    population: str = "auto"
    procs: int | None = None
    device: str | None = None
    gpus: str | None = None
    name: str | None = None
    run_dir: str | None = None
    on: str | None = None
    quiet: bool = False


class Search:
    """A search of the settings of a recipe's task."""

    def __init__(self, recipe: Recipe, request: SearchRequest, agree: Agree) -> None:
        """`agree` is asked before a target starts machines that cost money."""
        need_optuna()
        if request.run_dir and request.name:
            raise Problem("--run-dir and --name both set the study's folder: give one of them")
        self.request, self.agree = request, agree
        self.space = make_space(
            task_settings(recipe.task),
            tune_facts(recipe.task).search,
            list(request.search),
            split_words(list(request.words)),
            recipe.task.label,
        )
        self.goal = _goal(recipe, request)
        self.target = find_target(request.on) if request.on else None
        self.machine = detect_machine(Request(gpus=request.gpus, device=request.device if self.target is None else None))
        has_slots = bool(request.jobs or request.procs or self.target)
        self.size, reason = population.choose_size(request.population, recipe, self.space, request.trials, self.machine.device, has_slots)
        """The number of trials in a population; 0: trials are ordinary runs."""
        if self.size and request.prune not in (None, "none"):
            reason += f"; --prune {request.prune} has no effect on them"
        self.prune = request.prune or "median"
        if not self.size and self.prune != "none":
            recipe, notice = with_early_evaluations(recipe)
            reason = "; ".join(filter(None, (reason, notice)))
        self.recipe, self.reason = recipe, reason
        if self.target is None:
            self.slots = requests_of_slots(request, self.machine, recipe)
        else:
            self.slots = [Request(device=request.device, procs=request.procs)] * (request.jobs or JOBS.get(self.target.kind, 1))
        self._open()

    def _open(self) -> None:
        """Opens the study's folder, and the study in it."""
        request = self.request
        identity = folders.identity(self.recipe, self.space, self.goal)
        named = request.run_dir or (str(runs.RUNS / request.name) if request.name else None)
        self.folder = folders.open_folder(named, self.recipe.task.label, identity)
        self.table = Table(Screen(quiet=request.quiet), self.space, self.goal.metric)
        self.study = Study(self.folder.path, self.space, self.goal.direction, request.sampler, request.seed, self.prune, request.trials)
        self.facts = (self.folder.earlier or folders.provenance()) | identity | {
            "file": folders.task_word(self.recipe.task), "value": folders.VALUE, "trials": request.trials, "jobs": len(self.slots),
            "population": self.size, "sampler": request.sampler, "seed": request.seed, "prune": self.prune,
        }  # fmt: skip

    def run(self) -> dict[str, Any]:
        """Trains until there are enough trials; returns what `tune --json` prints."""
        trials = self.study.trials()
        if len(trials) >= self.request.trials and not self.study.unfinished():
            self.folder.write_tune_json(**self.facts | {"status": "finished", "trials": len(trials)})
            self.table.screen.line("study", f"{_shown_path(self.folder)} is finished: {len(trials)} trials (more: --trials N)")
            return self._end("finished")
        self.folder.write_tune_json(**self.facts | {"status": "running"})
        self._print_start()
        status = "stopped"
        try:
            if self._train():
                status = "finished"
        finally:
            self.folder.write_tune_json(**self.facts | {"status": status})
            pictures.draw(self.folder.path, self.study, self.space, self.goal)
        return self._end(status)

    def _train(self) -> bool:
        """Trains until there are enough trials, as populations or as ordinary runs; returns False if it was stopped earlier."""
        machine, settings = self.machine, TunerSettings(self.recipe, self.goal, self.request.trials, self.slots)
        if self.target is not None:
            consent = consent_to_trials(self.target, self.recipe, self.slots, self.folder.path, self.agree)
            settings = replace(settings, make_trial=trial_maker(self.target, self.recipe, consent), start=start_on_target)
        if self.size:
            context = PopulationContext(
                self.size, machine.gpus[:1],
                plan=lambda recipe: choose(
                    recipe.settings, machine.hardware, device=machine.device, world_size=1, local_procs=1, pins=recipe.pins
                ),
                record=lambda recipe, run, plan: record_start(OpenedRun(run), recipe, plan, machine),
                conclude=record_end,
            )  # fmt: skip
            try:
                return PopulationTuner(settings, self.folder, self.study, self.table, context).run()
            except NoPopulation as problem:
                if self.request.population != "auto":
                    raise
                self.table.screen.notice(f"trials one by one: {str(problem).splitlines()[0]}")
        return Tuner(settings, self.folder, self.study, self.table).run()

    # --- output ---

    def _print_start(self) -> None:
        screen, request = self.table.screen, self.request
        if screen.quiet:
            return
        place = self.machine.hardware.sentence() if self.target is None else f"on {self.target.name}"
        screen.put(f"drivetrain {__version__}   tune {self.recipe.task.label}   {place}")
        better = "higher" if self.goal.direction == "max" else "lower"
        pruning = "no pruning" if self.prune == "none" or self.size else f"{self.prune} pruning"
        at_once = f"{request.trials} trials, {self.size or len(self.slots)} at a time"
        screen.line(
            "study", f"{_shown_path(self.folder)}   {at_once}, {request.sampler}, {pruning}; {self.goal.metric}, {better} is better"
        )
        if self.reason:
            screen.line("", self.reason)
        source = f"   ({self.recipe.task.label}'s own; --search replaces it)" if not request.search else ""
        screen.line("search", "   ".join(f"{name} {dimension.text}" for name, dimension in self.space.items()) + source)
        for notice in (*self.recipe.notices, self.folder.notice):
            if notice:
                screen.notice(notice)
        if trials := self.study.trials():
            num_unfinished = sum(trial.state == "running" for trial in trials)
            action = "begin again" if self.size else "continue from their checkpoints"
            screen.line("resume", f"{len(trials) - num_unfinished} trials are done, {num_unfinished} {action}")
        self.table.print_header()

    def _end(self, status: str) -> dict[str, Any]:
        result = self._result(status)
        _print_result(result, self.goal, self.table)
        return result

    def _result(self, status: str) -> dict[str, Any]:
        folder = self.folder
        rows = [
            {"trial": t.number, "state": t.state, "params": t.params, "value": t.value, **t.facts, "run": str(folder.run_of(t.number).path)}
            for t in self.study.trials()
        ]
        best = self.study.best()
        return {
            "format": 1, "folder": str(folder.path), "status": status, "metric": self.goal.metric, "direction": self.goal.direction,
            "best": next((row for row in rows if best is not None and row["trial"] == best.number), None),
            "recipe": str(folder.path / "best.yaml") if best else None, "trials": rows,
        }  # fmt: skip


def _goal(recipe: Recipe, request: SearchRequest) -> Goal:
    if request.metric and "/" in request.metric and not request.metric.startswith("eval/"):
        raise Problem(f"--metric {request.metric}: trials are judged by their evaluations: eval/NAME")
    metric = request.metric.removeprefix("eval/") if request.metric else recipe.settings["best"] or tune_facts(recipe.task).tune_metric
    best = Best(metric)
    return Goal(f"eval/{best.name}", request.direction or ("max" if best.sign > 0 else "min"))


def requests_of_slots(search: SearchRequest, machine: LocalMachine, recipe: Recipe) -> list[Request]:
    """Returns a request for each of the trials that run at the same time, with its share of the GPUs or of the CPU cores."""
    request = Request(device=search.device, procs=search.procs)
    procs, num_gpus = search.procs or 1, len(machine.gpus)
    jobs = search.jobs if search.jobs is not None else max(1, num_gpus // procs)
    if machine.gpus:
        if jobs * procs > num_gpus:
            each = f" of {procs} processes" if procs > 1 else ""
            raise Problem(f"--jobs {jobs}: there are {num_gpus} GPUs to use; at most one trial{each} each (or --device cpu)")
        numbers = search.gpus.split(",") if search.gpus else [str(i) for i in range(num_gpus)]
        share = num_gpus // jobs
        return [replace(request, gpus=",".join(numbers[i * share : (i + 1) * share])) for i in range(jobs)]
    if jobs > 1 and "threads" not in recipe.pins:
        request = replace(request, settings=(f"plan.threads={max(1, machine.hardware.cpu_cores // (jobs * procs))}",))
    return [request] * jobs


def _shown_path(folder: StudyFolder) -> str:
    return os.path.relpath(folder.path)


def _print_result(result: dict[str, Any], goal: Goal, table: Table) -> None:
    screen, best = table.screen, result["best"]
    states = [row["state"] for row in result["trials"]]
    counts = ", ".join(f"{states.count(s)} {s}" for s in ("finished", "pruned", "failed") if s in states)
    if best is not None:
        params = " ".join(f"{name}={short(value)}" for name, value in best["params"].items())
        screen.line("best", f"trial {best['trial']}: {goal.metric} {format_value(goal.metric, best['value'])}   {params}")
    if result["status"] != "finished":
        screen.line("stopped", f"{counts or 'no trial is done'}; continue with the same command")
        return
    screen.line("done", f"{len(states)} trials: {counts}; pictures: history.png, importances.png, slices.png")
    if best is not None:
        screen.line("run", f"{os.path.relpath(best['run'])}   next: drivetrain train {os.path.relpath(result['recipe'])}")
