"""`train` and `resume`."""

from __future__ import annotations

import os
import shutil
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.cli.flags import Parser, add_common, add_looks, add_placement, add_run_folder, add_survival
from drivetrain.describe import task_settings
from drivetrain.outcomes import Outcome
from drivetrain.recipe import Recipe, is_recipe_file, load, read_file
from drivetrain.settings import Setting
from drivetrain.task_ref import BUILT_IN, TaskRef, find_task
from drivetrain.terminal import show

if TYPE_CHECKING:
    from drivetrain.launch.start import Request
    from drivetrain.watch.screen import Screen

TRAIN = f"""\
Train a task. TASK is a built-in ({", ".join(BUILT_IN)}), your own file.py (file.py:Class where it
has several), or a recipe.yaml. Settings follow as key=value; plan.KEY=VALUE pins a choice of the plan.
Repeating the command on an unfinished run goes on with it; Ctrl-C leaves a run that can go on."""

RESUME = """\
Go on with a run where its last good checkpoint is: with the code and settings it began with, on as
many processes as you ask for now. epochs, steps, log_every, eval_every, save_every, keep, best,
patience and plan.* may change."""


def _parser(verb: str) -> Parser:
    text = TRAIN if verb == "train" else RESUME
    parser = Parser(f"drivetrain {verb}", text)
    target = "TASK" if verb == "train" else "RUN"
    parser.add_argument("target", metavar=target, help="what to train" if verb == "train" else "a run's name or folder")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings, such as epochs=5")
    add_placement(parser)
    add_survival(parser)
    add_looks(parser)
    parser.add_argument(
        "--planner", choices=["auto", "table", "off"], default="auto",
        help="who plans: auto predicts and measures (on a GPU), table is guide 004's, off takes each process's share at once",
    )  # fmt: skip
    if verb == "train":
        parser.add_argument(
            "--plan", metavar="FILE", help="a saved plan (drivetrain plan --json, a run.json), accelerate's YAML or DeepSpeed's JSON"
        )
        add_run_folder(parser, "run")
        parser.add_argument("--dry-run", action="store_true", help="show every setting with its origin and the plan, and stop")
        parser.add_argument(
            "--smoke", action="store_true", help="a few steps on a few samples through train, save, resume and eval; nothing is kept"
        )
    add_common(parser)
    return parser


def run(verb: str, words: list[str]) -> int:
    parser = _parser(verb)
    if verb == "train" and {"-h", "--help"} & set(words):
        task = next((w for w in words if not w.startswith("-") and "=" not in w), None)
        parser.print_help()
        if task is not None:
            print_settings(task)
        return 0
    args = parser.parse(words)

    from drivetrain.launch import foreign, plan_file
    from drivetrain.launch import start as launch
    from drivetrain.supervise import Policy
    from drivetrain.watch.screen import Screen

    request = launch.Request(
        args.procs, args.nodes[1], args.nodes[0], args.rendezvous, args.node_rank, args.gpus, args.device,
        getattr(args, "run_dir", None), getattr(args, "name", None), args.verbose, args.planner,
        policy=Policy(args.restarts, args.hang_after), end=None if args.time_limit is None else time.time() + args.time_limit,
        looks={"find_nan": args.find_nan, "profile": args.profile, "check_collectives": args.check_collectives},
    )  # fmt: skip
    screen = Screen(quiet=args.quiet)
    started = foreign.launcher(os.environ)
    if verb == "resume":
        from drivetrain import runs

        found = runs.find(args.target)
        recipe = launch.recipe_of_run(found, args.settings)
        request = replace(request, run_dir=str(found.path))
        return _resume(recipe, request, screen, started)
    recipes = load(args.target, args.settings)
    recipes = [foreign.accelerate_choices(r, os.environ, started) for r in recipes]
    if args.plan:
        recipes, request = plan_file.apply(args.plan, recipes, request, screen)
    if args.dry_run:
        for recipe in recipes:
            dry_run(recipe, of_stage(recipe, recipes, request))
        return 0
    if args.smoke:
        return smoke(recipes[0], request, screen)
    return train_stages(recipes, request, screen, started)


def train_stages(recipes: list[Recipe], request: Request, screen: Screen, started: str | None) -> int:
    """One run after another, each from the weights of the one before; finished ones are not run again."""
    from drivetrain import runs
    from drivetrain.launch import ending, foreign
    from drivetrain.launch import start as launch

    before: runs.Run | None = None
    for recipe in recipes:
        if before is not None and recipe.settings["start"] is None:
            recipe = replace(
                recipe, settings=recipe.settings | {"start": str(before.path.resolve())},
                origin=recipe.origin | {"start": "the stage before"},
            )  # fmt: skip
        where = of_stage(recipe, recipes, request)
        train = launch.train_recipe if started is None else lambda r, q, s: foreign.train(r, q, s, str(started))
        before, ended = train(recipe, where, screen)
        ending.raise_failure(ended, before)
        if ended.outcome is not Outcome.OK:
            return ending.exit_code(ended)
    return 0


