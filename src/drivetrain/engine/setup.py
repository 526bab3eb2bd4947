"""Everything that is fixed before the first step: process settings, model, data, precision, and how many steps there are."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from drivetrain.data import Source
from drivetrain.engine.cadence import Cadence, Period
from drivetrain.engine.data.feed import Feed, OrderedFeed
from drivetrain.engine.data.make_feed import eval_feed, train_feed
from drivetrain.engine.group import Group
from drivetrain.engine.group.requests import SupportsBool
from drivetrain.engine.log.observe import Observer
from drivetrain.engine.log.slots import PIGGYBACK_FLOATS
from drivetrain.engine.model import build_model
from drivetrain.engine.numerics.optim import LearningRates, make_optimizer, make_schedule
from drivetrain.engine.numerics.precision import Precision
from drivetrain.engine.state import tensors as state
from drivetrain.engine.strategies import Strategy
from drivetrain.engine.strategies import make_strategy as distribute_model
from drivetrain.names import private_cache
from drivetrain.outcomes import Problem
from drivetrain.plan import Plan
from drivetrain.recipe import check_agreement
from drivetrain.runs import Run
from drivetrain.task import Task


@dataclass(frozen=True)
class Setup:
    """What stays the same from the first step to the last."""

    task: Task
    run: Run
    group: Group
    observer: Observer
    stop: SupportsBool
    precision: Precision
    model: nn.Module
    feed: Feed
    evaluation: OrderedFeed | None
    """The evaluation data, where the task has any."""
    source: Source | None
    """The training data, where it is a `Source`."""
    total_steps: int
    num_parameters: int
    num_trainable: int

    @property
    def steps_per_epoch(self) -> int:
        return self.feed.steps_per_epoch

    def cadence(self, stop_after: int | None) -> Cadence:
        """Returns what decides when a training logs, evaluates, saves and stops."""
        task = self.task
        log, evaluate, save = (Period(setting, self.steps_per_epoch) for setting in (task.log_every, task.eval_every, task.save_every))
        return Cadence(
            log, evaluate, save, self.total_steps, self.steps_per_epoch, evaluates=self.evaluation is not None,
            saves_at_epoch_ends=self.source is not None, is_main=self.group.is_main, stop_after=stop_after,
        )  # fmt: skip

    def learning_rates(self, optimizer: torch.optim.Optimizer, plan: Plan) -> LearningRates:
        schedule = make_schedule(self.task, self.total_steps, self.steps_per_epoch)
        return LearningRates(optimizer, schedule, self.total_steps, self.group, on_device=not plan.is_sharded)


def set_up(task: Task, plan: Plan, run: Run, group: Group, observer: Observer, stop: SupportsBool) -> Setup:
    """Builds the model and opens the data of a training."""
    prepare(plan, group)
    precision = Precision(plan.precision, group.device)
    model = build_model(task, plan, run, group, observer)
    data, eval_data = task.train_data(), task.eval_data()
    feed = train_feed(task, data, plan, group)
    feed.notice, feed.reached = observer.notice, observer.reached
    evaluation = None if eval_data is None else eval_feed(task, eval_data, plan, group)
    check_agreement(task.settings())
    for data_feed in (feed, evaluation):
        if data_feed is not None:
            data_feed.records_signature = group.is_main
    if task.best and evaluation is None:
        raise Problem(f"best={task.best} needs an evaluation, but the task has no eval_data()")
    state.model_tensors(model)  # a tensor that cannot be saved is refused now, not at the first save
    parameters = list(model.parameters())
    return Setup(
        task, run, group, observer, stop, precision, model, feed, evaluation,
        source=data if isinstance(data, Source) else None,
        total_steps=_total_steps(task, data, feed.steps_per_epoch),
        num_parameters=state.count_parameters(parameters),
        num_trainable=state.count_parameters(parameters, lambda p: p.requires_grad),
    )  # fmt: skip


def _total_steps(task: Task, data: object, steps_per_epoch: int) -> int:
    """Returns the number of steps. A `Source` that hands on files ends with a complete epoch, whose checkpoint has what the files hold."""
    steps = int(task.steps or task.epochs * steps_per_epoch)
    if isinstance(data, Source) and type(data).write_files is not Source.write_files:
        return -(-steps // steps_per_epoch) * steps_per_epoch
    return steps


def make_strategy(setup: Setup, plan: Plan) -> Strategy:
    """Distributes the model over the processes and makes its optimizer."""
    make = partial(make_optimizer, setup.task, setup.model, setup.group.device, captured=not plan.is_sharded)
    return distribute_model(setup.model, make, setup.task, plan, setup.group, PIGGYBACK_FLOATS, setup.run.path)


def prepare(plan: Plan, group: Group) -> None:
    """Sets all process-wide options that the results depend on."""
    torch.set_num_threads(plan.threads)
    # Compiled code is stored and run later. torch's default folder has a known name, so another user could put code there.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(private_cache("inductor")))
    if group.device.type == "cuda":  # graphs cannot be captured on the default stream, so all work uses another one
        torch.cuda.synchronize(group.device)
        torch.cuda.set_stream(torch.cuda.Stream(group.device))
    if plan.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if plan.deterministic != torch.are_deterministic_algorithms_enabled():  # the call imports a compiler, which takes seconds
        torch.use_deterministic_algorithms(plan.deterministic)
    torch.backends.cudnn.deterministic = plan.deterministic
    torch.backends.cudnn.benchmark = False
