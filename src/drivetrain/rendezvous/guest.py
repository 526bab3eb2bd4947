"""Every other machine: it joins, takes part in attempt after attempt as the host says, and looks for the host where that is lost."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan
from drivetrain.rendezvous.link import ANSWER, HELLO, WAIT, Link, read_line
from drivetrain.supervise import Ended, Place, Supervisor
from drivetrain.supervise.judges import Reporting
from drivetrain.supervise.verdict import Sight, Verdict
from drivetrain.watch.spent import Spent


class Guest:
    def __init__(self, address: tuple[str, int], procs: int, node_rank: int | None, notice: Callable[[str], None], same: Any) -> None:
        self.address, self.notice = address, notice
        self.hello = {"hello": HELLO, "procs": procs, "node_rank": node_rank, "same": same, "name": socket.gethostname()}
        self.where = f"{address[0]}:{address[1]}"
        notice(f"joining the machines that meet at {self.where}")
        self.link = self._join(again=False)
        self._next: dict[str, Any] | None = None
        """A word of the host's that came while an attempt was still under way."""

    def _join(self, again: bool, stopped: Callable[[], bool] = lambda: False) -> Link:
        """`again` where the host was there before: then whatever is wrong with the network may pass."""
        deadline = time.monotonic() + WAIT
        while True:
            try:
                return self._greet(again)
            except OSError as error:
                if isinstance(error, socket.gaierror) and not again and error.errno != socket.EAI_AGAIN:
                    raise Problem(f"--rendezvous {self.where}: the name {self.address[0]} is not known here") from None
                if time.monotonic() > deadline or stopped():
                    raise Problem(
                        f"nobody answers at {self.where} ({error.strerror}): is the command running there?", Outcome.INFRA
                    ) from None
                time.sleep(0.5)

    def _greet(self, again: bool) -> Link:
        peer = socket.create_connection(self.address, timeout=ANSWER)
        try:
            peer.sendall(json.dumps(self.hello).encode() + b"\n")
            greeting = read_line(peer, ANSWER)
            if not greeting and again:
                raise ConnectionResetError(0, "no greeting")
            if greeting.get("hello") != HELLO:
                raise Problem(f"port {self.address[1]} on {self.address[0]} is in use by another program: choose another --rendezvous port")
            if not greeting["welcome"]:
                raise Problem(f"the command at {self.where} has another task, code or settings than this one: run the same on each machine")
        except BaseException:
            peer.close()
            raise
        return Link(peer, greeting).begin()

    def wait(self, stopped: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """The next word of the host: a place in an attempt, or the end. Where the host is lost, it is looked for again."""
        while True:
            if self._next is not None:
                message, self._next = self._next, None
                return message
            with contextlib.suppress(queue.Empty):
                message = self.link.messages.get(timeout=0.1)
                if "place" in message or "end" in message:
                    return message
                continue
            if not self.link.alive:
                self.link.close()
                self.notice(f"lost {self.where}: looking for it again")
                self.link = self._join(again=True, stopped=stopped)
                self.notice(f"back at {self.where}")
            if stopped():
                return {"end": Outcome.PREEMPTED, "message": ""}

    def look(self, supervisor: Supervisor, attempt: int) -> None:
        """While an attempt runs: end it where the host says so, or is lost."""
        with contextlib.suppress(queue.Empty):
            while True:
                message = self.link.messages.get_nowait()
                if message.get("look") == attempt:
                    supervisor.judge.asks = True
                if message.get("hang") == attempt:
                    supervisor.convict(Verdict(**message["verdict"]))
                if message.get("abort") == attempt or "place" in message:
                    supervisor.abort("the machines meet anew")
                if "end" in message or "place" in message:
                    self._next = message
        if not self.link.alive:
            supervisor.abort(f"the machine at {self.where} was lost")

    def tell_time(self, spent: Spent) -> None:
        """To the host, which keeps that of all."""
        self.link.send({"spent": spent.to_json()})

    def report(self, attempt: int, sights: list[Sight]) -> None:
        self.link.send({"sighted": attempt, "sights": [asdict(sight) for sight in sights]})

    def say(self, attempt: int, ended: Ended) -> None:
        self.link.send({
            "ended": attempt, "outcome": ended.outcome, "message": ended.message, "lost": ended.lost, "stopped": ended.stopped,
            "smaller": ended.result.get("smaller"), **({} if ended.spent is None else {"spent": ended.spent.to_json()}),
        })  # fmt: skip


def follow(guest: Guest, supervisor_of: Callable[[dict[str, Any], Plan, Place], Supervisor]) -> tuple[dict[str, Any], Ended]:
    """Take part in attempt after attempt, as the host says; gives its last offer, and how the run ended."""
    supervisor: Supervisor | None = None
    offer: dict[str, Any] = {}

    def stopped() -> bool:
        return supervisor is not None and supervisor.stopped

    try:
        while True:
            message = guest.wait(stopped)
            if "end" in message:
                return offer, Ended(Outcome(message["end"]), message["message"])
            offer = message["offer"]
            place = message["place"]
            place = Place(place["first_rank"], place["local_procs"], place["world_size"], tuple(place["master"]))
            plan = Plan.from_json(offer["plan"])
            if supervisor is None:
                supervisor = supervisor_of(offer, plan, place)
            supervisor.job = supervisor.job | {"looks": offer["looks"]}
            supervisor.use(plan, place)
            supervisor.look = partial(guest.look, supervisor, message["attempt"])
            supervisor.judge = Reporting(partial(guest.report, message["attempt"]))
            supervisor.all_time = guest.tell_time
            ended = supervisor.once()
            guest.say(message["attempt"], ended)
            if supervisor.stopped:
                return offer, ended
    finally:
        if supervisor is not None:
            supervisor.close()
        guest.link.close()
