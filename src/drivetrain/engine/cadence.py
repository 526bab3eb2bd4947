"""Decides when a training logs, evaluates, saves and stops: by the step's number alone, except for periods in seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from drivetrain.engine.group.requests import Requests
from drivetrain.settings import Length


class Period:
    """A period in steps, or in seconds of a clock."""

    def __init__(self, setting: object, steps_per_epoch: int, clock: Callable[[], float] = time.monotonic) -> None:
        length = Length.parse(setting)
        self.steps = length.in_steps(steps_per_epoch)
        """None for a period in seconds."""
        self._seconds = length.value
        self._clock = clock
        self._last_seconds = clock()

    def is_due(self, step: int) -> bool:
        return self.is_due_in(step, step)

    def is_due_in(self, first: int, last: int) -> bool:
        """Returns whether one of these steps ends a period."""
        return self.steps is not None and self.steps > 0 and last // self.steps > (first - 1) // self.steps

    def next_step(self, step: int) -> int:
        """Returns the first step after `step` that ends a period."""
        return step + self.steps - step % self.steps if self.steps else sys.maxsize

    def restart_if_over(self) -> bool:
        """Returns whether a period in seconds is over; if it is, the next one begins."""
        if self.steps is not None or self._clock() - self._last_seconds < self._seconds:
            return False
        self._last_seconds = self._clock()
        return True


@dataclass(frozen=True)
class Due:
    """The actions that are due after a step."""

    step: int
    can_save: bool = True
    """False within an epoch of a `Source`, whose state is complete at the epoch's end only."""
    is_last: bool = False
    log: bool = False
    evaluate: bool = False
    save: bool = False
    stop: bool = False

    def after_evaluation(self, is_best: bool, is_out_of_patience: bool) -> Due:
        """Returns what is due after the evaluation: a save if it is the best so far; if patience is used up, this step is the last."""
        is_last = self.is_last or is_out_of_patience
        return replace(self, is_last=is_last, save=self.save or is_best or is_last)


class Cadence:
    """Decides what is due after each step. What falls due within an epoch of a `Source` waits for the epoch's end."""

    def __init__(
        self, log: Period, evaluate: Period, save: Period, total_steps: int, steps_per_epoch: int,
        evaluates: bool, saves_at_epoch_ends: bool, is_main: bool, stop_after: int | None = None,
    ) -> None:  # fmt: skip
        self.log, self.evaluate, self.save = log, evaluate, save
        self.total_steps, self.steps_per_epoch = total_steps, steps_per_epoch
        self.stop_after = stop_after
        """The number of steps after which the training stops and is saved."""
        self._needs_clock = any(period.steps is None for period in (log, evaluate, save))
        self._evaluates, self._saves_at_epoch_ends, self._is_main = evaluates, saves_at_epoch_ends, is_main
        self._evaluation_waits = self._save_waits = self._stop_waits = False

    def can_save(self, step: int) -> bool:
        return not self._saves_at_epoch_ends or step % self.steps_per_epoch == 0

    def request(self, requests: Requests, stop: bool, step: int) -> None:
        """Sets the requests of this rank for a step; every rank receives them with the step's gradients."""
        requests.stop = stop or (self.stop_after is not None and step >= self.stop_after)
        requests.save = self._is_main and self.save.restart_if_over()
        requests.evaluate = self._is_main and self.evaluate.restart_if_over()

    def quiet_until(self, step: int) -> int:
        """Returns the next step after which anything can be due; `step` itself if every step must be checked."""
        if self._needs_clock or self.stop_after is not None or self._evaluation_waits or self._save_waits:
            return step
        epoch_end = step - step % self.steps_per_epoch + self.steps_per_epoch
        return min(self.total_steps, epoch_end, *(period.next_step(step) for period in (self.log, self.evaluate, self.save)))

    def before(self, first: int, last: int) -> Due:
        """Returns what is due after steps `first` to `last`, as far as that is known before they are taken."""
        is_last, can_save = last == self.total_steps, self.can_save(last)
        self._evaluation_waits |= self._evaluates and self.evaluate.is_due_in(first, last)
        self._save_waits |= self.save.is_due_in(first, last)
        evaluate = (self._evaluates and is_last) or (self._evaluation_waits and can_save)
        log = is_last or evaluate or self.log.is_due(last) or (self._is_main and self.log.restart_if_over())
        return Due(last, can_save, is_last, log, evaluate)

    def after(self, due: Due, requests: Requests) -> Due:
        """Returns what is due, with the requests of all ranks."""
        self._evaluation_waits |= self._evaluates and requests.evaluate
        self._evaluation_waits &= not due.evaluate
        self._stop_waits |= requests.stop
        save = due.is_last or self._save_waits or requests.save
        self._save_waits = save and not due.can_save
        return replace(due, save=save, stop=self._stop_waits)
