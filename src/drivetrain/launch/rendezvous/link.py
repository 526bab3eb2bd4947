"""A connection between two machines that know the token: signed lines of JSON, and a heartbeat every second."""

from __future__ import annotations

import contextlib
import hmac
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from drivetrain.launch.rendezvous.messages import InvalidMessage, Message, NodeHeartbeat, decode, encode

HEARTBEAT_SECONDS = 1.0  # between two heartbeats
DEAD_SECONDS = 8.0  # a machine without a heartbeat for this long is lost
SEND_SECONDS = 8.0  # a machine that reads nothing for this long is lost
MAX_LINE_BYTES = 1 << 24
MAX_QUEUED = 1000  # messages that were received and not yet processed


class Link:
    """A connection. Messages are numbered and signed: a changed, repeated or missing message ends the connection."""

    def __init__(self, peer: socket.socket, send_key: bytes, receive_key: bytes, receives: Any) -> None:
        """`receives` is the union of the messages that the other side may send."""
        self.messages: queue.Queue[Message] = queue.Queue(MAX_QUEUED)
        self.peer_attempt = 0
        """The attempt that the other side supervises, from its last heartbeat."""
        self.fault = ""
        """Why this side closed the connection; "" if it did not."""
        self.own_attempt: Callable[[], int] = lambda: 0
        """Returns the attempt that this side supervises, for its heartbeats."""
        self.address = str(peer.getpeername()[0])
        self._last_received = time.monotonic()
        self._peer, self._open, self._lock = peer, True, threading.Lock()
        self._send_key, self._receive_key, self._receives = send_key, receive_key, receives
        self._num_sent = self._num_received = 0
        peer.settimeout(None)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_SECONDS), 0))

    def start(self) -> Link:
        for work in (self._read, self._send_heartbeats):
            threading.Thread(target=work, daemon=True).start()
        return self

    @property
    def is_alive(self) -> bool:
        return self._open and time.monotonic() - self._last_received < DEAD_SECONDS

    def send(self, message: Message) -> None:
        text = encode(message)
        with self._lock:
            if not self._open:
                return
            line = _signature(self._send_key, self._num_sent, text) + b" " + text + b"\n"
            self._num_sent += 1
            try:
                self._peer.sendall(line)
            except OSError:  # the peer is lost, or reads nothing. A part of the line may have been sent, so no message can follow.
                self._open = False

    def receive(self, seconds: float) -> Message | None:
        """Returns the next message; None if none comes in time."""
        with contextlib.suppress(queue.Empty):
            return self.messages.get(timeout=seconds) if seconds else self.messages.get_nowait()
        return None

    def _read(self) -> None:
        try:
            with self._peer.makefile("rb") as lines:
                while self._open and (line := lines.readline(MAX_LINE_BYTES)):
                    self._accept(line)
        except InvalidMessage as error:
            self.fault = f"sent an invalid message ({error})"
        except queue.Full:
            self.fault = "sent too many messages"
        except (OSError, ValueError):
            pass
        self._open = False

    def _accept(self, line: bytes) -> None:
        signature, _, text = line.rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(signature, _signature(self._receive_key, self._num_received, text)):
            raise InvalidMessage("not signed with the token")
        self._num_received += 1
        message = decode(text, self._receives)
        self._last_received = time.monotonic()
        if isinstance(message, NodeHeartbeat):
            self.peer_attempt = message.attempt
        else:
            self.messages.put_nowait(message)

    def _send_heartbeats(self) -> None:
        while self._open:
            self.send(NodeHeartbeat(self.own_attempt()))
            time.sleep(HEARTBEAT_SECONDS)

    def close(self) -> None:
        self._open = False
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)
        self._peer.close()


def _signature(key: bytes, number: int, text: bytes) -> bytes:
    return hmac.new(key, number.to_bytes(8, "big") + text, "sha256").hexdigest().encode()
