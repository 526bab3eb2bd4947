"""Ends a training: writes the final weights, and returns the facts for the run's record."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from drivetrain.data import Source
from drivetrain.engine.execution import Execution
from drivetrain.engine.measure.memory import peak_memory
from drivetrain.engine.setup import Setup
from drivetrain.engine.state import tensors as state
from drivetrain.engine.state.checkpoint import Damaged, folder_name, verify
from drivetrain.engine.state.resume import Progress
from drivetrain.outcomes import Outcome, Problem


@dataclass(frozen=True)
class Result:
    """How a training ended."""

    outcome: Outcome
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    """For a finished training: the evaluation of its final weights, which are those of step `facts["weights_step"]`."""
    facts: dict[str, Any] = field(default_factory=dict)


def describe(setup: Setup, execution: Execution, step: int) -> dict[str, Any]:
    """Returns facts about a training for observers and the run's record."""
    plan, group = execution.plan, setup.group
    return {
        "parameters": setup.num_parameters,
        "trainable": setup.num_trainable,
        "processes": group.size,
        "backend": plan.backend,
        "precision": plan.precision,
        "accumulation": plan.accumulation,
        "device": str(group.device),
        "step": step,
        "steps": setup.total_steps,
        "steps_per_epoch": setup.steps_per_epoch,
        "epochs": -(-setup.total_steps // setup.steps_per_epoch),
        "test_samples": setup.evaluation.length if setup.evaluation else 0,
    }


def finish(setup: Setup, execution: Execution, progress: Progress, report_damage: Any) -> Result:
    """Writes the final weights (the best ones, where `best` was asked for); may be repeated if it is interrupted."""
    step, best = progress.step, progress.best
    assert progress.rows is not None
    facts = describe(setup, execution, step)
    facts |= {"time": progress.seconds, "peak_memory_bytes": peak_memory(setup.group.device), "train": progress.rows.means}
    facts |= {"weights_step": step, "best": best.name if best.step == step else ""}
    metrics = progress.metrics or {}
    tensors, aliases = execution.strategy.model_tensors()
    if setup.group.is_main:
        if best.step is not None and best.step != step:
            try:
                checkpoint = verify(setup.run.checkpoints / folder_name(best.step))
                tensors, metrics = state.without_prefix(checkpoint.tensors(), "model"), checkpoint.extra["metrics"]
                facts |= {"weights_step": best.step, "best": best.name, "train": checkpoint.extra["train"]}
            except Damaged as damage:
                report_damage(f"the best checkpoint (step {best.step:,}) cannot be used, so the last weights are kept: {damage}")
        _write_model(setup, execution, step, tensors, aliases, metrics, facts)
        if setup.source is not None:
            _write_files(setup, setup.source, step)
    return Result(Outcome.OK, step, metrics, facts)


def _write_model(
    setup: Setup, execution: Execution, step: int, tensors: dict[str, Tensor], aliases: dict[str, str],
    metrics: dict[str, float], facts: dict[str, Any],
) -> None:  # fmt: skip
    run = setup.run
    try:
        state.write_weights(run.model_path, tensors, aliases)
        card = {
            "run": run.name, "steps": step, "processes": setup.group.size, "precision": execution.plan.precision,
            "weights_step": facts["weights_step"], "metrics": metrics, "seconds": facts["time"],
        }  # fmt: skip
        setup.task.model_files(tensors, run.model_path.parent, card)
    except Exception as error:  # safetensors has its own error for a full disk
        raise Problem(
            f"training is done, but the weights could not be written: {error}.\nFix that, then: drivetrain resume {run.name}",
            Outcome.INFRA,
        ) from None


def _write_files(setup: Setup, source: Source, step: int) -> None:
    """Writes what a source hands on. The last checkpoint has the state of all ranks' groups."""
    if type(source).write_files is Source.write_files:
        return
    run = setup.run
    try:
        checkpoint = verify(run.checkpoints / folder_name(step))
        source.write_files(state.without_prefix(checkpoint.tensors(), "source"), run.data)
    except (OSError, Damaged) as error:
        raise Problem(
            f"training is done, but its data could not be written: {error}.\nFix that, then: drivetrain resume {run.name}", Outcome.INFRA
        ) from None
