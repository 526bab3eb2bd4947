"""Stores the metrics of the last steps on the device, and fetches them from time to time without making it wait."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NUM_ROWS = 256  # steps whose metrics fit on the device
HALF_RING = 128  # rows that are fetched at the latest, before their half of the ring is overwritten


@dataclass(frozen=True, slots=True)
class StepRows:
    """The metrics of consecutive steps, one row each."""

    first: int
    rows: list[list[float]]
    seconds: float | None = None
    """How long these steps took: the time since the previous rows, or since the last evaluation or save. None for the first rows of a process."""

    @property
    def last(self) -> int:
        return self.first + len(self.rows) - 1


class MetricRing:
    """A ring of rows on the device, one for each step. Where no all-reduce is needed, a step writes into its row directly."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.tensor = torch.zeros(NUM_ROWS, width, device=device)
        self._slots: list[tuple[Tensor, ...] | None] = [None] * NUM_ROWS
        self._is_cuda = device.type == "cuda"
        self._first = self._next = -1
        self._fetches: deque[tuple[int, Tensor | None, Any]] = deque()
        self._last_time: Any = None  # the start of the seconds of the next rows

    def slots(self, step: int) -> tuple[Tensor, ...]:
        """Returns a view of each float of a step's row, zero at first."""
        index = step % NUM_ROWS
        if index % HALF_RING == 0:
            self.tensor[index : index + HALF_RING].zero_()  # already fetched, because the loop fetches when `is_full`
        slots = self._slots[index]
        if slots is None:
            slots = self._slots[index] = self.tensor[index].unbind(0)
        return slots

    def write(self, step: Tensor, row: Tensor) -> None:
        """Writes the row of the step whose number is on the device."""
        self.tensor.index_copy_(0, torch.remainder(step, NUM_ROWS), row[None])

    def commit(self, step: int, row: Tensor | None = None) -> None:
        """Marks the row of a step as written, or copies `row` into it first."""
        if row is not None:
            self.tensor[step % NUM_ROWS].copy_(row)
        if self._first < 0:
            self._first = step
        self._next = step + 1

    @property
    def is_full(self) -> bool:
        return self._first >= 0 and self._next - self._first >= HALF_RING - 1

    def fetch(self) -> None:
        """Starts the copy of all committed rows to the host."""
        if self._first < 0:
            return
        first, last = self._first % NUM_ROWS, (self._next - 1) % NUM_ROWS
        rows = self.tensor[first : last + 1] if first <= last else torch.cat([self.tensor[first:], self.tensor[: last + 1]])
        if self._is_cuda:
            host = torch.empty(rows.shape, pin_memory=True)
            host.copy_(rows, non_blocking=True)
            rows = host
        self._fetches.append((self._first, rows, self._device_time()))
        self._first = -1

    def end_pause(self) -> None:
        """Lets the seconds of the next rows count from here."""
        self._fetches.append((-1, None, self._device_time()))

    def _device_time(self) -> Any:
        """Returns the time at which the device reaches this point: a CUDA event, because the host runs ahead of a GPU."""
        if not self._is_cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds_until(self, device_time: Any) -> float | None:
        start, self._last_time = self._last_time, device_time
        if start is None:
            return None
        return float(start.elapsed_time(device_time)) / 1000 if self._is_cuda else float(device_time - start)

    def arrived(self, wait: bool) -> list[StepRows]:
        """Returns the rows that have reached the host; with `wait`, all of them. On a CPU, call it before the next step."""
        arrived = []
        while self._fetches:
            first, rows, device_time = self._fetches[0]
            if self._is_cuda and not device_time.query():
                if not wait:
                    break
                device_time.synchronize()
            self._fetches.popleft()
            seconds = self._seconds_until(device_time)
            if rows is not None:
                arrived.append(StepRows(first, rows.tolist(), seconds))
        return arrived
