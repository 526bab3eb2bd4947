"""Begins epochs: prepares their samples and chooses the stepper."""

from __future__ import annotations

from typing import Any

from drivetrain.engine.cadence import Cadence
from drivetrain.engine.execution import Execution, TrainingActivity
from drivetrain.engine.fast.steppers import SingleSteps, Stepper, UninterruptedSteps, WholeEpochs, find_whole_epochs
from drivetrain.engine.log.rows import RowLog
from drivetrain.engine.log.slots import MetricSlots


class Epochs:
    """The epochs of a training, in order."""

    def __init__(self, execution: Execution, cadence: Cadence, rows: RowLog, metric_slots: dict[str, Any] | None) -> None:
        """`metric_slots` are the names of metrics from the checkpoint; None in a new run."""
        self.execution, self.setup, self.rows = execution, execution.setup, rows
        self.single = SingleSteps(execution, cadence)
        updates_progress_line = self.setup.group.is_main and self.setup.group.device.type == "cpu"
        # With several ranks, any rank may request a stop or a save at every step.
        self.default: Stepper = UninterruptedSteps(self.single, rows, updates_progress_line) if self.setup.group.size == 1 else self.single
        self.whole_epochs: WholeEpochs | None = None
        """Takes one epoch at a time, if the `Source` has a stepper for that."""
        self._metric_slots = metric_slots
        self._has_looked_for_whole = False
        self._present_epoch = -1
        self._stepper: Stepper = self.default

    def stepper(self, step: int) -> Stepper:
        """Returns the stepper for the next steps; if they begin an epoch, prepares the epoch's samples first."""
        epoch, index = divmod(step, self.setup.steps_per_epoch)
        if index == 0 and epoch != self._present_epoch:
            self._begin(epoch, step)
            self._present_epoch = epoch
        return self._stepper

    def _begin(self, epoch: int, step: int) -> None:
        setup, execution, feed = self.setup, self.execution, self.setup.feed
        setup.observer.reached("epoch")
        execution.pause()
        self._find_whole_epochs()
        is_complete = step + setup.steps_per_epoch <= setup.total_steps
        whole_epochs = self.whole_epochs if is_complete else None
        self._stepper = whole_epochs or self.default
        if setup.source is None:
            feed.begin_epoch(epoch, setup.model)
        elif whole_epochs is None or not whole_epochs.collects:
            setup.observer.reached("collect")
            execution.activity = TrainingActivity.COLLECTION
            with setup.precision.forward():
                execution.strategy.call_unevenly(feed.begin_epoch, epoch, setup.model)
            execution.activity = TrainingActivity.STEPS
            execution.resume()

    def _find_whole_epochs(self) -> None:
        """Asks the task's `Source` once for its stepper, when the metrics are known (after the first epoch, or from a checkpoint)."""
        slots = self.execution.step.slots or (MetricSlots.from_json(self._metric_slots) if self._metric_slots else None)
        if not self._has_looked_for_whole and slots is not None:
            self._has_looked_for_whole = True
            self.whole_epochs = find_whole_epochs(self.execution, self.single, self.rows, slots)
