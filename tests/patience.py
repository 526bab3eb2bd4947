"""How long a test waits: long, for the machine may be slow; what is measured, is measured in time the machine was ours."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def until(holds: Callable[[], Any], what: str, seconds: float = 300.0, of: subprocess.Popen[Any] | None = None) -> Any:
    """What `holds` gives, as soon as it gives something; `of` is a process that must not end before."""
    deadline = time.monotonic() + seconds
    while not (value := holds()):
        assert of is None or of.poll() is None, f"{what}: not before the command ended, with {of.returncode}"
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.05)
    return value


class Stopwatch:
    """Seconds since it was made, less the share of the machine that its host gave to others meanwhile."""

    def __init__(self) -> None:
        self._begun, self._ticks = time.monotonic(), _ticks()

    @property
    def share(self) -> float:
        """Of the time that was wanted since then, what we got."""
        passed, stolen = (now - then for now, then in zip(_ticks(), self._ticks, strict=True))
        return 1 - stolen / max(passed, 1)

    @property
    def seconds(self) -> float:
        return (time.monotonic() - self._begun) * self.share


def _ticks() -> tuple[int, int]:
    """Of all cores since the machine's start: the time they were wanted, and what of it went to other machines of the same host."""
    user, nice, system, _idle, _disk, *interrupts, stolen = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])
    return user + nice + system + sum(interrupts) + stolen, stolen
