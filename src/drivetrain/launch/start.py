"""From a recipe to a run: where its directory is, the plan, the processes, and what is written at the end."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from drivetrain import __version__, hardware, runs
from drivetrain import recipe as recipes
from drivetrain.describe import task_settings
from drivetrain.hardware import Hardware, format_bytes, format_need
from drivetrain.launch import ending, planning, rendezvous
from drivetrain.launch.opening import Opened, check_changes, discard, go_on, held, named_run, open_run
from drivetrain.names import check_folder, check_name
from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan
from drivetrain.plan.table import ORIGIN
from drivetrain.recipe import Recipe
from drivetrain.runs import Run
from drivetrain.settings import nearest
from drivetrain.supervise import Ended, Place, Policy, local_place, run_workers
from drivetrain.task_ref import TaskRef
from drivetrain.watch.screen import Screen


@dataclass(frozen=True)
class Request:
    """What the command line (or the Python call) asks beyond the recipe."""

    procs: int | None = None
    nodes: int = 1
    """Machines; at most, where fewer will do."""
    least_nodes: int | None = None
    rendezvous: str | None = None
    node_rank: int | None = None
    gpus: str | None = None
    device: str | None = None
    run_dir: str | None = None
    name: str | None = None
    verbose: bool = False
    planner: planning.Planner = "auto"
    saved: Plan | None = None
    """A plan made before, from --plan FILE."""
    policy: Policy = field(default_factory=lambda: Policy(restarts=3))
    end: float | None = None
    """When all must be saved and over, in seconds since the epoch."""
    looks: dict[str, Any] = field(default_factory=dict)
    """What is looked at closely: find_nan, profile, check_collectives."""

    def __post_init__(self) -> None:
        if self.name is not None:
            check_name(self.name, "--name")
        if self.run_dir is not None:
            check_folder(self.run_dir, "--run-dir")
        if self.name is not None and self.run_dir is not None:
            raise Problem("--run-dir and --name both say where the run goes: give one")


@dataclass(frozen=True)
class Machine:
    """The part of this machine that a run uses."""

    hardware: Hardware
    device: str
    gpus: list[str]
    procs: int


def look_at_machine(request: Request) -> Machine:
    found = hardware.detect()
    device = request.device
    gpus: list[str] = []
    if device in (None, "cuda"):
        if found.gpus or device == "cuda":
            hardware.check_torch_can_use(found, hardware.torch_build(), os.environ)
        gpus = hardware.visible_gpus(found, os.environ, request.gpus) if found.gpus else []
        if device == "cuda" and not gpus:
            raise Problem(f"--device cuda: there is no GPU here ({found.gpu_note}); leave the flag out, or say --device cpu")
        if request.gpus is not None and not gpus:
            raise Problem(f"--gpus {request.gpus}: there is no GPU here ({found.gpu_note})")
        device = "cuda" if gpus else "cpu"
    elif request.gpus is not None:
        raise Problem(f"--gpus does not go with --device {device}")
    assert device is not None
    procs = request.procs if request.procs is not None else max(1, len(gpus))
    if procs < 1:
        raise Problem(f"--procs {procs}: a run needs at least one process")
    if device == "cuda" and procs > len(gpus):
        raise Problem(
            f"--procs {procs}: there {'is' if len(gpus) == 1 else 'are'} {len(gpus)} GPU{'' if len(gpus) == 1 else 's'} to use; one process each at most (or --device cpu)"
        )
    if device == "mps" and procs > 1:
        raise Problem("--device mps runs one process")
    used = gpus[:procs]
    return Machine(hardware.restrict_to_gpus(found, used), device, used, procs)


# --- the run's directory -----------------------------------------------------------------------


def check_request(recipe: Recipe, request: Request) -> None:
    """Raises what `train` refuses before it starts anything; nothing is written or locked."""
    if request.nodes > 1:
        if request.rendezvous is None:
            raise Problem(f"--nodes {request.nodes} needs --rendezvous HOST:PORT, the same on each machine (HOST is one of them)")
        rendezvous.parse(request.rendezvous)
    else:  # with several, the run's folder may be another machine's
        named_run(recipe, request)


def check_start(start: str) -> None:
    """Raises Problem where there are no weights to begin from."""
    if not start.endswith(".safetensors"):
        runs.find(start)
    elif not Path(start).is_file():
        raise Problem(f"start={start}: there is no such file")


# --- the plan ----------------------------------------------------------------------------------


def make_plan(
    recipe: Recipe,
    machine: Machine,
    place: Place,
    nodes: int,
    before: dict[str, Any] | None,
    request: Request,
    screen: Screen | None = None,
) -> Plan:
    """The plan of a run: the one it had, where nothing changed; the one that was given; else a new one."""
    if before is not None:
        old = Plan.from_json(before["plan"])
        same_pins = before["recipe"]["pins"] == json.loads(json.dumps(recipe.pins))
        if (old.world_size, old.device, old.nodes) == (place.world_size, machine.device, nodes) and same_pins:
            return old
        recipe = replace(recipe, settings=recipe.settings | {"precision": old.precision})  # fixed from the start on
    if request.saved is not None:
        return _saved_plan(request.saved, machine, place, nodes)
    planner = request.planner
    if planner == "table" and before is not None:
        planner = "off"  # the table would set another global batch, and a run keeps its own
    # Without a GPU a process takes its share at once, unless it is known that this does not fit: a look would cost more than it gains.
    look = machine.device == "cuda"
    return planning.plan_for(recipe, _where(machine, place, nodes), screen or Screen(quiet=True), planner, measure=None, look=look)


def _where(machine: Machine, place: Place, nodes: int) -> planning.Place:
    return planning.Place(machine.hardware, machine.device, place.world_size, machine.procs, nodes, next(iter(machine.gpus), ""))


def _saved_plan(saved: Plan, machine: Machine, place: Place, nodes: int) -> Plan:
    here = (place.world_size, nodes, machine.device)
    if (saved.world_size, saved.nodes, saved.device) != here:
        raise Problem(
            f"--plan is for {saved.world_size} processes on {saved.nodes} machines ({saved.device}), and here are {here[0]} on {here[1]}"
            f" ({here[2]}): make one for this machine with drivetrain plan TASK --json"
        )
    return replace(saved, reasons=saved.reasons | {"plan": "as saved"})


def with_batch_of(recipe: Recipe, plan: Plan) -> Recipe:
    """The recipe with the plan's global batch, which the guide's table alone changes."""
    if plan.global_batch == recipe.settings["global_batch"]:
        return recipe
    notice = f"global_batch={plan.global_batch}, not {recipe.settings['global_batch']}: {plan.reasons['global_batch']}"
    return replace(
        recipe, settings=recipe.settings | {"global_batch": plan.global_batch}, origin=recipe.origin | {"global_batch": ORIGIN},
        notices=(*recipe.notices, notice),
    )  # fmt: skip


# --- running -----------------------------------------------------------------------------------


def record(recipe: Recipe, opened: Opened, plan: Plan, machine: Machine) -> None:
    """Write run.json before anything is started, and keep the task's code with the run."""
    run = opened.run
    changing = {"plan": plan.to_json(), "hardware": machine.hardware.to_json(), "status": "running", "outcome": "", "message": ""}
    try:
        if opened.before is not None:
            run.write(opened.before | {"recipe": opened.before["recipe"] | {"settings": recipe.settings, "pins": recipe.pins}} | changing)
            return
        if not recipe.task.built_in and not recipe.task.pickled:
            runs.store_task(run, Path(recipe.task.path), recipe.task.package)
        told = {
            "task": asdict(recipe.task), "identity": recipe.identity(), "settings": recipe.settings,
            "origin": recipe.origin, "pins": recipe.pins,
        }  # fmt: skip
        run.write({"name": run.name, "recipe": told, **runs.provenance(), **changing})
    except OSError as error:
        raise Problem(f"cannot write the run directory {run.path}: {error.strerror}; choose another with --run-dir") from None


