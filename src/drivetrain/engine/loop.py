"""The training loop: set up, restore; for each step: data, step, log, evaluate, save.

At a step's end: log, evaluate, then save. Rows up to step N are on disk before checkpoint N is published, and which
steps are logged, evaluated and saved follows from the step's number alone (but for periods in seconds, and the best
checkpoint), so a resumed run writes what an uninterrupted one would have written.
"""

from __future__ import annotations

import time

import torch

from drivetrain.engine.cadence import Cadence, Due
from drivetrain.engine.epochs import Epochs
from drivetrain.engine.evaluate import EvaluationStopped
from drivetrain.engine.evaluation import TrainingEvaluation
from drivetrain.engine.execution import Execution
from drivetrain.engine.faults.dependence import check_dependence
from drivetrain.engine.faults.nonfinite import not_finite_error
from drivetrain.engine.finish import Result, describe, finish
from drivetrain.engine.group import Group
from drivetrain.engine.group.requests import RequestReader, SupportsBool
from drivetrain.engine.log.observe import Observer
from drivetrain.engine.log.rows import RowLog
from drivetrain.engine.saving import Saver
from drivetrain.engine.setup import set_up
from drivetrain.engine.state.resume import restore
from drivetrain.outcomes import Outcome
from drivetrain.plan import Plan
from drivetrain.runs import Run
from drivetrain.task import Task


class Stopped(Exception):
    """The training was asked to stop, and has saved its progress."""


class Training:
    """One training in this process."""

    def __init__(self, task: Task, plan: Plan, run: Run, group: Group, observer: Observer, stop: SupportsBool) -> None:
        """`stop` becomes true when the process is asked to stop."""
        self.setup = set_up(task, plan, run, group, observer, stop)
        self.execution = Execution(self.setup, plan)
        self.rows = RowLog(self.execution.step, observer, lambda: round(time.monotonic() - self._start_seconds, 3))
        self.saver = Saver(self.setup, self.execution, self.rows)
        self.evaluate = TrainingEvaluation(self.setup, self.execution)
        self.always_checks_dependence = False
        """Whether the dependence check runs even if one micro-batch is the global batch."""
        self._start_seconds = time.monotonic()

    def run_to_end(self, stop_after: int | None = None) -> Result:
        """Goes on from the newest checkpoint, and trains to the last step, or until it is asked to stop."""
        self.progress = restore(self.setup, self.execution, self.saver.report_damage)
        self._start_seconds -= self.progress.seconds
        try:
            self._train(self.setup.cadence(stop_after))
            return self._finish()
        except (Stopped, EvaluationStopped):
            self.saver.wait(f"stopped, but step {self.progress.step:,} could not be saved")
            self.setup.feed.close()
            return Result(Outcome.PREEMPTED, self.progress.step, self.progress.metrics or {})
        except torch.OutOfMemoryError as error:
            raise self.execution.restart_error(error, self.progress.step) from None

    def _train(self, cadence: Cadence) -> None:
        setup, progress, step = self.setup, self.progress, self.execution.step
        self._begin()
        self.epochs = Epochs(self.execution, cadence, self.rows, progress.metric_slots)
        requests = RequestReader(setup.group)
        while progress.step < setup.total_steps and not progress.best.out_of_patience:
            self._stop_if_asked(cadence)
            due = self.epochs.stepper(progress.step).advance(progress.step)
            progress.step = due.step
            due = cadence.after(due, requests.read(due.step, self.execution.strategy.piggyback, step.requests))
            if not self._must_read_metrics(due):
                continue
            self._read_metrics(due)
            if due.evaluate:
                due = self._evaluate(due)
            self.rows.emit()
            if due.can_save and (due.save or due.stop):
                self.saver.save(progress, wait=due.is_last)
            if due.can_save and due.stop and not due.is_last:
                raise Stopped

    def _begin(self) -> None:
        """Restores threads, rows and tuning, announces the training, opens the data, and repeats an evaluation that was stopped."""
        setup, progress, rows = self.setup, self.progress, self.rows
        self.execution.threads.set_useful(progress.num_threads)
        if progress.rows is not None:
            rows.load(progress.step, progress.rows)
        self.execution.tune(progress.compiled_from)
        setup.observer.started(describe(setup, self.execution, progress.step))
        setup.observer.reached("start")
        if setup.task.eval_first and setup.evaluation is not None and progress.step == 0:
            self.evaluate.report_first()
        setup.feed.open(progress.step)
        setup.model.train()
        if progress.step == 0:
            check_dependence(setup, self.execution, self.always_checks_dependence)
        if rows.waiting_row(progress.step) is not None:  # the run was stopped in its evaluation
            self.evaluate.after_step(progress, rows, setup.stop)
            rows.emit()
            self.saver.save(progress, wait=progress.step == setup.total_steps)
        self.saver.saved_step = progress.step
        rows.end_pause()

    def _stop_if_asked(self, cadence: Cadence) -> None:
        """A process that is alone stops between two steps; several stop together, after a step."""
        if self.setup.stop and self.setup.group.size == 1 and cadence.can_save(self.progress.step):
            if self.progress.step > self.saver.saved_step:
                self._read_metrics(Due(self.progress.step, stop=True))
                self.rows.emit()
                self.saver.save(self.progress, wait=False)
            raise Stopped

    # --- log, evaluate, finish ---

    def _must_read_metrics(self, due: Due) -> bool:
        ring = self.execution.step.ring
        assert ring is not None
        updates_progress_line = self.setup.group.is_main and self.setup.group.device.type == "cpu"
        return due.log or due.save or due.stop or ring.is_full or (updates_progress_line and self.rows.is_tick_due())

    def _read_metrics(self, due: Due) -> None:
        assert self.execution.step.ring is not None
        self.execution.step.ring.fetch()
        bad_step = self.rows.receive(due.step, due.log, wait=due.evaluate or due.save or due.stop)
        if bad_step is not None:
            raise not_finite_error(self.setup, bad_step, self.saver.writer)

    def _evaluate(self, due: Due) -> Due:
        try:
            is_best = self.evaluate.after_step(self.progress, self.rows, self.setup.stop if due.can_save else False)
        except EvaluationStopped:  # a resumed run repeats the evaluation and then writes its row
            self.rows.emit(before=due.step)
            self.saver.save(self.progress, wait=False)
            raise
        return due.after_evaluation(is_best, self.progress.best.out_of_patience)

    def _finish(self) -> Result:
        self.setup.observer.reached("finish")
        self.setup.feed.close()
        self.execution.strategy.broadcast_buffers()
        self.setup.observer.flush()
        self.saver.update(self.progress)
        return finish(self.setup, self.execution, self.progress, self.saver.report_damage)
