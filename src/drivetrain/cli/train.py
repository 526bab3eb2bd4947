"""`train` and `resume`."""

from __future__ import annotations

import argparse
import os
import shutil
import textwrap
from typing import TYPE_CHECKING, NamedTuple

from drivetrain.buckets.url import is_url
from drivetrain.cli.flags import (
    Parser,
    add_common,
    add_diagnostics,
    add_fault_tolerance,
    add_placement,
    add_run_folder,
    add_target,
    bucket_address,
)
from drivetrain.describe import task_settings
from drivetrain.recipe import Recipe, find_tasks, load
from drivetrain.settings import Setting
from drivetrain.task_ref import BUILT_IN, TaskRef, built_in_recipes
from drivetrain.terminal import show

if TYPE_CHECKING:
    from drivetrain.launch.request import Request
    from drivetrain.launch.watcher import LaunchedWorker
    from drivetrain.watch.screen import Screen

TRAIN = """\
Train a task or a recipe. TASK is a built-in task ({tasks}), your own file.py (file.py:Class where it
has several), or a recipe: {recipes}. Settings follow as key=value; plan.KEY=VALUE pins a choice of the plan.
If the recipe has stages, key=value sets it in each stage that has the setting; STAGE.key=value in one.
Repeating the command on an unfinished run goes on with it; Ctrl-C leaves a run that can go on."""

RESUME = """\
Go on with a run where its last good checkpoint is: with the code and settings it began with, on as
many processes as you ask for now. epochs, steps, log_every, eval_every, eval_first, save_every, keep,
best, patience and plan.* may change."""


def parser(verb: str) -> Parser:
    recipes = f"file.yaml, or a built-in one ({', '.join(built_in_recipes())})" if built_in_recipes() else "file.yaml"
    text = TRAIN.format(tasks=", ".join(BUILT_IN), recipes=recipes) if verb == "train" else RESUME
    parser = Parser(f"drivetrain {verb}", text)
    target = "TASK" if verb == "train" else "RUN"
    parser.add_argument("target", metavar=target, help="what to train" if verb == "train" else "a run's name or folder")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings, such as epochs=5")
    add_placement(parser)
    add_fault_tolerance(parser)
    add_diagnostics(parser)
    parser.add_argument(
        "--planner", choices=["auto", "table", "off"], default="auto",
        help="who plans: auto predicts and measures (on a GPU), table is guide 004's, off takes each process's share at once",
    )  # fmt: skip
    if verb == "train":
        parser.add_argument(
            "--plan",
            metavar="FILE",
            help="a saved plan (drivetrain plan --json, a run.json), accelerate's YAML, DeepSpeed's JSON or guide 004's YAML",
        )
        add_run_folder(parser, "run")
        parser.add_argument("--dry-run", action="store_true", help="show every setting with its origin and the plan, and stop")
        parser.add_argument(
            "--smoke", action="store_true", help="a few steps on a few samples through train, save, resume and eval; nothing is kept"
        )
    parser.add_argument(
        "--upload",
        type=bucket_address("--upload"),
        metavar="URL",
        help="upload the finished model and its card to URL/models/RUN/ and URL/models/latest/",
    )
    add_target(parser)
    add_common(parser)
    return parser


def run(verb: str, words: list[str]) -> int:
    if verb == "train" and {"-h", "--help"} & set(words):
        task = next((word for word in words if not word.startswith("-") and "=" not in word), None)
        parser(verb).print_help()
        if task is not None:
            print_settings(task)
        return 0

    args = parser(verb).parse(words)
    place = Place(args.on, args.wait, args.yes)
    request = request_of(verb, args)
    if verb == "train" and place.on is not None:
        return _submit(request, place.on, place)

    from drivetrain.launch import start
    from drivetrain.watch.screen import Screen

    screen = Screen(quiet=request.quiet)
    with start.ending_as_preempted():
        return _resume(request, place, screen) if verb == "resume" else _train(request, screen)


def _submit(request: Request, target: str, place: Place) -> int:
    """Trains on a target. Imports no more than that needs."""
    from drivetrain.cli.submitted import agree_on, train_on
    from drivetrain.launch.plan_file import apply_plan_file
    from drivetrain.watch.screen import Screen

    screen = Screen(quiet=request.quiet)
    recipes, request = apply_plan_file(load(request.target, list(request.settings)), request, screen)
    return train_on(target, recipes, request, place.wait, agree_on(place.yes, screen), screen)


class Place(NamedTuple):
    """Where a command executes."""

    on: str | None
    """A target's name; None: on this machine, in the foreground."""
    wait: bool
    yes: bool
    """Whether the user agrees to the price of what is started there."""


