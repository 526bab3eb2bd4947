"""Connects several machines that run the same command with `--rendezvous HOST:PORT`.

The machine with the address HOST is the leader: it listens on the port during the run, has the run's directory, decides which
machines take part in each attempt and with which plan, and reacts when a machine is lost or comes back. The others are members.
A machine needs the run's token to join. Leader and members exchange a heartbeat every second, so that a lost machine or a broken
network is detected in seconds.
"""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Callable
from typing import Any

from drivetrain.launch.rendezvous.config import RendezvousConfig, port_in_use
from drivetrain.launch.rendezvous.leader import Leader, Membership, lead
from drivetrain.launch.rendezvous.member import Member, follow
from drivetrain.outcomes import Outcome, Problem

__all__ = ["Leader", "Member", "Membership", "follow", "join", "lead", "parse"]


def parse(text: str) -> tuple[str, int]:
    """Returns host and port of a --rendezvous flag."""
    host, _, port = text.rpartition(":")
    if ":" in host:
        raise Problem(f"--rendezvous {text}: IPv6 addresses are not supported: write a name, or an IPv4 address, such as 10.0.0.1:29500")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise Problem(f"--rendezvous {text}: write HOST:PORT, such as node1:29500")
    return host, int(port)


def join(
    address: tuple[str, int], nodes: tuple[int, int], procs: int, node_rank: int | None, notice: Callable[[str], None], identity: Any = None
) -> Leader | Member:
    """Makes this machine the leader if it has the address, else a member. The leader rejects a machine whose `identity` differs from
    its own."""
    config = RendezvousConfig(address, nodes, procs, node_rank, notice, json.dumps(identity, sort_keys=True))
    server = _bind(address, is_leader=node_rank == 0) if node_rank in (None, 0) else None
    return Leader(server, config) if server is not None else Member(config)


def _bind(address: tuple[str, int], is_leader: bool) -> socket.socket | None:
    """Returns a socket that is bound but does not listen yet; None if another machine has the address, or the port is in use. Raises
    Problem for a machine that must lead: nobody else would, and all would wait."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(address)
    except OSError as error:
        server.close()
        if is_leader and error.errno == errno.EADDRNOTAVAIL:
            raise Problem(
                f"this machine has node rank 0, but not the address {address[0]}: write an address of this machine (--rendezvous; with --on:"
                " rendezvous: in the target)"
            ) from None
        if is_leader and error.errno == errno.EADDRINUSE:
            raise Problem(port_in_use(address), Outcome.INFRA) from None
        return None
    return server
