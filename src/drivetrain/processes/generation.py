"""The worker's side of a population: trains the trials it is handed, those of one shape as one program, and tells how each went."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan
from drivetrain.processes.job import PopulationJob, PopulationMember
from drivetrain.runs import Run
from drivetrain.task_ref import load_class
from drivetrain.tasks.rl.shape import shape_of
from drivetrain.watch.files import MetricsFile

if TYPE_CHECKING:
    from torch import Tensor

    from drivetrain.engine.cadence import SupportsBool
    from drivetrain.engine.group import Group
    from drivetrain.engine.state.best import Best
    from drivetrain.tasks.rl.nets import Agent
    from drivetrain.tasks.rl.ppo import Ppo

Tell = Callable[[str, Any], None]
NOT_A_NUMBER = "the loss or its gradient is not a number by step {0:,}.\nTry a lower learning_rate, clip=1, a warmup, or precision=fp32"


def train(job: PopulationJob, group: Group, tell: Tell, stop: SupportsBool) -> dict[str, Any]:
    """Train a job's members; each one's rows and end are told as they come."""
    from drivetrain.engine.numerics.precision import Precision
    from drivetrain.engine.setup import prepare

    plan = job.plan
    kind: Any = load_class(job.task)
    prepare(plan, group)
    Precision(plan.precision, group.device)
    for members in grouped(job.members, job.size):
        tasks = [kind(**member.settings) for member in members]
        if not _Program(members, tasks, plan, group, tell).run(stop):
            return {"outcome": Outcome.PREEMPTED, "step": 0}
    return {"outcome": Outcome.OK}


def grouped(members: Iterable[PopulationMember], size: int) -> Iterator[list[PopulationMember]]:
    """Those of one shape together, in the order of their first, at most `size` at a time."""
    shapes: dict[str, list[PopulationMember]] = {}
    for member in members:
        shapes.setdefault(shape_of(member.settings), []).append(member)
    for alike in shapes.values():
        for start in range(0, len(alike), size):
            yield alike[start : start + size]


@dataclass
class _Member:
    """One of the trials that are trained at once."""

    trial: int
    run: Run
    task: Ppo
    model: Agent
    best: Best
    file: MetricsFile
    metrics: dict[str, float]
    """Of its best evaluation, whose weights are kept."""
    train: dict[str, float]
    failed_by: int = 0
    """The step by which its loss was no number."""


class _Program:
    """Trials of one shape from their first collection to their last."""

    def __init__(self, told: list[PopulationMember], tasks: list[Ppo], plan: Plan, group: Group, tell: Tell) -> None:
        import torch

        from drivetrain.engine.cadence import Every
        from drivetrain.engine.fast.graphs import Graphs
        from drivetrain.engine.log.observe import Observer
        from drivetrain.engine.setup import build_model
        from drivetrain.engine.state.best import Best
        from drivetrain.tasks.rl.population import Population, check, steps_per_epoch

        check(tasks[0])
        self.device, self.plan, self.tell, self.task = group.device, plan, tell, tasks[0]
        runs = [Run(one.run) for one in told]
        models: list[Any] = [build_model(task, plan, run, group, Observer()) for task, run in zip(tasks, runs, strict=True)]
        self.members = [
            _Member(one.trial, run, task, model, Best(task.best), MetricsFile(run), {}, {})
            for one, run, task, model in zip(told, runs, tasks, models, strict=True)
        ]
        self.per_epoch = steps_per_epoch(self.task)
        self.steps = int(self.task.steps or self.task.epochs * self.per_epoch)
        if self.steps % self.per_epoch:
            whole = max(1, self.steps // self.per_epoch) * self.per_epoch
            raise Problem(f"steps={self.steps} ends within a collection, of which {self.per_epoch} steps are taken: steps={whole}")
        self.rates = self._rates()
        self.population = Population(tasks, models, torch.tensor(self.rates), self.device)
        data = self.task.eval_data()
        if data is None:
            raise Problem(f"best={self.task.best} needs an evaluation, but the task has no eval_data()")
        self.episodes: Tensor = data.columns[0].to(self.device)
        self.kept = self.population.flat.clone()
        """The weights of each one's best evaluation."""
        self.every = Every(self.task.eval_every, self.per_epoch)
        captured = self.device.type == "cuda" and plan.capture != "off"
        self.graphs = Graphs(self.device, lambda text: tell("notice", text)) if captured else None
        self.groups = torch.arange(self.population.source.groups, device=self.device)
        self.begun = self.marked = time.monotonic()
        self.marked_step = 0

    def _rates(self) -> list[list[float]]:
        """The learning rate of each step and member."""
        from drivetrain.engine.numerics.optim import make_schedule

        factors = [make_schedule(member.task, self.steps, self.per_epoch) for member in self.members]
        peaks = [float(member.task.learning_rate) for member in self.members]
        return [[peak * factor(step) for peak, factor in zip(peaks, factors, strict=True)] for step in range(self.steps)]

    def run(self, stop: SupportsBool) -> bool:
        """Train to the end; False where it was asked to stop before."""
        for epoch in range(self.steps // self.per_epoch):
            if stop:
                return False
            draws, orders = self._draws(epoch), self._orders(epoch)
            self._replayed("iterate", lambda given: self.population.iterate(*given), (draws, orders))
            done = (epoch + 1) * self.per_epoch
            if done == self.steps or self.every.next(done - self.per_epoch) <= done or self.every.overdue():
                self._evaluate(done)
        for trial, member in sorted(enumerate(self.members), key=lambda pair: pair[1].failed_by):  # first those that finished
            self._end(trial, member)
        return True

    def _replayed(self, name: str, work: Callable[[Any], Any], inputs: Any) -> Any:
        """As one graph, once it has been seen to be possible; on a CPU just so."""
        return work(inputs) if self.graphs is None else self.graphs((name,), work, inputs)

    # --- chance ---

    def _draws(self, epoch: int) -> Tensor:
        """The numbers that an ordinary run would play this collection with."""
        from drivetrain.engine.data.keyed_random import KeyedRand, RandomStream

        streams = {seed: KeyedRand(self.groups, seed, epoch, RandomStream.GROUP) for seed in self._seeds()}
        draws = self._by_seed(lambda seed: streams[seed].uniform(self.population.draws))
        if epoch == 0:
            self.population.begin(self._by_seed(lambda seed: streams[seed].uniform(self.population.resets)))
        return draws

    def _orders(self, epoch: int) -> Tensor:
        """And the orders in which it would learn from it."""
        import torch

        from drivetrain.engine.data.keyed_random import KeyedRand, RandomStream

        first = self.groups[:, None] * self.population.per_group

        def order(seed: int, turn: int) -> Tensor:
            drawn = KeyedRand(self.groups, seed, epoch, turn, RandomStream.ORDER).uniform(self.population.per_group)
            return torch.argsort(drawn, dim=1, stable=True) + first

        return self._by_seed(lambda seed: torch.stack([order(seed, turn) for turn in range(self.population.source.passes)]))

    def _seeds(self) -> list[int]:
        return [int(member.task.seed) for member in self.members]

    def _by_seed(self, make: Callable[[int], Tensor]) -> Tensor:
        """[trials, ...]; made once for all trials that have the same seed."""
        import torch

        made = {seed: make(seed) for seed in dict.fromkeys(self._seeds())}
        return torch.stack([made[seed] for seed in self._seeds()])

    # --- judging ---

    def _evaluate(self, done: int) -> None:
        """Judge all members; each one's best weights are kept. Here alone the host waits for the device."""
        import torch

        figures, bad = self.population.figures.T.tolist(), self.population.bad.tolist()
        facts = self._facts(done)  # evaluating is not training
        told = self._replayed("evaluate", self.population.evaluate, self.episodes)
        values = {name: column.cpu().double().mean(1).tolist() for name, column in told.items()}
        better = []
        for trial, member in enumerate(self.members):
            member.failed_by = member.failed_by or (done if bad[trial] else 0)
            if member.failed_by:
                better.append(False)
                continue
            metrics = {name: column[trial] for name, column in values.items()}
            trained = dict(zip(self.population.names, figures[trial], strict=True))
            better.append(member.best.update(metrics, done))
            if better[-1] or member.best.step is None:
                member.metrics = metrics
                member.train = {name.removeprefix("train/"): value for name, value in trained.items() if name.startswith("train/")}
            row = facts | trained | {"learning_rate": self.rates[done - 1][trial]} | {f"eval/{k}": v for k, v in metrics.items()}
            member.file.row(row)
            member.file.flush()
            self.tell("member_row", {"trial": member.trial, "row": row})
        chosen = torch.tensor(better, device=self.device)[:, None]
        self.kept.copy_(torch.where(chosen, self.population.flat, self.kept))
        self.marked, self.marked_step = time.monotonic(), done

    def _facts(self, done: int) -> dict[str, Any]:
        from drivetrain.engine.measure.memory import peak_memory

        now, source = time.monotonic(), self.population.source
        samples = (done - self.marked_step) // self.per_epoch * len(source) * source.passes
        speed = samples / max(1e-9, now - self.marked)
        return {
            "step": done, "epoch": done // self.per_epoch, "time": round(now - self.begun, 3),
            "samples_per_second": speed, "memory_bytes": peak_memory(self.device),
            **{f"{name}_per_second": each * speed for name, each in source.speeds.items()},
        }  # fmt: skip

    def _end(self, trial: int, member: _Member) -> None:
        """Write a member's weights, and tell its end."""
        from drivetrain.engine.state import tensors as state

        if member.failed_by:
            message = NOT_A_NUMBER.format(member.failed_by)
            self.tell("member_end", {"trial": member.trial, "outcome": Outcome.NAN, "message": message, "result": {}})
            return
        self.population.load_into(member.model, trial, self.population.flat if member.best.step is None else self.kept)
        state.write_weights(member.run.model_path, *state.model_tensors(member.model))
        facts = self._facts(self.steps)
        result = {
            "step": self.steps, "metrics": member.metrics, "facts": {
                "model": type(member.model).__name__, "summary": {"Dataset": type(member.task).__name__} | member.task.summary_fields(), "train": member.train,
                "weights_step": member.best.step or self.steps, "best": member.best.name if member.best.step else "",
                "epochs": facts["epoch"], "device": str(self.device), "time": facts["time"], "peak_memory_bytes": facts["memory_bytes"],
                "parameters": state.count_parameters(member.model.parameters()), "test_samples": len(self.episodes),
            },
        }  # fmt: skip
        self.tell("member_end", {"trial": member.trial, "outcome": Outcome.OK, "message": "", "result": result})
