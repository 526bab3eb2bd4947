"""Each worker's heartbeat: a page of memory that it shares with the supervisor holds its step, its phase and when the phase began.

A write takes a microsecond and wakes no process.
"""

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

# Observation point of the training thread -> what the thread does after it, and the part of the time breakdown to which that belongs.
PHASES = {
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
STARTUP_PHASES = ("begin", "restore", "start")
STEP_PHASES = ("step", "take", "fetch", "copy", "fetched", "backward", "reduce", "update", "taken")
PHASE_INDEX = {name: index for index, name in enumerate(PHASES)}
PARTS = tuple(dict.fromkeys(part for _, part in PHASES.values()))
STEP_PARTS = [PARTS.index(part) for part in ("loop", "data", "copy", "compute", "communication", "optimizer")]
PART_OF_PHASE = [PARTS.index(part) for _, part in PHASES.values()]

HEARTBEAT = struct.Struct("<qqddd")  # step, phase, since, longest, slowest
PART_SECONDS = struct.Struct(f"<q{len(PARTS)}d")  # steps, and the seconds they took by part
FIRST_STEP = struct.Struct(f"<{len(STEP_PHASES)}d")  # seconds of the first step, by phase
FIRST_STEP_OFFSET = HEARTBEAT.size + PART_SECONDS.size


class WorkerHeartbeat(NamedTuple):
    step: int
    """The last step that was begun; metrics.jsonl has the same number."""
    phase: int
    """The index in PHASES."""
    since: float
    """When the phase began, in seconds of time.monotonic()."""
    longest: float
    """The longest duration of this phase so far, in seconds; 0: unknown."""
    slowest: float = 0.0
    """The longest duration of any phase so far, in seconds."""

    @property
    def phase_name(self) -> str:
        return list(PHASES)[self.phase]

    @property
    def has_begun(self) -> bool:
        """Whether the worker has begun its first step; before that there is no progress to lose."""
        return self.phase_name not in STARTUP_PHASES

    def __str__(self) -> str:
        return list(PHASES.values())[self.phase][0]


def open_heartbeat_page() -> int:
    """Returns a handle of a new page for one worker's heartbeat."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("heartbeat")
    else:
        with tempfile.TemporaryFile() as file:
            handle = os.dup(file.fileno())
    os.ftruncate(handle, mmap.PAGESIZE)
    return handle


def clear_heartbeat(handle: int) -> None:
    """Makes a page that was used before as if it were new."""
    with mmap.mmap(handle, mmap.PAGESIZE) as page:
        record = HEARTBEAT.pack(0, 0, time.monotonic(), 0.0, 0.0)
        page[:] = record + bytes(mmap.PAGESIZE - len(record))


class HeartbeatReader:
    """The supervisor's side."""

    def __init__(self, handle: int) -> None:
        clear_heartbeat(handle)
        self._page = mmap.mmap(handle, mmap.PAGESIZE)

    def read(self) -> WorkerHeartbeat:
        while True:  # until two reads agree, so that the record is complete
            record = self._page[: HEARTBEAT.size]
            if record == self._page[: HEARTBEAT.size]:
                return WorkerHeartbeat(*HEARTBEAT.unpack(record))

    def time_by_part(self) -> tuple[int, dict[str, float]]:
        """Returns the number of completed steps and their seconds by part. The first step does not count, because it includes set-up."""
        steps, *seconds = PART_SECONDS.unpack_from(self._page, HEARTBEAT.size)
        return steps, dict(zip(PARTS, seconds, strict=True))

    def first_step_seconds(self) -> dict[str, float]:
        """Returns the seconds of the first step by phase; {} until it has ended."""
        seconds = zip(STEP_PHASES, FIRST_STEP.unpack_from(self._page, FIRST_STEP_OFFSET), strict=True)
        return {name: value for name, value in seconds if value}


class HeartbeatWriter(Observer):
    """The worker's side: writes at every observation point of the training thread."""

    def __init__(self, handle: int) -> None:
        self._page = mmap.mmap(handle, mmap.PAGESIZE)
        self._step, self._num_steps = 0, 0
        self._phase, self._since = 0, time.monotonic()
        self._longest = [0.0] * len(PHASES)
        self._slowest = 0.0
        self._first_step = [0.0] * len(PHASES)
        """The longest duration of each phase in the first step, which includes set-up: used until a later step gives a better value."""
        self._part_seconds = [0.0] * len(PARTS)
        self.device: DeviceClock | None = None
        """Measures the parts of a step on a GPU; the host's clock cannot, because the host runs ahead."""

    def resumed(self, step: int) -> None:
        self._step = step

    def reached(self, name: str) -> None:
        phase = PHASE_INDEX.get(name)
        if phase is None:
            return  # an observation point of another thread
        if self.device is not None:
            self.device.reached(name, PART_OF_PHASE[phase])
        now = time.monotonic()
        self._measure(now - self._since)
        if name == "step":
            self._step += 1
            self._num_steps += 1
        if name in ("step", "finish"):
            self._page[HEARTBEAT.size : FIRST_STEP_OFFSET] = PART_SECONDS.pack(max(0, self._num_steps - 1), *self._by_part())
        if name == "step" and self._num_steps == 2:
            seconds = (self._first_step[PHASE_INDEX[phase]] for phase in STEP_PHASES)
            self._page[FIRST_STEP_OFFSET : FIRST_STEP_OFFSET + FIRST_STEP.size] = FIRST_STEP.pack(*seconds)
        self._phase, self._since = phase, now
        # One assignment, because pack_into first writes zeros, which the reader could see.
        longest = self._longest[phase] or self._first_step[phase]
        self._page[: HEARTBEAT.size] = HEARTBEAT.pack(self._step, phase, now, longest, self._slowest)

    def _measure(self, seconds: float) -> None:
        """Records the duration of the phase that ends now."""
        longest = self._first_step if self._num_steps == 1 else self._longest
        if seconds > longest[self._phase]:
            longest[self._phase] = seconds
            self._slowest = max(self._slowest, seconds)
        if self._num_steps != 1:
            self._part_seconds[PART_OF_PHASE[self._phase]] += seconds

    def _by_part(self) -> list[float]:
        """Returns the seconds by part. With a device clock, the host's total for steps is split in the proportions of the device's times."""
        device_seconds = 0.0 if self.device is None else sum(self.device.seconds[part] for part in STEP_PARTS)
        if self.device is None or not device_seconds:
            return self._part_seconds
        host_seconds = sum(self._part_seconds[part] for part in STEP_PARTS)
        return [
            host_seconds * device / device_seconds if part in STEP_PARTS else host
            for part, (host, device) in enumerate(zip(self._part_seconds, self.device.seconds, strict=True))
        ]
