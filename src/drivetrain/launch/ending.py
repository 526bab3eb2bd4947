"""How a run ends: what is written, what is shown, and the exit code."""

from __future__ import annotations

import json
import os
from typing import Any

from drivetrain import runs
from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan
from drivetrain.recipe import Recipe
from drivetrain.runs import Run
from drivetrain.supervise import Ended
from drivetrain.watch.screen import Screen, duration, number, size
from drivetrain.watch.spent import Spent


def finish(run: Run, before: dict[str, Any] | None, recipe: Recipe, plan: Plan, ended: Ended, screen: Screen) -> None:
    """Note and show how the run ended; a mistaken resume leaves it as it was."""
    if ended.outcome is Outcome.USAGE and before is not None:
        run.write(before)
        return
    conclude(run, recipe, plan, ended)
    footer(run, ended, screen)


def conclude(run: Run, recipe: Recipe, plan: Plan, ended: Ended) -> None:
    """Write how the run ended: run.json, events, and for a finished one its summary."""
    try:
        run.update(**runs.stop_info(ended.outcome, ended.message))
        if ended.spent is not None:
            runs.write_atomic(run.time_breakdown_path, json.dumps(ended.spent.to_json()) + "\n")
        if ended.outcome is Outcome.OK:
            runs.write_atomic(run.card_path, json.dumps(_model_card(recipe, ended), indent=1) + "\n")
            runs.write_atomic(run.path / "summary.txt", summary(recipe, plan, ended))
    except OSError as error:
        raise Problem(
            f"{run.name}: {error.strerror}; the run's end could not be noted (drivetrain resume {run.name})", Outcome.INFRA
        ) from None
    finally:
        run.log_event("finished" if ended.outcome is Outcome.OK else "stopped", outcome=str(ended.outcome), message=ended.message[:500])


def _model_card(recipe: Recipe, ended: Ended) -> dict[str, Any]:
    return {
        "format": runs.FORMAT, "task": recipe.task.label, "class": recipe.task.class_name,
        "settings": recipe.settings, "step": ended.result["facts"]["weights_step"], "steps": ended.result["step"],
        "metrics": ended.result["metrics"],
    }  # fmt: skip


def _whose_weights(facts: dict[str, Any]) -> str:
    """Which weights a finished run keeps."""
    return f"weights of step {facts['weights_step']:,}" + (f", the best by {facts['best']}" if facts["best"] else "")


def summary(recipe: Recipe, plan: Plan, ended: Ended) -> str:
    """The fields people note of a run, as plain text."""
    facts, metrics, values = ended.result["facts"], ended.result["metrics"], recipe.settings
    train = facts["train"]

    def percent(value: float | None) -> str:
        return "not measured" if value is None else f"{100 * value:.2f} %"

    rows = {
        **({"Dataset": recipe.task.label, "Model": facts["model"]} | facts["summary"]),
        "Training Accuracy": percent(train.get("accuracy")),
        "Test Accuracy": percent(metrics.get("accuracy")),
        "Test Loss": f"{metrics['loss']:.4f}" if "loss" in metrics else "not measured",
        "Epochs": facts["epochs"],
        "Batch Size": plan.global_batch,
        "Learning Rate": values["learning_rate"],
        "Mixed Precision": plan.precision if plan.precision in ("bf16", "fp16") else f"no ({plan.precision})",
        "World Size": plan.world_size,
        "Device": facts["device"],
        "Total Parameters": f"{facts['parameters']:,}",
        "Steps": f"{ended.result['step']:,}",
        "Weights": _whose_weights(facts).removeprefix("weights "),
        "Training Time": duration(facts["time"]),
        "Peak Memory": size(facts["peak_memory_bytes"]),
    }
    return "".join(f"{name + ':':<20}{value}\n" for name, value in rows.items())


def footer(run: Run, ended: Ended, screen: Screen) -> None:
    result = ended.result
    if ended.outcome is Outcome.OK:
        metrics, facts = result["metrics"], result["facts"]
        if metrics:
            whose = f"; {_whose_weights(facts)}" if facts["best"] else ""
            figures = "   ".join(number(k, v) for k, v in metrics.items())
            screen.line("eval", f"{figures}   ({facts['test_samples']:,} samples{whose})")
        screen.line("done", f"{result['step']:,} steps in {duration(facts['time'])}, peak memory {size(facts['peak_memory_bytes'])}")
        if held_up := bottleneck(run, ended.spent):
            screen.line("time", held_up)
        screen.line("run", f"{shown(run)}   next: drivetrain eval {run.name} | drivetrain status {run.name}")
    elif ended.outcome is Outcome.PREEMPTED:
        where = f"after step {result['step']:,}, saved" if result["step"] else "before its first step"
        screen.line("stopped", f"{where}; go on with: drivetrain resume {run.name}")
    elif ended.interrupted:
        screen.line("stopped", f"at once; go on with: drivetrain resume {run.name}")


def bottleneck(run: Run, spent: Spent | None) -> str:
    """What held a run up, if anything did."""
    if spent is None:
        return ""
    return spent.bottleneck(Plan.from_json(run.read()["plan"]), os.cpu_count() or 1)


def shown(run: Run) -> str:
    return os.path.relpath(run.path)


def exit_code(ended: Ended) -> int:
    """130 for Ctrl-C, as shells expect; else the outcome's."""
    return 130 if ended.interrupted and ended.outcome is not Outcome.OK else ended.outcome.code


def raise_failure(ended: Ended, run: Run) -> None:
    """Turn a failed end into the one message that the user sees."""
    if ended.outcome in (Outcome.OK, Outcome.PREEMPTED) or ended.interrupted:
        return
    hint = f"\nGo on with: drivetrain resume {run.name}" if ended.outcome.retryable and "resume" not in ended.message else ""
    raise Problem(ended.message + hint, ended.outcome)
