"""Writes summary.txt: the main figures of a finished run."""

from __future__ import annotations

from collections.abc import Mapping

from drivetrain.launch.report import weights_text
from drivetrain.plan import Plan
from drivetrain.recipe import Recipe
from drivetrain.supervise import JobEnd
from drivetrain.watch.screen import format_duration, format_size


def summary(recipe: Recipe, plan: Plan, ended: JobEnd) -> str:
    """Returns the text: the task's own lines and metrics, then what every run has."""
    facts = ended.result["facts"]
    rows = {
        **({"Dataset": recipe.task.label, "Model": facts["model"]} | facts["summary"]),
        **_metric_rows(facts["train"], ended.result["metrics"]),
        "Epochs": facts["epochs"],
        "Batch Size": plan.global_batch,
        "Learning Rate": recipe.settings["learning_rate"],
        "Mixed Precision": plan.precision if plan.precision in ("bf16", "fp16") else f"no ({plan.precision})",
        "World Size": plan.world_size,
        "Device": facts["device"],
        "Total Parameters": f"{facts['parameters']:,}",
        "Steps": f"{ended.result['step']:,}",
        "Weights": weights_text(facts).removeprefix("weights "),
        "Training Time": format_duration(facts["time"]),
        "Peak Memory": format_size(facts["peak_memory_bytes"]),
    }
    return "".join(f"{name + ':':<20}{value}\n" for name, value in rows.items())


def _metric_rows(train: Mapping[str, float], test: Mapping[str, float]) -> dict[str, str]:
    """Returns each metric in training (the mean over the last epoch) and in evaluation; the loss is last."""
    rows: dict[str, str] = {}
    for name in test or train:
        title = name.replace("_", " ").title()
        for prefix, values in (("Training", train), ("Test", test)):
            if name != "loss" and name in values:
                rows[f"{prefix} {title}"] = _text(name, values[name])
    return rows | {"Test Loss": f"{test['loss']:.4f}" if "loss" in test else "not measured"}


def _text(name: str, value: float) -> str:
    if "accuracy" in name and 0 <= value <= 1:
        return f"{100 * value:.2f} %"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
