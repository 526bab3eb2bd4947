"""When things are due, and what any rank asks of all: stop, save, evaluate."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from drivetrain.engine.group import Group
from drivetrain.engine.log.figures import EVALUATE, STOP
from drivetrain.settings import Length

AHEAD = 0.05  # seconds of steps that the host runs ahead of a GPU before it reads an answer, so that the GPU never waits for it
MOST = 8  # steps
LOOKS = (16, 64, 256, 1024)  # answers after which it is looked again how long a step takes, then after every so many as the last


class SupportsBool(Protocol):
    """True once the process was asked to stop (a signal's flag)."""

    def __bool__(self) -> bool: ...


class Every:
    """A period in steps (decided by the step number alone) or in seconds (rank 0's clock)."""

    def __init__(self, setting: object, steps_per_epoch: int) -> None:
        length = Length.parse(setting)
        self.steps = length.in_steps(steps_per_epoch)
        self._seconds = length.value
        self._last = time.monotonic()

    def due(self, done: int) -> bool:
        return self.steps is not None and self.steps > 0 and done % self.steps == 0

    def due_in(self, first: int, last: int) -> bool:
        """Whether it is due at any of these steps."""
        return self.steps is not None and self.steps > 0 and last // self.steps > (first - 1) // self.steps

    def next(self, done: int) -> int:
        """The first step after `done` at which it is due by number."""
        return sys.maxsize if not self.steps else done + self.steps - done % self.steps

    def overdue(self) -> bool:
        """Asks by the clock; true once a period."""
        if self.steps is not None or time.monotonic() - self._last < self._seconds:
            return False
        self._last = time.monotonic()
        return True


class Agreement:
    """What any rank asked for, known to every rank at the same step: it travels with the gradients."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._answers: list[tuple[Tensor, Any]] = []
        self._quiet = [0, 0, 0]
        self.lag = MOST
        """Steps after which a GPU's answer is read, the same on every rank."""
        self._read, self._times = 0, deque[float](maxlen=MOST * 8)

    def read(self, step: int, tail: Tensor | None, asked: list[bool]) -> list[bool]:
        if tail is None or self.group.size == 1:
            return asked
        flags = tail[STOP : EVALUATE + 1]
        if self.group.device.type != "cuda":
            return [value > 0 for value in flags.tolist()]
        answer = flags.to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._answers.append((answer, event))
        heard = [False, False, False]
        while len(self._answers) > self.lag:
            answer, event = self._answers.pop(0)
            event.synchronize()
            heard = [h or (value > 0 and step >= quiet) for h, value, quiet in zip(heard, answer.tolist(), self._quiet, strict=True)]
            self._learn()
        # Answers under way still carry a request that was just heard.
        self._quiet = [step + self.lag + 1 if h else q for h, q in zip(heard, self._quiet, strict=True)]
        return heard

    def _learn(self) -> None:
        """Now and then: read answers after as many steps as the host needs to be ahead, by rank 0's clock. Answers come at the device's pace."""
        self._read += 1
        self._times.append(time.perf_counter())
        if self._read in LOOKS or self._read % LOOKS[-1] == 0:
            took = statistics.median(later - sooner for sooner, later in pairwise(self._times))
            [step] = self.group.sum_on_hosts([took if self.group.is_main else 0.0])
            self.lag = max(1, min(MOST, math.ceil(AHEAD / max(step, 1e-9))))