def task_in_run(task: TaskRef, run: Run) -> TaskRef:
    """The task as the run keeps it: what resume, eval and workers import."""
    if task.built_in or task.origin:
        return task
    return replace(task, path=str((run.path / "task" / task.path_in_run).resolve()), origin=task.path)


def make_job(recipe: Recipe, run: Run, plan: Plan, mode: str, folder: str | None = None, request: Request | None = None) -> dict[str, Any]:
    return {
        "mode": mode,
        "run": str(run.path.resolve()),
        "task": asdict(task_in_run(recipe.task, run)),
        "settings": recipe.settings,
        "plan": plan.to_json(),
        "folder": folder or os.getcwd(),
        "end": request.end if request else None,
        "looks": request.looks if request else {},
    }


def train_recipe(recipe: Recipe, request: Request, screen: Screen) -> tuple[Run, Ended]:
    """Train (or go on with) one recipe on this machine, alone or with others."""
    machine = look_at_machine(request)
    # So that a bad choice leaves nothing behind; what was looked at is remembered.
    first = make_plan(
        recipe, machine, Place(0, machine.procs, machine.procs * request.nodes, ("", 0)), request.nodes, None, request, screen
    )
    recipe = with_batch_of(recipe, first)
    check_request(recipe, request)
    if request.nodes > 1:
        from drivetrain.launch import nodes

        return nodes.train(recipe, request, machine, first, screen)
    opened = open_run(recipe, request)
    if opened.finished:
        return opened.run, already_finished(opened, screen)
    with held(opened):
        place = local_place(machine.procs)
        plan = make_plan(recipe, machine, place, 1, opened.before, request, screen)
        return opened.run, train_opened(recipe, request, opened, machine, place, plan, screen)


