"""Where workers come from: a process that has imported torch once and forks them, so that a restart takes no import.

It never touches a GPU. It dies with the front end, and its workers die with it (the kernel sees to both); a guardian, a small
process that it forks first, then kills what they had started: all of its session.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from drivetrain.outcomes import Outcome
from drivetrain.processes.worker import HANDLES

CLOSING = 5.0  # seconds it gets to end by itself


class Child:
    """One worker process. `code` is None while it lives, then as subprocess tells it: an exit code, or minus a signal."""

    def __init__(self, process: subprocess.Popen[bytes] | None = None) -> None:
        self.pid: int | None = None if process is None else process.pid
        self.code: int | None = None
        self.failure = ""
        """Why it could not be forked."""
        self._process = process
        self._awaiting: list[int] = []

    def poll(self) -> int | None:
        if self._process is not None:
            self.code = self._process.poll()
        return self.code

    def signal(self, number: int) -> None:
        """To it alone; kept until it is there, where it is still to be forked."""
        if self.pid is None:
            self._awaiting.append(number)
        elif self.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """It, and what it started."""
        if self.pid is None:
            self._awaiting.append(signal.SIGKILL)
        else:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def unborn(self, why: str) -> None:
        self.code, self.failure = Outcome.INFRA.code, why

    def born(self, pid: int) -> None:
        self.pid = pid
        for number in self._awaiting:
            self.signal(number)


class Nursery:
    """Starts workers of one environment, for as many attempts at a job as it takes."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self.environment, self._log = environment, log
        self.handle: int | None = None
        """Readable when it has something to tell."""
        self.lost = ""
        """How it ended, where it was not ended from here."""
        self._children: list[Child] = []
        if sys.platform != "linux":  # elsewhere a process with threads is not safely forked: each worker imports for itself
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            output = _appended(log)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "drivetrain.processes.forkserver", str(theirs.fileno()), str(os.getpid())],  # -P: no module of this folder shadows torch's
                env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),), start_new_session=True,  # the terminal's Ctrl-C comes here, not to them
            )  # fmt: skip
            if output != subprocess.DEVNULL:
                os.close(output)
        self._socket, self.handle = ours, ours.fileno()

    def start(self, job: Path, environment: dict[str, str], out: int, wire: int, pulse: int) -> Child:
        """Begin a worker that writes to these handles."""
        if self.handle is None:
            told = environment | {HANDLES: f"{wire} {pulse} {os.getpid()} {os.getpid()}"}
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "drivetrain.processes.worker", str(job)],
                env=self.environment | told, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                pass_fds=(wire, pulse), start_new_session=True,
            )  # fmt: skip
            self._children.append(Child(process))
        else:
            self._children.append(Child())
            message = json.dumps({"job": str(job), "environment": environment, "front": os.getpid()}).encode()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is gone, which `listen` will tell
                socket.send_fds(self._socket, [message], [out, wire, pulse])
        return self._children[-1]

    def listen(self, forget: Callable[[int], object]) -> None:
        """Take in births and deaths; where the nursery itself is gone, so are all its children."""
        assert self.handle is not None
        try:
            told = self._socket.recv(1 << 16)
        except ConnectionError:  # it died before it had read all requests
            told = b""
        if not told:
            forget(self.handle)
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(CLOSING)
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
                self.lost = f"the process that forks the workers {how} (see {self._log})"
            self.kill()
            return
        message = json.loads(told)
        coming = (c for c in self._children if c.pid is None and c.code is None)
        if "born" in message:
            next(coming).born(message["born"])
        elif "failed" in message:
            next(coming).unborn(message["failed"])
        else:
            next(c for c in self._children if c.pid == message["died"] and c.code is None).code = message["code"]

    @property
    def alive(self) -> bool:
        return sys.platform != "linux" or self.handle is not None

    def kill(self) -> None:
        """End it with all its children, of which none is heard again."""
        if self.handle is not None:
            self._process.kill()
            self.close()
        for child in self._children:
            child.code = -signal.SIGKILL if child.poll() is None else child.code

    def close(self) -> None:
        if self.handle is not None:
            self.handle = None
            self._socket.close()  # at which it ends
            try:
                self._process.wait(CLOSING)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def _appended(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError:
        return subprocess.DEVNULL  # a full disk must not stop the training
