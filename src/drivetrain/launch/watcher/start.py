"""Forks the worker of another launcher from the process that the launcher started."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
from typing import NamedTuple

from drivetrain.launch.watcher.links import LOOPBACK, LeaderLinks, is_one_machine
from drivetrain.launch.watcher.output import Output
from drivetrain.launch.watcher.process import WatchedProcess, Watcher
from drivetrain.launch.watcher.worker_side import LaunchedWorker, LeaderPort
from drivetrain.processes.worker import STOP_SIGNALS
from drivetrain.runs import die_with_parent
from drivetrain.supervise.scratch import Scratch
from drivetrain.watch.heartbeat import HeartbeatReader, open_heartbeat_page
from drivetrain.watch.screen import Screen


class _Pipe(NamedTuple):
    reader: int
    writer: int


def start_worker(launcher: str, hang_after: float, screen: Screen) -> LaunchedWorker | int:
    """Forks the worker. In the worker, returns what it needs to be watched; in the watcher, returns the worker's exit code after its end.

    The fork comes before torch is imported, so that it has neither threads nor a CUDA context.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    scratch, page = Scratch(), open_heartbeat_page()
    events, stdout, stderr = (_Pipe(*os.pipe()) for _ in range(3))
    server, leader = _open_port() if rank == 0 and world_size > 1 else (None, LeaderPort(0, ""))
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until the watcher can forward signals
    pid = os.fork()
    if pid == 0:
        die_with_parent(parent)
        for handle in (events.reader, stdout.reader, stderr.reader):
            os.close(handle)
        if server is not None:
            server.close()
        _redirect(screen, stdout.writer, stderr.writer)
        worker = LaunchedWorker(launcher, page, events.writer, scratch.path, leader)
        worker.prepare()
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        return worker
    for handle in (events.writer, stdout.writer, stderr.writer):
        os.close(handle)
    process = WatchedProcess(pid, rank, events.reader, Output(stdout.reader, stderr.reader), HeartbeatReader(page), scratch.path)
    links = LeaderLinks(server, bytes.fromhex(leader.token), world_size) if rank == 0 else None
    watcher = Watcher(process, hang_after, links, screen)
    try:
        with watcher.forwarding_signals(previous_mask):
            return watcher.run()
    finally:
        scratch.remove()
        watcher.end_like_worker()


def _open_port() -> tuple[socket.socket | None, LeaderPort]:
    """Returns a socket for the watchers of the other ranks. With one machine only its own processes can reach it."""
    try:
        server = socket.create_server((LOOPBACK if is_one_machine() else "", 0))
    except OSError:
        return None, LeaderPort(0, "")
    return server, LeaderPort(int(server.getsockname()[1]), secrets.token_hex(32))


def _redirect(screen: Screen, stdout: int, stderr: int) -> None:
    """Sends what this process prints to its watcher. The screen still writes where it wrote before: it may redraw a terminal's line."""
    screen.stream = open(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)  # noqa: SIM115 (open as long as the process)
    for source, target, stream in ((stdout, 1, sys.stdout), (stderr, 2, sys.stderr)):
        os.dup2(source, target)
        os.close(source)
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
