"""Several machines by hand: the same command on each, and they find each other at HOST:PORT.

The machine that owns HOST leads: it listens there for as long as the run lasts, keeps the run directory, and decides who
takes part in each attempt, with which plan, and what is done when a machine is lost or comes back. Whoever joins
has to know the run's token. All machines send each other a beat every second, so that a lost one, or a cut cable,
is known in seconds.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

from drivetrain.launch.rendezvous.leader import Leader, Membership, lead
from drivetrain.launch.rendezvous.meeting import Meeting
from drivetrain.launch.rendezvous.member import Member, follow
from drivetrain.outcomes import Problem

__all__ = ["Leader", "Member", "Membership", "follow", "join", "lead", "parse"]


def parse(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise Problem(f"--rendezvous {text}: write HOST:PORT, such as node1:29500")
    return host, int(port)


def join(
    address: tuple[str, int], nodes: tuple[int, int], procs: int, node_rank: int | None, notice: Callable[[str], None], same: Any = None
) -> Leader | Member:
    """Meet the other machines: as their leader where HOST is this machine, else as a member. A machine whose `same` differs
    from the leader's is turned away."""
    meeting = Meeting(address, nodes, procs, node_rank, notice, json.dumps(same, sort_keys=True))
    server = _bind(address) if node_rank in (None, 0) else None
    return Leader(server, meeting) if server is not None else Member(meeting)


def _bind(address: tuple[str, int]) -> socket.socket | None:
    """A bound socket where HOST is this machine and the port is free, else None. It does not listen yet: first the token is made."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(address)
    except (OSError, socket.gaierror):
        server.close()
        return None
    return server
