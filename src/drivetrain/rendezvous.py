"""Several machines by hand: the same command on each, and they find each other at HOST:PORT.

The machine that owns HOST listens there for as long as the run lasts. It keeps the run directory, its processes come
first, and it decides: who takes part in each attempt, with which plan, and what is done when one is lost or comes back.
All machines send each other a beat every second, so that a lost one, or a cut cable, is known in seconds.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan
from drivetrain.supervise import Ended, Place, Supervisor
from drivetrain.supervise.judges import Leading, Reporting
from drivetrain.supervise.verdict import Sight, Verdict
from drivetrain.watch.spent import Spent

HELLO = "drivetrain-3"
WAIT = 600.0  # seconds to wait for machines that are needed
ANSWER = 5.0  # a machine of ours greets at once; another program that holds the port may stay silent
BEAT, DEAD = 1.0, 8.0  # seconds between two beats, and without one until a machine is given up
LONGEST = 1 << 20  # bytes of a greeting
LAST_CALL = 3.0  # seconds that an attempt with enough machines waits for more of them
WORDS = 10.0  # seconds that others get to say how an attempt ended for them


def parse(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise Problem(f"--rendezvous {text}: write HOST:PORT, such as node1:29500")
    return host, int(port)


def come(
    address: tuple[str, int], nodes: tuple[int, int], procs: int, node_rank: int | None, notice: Callable[[str], None], same: Any = None
) -> Host | Guest:
    """Come to the meeting: as its host where HOST is this machine, else as a guest. A machine whose `same` is another
    than the host's is turned away."""
    same = json.loads(json.dumps(same))
    listener = _listen(address) if node_rank in (None, 0) else None
    if listener is not None:
        return Host(listener, address, nodes, procs, notice, same)
    return Guest(address, procs, node_rank, notice, same)


def _listen(address: tuple[str, int]) -> socket.socket | None:
    """A listening socket where HOST is this machine and the port is free, else None."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except (OSError, socket.gaierror):
        listener.close()
        return None
    listener.listen()
    return listener


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


# --- the machine that owns HOST ----------------------------------------------------------------


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
            hello = _read_line(peer, ANSWER / 2)
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


# --- every other machine -----------------------------------------------------------------------


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
            greeting = _read_line(peer, ANSWER)
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


def _check_hello(hello: dict[str, Any]) -> None:
    kinds: dict[str, Any] = {"procs": int, "name": str, "node_rank": (int, type(None))}
    if hello.get("hello") != HELLO or not all(isinstance(hello.get(key), kind) for key, kind in kinds.items()) or hello["procs"] < 1:
        raise ValueError("not a machine of ours")


def _read_line(peer: socket.socket, seconds: float) -> dict[str, Any]:
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
