"""A time limit: requests a stop so early that the step under way and a save still fit, as long as they were seen to take."""

from __future__ import annotations

import time
from collections.abc import Callable

from drivetrain.engine.log.observe import Observer

MIN_SECONDS = 2.0
"""Seconds that are reserved in any case: processes take time to end."""
UNSEEN_SAVE_SHARE, MAX_UNSEEN_SAVE_SECONDS = 0.05, 60.0  # of the time left: reserved for a save before one was seen
NUM_STEPS, NUM_SAVES = 3, 2  # that may still be to do: several processes agree first; a save may be under way already
BETWEEN_STEPS = ("epoch", "collect", "choose", "compile", "evaluate", "saving")


class Deadline(Observer):
    def __init__(self, end: float, stop_at: Callable[[float], None]) -> None:
        """`end` is in seconds since the epoch; `stop_at` gets the time of the stop, each time that is known better."""
        self._end, self._stop_at = end, stop_at
        self._save_reserve = min(MAX_UNSEEN_SAVE_SECONDS, UNSEEN_SAVE_SHARE * max(0.0, end - time.time()))
        self._longest_step = self._longest_save = 0.0
        self._step_began: float | None = None
        self._save_began: float | None = None
        self._num_steps = 0
        self._set_timer()

    def reached(self, name: str) -> None:
        if name == "step":
            self._take_step()
        elif name in BETWEEN_STEPS:
            self._step_began = None
        elif name == "save":
            self._save_began = time.monotonic()
        elif name == "published" and self._save_began is not None:
            self._longest_save = max(self._longest_save, time.monotonic() - self._save_began)
            self._save_reserve = NUM_SAVES * self._longest_save
            self._set_timer()

    def _take_step(self) -> None:
        now = time.monotonic()
        self._num_steps += 1
        is_measured = self._step_began is not None and self._num_steps > 2  # the first step sets things up
        if is_measured and self._step_began is not None and now - self._step_began > self._longest_step:
            self._longest_step = now - self._step_began
            self._set_timer()
        self._step_began = now

    def _set_timer(self) -> None:
        self._stop_at(self._end - MIN_SECONDS - NUM_STEPS * self._longest_step - self._save_reserve)