def of_stage(recipe: Recipe, recipes: list[Recipe], request: Request) -> Request:
    """Returns the request for one stage of several: its folder lies in the one that was asked for."""
    from drivetrain import runs

    if len(recipes) == 1 or not recipe.name or not (request.name or request.run_dir):
        return request
    base = Path(request.run_dir) if request.run_dir else runs.RUNS / str(request.name)
    return replace(request, name=None, run_dir=str(base / recipe.name.rpartition("/")[2]))


def _resume(recipe: Recipe, request: Request, screen: Screen, started: str | None) -> int:
    from drivetrain.launch import ending, foreign
    from drivetrain.launch import start as launch

    if started is not None:
        found, ended = foreign.train(recipe, request, screen, started)
    else:
        found, ended = launch.resume_run(recipe, request, screen)
    ending.raise_failure(ended, found)
    return ending.exit_code(ended)


def dry_run(recipe: Recipe, request: Request) -> None:
    from drivetrain.launch import start as launch
    from drivetrain.supervise import Place

    machine = launch.look_at_machine(request)
    place = Place(0, machine.procs, machine.procs * request.nodes, ("", 0))
    plan = launch.make_plan(recipe, machine, place, request.nodes, None, request)
    recipe = launch.with_batch_of(recipe, plan)
    launch.check_request(recipe, request)
    if recipe.settings["start"] is not None:
        launch.check_start(recipe.settings["start"])
    width = max(map(len, recipe.settings))
    show(f"task      {recipe.task.label} ({recipe.task.class_name})")
    show(f"hardware  {machine.hardware.sentence()}")
    show(f"plan      {plan.sentence()}\n\nsettings")
    for name, value in recipe.settings.items():
        show(f"  {name:<{width}}  {value!s:<14}  {recipe.origin[name]}")
    show("\nplan")
    for name, value in plan.to_json().items():
        if name not in ("reasons", "env") and value not in ({}, [], None):
            show(f"  {name:<{width}}  {value!s:<14}  {plan.reasons.get(name, '')}".rstrip())
    for notice in recipe.notices:
        show(f"\nnote: {notice}")


def smoke(recipe: Recipe, request: Request, screen: Screen) -> int:
    """Everything a run does, in seconds, in a folder that is thrown away."""
    import tempfile

    from drivetrain.launch import ending, opening
    from drivetrain.launch import start as launch
    from drivetrain.processes.worker import SMOKE_BATCH, SMOKE_STEPS
    from drivetrain.supervise import local_place, run_workers

    machine = launch.look_at_machine(request)
    request = replace(request, planner="off")  # a few samples need no plan
    whole_plan = launch.make_plan(recipe, machine, local_place(machine.procs), 1, None, request)
    whole = {"global_batch": recipe.settings["global_batch"], "plan": whole_plan.to_json()}
    batch = min(SMOKE_BATCH, recipe.settings["global_batch"])
    few = {"global_batch": batch, "steps": SMOKE_STEPS, "log_every": 1, "eval_every": SMOKE_STEPS, "save_every": SMOKE_STEPS // 2}
    recipe = replace(recipe, settings=recipe.settings | few)
    folder = tempfile.mkdtemp(prefix="drivetrain-smoke-")
    try:
        opened = opening.open_run(recipe, replace(request, name=None, run_dir=str(Path(folder) / "smoke")))
        place = local_place(machine.procs)
        plan = launch.make_plan(recipe, machine, place, 1, None, request)
        launch.header(recipe, machine, plan, screen)
        launch.record(recipe, opened, plan, machine)
        job = launch.make_job(recipe, opened.run, plan, "smoke") | {"limit": SMOKE_STEPS * batch, "whole": whole}
        ended = run_workers(job, plan, place, screen, machine.gpus, request.verbose)
        ending.raise_failure(ended, opened.run)
        if ended.outcome is Outcome.OK:
            screen.line("smoke", "train, save, resume and eval work; nothing was kept")
        return ending.exit_code(ended)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- help --------------------------------------------------------------------------------------


def print_settings(text: str) -> TaskRef:
    """The settings of a task, its own before those all tasks have; gives the task."""
    task = find_task(read_file(Path(text))["task"], Path(text).parent) if is_recipe_file(text) else find_task(text)
    doc, settings = task.declaration().doc, task_settings(task)
    show(f"\n{task.class_name}: {doc.splitlines()[0] if doc else ''}".rstrip())
    own = [s for s in settings.values() if s.owner != "Task"]
    shared = [s for s in settings.values() if s.owner == "Task"]
    for title, rows in ((f"settings of {task.class_name}", own), ("settings of every task", shared)):
        if rows:
            show(f"\n{title}")
            for setting in rows:
                show(_setting_line(setting))
    return task


def _setting_line(setting: Setting) -> str:
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    value = "(required)" if setting.required else f"={setting.default}"
    head = f"  {setting.name}{value}"
    kind = setting.type_text.replace("Annotated[", "").replace("]", "").replace("Literal[", "")
    text = f"{setting.doc.replace(chr(10), ' ')} [{kind}]".strip()
    return head.ljust(32) + textwrap.fill(text, max(40, width), initial_indent=" " * 32, subsequent_indent=" " * 32).strip()
