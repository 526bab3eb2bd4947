"""Loads and evaluates the model of a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from drivetrain.engine.data.feed import OrderedFeed
from drivetrain.engine.data.make_feed import eval_feed
from drivetrain.engine.evaluate import Evaluation, Evaluator
from drivetrain.engine.faults.out_of_memory import OutOfMemoryOnRanks
from drivetrain.engine.group import Group
from drivetrain.engine.model import Weights, run_weights
from drivetrain.engine.numerics.precision import Precision
from drivetrain.engine.setup import prepare
from drivetrain.engine.state import tensors as state
from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan, halved_size
from drivetrain.runs import Run
from drivetrain.task import Task


def trained_model(task: Task, run: Run, device: torch.device | None = None) -> nn.Module:
    """Returns the model with the final weights of a run, or those of its last good checkpoint, in evaluation mode."""
    return _with_weights(task, run_weights(run), run, device)


def _with_weights(task: Task, weights: Weights, run: Run, device: torch.device | None) -> nn.Module:
    task.run_folder = run.path
    model = task.model()
    state.load_model(model, weights.tensors, weights.aliases, run.name)
    return model.to(device or torch.device("cpu")).eval()


def evaluate_run(task: Task, plan: Plan, run: Run, group: Group, num_resamples: int = 0) -> dict[str, Any]:
    """Evaluates the model of a run on its task's evaluation data, and on so many bootstrap resamples of it."""
    prepare(plan, group)
    data = task.eval_data()
    if data is None:
        raise Problem(f"{type(task).__name__} has no eval_data(): there is nothing to evaluate on")
    task.precision = plan.precision
    weights = run_weights(run)
    model = _with_weights(task, weights, run, group.device)
    result = _evaluate(task, model, eval_feed(task, data, plan, group), plan, group, num_resamples)
    figures = {name: figure if isinstance(figure, dict) else figure.tolist() for name, figure in result.figures.items()}
    return {
        "metrics": result.metrics, "samples": result.samples, "step": weights.step, "figures": figures,
        "classes": list(getattr(task, "classes", None) or []), "resamples": result.resamples,
        "groups": result.groups, "digest": result.digest,
    }  # fmt: skip


def _evaluate(task: Task, model: nn.Module, feed: OrderedFeed, plan: Plan, group: Group, num_resamples: int) -> Evaluation:
    """Evaluates; where memory runs out, again with half as many samples at a time."""
    while True:
        try:
            return Evaluator(task, model, feed, Precision(plan.precision, group.device), group, num_resamples=num_resamples)()
        except OutOfMemoryOnRanks:
            pass
        present_size, smaller_size = halved_size(feed.max_rank_samples, feed.micro)
        if present_size == 1:
            raise Problem("out of memory with one sample at a time: a GPU with more memory is needed", Outcome.OOM)
        feed.set_micro_batch(smaller_size)
        if group.device.type == "cuda":
            torch.cuda.empty_cache()
