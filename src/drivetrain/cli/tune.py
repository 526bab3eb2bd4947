"""`tune`: search a task's settings."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from drivetrain.cli.flags import MAX_PROCS, Parser, add_run_folder, whole_number
from drivetrain.outcomes import Outcome, Problem
from drivetrain.terminal import show

if TYPE_CHECKING:
    from drivetrain.launch.machine import LocalMachine
    from drivetrain.launch.request import Request
    from drivetrain.recipe import Recipe
    from drivetrain.task_ref import TaskRef
    from drivetrain.tune.folder import Goal, StudyFolder
    from drivetrain.tune.table import Table

TEXT = """\
Search a task's settings. Each trial is an ordinary run in runs/NAME/trials; trials that fall behind are stopped
early; runs/NAME/best.yaml is the recipe of the best one. The same command continues an unfinished study,
and with a higher --trials a finished one.

  drivetrain tune digits --search learning_rate=1e-4..1e-1,log            between two numbers, by magnitude
  drivetrain tune digits --search 'hidden=64|128|256' epochs=5            among choices; epochs is the same in all
  drivetrain tune my_task.py --trials 100 --metric eval/accuracy          what search = {...} in the task says
  drivetrain tune my_task.py --jobs 4                                     four trials at a time
  drivetrain tune cartpole --trials 50 --population 25                    25 policies trained at once, as one program"""


def run(verb: str, words: list[str]) -> int:
    if {"-h", "--help"} & set(words):
        _print_help(verb, words)
        return 0
    args = parser(verb).parse(words)
    if args.run_dir and args.name:
        raise Problem("--run-dir and --name both say where the study goes: give one")

    from drivetrain.tune.study import need_optuna

    need_optuna()
    return _Search(args).run()


class _Search:
    """A search as the command line describes it."""

    def __init__(self, args: argparse.Namespace) -> None:
        from drivetrain.describe import task_settings, tune_facts
        from drivetrain.launch.machine import detect_machine
        from drivetrain.launch.request import Request
        from drivetrain.recipe import split_words
        from drivetrain.tune import population
        from drivetrain.tune.space import make_space
        from drivetrain.tune.tuner import with_early_evaluations

        self.args, recipe = args, _load_recipe(args)
        self.space = make_space(
            task_settings(recipe.task), tune_facts(recipe.task).search, args.search, split_words(args.settings), recipe.task.label
        )
        self.goal = _goal(recipe, args)
        self.machine = detect_machine(Request(gpus=args.gpus, device=args.device))
        has_slots = bool(args.jobs or args.procs)
        self.size, reason = population.choose_size(args.population, recipe, self.space, args.trials, self.machine.device, has_slots)
        """Trials of a population; 0: trials are ordinary runs."""
        if self.size and args.prune not in (None, "none"):
            reason += f"; --prune {args.prune} stops none of them early"
        self.prune = args.prune or "median"
        if not self.size and self.prune != "none":
            recipe, notice = with_early_evaluations(recipe)
            reason = "; ".join(filter(None, (reason, notice)))
        self.recipe, self.reason = recipe, reason
        self.slots = _slots(args, self.machine, recipe)
        self._open()

    def _open(self) -> None:
        """Opens the study's folder, and the study in it."""
        from drivetrain import runs
        from drivetrain.tune import folder as folders
        from drivetrain.tune.study import Study
        from drivetrain.tune.table import Table
        from drivetrain.watch.screen import Screen

        args = self.args
        identity = folders.identity(self.recipe, self.space, self.goal)
        named = args.run_dir or (str(runs.RUNS / args.name) if args.name else None)
        self.folder = folders.open_folder(named, self.recipe.task.label, identity)
        self.table = Table(Screen(quiet=args.quiet or args.json), self.space, self.goal.metric)
        self.study = Study(self.folder.path, self.space, self.goal.direction, args.sampler, args.seed, self.prune, args.trials)
        self.facts = (self.folder.earlier or folders.provenance()) | identity | {
            "file": folders.task_word(self.recipe.task), "value": folders.VALUE, "trials": args.trials, "jobs": len(self.slots),
            "population": self.size, "sampler": args.sampler, "seed": args.seed, "prune": self.prune,
        }  # fmt: skip

    def run(self) -> int:
        trials = self.study.trials()
        if len(trials) >= self.args.trials and not self.study.unfinished():
            self.folder.write(**self.facts | {"status": "finished", "trials": len(trials)})
            self.table.screen.line("study", f"{_shown(self.folder)} is finished: {len(trials)} trials (more: --trials N)")
            return self._end("finished")
        self.folder.write(**self.facts | {"status": "running"})
        self._print_start()
        status = "stopped"
        try:
            if self._train():
                status = "finished"
        finally:
            from drivetrain.tune import pictures

            self.folder.write(**self.facts | {"status": status})
            pictures.draw(self.folder.path, self.study, self.space, self.goal)
        return self._end(status)

    def _train(self) -> bool:
        """Trains until there are enough trials, as populations or as ordinary runs; returns False if it was stopped before."""
        from drivetrain.launch.ending import record_end
        from drivetrain.launch.opening import OpenedRun, record_start
        from drivetrain.plan.choose import choose
        from drivetrain.tune.population import NoPopulation, PopulationContext, PopulationTuner
        from drivetrain.tune.tuner import Tuner, TunerSettings

        machine, settings = self.machine, TunerSettings(self.recipe, self.goal, self.args.trials, self.slots)
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
                if self.args.population != "auto":
                    raise
                self.table.screen.notice(f"trials one by one: {str(problem).splitlines()[0]}")
        return Tuner(settings, self.folder, self.study, self.table).run()

    # --- what is shown ---

    def _print_start(self) -> None:
        from drivetrain import __version__

        screen, args = self.table.screen, self.args
        if screen.quiet:
            return
        screen.put(f"drivetrain {__version__}   tune {self.recipe.task.label}   {self.machine.hardware.sentence()}")
        better = "higher" if self.goal.direction == "max" else "lower"
        pruning = "no pruning" if self.prune == "none" or self.size else f"{self.prune} pruning"
        at_once = f"{args.trials} trials, {self.size or len(self.slots)} at a time"
        screen.line("study", f"{_shown(self.folder)}   {at_once}, {args.sampler}, {pruning}; {self.goal.metric}, {better} is better")
        if self.reason:
            screen.line("", self.reason)
        source = f"   ({self.recipe.task.label}'s own; --search replaces it)" if not args.search else ""
        screen.line("search", "   ".join(f"{name} {dimension.text}" for name, dimension in self.space.items()) + source)
        for notice in (*self.recipe.notices, self.folder.notice):
            if notice:
                screen.notice(notice)
        if trials := self.study.trials():
            num_open = sum(t.state == "running" for t in trials)
            how = "begin anew" if self.size else "continue where they were"
            screen.line("resume", f"{len(trials) - num_open} trials are done, {num_open} {how}")
        self.table.print_header()

    def _end(self, status: str) -> int:
        """Prints the result; returns the exit code."""
        result = self._result(status)
        if self.args.json:
            print(json.dumps(result))
        else:
            _print_result(result, self.goal, self.table)
        if status != "finished":
            return Outcome.PREEMPTED.code
        if result["best"] is None:
            raise Problem(f"no trial finished: see {_shown(self.folder)}/trials", Outcome.USER_ERROR)
        return 0

    def _result(self, status: str) -> dict[str, Any]:
        """Returns what --json prints."""
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


