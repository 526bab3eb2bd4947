"""A part of the program on a machine: whether machines can meet at an address."""

from __future__ import annotations

import errno
import random
import socket
import time
from typing import Any

from drivetrain.targets.host.library import Failure, reply

CONNECT_SECONDS = 5.0
NUM_TRIES = 20


def listen(address: str, key: str, connections: int, first_port: int, num_ports: int, seconds: float) -> dict[str, Any]:
    """Listens at an address of this machine, on a free port that a notice names, until others have sent the key on so many connections."""
    server = _bound(address, first_port, num_ports)
    with server:
        server.listen()
        reply(notice=str(server.getsockname()[1]))
        deadline, proven = time.monotonic() + seconds, 0
        while proven < connections and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                peer, _ = server.accept()
                with peer:
                    peer.settimeout(1)
                    proven += peer.recv(len(key), socket.MSG_WAITALL) == key.encode()
            except OSError:
                continue
    return {"connections": proven}


def _bound(address: str, first_port: int, num_ports: int) -> socket.socket:
    """Returns a socket with a free port of the range."""
    for port in random.sample(range(first_port, first_port + num_ports), NUM_TRIES):
        server = socket.socket()
        try:
            server.bind((address, port))
            return server
        except OSError as error:
            server.close()
            if error.errno != errno.EADDRINUSE:
                raise Failure(f"it does not have the address {address} ({error.strerror})") from None
    raise Failure(f"no port from {first_port} to {first_port + num_ports - 1} is free")


def connect(address: str, port: int, key: str) -> dict[str, Any]:
    """Sends the key to a machine that listens; returns why that failed, or ""."""
    try:
        with socket.create_connection((address, port), timeout=CONNECT_SECONDS) as peer:
            peer.sendall(key.encode())
            peer.shutdown(socket.SHUT_WR)
            peer.recv(1)
    except OSError as error:
        return {"error": error.strerror or str(error)}
    return {"error": ""}
