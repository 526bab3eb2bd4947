"""How machines speak to each other: lines of JSON over a connection, a greeting first, and beats."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from typing import Any

HELLO = "drivetrain-3"
ANSWER = 5.0  # seconds: a machine of ours greets at once; another program that holds the port may stay silent
WAIT = 600.0  # seconds to wait for machines that are needed
BEAT, DEAD = 1.0, 8.0  # seconds between two beats, and without one until a machine is given up
LONGEST = 1 << 20  # bytes of a greeting


class Link:
    """A connection that speaks lines of JSON, and beats."""

    def __init__(self, peer: socket.socket, hello: dict[str, Any]) -> None:
        self.hello = hello
        self.heard = time.monotonic()
        self.messages: queue.Queue[dict[str, Any]] = queue.Queue()
        self._peer, self._open, self._lock = peer, True, threading.Lock()
        peer.settimeout(None)

    def begin(self) -> Link:
        for work in (self._read, self._beat):
            threading.Thread(target=work, daemon=True).start()
        return self

    @property
    def alive(self) -> bool:
        return self._open and time.monotonic() - self.heard < DEAD

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError), self._lock:
            self._peer.sendall(json.dumps(message).encode() + b"\n")

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._peer.makefile("rb") as lines:
            while line := lines.readline(1 << 24):
                self.heard = time.monotonic()
                message = {} if line == b"{}\n" else json.loads(line)
                if isinstance(message, dict) and message:
                    self.messages.put(message)
        self._open = False

    def _beat(self) -> None:
        while self._open:
            self.send({})
            time.sleep(BEAT)

    def close(self) -> None:
        self._open = False
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)
        self._peer.close()


def read_line(peer: socket.socket, seconds: float) -> dict[str, Any]:
    """One line, and not a byte more of what follows it; empty where none comes in time."""
    line, deadline = b"", time.monotonic() + seconds
    with contextlib.suppress(OSError):
        while not line.endswith(b"\n") and len(line) < LONGEST and (left := deadline - time.monotonic()) > 0:
            peer.settimeout(left)
            byte = peer.recv(1)
            if not byte:
                break
            line += byte
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
