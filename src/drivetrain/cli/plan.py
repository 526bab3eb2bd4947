"""`plan`: how a task would run on this machine, or on a described one, and why."""

from __future__ import annotations

import json
import math
import os
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from drivetrain.cli.flags import Parser, add_placement
from drivetrain.outcomes import Problem
from drivetrain.terminal import show

if TYPE_CHECKING:
    from drivetrain.launch.machine import Cluster
    from drivetrain.plan import Plan
    from drivetrain.plan.profile import Profile
    from drivetrain.recipe import Recipe
    from drivetrain.watch.screen import Screen

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
SHOWN_CHOICES = (
    "strategy", "zero_stage", "micro_batch", "accumulation", "precision", "activation_checkpointing", "offload", "eval_micro_batch",
    "capture", "compile", "channels_last", "data", "workers", "prefetch", "threads",
)  # fmt: skip


def parser(verb: str) -> Parser:
    parser = Parser("drivetrain plan", TEXT)
    parser.add_argument("target", metavar="TASK", help="as for train")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings, and plan.KEY=VALUE to pin a choice")
    parser.add_argument("--hardware", metavar="WORDS", help="another machine: COUNTxNAME-MEMORYGB, and more after commas")
    parser.add_argument("--measure", action="store_true", help="measure a few micro-batches on this machine")
    parser.add_argument("--planner", choices=["auto", "table", "off"], default="auto", help="table: guide 004's; off: nothing is predicted")
    parser.add_argument("--compare", action="store_true", help="show where the guide's table differs, and by how much")
    parser.add_argument("--price", type=_price, metavar="USD", help="price of one GPU for an hour: shows the cost of the whole run")
    parser.add_argument("--fresh", action="store_true", help="ignore cached predictions and measurements of this task")
    parser.add_argument("--json", action="store_true", help="the plan as JSON, for --plan FILE and for other programs")
    add_placement(parser)
    parser.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    return parser


def run(verb: str, words: list[str]) -> int:
    args = parser(verb).parse(words)

    from drivetrain.recipe import load
    from drivetrain.watch.screen import Screen

    screen = Screen(quiet=args.quiet or args.json)
    documents = [_plan(recipe, args, screen) for recipe in load(args.target, args.settings)]
    if args.json:
        print(json.dumps(documents[0] if len(documents) == 1 else documents, indent=1))
    return 0


def _plan(recipe: Recipe, args: Namespace, screen: Screen) -> dict[str, Any]:
    """Plans one recipe, prints the plan for a person, and returns what --json prints."""
    from drivetrain import __version__
    from drivetrain.launch.planning import Measure, make_plan
    from drivetrain.launch.preview import cluster_to_plan_for, run_totals
    from drivetrain.launch.profiling import profile_task
    from drivetrain.launch.request import Request
    from drivetrain.launch.start import check_start

    if args.hardware is not None and args.measure:
        raise Problem("--measure needs the machine itself: leave out --hardware, or measure there")
    cluster = cluster_to_plan_for(Request(procs=args.procs, nodes=args.nodes[1], gpus=args.gpus, device=args.device), args.hardware)
    if args.hardware is None:
        check_start(recipe)
    plan = make_plan(recipe, cluster, screen, args.planner, Measure.ALWAYS if args.measure else Measure.NEVER, fresh=args.fresh)
    profile = profile_task(recipe, plan, screen) if plan.predicted else None
    total = run_totals(recipe, plan, cluster, profile.samples if profile is not None else None, args.price)
    document = {"format": 1, "task": recipe.task.label, "hardware": cluster.hardware.to_json(), "plan": plan.to_json(), "total": total}
    table_plan = make_plan(recipe, cluster, screen, "table") if args.compare else None
    if table_plan is not None:
        document["table"] = table_plan.to_json()
    screen.close()
    if not args.json and not args.quiet:
        show(f"drivetrain {__version__}   {recipe.task.label}   {cluster.hardware.sentence()}\n")
        _show_plan(plan, total, cluster)
        if table_plan is not None:
            _show_table_plan(plan, table_plan, cluster, profile)
    return document


