"""The messages between leader and members: one class each. Every field is checked when a message arrives."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, get_args

from drivetrain import strict
from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan
from drivetrain.processes.job import Diagnostics
from drivetrain.supervise.verdicts import RankReport, Verdict
from drivetrain.watch.heartbeat import PARTS
from drivetrain.watch.time_breakdown import TimeBreakdown

MACHINE_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,252}")


class InvalidMessage(ValueError):
    """A message that drivetrain never sends."""


# --- from a member to the leader ---


@dataclass(frozen=True)
class Hello:
    """The first message: a machine that wants to join."""

    kind: ClassVar = "hello"
    procs: int
    name: str
    identity: str
    """A keyed digest of task, code and settings."""
    node_rank: int | None = None

    def __post_init__(self) -> None:
        _require(1 <= self.procs <= 4096 and (self.node_rank is None or 0 <= self.node_rank < 1 << 20), "procs or node_rank out of range")
        _require(MACHINE_NAME.fullmatch(self.name) is not None, "an invalid host name")


@dataclass(frozen=True)
class NodeHeartbeat:
    """Sent every second by both sides."""

    kind: ClassVar = "heartbeat"
    attempt: int = 0
    """The attempt whose workers the sender supervises now; 0: none."""


@dataclass(frozen=True)
class TimeSpent:
    """How the sender's ranks spent their time so far."""

    kind: ClassVar = "time-spent"
    spent: TimeBreakdown

    def __post_init__(self) -> None:
        _require(all(rank.keys() == set(PARTS) for rank in self.spent.ranks), "time spent on unknown parts")


@dataclass(frozen=True)
class HangReport:
    """The state of the sender's ranks, while one of them has no heartbeat."""

    kind: ClassVar = "hang-report"
    attempt: int
    reports: list[RankReport]


@dataclass(frozen=True)
class PlanReduction:
    """The changes of the plan for a restart after out of memory."""

    plan: dict[str, Any]
    sizes: dict[str, int]
    oom: dict[str, int | str]
    sentence: str

    CHANGES: ClassVar = {"micro_batch", "eval_micro_batch", "accumulation", "measured", "capture", "compile", "compile_from", "reasons"}

    def __post_init__(self) -> None:
        _require(self.plan.keys() <= self.CHANGES, "a change of the plan that does not save memory")
        _require({"step"} <= self.oom.keys() and self.sizes.keys() <= self.CHANGES, "an unknown size")
        strict.read(Plan, self.plan, "plan")


@dataclass(frozen=True)
class AttemptEnded:
    """How an attempt ended for the sender."""

    kind: ClassVar = "attempt-ended"
    attempt: int
    outcome: Outcome
    message: str
    lost: bool
    stopped: bool
    smaller: PlanReduction | None = None
    spent: TimeBreakdown | None = None

    def __post_init__(self) -> None:
        if self.spent is not None:
            TimeSpent(self.spent)


# --- from the leader to a member ---


@dataclass(frozen=True)
class Welcome:
    """The answer to Hello."""

    kind: ClassVar = "welcome"
    accepted: bool
    reason: str = ""


@dataclass(frozen=True)
class StartAttempt:
    """Starts an attempt: the receiver's ranks, and what its workers need."""

    kind: ClassVar = "start-attempt"
    attempt: int
    first_rank: int
    local_procs: int
    world_size: int
    master: tuple[str, int]
    run: str
    """The run's name; the directory is in each machine's own runs/."""
    plan: Plan
    diagnostics: Diagnostics

    def __post_init__(self) -> None:
        parts = self.run.split("/")
        is_plain = all(re.fullmatch(r"[\w][\w.+= -]{0,200}", part) for part in parts)
        _require(is_plain and len(parts) <= 2, "an invalid run name")
        _require(0 <= self.first_rank < self.world_size and 1 <= self.local_procs <= self.world_size, "impossible ranks")
        _require(1024 <= self.master[1] < 65536, "a reserved port")


@dataclass(frozen=True)
class ReportNow:
    """Asks for a HangReport at once."""

    kind: ClassVar = "report-now"
    attempt: int


@dataclass(frozen=True)
class HangVerdict:
    """Which ranks hang: the attempt ends."""

    kind: ClassVar = "hang-verdict"
    attempt: int
    verdict: Verdict


@dataclass(frozen=True)
class Abort:
    """Ends the attempt at once."""

    kind: ClassVar = "abort"
    attempt: int


@dataclass(frozen=True)
class RunEnded:
    """The end of the run, which also ends the receiver's command."""

    kind: ClassVar = "run-ended"
    outcome: Outcome
    message: str


ToLeader = Hello | NodeHeartbeat | TimeSpent | HangReport | AttemptEnded
ToMember = Welcome | NodeHeartbeat | StartAttempt | ReportNow | HangVerdict | Abort | RunEnded
Message = ToLeader | ToMember


def encode(message: Message) -> bytes:
    return json.dumps({"kind": message.kind, **asdict(message)}).encode()


def decode(line: bytes, kinds: Any) -> Message:
    """Returns the message on a line; raises InvalidMessage unless its class is in the union `kinds`."""
    try:
        value = json.loads(line)
        kind = value.pop("kind")
        message_class: Any = next(k for k in get_args(kinds) if k.kind == kind)
        message: Message = strict.read(message_class, value, str(kind))
    except StopIteration:
        raise InvalidMessage("of an unknown kind") from None
    except (Problem, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise InvalidMessage(str(error)) from None
    return message


def _require(is_valid: bool, problem: str) -> None:
    if not is_valid:
        raise InvalidMessage(problem)
