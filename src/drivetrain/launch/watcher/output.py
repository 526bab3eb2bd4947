"""Shows what the worker prints where it would have appeared anyway, and writes it into the run's log of its rank."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

MAX_EARLY_BYTES = 1 << 20  # of what is printed before the run's directory is known


class Output:
    """Copies the worker's stdout and stderr."""

    def __init__(self, stdout: int, stderr: int) -> None:
        self.targets = {stdout: 1, stderr: 2}
        """The reading end of each pipe -> the file descriptor on which it is shown."""
        self._early: bytes | None = b""
        """What was printed so far; None after the log was opened."""
        self._log: int | None = None
        for handle in self.targets:
            os.set_blocking(handle, False)

    def copy(self, handle: int) -> bool:
        """Copies what is in a pipe; returns whether it may hold more later."""
        try:
            data = os.read(handle, 1 << 16)
        except BlockingIOError:
            return True
        self._show(self.targets[handle], data)
        if self._early is not None:
            self._early = (self._early + data)[-MAX_EARLY_BYTES:]
        self._write_log(data)
        return bool(data)

    def _show(self, target: int, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the reader closed it, as `| head` does: the training continues
            while data:
                data = data[os.write(target, data) :]

    def _write_log(self, data: bytes) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError):  # a full disk must not stop the training
                os.write(self._log, data)

    def open_log(self, path: Path) -> None:
        """Writes what is printed from now on, and what was printed before any log was open, to a file."""
        self._close_log()
        early, self._early = self._early, None
        try:
            path.parent.mkdir(exist_ok=True)
            self._log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError:
            return  # a full disk, or a machine that does not have the run's directory
        self._write_log(early or b"")

    def drain(self) -> None:
        """Copies the rest of both pipes, but does not wait until they close: a process that the worker started may hold them open."""
        for handle in self.targets:
            for _ in range(100):
                try:
                    if not self.copy(handle):
                        break
                except OSError:
                    break
        self._close_log()

    def _close_log(self) -> None:
        if self._log is not None:
            os.close(self._log)
            self._log = None
