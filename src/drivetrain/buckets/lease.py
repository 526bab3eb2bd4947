"""The right to write a run in a bucket: one owner at a time, also of several machines.

Leases are numbered objects, .lease/00000001 and so on; the newest counts. Its owner writes it again and again. A lease that was not
written for some time has ended, and whoever creates the next number first is the new owner: stores create an object only once.
Ages are measured by the store's clock.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from typing import Any, NamedTuple

from drivetrain.buckets.store import Store
from drivetrain.outcomes import Outcome, Problem

FOLDER = ".lease"


class Lost(Problem):
    """Another owner has the lease."""


class Taken(Problem):
    """Another owner has the lease, and shows signs of life."""


class Holder(NamedTuple):
    """The owner of the newest lease."""

    number: int
    owner: str
    host: str
    pid: int
    age: float
    """Seconds since its last heartbeat."""

    def text(self) -> str:
        return f"process {self.pid} on {self.host} (its last sign of life is {max(0.0, self.age):,.0f} s old)"


class Lease:
    def __init__(self, store: Store, owner: str, number: int) -> None:
        self.store, self.owner, self.number = store, owner, number

    @staticmethod
    def acquire(store: Store, owner: str, seconds: float) -> Lease:
        """Returns the lease; raises Problem if another owner has one that is not older than `seconds`."""
        for _ in range(5):
            number = _newest(store)
            holder = _read(store, number) if number else None
            if holder is not None and holder.owner == owner:
                lease = Lease(store, owner, holder.number)
                lease._write()
                return lease
            if holder is not None and holder.age <= seconds:
                raise Taken(
                    f"{store.url} is being trained by {holder.text()}: stop it there, choose another --run-dir, or wait: what has died loses"
                    f" its right after {seconds:,.0f} s",
                    Outcome.INFRA,
                )
            lease = Lease(store, owner, number + 1)
            store.create(lease._name, lease._content())
            winner = _read(store, lease.number, with_age=False)
            if winner is not None and winner.owner == owner:
                return lease
        raise Problem(f"{store.url}: several machines begin this run at the same time: choose another --run-dir for each", Outcome.INFRA)

    def renew(self) -> None:
        """Shows that the owner is alive; raises Lost if it is not the owner any more."""
        newest = _newest(self.store)
        holder = _read(self.store, newest, with_age=newest != self.number) if newest else None
        if holder is None or holder.owner != self.owner:
            who = holder.text() if holder is not None else "somebody who removed its lease"
            raise Lost(f"{self.store.url} was taken over by {who}: this copy of the run is not mirrored any more")
        self._write()

    def release(self) -> None:
        """Gives the right back."""
        names = [name for name in self.store.list(FOLDER) if _number(name) <= self.number]
        self.store.delete(*names)

    @property
    def _name(self) -> str:
        return f"{FOLDER}/{self.number:08d}"

    def _content(self) -> bytes:
        return json.dumps(
            {"format": 1, "owner": self.owner, "host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
        ).encode()

    def _write(self) -> None:
        self.store.write(self._name, self._content())


def holder_of(store: Store) -> Holder | None:
    """Returns the owner of the newest lease, which may have ended; None if there is none."""
    number = _newest(store)
    return _read(store, number) if number else None


def _newest(store: Store) -> int:
    return max((_number(name) for name in store.list(FOLDER)), default=0)


def _number(name: str) -> int:
    text = name.rpartition("/")[2]
    return int(text) if text.isdecimal() and len(text) == 8 else 0


def _read(store: Store, number: int, with_age: bool = True) -> Holder | None:
    name = f"{FOLDER}/{number:08d}"
    content, written = store.read(name), store.modified(name) if with_age else 0.0
    if content is None or written is None:
        return None
    facts: dict[str, Any] = {}
    try:
        facts = dict(json.loads(content))
        host, pid, owner = str(facts["host"])[:80], int(facts["pid"]), str(facts["owner"])
    except (ValueError, TypeError, KeyError):
        host, pid, owner = "?", -1, ""
    return Holder(number, owner, host, pid, _now(store) - written if with_age else 0.0)


def _now(store: Store) -> float:
    """Returns the time of the store's clock."""
    probe = f"{FOLDER}/clock-{uuid.uuid4().hex}"
    store.write(probe, b"")
    try:
        return store.modified(probe) or time.time()
    finally:
        store.delete(probe)
