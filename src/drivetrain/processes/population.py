"""Trains many trials of `tune` at once in one worker: trials of the same shape run as one batched program, called a population.

A task family supports this with a module of `PopulationRules`, which `Task.tune_population` names.
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
    """What the module of a task family defines. Importing it must not import torch, because the command line reads `VARYING`."""

    VARYING: Collection[str]
    """Settings that may differ between the trials of one population."""

    def why_impossible(self, settings: Mapping[str, Any]) -> str:
        """Returns why a trial with these settings cannot be in a population, and the fix; "" if it can."""
        ...

    def check_task(self, task: Any) -> None:
        """Raises Problem if the task cannot be in a population for a reason that its settings do not show."""
        ...

    def make_population(self, tasks: Sequence[Any], models: Sequence[Any], learning_rates: Tensor, device: torch.device) -> TrialPopulation:
        """Returns the population; `learning_rates` has the shape [steps, trials]."""
        ...


class TrialPopulation(Protocol):
    """Trials of one shape that learn from a `Source` on one device. The first dimension of every tensor is the trial."""

    source: Source
    weights: Tensor
    """[trials, parameters]: all learned parameters."""
    failed: Tensor
    """[trials]: whether a loss or a gradient of the trial was not finite."""
    metric_names: list[str]
    step_metrics: Tensor
    """[metrics, trials]: metrics of the last step, in the order of `metric_names`."""

    @property
    def samples_per_group(self) -> int: ...
    @property
    def num_uniform(self) -> int:
        """How many random numbers a group needs for each collection."""
        ...

    @property
    def num_reset_uniform(self) -> int:
        """How many random numbers a group needs before the first collection."""
        ...

    def begin(self, uniform: Tensor) -> None:
        """Resets the environments before the first collection. `uniform` has the shape [trials, groups, num_reset_uniform]."""
        ...

    def iterate(self, uniform: Tensor, orders: Tensor) -> None:
        """Collects samples, then takes all optimizer steps on them.

        `uniform` has the shape [trials, groups, num_uniform], `orders` [trials, passes, groups, samples_per_group].
        """
        ...

    def evaluate(self, samples: Tensor) -> dict[str, Tensor]:
        """Returns the metrics by name; each has the shape [trials, samples]."""
        ...

    def load_into(self, model: Any, trial: int, weights: Tensor) -> None:
        """Copies a trial's row of `weights` into a model."""
        ...


def load_rules(module: str) -> PopulationRules:
    """Imports the module that `Task.tune_population` names."""
    rules: Any = importlib.import_module(module)
    return rules  # type: ignore[no-any-return]


# --- the worker -----------------------------------------------------------------------------------


def train_population(job: PopulationJob, group: Group, report: Report, stop: SupportsBool) -> dict[str, Any]:
    """Trains all members of a job, and reports each trial's metrics and end at once."""
    from drivetrain.engine.numerics.precision import Precision
    from drivetrain.engine.setup import prepare

    plan = job.plan
    task_class: Any = load_class(job.task)
    rules = load_rules(task_class.tune_population)
    prepare(plan, group)
    Precision(plan.precision, group.device)  # sets torch's precision
    for members in programs(job.members, rules.VARYING, job.size):
        tasks = [task_class(**member.settings) for member in members]
        if not _Training(members, tasks, rules, plan, group, report).run(stop):
            return {"outcome": Outcome.PREEMPTED, "step": 0}
    return {"outcome": Outcome.OK}


def programs(members: Iterable[PopulationMember], varying: Collection[str], size: int) -> Iterator[list[PopulationMember]]:
    """Yields the members of each population: at most `size` members whose settings are equal except for the varying ones."""
    by_shape: dict[str, list[PopulationMember]] = {}
    for member in members:
        shape = {name: value for name, value in member.settings.items() if name not in varying}
        by_shape.setdefault(json.dumps(shape, sort_keys=True), []).append(member)
    for same_shape in by_shape.values():
        for start in range(0, len(same_shape), size):
            yield same_shape[start : start + size]


@dataclass
class _Trial:
    """One trial of a population."""

    number: int
    """Its number in the study."""
    run: Run
    task: Task
    model: nn.Module
    best: Best
    file: MetricsFile
    metrics: dict[str, float]
    """Metrics of the best evaluation."""
    train_metrics: dict[str, float]
    """Training metrics at the best evaluation."""
    failed_step: int = 0
    """The step of the evaluation that first saw a loss that is not finite; 0: none."""


