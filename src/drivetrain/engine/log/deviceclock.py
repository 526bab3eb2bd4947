"""Measures where a GPU's time goes in a step: records CUDA events in some steps, and reads them once they have completed, without waiting."""

from __future__ import annotations

import torch

SAMPLE_EVERY = 47  # steps; an odd number, because steps that log, evaluate or save often have round numbers


class DeviceClock:
    """Adds up the seconds of the device by part of a step. Idle time counts for the part that the device waits for."""

    def __init__(self, num_parts: int) -> None:
        self.seconds = [0.0] * num_parts
        self._num_steps = 0
        self._events: list[tuple[int, torch.cuda.Event]] = []
        """(part, event at the part's start) of the sampled step."""
        self._is_sampling = False

    def reached(self, name: str, part: int) -> None:
        """Call at each observation point; `part` is the part of the step that begins there."""
        is_step_start = name == "step"
        if is_step_start:
            self._num_steps += 1
            if self._events and not self._is_sampling:
                self._read()
        if self._is_sampling:
            self._record(part)
            self._is_sampling = self._is_sampling and not is_step_start
        elif is_step_start and not self._events and self._num_steps % SAMPLE_EVERY == 0:
            self._is_sampling = True
            self._record(part)

    def _record(self, part: int) -> None:
        if torch.cuda.is_current_stream_capturing():  # captured work does not run now, so its time would be wrong
            self._events, self._is_sampling = [], False
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append((part, event))

    def _read(self) -> None:
        last_event = self._events[-1][1]
        if not last_event.query():
            return  # the device has not reached it yet
        for (part, start), (_, end) in zip(self._events, self._events[1:], strict=False):
            self.seconds[part] += start.elapsed_time(end) / 1000
        self._events = []
