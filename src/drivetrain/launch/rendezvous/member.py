"""A member: joins, takes part in the leader's attempts, and reconnects if the leader is lost."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from drivetrain import strict
from drivetrain.launch.rendezvous import token as tokens
from drivetrain.launch.rendezvous.config import JOIN_SECONDS, RendezvousConfig, interface_of, machine_name, port_in_use
from drivetrain.launch.rendezvous.handshake import ANSWER_SECONDS, UnknownProtocol, WrongToken, prove_to_leader
from drivetrain.launch.rendezvous.link import Link
from drivetrain.launch.rendezvous.messages import (
    Abort,
    AttemptEnded,
    HangReport,
    HangVerdict,
    Hello,
    PlanReduction,
    ReportNow,
    RunEnded,
    StartAttempt,
    TimeSpent,
    ToMember,
    Welcome,
)  # fmt: skip
from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan
from drivetrain.supervise import JobEnd, Supervisor, WorkerPlacement
from drivetrain.supervise.verdicts import MemberVerdicts, RankReport
from drivetrain.watch.time_breakdown import TimeBreakdown

STALLED_SECONDS = 10.0  # a supervisor that does not call check() for this long is stalled: heartbeats no longer name its attempt


class Member:
    def __init__(self, config: RendezvousConfig) -> None:
        self.config, self.notice = config, config.notice
        self.interface = ""
        self._attempt, self._last_check = 0, 0.0
        self._next: StartAttempt | RunEnded | None = None
        """A message that came before the current attempt ended."""
        self.notice(f"joining the machines at {config.where}")
        self.link = self._join(is_reconnect=False)

    def _join(self, is_reconnect: bool, stopped: Callable[[], bool] = lambda: False) -> Link:
        """Connects to the leader; retries for some minutes. When it reconnects, every network error may be temporary."""
        deadline = time.monotonic() + JOIN_SECONDS
        while True:
            try:
                return self._connect(is_reconnect)
            except OSError as error:
                if isinstance(error, socket.gaierror) and not is_reconnect and error.errno != socket.EAI_AGAIN:
                    raise Problem(f"--rendezvous {self.config.where}: the name {self.config.address[0]} is not known here") from None
                if time.monotonic() > deadline or stopped():
                    raise Problem(
                        f"nobody answers at {self.config.where} ({error.strerror}): is the command running there?", Outcome.INFRA
                    ) from None
                time.sleep(0.5)

    def _connect(self, is_reconnect: bool) -> Link:
        """Connects once, and proves the token. Raises OSError if a retry may succeed, Problem if the user must act."""
        where = self.config.where
        peer = socket.create_connection(self.config.address, timeout=ANSWER_SECONDS)
        try:
            token = tokens.find(self.config.address)
            if token is None:
                raise Problem(
                    f"this machine has no token for the run at {where}: start it with the command that the first machine printed,"
                    f" which begins with {tokens.VARIABLE}=..."
                )
            self.interface = interface_of(str(peer.getsockname()[0]))
            keys = prove_to_leader(peer, token.secret)
            link = Link(peer, keys.to_leader, keys.to_member, ToMember)
        except UnknownProtocol:
            peer.close()
            if is_reconnect:
                raise ConnectionResetError(0, "no greeting") from None
            raise Problem(port_in_use(self.config.address)) from None
        except WrongToken:
            peer.close()
            raise Problem(
                f"this machine has another token than the run at {where}: start it with the command that the first machine printed"
            ) from None
        except BaseException:
            peer.close()
            raise
        link.own_attempt = self._supervised_attempt
        link.start()
        link.send(Hello(self.config.procs, machine_name(), self.config.identity_digest(keys), self.config.node_rank))
        welcome = link.receive(ANSWER_SECONDS)
        if isinstance(welcome, Welcome) and welcome.accepted:
            return link
        link.close()
        if isinstance(welcome, Welcome):
            raise Problem(f"the run at {where} rejected this machine: {welcome.reason}; run the same command on each machine")
        raise ConnectionResetError(0, "no welcome")

    def _supervised_attempt(self) -> int:
        """Returns the current attempt, for heartbeats; 0 if there is none, or if its supervisor is stalled."""
        return self._attempt if time.monotonic() - self._last_check < STALLED_SECONDS else 0

    def wait(self, stopped: Callable[[], bool] = lambda: False) -> StartAttempt | RunEnded:
        """Returns the leader's next message: the start of an attempt, or the end of the run. Reconnects if the leader is lost."""
        while True:
            if self._next is not None:
                message, self._next = self._next, None
                return message
            received = self.link.receive(0.1)
            if isinstance(received, (StartAttempt, RunEnded)):
                return received
            if received is None and not self.link.is_alive:
                self.link.close()
                self.notice(f"lost {self.config.where}{self.link.fault and f', which {self.link.fault}'}: reconnecting")
                self.link = self._join(is_reconnect=True, stopped=stopped)
                self.notice(f"back at {self.config.where}")
            if stopped():
                return RunEnded(Outcome.PREEMPTED, "")

    def start_attempt(self, start: StartAttempt) -> WorkerPlacement:
        """Returns this machine's ranks in an attempt, which its heartbeats name from now on."""
        self._attempt, self._last_check = start.attempt, time.monotonic()
        return WorkerPlacement(start.first_rank, start.local_procs, start.world_size, start.master, self.interface)

    def check(self, supervisor: Supervisor, attempt: int) -> None:
        """Called while an attempt runs: aborts it if the leader asks for that, or is lost."""
        self._last_check = time.monotonic()
        while (message := self.link.receive(0)) is not None:
            if isinstance(message, ReportNow) and message.attempt == attempt:
                supervisor.verdicts.wants_reports = True
            elif isinstance(message, HangVerdict) and message.attempt == attempt:
                supervisor.end_hung(message.verdict)
            elif isinstance(message, Abort) and message.attempt == attempt:
                supervisor.abort("the leader starts another attempt")
            elif isinstance(message, (StartAttempt, RunEnded)):
                self._next = message
                if isinstance(message, StartAttempt):
                    supervisor.abort("the leader starts another attempt")
        if not self.link.is_alive:
            supervisor.abort(f"the machine at {self.config.where} was lost")

    def report_time_breakdown(self, spent: TimeBreakdown) -> None:
        self.link.send(TimeSpent(spent))

    def report(self, attempt: int, reports: list[RankReport]) -> None:
        self.link.send(HangReport(attempt, reports))

    def report_end(self, attempt: int, ended: JobEnd) -> None:
        self._attempt = 0
        values: dict[str, Any] | None = ended.result.get("smaller")
        smaller = None if values is None else strict.read(PlanReduction, values)
        self.link.send(AttemptEnded(attempt, ended.outcome, ended.message, ended.lost, ended.stopped, smaller, ended.spent))


def follow(
    member: Member,
    make_supervisor: Callable[[StartAttempt, WorkerPlacement], Supervisor],
    adapt: Callable[[Plan], Plan] = lambda plan: plan,
) -> JobEnd:
    """Takes part in the leader's attempts; returns how the run ended. `adapt` replaces the parts of the leader's plan that each machine
    decides by itself."""
    supervisor: Supervisor | None = None

    def stopped() -> bool:
        return supervisor is not None and supervisor.stopped

    try:
        while True:
            message = member.wait(stopped)
            if isinstance(message, RunEnded):
                return JobEnd(message.outcome, message.message)
            placement, plan = member.start_attempt(message), adapt(message.plan)
            if supervisor is None:
                supervisor = make_supervisor(replace(message, plan=plan), placement)
            supervisor.prepare_attempt(plan, placement, message.diagnostics)
            supervisor.on_poll = partial(member.check, supervisor, message.attempt)
            supervisor.verdicts = MemberVerdicts(partial(member.report, message.attempt))
            supervisor.merge_time_breakdown = member.report_time_breakdown
            ended = supervisor.run_attempt()
            member.report_end(message.attempt, ended)
            if supervisor.stopped:
                return ended
    finally:
        member.link.close()
