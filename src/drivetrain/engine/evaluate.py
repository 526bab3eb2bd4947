"""Evaluation: every sample once over all ranks, exact averages, and the task's summary of all values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.engine.cadence import SupportsBool
from drivetrain.engine.data.feed import OrderedFeed
from drivetrain.engine.data.keyed_random import RandomStream, host_generator_state, key, seed_model
from drivetrain.engine.fast.graphs import Graphs, form_of
from drivetrain.engine.faults.out_of_memory import Short
from drivetrain.engine.group import Group
from drivetrain.engine.measure.memory import allocation_errors_as_oom
from drivetrain.engine.numerics.metrics import EvaluationMetrics
from drivetrain.engine.numerics.precision import Precision
from drivetrain.task import Task


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
        if self._graphs.disabled_reason:
            return work(inputs)
        if self._calls <= 2:
            before = self._look(), host_generator_state(True)
            output = work(inputs)
            if (self._look(), host_generator_state(True)) != before:
                self._graphs.disabled_reason = "metrics() changes something of Python's, or draws from the host's generators"
            return output
        got = tree_map(_kept, self._graphs(("evaluate", form_of(inputs[0]), len(inputs[1])), work, inputs))
        if not self._compared and self._graphs.has_graph_of("evaluate"):
            self._compared = True
            begin()
            expected = work(inputs)
            if not _alike(got, expected):
                self._graphs.disable("evaluation: replayed, metrics() gave other values")
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
        with allocation_errors_as_oom, precision.forward():
            return task.metrics(model, feed.assemble(*inputs))

    def metrics_of(inputs: tuple[Any, Tensor]) -> Any:
        return run(compute, inputs)

    model.eval()
    feed.open(0)
    found = EvaluationMetrics()
    try:
        with torch.no_grad():
            for micro in feed.micro_batches(0, 0):
                left = undoable and bool(stop)
                if left:
                    break
                seed = partial(seed_model, group.device, key(int(task.seed), RandomStream.EVAL, micro.position))
                seed()
                inputs = micro.loaded, micro.ids
                if moment is not None:
                    moment("metrics")
                metrics = metrics_of(inputs) if replay is None else replay(metrics_of, inputs, seed)
                found.add(metrics, micro.num_real, len(micro.ids))
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
    return Evaluation(*found.finish(task, group), feed.length)
