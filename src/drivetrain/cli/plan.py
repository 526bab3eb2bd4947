"""`drivetrain plan`: how a task would run here or on a machine that is only described, and why."""

from __future__ import annotations

import json
import math
import os
from argparse import Namespace
from typing import Any

from drivetrain.cli.flags import Parser, add_placement
from drivetrain.terminal import show

TEXT = """\
How a task would run: strategy, micro-batch, precision and the rest, with predicted memory, time and samples a second,
each choice with the figures that decided it and each rejected one with why it lost. Nothing is trained and no GPU is needed:
memory comes from the task's own model on tensors without values, time from the machine's published rates.

  drivetrain plan my_task.py                                      on this machine
  drivetrain plan my_task.py --hardware 4xL4-24GB                 on one that is not here
  drivetrain plan my_task.py --hardware "2 nodes x 8xA100-40GB, 100Gb/s" --price 1.8
  drivetrain plan my_task.py --measure                            measured on this machine's GPU, not only predicted
  drivetrain plan my_task.py --json > plan.json; drivetrain train my_task.py --plan plan.json
"""
SHOWN = (
    "strategy", "zero_stage", "micro_batch", "accumulation", "precision", "activation_checkpointing", "offload", "eval_micro_batch",
    "capture", "compile", "channels_last", "data", "workers", "prefetch", "threads",
)  # fmt: skip


def parser(verb: str) -> Parser:
    parser = Parser("drivetrain plan", TEXT)
    parser.add_argument("target", metavar="TASK", help="a built-in, your file.py, or a recipe.yaml")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings, and plan.KEY=VALUE to pin a choice")
    parser.add_argument("--hardware", metavar="WORDS", help="a machine that is not here: COUNTxNAME-MEMORYGB, and more after commas")
    parser.add_argument("--measure", action="store_true", help="measure a few micro-batches on this machine")
    parser.add_argument("--planner", choices=["auto", "table", "off"], default="auto", help="table: guide 004's; off: nothing is looked at")
    parser.add_argument("--compare", action="store_true", help="show where the guide's table differs, and by how much")
    parser.add_argument("--price", type=_price, metavar="USD", help="of one GPU for an hour: the cost of the whole run")
    parser.add_argument("--fresh", action="store_true", help="forget what is remembered of this task")
    parser.add_argument("--json", action="store_true", help="the plan as JSON, for --plan FILE and for other programs")
    add_placement(parser)
    parser.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    return parser


def run(verb: str, words: list[str]) -> int:
    args = parser(verb).parse(words)

    from drivetrain.recipe import load
    from drivetrain.watch.screen import Screen

    screen = Screen(quiet=args.quiet or args.json)
    told = [_plan(recipe, args, screen) for recipe in load(args.target, args.settings)]
    if args.json:
        print(json.dumps(told[0] if len(told) == 1 else told, indent=1))
    return 0


def _plan(recipe: Any, args: Namespace, screen: Any) -> dict[str, Any]:
    from drivetrain import __version__
    from drivetrain.launch.planning import Measure, make_plan
    from drivetrain.launch.profiling import profile_task
    from drivetrain.launch.start import check_start

    place = _place(args)
    if args.hardware is None and recipe.settings["start"] is not None:
        check_start(recipe.settings["start"])
    plan = make_plan(recipe, place, screen, args.planner, Measure.ALWAYS if args.measure else Measure.NEVER, fresh=args.fresh)
    profile = profile_task(recipe, plan, screen) if plan.predicted else None
    samples = profile.samples if profile is not None else None
    total = _total(recipe, plan, samples, args.price, place.world_size)
    told = {"format": 1, "task": recipe.task.label, "hardware": place.hardware.to_json(), "plan": plan.to_json(), "total": total}
    other = make_plan(recipe, place, screen, "table") if args.compare else None
    if other is not None:
        told["table"] = other.to_json()
    screen.close()
    if not args.json and not args.quiet:
        show(f"drivetrain {__version__}   {recipe.task.label}   {place.hardware.sentence()}\n")
        _show(plan, total, place)
        if other is not None:
            _compare(recipe, plan, other, place, profile)
    return told


def _price(text: str) -> float:
    if not 0 <= (price := float(text)) < math.inf:
        raise ValueError
    return price


def _place(args: Namespace) -> Any:
    from drivetrain.launch.machine import Cluster, cluster_of, detect_machine
    from drivetrain.launch.request import Request
    from drivetrain.outcomes import Problem

    if args.hardware is None:
        machine = detect_machine(Request(procs=args.procs, gpus=args.gpus, device=args.device))
        return cluster_of(machine, nodes=args.nodes[1])
    from drivetrain.hardware.described import parse

    if args.measure:
        raise Problem("--measure needs the machine itself: leave out --hardware, or measure there")
    hardware = parse(args.hardware)
    procs = args.procs or max(1, len(hardware.gpus))
    if hardware.gpus and procs > len(hardware.gpus):
        raise Problem(f"--procs {procs}: {args.hardware} has {len(hardware.gpus)} GPUs a machine; one process each at most")
    if hardware.nodes > 1 and args.nodes[1] not in (1, hardware.nodes):
        raise Problem(f"--nodes {args.nodes[1]} and {args.hardware!r} do not agree: leave out one of them")
    nodes = max(args.nodes[1], hardware.nodes)
    device = args.device or ("cuda" if hardware.gpus else "cpu")
    return Cluster(hardware, device, procs * nodes, procs, nodes)