class _Training:
    """The training of one population."""

    def __init__(
        self, members: list[PopulationMember], tasks: list[Task], rules: PopulationRules, plan: Plan, group: Group, report: Report
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
        runs = [Run(member.run) for member in members]
        models: list[Any] = [build_model(task, plan, run, group, Observer()) for task, run in zip(tasks, runs, strict=True)]
        self.trials = [
            _Trial(member.trial, run, task, model, Best(str(task.best)), MetricsFile(run), {}, {})
            for member, run, task, model in zip(members, runs, tasks, models, strict=True)
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
        """[trials, parameters]: each trial's weights at its best evaluation."""
        self.eval_every = Period(task.eval_every, self.steps_per_epoch)
        is_captured = self.device.type == "cuda" and plan.capture != "off"
        self.graphs = Graphs(self.device, lambda text: report("notice", text)) if is_captured else None
        self.group_ids = torch.arange(self.population.source.groups, device=self.device)
        self.start_time = self.last_evaluation_end = time.monotonic()
        self.last_evaluation_step = 0

    def _total_steps(self, task: Any) -> int:
        steps = int(task.steps or task.epochs * self.steps_per_epoch)
        if steps % self.steps_per_epoch:
            nearest = max(1, steps // self.steps_per_epoch) * self.steps_per_epoch
            raise Problem(f"steps={steps} ends within a collection: a collection takes {self.steps_per_epoch} steps. Write steps={nearest}")
        return steps

    def _learning_rates(self) -> list[list[float]]:
        """Returns the learning rates as [steps, trials]."""
        from drivetrain.engine.numerics.optim import make_schedule

        schedules = [make_schedule(trial.task, self.steps, self.steps_per_epoch) for trial in self.trials]
        peaks = [float(trial.task.learning_rate) for trial in self.trials]

        def rates(step: int) -> list[float]:
            return [peak * schedule(step) for peak, schedule in zip(peaks, schedules, strict=True)]

        return [rates(step) for step in range(self.steps)]

    def run(self, stop: SupportsBool) -> bool:
        """Trains to the end; returns False if `stop` was set before."""
        for epoch in range(self.steps // self.steps_per_epoch):
            if stop:
                return False
            uniform, orders = self._uniform(epoch), self._orders(epoch)
            self._call("iterate", lambda inputs: self.population.iterate(*inputs), (uniform, orders))
            previous_step, step = epoch * self.steps_per_epoch, (epoch + 1) * self.steps_per_epoch
            if step == self.steps or self.eval_every.next_step(previous_step) <= step or self.eval_every.restart_if_over():
                self._evaluate(step)
        for row, trial in sorted(enumerate(self.trials), key=lambda pair: pair[1].failed_step):  # successful trials first
            self._finish_trial(row, trial)
        return True

    def _call(self, name: str, function: Callable[[Any], Any], inputs: Any) -> Any:
        """Calls a function; on a GPU as a CUDA graph, if that is possible."""
        return function(inputs) if self.graphs is None else self.graphs((name,), function, inputs)

    # --- random numbers: equal to those of an ordinary run ---

    def _uniform(self, epoch: int) -> Tensor:
        """Returns the random numbers of an epoch's collection. In epoch 0 it also resets the environments."""
        from drivetrain.engine.data.keyed_random import KeyedRand, RandomStream

        streams = {seed: KeyedRand(self.group_ids, seed, epoch, RandomStream.GROUP) for seed in self._seeds()}
        uniform = self._by_seed(lambda seed: streams[seed].uniform(self.population.num_uniform))
        if epoch == 0:
            self.population.begin(self._by_seed(lambda seed: streams[seed].uniform(self.population.num_reset_uniform)))
        return uniform

    def _orders(self, epoch: int) -> Tensor:
        """Returns the order of the samples in each pass of an epoch: [trials, passes, groups, samples_per_group]."""
        import torch

        from drivetrain.engine.data.keyed_random import KeyedRand, RandomStream

        samples_per_group = self.population.samples_per_group
        first_sample = self.group_ids[:, None] * samples_per_group

        def order(seed: int, pass_number: int) -> Tensor:
            uniform = KeyedRand(self.group_ids, seed, epoch, pass_number, RandomStream.ORDER).uniform(samples_per_group)
            return torch.argsort(uniform, dim=1, stable=True) + first_sample

        passes = range(self.population.source.passes)
        return self._by_seed(lambda seed: torch.stack([order(seed, pass_number) for pass_number in passes]))

    def _seeds(self) -> list[int]:
        return [int(trial.task.seed) for trial in self.trials]

    def _by_seed(self, make: Callable[[int], Tensor]) -> Tensor:
        """Returns [trials, ...]; calls `make` once for each different seed."""
        import torch

        tensors = {seed: make(seed) for seed in dict.fromkeys(self._seeds())}
        return torch.stack([tensors[seed] for seed in self._seeds()])

    # --- evaluation ---

    def _evaluate(self, step: int) -> None:
        """Evaluates all trials, reports their rows and updates the best weights. Only here the host waits for the device."""
        import torch

        step_metrics, failed = self.population.step_metrics.T.tolist(), self.population.failed.tolist()
        shared = self._shared_values(step)  # before the evaluation, whose time does not count as training
        results = self._call("evaluate", self.population.evaluate, self.eval_samples)
        means = {name: values.cpu().double().mean(1).tolist() for name, values in results.items()}
        is_better = []
        for i, trial in enumerate(self.trials):
            if failed[i] and not trial.failed_step:
                trial.failed_step = step
            if trial.failed_step:
                is_better.append(False)
                continue
            metrics = {name: trial_means[i] for name, trial_means in means.items()}
            logged = dict(zip(self.population.metric_names, step_metrics[i], strict=True))
            is_better.append(trial.best.update(metrics, step))
            if is_better[-1] or trial.best.step is None:
                trial.metrics = metrics
                trial.train_metrics = {name.removeprefix("train/"): value for name, value in logged.items() if name.startswith("train/")}
            eval_metrics = {f"eval/{name}": value for name, value in metrics.items()}
            row = shared | logged | {"learning_rate": self.learning_rates[step - 1][i]} | eval_metrics
            trial.file.row(row)
            trial.file.flush()
            self.report("member_row", {"trial": trial.number, "row": row})
        is_better_column = torch.tensor(is_better, device=self.device)[:, None]
        self.best_weights.copy_(torch.where(is_better_column, self.population.weights, self.best_weights))
        self.last_evaluation_end, self.last_evaluation_step = time.monotonic(), step

    def _shared_values(self, step: int) -> dict[str, Any]:
        """Returns the values of a row that are the same for all trials."""
        from drivetrain.engine.measure.memory import peak_memory

        now, source = time.monotonic(), self.population.source
        num_epochs = (step - self.last_evaluation_step) // self.steps_per_epoch
        num_samples = num_epochs * len(source) * source.passes
        speed = num_samples / max(1e-9, now - self.last_evaluation_end)
        return {
            "step": step, "epoch": step // self.steps_per_epoch, "time": round(now - self.start_time, 3),
            "samples_per_second": speed, "memory_bytes": peak_memory(self.device),
            **{f"{name}_per_second": factor * speed for name, factor in source.speeds.items()},
        }  # fmt: skip

    def _finish_trial(self, row: int, trial: _Trial) -> None:
        """Writes a trial's weights, which are a row of the population's, and reports the trial's end."""
        from drivetrain.engine.state import tensors as state

        if trial.failed_step:
            message = NOT_A_NUMBER.format(trial.failed_step)
            self.report("member_end", {"trial": trial.number, "outcome": Outcome.NAN, "message": message, "result": {}})
            return
        weights = self.population.weights if trial.best.step is None else self.best_weights
        self.population.load_into(trial.model, row, weights)
        state.write_weights(trial.run.model_path, *state.model_tensors(trial.model))
        shared = self._shared_values(self.steps)
        result = {
            "step": self.steps, "metrics": trial.metrics, "facts": {
                "model": type(trial.model).__name__, "train": trial.train_metrics,
                "summary": {"Dataset": type(trial.task).__name__} | trial.task.summary_fields(),
                "weights_step": trial.best.step or self.steps, "best": trial.best.name if trial.best.step else "",
                "epochs": shared["epoch"], "device": str(self.device), "time": shared["time"], "peak_memory_bytes": shared["memory_bytes"],
                "parameters": state.count_parameters(trial.model.parameters()), "test_samples": len(self.eval_samples),
            },
        }  # fmt: skip
        self.report("member_end", {"trial": trial.number, "outcome": Outcome.OK, "message": "", "result": result})
