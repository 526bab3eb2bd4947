"""Makes logged rows of the metrics of steps: means, speed and sums of the epoch; checks that losses are finite."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from drivetrain.engine.log.observe import Observer
from drivetrain.engine.log.ring import StepRows
from drivetrain.engine.log.slots import NORM, SCALE, SKIPPED
from drivetrain.engine.measure.memory import peak_memory
from drivetrain.engine.numerics.precision import MIN_SCALE
from drivetrain.engine.step import Step
from drivetrain.outcomes import Problem

TICK_SECONDS = 0.5  # between two updates of the progress line
SPEED_SECONDS = 1.0  # over which speed is averaged: a loader's batches come in bursts, and an epoch's last one may be small
SPIKE_FACTOR = 8.0  # times the spread of the loss: a loss further above its mean is a spike
SPIKE_MIN_ROWS = 30  # before the first notice
SPIKE_QUIET_STEPS = 500  # between two notices
MAX_UNSUMMED = 100  # fetches whose rows wait to be added to the epoch's sums


class _Speed(NamedTuple):
    """Samples that were trained on, and the seconds that they took."""

    samples: int = 0
    seconds: float = 0.0


class SpikeDetector:
    """Follows the mean and spread of the loss, and detects a loss far above them."""

    def __init__(self) -> None:
        self.mean = self.spread = 0.0
        self.num_rows, self._quiet_until = 0, 0

    def check(self, row: dict[str, Any]) -> str:
        """Returns a sentence for the user where the row's loss stands out, else an empty string."""
        loss, step = row.get("train/loss", math.nan), int(row["step"])
        if not math.isfinite(loss):
            return ""
        difference = loss - self.mean
        is_spike = self.num_rows >= SPIKE_MIN_ROWS and difference > SPIKE_FACTOR * self.spread and difference > abs(self.mean)
        weight = max(0.02, 1 / (self.num_rows + 1)) if not is_spike else 0.0  # a spike does not count for mean and spread
        self.mean += weight * difference
        self.spread += weight * (abs(difference) - self.spread)
        self.num_rows += 1
        if not is_spike or step < self._quiet_until:
            return ""
        self._quiet_until = step + SPIKE_QUIET_STEPS
        norm = f", gradient norm {row['grad_norm']:.3g}" if "grad_norm" in row else ""
        return f"the loss jumped to {loss:.4g} at step {step:,} (it was about {self.mean:.4g}{norm}): clip=1 or a lower learning_rate helps"


class RowState(NamedTuple):
    """The part of the rows that a checkpoint stores, so that a resumed run logs the same."""

    epoch_sums: dict[str, Any]
    means: dict[str, float]
    """Means over the epoch so far."""
    waiting_row: dict[str, Any] | None
    """The row of the checkpoint's step, where it still waits for the metrics of an evaluation."""


