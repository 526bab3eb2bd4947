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
    from drivetrain.tune.folder import Folder, Goal
    from drivetrain.tune.space import Space
    from drivetrain.tune.study import Study
    from drivetrain.tune.table import Table
    from drivetrain.tune.tuner import Order

TEXT = """\
Search a task's settings. Each trial is an ordinary run in runs/NAME/trials; trials that fall behind are stopped
early; runs/NAME/best.yaml is the recipe of the best one. Repeating the command goes on with an unfinished study,
and a higher --trials with a finished one.

  drivetrain tune digits --search learning_rate=1e-4..1e-1,log            between two numbers, by magnitude
  drivetrain tune digits --search 'hidden=64|128|256' epochs=5            among choices; epochs is the same in all
  drivetrain tune my_task.py --trials 100 --metric eval/accuracy          what search = {...} in the task says
  drivetrain tune my_task.py --jobs 4                                     four trials at a time
  drivetrain tune cartpole --trials 50 --population 25                    25 policies trained at once, as one program"""


def run(verb: str, words: list[str]) -> int:
    if {"-h", "--help"} & set(words):
        from drivetrain.cli.train import print_settings

        parser(verb).print_help()
        task = next((w for w in words if not w.startswith("-") and "=" not in w), None)
        if task is not None:
            _print_search(print_settings(task))
        return 0
    args = parser(verb).parse(words)
    if args.run_dir and args.name:
        raise Problem("--run-dir and --name both say where the study goes: give one")

    from drivetrain import runs
    from drivetrain.describe import task_settings, tune_facts
    from drivetrain.launch.machine import detect_machine
    from drivetrain.launch.request import Request
    from drivetrain.recipe import load, split_words
    from drivetrain.tune import folder as folders
    from drivetrain.tune import population
    from drivetrain.tune.space import make_space
    from drivetrain.tune.study import Study, need_optuna
    from drivetrain.tune.table import Table
    from drivetrain.tune.tuner import Order, judged_along_the_way
    from drivetrain.watch.screen import Screen

    need_optuna()
    try:
        recipes = load(args.target, args.settings)
    except Problem as problem:
        ranges = (w for w in args.settings if (".." in w or "|" in w) and str(problem).startswith(f"{w} does not fit"))
        if (word := next(ranges, None)) is None:
            raise
        raise Problem(f"{problem}\nTo search it: --search '{word}'") from None
    if len(recipes) > 1:
        raise Problem(f"{args.target} has stages: tune takes a recipe without")
    recipe = recipes[0]
    space = make_space(
        task_settings(recipe.task), tune_facts(recipe.task).search, args.search, split_words(args.settings), recipe.task.label
    )
    goal = _goal(recipe, args)
    machine = detect_machine(Request(gpus=args.gpus, device=args.device))
    size, why = population.choose(args.population, recipe, space, args.trials, machine.device, bool(args.jobs or args.procs))
    if size and args.prune not in (None, "none"):
        why += f"; --prune {args.prune} stops none of them early"
    args.prune = args.prune or "median"
    if not size and args.prune != "none":
        recipe, judged = judged_along_the_way(recipe)
        why = "; ".join(filter(None, (why, judged)))
    slots = _slots(args, machine, recipe)
    same = folders.identity(recipe, space, goal)
    named = args.run_dir or (str(runs.RUNS / args.name) if args.name else None)
    found = folders.open_folder(named, recipe.task.label, same)
    screen = Screen(quiet=args.quiet or args.json)
    table = Table(screen, space, goal.metric)
    study = Study(found.path, space, goal.direction, args.sampler, args.seed, args.prune, args.trials)
    told = found.before or folders.provenance()
    told |= same | {
        "file": folders.task_word(recipe.task), "value": folders.VALUE, "trials": args.trials, "jobs": len(slots), "population": size,
        "sampler": args.sampler, "seed": args.seed, "prune": args.prune,
    }  # fmt: skip
    if len(study.tried()) >= args.trials and not study.unfinished():
        found.write(**told | {"status": "finished", "trials": len(study.tried())})
        screen.line("study", f"{_shown(found)} is finished: {len(study.tried())} trials (more: --trials N)")
        return _end(found, study, goal, table, args.json, "finished")
    found.write(**told | {"status": "running"})
    _begin(found, study, recipe, machine, goal, space, args, len(slots), table, size, why)
    status, order = "stopped", Order(recipe, goal, args.trials, slots)
    try:
        if _tune(order, found, study, table, machine, size, args.population == "auto"):
            status = "finished"
    finally:
        found.write(**told | {"status": status})
        _draw(found, study, space, goal)
    return _end(found, study, goal, table, args.json, status)


