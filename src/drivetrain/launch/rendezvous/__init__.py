"""Connects several machines that run the same command with `--rendezvous HOST:PORT`.

The machine with the address HOST is the leader: it listens on the port during the run, has the run's directory, decides which
machines take part in each attempt and with which plan, and reacts when a machine is lost or comes back. The others are members.
A machine needs the run's token to join. Leader and members exchange a heartbeat every second, so that a lost machine or a broken
network is detected in seconds.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

from drivetrain.launch.rendezvous.config import RendezvousConfig
from drivetrain.launch.rendezvous.leader import Leader, Membership, lead
from drivetrain.launch.rendezvous.member import Member, follow
from drivetrain.outcomes import Problem

__all__ = ["Leader", "Member", "Membership", "follow", "join", "lead", "parse"]


def parse(text: str) -> tuple[str, int]:
    """Returns host and port of a --rendezvous flag."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise Problem(f"--rendezvous {text}: write HOST:PORT, such as node1:29500")
    return host, int(port)


def join(
    address: tuple[str, int], nodes: tuple[int, int], procs: int, node_rank: int | None, notice: Callable[[str], None], identity: Any = None
) -> Leader | Member:
    """Makes this machine the leader if it has the address, else a member. The leader rejects a machine whose `identity` differs from
    its own."""
    config = RendezvousConfig(address, nodes, procs, node_rank, notice, json.dumps(identity, sort_keys=True))
    server = _bind(address) if node_rank in (None, 0) else None
    return Leader(server, config) if server is not None else Member(config)


def _bind(address: tuple[str, int]) -> socket.socket | None:
    """Returns a socket that is bound but does not listen yet; None if another machine has the address, or the port is in use."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(address)
    except (OSError, socket.gaierror):
        server.close()
        return None
    return server
