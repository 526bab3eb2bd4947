"""The leader's open port: admits machines that know the token, and rejects all other connections."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from drivetrain.launch.rendezvous.handshake import Keys, UnknownProtocol, WrongToken, prove_to_member

MAX_UNPROVEN = 32
"""Connections that have not proven the token yet. If there are more, the oldest is closed: a proof takes milliseconds."""
PAUSE_SECONDS = 0.2  # after an accept() that failed because file descriptors or memory ran out
NOTICE_SECONDS = 30.0  # between two notices about rejected connections


class Listener:
    def __init__(
        self, server: socket.socket, token: bytes, admit: Callable[[socket.socket, Keys], None], notice: Callable[[str], None]
    ) -> None:
        """`admit` is called with every connection that knows the token, each in its own thread."""
        self._server, self._token, self._admit, self._notice = server, token, admit, notice
        self._unproven: deque[socket.socket] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._num_rejected = 0
        self._last_notice = -NOTICE_SECONDS

    @property
    def port(self) -> int:
        return int(self._server.getsockname()[1])

    def start(self) -> Listener:
        self._server.listen(128)
        threading.Thread(target=self._accept_all, daemon=True).start()
        return self

    def _accept_all(self) -> None:
        while not self._closed:
            try:
                peer, address = self._server.accept()
            except OSError as error:
                if self._closed:
                    return
                self._notify(f"cannot accept connections for a moment ({error.strerror}): machines that want to join have to wait")
                time.sleep(PAUSE_SECONDS)
                continue
            with self._lock:
                self._unproven.append(peer)
                oldest = self._unproven.popleft() if len(self._unproven) > MAX_UNPROVEN else None
            if oldest is not None:
                _shut_down(oldest)  # its thread then ends with an OSError
            try:
                threading.Thread(target=self._handshake, args=(peer, str(address[0])), daemon=True).start()
            except RuntimeError:  # no more threads can be started
                self._remove_unproven(peer)
                peer.close()

    def _handshake(self, peer: socket.socket, address: str) -> None:
        keys = None
        try:
            keys = prove_to_member(peer, self._token)
        except (UnknownProtocol, WrongToken, OSError):
            self._num_rejected += 1
            plural = "s" * (self._num_rejected > 1)
            self._notify(f"rejected {self._num_rejected} connection{plural} without the token, the last from {address}")
        finally:
            self._remove_unproven(peer)
            if keys is None:
                peer.close()
        if keys is not None:
            self._admit(peer, keys)

    def _remove_unproven(self, peer: socket.socket) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._unproven.remove(peer)

    def _notify(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last_notice >= NOTICE_SECONDS:
            self._last_notice = now
            self._notice(text)

    def close(self) -> None:
        self._closed = True
        _shut_down(self._server)
        self._server.close()


def _shut_down(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)
