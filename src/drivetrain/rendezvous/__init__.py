"""Several machines by hand: the same command on each, and they find each other at HOST:PORT.

The machine that owns HOST listens there for as long as the run lasts. It keeps the run directory, its processes come
first, and it decides: who takes part in each attempt, with which plan, and what is done when one is lost or comes back.
All machines send each other a beat every second, so that a lost one, or a cut cable, is known in seconds.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

from drivetrain.outcomes import Problem
from drivetrain.rendezvous.guest import Guest, follow
from drivetrain.rendezvous.host import Crew, Host, lead

__all__ = ["Crew", "Guest", "Host", "come", "follow", "lead", "parse"]


def parse(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise Problem(f"--rendezvous {text}: write HOST:PORT, such as node1:29500")
    return host, int(port)


def come(
    address: tuple[str, int], nodes: tuple[int, int], procs: int, node_rank: int | None, notice: Callable[[str], None], same: Any = None
) -> Host | Guest:
    """Come to the meeting: as its host where HOST is this machine, else as a guest. A machine whose `same` is another
    than the host's is turned away."""
    same = json.loads(json.dumps(same))
    listener = _listen(address) if node_rank in (None, 0) else None
    if listener is not None:
        return Host(listener, address, nodes, procs, notice, same)
    return Guest(address, procs, node_rank, notice, same)


def _listen(address: tuple[str, int]) -> socket.socket | None:
    """A listening socket where HOST is this machine and the port is free, else None."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except (OSError, socket.gaierror):
        listener.close()
        return None
    listener.listen()
    return listener
