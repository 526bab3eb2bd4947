"""The leader: admits machines, starts attempts with those that are connected, and reacts when one is lost or comes back."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from drivetrain.launch.rendezvous import token as tokens
from drivetrain.launch.rendezvous.config import JOIN_SECONDS, RendezvousConfig
from drivetrain.launch.rendezvous.handshake import ANSWER_SECONDS, Keys
from drivetrain.launch.rendezvous.link import Link
from drivetrain.launch.rendezvous.listener import Listener
from drivetrain.launch.rendezvous.messages import (
    Abort,
    AttemptEnded,
    HangReport,
    HangVerdict,
    Hello,
    Message,
    ReportNow,
    RunEnded,
    StartAttempt,
    TimeSpent,
    ToLeader,
    Welcome,
)  # fmt: skip
from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan
from drivetrain.processes.job import Diagnostics
from drivetrain.supervise import JobEnd, Supervisor, WorkerPlacement
from drivetrain.supervise.verdicts import LeaderVerdicts, Verdict
from drivetrain.watch.time_breakdown import TimeBreakdown

EXTRA_WAIT_SECONDS = 3.0  # wait this long for more machines after there are enough for an attempt
END_REPORT_SECONDS = 10.0  # members may take this long to report how an attempt ended
START_TIMEOUT_SECONDS = 30.0
"""A machine whose supervisor does not start an attempt within this time is excluded from it."""
MAX_EXCLUSIONS = 2  # a machine that was excluded this often may not come back
MAX_WAITING_FACTOR = 4  # this many times `max_nodes` machines may be connected


class Peer:
    """A member, as the leader sees it."""

    def __init__(self, link: Link, hello: Hello) -> None:
        self.link, self.name, self.procs, self.node_rank = link, hello.name, hello.procs, hello.node_rank
        self.first_rank = 0

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.procs)


@dataclass(frozen=True)
class Membership:
    """The machines of one attempt: the leader, and these members in the order of their ranks."""

    peers: list[Peer]
    procs: int
    """Processes of the leader."""

    @property
    def nodes(self) -> int:
        return 1 + len(self.peers)

    @property
    def world_size(self) -> int:
        return self.procs + sum(peer.procs for peer in self.peers)


class Leader:
    def __init__(self, server: socket.socket, config: RendezvousConfig) -> None:
        self.config, self.procs, self.notice = config, config.procs, config.notice
        self.min_nodes, self.max_nodes = config.nodes
        self.log_event: Callable[..., object] = lambda kind, **detail: None
        """Writes to the run's events; does nothing until the run is opened."""
        self.answer_seconds = START_TIMEOUT_SECONDS
        """How long a member may take to report its ranks while others hang."""
        self.token = tokens.find_or_make(config.address, config.identity)
        self._peers: list[Peer] = []
        self._members: Membership | None = None
        self._attempt, self._attempt_started = 0, 0.0
        self._ends: dict[Peer, AttemptEnded] = {}
        self._time_spent: dict[Peer, TimeBreakdown] = {}
        self._lost: dict[str, float] = {}
        """Lost machines by name, and when each was lost."""
        self._num_exclusions: Counter[str] = Counter()
        self._is_growing = False
        """Whether the attempt is being stopped so that another machine can take part."""
        self.verdicts = self._make_verdicts()
        self.listener = Listener(server, self.token.secret, self._admit, self.notice).start()

    # --- who is connected ---

    def _admit(self, sock: socket.socket, keys: Keys) -> None:
        """Welcomes or rejects a machine that knows the token."""
        link = Link(sock, keys.to_member, keys.to_leader, ToLeader).start()
        hello = link.receive(ANSWER_SECONDS)
        if not isinstance(hello, Hello):
            link.close()
            return
        reason = self._rejection_reason(hello, keys)
        link.send(Welcome(not reason, reason))
        if reason:
            self.notice(f"rejected {hello.name}: {reason}")
            time.sleep(0.2)  # so that it reads the reason before the connection closes
            link.close()
            return
        peer = Peer(link, hello)
        if self._lost.pop(hello.name, None) is not None:
            self.log_event("machine-back", machine=hello.name)
        self._peers.append(peer)

    def _rejection_reason(self, hello: Hello, keys: Keys) -> str:
        if hello.identity != self.config.identity_digest(keys):
            return "another task, code or settings"
        if self._num_exclusions[hello.name] >= MAX_EXCLUSIONS:
            return f"it was excluded {MAX_EXCLUSIONS} times"
        if len(self._peers) >= MAX_WAITING_FACTOR * self.max_nodes:
            return "there are enough machines"
        return ""

    def connected_peers(self) -> list[Peer]:
        """Returns the members whose connection is alive, and removes the others."""
        for peer in [p for p in self._peers if not p.link.is_alive]:
            self._remove(peer, peer.link.fault or "its connection broke")
            if peer.link.fault:
                self._num_exclusions[peer.name] += MAX_EXCLUSIONS
        return list(self._peers)

    def _remove(self, peer: Peer, why: str) -> None:
        """Disconnects a member; reports and logs it if the member took part in the attempt."""
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        peer.link.close()
        if self._members is not None and peer in self._members.peers:
            self._lost[peer.name] = time.monotonic()
            self.notice(f"lost {peer.name}: {why}")
            self.log_event("machine-lost", machine=peer.name, detail=why)

    def exclude(self, peer: Peer, why: str) -> None:
        self._num_exclusions[peer.name] += 1
        self._remove(peer, f"excluded, for {why}")

    def wait_for_members(self, stopped: Callable[[], bool] = lambda: False) -> Membership:
        """Waits until there are enough machines, and a few seconds for more; returns those that take part."""
        num_reported, deadline, last_change = 0, time.monotonic() + JOIN_SECONDS, 0.0
        while True:
            count = 1 + len(self.connected_peers())
            if count != num_reported:
                self._report_presence(count, num_reported)
                num_reported, last_change = count, time.monotonic()
            if count >= self.max_nodes or (count >= self.min_nodes and time.monotonic() - last_change > EXTRA_WAIT_SECONDS):
                break
            if stopped():
                raise Problem("stopped before all machines had joined", Outcome.PREEMPTED)
            if time.monotonic() > deadline:
                missing = f"only {count} of {self.min_nodes} machines came within {JOIN_SECONDS:.0f} s{self._lost_machines_text()}"
                raise Problem(missing, Outcome.INFRA)
            time.sleep(0.05)
        peers = self.connected_peers()[: self.max_nodes - 1]
        if any(peer.node_rank is not None for peer in peers):
            peers.sort(key=lambda peer: peer.node_rank if peer.node_rank is not None else self.max_nodes)
        self._members = Membership(peers, self.procs)
        return self._members

    def _report_presence(self, count: int, num_reported: int) -> None:
        if count > 1:
            self.notice(f"{count} of {self.max_nodes} machines have joined{self._lost_machines_text()}")
        elif not num_reported:
            num_missing = self.min_nodes - 1 or self.max_nodes - 1
            self.notice(
                f"waiting at {self.config.where} for {num_missing} more machine{'s' * (num_missing > 1)}{self._lost_machines_text()}: start the same command there"
            )
            if self.token.is_new and not self._attempt:
                self.notice(f"there: {tokens.VARIABLE}={self.token.secret.decode()} {self.config.command}")

    def _lost_machines_text(self) -> str:
        """Returns the lost machines and the seconds since then, as a part of a message; "" if none is lost."""
        now = time.monotonic()
        lost = [f"{name} (lost {now - since:.0f} s ago)" for name, since in self._lost.items()]
        return f", without {', '.join(lost)}" if lost else ""

    # --- an attempt ---

    def _make_verdicts(self) -> LeaderVerdicts:
        return LeaderVerdicts(
            self._unfinished_peers,
            lambda: self._send_to_all(ReportNow(self._attempt)),
            self._send_verdict,
            self._exclude_silent,
            self.answer_seconds,
        )

    def start_attempt(self, run: str, plan: Plan, diagnostics: Diagnostics) -> WorkerPlacement:
        """Sends each member its ranks in the next attempt; returns the placement of the leader's own."""
        assert self._members is not None
        self._attempt, self._attempt_started, self._ends, self._is_growing = self._attempt + 1, time.monotonic(), {}, False
        self.verdicts = self._make_verdicts()
        address = self.config.address[0]
        with socket.socket() as probe:  # a free port for torch's store, another in each attempt
            probe.bind((address, 0))
            master = (address, int(probe.getsockname()[1]))
        first_rank, world_size = self.procs, self._members.world_size
        for peer in self._members.peers:
            peer.first_rank = first_rank
            peer.link.send(StartAttempt(self._attempt, first_rank, peer.procs, world_size, master, run, plan, diagnostics))
            first_rank += peer.procs
        return WorkerPlacement(0, self.procs, world_size, master, self.config.interface)

    def check(self, supervisor: Supervisor) -> None:
        """Called while an attempt runs: aborts it if a machine was lost or failed; stops it after a step if a new machine joined."""
        assert self._members is not None
        is_late = time.monotonic() - self._attempt_started > START_TIMEOUT_SECONDS
        for peer in self._members.peers:
            self._read_messages(peer)
            if peer not in self._ends and is_late and peer.link.peer_attempt != self._attempt:
                self.exclude(peer, f"it did not begin the attempt within {START_TIMEOUT_SECONDS:.0f} s")
            if peer not in self._ends and (not peer.link.is_alive or peer not in self._peers):
                self.connected_peers()
                supervisor.abort(f"the machine {peer.name} was lost")
                return
            end = self._ends.get(peer)
            if end is not None and end.outcome not in (Outcome.OK, Outcome.PREEMPTED):
                supervisor.abort(end.message)
        newcomers = [peer for peer in self.connected_peers() if peer not in self._members.peers]
        if newcomers and self._members.nodes < self.max_nodes and not self._is_growing and supervisor.steps_taken:
            self.notice(f"{newcomers[0].name} has joined: stopping after this step, to continue with it")
            self._is_growing = True
            supervisor.stop_after_step()

    def _read_messages(self, peer: Peer) -> None:
        while (message := peer.link.receive(0)) is not None:
            if not self._accept(peer, message):
                peer.link.fault = "reported ranks that are not its own"
                peer.link.close()
                return

    def _accept(self, peer: Peer, message: Message) -> bool:
        """Stores what a member reports; returns False if it reports ranks that are not its own."""
        spent = message.spent if isinstance(message, (TimeSpent, AttemptEnded)) else None
        if spent is not None:
            if len(spent.ranks) != peer.procs:
                return False
            self._time_spent[peer] = spent
        if isinstance(message, AttemptEnded) and message.attempt == self._attempt:
            self._ends[peer] = message
        elif isinstance(message, HangReport) and message.attempt == self._attempt:
            if any(report.rank not in peer.ranks for report in message.reports):
                return False
            self.verdicts.receive(peer, message.reports)
        return True

    def merge_time_breakdown(self, own: TimeBreakdown) -> TimeBreakdown:
        """Returns the time breakdown of all machines' ranks, in the order of the ranks."""
        assert self._members is not None
        for peer in self._members.peers:
            own = own.with_ranks_of(self._time_spent.get(peer) or TimeBreakdown.unknown(peer.procs))
        return own

    def _unfinished_peers(self) -> list[Peer]:
        assert self._members is not None
        return [peer for peer in self._members.peers if peer not in self._ends]

    def _send_to_all(self, message: Message) -> None:
        assert self._members is not None
        for peer in self._members.peers:
            peer.link.send(message)

    def _send_verdict(self, verdict: Verdict) -> None:
        self._send_to_all(HangVerdict(self._attempt, replace(verdict, evidence="")))

    def _exclude_silent(self, peer: Any) -> None:
        self.exclude(peer, f"it did not report its ranks within {self.answer_seconds:.0f} s")

    def combine_ends(self, ended: JobEnd) -> JobEnd:
        """Returns how the attempt ended: if this machine only lost a connection, the cause that a member reported."""
        assert self._members is not None
        if ended.outcome not in (Outcome.OK, Outcome.PREEMPTED):
            self._send_to_all(Abort(self._attempt))
        deadline = time.monotonic() + END_REPORT_SECONDS
        while time.monotonic() < deadline and any(peer.link.is_alive for peer in self._unfinished_peers()):
            for peer in self._members.peers:
                self._read_messages(peer)
            time.sleep(0.02)
        for peer in self._members.peers:  # also of those that have disconnected
            self._read_messages(peer)
        ends = [
            JobEnd(end.outcome, end.message, {"smaller": None if end.smaller is None else asdict(end.smaller)}, lost=end.lost)
            for end in self._ends.values()
        ]
        causes = [end for end in ends if not end.lost and end.outcome not in (Outcome.OK, Outcome.PREEMPTED)]
        if causes and ended.lost:
            cause = replace(causes[0], interrupted=ended.interrupted, stopped=ended.stopped)
        else:
            cause = ended
        return replace(cause, spent=None if ended.spent is None else self.merge_time_breakdown(ended.spent))

    def has_next_attempt(self) -> bool:
        """Removes the members whose users stopped them; returns whether another attempt with other machines follows."""
        assert self._members is not None
        stopped = [peer for peer, end in self._ends.items() if end.stopped]
        for peer in stopped:
            self._remove(peer, "it was stopped")
        return self._is_growing or (bool(stopped) and 1 + len(self.connected_peers()) >= self.min_nodes < self.max_nodes)

    def end_run(self, outcome: Outcome, message: str) -> None:
        """Sends all members the end of the run, and disconnects them."""
        for peer in self.connected_peers():
            peer.link.send(RunEnded(outcome, message))
        self.listener.close()
        time.sleep(0.1 if self._peers else 0.0)  # so that they read it before the connection closes
        for peer in self._peers:
            peer.link.close()
        if not outcome.retryable:  # else the command may be repeated, and the members wait for it
            self.token.delete_file()


def lead(leader: Leader, supervisor: Supervisor, members: Membership, plan_attempt: Callable[[Membership], Plan], run: str) -> JobEnd:
    """Makes attempts on the connected machines until the run has ended."""
    leader.answer_seconds = START_TIMEOUT_SECONDS + supervisor.policy.hang_after
    while True:
        plan = plan_attempt(members)
        supervisor.prepare_attempt(plan, leader.start_attempt(run, plan, supervisor.diagnostics))
        supervisor.on_poll, supervisor.verdicts, supervisor.merge_time_breakdown = (
            lambda: leader.check(supervisor),
            leader.verdicts,
            leader.merge_time_breakdown,
        )
        ended = leader.combine_ends(supervisor.run_attempt())
        if ended.outcome is Outcome.PREEMPTED and not supervisor.stopped and leader.has_next_attempt():
            why = "other machines; "
        else:
            restart_reason = supervisor.restart_reason(ended)
            if restart_reason is None:
                return ended
            why = restart_reason
        members = leader.wait_for_members(lambda: supervisor.stopped)
        supervisor.report_restart(why, ended.outcome)
