"""The folders in which an attempt's workers find their job and write their stacks."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from drivetrain.runs import Run, is_alive, remove_half_written_files
from drivetrain.supervise.scratch import Scratch


class AttemptFolders:
    """Gives every attempt a folder: in the run if it is `in_run` and the disk has room, else in a scratch folder."""

    def __init__(self, run: Run, in_run: bool) -> None:
        self._run, self._in_run = run, in_run
        self._scratch: Scratch | None = None
        self._prefix = f".attempt-{socket.gethostname()}-"
        """What the folders of this machine's attempts are called, before the pid of their supervisor."""

    @property
    def scratch(self) -> str | None:
        return str(self._scratch.path) if self._scratch else None

    @contextlib.contextmanager
    def open(self) -> Iterator[Path]:
        """A folder for one attempt. The folder of a front end that was killed is removed by the next one."""
        folder = self._make_in_run() if self._in_run else None
        if self._scratch is None:
            with contextlib.suppress(OSError):  # no room there: a folder in the run will do
                self._scratch = Scratch()
        if folder is None:
            folder = (self._scratch or Scratch()).path / "job"
            folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None  # a member's supervisor is closed twice: by the rendezvous and by its owner
        if self._in_run:
            self._remove_old()  # what could not be removed while the disk was read-only

    def _make_in_run(self) -> Path | None:
        """Returns a new folder in the run; None where the disk is full."""
        self._remove_old()
        folder = self._run.path / f"{self._prefix}{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "room").write_bytes(bytes(1 << 16))
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            return None
        (folder / "room").unlink()
        return folder

    def _remove_old(self) -> None:
        """Removes what this process, or processes of this machine that have ended, left in the run."""
        remove_half_written_files(self._run.path)
        remove_half_written_files(self._run.path / "logs")
        for folder in self._run.path.glob(f"{self._prefix}*"):
            pid = folder.name.removeprefix(self._prefix)
            if pid.isdigit() and (int(pid) == os.getpid() or not is_alive(int(pid))):
                shutil.rmtree(folder, ignore_errors=True)
