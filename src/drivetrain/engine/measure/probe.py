"""Measures the peak memory and time of steps on one device of this machine, for some micro-batch sizes."""

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
from drivetrain.engine.fast.tuner import TIMED_STEPS, WARM_UP_STEPS, ExecutionTuner
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observer
from drivetrain.engine.log.slots import PIGGYBACK_FLOATS
from drivetrain.engine.model import build_model
from drivetrain.engine.numerics.optim import LearningRates, make_optimizer, make_schedule
from drivetrain.engine.numerics.precision import Precision
from drivetrain.engine.setup import prepare
from drivetrain.engine.step import Step
from drivetrain.engine.strategies import make_strategy
from drivetrain.plan import Plan
from drivetrain.plan.fit import Point
from drivetrain.runs import Run
from drivetrain.task import Task

EAGER_STEPS = 3
"""Steps that are timed without a CUDA graph."""
CAPTURE_BELOW_SECONDS = 0.25
"""A longer step gains little from a CUDA graph: kernel launches are a small part of it."""
CAPTURED_SECONDS = 0.15
"""How long captured steps are timed, two times."""


class Probe:
    """Measures micro-batch sizes of one task, whose model and data it holds on a device."""

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
        task.start = None  # only the shapes of weights matter
        with tempfile.TemporaryDirectory() as folder:
            try:
                with torch.device(self.device):  # random weights are made fastest on the device itself
                    return build_model(task, self.plan, Run(Path(folder)), self.group, Observer())
            except Exception:  # the task combines new tensors with tensors of the host
                return build_model(task, self.plan, Run(Path(folder)), self.group, Observer())

    def measure(self, micro_batch: int) -> Point:
        """Measures one micro-batch size; if memory runs out, the point has `fits=False`."""
        try:
            return self._measure_steps(micro_batch)
        except torch.OutOfMemoryError:
            pass  # memory is freed below, because in this handler the traceback still holds it
        self.optimizer.zero_grad(set_to_none=True)
        self.free_memory()
        return Point(micro_batch, fits=False)

    def _measure_steps(self, micro_batch: int) -> Point:
        plan = replace(self.plan, global_batch=micro_batch, micro_batch=micro_batch)
        self.optimizer.zero_grad(set_to_none=True)
        self.free_memory()
        feed = train_feed(self.task, self.data, plan, self.group)
        strategy = make_strategy(self.model, lambda: self.optimizer, self.task, plan, self.group, PIGGYBACK_FLOATS, Path())
        total_steps = 100_000  # more than are taken, so that the table of learning rates is long enough
        schedule = make_schedule(self.task, total_steps, feed.steps_per_epoch)
        rates = LearningRates(self.optimizer, schedule, total_steps, self.group)
        step = Step(self.task, self.model, feed, strategy, rates, self.precision, self.group)
        step.can_undo = False  # an out-of-memory error is passed on: it is a result
        self.model.train()
        number = -1

        def take_step() -> None:
            nonlocal number
            number += 1
            while feed.batch_size(number % feed.steps_per_epoch) < feed.batch_size(0):
                number += 1  # skip the smaller last batch of an epoch
            if number % feed.steps_per_epoch == 0:
                feed.begin_epoch(number // feed.steps_per_epoch, self.model)
            step(number, with_norm=False)

        feed.open(0)
        try:
            take_step()
            self._sync()
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            take_step()
            seconds = self._seconds(take_step, EAGER_STEPS)
            peak = self._peak()
            mode, update = "eager", lambda: strategy.update(None, 0.0, False, False)
            if seconds < CAPTURE_BELOW_SECONDS and self.device.type == "cuda" and plan.capture != "off":
                ExecutionTuner(step, plan, self.group, total_steps, Observer(), None).attach()
                num_steps_to_choice, num_steps_to_capture = WARM_UP_STEPS + TIMED_STEPS + 1, WARM_UP_CALLS + 1
                for _ in range(num_steps_to_choice + num_steps_to_capture):
                    take_step()
                if step.graphs is not None:
                    times = max(EAGER_STEPS, int(CAPTURED_SECONDS / seconds))
                    seconds, mode = min(self._seconds(take_step, times) for _ in range(2)), "captured"
                    update = capture_graph(update)  # as in a captured step, without the time of the host
                    update()
            update_seconds = min(0.5 * seconds, self._seconds(update, EAGER_STEPS))
            return Point(micro_batch, True, peak, seconds, update_seconds, mode)
        finally:
            feed.close()

    def _seconds(self, work: Callable[[], object], times: int) -> float:
        self._sync()
        begin = time.perf_counter()
        for _ in range(times):
            work()
        self._sync()
        return (time.perf_counter() - begin) / times

    def _peak(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.device)) if self.device.type == "cuda" else 0

    def _sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def free_memory(self) -> None:
        """Frees the device memory that earlier steps and libraries still hold."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            gc.collect()  # a step and its graphs refer to each other
            torch._C._cuda_clearCublasWorkspaces()  # cuBLAS keeps a workspace for every stream on which graphs were captured
            torch.cuda.empty_cache()
