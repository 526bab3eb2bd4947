"""What machines say to each other: one class a message, checked field by field when it arrives."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, get_args

from drivetrain import strict
from drivetrain.outcomes import Outcome, Problem
from drivetrain.plan import Plan
from drivetrain.processes.job import Diagnostics
from drivetrain.supervise.verdict import Sight, Verdict
from drivetrain.watch.pulse import PARTS
from drivetrain.watch.spent import Spent

MACHINE_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,252}")


class OddMessage(ValueError):
    """A message that no machine of ours sends."""


# --- from a member to the leader ---


@dataclass(frozen=True)
class Hello:
    """The first message: who wants to join."""

    kind: ClassVar = "hello"
    procs: int
    name: str
    identity: str
    """A keyed digest of the recipe: equal where task, code and settings are."""
    node_rank: int | None = None

    def __post_init__(self) -> None:
        _require(1 <= self.procs <= 4096 and (self.node_rank is None or 0 <= self.node_rank < 1 << 20), "procs or node_rank out of range")
        _require(MACHINE_NAME.fullmatch(self.name) is not None, "a name that is no host name")


@dataclass(frozen=True)
class Beat:
    """Sent every second by both sides."""

    kind: ClassVar = "beat"
    attempt: int = 0
    """The attempt whose workers the sender supervises at this moment; 0: none."""


@dataclass(frozen=True)
class TimeSpent:
    kind: ClassVar = "time-spent"
    spent: Spent

    def __post_init__(self) -> None:
        _require(all(rank.keys() == set(PARTS) for rank in self.spent.ranks), "time spent on unknown parts")


@dataclass(frozen=True)
class Sighted:
    """What is seen of the sender's ranks while one of them is silent."""

    kind: ClassVar = "sighted"
    attempt: int
    sights: list[Sight]


@dataclass(frozen=True)
class SmallerPlan:
    """The plan's changes with which a run starts anew after it ran out of memory."""

    plan: dict[str, Any]
    sizes: dict[str, int]
    oom: dict[str, int | str]
    sentence: str

    CHANGES: ClassVar = {"micro_batch", "eval_micro_batch", "accumulation", "measured", "capture", "compile", "compile_from", "reasons"}

    def __post_init__(self) -> None:
        _require(self.plan.keys() <= self.CHANGES, "a change of the plan that no lack of memory asks for")
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
    smaller: SmallerPlan | None = None
    spent: Spent | None = None

    def __post_init__(self) -> None:
        if self.spent is not None:
            TimeSpent(self.spent)


# --- from the leader to a member ---


@dataclass(frozen=True)
class Welcome:
    kind: ClassVar = "welcome"
    accepted: bool
    reason: str = ""


@dataclass(frozen=True)
class StartAttempt:
    """A place in the next attempt, and all that its workers need to know."""

    kind: ClassVar = "start-attempt"
    attempt: int
    first_rank: int
    local_procs: int
    world_size: int
    master: tuple[str, int]
    run: str
    """The run's name, below each machine's own folder of runs."""
    plan: Plan
    diagnostics: Diagnostics

    def __post_init__(self) -> None:
        parts = self.run.split("/")
        plain = all(re.fullmatch(r"[\w][\w.+= -]{0,200}", part) for part in parts)
        _require(plain and len(parts) <= 2, "a run's name that is no plain name")
        _require(0 <= self.first_rank < self.world_size and 1 <= self.local_procs <= self.world_size, "ranks that cannot be")
        _require(1024 <= self.master[1] < 65536, "a port that is none of ours")


@dataclass(frozen=True)
class LookNow:
    kind: ClassVar = "look-now"
    attempt: int


@dataclass(frozen=True)
class Hang:
    kind: ClassVar = "hang"
    attempt: int
    verdict: Verdict


@dataclass(frozen=True)
class Abort:
    kind: ClassVar = "abort"
    attempt: int


@dataclass(frozen=True)
class RunEnded:
    kind: ClassVar = "run-ended"
    outcome: Outcome
    message: str


ToLeader = Hello | Beat | TimeSpent | Sighted | AttemptEnded
ToMember = Welcome | Beat | StartAttempt | LookNow | Hang | Abort | RunEnded
Message = ToLeader | ToMember


def encode(message: Message) -> bytes:
    return json.dumps({"kind": message.kind, **asdict(message)}).encode()


def decode(line: bytes, kinds: Any) -> Message:
    """Reads a line as one of the messages in the union `kinds`."""
    try:
        value = json.loads(line)
        kind = value.pop("kind")
        found: Any = next(k for k in get_args(kinds) if k.kind == kind)
        message: Message = strict.read(found, value, str(kind))
    except StopIteration:
        raise OddMessage("of an unknown kind") from None
    except (Problem, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise OddMessage(str(error)) from None
    return message


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise OddMessage(otherwise)