def _train(request: Request, screen: Screen) -> int:
    from drivetrain.launch import start
    from drivetrain.launch.bucket import upload_after
    from drivetrain.launch.ending import exit_code
    from drivetrain.launch.launchers import detect_launcher, with_accelerate_choices
    from drivetrain.launch.plan_file import apply_plan_file
    from drivetrain.launch.smoke import train_smoke
    from drivetrain.launch.watcher import start_worker

    # With --rendezvous this command supervises its machine, even where srun has started it on several.
    launcher = None if request.rendezvous is not None else detect_launcher(os.environ)
    recipes = load(request.target, list(request.settings))
    recipes = [with_accelerate_choices(recipe, os.environ, launcher) for recipe in recipes]
    recipes, request = apply_plan_file(recipes, request, screen)
    if request.dry_run:
        for recipe in recipes:
            dry_run(recipe, start.request_of_stage(recipe, recipes, request))
        return 0
    if request.smoke:
        return exit_code(train_smoke(recipes[0], request, screen))
    worker = start_worker(launcher, request.hang_after, screen) if launcher is not None else None
    if isinstance(worker, int):  # in the watcher, after the worker's end
        return worker
    run, ended = start.train_stages(recipes, request, screen, worker)
    if _is_first(worker):
        upload_after(run, request, ended, screen)
    return exit_code(ended)


def _is_first(worker: LaunchedWorker | None) -> bool:
    """Whether this process is no worker of another launcher, or the first of them."""
    return worker is None or os.environ.get("RANK") == "0"


def read_request(words: list[str]) -> Request:
    """Parses the words after `drivetrain`: the reverse of Request.command()."""
    verb, *rest = words
    return request_of(verb, parser(verb).parse(rest))


def request_of(verb: str, args: argparse.Namespace) -> Request:
    from drivetrain.buckets.layout import folder_of
    from drivetrain.launch.request import Request

    values = {name: value for name, value in vars(args).items() if name not in ("on", "wait", "yes")}
    low, high = values.pop("nodes")
    if is_url(values.get("run_dir") or ""):
        values["bucket"] = values["run_dir"]
        values["run_dir"] = str(folder_of(values["bucket"]))
    return Request(
        verb="resume" if verb == "resume" else "train", settings=tuple(values.pop("settings")), nodes=high, min_nodes=None if low == high else low,
        plan_file=values.pop("plan", None), **values,
    )  # fmt: skip


def _resume(request: Request, place: Place, screen: Screen) -> int:
    from drivetrain import runs
    from drivetrain.cli.submitted import agree_on, resume_on
    from drivetrain.launch import start
    from drivetrain.launch.bucket import resume_request, upload_after, with_bucket_of, with_upload_of
    from drivetrain.launch.ending import exit_code, raise_failure
    from drivetrain.launch.launchers import detect_launcher
    from drivetrain.launch.recorded import recorded_recipe
    from drivetrain.launch.watcher import start_worker
    from drivetrain.targets.record import find_recorded, is_inside

    if is_url(request.target):
        request = resume_request(request, screen)
    record = find_recorded(request.target)
    if record is not None and not is_inside(record.run):
        return resume_on(record, request, place.on, place.wait, agree_on(place.yes, screen), screen)
    run = runs.find(request.target)
    request = with_upload_of(run, with_bucket_of(run, request))
    recipe = recorded_recipe(run, request.settings)
    launcher = detect_launcher(os.environ)
    worker = start_worker(launcher, request.hang_after, screen) if launcher is not None else None
    if isinstance(worker, int):  # in the watcher, after the worker's end
        return worker
    _, ended = start.resume(run, recipe, request, screen, worker)
    raise_failure(ended, run)
    if _is_first(worker):
        upload_after(run, request, ended, screen)
    return exit_code(ended)


def dry_run(recipe: Recipe, request: Request) -> None:
    """Prints every setting with its origin, and the plan."""
    from drivetrain.launch.machine import cluster_of, detect_machine
    from drivetrain.launch.planning import plan_run, with_global_batch_of
    from drivetrain.launch.start import check_request, check_start

    machine = detect_machine(request)
    plan = plan_run(recipe, request, cluster_of(machine, nodes=request.nodes), None)
    recipe = with_global_batch_of(plan, recipe)
    check_request(recipe, request)
    check_start(recipe)
    width = max(map(len, recipe.settings))
    if recipe.stage:
        show(f"stage     {recipe.stage}")
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


# --- help --------------------------------------------------------------------------------------


def print_settings(text: str) -> list[TaskRef]:
    """Prints the settings of a task, or of all tasks of a recipe: first their own and then those of every task; returns the tasks."""
    tasks = find_tasks(text)
    shared: dict[str, Setting] = {}
    for task in tasks:
        doc, settings = task.declaration().doc, task_settings(task)
        show(f"\n{task.class_name}: {doc.splitlines()[0] if doc else ''}".rstrip())
        _show_settings(f"settings of {task.class_name}", [setting for setting in settings.values() if setting.owner != "Task"])
        shared |= {name: setting for name, setting in settings.items() if setting.owner == "Task"}
    _show_settings("settings of every task", list(shared.values()))
    return tasks


def _show_settings(title: str, settings: list[Setting]) -> None:
    if settings:
        show(f"\n{title}")
        for setting in settings:
            show(_setting_line(setting))


def _setting_line(setting: Setting) -> str:
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    value = "(required)" if setting.required else f"={setting.default}"
    head = f"  {setting.name}{value}"
    kind = setting.type_text.replace("Annotated[", "").replace("]", "").replace("Literal[", "")
    text = f"{setting.doc.replace(chr(10), ' ')} [{kind}]".strip()
    return head.ljust(32) + textwrap.fill(text, max(40, width), initial_indent=" " * 32, subsequent_indent=" " * 32).strip()
