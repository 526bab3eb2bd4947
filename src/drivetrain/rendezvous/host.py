"""The machine that owns HOST: who takes part in each attempt, and what is done when one is lost or comes back."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan
from drivetrain.rendezvous.link import ANSWER, HELLO, WAIT, Link, read_line
from drivetrain.supervise import Ended, Place, Supervisor
from drivetrain.supervise.judges import Leading
from drivetrain.supervise.verdict import Sight, Verdict
from drivetrain.watch.spent import Spent

LAST_CALL = 3.0  # seconds that an attempt with enough machines waits for more of them
WORDS = 10.0  # seconds that others get to say how an attempt ended for them


@dataclass(frozen=True)
class Crew:
    """Who takes part in an attempt: the host, and these guests in the order of their ranks."""

    guests: list[Link]
    procs: int

    @property
    def nodes(self) -> int:
        return 1 + len(self.guests)

    @property
    def world(self) -> int:
        return self.procs + sum(int(guest.hello["procs"]) for guest in self.guests)


class Host:
    def __init__(
        self,
        listener: socket.socket,
        address: tuple[str, int],
        nodes: tuple[int, int],
        procs: int,
        notice: Callable[[str], None],
        same: Any,
    ) -> None:
        self.address, self.procs, self.notice, self.same = address, procs, notice, same
        self.low, self.high = nodes
        self._listener = listener
        self._guests: list[Link] = []
        self._crew: Crew | None = None
        self._attempt = 0
        self._words: dict[Link, dict[str, Any]] = {}
        self._spent: dict[Link, Spent] = {}
        self._growing = False
        self.judge = Leading(self._taking_part, lambda: self._tell("look"), self._spread)
        threading.Thread(target=self._welcome, daemon=True).start()

    def _welcome(self) -> None:
        """Greet whoever comes, for as long as the run lasts."""
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return  # closed: the run is over
            threading.Thread(target=self._greet, args=(peer,), daemon=True).start()

    def _greet(self, peer: socket.socket) -> None:
        try:
            hello = read_line(peer, ANSWER / 2)
            _check_hello(hello)
            welcome = hello.get("same") == self.same
            peer.sendall(json.dumps({"hello": HELLO, "welcome": welcome}).encode() + b"\n")
        except Exception:  # a port scanner, or worse: nothing it sends may disturb the run
            peer.close()
            return
        if welcome:
            self._guests.append(Link(peer, hello).begin())
        else:
            self.notice("turned a machine away: its command is not the same")

    def _present(self) -> list[Link]:
        for guest in [g for g in self._guests if not g.alive]:
            self._guests.remove(guest)
            guest.close()
        return list(self._guests)

    def gather(self, stopped: Callable[[], bool] = lambda: False) -> Crew:
        """Wait until there are machines enough, and a moment longer for more of them."""
        said, deadline, enough = 0, time.monotonic() + WAIT, 0.0
        while True:
            here = 1 + len(self._present())
            if here != said:
                if here > 1:
                    self.notice(f"{here} of {self.high} machines are here")
                elif not said:
                    more = self.low - 1 or self.high - 1
                    where = f"{self.address[0]}:{self.address[1]}"
                    self.notice(f"waiting at {where} for {more} more machine{'s' if more > 1 else ''}: start the same command there")
                said, enough = here, time.monotonic()
            if here >= self.high or (here >= self.low and time.monotonic() - enough > LAST_CALL):
                break
            if stopped():
                raise Problem("stopped before all machines were here", Outcome.PREEMPTED)
            if time.monotonic() > deadline:
                raise Problem(f"only {here} of {self.low} machines came within {WAIT:.0f} s", Outcome.INFRA)
            time.sleep(0.05)
        guests = self._present()[: self.high - 1]
        if any(g.hello["node_rank"] is not None for g in guests):
            guests.sort(key=lambda g: g.hello["node_rank"] if g.hello["node_rank"] is not None else self.high)
        self._crew = Crew(guests, self.procs)
        return self._crew

    def begin(self, offer: dict[str, Any]) -> Place:
        """Send each guest its place in the next attempt; gives the host's own."""
        assert self._crew is not None
        self._attempt, self._words, self._growing = self._attempt + 1, {}, False
        self.judge = Leading(self._taking_part, lambda: self._tell("look"), self._spread)
        with socket.socket() as probe:  # torch's own store: another port for each attempt
            probe.bind((self.address[0], 0))
            master = (self.address[0], int(probe.getsockname()[1]))
        first, world = self.procs, self._crew.world
        for guest in self._crew.guests:
            place = {"first_rank": first, "local_procs": guest.hello["procs"], "world_size": world, "master": master}
            guest.send({"attempt": self._attempt, "place": place, "offer": offer})
            first += guest.hello["procs"]
        return Place(0, self.procs, world, master)

    def look(self, supervisor: Supervisor) -> None:
        """While an attempt runs: end it where a machine is lost or has failed, and in good order where one has come back."""
        assert self._crew is not None
        for guest in self._crew.guests:
            self._listen_to(guest)
            if guest not in self._words and not guest.alive:
                supervisor.abort(f"the machine {guest.hello['name']} was lost")
                return
            word = self._words.get(guest)
            if word is not None and Outcome(word["outcome"]) not in (Outcome.OK, Outcome.PREEMPTED):
                supervisor.abort(word["message"])
        newcomers = [guest for guest in self._present() if guest not in self._crew.guests]
        if newcomers and self._crew.nodes < self.high and not self._growing and supervisor.steps_taken:
            self.notice(f"{newcomers[0].hello['name']} has come: stopping after this step, to go on with it")
            self._growing = True
            supervisor.regroup()

    def _listen_to(self, guest: Link) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                word = guest.messages.get_nowait()
                if "spent" in word:
                    self._spent[guest] = Spent(**word["spent"])
                if word.get("ended") == self._attempt:
                    self._words[guest] = word
                elif word.get("sighted") == self._attempt:
                    self.judge.hear(guest, [Sight(**sight) for sight in word["sights"]])

    def all_time(self, mine: Spent) -> Spent:
        """Where the time of all ranks goes, in their order."""
        assert self._crew is not None
        for guest in self._crew.guests:
            mine = mine.beside(self._spent.get(guest) or Spent.unknown(guest.hello["procs"]))
        return mine

    def _taking_part(self) -> list[Link]:
        assert self._crew is not None
        return [guest for guest in self._crew.guests if guest not in self._words]

    def _tell(self, what: str, **more: Any) -> None:
        """All guests, of the attempt under way."""
        assert self._crew is not None
        for guest in self._crew.guests:
            guest.send({what: self._attempt, **more})

    def _spread(self, verdict: Verdict) -> None:
        self._tell("hang", verdict=asdict(replace(verdict, evidence="")))

    def hear(self, ended: Ended) -> Ended:
        """How the attempt ended for all: the cause, where one machine knows it and the others only lost somebody."""
        assert self._crew is not None
        if ended.outcome not in (Outcome.OK, Outcome.PREEMPTED):
            self._tell("abort")
        deadline = time.monotonic() + WORDS
        while time.monotonic() < deadline and any(g.alive and g not in self._words for g in self._crew.guests):
            for guest in self._crew.guests:
                self._listen_to(guest)
            time.sleep(0.02)
        for guest in self._crew.guests:  # also of those that have left since
            self._listen_to(guest)
        told = [Ended(Outcome(w["outcome"]), w["message"], {"smaller": w["smaller"]}, lost=w["lost"]) for w in self._words.values()]
        causes = [word for word in told if not word.lost and word.outcome not in (Outcome.OK, Outcome.PREEMPTED)]
        whole = replace(causes[0], interrupted=ended.interrupted, stopped=ended.stopped) if causes and ended.lost else ended
        return replace(whole, spent=None if ended.spent is None else self.all_time(ended.spent))

    def goes_on(self) -> bool:
        """After an attempt that was saved and ended in good order: whether there is a next one, with other machines."""
        assert self._crew is not None
        left = {guest for guest, word in self._words.items() if word["stopped"]}
        for guest in left & set(self._guests):
            self._guests.remove(guest)
        return self._growing or (bool(left) and 1 + len(self._present()) >= self.low < self.high)

    def end(self, outcome: Outcome, message: str) -> None:
        """Tell all, and close."""
        for guest in self._present():
            guest.send({"end": outcome, "message": message})
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        time.sleep(0.1 if self._guests else 0.0)  # so that they read it before the connection closes
        for guest in self._guests:
            guest.close()


def _check_hello(hello: dict[str, Any]) -> None:
    kinds: dict[str, Any] = {"procs": int, "name": str, "node_rank": (int, type(None))}
    if hello.get("hello") != HELLO or not all(isinstance(hello.get(key), kind) for key, kind in kinds.items()) or hello["procs"] < 1:
        raise ValueError("not a machine of ours")


def lead(
    host: Host, supervisor: Supervisor, first: Crew, plan_for: Callable[[Crew], Plan], offer: Callable[[Plan], dict[str, Any]]
) -> Ended:
    """Attempt after attempt, on whatever machines there are, until the run has ended for good."""
    crew = first
    while True:
        plan = plan_for(crew)
        supervisor.use(plan, host.begin(offer(plan) | {"looks": supervisor.job["looks"]}))
        supervisor.look, supervisor.judge, supervisor.all_time = lambda: host.look(supervisor), host.judge, host.all_time
        ended = host.hear(supervisor.once())
        if ended.outcome is Outcome.PREEMPTED and not supervisor.stopped and host.goes_on():
            why = "other machines; "
        else:
            again = supervisor.again(ended)
            if again is None:
                return ended
            why = again
        crew = host.gather(lambda: supervisor.stopped)
        supervisor.announce(why, ended.outcome)
