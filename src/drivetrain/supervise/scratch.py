"""A scratch folder for what a supervisor's processes need only while they live: their job, their stacks, their sockets.

It lies in the system's folder for temporary files, so that the paths of sockets are short and nothing is left in a run. Its owner
holds a lock on it, which the kernel releases however the owner ends: the next start on the machine removes it then. The lock
also keeps services away that remove old temporary files.
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
        with contextlib.suppress(OSError):  # a file system without locks, where sweep() can remove nothing either
            fcntl.flock(self._handle, fcntl.LOCK_EX)
        self.path = unlocked.rename(unlocked.with_name(unlocked.name[1:]))  # locked before sweep() can find it

    @contextlib.contextmanager
    def subfolder(self, name: str) -> Iterator[Path]:
        """A folder in it that is removed at the end."""
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
    """Removes the scratch folders of this user's processes that have ended."""
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
