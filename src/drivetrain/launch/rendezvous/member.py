"""Every other machine: it joins, takes part in attempt after attempt as the leader says, and looks for the leader where that is lost."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from drivetrain import strict
from drivetrain.launch.rendezvous import token as tokens
from drivetrain.launch.rendezvous.handshake import ANSWER_SECONDS, NotOurs, WrongToken, prove_to_leader
from drivetrain.launch.rendezvous.link import Link
from drivetrain.launch.rendezvous.meeting import JOIN_SECONDS, Meeting, interface_of, machine_name
from drivetrain.launch.rendezvous.messages import (
    Abort,
    AttemptEnded,
    Hang,
    Hello,
    LookNow,
    RunEnded,
    Sighted,
    SmallerPlan,
    StartAttempt,
    TimeSpent,
    ToMember,
    Welcome,
)  # fmt: skip
from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan
from drivetrain.supervise import Ended, Place, Supervisor
from drivetrain.supervise.judges import Reporting
from drivetrain.supervise.verdict import Sight
from drivetrain.watch.spent import Spent

STALLED_SECONDS = 10.0  # without a turn of the supervisor's loop, after which beats no longer name its attempt


class Member:
    def __init__(self, meeting: Meeting) -> None:
        self.meeting, self.notice = meeting, meeting.notice
        self.interface = ""
        self._attempt, self._turned = 0, 0.0
        self._next: StartAttempt | RunEnded | None = None
        """A message of the leader's that came while an attempt was still under way."""
        self.notice(f"joining the machines that meet at {meeting.where}")
        self.link = self._join(again=False)

    def _join(self, again: bool, stopped: Callable[[], bool] = lambda: False) -> Link:
        """`again` where the leader was there before: then whatever is wrong with the network may pass."""
        deadline = time.monotonic() + JOIN_SECONDS
        while True:
            try:
                return self._connect(again)
            except OSError as error:
                if isinstance(error, socket.gaierror) and not again and error.errno != socket.EAI_AGAIN:
                    raise Problem(f"--rendezvous {self.meeting.where}: the name {self.meeting.address[0]} is not known here") from None
                if time.monotonic() > deadline or stopped():
                    raise Problem(
                        f"nobody answers at {self.meeting.where} ({error.strerror}): is the command running there?", Outcome.INFRA
                    ) from None
                time.sleep(0.5)

    def _connect(self, again: bool) -> Link:
        where = self.meeting.where
        peer = socket.create_connection(self.meeting.address, timeout=ANSWER_SECONDS)
        try:
            token = tokens.find(self.meeting.address)
            if token is None:
                raise Problem(
                    f"this machine has no token for the run at {where}: start it with the command that the first machine printed,"
                    f" which begins with {tokens.VARIABLE}=..."
                )
            self.interface = interface_of(str(peer.getsockname()[0]))
            keys = prove_to_leader(peer, token.secret)
            link = Link(peer, keys.to_leader, keys.to_member, ToMember)
        except NotOurs:
            peer.close()
            if again:
                raise ConnectionResetError(0, "no greeting") from None
            raise Problem(
                f"port {self.meeting.address[1]} on {self.meeting.address[0]} is in use by another program: choose another --rendezvous port"
            ) from None
        except WrongToken:
            peer.close()
            raise Problem(
                f"the token here is not that of the run at {where}: start this machine with the command that the first one printed"
            ) from None
        except BaseException:
            peer.close()
            raise
        link.own_attempt = self._supervised_attempt
        link.begin()
        link.send(Hello(self.meeting.procs, machine_name(), self.meeting.identity_digest(keys), self.meeting.node_rank))
        welcome = link.receive(ANSWER_SECONDS)
        if isinstance(welcome, Welcome) and welcome.accepted:
            return link
        link.close()
        if isinstance(welcome, Welcome):
            raise Problem(f"the run at {where} does not take this machine: {welcome.reason}; run the same command on each machine")
        raise ConnectionResetError(0, "no welcome")

    def _supervised_attempt(self) -> int:
        return self._attempt if time.monotonic() - self._turned < STALLED_SECONDS else 0

    def wait(self, stopped: Callable[[], bool] = lambda: False) -> StartAttempt | RunEnded:
        """The leader's next message: a place in an attempt, or the end. Where the leader is lost, it is looked for again."""
        while True:
            if self._next is not None:
                message, self._next = self._next, None
                return message
            received = self.link.receive(0.1)
            if isinstance(received, (StartAttempt, RunEnded)):
                return received
            if received is None and not self.link.alive:
                self.link.close()
                self.notice(f"lost {self.meeting.where}{self.link.fault and f', which {self.link.fault}'}: looking for it again")
                self.link = self._join(again=True, stopped=stopped)
                self.notice(f"back at {self.meeting.where}")
            if stopped():
                return RunEnded(Outcome.PREEMPTED, "")

    def begin(self, start: StartAttempt) -> Place:
        """This machine's place in an attempt, which its beats name from now on."""
        self._attempt, self._turned = start.attempt, time.monotonic()
        return Place(start.first_rank, start.local_procs, start.world_size, start.master, self.interface)

    def look(self, supervisor: Supervisor, attempt: int) -> None:
        """While an attempt runs: end it where the leader says so, or is lost."""
        self._turned = time.monotonic()
        while (message := self.link.receive(0)) is not None:
            if isinstance(message, LookNow) and message.attempt == attempt:
                supervisor.judge.asks = True
            elif isinstance(message, Hang) and message.attempt == attempt:
                supervisor.convict(message.verdict)
            elif isinstance(message, Abort) and message.attempt == attempt:
                supervisor.abort("the machines meet anew")
            elif isinstance(message, (StartAttempt, RunEnded)):
                self._next = message
                if isinstance(message, StartAttempt):
                    supervisor.abort("the machines meet anew")
        if not self.link.alive:
            supervisor.abort(f"the machine at {self.meeting.where} was lost")

    def tell_time(self, spent: Spent) -> None:
        """To the leader, which keeps that of all."""
        self.link.send(TimeSpent(spent))

    def report(self, attempt: int, sights: list[Sight]) -> None:
        self.link.send(Sighted(attempt, sights))

    def tell_end(self, attempt: int, ended: Ended) -> None:
        self._attempt = 0
        given: dict[str, Any] | None = ended.result.get("smaller")
        smaller = None if given is None else strict.read(SmallerPlan, given)
        self.link.send(AttemptEnded(attempt, ended.outcome, ended.message, ended.lost, ended.stopped, smaller, ended.spent))


def follow(
    member: Member, supervisor_of: Callable[[StartAttempt, Place], Supervisor], own_parts: Callable[[Plan], Plan] = lambda plan: plan
) -> Ended:
    """Take part in attempt after attempt, as the leader says; gives how the run ended. `own_parts` puts into the leader's plan
    what this machine decides by itself."""
    supervisor: Supervisor | None = None

    def stopped() -> bool:
        return supervisor is not None and supervisor.stopped

    try:
        while True:
            message = member.wait(stopped)
            if isinstance(message, RunEnded):
                return Ended(message.outcome, message.message)
            place, plan = member.begin(message), own_parts(message.plan)
            if supervisor is None:
                supervisor = supervisor_of(replace(message, plan=plan), place)
            supervisor.use(plan, place, message.diagnostics)
            supervisor.look = partial(member.look, supervisor, message.attempt)
            supervisor.judge = Reporting(partial(member.report, message.attempt))
            supervisor.all_time = member.tell_time
            ended = supervisor.once()
            member.tell_end(message.attempt, ended)
            if supervisor.stopped:
                return ended
    finally:
        member.link.close()
