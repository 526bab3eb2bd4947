"""Prints what the user sees at the start and at the end of a run."""

from __future__ import annotations

import os
from typing import Any

from drivetrain import __version__
from drivetrain.hardware import format_bytes, format_need
from drivetrain.launch.machine import LocalMachine
from drivetrain.outcomes import Outcome
from drivetrain.plan import Plan
from drivetrain.recipe import Recipe
from drivetrain.runs import Run
from drivetrain.supervise import JobEnd
from drivetrain.watch.screen import Screen, format_duration, format_metric, format_size
from drivetrain.watch.time_breakdown import TimeBreakdown


def shown_path(run: Run) -> str:
    """Returns the run's folder as users type it."""
    return os.path.relpath(run.path)


def report_start(recipe: Recipe, machine: LocalMachine, plan: Plan, screen: Screen, note: str = "") -> None:
    if not screen.quiet:
        screen.put(f"drivetrain {__version__}   {recipe.task.label}   {machine.hardware.sentence()}")
    screen.line("plan", plan.sentence())
    if predicted := plan.predicted:
        memory = format_need(sum(predicted["memory_bytes"].values()), predicted["usable_bytes"], format_bytes)
        source = "measured" if plan.measured else "predicted"
        screen.line("", f"memory {memory}, {predicted['step_seconds'] * 1e3:,.1f} ms a step {source} (drivetrain plan tells why)")
    for notice in (*recipe.notices, note):
        if notice:
            screen.notice(notice)


def report_code(recipe: Recipe, run: Run, screen: Screen) -> None:
    """Tells the user that the code in the run's directory is executed."""
    if not recipe.task.built_in:
        screen.notice(f"running the code kept in {shown_path(run)}/task")


def report_already_finished(run: Run, screen: Screen) -> None:
    screen.line("run", f"{run.name} is finished (for a new run: --name NAME; for more epochs: drivetrain resume {run.name} epochs=N)")


def report_end(run: Run, ended: JobEnd, screen: Screen) -> None:
    result = ended.result
    if ended.outcome is Outcome.OK:
        _report_success(run, ended, screen)
    elif ended.outcome is Outcome.PREEMPTED:
        position = f"after step {result['step']:,}, saved" if result["step"] else "before its first step"
        screen.line("stopped", f"{position}; continue with: drivetrain resume {run.name}")
    elif ended.interrupted:
        screen.line("stopped", f"at once; continue with: drivetrain resume {run.name}")


def _report_success(run: Run, ended: JobEnd, screen: Screen) -> None:
    metrics, facts = ended.result["metrics"], ended.result["facts"]
    if metrics:
        weights = f"; {weights_text(facts)}" if facts["best"] else ""
        values = "   ".join(format_metric(k, v) for k, v in metrics.items())
        screen.line("eval", f"{values}   ({facts['test_samples']:,} samples{weights})")
    screen.line(
        "done", f"{ended.result['step']:,} steps in {format_duration(facts['time'])}, peak memory {format_size(facts['peak_memory_bytes'])}"
    )
    if sentence := bottleneck(run, ended.spent):
        screen.line("time", sentence)
    screen.line("run", f"{shown_path(run)}   next: drivetrain eval {run.name} | drivetrain status {run.name}")


def weights_text(facts: dict[str, Any]) -> str:
    """Returns which step the weights of a finished run are from."""
    return f"weights of step {facts['weights_step']:,}" + (f", the best by {facts['best']}" if facts["best"] else "")


def bottleneck(run: Run, spent: TimeBreakdown | None) -> str:
    """Returns what slowed a run down and what helps; "" if nothing did."""
    if spent is None:
        return ""
    return spent.bottleneck(Plan.from_json(run.read()["plan"]), os.cpu_count() or 1)
