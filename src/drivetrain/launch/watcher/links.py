"""Connects the watchers of all ranks: members send their reports to the leader, which sends them its verdict."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

from drivetrain.launch.rendezvous.handshake import ANSWER_SECONDS, Keys, UnknownProtocol, WrongToken, prove_to_leader
from drivetrain.launch.rendezvous.link import Link
from drivetrain.launch.rendezvous.listener import Listener
from drivetrain.launch.rendezvous.messages import AttemptEnded, Hello, Message, ToLeader, ToMember
from drivetrain.outcomes import Outcome

LOOPBACK = "127.0.0.1"
RETRY_SECONDS = 1.0  # between two attempts to connect to the leader


def is_one_machine() -> bool:
    return os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"]


class LeaderLinks:
    """The leader's connections to the watchers of the other ranks."""

    is_connected = True

    def __init__(self, server: socket.socket | None, token: bytes, world_size: int) -> None:
        self._world_size = world_size
        self._links: dict[int, Link] = {}
        """By rank."""
        self._finished: set[int] = set()
        self._listener = None if server is None else Listener(server, token, self._admit, lambda text: None).start()

    def _admit(self, peer: socket.socket, keys: Keys) -> None:
        link = Link(peer, keys.to_member, keys.to_leader, ToLeader).start()
        hello = link.receive(ANSWER_SECONDS)
        rank = hello.node_rank if isinstance(hello, Hello) else None
        if rank is None or not 0 < rank < self._world_size:
            link.close()
            return
        if previous := self._links.get(rank):
            previous.close()
        self._links[rank] = link

    def running_ranks(self) -> list[int]:
        """Returns the other ranks that have not finished, connected or not. If all that remain wait for a rank that failed, none of them
        hangs: the launcher ends them."""
        return [rank for rank in range(1, self._world_size) if rank not in self._finished]

    def receive(self) -> Iterator[tuple[int, Message]]:
        """Yields the messages that have arrived, with the rank that sent them."""
        for rank, link in list(self._links.items()):
            while (message := link.receive(0)) is not None:
                if isinstance(message, AttemptEnded) and message.outcome in (Outcome.OK, Outcome.PREEMPTED):
                    self._finished.add(rank)
                yield rank, message

    def send(self, message: Message) -> None:
        for link in list(self._links.values()):
            link.send(message)

    def wait_for_ends(self, seconds: float) -> None:
        """Waits until all other ranks have ended or are lost."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for _ in self.receive():
                pass
            if not any(link.is_alive for link in list(self._links.values())):
                return
            time.sleep(0.02)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for link in list(self._links.values()):
            link.close()


class MemberLinks:
    """A member's connection to the leader; made again if it is lost."""

    def __init__(self, port: int, token: bytes, rank: int) -> None:
        self._address = (LOOPBACK if is_one_machine() else os.environ["MASTER_ADDR"], port)
        self._token, self._rank = token, rank
        self._link: Link | None = None
        self._is_closed = False
        if port:
            threading.Thread(target=self._stay_connected, daemon=True).start()

    def _stay_connected(self) -> None:
        while not self._is_closed:
            if not self.is_connected:
                with contextlib.suppress(OSError, UnknownProtocol, WrongToken):
                    self._connect()
            time.sleep(RETRY_SECONDS)

    def _connect(self) -> None:
        peer = socket.create_connection(self._address, ANSWER_SECONDS)
        try:
            keys = prove_to_leader(peer, self._token)
        except BaseException:
            peer.close()
            raise
        link = Link(peer, keys.to_leader, keys.to_member, ToMember).start()
        link.send(Hello(procs=1, name="watcher", identity="", node_rank=self._rank))
        self._link = link

    @property
    def is_connected(self) -> bool:
        return self._link is not None and self._link.is_alive

    def receive(self, seconds: float = 0.0) -> Message | None:
        return None if self._link is None else self._link.receive(seconds)

    def send(self, message: Message) -> None:
        if self._link is not None:
            self._link.send(message)

    def close(self, outcome: Outcome) -> None:
        """Tells the leader that this rank has ended."""
        self._is_closed = True
        if self._link is not None:
            self._link.send(AttemptEnded(0, outcome, "", lost=False, stopped=False))
            self._link.close()
