"""The figures of the last steps, kept on the device and fetched now and then without stalling it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LENGTH, HALF = 256, 128


@dataclass(frozen=True, slots=True)
class Block:
    """The figures of consecutive steps, a row each."""

    first: int
    rows: list[list[float]]
    seconds: float | None = None
    """From the end of the block before, or of the pause before, to the end of these steps; None for the first block."""

    @property
    def last(self) -> int:
        return self.first + len(self.rows) - 1


class Ledger:
    """A ring of rows, one a step. A step writes its figures straight into its row where nothing need be sent."""

    def __init__(self, width: int, device: torch.device) -> None:
        self._ring = torch.zeros(LENGTH, width, device=device)
        self._slots: list[tuple[Tensor, ...] | None] = [None] * LENGTH
        self._cuda = device.type == "cuda"
        self._first = self._next = -1
        self._fetches: deque[tuple[int, Tensor | None, Any]] = deque()
        self._since: Any = None  # the time from which the next block's seconds count

    @property
    def ring(self) -> Tensor:
        return self._ring

    def slots(self, step: int) -> tuple[Tensor, ...]:
        """A view of each figure of a step's row, zero at first."""
        place = step % LENGTH
        if place % HALF == 0:
            self._ring[place : place + HALF].zero_()  # fetched long ago: `full` sees to it
        slots = self._slots[place]
        if slots is None:
            slots = self._slots[place] = self._ring[place].unbind(0)
        return slots

    def write(self, step: Tensor, figures: Tensor) -> None:
        """Write the row of the step whose number the device holds."""
        self._ring.index_copy_(0, torch.remainder(step, LENGTH), figures[None])

    def note(self, step: int, figures: Tensor | None = None) -> None:
        """The step's row is written; or copy these figures into it."""
        if figures is not None:
            self._ring[step % LENGTH].copy_(figures)
        if self._first < 0:
            self._first = step
        self._next = step + 1

    @property
    def full(self) -> bool:
        return self._first >= 0 and self._next - self._first >= HALF - 1

    def fetch(self) -> None:
        """Begin to copy what was noted to the host."""
        if self._first < 0:
            return
        first, last = self._first % LENGTH, (self._next - 1) % LENGTH
        rows = self._ring[first : last + 1] if first <= last else torch.cat([self._ring[first:], self._ring[: last + 1]])
        if self._cuda:
            host = torch.empty(rows.shape, pin_memory=True)
            host.copy_(rows, non_blocking=True)
            rows = host
        self._fetches.append((self._first, rows, self._now()))
        self._first = -1

    def end_pause(self) -> None:
        """The seconds of the next block count from here."""
        self._fetches.append((-1, None, self._now()))

    def _now(self) -> Any:
        """The present time of the device, which the host, running ahead of it, cannot tell before the device is there."""
        if not self._cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds_until(self, when: Any) -> float | None:
        since, self._since = self._since, when
        if since is None:
            return None
        return float(since.elapsed_time(when)) / 1000 if self._cuda else float(when - since)

    def arrived(self, wait: bool) -> list[Block]:
        """The blocks that are on the host by now, or all. (A CPU's must be read before the next step.)"""
        blocks = []
        while self._fetches:
            first, rows, when = self._fetches[0]
            if self._cuda and not when.query():
                if not wait:
                    break
                when.synchronize()
            self._fetches.popleft()
            seconds = self._seconds_until(when)
            if rows is not None:
                blocks.append(Block(first, rows.tolist(), seconds))
        return blocks
