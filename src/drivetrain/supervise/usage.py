"""Whether a process and its children do anything: computing time, and bytes read and written, as the kernel counts them."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from drivetrain.processes.procfs import descendants

WINDOW = 5.0  # seconds over which it is measured
BUSY_CPU = 0.01  # of a core: what waits, polls now and then, or has idle threads stays below
BUSY_BYTES = 16 << 10  # a second


@dataclass(frozen=True)
class Usage:
    cpu_seconds: float
    num_bytes: int


def usage_of(pid: int) -> Usage | None:
    """Of a process and all its children so far; None where the kernel does not say."""
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
class _Seen:
    pid: int
    at: float
    usage: Usage | None
    busy_until: float


@dataclass
class Busy:
    """Knows when each rank, or a process that it started, last did something."""

    _seen: dict[int, _Seen] = field(default_factory=dict)

    def last(self, rank: int, pid: int, now: float) -> float:
        """The end of the last window in which it was busy; it counts as busy until it was measured."""
        seen = self._seen.get(rank)
        if seen is not None and seen.pid == pid and now - seen.at < WINDOW:
            return seen.busy_until
        usage = usage_of(pid)
        idle = seen is not None and seen.pid == pid and not _moved(seen.usage, usage, now - seen.at)
        self._seen[rank] = _Seen(pid, now, usage, seen.busy_until if idle and seen is not None else now)
        return self._seen[rank].busy_until


def _moved(before: Usage | None, now: Usage | None, seconds: float) -> bool:
    if before is None or now is None:
        return True  # it cannot be known
    # Either way: what a child has used goes when it ends, until its parent asks for it.
    cpu, num_bytes = abs(now.cpu_seconds - before.cpu_seconds), abs(now.num_bytes - before.num_bytes)
    return cpu >= BUSY_CPU * seconds or num_bytes >= BUSY_BYTES * seconds
