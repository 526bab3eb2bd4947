"""The placement of workers that all run on this machine."""

from __future__ import annotations

import socket

from drivetrain.supervise.attempt import WorkerPlacement

LOOPBACK = "127.0.0.1"


def local_placement(procs: int) -> WorkerPlacement:
    """Returns the placement of all workers on this machine; they connect over the loopback interface, which no other machine can reach."""
    return WorkerPlacement(0, procs, procs, (LOOPBACK, _free_port()), _loopback_interface() if procs > 1 else "")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _loopback_interface() -> str:
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == LOOPBACK for entry in addresses):
            return name
    return ""
