"""A connection between two machines that know the token: signed lines of JSON, and a beat every second."""

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

from drivetrain.launch.rendezvous.messages import Beat, Message, OddMessage, decode, encode

BEAT_SECONDS, DEAD_SECONDS = 1.0, 8.0  # between two beats, and without one until a machine is given up
SEND_SECONDS = 8.0  # a machine that reads nothing for so long is given up
MAX_LINE_BYTES = 1 << 24
MAX_WAITING = 1000  # messages that nobody has taken yet


class Link:
    """Messages are numbered and signed: one that is altered, repeated or left out ends the connection."""

    def __init__(self, peer: socket.socket, send_key: bytes, receive_key: bytes, receives: Any) -> None:
        """`receives` is the union of the messages that the other side may send."""
        self.messages: queue.Queue[Message] = queue.Queue(MAX_WAITING)
        self.attempt = 0
        """The attempt that the other side supervises, by its last beat."""
        self.fault = ""
        """Why the connection was given up, where it did not simply break."""
        self.own_attempt: Callable[[], int] = lambda: 0
        """The attempt that this side supervises: what its beats say."""
        self.address = str(peer.getpeername()[0])
        self._heard = time.monotonic()
        self._peer, self._open, self._lock = peer, True, threading.Lock()
        self._send_key, self._receive_key, self._receives = send_key, receive_key, receives
        self._sent = self._received = 0
        peer.settimeout(None)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_SECONDS), 0))

    def begin(self) -> Link:
        for work in (self._read, self._beat):
            threading.Thread(target=work, daemon=True).start()
        return self

    @property
    def alive(self) -> bool:
        return self._open and time.monotonic() - self._heard < DEAD_SECONDS

    def send(self, message: Message) -> None:
        text = encode(message)
        with self._lock:
            if not self._open:
                return
            line = _signature(self._send_key, self._sent, text) + b" " + text + b"\n"
            self._sent += 1
            try:
                self._peer.sendall(line)
            except OSError:  # gone, or it reads nothing any more: half a line may be on its way, so nothing can follow
                self._open = False

    def receive(self, seconds: float) -> Message | None:
        """The next message, where one comes in time."""
        with contextlib.suppress(queue.Empty):
            return self.messages.get(timeout=seconds) if seconds else self.messages.get_nowait()
        return None

    def _read(self) -> None:
        try:
            with self._peer.makefile("rb") as lines:
                while self._open and (line := lines.readline(MAX_LINE_BYTES)):
                    self._take(line)
        except OddMessage as odd:
            self.fault = f"sent a message that no machine of ours sends ({odd})"
        except queue.Full:
            self.fault = "sent more messages than can be taken"
        except (OSError, ValueError):
            pass
        self._open = False

    def _take(self, line: bytes) -> None:
        signature, _, text = line.rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(signature, _signature(self._receive_key, self._received, text)):
            raise OddMessage("not signed with the token")
        self._received += 1
        message = decode(text, self._receives)
        self._heard = time.monotonic()
        if isinstance(message, Beat):
            self.attempt = message.attempt
        else:
            self.messages.put_nowait(message)

    def _beat(self) -> None:
        while self._open:
            self.send(Beat(self.own_attempt()))
            time.sleep(BEAT_SECONDS)

    def close(self) -> None:
        self._open = False
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)
        self._peer.close()


def _signature(key: bytes, number: int, text: bytes) -> bytes:
    return hmac.new(key, number.to_bytes(8, "big") + text, "sha256").hexdigest().encode()
