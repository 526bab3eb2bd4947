"""Ways to advance a training: by one step, by many steps with nothing due between them, or by an epoch with a `Source`'s own `EpochStepper`."""

from __future__ import annotations

from typing import Protocol

from drivetrain.data import EpochStepper, StepperContext
from drivetrain.engine.cadence import Cadence, Due
from drivetrain.engine.data.source_feed import SourceFeed
from drivetrain.engine.execution import Execution
from drivetrain.engine.fast.graphs import capture_graph, watch_host_syncs
from drivetrain.engine.log.ring import HALF_RING, MetricRing
from drivetrain.engine.log.rows import RowLog
from drivetrain.engine.log.slots import FIRST_METRIC, MetricSlots


class Stepper(Protocol):
    """Advances a training."""

    def advance(self, step: int) -> Due:
        """Takes one or more steps after `step`; returns the last step taken and what is due after it."""
        ...


class SingleSteps:
    """Takes one step of the engine at a time."""

    def __init__(self, execution: Execution, cadence: Cadence) -> None:
        self.execution, self.cadence = execution, cadence
        self._reached, self._stop = execution.observer.reached, execution.setup.stop

    def advance(self, step: int) -> Due:
        self._reached("step")
        self.cadence.request(self.execution.step.requests, bool(self._stop), step + 1)
        due = self.cadence.before(step + 1, step + 1)
        self.execution.take(step, with_norm=due.log)
        return due


class UninterruptedSteps:
    """Takes many steps in one loop, until something is due or requested. The loop skips all other checks; for a single process only."""

    def __init__(self, single: SingleSteps, rows: RowLog, updates_progress_line: bool) -> None:
        self.single, self.rows, self.updates_progress_line = single, rows, updates_progress_line

    def advance(self, step: int) -> Due:
        execution, ring = self.single.execution, self.single.execution.step.ring
        next_due = self.single.cadence.quiet_until(step)
        if ring is None or step + 1 >= next_due:  # before the first step there are no metrics yet
            return self.single.advance(step)
        take, stop, reached = execution.take, execution.setup.stop, execution.observer.reached
        first_step = step
        while step < next_due - 1 and not (stop or ring.is_full or (self.updates_progress_line and self.rows.is_tick_due())):
            reached("step")
            take(step, with_norm=False)
            step += 1
        if step == first_step:
            return self.single.advance(step)
        return Due(step, self.single.cadence.can_save(step))


class WholeEpochs:
    """Takes one epoch at a time with a `Source`'s own stepper, which writes the metrics of each step into the engine's metric ring."""

    def __init__(self, stepper: EpochStepper, single: SingleSteps, feed: SourceFeed, rows: RowLog) -> None:
        self.stepper, self.single, self.feed, self.rows = stepper, single, feed, rows
        self._reached, self._stop = single.execution.observer.reached, single.execution.setup.stop

    @property
    def collects(self) -> bool:
        """Whether the `Source`'s stepper also collects the epoch's samples."""
        return self.stepper.collects

    def advance(self, step: int) -> Due:
        cadence, steps_per_epoch, engine_step = self.single.cadence, self.feed.steps_per_epoch, self.single.execution.step
        end = step + steps_per_epoch
        self._reached("step")
        cadence.request(engine_step.requests, bool(self._stop), end)
        due = cadence.before(step + 1, end)
        batch = None if self.stepper.collects else self.feed.collected_batch()
        self.stepper(step // steps_per_epoch, step, batch)
        assert engine_step.ring is not None
        for number in range(step, end):
            if number + 1 < end and cadence.log.is_due(number + 1):
                self.rows.begin(number + 1)
            engine_step.ring.commit(number)
        return due


def find_whole_epochs(execution: Execution, single: SingleSteps, rows: RowLog, slots: MetricSlots) -> WholeEpochs | None:
    """Returns the `Source`'s own stepper for one GPU; None where there is none. `slots` names the metrics of its steps."""
    setup, step, feed = execution.setup, execution.step, execution.setup.feed
    learning_rates = step.rates.device_table()
    is_supported = (
        execution.strategy.is_one_piece
        and setup.group.device.type == "cuda"
        and step.loss_scale is None
        and execution.plan.capture != "off"
    )
    if not is_supported or learning_rates is None or not isinstance(feed, SourceFeed) or feed.steps_per_epoch > HALF_RING:
        return None
    ring = step.ring or MetricRing(slots.num_used, setup.group.device)
    context = StepperContext(
        setup.group.device, execution.optimizer, learning_rates, ring.tensor, FIRST_METRIC, feed.random_keys, capture_graph, watch_host_syncs,
        setup.observer.notice,
    )  # fmt: skip
    stepper = feed.source.stepper(setup.model, context)
    if stepper is None:
        return None
    step.use_metrics(slots, ring)
    feed.forget_graphs()
    execution.drop_graphs()  # the stepper may have moved the model's tensors
    return WholeEpochs(stepper, single, feed, rows)
