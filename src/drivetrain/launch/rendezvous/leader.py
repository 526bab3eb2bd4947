"""The machine that owns HOST: who takes part in each attempt, and what is done when a machine is lost or comes back."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from drivetrain.launch.rendezvous import token as tokens
from drivetrain.launch.rendezvous.handshake import ANSWER_SECONDS, Keys
from drivetrain.launch.rendezvous.link import Link
from drivetrain.launch.rendezvous.listener import Listener
from drivetrain.launch.rendezvous.meeting import JOIN_SECONDS, Meeting
from drivetrain.launch.rendezvous.messages import (
    Abort,
    AttemptEnded,
    Hang,
    Hello,
    LookNow,
    Message,
    RunEnded,
    Sighted,
    StartAttempt,
    TimeSpent,
    ToLeader,
    Welcome,
)  # fmt: skip
from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan
from drivetrain.processes.job import Diagnostics
from drivetrain.supervise import Ended, Place, Supervisor
from drivetrain.supervise.judges import Leading
from drivetrain.supervise.verdict import Verdict
from drivetrain.watch.spent import Spent

LAST_CALL_SECONDS = 3.0  # that an attempt with enough machines waits for more of them
REPORT_SECONDS = 10.0  # that others get to say how an attempt ended for them
PACE_SECONDS = 30.0
"""A machine that was given a place and whose supervisor is not in that attempt after so long is excluded."""
MAX_EXCLUSIONS = 2  # of one machine, after which it may not come back
MORE_THAN_NEEDED = 4  # times as many machines as can take part may wait


class Peer:
    """A machine that has joined."""

    def __init__(self, link: Link, hello: Hello) -> None:
        self.link, self.name, self.procs, self.node_rank = link, hello.name, hello.procs, hello.node_rank
        self.first_rank = 0

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.procs)


@dataclass(frozen=True)
class Membership:
    """Who takes part in an attempt: the leader, and these machines in the order of their ranks."""

    peers: list[Peer]
    procs: int

    @property
    def nodes(self) -> int:
        return 1 + len(self.peers)

    @property
    def world_size(self) -> int:
        return self.procs + sum(peer.procs for peer in self.peers)


class Leader:
    def __init__(self, server: socket.socket, meeting: Meeting) -> None:
        self.meeting, self.procs, self.notice = meeting, meeting.procs, meeting.notice
        self.low, self.high = meeting.nodes
        self.event: Callable[..., object] = lambda kind, **detail: None
        """Writes to the run's events, once there is a run."""
        self.answer_seconds = PACE_SECONDS
        self.token = tokens.find_or_make(meeting.address, meeting.identity)
        self._peers: list[Peer] = []
        self._members: Membership | None = None
        self._attempt, self._begun = 0, 0.0
        self._ends: dict[Peer, AttemptEnded] = {}
        self._spent: dict[Peer, Spent] = {}
        self._lost: dict[str, float] = {}
        """Machines that took part and are gone, and since when."""
        self._exclusions: Counter[str] = Counter()
        self._growing = False
        self.judge = self._new_judge()
        self._listener = Listener(server, self.token.secret, self._admit, self.notice).begin()

    # --- who is here ---

    def _admit(self, sock: socket.socket, keys: Keys) -> None:
        """A machine that knows the token: whether its command is the same, and there is room for it."""
        link = Link(sock, keys.to_member, keys.to_leader, ToLeader).begin()
        hello = link.receive(ANSWER_SECONDS)
        if not isinstance(hello, Hello):
            link.close()
            return
        reason = self._refusal(hello, keys)
        link.send(Welcome(not reason, reason))
        if reason:
            self.notice(f"turned {hello.name} away: {reason}")
            time.sleep(0.2)  # so that it reads why before the connection closes
            link.close()
            return
        peer = Peer(link, hello)
        if self._lost.pop(hello.name, None) is not None:
            self.event("machine-back", machine=hello.name)
        self._peers.append(peer)

    def _refusal(self, hello: Hello, keys: Keys) -> str:
        if hello.identity != self.meeting.identity_digest(keys):
            return "another task, code or settings"
        if self._exclusions[hello.name] >= MAX_EXCLUSIONS:
            return f"it was excluded {MAX_EXCLUSIONS} times"
        if len(self._peers) >= MORE_THAN_NEEDED * self.high:
            return "there are machines enough"
        return ""

    def _present(self) -> list[Peer]:
        for peer in [p for p in self._peers if not p.link.alive]:
            self._remove(peer, peer.link.fault or "its connection broke")
            if peer.link.fault:
                self._exclusions[peer.name] += MAX_EXCLUSIONS
        return list(self._peers)

    def _remove(self, peer: Peer, why: str) -> None:
        """Say and note that a machine is gone."""
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        peer.link.close()
        if self._members is not None and peer in self._members.peers:
            self._lost[peer.name] = time.monotonic()
            self.notice(f"lost {peer.name}: {why}")
            self.event("machine-lost", machine=peer.name, detail=why)

    def exclude(self, peer: Peer, why: str) -> None:
        self._exclusions[peer.name] += 1
        self._remove(peer, f"excluded, for {why}")

    def gather(self, stopped: Callable[[], bool] = lambda: False) -> Membership:
        """Wait until there are machines enough, and a moment longer for more of them."""
        told, deadline, enough = 0, time.monotonic() + JOIN_SECONDS, 0.0
        while True:
            here = 1 + len(self._present())
            if here != told:
                self._tell_presence(here, told)
                told, enough = here, time.monotonic()
            if here >= self.high or (here >= self.low and time.monotonic() - enough > LAST_CALL_SECONDS):
                break
            if stopped():
                raise Problem("stopped before all machines were here", Outcome.PREEMPTED)
            if time.monotonic() > deadline:
                raise Problem(f"only {here} of {self.low} machines came within {JOIN_SECONDS:.0f} s{self._absent()}", Outcome.INFRA)
            time.sleep(0.05)
        peers = self._present()[: self.high - 1]
        if any(peer.node_rank is not None for peer in peers):
            peers.sort(key=lambda peer: peer.node_rank if peer.node_rank is not None else self.high)
        self._members = Membership(peers, self.procs)
        return self._members

    def _tell_presence(self, here: int, told: int) -> None:
        if here > 1:
            self.notice(f"{here} of {self.high} machines are here{self._absent()}")
        elif not told:
            more = self.low - 1 or self.high - 1
            self.notice(
                f"waiting at {self.meeting.where} for {more} more machine{'s' * (more > 1)}{self._absent()}: start the same command there"
            )
            if self.token.is_new and not self._attempt:
                self.notice(f"there: {tokens.VARIABLE}={self.token.secret.decode()} {self.meeting.command}")

    def _absent(self) -> str:
        """Which machines are gone, and for how long."""
        now = time.monotonic()
        gone = [f"{name} (lost {now - since:.0f} s ago)" for name, since in self._lost.items()]
        return f", without {', '.join(gone)}" if gone else ""

    # --- an attempt ---

    def _new_judge(self) -> Leading:
        return Leading(self._taking_part, lambda: self._tell_all(LookNow(self._attempt)), self._spread, self._late, self.answer_seconds)

    def begin(self, run: str, plan: Plan, diagnostics: Diagnostics) -> Place:
        """Send each machine its place in the next attempt; gives the leader's own."""
        assert self._members is not None
        self._attempt, self._begun, self._ends, self._growing = self._attempt + 1, time.monotonic(), {}, False
        self.judge = self._new_judge()
        address = self.meeting.address[0]
        with socket.socket() as probe:  # torch's own store: another port for each attempt
            probe.bind((address, 0))
            master = (address, int(probe.getsockname()[1]))
        first, world_size = self.procs, self._members.world_size
        for peer in self._members.peers:
            peer.first_rank = first
            peer.link.send(StartAttempt(self._attempt, first, peer.procs, world_size, master, run, plan, diagnostics))
            first += peer.procs
        return Place(0, self.procs, world_size, master, self.meeting.interface)

    def look(self, supervisor: Supervisor) -> None:
        """While an attempt runs: end it where a machine is lost or has failed, and in good order where one has come back."""
        assert self._members is not None
        late = time.monotonic() - self._begun > PACE_SECONDS
        for peer in self._members.peers:
            self._hear(peer)
            if peer not in self._ends and late and peer.link.attempt != self._attempt:
                self.exclude(peer, f"it did not begin the attempt within {PACE_SECONDS:.0f} s")
            if peer not in self._ends and (not peer.link.alive or peer not in self._peers):
                self._present()
                supervisor.abort(f"the machine {peer.name} was lost")
                return
            end = self._ends.get(peer)
            if end is not None and end.outcome not in (Outcome.OK, Outcome.PREEMPTED):
                supervisor.abort(end.message)
        newcomers = [peer for peer in self._present() if peer not in self._members.peers]
        if newcomers and self._members.nodes < self.high and not self._growing and supervisor.steps_taken:
            self.notice(f"{newcomers[0].name} has come: stopping after this step, to go on with it")
            self._growing = True
            supervisor.regroup()

    def _hear(self, peer: Peer) -> None:
        while (message := peer.link.receive(0)) is not None:
            if not self._take(peer, message):
                peer.link.fault = "spoke of ranks that are not its own"
                peer.link.close()
                return

    def _take(self, peer: Peer, message: Message) -> bool:
        """Keep what a machine says; False where it speaks of ranks that are not its own."""
        spent = message.spent if isinstance(message, (TimeSpent, AttemptEnded)) else None
        if spent is not None:
            if len(spent.ranks) != peer.procs:
                return False
            self._spent[peer] = spent
        if isinstance(message, AttemptEnded) and message.attempt == self._attempt:
            self._ends[peer] = message
        elif isinstance(message, Sighted) and message.attempt == self._attempt:
            if any(sight.rank not in peer.ranks for sight in message.sights):
                return False
            self.judge.hear(peer, message.sights)
        return True

    def merge_time(self, own: Spent) -> Spent:
        """Where the time of all ranks goes, in their order."""
        assert self._members is not None
        for peer in self._members.peers:
            own = own.beside(self._spent.get(peer) or Spent.unknown(peer.procs))
        return own

    def _taking_part(self) -> list[Peer]:
        assert self._members is not None
        return [peer for peer in self._members.peers if peer not in self._ends]

    def _tell_all(self, message: Message) -> None:
        assert self._members is not None
        for peer in self._members.peers:
            peer.link.send(message)

    def _spread(self, verdict: Verdict) -> None:
        self._tell_all(Hang(self._attempt, replace(verdict, evidence="")))

    def _late(self, peer: Any) -> None:
        self.exclude(peer, f"it did not say within {self.answer_seconds:.0f} s what its ranks wait for")

    def conclude(self, ended: Ended) -> Ended:
        """How the attempt ended for all: the cause, where one machine knows it and the others only lost somebody."""
        assert self._members is not None
        if ended.outcome not in (Outcome.OK, Outcome.PREEMPTED):
            self._tell_all(Abort(self._attempt))
        deadline = time.monotonic() + REPORT_SECONDS
        while time.monotonic() < deadline and any(p.link.alive and p not in self._ends for p in self._members.peers):
            for peer in self._members.peers:
                self._hear(peer)
            time.sleep(0.02)
        for peer in self._members.peers:  # also of those that have left since
            self._hear(peer)
        ends = [
            Ended(e.outcome, e.message, {"smaller": None if e.smaller is None else asdict(e.smaller)}, lost=e.lost)
            for e in self._ends.values()
        ]
        causes = [end for end in ends if not end.lost and end.outcome not in (Outcome.OK, Outcome.PREEMPTED)]
        whole = replace(causes[0], interrupted=ended.interrupted, stopped=ended.stopped) if causes and ended.lost else ended
        return replace(whole, spent=None if ended.spent is None else self.merge_time(ended.spent))

    def goes_on(self) -> bool:
        """After an attempt that was saved and ended in good order: whether there is a next one, with other machines."""
        assert self._members is not None
        left = [peer for peer, end in self._ends.items() if end.stopped]
        for peer in left:
            self._remove(peer, "it was stopped")
        return self._growing or (bool(left) and 1 + len(self._present()) >= self.low < self.high)

    def end(self, outcome: Outcome, message: str) -> None:
        """Tell all, and close."""
        for peer in self._present():
            peer.link.send(RunEnded(outcome, message))
        self._listener.close()
        time.sleep(0.1 if self._peers else 0.0)  # so that they read it before the connection closes
        for peer in self._peers:
            peer.link.close()
        if not outcome.retryable:  # else the same command goes on with this run, and the others look for it
            self.token.forget()


def lead(leader: Leader, supervisor: Supervisor, first: Membership, plan_for: Callable[[Membership], Plan], run: str) -> Ended:
    """Attempt after attempt, on whatever machines there are, until the run has ended for good."""
    members = first
    leader.answer_seconds = PACE_SECONDS + supervisor.policy.hang_after
    while True:
        plan = plan_for(members)
        supervisor.use(plan, leader.begin(run, plan, supervisor.diagnostics))
        supervisor.look, supervisor.judge, supervisor.all_time = lambda: leader.look(supervisor), leader.judge, leader.merge_time
        ended = leader.conclude(supervisor.once())
        if ended.outcome is Outcome.PREEMPTED and not supervisor.stopped and leader.goes_on():
            why = "other machines; "
        else:
            again = supervisor.again(ended)
            if again is None:
                return ended
            why = again
        members = leader.gather(lambda: supervisor.stopped)
        supervisor.announce(why, ended.outcome)