class RowLog:
    """Builds the rows of a training in order. A row begins when a step is logged, is filled when its metrics arrive, and then goes to the observer."""

    def __init__(self, step: Step, observer: Observer, elapsed_seconds: Callable[[], float]) -> None:
        self.step, self.observer, self.elapsed_seconds = step, observer, elapsed_seconds
        self.epoch_sums: dict[str, Any] = {}
        self._restored_means: dict[str, float] = {}
        self._rows: dict[int, dict[str, Any]] = {}
        self._unsummed: list[StepRows] = []
        self._last_arrival = time.monotonic()  # of metrics; or the end of the last pause
        self._recent, self._older = _Speed(), _Speed()  # of about the last second, and of the second before it
        self._is_warming_up = True
        self.spikes = SpikeDetector()

    def state(self, step: int) -> RowState:
        return RowState(self.epoch_sums, self.means(), self.waiting_row(step))

    def load(self, step: int, state: RowState) -> None:
        """Restores the rows from the checkpoint of a step."""
        self.epoch_sums, self._restored_means = state.epoch_sums, state.means
        if state.waiting_row is not None:
            self._rows[step] = state.waiting_row

    def waiting_row(self, step: int) -> dict[str, Any] | None:
        """Returns the row of a step that waits for its evaluation."""
        return self._rows.get(step)

    def is_tick_due(self) -> bool:
        return time.monotonic() - self._last_arrival > TICK_SECONDS

    def end_pause(self) -> None:
        """Counts speed from here: evaluating and saving are not steps."""
        self._last_arrival = time.monotonic()
        if self.step.ring is not None:
            self.step.ring.end_pause()

    def begin(self, step: int) -> None:
        """Begins the row of a step, which is filled once the step's metrics arrive."""
        self._rows[step] = {}

    def receive(self, step: int, log: bool, wait: bool) -> int | None:
        """Reads the metrics that arrived and fills rows; returns the first step (from 0) whose loss or gradient is not finite."""
        assert self.step.ring is not None
        if log:
            self.begin(step)
        for arrived in self.step.ring.arrived(wait):
            self._count_speed(arrived)
            bad_step = self._first_bad_step(arrived)
            if bad_step is not None:
                self.emit(before=bad_step + 1)
                return bad_step
            self._unsummed.append(arrived)
            if len(self._unsummed) > MAX_UNSUMMED:
                self.sum_epoch()
            self._fill(arrived)
            if arrived.last + 1 == step and not log:
                self.observer.tick(self._row(arrived.last, arrived.rows[-1]))
        return None

    def _fill(self, arrived: StepRows) -> None:
        for step in [step for step, row in self._rows.items() if not row and step - 1 <= arrived.last]:
            row = self._rows[step] = self._row(step - 1, arrived.rows[step - 1 - arrived.first])
            if notice := self.spikes.check(row):
                self.observer.notice(notice)

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Adds the metrics of an evaluation to the row of its step."""
        self._rows[step] |= {f"eval/{name}": value for name, value in metrics.items()}

    def emit(self, before: int | None = None) -> None:
        """Hands finished rows to the observer, in order."""
        for step in sorted(self._rows):
            row = self._rows[step]
            if not row or (before is not None and step >= before):
                break
            self.observer.row(self._rows.pop(step))

    def sum_epoch(self) -> None:
        """Adds up the metrics of the current epoch, for the summary at the end."""
        feed = self.step.feed
        for arrived in self._unsummed:
            epoch_start = arrived.last // feed.steps_per_epoch * feed.steps_per_epoch  # the first step of the last row's epoch
            rows = arrived.rows[max(0, epoch_start - arrived.first) :]
            if arrived.first <= epoch_start or not self.epoch_sums:
                self.epoch_sums = {"figures": [0.0] * len(rows[0]), "samples": 0}
            columns = zip(*rows, strict=True)
            self.epoch_sums["figures"] = [total + sum(column) for total, column in zip(self.epoch_sums["figures"], columns, strict=True)]
            last_index = arrived.last % feed.steps_per_epoch
            self.epoch_sums["samples"] += sum(feed.batch_size(i) for i in range(last_index - len(rows) + 1, last_index + 1))
        self._unsummed.clear()

    def means(self) -> dict[str, float]:
        """Returns the means over the epoch so far; those of the checkpoint where no step was taken since."""
        if self.step.slots is None or not self.epoch_sums:
            return self._restored_means
        return self.step.slots.means(self.epoch_sums["figures"], self.epoch_sums["samples"])

    def _row(self, step: int, values: list[float]) -> dict[str, Any]:
        assert self.step.slots is not None
        feed = self.step.feed
        epoch, index = divmod(step, feed.steps_per_epoch)
        row: dict[str, Any] = {"step": step + 1, "epoch": epoch + 1, "time": self.elapsed_seconds()}
        for name, value in self.step.slots.means(values, feed.batch_size(index)).items():
            row[f"train/{name}"] = value
        row["grad_norm"] = values[NORM]
        row["learning_rate"] = self.step.rates.at(step)
        if self.step.loss_scale is not None:
            row["loss_scale"], row["skipped_steps"] = values[SCALE], int(values[SKIPPED])
        num_samples, seconds = self._recent.samples + self._older.samples, self._recent.seconds + self._older.seconds
        row["samples_per_second"] = samples_per_second = num_samples / max(1e-9, seconds)
        row |= {f"{name}_per_second": units_per_sample * samples_per_second for name, units_per_sample in feed.speeds.items()}
        row["memory_bytes"] = peak_memory(self.step.group.device)
        return row

    def _count_speed(self, arrived: StepRows) -> None:
        """Adds rows to the window that speed is averaged over. The first rows of a process include the warm-up: they never share a window with later ones."""
        feed, now = self.step.feed, time.monotonic()
        num_samples = sum(feed.batch_size(step % feed.steps_per_epoch) for step in range(arrived.first, arrived.last + 1))
        seconds = now - self._last_arrival if arrived.seconds is None else arrived.seconds
        if self._is_warming_up:
            self._recent, self._older = _Speed(), _Speed()
        elif self._recent.seconds >= SPEED_SECONDS:
            self._recent, self._older = _Speed(), self._recent
        self._recent = _Speed(self._recent.samples + num_samples, self._recent.seconds + seconds)
        self._is_warming_up, self._last_arrival = arrived.seconds is None, now

    def _first_bad_step(self, arrived: StepRows) -> int | None:
        """Returns the first step whose loss or gradient is not finite."""
        assert self.step.slots is not None
        must_be_finite, count_slots = self.step.slots.must_be_finite(), self.step.slots.count_slots
        for step, row in enumerate(arrived.rows, arrived.first):
            for name, slot in count_slots.items():
                if not row[slot] >= 0:
                    raise Problem(f"loss() gave counts for {name!r} that sum to {row[slot]:g} at step {step + 1:,}: a count is 0 or more")
            if self.step.loss_scale is not None:
                is_good = row[SCALE] >= MIN_SCALE  # single overflows are normal in fp16; a scale that keeps falling is a fault
            else:
                is_good = math.isfinite(sum([row[slot] for slot in must_be_finite]))
            if not is_good:
                return step
        return None
