"""The fork server: a process that imports torch and the engine once, initialises no GPU, and forks the workers."""

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
from typing import Any, NamedTuple

from drivetrain.processes import worker
from drivetrain.processes.procfs import process_state
from drivetrain.runs import die_with_parent

MAX_HANDLES = 1 << 10  # the guardian closes all file descriptors below this number
CUDA_ERROR_NOT_INITIALIZED = 3  # from cuda.h


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, worker.STOP_SIGNALS)  # each worker unblocks them; this process ignores them
    socket_handle, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    guardian = _start_guardian()
    with socket.socket(fileno=socket_handle) as supervisor:
        _preload()
        serve(supervisor, guardian)
    os.close(guardian.lifeline)
    os.waitpid(guardian.pid, 0)
    os._exit(0)  # the interpreter's normal exit would unload all modules, which takes most of a second


def _preload() -> None:
    """Imports all modules that every worker needs before its first step."""
    gc.disable()  # garbage collections during the imports would take half a second
    import torch._dynamo  # noqa: F401 (the first optimizer imports it)
    from torch.utils.tensorboard import SummaryWriter

    import drivetrain.engine.loop
    import drivetrain.engine.state.shards
    import drivetrain.watch.files  # noqa: F401

    del SummaryWriter

    gc.freeze()  # the workers' garbage collections skip these objects, so their memory pages stay shared
    gc.enable()


class _Guardian(NamedTuple):
    """A process that outlives the fork server, and then kills the processes that workers started."""

    pid: int
    lifeline: int
    """The writing end of a pipe: the guardian acts when the kernel closes it, which it does when the fork server ends."""


def _start_guardian() -> _Guardian:
    read_end, lifeline = os.pipe()
    pid = os.fork()
    if pid:
        os.close(read_end)
        return _Guardian(pid, lifeline)
    os.dup2(read_end, 0)
    os.closerange(1, MAX_HANDLES)  # a pipe that the guardian holds open would never end for its reader
    os.read(0, 1)  # blocks until the lifeline is closed
    end_session()
    os._exit(0)


def serve(supervisor: socket.socket, guardian: _Guardian) -> None:
    """Forks a worker for each request and reports each worker's end, until the supervisor closes the socket."""
    signal_reader, signal_writer = os.pipe()
    for handle in (signal_reader, signal_writer):
        os.set_blocking(handle, False)
    signal.set_wakeup_fd(signal_writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    own_handles = [supervisor.fileno(), signal_reader, signal_writer, guardian.lifeline]
    while True:
        ready, _, _ = select.select([supervisor.fileno(), signal_reader], [], [])
        if signal_reader in ready:
            os.read(signal_reader, 1 << 10)
            _report_ends(supervisor, guardian.pid)
        if supervisor.fileno() in ready:
            message, handles, _, _ = socket.recv_fds(supervisor, 1 << 20, 3)
            if not message:
                return
            _fork(json.loads(message), handles, own_handles, supervisor)
            for handle in handles:
                os.close(handle)


def end_session() -> None:
    """Kills the other processes of this session: workers and the processes they started."""
    for _ in range(100):  # again, because a process may have been forked since the last list
        live_pids = [pid for pid in _session_pids() if process_state(pid) != "Z"]
        if not live_pids:
            return
        for pid in live_pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _session_pids() -> list[int]:
    """Returns the processes of this session, without this process and the session leader."""
    pids, leader = [], os.getsid(0)
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (os.getpid(), leader):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(int(name)) == leader:
                    pids.append(int(name))
    return pids


def _report_ends(supervisor: socket.socket, guardian_pid: int) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid != guardian_pid:
            supervisor.send(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


def _fork(request: dict[str, Any], handles: list[int], own_handles: list[int], supervisor: socket.socket) -> None:
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking a process with threads; these are numpy's, and safe
        try:
            pid = os.fork()
        except OSError as error:
            supervisor.send(json.dumps({"failed": error.strerror}).encode())
            return
    if pid:
        with contextlib.suppress(OSError):  # the worker has ended already
            os.setpgid(pid, pid)  # also done by the worker: either process may run first
        supervisor.send(json.dumps({"forked": pid}).encode())
        return
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        supervisor.detach()
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
    """Returns whether a fork of this process can use a GPU: it cannot after this process has initialised the driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return int(driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p()))) == CUDA_ERROR_NOT_INITIALIZED


def _reseed() -> None:
    """Seeds the generators anew, because all forks would draw the same numbers, also for names of temporary files."""
    import numpy

    random.seed()
    numpy.random.seed()


if __name__ == "__main__":
    main()
