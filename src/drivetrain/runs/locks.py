"""The lock of a run directory, and whether a process is alive."""

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


def lock_holder(path: Path) -> int | None:
    """Returns the pid of the process that holds a run's lock, or None."""
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
    """The right to write a run directory. The kernel releases the lock when the process dies.

    It is a POSIX record lock, because a forked loader worker does not inherit one. This process must not open
    the file again: closing any handle of it would release the lock.
    """

    handle: int

    @staticmethod
    def acquire(path: Path) -> Lock:
        """Creates the run directory if needed; raises Problem where another process holds the lock."""
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
    """Returns the pid and the host in a lock file; (-1, "?") if it has none."""
    try:
        owner = json.loads(os.read(handle, 4096))
        return int(owner["pid"]), str(owner["host"])
    except (ValueError, TypeError, KeyError, OSError):
        return -1, "?"


def _short(path: Path) -> str:
    """Returns a path for a message. A path that is too long for the file system is also too long for a line."""
    text = str(path)
    return text if len(text) <= 200 else f"{text[:100]}...{text[-20:]}"


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent dies. Does nothing on systems other than Linux."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call above
            os.kill(os.getpid(), signal.SIGKILL)