def _tune(order: Order, found: Folder, study: Study, table: Table, machine: LocalMachine, size: int, by_itself: bool) -> bool:
    """Try until enough were tried: as populations of a size, or (0) as ordinary runs."""
    from drivetrain.launch.ending import record_end
    from drivetrain.launch.opening import OpenedRun, record_start
    from drivetrain.plan.choose import choose
    from drivetrain.tune.population import Generations, NoPopulation, Way
    from drivetrain.tune.tuner import Tuner

    if size:
        way = Way(
            size, machine.gpus[:1],
            plan=lambda recipe: choose(
                recipe.settings, machine.hardware, device=machine.device, world_size=1, local_procs=1, pins=recipe.pins
            ),
            record=lambda recipe, run, plan: record_start(OpenedRun(run), recipe, plan, machine),
            conclude=record_end,
        )  # fmt: skip
        try:
            return Generations(order, found, study, table, way).run()
        except NoPopulation as problem:
            if not by_itself:
                raise
            table.screen.notice(f"trials one by one: {str(problem).splitlines()[0]}")
    return Tuner(order, found, study, table).run()


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
        help="LOW..HIGH, LOW..HIGH,log or 'A|B|C'; without any, what the task itself says",
    )
    parser.add_argument(
        "--metric", metavar="eval/NAME", help="what is optimised (default: what best names, else eval/loss, or eval/return of PPO)"
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
        help="train N trials at once as one program, in generations, none stopped early (policies learned by PPO);"
        " off: one by one; auto, the default: on a GPU, where what is searched allows it",
    )  # fmt: skip
    parser.add_argument("--procs", type=whole_number(1, MAX_PROCS), metavar="N", help="processes of each trial")
    parser.add_argument("--device", choices=["cuda", "cpu", "mps"], help="where to train (default: GPUs if there are any)")
    parser.add_argument("--gpus", metavar="0,1", help="the GPUs to use, shared out among the jobs")
    add_run_folder(parser, "study")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    return parser


def _print_search(task: TaskRef) -> None:
    """What a task searches by itself."""
    from drivetrain.describe import tune_facts

    if own := tune_facts(task).search:
        show("\nsearched, unless --search says what")
        for name, text in own.items():
            show(f"  {name}={text}")


def _goal(recipe: Recipe, args: argparse.Namespace) -> Goal:
    from drivetrain.describe import tune_facts
    from drivetrain.engine.state.best import Best
    from drivetrain.tune.folder import Goal

    if args.metric and "/" in args.metric and not args.metric.startswith("eval/"):
        raise Problem(f"--metric {args.metric}: trials are judged by their evaluations: eval/NAME")
    metric = args.metric.removeprefix("eval/") if args.metric else recipe.settings["best"]
    judged = Best(metric or tune_facts(recipe.task).tune_metric)
    return Goal(f"eval/{judged.name}", args.direction or ("max" if judged.sign > 0 else "min"))


