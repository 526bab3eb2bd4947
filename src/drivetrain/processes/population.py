"""Trains trials of `tune` as populations: trials of the same shape are one program, in one worker, which reports how each goes.

A family of tasks takes part by naming a module with its `PopulationRules` in `Task.tune_population`.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan
from drivetrain.processes.job import PopulationJob, PopulationMember
from drivetrain.runs import Run
from drivetrain.task_ref import load_class
from drivetrain.watch.files import MetricsFile

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from drivetrain.data import Source
    from drivetrain.engine.group import Group
    from drivetrain.engine.group.requests import SupportsBool
    from drivetrain.engine.state.best import Best
    from drivetrain.task import Task

Report = Callable[[str, Any], None]
NOT_A_NUMBER = "the loss or its gradient is not a number by step {0:,}.\nTry a lower learning_rate, clip=1, a warmup, or precision=fp32"


# --- what a family provides -----------------------------------------------------------------------


class PopulationRules(Protocol):
    """A family's module for populations. Importing it must not import torch, for the command line reads `VARYING`."""

    VARYING: Collection[str]
    """Settings in which trials of one program may differ."""

    def why_impossible(self, settings: Mapping[str, Any]) -> str:
        """Returns why a trial with these settings cannot be part of a population, and the fix; empty if it can."""
        ...

    def check_task(self, task: Any) -> None:
        """Refuses a task of which no population can be made, for reasons that its settings do not show."""
        ...

    def make_population(self, tasks: Sequence[Any], models: Sequence[Any], learning_rates: Tensor, device: torch.device) -> TrialPopulation:
        """Returns the population of trials; `learning_rates` are [steps, trials]."""
        ...


class TrialPopulation(Protocol):
    """Trials of one shape on one device, which learn from a `Source`. The first dimension of all tensors counts trials."""

    source: Source
    weights: Tensor
    """All learned parameters, a row for each trial."""
    failed: Tensor
    """Which trials had a loss or a gradient that is not finite."""
    metric_names: list[str]
    step_metrics: Tensor
    """Of the last step, a row for each of `metric_names`."""

    @property
    def samples_per_group(self) -> int: ...
    @property
    def num_uniform(self) -> int:
        """Random numbers that a group needs in a collection."""
        ...

    @property
    def num_reset_uniform(self) -> int:
        """Random numbers that a group needs before the first collection."""
        ...

    def begin(self, uniform: Tensor) -> None:
        """Makes the state before the first collection, with random numbers [trials, groups, num_reset_uniform]."""
        ...

    def iterate(self, uniform: Tensor, orders: Tensor) -> None:
        """Collects, and takes all optimizer steps of the collection.

        The random numbers are [trials, groups, num_uniform], the orders of the samples [trials, passes, groups, samples_per_group].
        """
        ...

    def evaluate(self, samples: Tensor) -> dict[str, Tensor]:
        """Returns every trial's metrics of each evaluation sample: [trials, samples]."""
        ...

    def load_into(self, model: Any, trial: int, weights: Tensor) -> None:
        """Gives a model the weights of a trial, from `self.weights` or a copy of it."""
        ...


def load_rules(module: str) -> PopulationRules:
    """Imports the rules that a task names."""
    rules: Any = importlib.import_module(module)
    return rules  # type: ignore[no-any-return]


# --- the worker -----------------------------------------------------------------------------------


def train_population(job: PopulationJob, group: Group, report: Report, stop: SupportsBool) -> dict[str, Any]:
    """Trains a job's members; reports each one's rows and its end as they come."""
    from drivetrain.engine.numerics.precision import Precision
    from drivetrain.engine.setup import prepare

    plan = job.plan
    kind: Any = load_class(job.task)
    rules = load_rules(kind.tune_population)
    prepare(plan, group)
    Precision(plan.precision, group.device)
    for members in programs(job.members, rules.VARYING, job.size):
        tasks = [kind(**member.settings) for member in members]
        if not _Program(members, tasks, rules, plan, group, report).run(stop):
            return {"outcome": Outcome.PREEMPTED, "step": 0}
    return {"outcome": Outcome.OK}


def programs(members: Iterable[PopulationMember], varying: Collection[str], size: int) -> Iterator[list[PopulationMember]]:
    """Yields the members of each program: those whose settings are the same except the varying ones, at most `size` at a time."""
    by_shape: dict[str, list[PopulationMember]] = {}
    for member in members:
        shape = {name: value for name, value in member.settings.items() if name not in varying}
        by_shape.setdefault(json.dumps(shape, sort_keys=True), []).append(member)
    for alike in by_shape.values():
        for start in range(0, len(alike), size):
            yield alike[start : start + size]