def resume_run(recipe: Recipe, request: Request, screen: Screen) -> tuple[Run, Ended]:
    """Go on with the run that `request.run_dir` names, with the recipe it recorded."""
    if request.nodes > 1:
        raise Problem("resume runs on one machine: on several, repeat the train command with its --nodes and --name on each")
    run = Run(str(request.run_dir))
    opened = go_on(recipe, run, run.read())
    if opened.finished:
        return run, already_finished(opened, screen)
    with held(opened):
        machine = look_at_machine(request)
        was = opened.before["plan"] if opened.before else {}
        if request.procs is None and request.gpus is None and (machine.device, 1) == (was["device"], was["nodes"]):
            # as many as before, as far as this machine has them
            procs = min(was["world_size"], len(machine.gpus)) if machine.gpus else was["world_size"]
            machine = replace(machine, procs=procs, gpus=machine.gpus[:procs])
        place = local_place(machine.procs)
        plan = make_plan(recipe, machine, place, 1, opened.before, request, screen)
        if not recipe.task.built_in:
            screen.notice(f"running the code kept in {ending.shown(run)}/task")
        if not run.checkpoint_steps():
            screen.notice(f"{run.name} has no checkpoint yet: starting at step 0")
        return run, train_opened(recipe, request, opened, machine, place, plan, screen)


def already_finished(opened: Opened, screen: Screen) -> Ended:
    screen.line(
        "run", f"{opened.run.name} is finished (a fresh one: --name NAME; more epochs: drivetrain resume {opened.run.name} epochs=N)"
    )
    return Ended(Outcome.OK)


def train_opened(recipe: Recipe, request: Request, opened: Opened, machine: Machine, place: Place, plan: Plan, screen: Screen) -> Ended:
    header(recipe, machine, plan, screen, opened.why)
    record(recipe, opened, plan, machine)
    opened.run.log_event("started", world_size=place.world_size, device=plan.device)
    folder = opened.before["folder"] if opened.before else None
    job = make_job(recipe, opened.run, plan, "train", folder, request)
    hurried = plan.device == "cuda" and not plan.predicted and request.planner == "auto" and request.saved is None
    replan = partial(planning.plan_for, recipe, _where(machine, place, 1), screen) if hurried and request.nodes == 1 else None
    ended = run_workers(job, plan, place, screen, machine.gpus, request.verbose, replan, request.policy)
    finish(opened, recipe, plan, ended, screen)
    return ended


def finish(opened: Opened, recipe: Recipe, plan: Plan, ended: Ended, screen: Screen) -> None:
    """Note and show how the run ended; of a start that was refused nothing stays."""
    if ended.outcome is not Outcome.USAGE or not discard(opened):
        ending.finish(opened.run, opened.before, recipe, plan, ended, screen)


def header(recipe: Recipe, machine: Machine, plan: Plan, screen: Screen, why: str = "") -> None:
    if not screen.quiet:
        screen.put(f"drivetrain {__version__}   {recipe.task.label}   {machine.hardware.sentence()}")
    screen.line("plan", plan.sentence())
    if figures := plan.predicted:
        need, room = sum(figures["memory_bytes"].values()), figures["usable_bytes"]
        how = "measured" if plan.measured else "predicted"
        screen.line(
            "",
            f"memory {format_need(need, room, format_bytes)}, {figures['step_seconds'] * 1e3:,.1f} ms a step {how} (drivetrain plan tells why)",
        )
    for notice in (*recipe.notices, why):
        if notice:
            screen.notice(notice)


def recipe_of_run(run: Run, words: list[str]) -> Recipe:
    """The recipe a run was begun with, some settings changed."""
    info = run.read()
    told = info["recipe"]
    kept = task_in_run(TaskRef.from_json(told["task"]), run)
    if not Path(kept.path).is_file():
        raise Problem(f"{run.name} lacks its task's code ({kept.path})")
    given = recipes.split_words(words)
    pins = dict(told["pins"]) | {k.removeprefix("plan."): v for k, v in given.items() if k.startswith("plan.")}
    changes = {k: v for k, v in given.items() if not k.startswith("plan.")}
    values, origin = dict(told["settings"]), dict(told["origin"])
    if changes:
        known = task_settings(kept) if not kept.pickled else {}
        for key, value in changes.items():
            if key not in values:
                raise Problem(f"{told['identity']['task']} has no setting {key!r}{nearest(key, values)}")
            values[key] = known[key].coerce(value) if key in known else _like(values[key], value)
            origin[key] = "command line"
        check_changes(values, told["settings"], run)
        recipes.check_agreement(values)
    return Recipe(kept, values, origin, pins, None)


def _like(old: Any, text: str) -> Any:
    return type(old)(text) if isinstance(old, (int, float, str)) and not isinstance(old, bool) else text
