"""From a step's figures to logged rows: means, speed, the epoch's sums, and the guard against what is no number."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from drivetrain.engine.log.figures import NORM, SCALE, SKIPPED
from drivetrain.engine.log.ledger import Block, Ledger
from drivetrain.engine.log.observe import Observer
from drivetrain.engine.measure.memory import peak_memory
from drivetrain.engine.numerics.precision import MIN_SCALE
from drivetrain.engine.step import Step
from drivetrain.outcomes import Problem

TICK_SECONDS = 0.5
SPEED_SECONDS = 1.0  # over which speed is averaged: a loader's batches come in bursts, and an epoch's last one may be small
SPIKE, SPIKE_AFTER, SPIKE_QUIET = 8.0, 30, 500  # times the spread; rows before anything stands out; steps between two notices


class Spikes:
    """Notices a loss far above what it was: its mean and spread are followed, slowly."""

    def __init__(self) -> None:
        self.mean = self.spread = 0.0
        self.rows, self._quiet_until = 0, 0

    def look(self, row: dict[str, Any]) -> str:
        loss, step = row.get("train/loss", math.nan), int(row["step"])
        if not math.isfinite(loss):
            return ""
        away = loss - self.mean
        spike = self.rows >= SPIKE_AFTER and away > SPIKE * self.spread and away > abs(self.mean)
        weight = max(0.02, 1 / (self.rows + 1)) if not spike else 0.0  # what stands out is no measure of the rest
        self.mean += weight * away
        self.spread += weight * (abs(away) - self.spread)
        self.rows += 1
        if not spike or step < self._quiet_until:
            return ""
        self._quiet_until = step + SPIKE_QUIET
        norm = f", gradient norm {row['grad_norm']:.3g}" if "grad_norm" in row else ""
        return f"the loss jumped to {loss:.4g} at step {step:,} (it was about {self.mean:.4g}{norm}): clip=1 or a lower learning_rate helps"


class Rows:
    """The rows of one training, in order: begun when a step is logged, filled when its figures arrive, then handed on."""

    def __init__(self, step: Step, observer: Observer, elapsed: Callable[[], float]) -> None:
        self.step, self.observer, self.elapsed = step, observer, elapsed
        self.epoch_sums: dict[str, Any] = {}
        self._loaded_means: dict[str, float] = {}
        self._rows: dict[int, dict[str, Any]] = {}
        self._blocks: list[Block] = []
        self._marked = time.monotonic()  # when figures last arrived, or a pause ended
        self._recent, self._older = (0, 0.0), (0, 0.0)  # samples and seconds: of the newest second or so, and of the one before
        self._warming_up = True
        self.spikes = Spikes()

    def load(self, step: int, epoch_sums: dict[str, Any], means: dict[str, float], held: dict[str, Any] | None) -> None:
        """Go on after a step, with what its checkpoint kept."""
        self.epoch_sums, self._loaded_means = epoch_sums, means
        if held is not None:
            self._rows[step] = held

    def held(self, done: int) -> dict[str, Any] | None:
        """The row of a step that waits for its evaluation."""
        return self._rows.get(done)

    def tick_due(self) -> bool:
        return time.monotonic() - self._marked > TICK_SECONDS

    def end_pause(self) -> None:
        """Speed is counted from here: evaluating and saving are not steps."""
        self._marked = time.monotonic()
        if self.step.ledger is not None:
            self.step.ledger.end_pause()

    def begin(self, done: int) -> None:
        """A step that is logged: its row is filled once its figures arrive."""
        self._rows[done] = {}

    def take_in(self, ledger: Ledger, done: int, logging: bool, wait: bool) -> int | None:
        """Read the figures that arrived and make rows of the steps that are logged; gives the first step that is no number."""
        if logging:
            self.begin(done)
        arrived = ledger.arrived(wait)
        for block in arrived:
            self._count(block)
            bad = self._first_bad(block)
            if bad is not None:
                self.emit(before=bad + 1)
                return bad
            self._blocks.append(block)
            if len(self._blocks) > 100:
                self.sum_epoch()
            for logged in [d for d, row in self._rows.items() if not row and d - 1 <= block.last]:
                row = self._rows[logged] = self._row(logged - 1, block.rows[logged - 1 - block.first])
                if said := self.spikes.look(row):
                    self.observer.notice(said)
            if block.last + 1 == done and not logging:
                self.observer.tick(self._row(block.last, block.rows[-1]))
        return None

    def add(self, done: int, metrics: dict[str, float]) -> None:
        """An evaluation's metrics, to the row of its step."""
        self._rows[done] |= {f"eval/{name}": value for name, value in metrics.items()}

    def emit(self, before: int | None = None) -> None:
        """Hand finished rows to the observers, in order."""
        for step in sorted(self._rows):
            row = self._rows[step]
            if not row or (before is not None and step >= before):
                break
            self.observer.row(self._rows.pop(step))

    def sum_epoch(self) -> None:
        """Add up the figures of the current epoch, for the end's summary."""
        feed = self.step.feed
        for block in self._blocks:
            begin = block.last // feed.steps_per_epoch * feed.steps_per_epoch  # of the epoch the block ends in
            rows = block.rows[max(0, begin - block.first) :]
            if block.first <= begin or not self.epoch_sums:
                self.epoch_sums = {"figures": [0.0] * len(rows[0]), "samples": 0}
            self.epoch_sums["figures"] = [a + sum(b) for a, b in zip(self.epoch_sums["figures"], zip(*rows, strict=True), strict=True)]
            last = block.last % feed.steps_per_epoch
            self.epoch_sums["samples"] += sum(feed.batch_size(i) for i in range(last - len(rows) + 1, last + 1))
        self._blocks.clear()

    def means(self) -> dict[str, float]:
        """The epoch's means so far; those of the checkpoint where no step was taken since."""
        if self.step.figures is None or not self.epoch_sums:
            return self._loaded_means
        return self.step.figures.read(self.epoch_sums["figures"], self.epoch_sums["samples"])

    def _row(self, step: int, row: list[float]) -> dict[str, Any]:
        assert self.step.figures is not None
        feed = self.step.feed
        epoch, index = divmod(step, feed.steps_per_epoch)
        facts: dict[str, Any] = {"step": step + 1, "epoch": epoch + 1, "time": self.elapsed()}
        for name, value in self.step.figures.read(row, feed.batch_size(index)).items():
            facts[f"train/{name}"] = value
        facts["grad_norm"] = row[NORM]
        facts["learning_rate"] = self.step.rates.at(step)
        if self.step.loss_scale is not None:
            facts["loss_scale"], facts["skipped_steps"] = row[SCALE], int(row[SKIPPED])
        samples, seconds = (recent + older for recent, older in zip(self._recent, self._older, strict=True))
        facts["samples_per_second"] = speed = samples / max(1e-9, seconds)
        facts |= {f"{name}_per_second": each * speed for name, each in feed.speeds.items()}
        facts["memory_bytes"] = peak_memory(self.step.group.device)
        return facts

    def _count(self, block: Block) -> None:
        """Add a block's samples and seconds to those that speed is averaged over; the first block's, which warm up, count for its own rows alone."""
        feed, now = self.step.feed, time.monotonic()
        samples = sum(feed.batch_size(step % feed.steps_per_epoch) for step in range(block.first, block.last + 1))
        seconds = now - self._marked if block.seconds is None else block.seconds
        if self._warming_up:
            self._recent, self._older = (0, 0.0), (0, 0.0)
        elif self._recent[1] >= SPEED_SECONDS:
            self._recent, self._older = (0, 0.0), self._recent
        self._recent = self._recent[0] + samples, self._recent[1] + seconds
        self._warming_up, self._marked = block.seconds is None, now

    def _first_bad(self, block: Block) -> int | None:
        """The first step whose loss or gradient is not a number."""
        assert self.step.figures is not None
        guarded = self.step.figures.guarded()
        counts = self.step.figures.count
        for step, row in enumerate(block.rows, block.first):
            for name, slot in counts.items():
                if not row[slot] >= 0:
                    raise Problem(f"loss() gave counts for {name!r} that sum to {row[slot]:g} at step {step + 1:,}: a count is 0 or more")
            if self.step.loss_scale is not None:
                good = row[SCALE] >= MIN_SCALE  # overflow is fp16's daily bread; a scale that only falls is not
            else:
                good = math.isfinite(sum([row[slot] for slot in guarded]))
            if not good:
                return step
        return None