def parser(verb: str) -> Parser:
    parser = Parser("drivetrain tune", TEXT)
    parser.add_argument("target", metavar="TASK", help="as for train")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings that are the same in all trials, such as epochs=5")
    parser.add_argument("--trials", type=whole_number(1), default=50, metavar="N", help="trials in all (default 50)")
    parser.add_argument(
        "--search",
        action="append",
        default=[],
        metavar="KEY=RANGE",
        help="LOW..HIGH, LOW..HIGH,log or 'A|B|C'; without any, what the task declares",
    )
    parser.add_argument(
        "--metric",
        metavar="eval/NAME",
        help="what is optimised (default: what best names, else what the task is judged by, as a rule eval/loss)",
    )
    parser.add_argument("--direction", choices=["max", "min"], help="which way (default: losses and errors fall, all else rises)")
    parser.add_argument("--prune", choices=["median", "hyperband", "none"], help="how trials are stopped early (default median)")
    parser.add_argument("--sampler", choices=["tpe", "random"], default="tpe", help="how parameters are proposed")
    parser.add_argument(
        "--seed", type=whole_number(0), default=0, metavar="N", help="of the proposals; with one job, the same trials again"
    )
    parser.add_argument("--jobs", type=whole_number(1, MAX_PROCS), metavar="J", help="trials at a time (default: one a GPU, one on a CPU)")
    parser.add_argument(
        "--population", default="auto", metavar="N",
        help="train N trials at once as one program, in generations, none stopped early (tasks whose policies are small: bandit, cartpole, snake);"
        " off: one by one; auto, the default: on a GPU, where what is searched allows it",
    )  # fmt: skip
    parser.add_argument("--procs", type=whole_number(1, MAX_PROCS), metavar="N", help="processes of each trial")
    parser.add_argument("--device", choices=["cuda", "cpu", "mps"], help="where to train (default: GPUs if there are any)")
    parser.add_argument("--gpus", metavar="0,1", help="the GPUs to use, shared out among the jobs")
    add_run_folder(parser, "study")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    return parser


