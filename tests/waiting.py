"""Long timeouts for slow machines, and a stopwatch that leaves out the CPU time of other virtual machines."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def wait_until(condition: Callable[[], Any], description: str, seconds: float = 300.0, process: subprocess.Popen[Any] | None = None) -> Any:
    """Returns the value of `condition` as soon as it is true; `process` must not end before."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert process is None or process.poll() is None, f"{description}: not before the command ended, with {process.returncode}"
        assert time.monotonic() < deadline, f"{description}: not within {seconds:.0f} s"
        time.sleep(0.05)
    return value


class Stopwatch:
    """Counts seconds, without the share of time that the host gave to other virtual machines (steal time)."""

    def __init__(self) -> None:
        self._start, self._ticks = time.monotonic(), _ticks()

    @property
    def cpu_share(self) -> float:
        """The share of the requested CPU time that this machine got since the start."""
        requested_before, stolen_before = self._ticks
        requested, stolen = _ticks()
        return 1 - (stolen - stolen_before) / max(requested - requested_before, 1)

    @property
    def seconds(self) -> float:
        return (time.monotonic() - self._start) * self.cpu_share


def _ticks() -> tuple[int, int]:
    """Returns two counts of CPU ticks since boot: those requested, and of these the ones that other virtual machines got."""
    user, nice, system, _idle, _disk, *interrupts, stolen = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])
    return user + nice + system + sum(interrupts) + stolen, stolen
