"""Steps that are only measured: peak memory and time at a few micro-batches, on one device of this machine."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from drivetrain.engine.data.make_feed import train_feed
from drivetrain.engine.fast.graphs import WARM_UP_CALLS, capture_graph
from drivetrain.engine.fast.pace import TIMED, UNTIMED, Pace
from drivetrain.engine.group import Group
from drivetrain.engine.log.figures import TAIL
from drivetrain.engine.log.observe import Observer
from drivetrain.engine.numerics.optim import LearningRates, make_optimizer, make_schedule
from drivetrain.engine.numerics.precision import Precision
from drivetrain.engine.setup import build_model, prepare
from drivetrain.engine.step import Step
from drivetrain.engine.strategies import make_strategy
from drivetrain.plan import Plan
from drivetrain.plan.fit import Point
from drivetrain.runs import Run
from drivetrain.task import Task

EAGER = 3  # steps whose memory is read, and timed where capturing would gain nothing
SHORT = 0.25  # seconds: a longer step is hardly bound by its launches, so a graph of it gains little
ENOUGH = 0.15  # seconds of captured steps that are timed, twice


class Probe:
    """The task's model and data on a device, for as many micro-batches as are asked for."""

    def __init__(self, task: Task, plan: Plan, device: torch.device) -> None:
        self.task, self.device = task, device
        self.group = Group(0, 1, device)
        self.plan = replace(
            plan, strategy="single", world_size=1, nodes=1, accumulation=1, compile="off", reasons=plan.reasons | {"compile": "pinned"}
        )
        prepare(self.plan, self.group)
        self.precision = Precision(plan.precision, device)
        self.model = self._model()
        self.data = task.train_data()
        self.optimizer = make_optimizer(task, self.model, device)

    def _model(self) -> nn.Module:
        task = self.task
        task.start = None  # its values do not matter, only its shapes
        with tempfile.TemporaryDirectory() as folder:
            try:
                with torch.device(self.device):  # random numbers are made fastest where they are needed
                    return build_model(task, self.plan, Run(Path(folder)), self.group, Observer())
            except Exception:  # a model that is made with the host's tensors
                return build_model(task, self.plan, Run(Path(folder)), self.group, Observer())

    def at(self, micro_batch: int) -> Point:
        """Measure one micro-batch; where memory runs out, the point says so."""
        try:
            return self._measure(micro_batch)
        except torch.OutOfMemoryError:
            pass  # leave the handler first: its traceback holds the memory
        self.optimizer.zero_grad(set_to_none=True)
        self.empty()
        return Point(micro_batch, fits=False)

    def _measure(self, micro_batch: int) -> Point:
        plan = replace(self.plan, global_batch=micro_batch, micro_batch=micro_batch)
        self.optimizer.zero_grad(set_to_none=True)
        self.empty()
        feed = train_feed(self.task, self.data, plan, self.group)
        strategy = make_strategy(self.model, lambda: self.optimizer, self.task, plan, self.group, TAIL, Path())
        total = 100_000  # more than are taken; their rates lie on the device
        rates = LearningRates(self.optimizer, make_schedule(self.task, total, feed.steps_per_epoch), total, self.group)
        step = Step(self.task, self.model, feed, strategy, rates, self.precision, self.group)
        step.undoable = False  # running out of memory is an answer here
        self.model.train()
        number = -1

        def take() -> None:
            nonlocal number
            number += 1
            while feed.batch_size(number % feed.steps_per_epoch) < feed.batch_size(0):
                number += 1  # an epoch's last batch is smaller, and not what is measured
            if number % feed.steps_per_epoch == 0:
                feed.begin_epoch(number // feed.steps_per_epoch, self.model)
            step(number, with_norm=False)

        feed.open(0)
        try:
            take()
            self._sync()
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            take()
            seconds = self._seconds(take, EAGER)
            peak = self._peak()
            kind, update = "eager", lambda: strategy.update(None, 0.0, False, False)
            if seconds < SHORT and self.device.type == "cuda" and plan.capture != "off":
                step.pace = Pace(step, plan, self.group, total, Observer(), None)
                for _ in range(UNTIMED + TIMED + 1 + WARM_UP_CALLS + 1):  # the choice, and the steps until the graph is made
                    take()
                if step.graphs is not None:
                    times = max(EAGER, int(ENOUGH / seconds))
                    seconds, kind = min(self._seconds(take, times) for _ in range(2)), "captured"
                    update = capture_graph(update)  # as it is within a captured step: without the host's part
                    update()
            return Point(micro_batch, True, peak, seconds, min(0.5 * seconds, self._seconds(update, EAGER)), kind)
        finally:
            feed.close()

    def _seconds(self, work: Callable[[], object], times: int) -> float:
        self._sync()
        begun = time.perf_counter()
        for _ in range(times):
            work()
        self._sync()
        return (time.perf_counter() - begun) / times

    def _peak(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.device)) if self.device.type == "cuda" else 0

    def _sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def empty(self) -> None:
        """Give back what steps and their libraries left behind."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            gc.collect()  # a step and its graphs know each other
            torch._C._cuda_clearCublasWorkspaces()  # one is kept for every stream that graphs were made on
            torch.cuda.empty_cache()