def _price(text: str) -> float:
    if not 0 <= (price := float(text)) < math.inf:
        raise ValueError
    return price


# --- output for a person ------------------------------------------------------------------------


def _show_plan(plan: Plan, total: dict[str, Any], cluster: Cluster) -> None:
    _line("plan", plan.sentence())
    if plan.predicted:
        _show_predictions(plan)
    if total:
        cost = f", ${total['cost']:,.2f} at ${total['price']:g} a GPU-hour" if "cost" in total else ""
        _line("run", f"{total['steps']:,} steps over {total['samples']:,} samples: {_duration(total['seconds'])}{cost}")
    if cluster.hardware.gpus and cluster.hardware.gpu_note:
        _line("note", cluster.hardware.gpu_note)
    for key in ("predicted", "network"):
        if key in plan.reasons:
            _line("note", plan.reasons[key])
    show()
    _show_choices(plan)
    if plan.rejected:
        show("\nrejected")
        for rejected in plan.rejected:
            show(f"  {rejected['choice']:<45} {rejected['why']}")


def _show_predictions(plan: Plan) -> None:
    from drivetrain.hardware import format_bytes, format_need
    from drivetrain.plan.rating import format_rate

    predicted = plan.predicted
    source = "measured" if plan.measured else "predicted"
    needed_bytes = sum(predicted["memory_bytes"].values())
    scale, unit = (2**30, "GiB") if needed_bytes >= 2**30 else (2**20, "MiB")
    need = format_need(needed_bytes, predicted["usable_bytes"], format_bytes)
    _line("memory", f"{need} {source}: {_parts_text(predicted['memory_bytes'], scale, 1)} {unit}")
    parts = _parts_text(predicted["seconds_by_part"], 1e-3, 2)
    _line("time", f"{predicted['step_seconds'] * 1e3:,.1f} ms a step {source} ({parts} ms), {format_rate(predicted['samples_per_second'])}")


def _show_choices(plan: Plan) -> None:
    values = plan.to_json()
    for name in SHOWN_CHOICES:
        if (name in plan.reasons and values[name] not in (0, "none", False)) or name in ("strategy", "micro_batch"):
            show(f"  {name:<26}{values[name]!s:<10} {plan.reasons.get(name, '')}".rstrip())
    for name, value in plan.env.items():
        current = os.environ.get(name)
        is_default = (name, current) == ("OMP_WAIT_POLICY", "PASSIVE")  # set by drivetrain itself
        show(f"  {name:<26}{current or value!s:<10} {'yours' if current and not is_default else ''}".rstrip())


def _show_table_plan(plan: Plan, table_plan: Plan, cluster: Cluster, profile: Profile | None) -> None:
    """Prints how the guide's table differs from the plan, and how much slower it is."""
    from drivetrain.hardware import format_gib
    from drivetrain.launch.preview import rate_plan
    from drivetrain.plan.rating import format_rate

    show("\nthe guide's table")
    values, table_values = plan.to_json(), table_plan.to_json()
    for name in ("global_batch", *SHOWN_CHOICES):
        if values[name] != table_values[name]:
            reason = table_plan.reasons.get(name, "")
            show(f"  {name:<26}{table_values[name]!s:<10} instead of {values[name]}: {reason}".rstrip(": "))
    if profile is None or profile.plain is None:
        return
    rated = rate_plan(table_plan, profile, cluster)
    speed_ratio = plan.predicted["samples_per_second"] / rated.samples_per_second
    fits = "" if rated.fits else "; it does not fit"
    prediction = f"{format_rate(rated.samples_per_second)}, {format_gib(rated.needed_bytes)}{fits}"
    show(f"  {'predicted':<26}{prediction}: the plan above is {speed_ratio:.2f} times as fast")


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