@dataclass
class _Member:
    """One of the trials that are trained at once."""

    trial: int
    run: Run
    task: Task
    model: nn.Module
    best: Best
    file: MetricsFile
    metrics: dict[str, float]
    """Of its best evaluation, whose weights are kept."""
    train: dict[str, float]
    failed_by: int = 0
    """The step by which its loss was not finite; 0 if it was always finite."""


class _Program:
    """Trials of one shape, from their first collection to their last."""

    def __init__(
        self, specs: list[PopulationMember], tasks: list[Task], rules: PopulationRules, plan: Plan, group: Group, report: Report
    ) -> None:
        import torch

        from drivetrain.engine.cadence import Period
        from drivetrain.engine.fast.graphs import Graphs
        from drivetrain.engine.log.observe import Observer
        from drivetrain.engine.model import build_model
        from drivetrain.engine.state.best import Best

        task: Any = tasks[0]
        rules.check_task(task)
        self.device, self.report = group.device, report
        runs = [Run(spec.run) for spec in specs]
        models: list[Any] = [build_model(task, plan, run, group, Observer()) for task, run in zip(tasks, runs, strict=True)]
        self.members = [
            _Member(spec.trial, run, task, model, Best(str(task.best)), MetricsFile(run), {}, {})
            for spec, run, task, model in zip(specs, runs, tasks, models, strict=True)
        ]
        source: Source = task.train_data()
        self.steps_per_epoch = source.passes * len(source) // task.global_batch
        self.steps = self._total_steps(task)
        self.learning_rates = self._learning_rates()
        self.population = rules.make_population(tasks, models, torch.tensor(self.learning_rates), self.device)
        data = task.eval_data()
        if data is None:
            raise Problem(f"best={task.best} needs an evaluation, but the task has no eval_data()")
        self.eval_samples: Tensor = data.columns[0].to(self.device)
        self.best_weights = self.population.weights.clone()
        """Of each trial, the weights of its best evaluation."""
        self.eval_every = Period(task.eval_every, self.steps_per_epoch)
        is_captured = self.device.type == "cuda" and plan.capture != "off"
        self.graphs = Graphs(self.device, lambda text: report("notice", text)) if is_captured else None
        self.groups = torch.arange(self.population.source.groups, device=self.device)
        self.start_time = self.last_time = time.monotonic()
        self.last_step = 0
        """The step of the last evaluation, which ended at `last_time`."""

    def _total_steps(self, task: Any) -> int:
        steps = int(task.steps or task.epochs * self.steps_per_epoch)
        if steps % self.steps_per_epoch:
            nearest = max(1, steps // self.steps_per_epoch) * self.steps_per_epoch
            raise Problem(f"steps={steps} ends within a collection, of which {self.steps_per_epoch} steps are taken: steps={nearest}")
        return steps

    def _learning_rates(self) -> list[list[float]]:
        """Returns the learning rate of each step and member."""
        from drivetrain.engine.numerics.optim import make_schedule

        factors = [make_schedule(member.task, self.steps, self.steps_per_epoch) for member in self.members]
        peaks = [float(member.task.learning_rate) for member in self.members]
        return [[peak * factor(step) for peak, factor in zip(peaks, factors, strict=True)] for step in range(self.steps)]

    def run(self, stop: SupportsBool) -> bool:
        """Trains to the end; returns False if it was asked to stop before."""
        for epoch in range(self.steps // self.steps_per_epoch):
            if stop:
                return False
            uniform, orders = self._uniform(epoch), self._orders(epoch)
            self._replayed("iterate", lambda inputs: self.population.iterate(*inputs), (uniform, orders))
            done = (epoch + 1) * self.steps_per_epoch
            if done == self.steps or self.eval_every.next_step(done - self.steps_per_epoch) <= done or self.eval_every.restart_if_over():
                self._evaluate(done)
        for trial, member in sorted(enumerate(self.members), key=lambda pair: pair[1].failed_by):  # first those that finished
            self._end(trial, member)
        return True

    def _replayed(self, name: str, function: Callable[[Any], Any], inputs: Any) -> Any:
        """Calls a function, on a GPU as a CUDA graph where that is possible."""
        return function(inputs) if self.graphs is None else self.graphs((name,), function, inputs)

    # --- random numbers: the same as those of an ordinary run ---

    def _uniform(self, epoch: int) -> Tensor:
        """Returns the random numbers of a collection; before the first one, begins the population."""
        from drivetrain.engine.data.keyed_random import KeyedRand, RandomStream

        streams = {seed: KeyedRand(self.groups, seed, epoch, RandomStream.GROUP) for seed in self._seeds()}
        uniform = self._by_seed(lambda seed: streams[seed].uniform(self.population.num_uniform))
        if epoch == 0:
            self.population.begin(self._by_seed(lambda seed: streams[seed].uniform(self.population.num_reset_uniform)))
        return uniform

    def _orders(self, epoch: int) -> Tensor:
        """Returns the orders of the samples in each pass of an epoch."""
        import torch

        from drivetrain.engine.data.keyed_random import KeyedRand, RandomStream

        samples_per_group = self.population.samples_per_group
        first = self.groups[:, None] * samples_per_group

        def order(seed: int, number: int) -> Tensor:
            uniform = KeyedRand(self.groups, seed, epoch, number, RandomStream.ORDER).uniform(samples_per_group)
            return torch.argsort(uniform, dim=1, stable=True) + first

        return self._by_seed(lambda seed: torch.stack([order(seed, number) for number in range(self.population.source.passes)]))

    def _seeds(self) -> list[int]:
        return [int(member.task.seed) for member in self.members]

    def _by_seed(self, make: Callable[[int], Tensor]) -> Tensor:
        """Returns [trials, ...], made once for all trials that have the same seed."""
        import torch

        made = {seed: make(seed) for seed in dict.fromkeys(self._seeds())}
        return torch.stack([made[seed] for seed in self._seeds()])

    # --- evaluation ---

    def _evaluate(self, done: int) -> None:
        """Evaluates all members, reports their rows and keeps the best weights. Only here the host waits for the device."""
        import torch

        step_metrics, failed = self.population.step_metrics.T.tolist(), self.population.failed.tolist()
        facts = self._facts(done)  # before the evaluation, whose time is not the training's
        results = self._replayed("evaluate", self.population.evaluate, self.eval_samples)
        values = {name: column.cpu().double().mean(1).tolist() for name, column in results.items()}
        is_better = []
        for trial, member in enumerate(self.members):
            member.failed_by = member.failed_by or (done if failed[trial] else 0)
            if member.failed_by:
                is_better.append(False)
                continue
            metrics = {name: column[trial] for name, column in values.items()}
            trained = dict(zip(self.population.metric_names, step_metrics[trial], strict=True))
            is_better.append(member.best.update(metrics, done))
            if is_better[-1] or member.best.step is None:
                member.metrics = metrics
                member.train = {name.removeprefix("train/"): value for name, value in trained.items() if name.startswith("train/")}
            row = facts | trained | {"learning_rate": self.learning_rates[done - 1][trial]} | {f"eval/{k}": v for k, v in metrics.items()}
            member.file.row(row)
            member.file.flush()
            self.report("member_row", {"trial": member.trial, "row": row})
        rows = torch.tensor(is_better, device=self.device)[:, None]
        self.best_weights.copy_(torch.where(rows, self.population.weights, self.best_weights))
        self.last_time, self.last_step = time.monotonic(), done

    def _facts(self, done: int) -> dict[str, Any]:
        """Returns the part of a row that all members share."""
        from drivetrain.engine.measure.memory import peak_memory

        now, source = time.monotonic(), self.population.source
        samples = (done - self.last_step) // self.steps_per_epoch * len(source) * source.passes
        speed = samples / max(1e-9, now - self.last_time)
        return {
            "step": done, "epoch": done // self.steps_per_epoch, "time": round(now - self.start_time, 3),
            "samples_per_second": speed, "memory_bytes": peak_memory(self.device),
            **{f"{name}_per_second": factor * speed for name, factor in source.speeds.items()},
        }  # fmt: skip

    def _end(self, trial: int, member: _Member) -> None:
        """Writes a member's weights, and reports its end."""
        from drivetrain.engine.state import tensors as state

        if member.failed_by:
            message = NOT_A_NUMBER.format(member.failed_by)
            self.report("member_end", {"trial": member.trial, "outcome": Outcome.NAN, "message": message, "result": {}})
            return
        weights = self.population.weights if member.best.step is None else self.best_weights
        self.population.load_into(member.model, trial, weights)
        state.write_weights(member.run.model_path, *state.model_tensors(member.model))
        facts = self._facts(self.steps)
        result = {
            "step": self.steps, "metrics": member.metrics, "facts": {
                "model": type(member.model).__name__, "train": member.train,
                "summary": {"Dataset": type(member.task).__name__} | member.task.summary_fields(),
                "weights_step": member.best.step or self.steps, "best": member.best.name if member.best.step else "",
                "epochs": facts["epoch"], "device": str(self.device), "time": facts["time"], "peak_memory_bytes": facts["memory_bytes"],
                "parameters": state.count_parameters(member.model.parameters()), "test_samples": len(self.eval_samples),
            },
        }  # fmt: skip
        self.report("member_end", {"trial": member.trial, "outcome": Outcome.OK, "message": "", "result": result})
