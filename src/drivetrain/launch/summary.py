"""summary.txt: the figures of a finished run that people note."""

from __future__ import annotations

from drivetrain.launch.report import weights_text
from drivetrain.plan import Plan
from drivetrain.recipe import Recipe
from drivetrain.supervise import Ended
from drivetrain.watch.screen import duration, size


def summary(recipe: Recipe, plan: Plan, ended: Ended) -> str:
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
        "Weights": weights_text(facts).removeprefix("weights "),
        "Training Time": duration(facts["time"]),
        "Peak Memory": size(facts["peak_memory_bytes"]),
    }
    return "".join(f"{name + ':':<20}{value}\n" for name, value in rows.items())