def _print_help(verb: str, words: list[str]) -> None:
    from drivetrain.cli.train import print_settings

    parser(verb).print_help()
    task = next((w for w in words if not w.startswith("-") and "=" not in w), None)
    if task is not None:
        _print_search(print_settings(task))


def _print_search(task: TaskRef) -> None:
    """Prints what a task declares to be searched."""
    from drivetrain.describe import tune_facts

    if search := tune_facts(task).search:
        show("\nsearched, unless --search says what")
        for name, text in search.items():
            show(f"  {name}={text}")


def _load_recipe(args: argparse.Namespace) -> Recipe:
    from drivetrain.recipe import load

    try:
        recipes = load(args.target, args.settings)
    except Problem as problem:
        ranges = (w for w in args.settings if (".." in w or "|" in w) and str(problem).startswith(f"{w} does not fit"))
        if (word := next(ranges, None)) is None:
            raise
        raise Problem(f"{problem}\nTo search it: --search '{word}'") from None
    if len(recipes) > 1:
        raise Problem(f"{args.target} has stages: tune takes a recipe without")
    return recipes[0]


def _goal(recipe: Recipe, args: argparse.Namespace) -> Goal:
    from drivetrain.describe import tune_facts
    from drivetrain.engine.state.best import Best
    from drivetrain.tune.folder import Goal

    if args.metric and "/" in args.metric and not args.metric.startswith("eval/"):
        raise Problem(f"--metric {args.metric}: trials are judged by their evaluations: eval/NAME")
    metric = args.metric.removeprefix("eval/") if args.metric else recipe.settings["best"] or tune_facts(recipe.task).tune_metric
    best = Best(metric)
    return Goal(f"eval/{best.name}", args.direction or ("max" if best.sign > 0 else "min"))


def _slots(args: argparse.Namespace, machine: LocalMachine, recipe: Recipe) -> list[Request]:
    """Returns a request for each of the trials that run at the same time, with its share of the GPUs, or of the CPU's cores."""
    from drivetrain.launch.request import Request

    request = Request(device=args.device, procs=args.procs)
    procs, num_gpus = args.procs or 1, len(machine.gpus)
    jobs = args.jobs if args.jobs is not None else max(1, num_gpus // procs)
    if machine.gpus:
        if jobs * procs > num_gpus:
            each = f" of {procs} processes" if procs > 1 else ""
            raise Problem(f"--jobs {jobs}: there are {num_gpus} GPUs to use; one trial{each} each at most (or --device cpu)")
        numbers = args.gpus.split(",") if args.gpus else [str(i) for i in range(num_gpus)]
        share = num_gpus // jobs
        return [replace(request, gpus=",".join(numbers[i * share : (i + 1) * share])) for i in range(jobs)]
    if jobs > 1 and "threads" not in recipe.pins:
        request = replace(request, settings=(f"plan.threads={max(1, machine.hardware.cpu_cores // (jobs * procs))}",))
    return [request] * jobs


def _shown(folder: StudyFolder) -> str:
    return os.path.relpath(folder.path)


def _print_result(result: dict[str, Any], goal: Goal, table: Table) -> None:
    from drivetrain.tune.space import short
    from drivetrain.tune.table import format_value

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
