"""A time limit: asks for a stop so early that the step under way and a save still fit, as long as they were seen to take."""

from __future__ import annotations

import time
from collections.abc import Callable

from drivetrain.engine.log.observe import Observer

LEAST = 2.0
"""Seconds that are kept in any case: processes take time to end."""
UNSEEN, AT_MOST = 0.05, 60.0  # of the time that is left, and seconds: what is kept for a save before one was seen
STEPS, SAVES = 3, 2  # that may still be to do: several processes agree first; a save may be under way already
BETWEEN_STEPS = ("epoch", "collect", "choose", "compile", "evaluate", "saving")


class Deadline(Observer):
    def __init__(self, end: float, stop_at: Callable[[float], None]) -> None:
        """`end` is in seconds since the epoch; `stop_at` is told when to ask for a stop, each time that is known better."""
        self._end, self._stop_at = end, stop_at
        self._for_a_save = min(AT_MOST, UNSEEN * max(0.0, end - time.time()))
        self._step = self._save = 0.0
        self._began: float | None = None
        self._saving: float | None = None
        self._steps = 0
        self._arm()

    def moment(self, name: str) -> None:
        if name == "step":
            now = time.monotonic()
            self._steps += 1
            if self._began is not None and self._steps > 2 and now - self._began > self._step:  # the first sets things up
                self._step = now - self._began
                self._arm()
            self._began = now
        elif name in BETWEEN_STEPS:
            self._began = None
        elif name == "save":
            self._saving = time.monotonic()
        elif name == "published" and self._saving is not None:
            self._save = max(self._save, time.monotonic() - self._saving)
            self._for_a_save = SAVES * self._save
            self._arm()

    def _arm(self) -> None:
        self._stop_at(self._end - LEAST - STEPS * self._step - self._for_a_save)
