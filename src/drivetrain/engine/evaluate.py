"""Evaluation: every sample once over all ranks, exact averages, and the task's summary of all values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from drivetrain.engine.capture import Graphs, form_of
from drivetrain.engine.feed import EVAL, OrderedFeed
from drivetrain.engine.group import Group
from drivetrain.engine.precision import Precision
from drivetrain.engine.rand import key, seed_model
from drivetrain.outcomes import Problem
from drivetrain.task import Task, overrides


@dataclass(frozen=True)
class Evaluation:
    metrics: dict[str, float]
    figures: dict[str, Any]
    """What `summary` gave that is no single number, such as a confusion matrix."""
    samples: int


def evaluate(
    task: Task, model: nn.Module, feed: OrderedFeed, precision: Precision, group: Group, graphs: Graphs | None = None
) -> Evaluation:
    """With `graphs`, which the training step has proven, forward passes are replayed."""
    training = model.training

    def metrics_of(inputs: tuple[Any, Tensor]) -> Any:
        with precision.forward():
            return task.metrics(model, feed.assemble(*inputs))

    model.eval()
    feed.open(0)
    values: dict[str, list[Tensor]] = {}
    sums: dict[str, Tensor] = {}
    order: dict[str, None] = {}  # as the task gave them: the first is the one people look at
    try:
        with torch.no_grad():
            for micro in feed.micro_batches(0, 0):
                seed_model(group.device, key(int(task.seed), EVAL, micro.position))
                inputs = micro.given, micro.ids
                if graphs is None:
                    metrics = metrics_of(inputs)
                else:  # what a graph gave is overwritten by its next replay
                    metrics = tree_map(_kept, graphs(("evaluate", form_of(micro.given), len(micro.ids)), metrics_of, inputs))
                _add(metrics, micro.weight, len(micro.ids), values, sums)
                order |= dict.fromkeys(metrics)
    finally:
        feed.close()
        model.train(training)
    return _finish(task, values, sums, list(order), feed.length, group)


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _add(metrics: Any, weight: int, samples: int, values: dict[str, list[Tensor]], sums: dict[str, Tensor]) -> None:
    if not isinstance(metrics, dict) or not metrics:
        raise Problem(f"metrics() gave {type(metrics).__name__}: return a dict of name -> per-sample values or (total, count)")
    for name, value in metrics.items():
        if isinstance(value, tuple):
            place = next((v.device for v in value if isinstance(v, Tensor)), torch.device("cpu"))
            counted = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=place) for v in value])
            sums[name] = sums.get(name, 0.0) + counted * (1 if weight else 0)
        elif not isinstance(value, Tensor):
            raise Problem(f"metrics() gave a {type(value).__name__} for {name!r}: per-sample values or (total, count) are needed")
        elif value.dim() == 0:  # a mean over the batch's samples, as a loss gives it
            sums[name] = sums.get(name, 0.0) + torch.stack([value.double(), torch.ones_like(value).double()]) * weight
        elif len(value) != samples:
            raise Problem(f"metrics() gave {len(value)} values of {name!r} for {samples} samples: give one a sample, or (total, count)")
        else:
            values.setdefault(name, []).append(value[:weight].detach())


def _finish(
    task: Task, values: dict[str, list[Tensor]], sums: dict[str, Tensor], order: list[str], samples: int, group: Group
) -> Evaluation:
    mine = {name: torch.cat(parts).cpu() for name, parts in values.items()}
    everyone = group.gather((mine, {name: pair.cpu() for name, pair in sums.items()}))
    whole = {name: torch.cat([one[0][name] for one in everyone]) for name in mine}
    metrics = {n: float(v.double().mean()) for n, v in whole.items() if v.dim() == 1 and (v.is_floating_point() or v.dtype == torch.bool)}
    for name in sums:
        total, count = torch.stack([one[1][name] for one in everyone]).sum(0).tolist()
        metrics[name] = total / count if count else 0.0
    figures: dict[str, Any] = {}
    if overrides(task, "summary"):
        for name, figure in task.summary(whole).items():
            if isinstance(figure, Tensor) and figure.dim() > 0:
                figures[name] = figure
            elif isinstance(figure, (int, float, Tensor)):
                metrics[name] = float(figure)
            else:
                raise Problem(f"summary() gave a {type(figure).__name__} for {name!r}: numbers and tensors can be kept")
    ranked = {n: metrics[n] for n in sorted(metrics, key=lambda n: order.index(n) if n in order else len(order))}
    return Evaluation(ranked, figures, samples)
