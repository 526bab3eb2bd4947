"""Reads facts about processes from /proc."""

from __future__ import annotations

import contextlib
from pathlib import Path


def process_state(pid: int) -> str:
    """Returns the kernel's letter for a process's state (R, S, D, T, Z); "" if it is unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def descendants(pid: int) -> list[int]:
    """Returns a process's children, their children, and so on."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                pids += [child, *descendants(child)]
    return pids
