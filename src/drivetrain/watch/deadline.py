"""`--time-limit`: requests a stop early enough to finish the current step and save, judged by the longest step and save so far."""

from __future__ import annotations

import time
from collections.abc import Callable

from drivetrain.engine.log.observe import Observer

MIN_SECONDS = 2.0
"""Always reserved, because processes take time to end."""
# Reserved for a save before the first one was measured: this share of the time left, and at most this many seconds.
FIRST_SAVE_SHARE, MAX_FIRST_SAVE_SECONDS = 0.05, 60.0
NUM_RESERVED_STEPS = 3  # several processes need steps to agree on a stop
NUM_RESERVED_SAVES = 2  # a save may be running already
POINTS_BETWEEN_STEPS = ("epoch", "collect", "choose", "compile", "evaluate", "saving")


class Deadline(Observer):
    def __init__(self, end: float, stop_at: Callable[[float], None]) -> None:
        """`end` is in seconds since the epoch. `stop_at` sets the time of the stop; it is called again when a step or save takes longer."""
        self._end, self._stop_at = end, stop_at
        self._save_reserve = min(MAX_FIRST_SAVE_SECONDS, FIRST_SAVE_SHARE * max(0.0, end - time.time()))
        self._longest_step = self._longest_save = 0.0
        self._step_began: float | None = None
        self._save_began: float | None = None
        self._num_steps = 0
        self._set_timer()

    def reached(self, name: str) -> None:
        if name == "step":
            self._on_step_begin()
        elif name in POINTS_BETWEEN_STEPS:
            self._step_began = None
        elif name == "save":
            self._save_began = time.monotonic()
        elif name == "published" and self._save_began is not None:
            self._longest_save = max(self._longest_save, time.monotonic() - self._save_began)
            self._save_reserve = NUM_RESERVED_SAVES * self._longest_save
            self._set_timer()

    def _on_step_begin(self) -> None:
        now = time.monotonic()
        self._num_steps += 1
        if self._step_began is not None and self._num_steps > 2:  # the first step includes one-time set-up
            previous_step_seconds = now - self._step_began
            if previous_step_seconds > self._longest_step:
                self._longest_step = previous_step_seconds
                self._set_timer()
        self._step_began = now

    def _set_timer(self) -> None:
        self._stop_at(self._end - MIN_SECONDS - NUM_RESERVED_STEPS * self._longest_step - self._save_reserve)
