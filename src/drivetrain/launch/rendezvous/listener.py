"""The leading machine's open port: lets machines in that know the token, and survives whatever else connects."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from drivetrain.launch.rendezvous.handshake import Keys, NotOurs, WrongToken, prove_to_member

MAX_UNPROVEN = 32
"""Connections that have not proven themselves yet; where one more comes, the oldest is closed: ours take milliseconds."""
PAUSE_SECONDS = 0.2  # after an accept that failed, for lack of descriptors or memory
TELL_SECONDS = 30.0  # between two notices about strangers


class Listener:
    def __init__(
        self, server: socket.socket, token: bytes, admit: Callable[[socket.socket, Keys], None], notice: Callable[[str], None]
    ) -> None:
        """`admit` is called, in a thread of its own, with every connection that knows the token."""
        self._server, self._token, self._admit, self._notice = server, token, admit, notice
        self._unproven: deque[socket.socket] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._strangers, self._failures = 0, 0
        self._told = -TELL_SECONDS

    def begin(self) -> Listener:
        self._server.listen(128)
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def _accept(self) -> None:
        while not self._closed:
            try:
                peer, address = self._server.accept()
            except OSError as error:
                if self._closed:
                    return
                self._failures += 1
                self._tell(f"cannot accept connections for a moment ({error.strerror}): machines that want to join have to wait")
                time.sleep(PAUSE_SECONDS)
                continue
            with self._lock:
                self._unproven.append(peer)
                oldest = self._unproven.popleft() if len(self._unproven) > MAX_UNPROVEN else None
            if oldest is not None:
                _shut(oldest)  # its thread sees that, and ends
            try:
                threading.Thread(target=self._greet, args=(peer, str(address[0])), daemon=True).start()
            except RuntimeError:  # no more threads can be started
                self._forget(peer)

    def _greet(self, peer: socket.socket, address: str) -> None:
        keys = None
        try:
            keys = prove_to_member(peer, self._token)
        except (NotOurs, WrongToken, OSError):
            self._strangers += 1
            self._tell(
                f"turned {self._strangers} connection{'s' * (self._strangers > 1)} away that did not know the token, last from {address}"
            )
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._unproven.remove(peer)
            if keys is None:
                peer.close()
        if keys is not None:
            self._admit(peer, keys)

    def _forget(self, peer: socket.socket) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._unproven.remove(peer)
        peer.close()

    def _tell(self, text: str) -> None:
        now = time.monotonic()
        if now - self._told >= TELL_SECONDS:
            self._told = now
            self._notice(text)

    def close(self) -> None:
        self._closed = True
        _shut(self._server)
        self._server.close()


def _shut(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)
