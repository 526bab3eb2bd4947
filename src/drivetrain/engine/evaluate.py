"""Evaluation: every sample once over all ranks, exact averages, and the task's summary of all values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from drivetrain.engine.data.feed import OrderedFeed
from drivetrain.engine.data.keyed_random import RandomStream, host_generator_state, key, seed_model
from drivetrain.engine.fast.graphs import Graphs, form_of
from drivetrain.engine.faults.out_of_memory import OutOfMemoryOnRanks
from drivetrain.engine.group import Group
from drivetrain.engine.group.requests import SupportsBool
from drivetrain.engine.measure.memory import allocation_errors_as_oom
from drivetrain.engine.numerics.bootstrap import resample_metrics, sample_groups
from drivetrain.engine.numerics.metrics import EvaluationMetrics
from drivetrain.engine.numerics.precision import Precision
from drivetrain.task import Task


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation."""

    metrics: dict[str, float]
    figures: dict[str, Any]
    """Tensors and tables that `summary` returned, such as a confusion matrix."""
    samples: int
    resamples: dict[str, list[float]] = field(default_factory=dict)
    """The metrics of each bootstrap resample of the samples, on rank 0."""
    groups: int | None = None
    """Number of groups that the bootstrap draws, where the task has any."""
    digest: str = ""
    """A hash of what was evaluated, where the task names it."""


class EvaluationStopped(Exception):
    """Some rank was asked to stop. Every rank leaves the evaluation; a resumed run repeats it."""


class EvaluationGraphs:
    """Replays an evaluation's forward passes as CUDA graphs, after two eager passes have shown that they change only tensors."""

    def __init__(self, graphs: Graphs, assumed_values: Callable[[], dict[str, object]]) -> None:
        """`assumed_values` returns the Python values that a graph assumes constant."""
        self._graphs, self._assumed_values = graphs, assumed_values
        self._num_calls = 0
        self._is_compared = False

    def __call__(self, work: Callable[[Any], Any], inputs: tuple[Any, Tensor], seed: Callable[[], None]) -> Any:
        self._num_calls += 1
        if self._graphs.disabled_reason:
            return work(inputs)
        if self._num_calls <= 2:
            before = self._assumed_values(), host_generator_state(True)
            output = work(inputs)
            if (self._assumed_values(), host_generator_state(True)) != before:
                self._graphs.disabled_reason = "metrics() changes Python values, or draws from the host's random generators"
            return output
        output = self._graphs(("evaluate", form_of(inputs[0]), len(inputs[1])), work, inputs)
        output = tree_map_only(Tensor, torch.clone, output)  # the next replay overwrites a graph's output
        if not self._is_compared and self._graphs.has_graph_of("evaluate"):
            self._is_compared = True
            seed()
            expected = work(inputs)
            if not _are_close(output, expected):
                self._graphs.disable("evaluation: metrics() gave other values in a CUDA graph")
                return expected
        return output


def _are_close(first: Any, second: Any) -> bool:
    for a, b in zip(tree_leaves(first), tree_leaves(second), strict=True):
        is_close = torch.allclose(a.double(), b.double(), 1e-3, 1e-5, equal_nan=True) if isinstance(a, Tensor) else a == b
        if not is_close:
            return False
    return True


@dataclass
class Evaluator:
    """Evaluates a model on a feed, as often as it is called."""

    task: Task
    model: nn.Module
    feed: OrderedFeed
    precision: Precision
    group: Group
    run: Callable[..., Any] = field(default=lambda function, *args: function(*args))
    """Calls a function that uses the model (a strategy's `call`)."""
    graphs: EvaluationGraphs | None = None
    reached: Callable[[str], None] | None = None
    can_undo: bool = True
    """False where ranks communicate in the forward pass: then an out-of-memory error ends all of them."""
    num_resamples: int = 0
    """Number of bootstrap resamples."""

    def __call__(self, stop: SupportsBool = False) -> Evaluation:
        """Raises, on every rank, OutOfMemoryOnRanks where memory ran out on any, and EvaluationStopped where any was asked to stop."""
        metrics = EvaluationMetrics()
        is_out_of_memory = is_stopped = False
        try:
            with self._evaluation_mode():
                is_stopped = self._forward_all(metrics, stop)
        except torch.OutOfMemoryError:
            if not self.can_undo:
                raise
            is_out_of_memory = True
        if self.can_undo:
            self._raise_together(is_stopped, is_out_of_memory)
        numbers, figures = metrics.finish(self.task, self.group)
        if not (self.group.is_main and self.num_resamples):
            return Evaluation(numbers, figures, self.feed.length)
        groups = sample_groups(self.task, metrics.all_values)
        resamples = resample_metrics(self.task, metrics.all_values, self.num_resamples, groups)
        if groups is None:
            return Evaluation(numbers, figures, self.feed.length, resamples)
        return Evaluation(numbers, figures, self.feed.length, resamples, len(groups.members), groups.digest)

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        was_training = self.model.training
        self.model.eval()
        self.feed.open(0)
        try:
            with torch.no_grad():
                yield
        finally:
            self.feed.close()
            self.model.train(was_training)

    def _forward_all(self, metrics: EvaluationMetrics, stop: SupportsBool) -> bool:
        """Adds the metrics of all micro-batches; returns whether a stop ended it before the last one."""
        for micro in self.feed.micro_batches(0, 0):
            if self.can_undo and stop:
                return True
            seed = partial(seed_model, self.group.device, key(int(self.task.seed), RandomStream.EVAL, micro.position))
            seed()
            inputs = micro.loaded, micro.ids
            if self.reached is not None:
                self.reached("metrics")
            values = self._forward(inputs) if self.graphs is None else self.graphs(self._forward, inputs, seed)
            metrics.add(values, micro.num_real, len(micro.ids))
        return False

    def _forward(self, inputs: tuple[Any, Tensor]) -> Any:
        return self.run(self._metrics, inputs)

    def _metrics(self, inputs: tuple[Any, Tensor]) -> Any:
        with allocation_errors_as_oom, self.precision.forward():
            return self.task.metrics(self.model, self.feed.assemble(*inputs))

    def _raise_together(self, is_stopped: bool, is_out_of_memory: bool) -> None:
        own = [float(is_out_of_memory and rank == self.group.rank) for rank in range(self.group.size)]
        any_stopped, *any_out_of_memory = self.group.sum_on_hosts([float(is_stopped), *own])
        if any_stopped:
            raise EvaluationStopped
        if any(any_out_of_memory):
            raise OutOfMemoryOnRanks([rank for rank, flag in enumerate(any_out_of_memory) if flag])
