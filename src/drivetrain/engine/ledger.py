"""The figures of the last steps, kept on the device and fetched now and then without stalling it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

LENGTH = 256


@dataclass
class _Fetch:
    first: int
    count: int
    rows: Tensor
    done: torch.cuda.Event | None


class Ledger:
    def __init__(self, width: int, device: torch.device) -> None:
        self._ring = torch.zeros(LENGTH, width, device=device)
        self._rows = self._ring.unbind(0)
        self._cuda = device.type == "cuda"
        self._first: int | None = None
        self._next = 0
        self._fetches: deque[_Fetch] = deque()

    def push(self, step: int, figures: Tensor) -> None:
        """Note a step's figures; one small copy on the device."""
        if self._first is None:
            self._first = step
        self._rows[step % LENGTH].copy_(figures)
        self._next = step + 1

    @property
    def full(self) -> bool:
        return self._first is not None and self._next - self._first >= LENGTH - 1

    def fetch(self) -> None:
        """Begin to copy what was noted to the host."""
        if self._first is None:
            return
        picked = [s % LENGTH for s in range(self._first, self._next)]
        rows = self._ring[picked[0] : picked[-1] + 1] if picked[-1] >= picked[0] else self._ring[picked]
        event = None
        if self._cuda:
            host = torch.empty(rows.shape, pin_memory=True)
            host.copy_(rows, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            rows = host
        self._fetches.append(_Fetch(self._first, len(picked), rows if event else rows.clone(), event))
        self._first = None

    def arrived(self, wait: bool) -> list[tuple[int, list[float]]]:
        """(step, figures) of the fetches that are done, or of all."""
        rows: list[tuple[int, list[float]]] = []
        while self._fetches:
            fetch = self._fetches[0]
            if fetch.done is not None and not fetch.done.query():
                if not wait:
                    break
                fetch.done.synchronize()
            self._fetches.popleft()
            rows += zip(range(fetch.first, fetch.first + fetch.count), fetch.rows.tolist(), strict=True)
        return rows
