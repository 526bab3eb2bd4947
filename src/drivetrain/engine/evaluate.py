"""Evaluation: every sample once over all ranks, exact averages, and the task's summary of all values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.engine.capture import Graphs, form_of
from drivetrain.engine.control import SupportsBool
from drivetrain.engine.feed import EVAL, OrderedFeed
from drivetrain.engine.group import Group
from drivetrain.engine.memory import shortages
from drivetrain.engine.precision import Precision
from drivetrain.engine.rand import host_state, key, seed_model
from drivetrain.engine.shortage import Short
from drivetrain.outcomes import Problem
from drivetrain.task import Task, overrides


@dataclass(frozen=True)
class Evaluation:
    metrics: dict[str, float]
    figures: dict[str, Any]
    """What `summary` gave that is no single number, such as a confusion matrix."""
    samples: int


class Left(Exception):
    """Some rank was asked to stop: every rank left the evaluation, which is to be done when the run goes on."""


class Replay:
    """Evaluation's forward passes as graphs, once two plain ones have shown that nothing but tensors comes of them."""

    def __init__(self, graphs: Graphs, look: Callable[[], dict[str, object]]) -> None:
        self._graphs, self._look = graphs, look
        self._calls = 0
        self._compared = False

    def __call__(self, work: Callable[[Any], Any], inputs: tuple[Any, Tensor], begin: Callable[[], None]) -> Any:
        self._calls += 1
        if self._graphs.broken:
            return work(inputs)
        if self._calls <= 2:
            before = self._look(), host_state(True)
            output = work(inputs)
            if (self._look(), host_state(True)) != before:
                self._graphs.broken = "metrics() changes something of Python's, or draws from the host's generators"
            return output
        got = tree_map(_kept, self._graphs(("evaluate", form_of(inputs[0]), len(inputs[1])), work, inputs))
        if not self._compared and self._graphs.holds("evaluate"):
            self._compared = True
            begin()
            expected = work(inputs)
            if not _alike(got, expected):
                self._graphs.give_up("evaluation: replayed, metrics() gave other values")
                return expected
        return got


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value  # the next replay overwrites what a graph gave


def _alike(one: Any, two: Any) -> bool:
    pairs = zip(tree_leaves(one), tree_leaves(two), strict=True)
    return all(torch.allclose(a.double(), b.double(), 1e-3, 1e-5, True) if isinstance(a, Tensor) else a == b for a, b in pairs)


def evaluate(
    task: Task,
    model: nn.Module,
    feed: OrderedFeed,
    precision: Precision,
    group: Group,
    run: Callable[..., Any] = lambda function, *args: function(*args),
    replay: Replay | None = None,
    moment: Callable[[str], None] | None = None,
    undoable: bool = True,
    stop: SupportsBool = False,
) -> Evaluation:
    """Raises Short, on every rank, where memory ran out on any, and Left where any was asked to stop; unless ranks talk to
    each other in the forward pass."""
    training = model.training
    short = left = False

    def compute(inputs: tuple[Any, Tensor]) -> Any:
        with shortages, precision.forward():
            return task.metrics(model, feed.assemble(*inputs))

    def metrics_of(inputs: tuple[Any, Tensor]) -> Any:
        return run(compute, inputs)

    model.eval()
    feed.open(0)
    values: dict[str, list[Tensor]] = {}
    sums: dict[str, Tensor] = {}
    order: dict[str, None] = {}  # as the task gave them: the first is the one people look at
    try:
        with torch.no_grad():
            for micro in feed.micro_batches(0, 0):
                left = undoable and bool(stop)
                if left:
                    break
                seed = partial(seed_model, group.device, key(int(task.seed), EVAL, micro.position))
                seed()
                inputs = micro.given, micro.ids
                if moment is not None:
                    moment("metrics")
                metrics = metrics_of(inputs) if replay is None else replay(metrics_of, inputs, seed)
                _add(metrics, micro.weight, len(micro.ids), values, sums)
                order |= dict.fromkeys(metrics)
    except torch.OutOfMemoryError:
        if not undoable:
            raise
        short = True
    finally:
        feed.close()
        model.train(training)
    if undoable:
        told = group.sum_on_hosts([float(left), *(float(short and rank == group.rank) for rank in range(group.size))])
        if told[0]:
            raise Left
        if any(told):
            raise Short([rank for rank, one in enumerate(told[1:]) if one])
    return _finish(task, values, sums, list(order), feed.length, group)


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
