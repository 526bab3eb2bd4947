"""Measures whether a process and its children are busy: CPU time, and bytes read and written, from /proc."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from drivetrain.processes.procfs import descendants

WINDOW_SECONDS = 5.0  # usage is measured over this time
BUSY_CPU_SHARE = 0.01  # of one core; a process that only waits or polls uses less
BUSY_BYTES_PER_SECOND = 16 << 10


@dataclass(frozen=True)
class Usage:
    cpu_seconds: float
    num_bytes: int


def usage_of(pid: int) -> Usage | None:
    """Returns the total usage of a process and its descendants; None if /proc does not have it."""
    ticks = num_bytes = 0
    for process in (pid, *descendants(pid)):
        try:
            ticks += sum(
                map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:15])
            )  # utime, stime, cutime, cstime
        except (OSError, ValueError):
            if process == pid:
                return None
        with contextlib.suppress(OSError, ValueError):
            counts = dict(line.split(": ") for line in Path(f"/proc/{process}/io").read_text().splitlines())
            num_bytes += sum(int(counts[name]) for name in ("rchar", "wchar", "read_bytes"))
    return Usage(ticks / os.sysconf("SC_CLK_TCK"), num_bytes)


@dataclass
class _Measurement:
    pid: int
    time: float
    usage: Usage | None
    busy_until: float


@dataclass
class BusyTimes:
    """When each rank, or a process that it started, was last busy."""

    _measurements: dict[int, _Measurement] = field(default_factory=dict)

    def last_busy(self, rank: int, pid: int, now: float) -> float:
        """Returns the end of the last window in which a rank was busy. A rank without a measurement counts as busy."""
        previous = self._measurements.get(rank)
        if previous is not None and previous.pid != pid:
            previous = None  # of a process in an earlier attempt
        if previous is not None and now - previous.time < WINDOW_SECONDS:
            return previous.busy_until
        usage, busy_until = usage_of(pid), now
        if previous is not None and not _is_busy(previous.usage, usage, now - previous.time):
            busy_until = previous.busy_until
        self._measurements[rank] = _Measurement(pid, now, usage, busy_until)
        return busy_until


def _is_busy(first: Usage | None, second: Usage | None, seconds: float) -> bool:
    if first is None or second is None:
        return True  # unknown
    # The totals may also fall: the usage of a child that ended is missing until its parent waits for it.
    cpu_seconds, num_bytes = abs(second.cpu_seconds - first.cpu_seconds), abs(second.num_bytes - first.num_bytes)
    return cpu_seconds >= BUSY_CPU_SHARE * seconds or num_bytes >= BUSY_BYTES_PER_SECOND * seconds
