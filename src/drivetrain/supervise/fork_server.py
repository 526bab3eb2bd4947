"""The supervisor's side of the fork server: a process that imports torch once and forks the workers, so that restarts are fast.

The fork server never initialises a GPU. If the supervisor dies, the kernel kills the fork server and its workers. The fork server's
first child, the guardian, then kills all other processes of the session: those that the workers had started.
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

CLOSE_SECONDS = 5.0  # the fork server may take this long to end by itself
CAN_FORK = sys.platform == "linux"  # elsewhere forking a process with threads is not safe, so each worker imports torch


class WorkerProcess:
    """One worker process. `code` is None while it runs, then an exit code, or minus a signal number, as in subprocess."""

    def __init__(self, process: subprocess.Popen[bytes] | None = None) -> None:
        self.pid: int | None = None if process is None else process.pid
        """None until it is forked."""
        self.code: int | None = None
        self.start_error = ""
        """Why it could not be forked."""
        self._process = process
        self._pending_signals: list[int] = []

    def poll(self) -> int | None:
        if self._process is not None:
            self.code = self._process.poll()
        return self.code

    def signal(self, number: int) -> None:
        """Sends a signal to this process alone; if it is not forked yet, as soon as it is."""
        if self.pid is None:
            self._pending_signals.append(number)
        elif self.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the process and the processes that it started."""
        if self.pid is None:
            self._pending_signals.append(signal.SIGKILL)
        else:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def set_failed(self, error: str) -> None:
        self.code, self.start_error = Outcome.INFRA.code, error

    def set_forked(self, pid: int) -> None:
        self.pid = pid
        for number in self._pending_signals:
            self.signal(number)


class ForkServer:
    """Starts workers that share environment variables, for all attempts at a job."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self.environment, self._log = environment, log
        self.handle: int | None = None
        """Readable when there are events; None if there is no fork server."""
        self.end_message = ""
        """How the fork server ended, if it ended by itself."""
        self._children: list[WorkerProcess] = []
        if not CAN_FORK:
            return
        front, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server:
            output = _open_for_append(log)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "drivetrain.processes.forkserver", str(server.fileno()), str(os.getpid())],  # -P: no module of this folder shadows torch's
                env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                pass_fds=(server.fileno(),), start_new_session=True,  # Ctrl-C must reach the supervisor only
            )  # fmt: skip
            if output != subprocess.DEVNULL:
                os.close(output)
        self._socket, self.handle = front, front.fileno()

    def start(self, job: Path, environment: dict[str, str], output: int, event_pipe: int, page: int) -> WorkerProcess:
        """Starts a worker with these handles: its output, its event pipe and its heartbeat page."""
        if self.handle is None:
            handles = {HANDLES: f"{event_pipe} {page} {os.getpid()} {os.getpid()}"}
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "drivetrain.processes.worker", str(job)],
                env=self.environment | environment | handles, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                pass_fds=(event_pipe, page), start_new_session=True,
            )  # fmt: skip
            self._children.append(WorkerProcess(process))
        else:
            self._children.append(WorkerProcess())
            message = json.dumps({"job": str(job), "environment": environment, "front": os.getpid()}).encode()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended, which `read_events` will report
                socket.send_fds(self._socket, [message], [output, event_pipe, page])
        return self._children[-1]

    def read_events(self, unregister: Callable[[int], object]) -> None:
        """Reads the starts and ends of workers. If the fork server has ended, all workers have."""
        assert self.handle is not None
        try:
            message = self._socket.recv(1 << 16)
        except ConnectionError:  # it died before it had read all requests
            message = b""
        if not message:
            unregister(self.handle)
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(CLOSE_SECONDS)
                end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
                self.end_message = f"the process that forks the workers {end} (see {self._log})"
            self.kill()
            return
        event = json.loads(message)
        not_forked = (child for child in self._children if child.pid is None and child.code is None)  # in the order of the requests
        if "forked" in event:
            next(not_forked).set_forked(event["forked"])
        elif "failed" in event:
            next(not_forked).set_failed(event["failed"])
        else:
            ended = next(child for child in self._children if child.pid == event["ended"] and child.code is None)
            ended.code = event["code"]

    @property
    def is_alive(self) -> bool:
        return not CAN_FORK or self.handle is not None

    def kill(self) -> None:
        """Kills the fork server with all its workers, and reads no further events."""
        if self.handle is not None:
            self._process.kill()
            self.close()
        for child in self._children:
            if child.poll() is None:
                child.code = -signal.SIGKILL

    def close(self) -> None:
        if self.handle is not None:
            self.handle = None
            self._socket.close()  # this ends the fork server
            try:
                self._process.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def _open_for_append(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError:
        return subprocess.DEVNULL  # a full disk must not stop the training
