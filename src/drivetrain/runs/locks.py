"""Who may write a run directory, and whether its process lives."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from drivetrain.outcomes import Problem


def holder(path: Path) -> int | None:
    """The pid of the process that holds a run's lock, or None where nobody does."""
    try:
        handle = os.open(path / "lock", os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return None
    except OSError:
        return _owner(handle)[0]
    finally:
        os.close(handle)


@dataclass
class Lock:
    """The right to write a run's directory; the kernel takes it back when the process dies.

    A POSIX record lock, since a forked loader worker does not inherit it. (This process must not open
    the file again: closing any handle of it would release the lock.)
    """

    handle: int

    @staticmethod
    def take(path: Path) -> Lock:
        while True:
            try:
                path.mkdir(parents=True, exist_ok=True)
                handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as error:
                raise Problem(f"cannot write the run directory {_short(path)}: {error.strerror}; choose another with --run-dir") from None
            try:
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                pid, host = _owner(handle)
                os.close(handle)
                raise Problem(
                    f"{path} is being trained by process {pid} on {host}: wait for it, stop it (kill {pid}), or choose another --name"
                ) from None
            if os.fstat(handle).st_nlink:
                break
            os.close(handle)  # the directory was deleted meanwhile
        try:
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        except OSError as error:
            os.close(handle)
            raise Problem(f"cannot write the run directory {_short(path)}: {error.strerror}; choose another with --run-dir") from None
        return Lock(handle)

    def release(self) -> None:
        os.close(self.handle)


def _owner(handle: int) -> tuple[int, str]:
    """The process and the host that a lock file names; -1 and ? where it names none."""
    try:
        told = json.loads(os.read(handle, 4096))
        return int(told["pid"]), str(told["host"])
    except (ValueError, TypeError, KeyError, OSError):
        return -1, "?"


def _short(path: Path) -> str:
    """A path as a message shows it: one that is too long for the file system is too long for a line, too."""
    text = str(path)
    return text if len(text) <= 200 else f"{text[:100]}...{text[-20:]}"


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the kernel knew
            os.kill(os.getpid(), signal.SIGKILL)
