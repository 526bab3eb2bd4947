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

MAX_HANDLES = 1 << 10
CUDA_ERROR_NOT_INITIALIZED = 3


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, worker.BLOCKED_SIGNALS)  # each worker unblocks them; this process needs none
    handle, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    guardian, alive = _start_guardian()
    with socket.socket(fileno=handle) as front:
        _preload()
        serve(front, guardian, alive)
    os.close(alive)
    os.waitpid(guardian, 0)
    os._exit(0)  # to take down all modules one by one would take most of a second


def _preload() -> None:
    """Imports all that every worker would import before its first step."""
    gc.disable()  # what is imported stays: to search it for garbage again and again takes half a second
    import torch._dynamo  # noqa: F401 (the first optimizer does)
    from torch.utils.tensorboard import SummaryWriter

    import drivetrain.engine.loop
    import drivetrain.engine.state.shards
    import drivetrain.watch.files  # noqa: F401

    del SummaryWriter

    gc.freeze()  # these objects stay shared with all workers
    gc.enable()


def _start_guardian() -> tuple[int, int]:
    """Forks a process that outlives this one, to end what workers started. Returns its pid, and the handle that stays open while this process lives."""
    ended, alive = os.pipe()
    guardian = os.fork()
    if guardian:
        os.close(ended)
        return guardian, alive
    os.dup2(ended, 0)
    os.closerange(1, MAX_HANDLES)  # it must not hold files or pipes that others read
    os.read(0, 1)
    end_session()
    os._exit(0)


def serve(front: socket.socket, guardian: int, alive: int) -> None:
    """Forks a worker for each request, and reports when one ends, until the front end closes its side."""
    wake, signal_writer = os.pipe()
    for end in (wake, signal_writer):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(signal_writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    own_handles = [front.fileno(), wake, signal_writer, alive]
    while True:
        ready, _, _ = select.select([front.fileno(), wake], [], [])
        if wake in ready:
            os.read(wake, 1 << 10)
            _report_ends(front, guardian)
        if front.fileno() in ready:
            message, handles, _, _ = socket.recv_fds(front, 1 << 20, 3)
            if not message:
                return
            _fork(json.loads(message), handles, own_handles, front)
            for handle in handles:
                os.close(handle)


def end_session() -> None:
    """Kills what is left of this process's session: workers and all they started, except for what has a session of its own."""
    for _ in range(100):  # a process that is just being forked is seen in the next round
        left = [pid for pid in _session_pids() if process_state(pid) != "Z"]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _session_pids() -> list[int]:
    """Returns the other processes of this one's session, without its leader."""
    pids, leader = [], os.getsid(0)
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (os.getpid(), leader):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(int(name)) == leader:
                    pids.append(int(name))
    return pids


def _report_ends(front: socket.socket, guardian: int) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid != guardian:
            front.send(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


def _fork(request: dict[str, Any], handles: list[int], own_handles: list[int], front: socket.socket) -> None:
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads: numpy's, which survive a fork
        try:
            pid = os.fork()
        except OSError as error:
            front.send(json.dumps({"failed": error.strerror}).encode())
            return
    if pid:
        with contextlib.suppress(OSError):  # it ended already
            os.setpgid(pid, pid)  # in parent and child: either may be first
        front.send(json.dumps({"forked": pid}).encode())
        return
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        front.detach()
        for handle in own_handles:
            os.close(handle)
        _become_worker(request, handles, parent)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _become_worker(request: dict[str, Any], handles: list[int], parent: int) -> None:
    output, event_pipe, page = handles
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.update(request["environment"])
    os.environ[worker.HANDLES] = f"{event_pipe} {page} {parent} {request['front']}"
    if not _is_gpu_untouched():
        for handle in (event_pipe, page):
            os.set_inheritable(handle, True)
        os.execv(sys.executable, [sys.executable, "-P", "-m", "drivetrain.processes.worker", request["job"]])
    sys.argv = ["drivetrain-worker", request["job"]]
    _reseed()
    worker.main()


def _is_gpu_untouched() -> bool:
    """Returns whether a fork of this process can use a GPU: none can, once the driver was initialised here."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return int(driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p()))) == CUDA_ERROR_NOT_INITIALIZED


def _reseed() -> None:
    """Forks of one process would draw the same numbers, for names of files too."""
    import numpy

    random.seed()
    numpy.random.seed()


if __name__ == "__main__":
    main()
