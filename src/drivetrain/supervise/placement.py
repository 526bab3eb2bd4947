"""The placement of workers that all run on this machine."""

from __future__ import annotations

import socket

from drivetrain.supervise.attempt import WorkerPlacement

LOOPBACK = "127.0.0.1"


def local_placement(procs: int) -> WorkerPlacement:
    """Returns a placement on this machine alone: its processes meet where no other machine can reach them."""
    return WorkerPlacement(0, procs, procs, (LOOPBACK, _free_port()), _loopback_interface() if procs > 1 else "")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _loopback_interface() -> str:
    import psutil

    return next((name for name, entries in psutil.net_if_addrs().items() if any(e.address == LOOPBACK for e in entries)), "")
