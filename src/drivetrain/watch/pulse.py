"""Each worker's pulse: in a page of memory that it shares with the front end, at which step and in what it is, and
since when. To write it takes a microsecond and wakes nobody."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from typing import TYPE_CHECKING, NamedTuple

from drivetrain.engine.log.observe import Observer

if TYPE_CHECKING:
    from drivetrain.engine.log.deviceclock import DeviceClock

RECORD = struct.Struct("<qqddd")  # step, place, since, longest, slowest
# The moments of the training's own thread: what it does from each one on, and as which part of the time that counts.
PLACES = {
    "begin": ("starting", "start"),
    "restore": ("restoring a checkpoint", "start"),
    "start": ("starting", "start"),
    "step": ("beginning a step", "loop"),
    "take": ("beginning a step", "loop"),
    "fetch": ("waiting for data", "data"),
    "copy": ("copying data to the device", "copy"),
    "fetched": ("forward pass", "compute"),
    "backward": ("backward pass", "compute"),
    "reduce": ("summing gradients over ranks", "communication"),
    "update": ("the optimizer's update", "optimizer"),
    "taken": ("after a step", "loop"),
    "epoch": ("beginning an epoch", "loop"),
    "choose": ("trying out how steps run best", "start"),
    "compile": ("compiling", "start"),
    "collect": ("collecting", "collecting"),
    "evaluate": ("beginning an evaluation", "evaluation"),
    "metrics": ("evaluation", "evaluation"),
    "saving": ("saving", "saving"),
    "finish": ("writing the final weights", "start"),
}
BEFORE_STEPS = ("begin", "restore", "start")
OF_A_STEP = ("step", "take", "fetch", "copy", "fetched", "backward", "reduce", "update", "taken")
NUMBER = {name: number for number, name in enumerate(PLACES)}
PARTS = tuple(dict.fromkeys(part for _, part in PLACES.values()))
OF_STEPS = [PARTS.index(part) for part in ("loop", "data", "copy", "compute", "communication", "optimizer")]
OF_PLACE = [PARTS.index(part) for _, part in PLACES.values()]
SPENT = struct.Struct(f"<q{len(PARTS)}d")  # steps, and the seconds they took by part
FIRST = struct.Struct(f"<{len(OF_A_STEP)}d")  # seconds of the first step, by place
FIRST_AT = RECORD.size + SPENT.size


class Beat(NamedTuple):
    step: int
    """The last that was begun, by the number it is logged with."""
    place: int
    since: float
    """On the machine's monotonic clock."""
    longest: float
    """That it ever took from this place to the next; 0 where that is not known yet."""
    slowest: float = 0.0
    """That it ever took from any place to the next."""

    @property
    def name(self) -> str:
        return list(PLACES)[self.place]

    @property
    def begun(self) -> bool:
        """Whether there is anything of its own that could be lost."""
        return self.name not in BEFORE_STEPS

    def __str__(self) -> str:
        return list(PLACES.values())[self.place][0]


def open_page() -> int:
    """A handle to a page for one worker's pulse."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("pulse")
    else:
        with tempfile.TemporaryFile() as file:
            handle = os.dup(file.fileno())
    os.ftruncate(handle, mmap.PAGESIZE)
    return handle


class Pulse:
    """The front end's side."""

    def __init__(self, handle: int) -> None:
        self._page = mmap.mmap(handle, mmap.PAGESIZE)
        RECORD.pack_into(self._page, 0, 0, 0, time.monotonic(), 0.0, 0.0)

    def read(self) -> Beat:
        while True:  # until no write falls between two looks
            seen = self._page[: RECORD.size]
            if seen == self._page[: RECORD.size]:
                return Beat(*RECORD.unpack(seen))

    def spent(self) -> tuple[int, dict[str, float]]:
        """Steps, and seconds by part of the time, up to the step under way; without the first, which sets things up."""
        steps, *seconds = SPENT.unpack_from(self._page, RECORD.size)
        return steps, dict(zip(PARTS, seconds, strict=True))

    def first(self) -> dict[str, float]:
        """Seconds of the first step by place; nothing before its end."""
        told = zip(OF_A_STEP, FIRST.unpack_from(self._page, FIRST_AT), strict=True)
        return {name: seconds for name, seconds in told if seconds}


class Heart(Observer):
    """The worker's side: beats at every moment of the training's own thread."""

    def __init__(self, handle: int) -> None:
        self._page = mmap.mmap(handle, mmap.PAGESIZE)
        self._step, self._steps_here = 0, 0
        self._place, self._since = 0, time.monotonic()
        self._longest = [0.0] * len(PLACES)
        self._slowest = 0.0
        self._first = [0.0] * len(PLACES)
        """In the first step, which sets things up: no measure of the others, but better than none."""
        self._spent = [0.0] * len(PARTS)
        self.device: DeviceClock | None = None
        """Where the host runs ahead of a GPU, its own clock says little about what a step is made of."""

    def resumed(self, step: int) -> None:
        self._step = step

    def moment(self, name: str) -> None:
        place = NUMBER.get(name)
        if place is None:
            return  # another thread's
        if self.device is not None:
            self.device.moment(name, OF_PLACE[place])
        now = time.monotonic()
        took = now - self._since
        measured = self._first if self._steps_here == 1 else self._longest
        if took > measured[self._place]:
            measured[self._place] = took
            self._slowest = max(self._slowest, took)
        if self._steps_here != 1:
            self._spent[OF_PLACE[self._place]] += took
        if name == "step":
            self._step += 1
            self._steps_here += 1
        if name in ("step", "finish"):
            self._page[RECORD.size : FIRST_AT] = SPENT.pack(max(0, self._steps_here - 1), *self._by_part())
        if name == "step" and self._steps_here == 2:
            self._page[FIRST_AT : FIRST_AT + FIRST.size] = FIRST.pack(*(self._first[NUMBER[place]] for place in OF_A_STEP))
        self._place, self._since = place, now
        # At once: pack_into would blank the page first, for the other side to see.
        self._page[: RECORD.size] = RECORD.pack(self._step, place, now, self._longest[place] or self._first[place], self._slowest)

    def _by_part(self) -> list[float]:
        """Seconds by part: those of steps are the host's in all, shared out as the device spends them."""
        whole = 0.0 if self.device is None else sum(self.device.seconds[part] for part in OF_STEPS)
        if self.device is None or not whole:
            return self._spent
        steps = sum(self._spent[part] for part in OF_STEPS)
        return [
            steps * device / whole if part in OF_STEPS else host
            for part, (host, device) in enumerate(zip(self._spent, self.device.seconds, strict=True))
        ]
