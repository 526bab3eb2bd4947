"""Whether a process and its children do anything: computing time, and bytes read and written, as the kernel counts them."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from drivetrain.processes.procfs import descendants

WINDOW_SECONDS = 5.0  # over which usage is measured
BUSY_CPU_SHARE = 0.01  # of a core: a process that waits, polls now and then, or has idle threads stays below
BUSY_BYTES_PER_SECOND = 16 << 10


@dataclass(frozen=True)
class Usage:
    cpu_seconds: float
    num_bytes: int


def usage_of(pid: int) -> Usage | None:
    """Returns the usage of a process and all its descendants so far; None where the kernel does not say."""
    ticks = num_bytes = 0
    for one in (pid, *descendants(pid)):
        try:
            ticks += sum(map(int, Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[11:15]))
        except (OSError, ValueError):
            if one == pid:
                return None
        with contextlib.suppress(OSError, ValueError):
            counts = dict(line.split(": ") for line in Path(f"/proc/{one}/io").read_text().splitlines())
            num_bytes += sum(int(counts[name]) for name in ("rchar", "wchar", "read_bytes"))
    return Usage(ticks / os.sysconf("SC_CLK_TCK"), num_bytes)


@dataclass
class _Measurement:
    pid: int
    at: float
    usage: Usage | None
    busy_until: float


@dataclass
class BusyTimes:
    """When each rank, or a process that it started, last did something."""

    _measurements: dict[int, _Measurement] = field(default_factory=dict)

    def last_busy(self, rank: int, pid: int, now: float) -> float:
        """Returns the end of the last window in which a rank was busy; it counts as busy until it is measured."""
        before = self._measurements.get(rank)
        if before is not None and before.pid == pid and now - before.at < WINDOW_SECONDS:
            return before.busy_until
        usage = usage_of(pid)
        is_idle = before is not None and before.pid == pid and not _is_busy(before.usage, usage, now - before.at)
        busy_until = before.busy_until if is_idle and before is not None else now
        self._measurements[rank] = _Measurement(pid, now, usage, busy_until)
        return busy_until


def _is_busy(before: Usage | None, now: Usage | None, seconds: float) -> bool:
    if before is None or now is None:
        return True  # unknown
    # Changes in both directions count: a child's usage disappears when it ends, until its parent waits for it.
    cpu, num_bytes = abs(now.cpu_seconds - before.cpu_seconds), abs(now.num_bytes - before.num_bytes)
    return cpu >= BUSY_CPU_SHARE * seconds or num_bytes >= BUSY_BYTES_PER_SECOND * seconds
