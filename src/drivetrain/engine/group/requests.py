"""Requests of any rank to all ranks: to stop, to save, to evaluate."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from drivetrain.engine.group import Group
from drivetrain.engine.log.slots import FIRST_REQUEST

HOST_LEAD_SECONDS = 0.05  # by which the host runs ahead of a GPU when it reads requests, so that the GPU never waits for the host
MAX_LAG_STEPS = 8  # between a step and the reading of its requests
RETUNE_AT = (16, 64, 256, 1024)  # reads after which the time of a step is estimated again, then after every 1024


class SupportsBool(Protocol):
    """True once the process was asked to stop (the flag that a signal sets)."""

    def __bool__(self) -> bool: ...


@dataclass
class Requests:
    """Requests of one rank, or of all of them together, in the order of their slots."""

    stop: bool = False
    save: bool = False
    evaluate: bool = False

    def __iter__(self) -> Iterator[bool]:
        return iter((self.stop, self.save, self.evaluate))


NUM_REQUESTS = len(list(Requests()))


class RequestReader:
    """Reads what any rank requested, at the same step on every rank: requests are all-reduced with the gradients."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._unread: deque[tuple[Tensor, Any]] = deque()
        self._ignore_before = [0] * NUM_REQUESTS
        self.lag_steps = MAX_LAG_STEPS
        """Steps between a step and the reading of its requests from a GPU; the same on every rank."""
        self._num_read, self._read_times = 0, deque[float](maxlen=MAX_LAG_STEPS * 8)

    def read(self, step: int, piggyback: Tensor | None, own: Requests) -> Requests:
        """Returns the requests that take effect after this step."""
        if piggyback is None or self.group.size == 1:
            return own
        flags = piggyback[FIRST_REQUEST : FIRST_REQUEST + NUM_REQUESTS]
        if self.group.device.type != "cuda":
            return Requests(*(value > 0 for value in flags.tolist()))
        copied_flags = flags.to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._unread.append((copied_flags, event))
        requested = [False] * NUM_REQUESTS
        while len(self._unread) > self.lag_steps:
            copied_flags, event = self._unread.popleft()
            event.synchronize()
            for slot, value in enumerate(copied_flags.tolist()):
                requested[slot] |= value > 0 and step >= self._ignore_before[slot]
            self._retune()
        # The unread flags of later steps still contain a request that has just been read.
        for slot, is_requested in enumerate(requested):
            if is_requested:
                self._ignore_before[slot] = step + self.lag_steps + 1
        return Requests(*requested)

    def _retune(self) -> None:
        """Sets the lag to HOST_LEAD_SECONDS in steps, by rank 0's clock: the time between two reads is the device's time of a step."""
        self._num_read += 1
        self._read_times.append(time.perf_counter())
        if self._num_read in RETUNE_AT or self._num_read % RETUNE_AT[-1] == 0:
            median = statistics.median(later - earlier for earlier, later in pairwise(self._read_times))
            [step_seconds] = self.group.sum_on_hosts([median if self.group.is_main else 0.0])
            self.lag_steps = max(1, min(MAX_LAG_STEPS, math.ceil(HOST_LEAD_SECONDS / max(step_seconds, 1e-9))))
