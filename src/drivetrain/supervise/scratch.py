"""A folder for what a run's processes need only while they live. That of a process that was killed is removed by the next start."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

PREFIX = "drivetrain-scratch-"
HELD = ".held"
"""The file whose lock its maker holds; the kernel takes that back when the process ends, in whatever container it runs."""


class Scratch:
    """One in the system's folder for temporary files, so that the paths of sockets in it are short."""

    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        being_made = self.path / f"{HELD}-"
        self._handle = os.open(being_made, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._handle, fcntl.LOCK_EX)
        os.rename(being_made, self.path / HELD)  # locked before anybody can find it

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._handle)


def sweep() -> None:
    """Remove those of this user's processes that have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            about = folder.lstat()
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
                continue
            handle = os.open(folder / HELD, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)
