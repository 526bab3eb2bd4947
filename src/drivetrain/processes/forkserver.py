"""The process that forks workers: torch and the engine are imported once, and no GPU is touched."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from typing import Any

from drivetrain.processes import worker
from drivetrain.processes.procfs import process_state
from drivetrain.runs import die_with_parent


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, worker.BLOCKED_SIGNALS)  # a worker takes them up when it can answer; this process need not
    handle, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    guardian, alive = _guard()
    with socket.socket(fileno=handle) as front:
        _import()
        serve(front, guardian, alive)
    os.close(alive)
    os.waitpid(guardian, 0)


def _import() -> None:
    """All that every worker would import before its first step."""
    from torch.utils.tensorboard import SummaryWriter

    import drivetrain.engine.loop
    import drivetrain.engine.state.shards
    import drivetrain.watch.files  # noqa: F401

    del SummaryWriter

    gc.collect()
    gc.freeze()  # what is here is shared with all workers for good


def _guard() -> tuple[int, int]:
    """A process that outlives this one to end what workers started; and the handle that tells it that this one lives."""
    ended, alive = os.pipe()
    guardian = os.fork()
    if guardian:
        os.close(ended)
        return guardian, alive
    os.dup2(ended, 0)
    os.closerange(1, 1 << 10)  # it holds no file, and no pipe that others read
    os.read(0, 1)
    end_session()
    os._exit(0)


def serve(front: socket.socket, guardian: int, alive: int) -> None:
    """Fork a worker for each request, and tell when one ends, until the front end closes its side."""
    wake, woken = os.pipe()
    for end in (wake, woken):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    mine = [front.fileno(), wake, woken, alive]
    while True:
        ready, _, _ = select.select([front.fileno(), wake], [], [])
        if wake in ready:
            os.read(wake, 1 << 10)
            _reap(front, guardian)
        if front.fileno() in ready:
            message, handles, _, _ = socket.recv_fds(front, 1 << 20, 3)
            if not message:
                return
            _fork(json.loads(message), handles, mine, front)
            for one in handles:
                os.close(one)


def end_session() -> None:
    """Kill what is left of this process's session: workers and all they started, but for what got a session of its own."""
    for _ in range(100):  # whoever is being forked shows at the next look
        left = [pid for pid in _session() if process_state(pid) != "Z"]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _session() -> list[int]:
    """The other processes of this one's session, but for the one that leads it."""
    found, leader = [], os.getsid(0)
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (os.getpid(), leader):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(int(name)) == leader:
                    found.append(int(name))
    return found


def _reap(front: socket.socket, guardian: int) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid != guardian:
            front.send(json.dumps({"died": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


def _fork(request: dict[str, Any], handles: list[int], mine: list[int], front: socket.socket) -> None:
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: numpy's, which know how to be forked
        try:
            pid = os.fork()
        except OSError as error:
            front.send(json.dumps({"failed": error.strerror}).encode())
            return
    if pid:
        with contextlib.suppress(OSError):  # it ended already
            os.setpgid(pid, pid)  # here and there: whoever comes first
        front.send(json.dumps({"born": pid}).encode())
        return
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        front.detach()
        for one in mine:
            os.close(one)
        out, wire, pulse = handles
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.close(out)
        os.environ.update(request["environment"])
        os.environ[worker.HANDLES] = f"{wire} {pulse} {parent} {request['front']}"
        if not _gpu_untouched():
            for one in (wire, pulse):
                os.set_inheritable(one, True)
            os.execv(sys.executable, [sys.executable, "-P", "-m", "drivetrain.processes.worker", request["job"]])
        sys.argv = ["drivetrain-worker", request["job"]]
        _reseed()
        worker.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _gpu_untouched() -> bool:
    """Whether a fork of this process can use a GPU: none can, once the driver was initialised here."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    not_initialised = 3
    return int(driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p()))) == not_initialised


def _reseed() -> None:
    """Forks of one process would draw the same numbers, for names of files too."""
    import numpy

    random.seed()
    numpy.random.seed()


if __name__ == "__main__":
    main()
