"""Waiting in tests: with long timeouts, because the machine may be slow, and with a clock that leaves out time given to other machines."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def until(holds: Callable[[], Any], what: str, seconds: float = 300.0, of: subprocess.Popen[Any] | None = None) -> Any:
    """Returns the value of `holds` as soon as it is true; `of` is a process that must not end before."""
    deadline = time.monotonic() + seconds
    while not (value := holds()):
        assert of is None or of.poll() is None, f"{what}: not before the command ended, with {of.returncode}"
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.05)
    return value


class Stopwatch:
    """Counts seconds, without the share of time that the host gave to other virtual machines (steal time)."""

    def __init__(self) -> None:
        self._begun, self._ticks = time.monotonic(), _ticks()

    @property
    def share(self) -> float:
        """The share of the requested CPU time that this machine got since the start."""
        passed, stolen = (now - then for now, then in zip(_ticks(), self._ticks, strict=True))
        return 1 - stolen / max(passed, 1)

    @property
    def seconds(self) -> float:
        return (time.monotonic() - self._begun) * self.share


def _ticks() -> tuple[int, int]:
    """Returns ticks of all cores since boot: those requested, and those of them that went to other virtual machines."""
    user, nice, system, _idle, _disk, *interrupts, stolen = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])
    return user + nice + system + sum(interrupts) + stolen, stolen