def _slots(args: argparse.Namespace, machine: LocalMachine, recipe: Recipe) -> list[Request]:
    """Returns a request for each of the trials that run at the same time, with its share of the GPUs, or of the cores."""
    from drivetrain.launch.request import Request

    request = Request(device=args.device, procs=args.procs)
    procs, count = args.procs or 1, len(machine.gpus)
    jobs = args.jobs if args.jobs is not None else max(1, count // procs)
    if machine.gpus:
        if jobs * procs > count:
            each = f" of {procs} processes" if procs > 1 else ""
            raise Problem(f"--jobs {jobs}: there are {count} GPUs to use; one trial{each} each at most (or --device cpu)")
        numbers = args.gpus.split(",") if args.gpus else [str(i) for i in range(count)]
        share = count // jobs
        return [replace(request, gpus=",".join(numbers[i * share : (i + 1) * share])) for i in range(jobs)]
    if jobs > 1 and "threads" not in recipe.pins:
        request = replace(request, settings=(f"plan.threads={max(1, machine.hardware.cpu_cores // (jobs * procs))}",))
    return [request] * jobs


# --- what is shown -----------------------------------------------------------------------------


def _shown(found: Folder) -> str:
    return os.path.relpath(found.path)


def _begin(
    found: Folder, study: Study, recipe: Recipe, machine: LocalMachine, goal: Goal, space: Space, args: argparse.Namespace, jobs: int, table: Table,
    population: int, why: str,
) -> None:  # fmt: skip
    from drivetrain import __version__

    screen = table.screen
    if screen.quiet:
        return
    screen.put(f"drivetrain {__version__}   tune {recipe.task.label}   {machine.hardware.sentence()}")
    way = "higher" if goal.direction == "max" else "lower"
    pruning = "no pruning" if args.prune == "none" or population else f"{args.prune} pruning"
    screen.line(
        "study",
        f"{_shown(found)}   {args.trials} trials, {population or jobs} at a time, {args.sampler}, {pruning}; {goal.metric}, {way} is better",
    )
    if why:
        screen.line("", why)
    whose = f"   ({recipe.task.label}'s own; --search replaces it)" if not args.search else ""
    screen.line("search", "   ".join(f"{name} {dimension.text}" for name, dimension in space.items()) + whose)
    for notice in (*recipe.notices, found.why):
        if notice:
            screen.notice(notice)
    if tried := study.tried():
        open_ = sum(t.state == "running" for t in tried)
        how = "begin anew" if population else "go on where they were"
        screen.line("resume", f"{len(tried) - open_} trials are done, {open_} {how}")
    table.head()


def _draw(found: Folder, study: Study, space: Space, goal: Goal) -> None:
    from drivetrain.tune import pictures

    pictures.draw(found.path, study, space, goal)


def _end(found: Folder, study: Study, goal: Goal, table: Table, as_json: bool, status: str) -> int:
    result = _result(found, study, goal, status)
    if as_json:
        print(json.dumps(result))
    else:
        _footer(result, goal, table)
    if status != "finished":
        return Outcome.PREEMPTED.code
    if result["best"] is None:
        raise Problem(f"no trial finished: see {_shown(found)}/trials", Outcome.USER_ERROR)
    return 0


def _result(found: Folder, study: Study, goal: Goal, status: str) -> dict[str, Any]:
    """What --json prints."""
    rows = [
        {"trial": t.number, "state": t.state, "params": t.params, "value": t.value, **t.facts, "run": str(found.run_of(t.number).path)}
        for t in study.tried()
    ]
    best = study.best()
    return {
        "format": 1, "folder": str(found.path), "status": status, "metric": goal.metric, "direction": goal.direction,
        "best": next((row for row in rows if best is not None and row["trial"] == best.number), None),
        "recipe": str(found.path / "best.yaml") if best else None, "trials": rows,
    }  # fmt: skip


def _footer(result: dict[str, Any], goal: Goal, table: Table) -> None:
    from drivetrain.tune.space import short
    from drivetrain.tune.table import figure

    screen, best = table.screen, result["best"]
    states = [row["state"] for row in result["trials"]]
    counts = ", ".join(f"{states.count(s)} {s}" for s in ("finished", "pruned", "failed") if s in states)
    if best is not None:
        params = " ".join(f"{name}={short(value)}" for name, value in best["params"].items())
        screen.line("best", f"trial {best['trial']}: {goal.metric} {figure(goal.metric, best['value'])}   {params}")
    if result["status"] != "finished":
        screen.line("stopped", f"{counts or 'no trial is done'}; go on with the same command")
        return
    screen.line("done", f"{len(states)} trials: {counts}; pictures: history.png, importances.png, slices.png")
    if best is not None:
        screen.line("run", f"{os.path.relpath(best['run'])}   next: drivetrain train {os.path.relpath(result['recipe'])}")
