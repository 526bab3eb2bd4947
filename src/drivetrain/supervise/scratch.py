"""A temporary folder for the files that a supervisor's processes need only while they run: job, stacks, sockets.

It is in the system's temporary folder: socket paths stay short, and nothing is left in the run's directory. Its owner holds a lock
on it. If the owner is killed, the kernel releases the lock, and the next start on the machine removes the folder. The lock also
stops services that remove old temporary files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "drivetrain-scratch-"


class Scratch:
    def __init__(self) -> None:
        sweep()
        unlocked = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
        self._handle = os.open(unlocked, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a file system without locks; sweep() cannot remove anything there
            fcntl.flock(self._handle, fcntl.LOCK_EX)
        self.path = unlocked.rename(unlocked.with_name(unlocked.name[1:]))  # locked before sweep() can find it

    @contextlib.contextmanager
    def subfolder(self, name: str) -> Iterator[Path]:
        """Creates a folder in the scratch folder, and removes it at the end."""
        folder = self.path / name
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._handle)


def sweep() -> None:
    """Removes the scratch folders whose owners have ended, of this user only."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)
