"""Saves a training's checkpoints, and refuses to save what is not finite."""

from __future__ import annotations

from drivetrain.engine.execution import Execution
from drivetrain.engine.faults.nonfinite import not_finite_error
from drivetrain.engine.log.rows import RowLog
from drivetrain.engine.setup import Setup
from drivetrain.engine.state.checkpoint import CheckpointWriter
from drivetrain.engine.state.resume import Progress, gather_tensors, to_json
from drivetrain.outcomes import Outcome, Problem


class Saver:
    """Writes checkpoints in the background."""

    def __init__(self, setup: Setup, execution: Execution, rows: RowLog) -> None:
        self.setup, self.execution, self.rows = setup, execution, rows
        self.saved_step = 0
        """The step of the newest checkpoint, written or being written."""
        self.writer: CheckpointWriter | None = None
        files, observer = execution.strategy.checkpoint_group, setup.observer
        if setup.group.is_main or files is not None:
            self.writer = CheckpointWriter(setup.run, setup.task.keep, observer.reached, observer.notice, files, setup.group.is_main)

    def update(self, progress: Progress) -> None:
        """Updates the progress for a checkpoint of this moment."""
        self.rows.sum_epoch()
        execution, slots = self.execution, self.execution.step.slots
        progress.seconds, progress.rows = self.rows.elapsed_seconds(), self.rows.state(progress.step)
        progress.metric_slots = slots.to_json() if slots else None
        progress.compiled_from, progress.num_threads = execution.tuner.compiled_from, execution.threads.num_useful

    def save(self, progress: Progress, wait: bool) -> None:
        """Saves a training; with `wait`, returns only when the checkpoint is on the disk. A collective call."""
        setup, step = self.setup, progress.step
        self.update(progress)
        setup.observer.reached("saving")
        setup.observer.flush()
        if not self.execution.strategy.weights_are_finite():
            raise not_finite_error(setup, step - 1, self.writer)  # the loss was finite, but the update was not
        tensors, extra = gather_tensors(setup, self.execution)
        if self.writer is not None:
            self.writer.save(step, tensors, extra | to_json(progress, setup), progress.best.step)
            if wait:
                advice = f"\nMake room, then: drivetrain resume {setup.run.name}"
                self.wait("training is done, but its last checkpoint could not be saved", advice)
        self.rows.end_pause()
        self.saved_step = step

    def wait(self, message: str, advice: str = "") -> None:
        """Waits until the newest checkpoint is on the disk."""
        if self.writer is not None:
            self.writer.wait()
            if self.writer.failure:
                ending = f".{advice}" if advice else ""
                raise Problem(f"{message}: {self.writer.failure}{ending}", Outcome.INFRA)

    def close(self) -> None:
        """Waits for the checkpoint that is being written; does not raise if it fails."""
        if self.writer is not None:
            self.writer.wait()

    def report_damage(self, text: str) -> None:
        self.setup.run.log_event("damaged-checkpoint", detail=text)
        self.setup.observer.notice(text)