def _total(recipe: Any, plan: Any, samples: int | None, price: float | None, world_size: int) -> dict[str, Any]:
    from drivetrain.launch.profiling import total_steps

    if samples is None or "step_seconds" not in plan.predicted:
        return {}
    steps = total_steps(recipe, samples, plan.global_batch)
    seconds = steps * plan.predicted["step_seconds"]
    cost = {} if price is None else {"cost": seconds / 3600 * world_size * price, "price": price}
    return {"samples": samples, "steps": steps, "seconds": seconds} | cost


# --- what a person reads ------------------------------------------------------------------------


def _show(plan: Any, total: dict[str, Any], place: Any) -> None:
    from drivetrain.hardware import format_bytes, format_need
    from drivetrain.plan.rating import format_rate

    _line("plan", plan.sentence())
    figures = plan.predicted
    if figures:
        how = "measured" if plan.measured else "predicted"
        need = sum(figures["memory_bytes"].values())
        scale, unit = (2**30, "GiB") if need >= 2**30 else (2**20, "MiB")
        room = format_need(need, figures["usable_bytes"], format_bytes)
        _line("memory", f"{room} {how}: {_parts_text(figures['memory_bytes'], scale, 1)} {unit}")
        parts = _parts_text(figures["seconds_by_part"], 1e-3, 2)
        _line("time", f"{figures['step_seconds'] * 1e3:,.1f} ms a step {how} ({parts} ms), {format_rate(figures['samples_per_second'])}")
    if total:
        cost = f", ${total['cost']:,.2f} at ${total['price']:g} a GPU-hour" if "cost" in total else ""
        _line("run", f"{total['steps']:,} steps over {total['samples']:,} samples: {_duration(total['seconds'])}{cost}")
    if place.hardware.gpus and place.hardware.gpu_note:
        _line("note", place.hardware.gpu_note)
    for key in ("predicted", "network"):
        if key in plan.reasons:
            _line("note", plan.reasons[key])
    show()
    values = plan.to_json()
    for name in SHOWN:
        if (name in plan.reasons and values[name] not in (0, "none", False)) or name in ("strategy", "micro_batch"):
            show(f"  {name:<26}{values[name]!s:<10} {plan.reasons.get(name, '')}".rstrip())
    for name, value in plan.env.items():
        mine = os.environ.get(name)
        chosen = (name, mine) == ("OMP_WAIT_POLICY", "PASSIVE")  # drivetrain's own choice, set when the command began
        show(f"  {name:<26}{mine or value!s:<10} {'yours' if mine and not chosen else ''}".rstrip())
    if plan.rejected:
        show("\nrejected")
        for lost in plan.rejected:
            show(f"  {lost['choice']:<45} {lost['why']}")


def _compare(recipe: Any, plan: Any, other: Any, place: Any, profile: Any) -> None:
    """Where the guide's table differs, and what that costs by prediction."""
    from drivetrain.hardware import format_gib
    from drivetrain.plan.candidates import Candidate
    from drivetrain.plan.capacity import MachineCapacity
    from drivetrain.plan.rating import Rater, format_rate

    show("\nthe guide's table")
    mine, theirs = plan.to_json(), other.to_json()
    for name in ("global_batch", *SHOWN):
        if mine[name] != theirs[name]:
            show(f"  {name:<26}{theirs[name]!s:<10} instead of {mine[name]}: {other.reasons.get(name, '')}".rstrip(": "))
    if profile is None or profile.plain is None:
        return
    machine = MachineCapacity.of(place.hardware, place.device, place.local_procs)
    rater = Rater(profile, machine, other.global_batch, place.world_size, place.nodes)
    candidate = Candidate(
        other.strategy, other.micro_batch, other.accumulation, other.world_size, other.nodes, other.zero_stage,
        other.activation_checkpointing and profile.checkpointed is not None, other.offload,
    )  # fmt: skip
    rated = rater.rate(candidate, other.micro_batch)
    faster = plan.predicted["samples_per_second"] / rated.samples_per_second
    fits = "" if rated.fits else "; it does not fit"
    show(
        f"  predicted                 {format_rate(rated.samples_per_second)}, {format_gib(rated.needed_bytes)}{fits}: the plan above is {faster:.2f} times as fast"
    )


def _parts_text(parts: dict[str, float], scale: float, digits: int) -> str:
    shown = [(name, value / scale) for name, value in parts.items() if value / scale >= 0.5 * 10**-digits]
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in shown)


def _line(label: str, text: str) -> None:
    show(f"{label:<10}{text}")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
