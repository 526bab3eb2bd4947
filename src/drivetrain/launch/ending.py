"""Writes and shows how a run ended, and sets the exit code of the command."""

from __future__ import annotations

import json
from typing import Any

from drivetrain import runs
from drivetrain.launch.opening import OpenedRun, discard
from drivetrain.launch.report import report_end
from drivetrain.launch.summary import summary
from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan
from drivetrain.recipe import Recipe
from drivetrain.runs import Run
from drivetrain.supervise import JobEnd
from drivetrain.watch.screen import Screen


def finish(opened: OpenedRun, recipe: Recipe, plan: Plan, ended: JobEnd, screen: Screen) -> None:
    """Writes and shows how the run ended. A start that was refused changes nothing: a new directory is removed, an old run.json restored."""
    if ended.outcome is Outcome.USAGE and discard(opened):
        return
    if ended.outcome is Outcome.USAGE and opened.previous is not None:
        opened.run.write(opened.previous)
        return
    record_end(opened.run, recipe, plan, ended)
    report_end(opened.run, ended, screen)


def record_end(run: Run, recipe: Recipe, plan: Plan, ended: JobEnd) -> None:
    """Writes the outcome into run.json and the events; of a finished run also task.json and summary.txt."""
    try:
        run.update(**runs.stop_info(ended.outcome, ended.message))
        if ended.spent is not None:
            runs.write_atomic(run.time_breakdown_path, json.dumps(ended.spent.to_json()) + "\n")
        if ended.outcome is Outcome.OK:
            runs.write_atomic(run.card_path, json.dumps(_model_card(recipe, ended), indent=1) + "\n")
            runs.write_atomic(run.path / "summary.txt", summary(recipe, plan, ended))
    except OSError as error:
        raise Problem(
            f"{run.name}: {error.strerror}; the run's end could not be recorded; continue with: drivetrain resume {run.name}", Outcome.INFRA
        ) from None
    finally:
        _log_end(run, ended.outcome, ended.message)


def record_stop(run: Run, outcome: Outcome, message: str) -> None:
    """Writes into run.json and the events that a run has stopped, for a watcher, which has no result of the workers."""
    try:
        run.update(**runs.stop_info(outcome, message))
    finally:
        _log_end(run, outcome, message)


def _log_end(run: Run, outcome: Outcome, message: str) -> None:
    run.log_event("finished" if outcome is Outcome.OK else "stopped", outcome=str(outcome), message=message[:500])


def _model_card(recipe: Recipe, ended: JobEnd) -> dict[str, Any]:
    return {
        "format": runs.FORMAT, "task": recipe.task.label, "class": recipe.task.class_name,
        "settings": recipe.settings, "step": ended.result["facts"]["weights_step"], "steps": ended.result["step"],
        "metrics": ended.result["metrics"],
    }  # fmt: skip


def exit_code(ended: JobEnd) -> int:
    """Returns 130 for Ctrl-C, as shells expect; else the outcome's code."""
    return 130 if ended.interrupted and ended.outcome is not Outcome.OK else ended.outcome.code


def raise_failure(ended: JobEnd, run: Run) -> None:
    """Raises a failed run's message as a Problem; does nothing if the run is finished, preempted or interrupted."""
    if ended.outcome in (Outcome.OK, Outcome.PREEMPTED) or ended.interrupted:
        return
    hint = f"\nContinue with: drivetrain resume {run.name}" if ended.outcome.retryable and "resume" not in ended.message else ""
    raise Problem(ended.message + hint, ended.outcome)
