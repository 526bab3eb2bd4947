"""What every kind of target has: its settings, what it would run (pure), and the actions."""

from __future__ import annotations

import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from drivetrain.outcomes import Outcome, Problem
from drivetrain.targets.consent import Agree, Cost, total_cost
from drivetrain.targets.errors import PartlyStarted
from drivetrain.targets.record import Record
from drivetrain.targets.submission import Submission
from drivetrain.targets.transfer import has_checkpoint

Phase = Literal["queued", "running", "ended", "lost"]
POLL_SECONDS = 0.2
STATE_SECONDS = 2.0  # between two questions to a scheduler
RETRY_SECONDS = 5.0
MAX_SILENCE_SECONDS = 3600.0
"""Someone who follows a run waits so long for a system that does not answer."""
STOP_SECONDS = 60.0
"""A run that is stopped may save for so long; then it is killed."""


@dataclass(frozen=True, kw_only=True)
class TargetSettings:
    """What a target's entry in drivetrain.yaml may hold, for every kind."""

    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the run."""
    secrets: list[str] = field(default_factory=list)
    """Names of environment variables of this machine that the run needs; their values are written nowhere."""
    device: Literal["cuda", "cpu"] | None = None
    """Where to train, as --device."""
    procs: int | None = None
    """Processes of each machine, as --procs."""
    nodes: int | None = None
    """Machines, as --nodes."""


class JobState(NamedTuple):
    """What the system says of a run's job."""

    phase: Phase
    code: int | None = None
    """The exit code of a job that has ended, if the system knows it."""
    reason: str = ""
    """Why it waits, or how it ended."""


class Check(NamedTuple):
    """One line of `drivetrain doctor`."""

    subject: str
    """What is checked."""
    verdict: Literal["ok", "warning", "fault"]
    evidence: str
    fix: str = ""


class Orphan(NamedTuple):
    """A resource that costs money or blocks a name, and that nothing on this machine keeps track of."""

    noun: str
    """machine, disk, ..."""
    name: str
    delete_words: tuple[str, ...]
    """The words of the command that deletes it, after the program's name."""

    def __str__(self) -> str:
        return f"{self.noun} {self.name}"


@dataclass(frozen=True)
class RenderedFile:
    path: str
    text: str


@dataclass(frozen=True)
class RenderedCommand:
    words: tuple[str, ...]
    request: str = ""
    """What the command reads on stdin, for people."""
    stdin: bytes = b""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables beside those of this process."""


@dataclass(frozen=True)
class Rendering:
    """The native files and commands of a submission, in the order in which they are written and run."""

    files: tuple[RenderedFile, ...] = ()
    commands: tuple[RenderedCommand, ...] = ()

    def text(self) -> str:
        """Returns what --dry-run prints."""
        parts = [f"# {file.path}\n{file.text.rstrip()}\n" for file in self.files]
        for command in self.commands:
            variables = "".join(f"{name}={shlex.quote(value)} " for name, value in command.variables.items())
            reads = f"\n# it reads: {command.request}" if command.request else ""
            parts.append(f"$ {variables}{shlex.join(command.words)}{reads}\n")
        return "\n".join(parts)


class Target(ABC):
    """A place where runs execute."""

    kind: ClassVar[str]
    settings_class: ClassVar[type[TargetSettings]] = TargetSettings
    shares_files: bool = True
    """Whether the run's folder there is the folder on this machine."""

    def __init__(self, name: str, settings: TargetSettings) -> None:
        self.name, self.settings = name, settings

    # --- knowledge: pure functions of the settings and the submission ---

    @abstractmethod
    def render(self, submission: Submission) -> Rendering:
        """Returns the files and commands that `submit` will write and run."""

    def cost(self, submission: Submission) -> Cost | None:
        """Returns what the machines that `submit` starts cost; None: it starts none that cost money."""
        return None

    def cost_together(self, submissions: Sequence[Submission]) -> Cost | None:
        """Returns what the machines of runs that execute at the same time cost."""
        costs = [cost for submission in submissions if (cost := self.cost(submission)) is not None]
        return total_cost(costs) if costs else None

    # --- actions ---

    @abstractmethod
    def submit(self, submission: Submission, rendering: Rendering, notice: Callable[[str], None]) -> dict[str, Any]:
        """Starts the run there and returns at once. Returns what `record.handle` keeps to find it again."""

    def known_handle(self, submission: Submission) -> dict[str, Any]:
        """Returns the handle, if it is known before the run starts: then a submission that is killed half-way loses nothing."""
        return {}

    def bring_run(self, submission: Submission, notice: Callable[[str], None]) -> bool:
        """Brings a run that is submitted again to where it executes, if its newest checkpoint is only here. Returns whether the run has a
        checkpoint to continue from, as far as that is known."""
        return not self.shares_files or has_checkpoint(submission)

    def has_left(self, record: Record) -> bool:
        """Whether the run executed on machines that are no machines of this target any more."""
        return False

    def find_job(self, record: Record) -> dict[str, Any]:
        """Returns the handle of an active job that a command submitted, but could not record; {} if there is none."""
        return {}

    @abstractmethod
    def state(self, record: Record) -> JobState:
        """Asks the system how the run's job is doing."""

    def patient_state(self, record: Record) -> JobState:
        """Asks as `state`, again and again while the system cannot be reached, for an hour."""
        deadline = time.monotonic() + MAX_SILENCE_SECONDS
        while True:
            try:
                return self.state(record)
            except Problem as problem:
                if problem.outcome is not Outcome.INFRA or time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_SECONDS)

    @abstractmethod
    def stop(self, record: Record, seconds: float = STOP_SECONDS) -> None:
        """Asks the run to save and end; after `seconds` kills its processes. Returns when it has ended."""

    @abstractmethod
    def reach(self) -> str:
        """Returns a line about the place; raises Problem if it cannot be used."""

    def checks(self) -> Iterator[Check]:
        """Yields what `doctor --on` shows of this target."""
        return iter(())

    def mirror(self, record: Record, follow: bool) -> Iterator[str]:
        """Copies new lines of the run's small files to this machine. Yields after each change; with `follow`, until the job has ended."""
        next_question = 0.0
        while follow:
            if time.monotonic() > next_question:
                if self.patient_state(record).phase in ("ended", "lost"):
                    break
                next_question = time.monotonic() + STATE_SECONDS
            yield ""
            time.sleep(POLL_SECONDS)
        yield ""

    def details(self, record: Record) -> Iterator[str]:
        """Yields further lines for `status`, such as the machines of the run and what they report."""
        return iter(())

    @abstractmethod
    def pull(self, record: Record) -> None:
        """Copies the whole run to this machine."""

    def submit_array(self, submissions: list[Submission], notice: Callable[[str], None]) -> list[dict[str, Any]]:
        """Starts several runs; a system with arrays starts them as one. Raises PartlyStarted if a run after the first is refused."""
        handles: list[dict[str, Any]] = []
        for submission in submissions:
            try:
                handles.append(self.submit(submission, self.render(submission), notice))
            except Problem as problem:
                if handles:
                    raise PartlyStarted(handles, problem) from None
                raise
        return handles

    # --- machines that the target makes ---

    def up(self, max_cost: float | None, agree: Agree, notice: Callable[[str], None]) -> str:
        """Makes or starts the target's machines; repeating it goes on where it stopped. Returns a line about them.

        `max_cost`: dollars after which the machines stop.
        """
        raise Problem(f"{self.name} has no machines to start: drivetrain train TASK --on {self.name}")

    def render_up(self, max_cost: float | None) -> tuple[Cost, Rendering]:
        """Returns what `up` would cost, write and run."""
        raise Problem(f"{self.name} has no machines to start: drivetrain train TASK --on {self.name}")

    def orphans(self) -> list[Orphan]:
        """Returns what a crash left behind that costs money."""
        return []

    def delete_orphans(self, found: list[Orphan], notice: Callable[[str], None]) -> int:
        """Deletes them; returns how many are left."""
        return len(found)

    def prepare_down(self) -> None:  # noqa: B027 (most targets have nothing to save)
        """Saves what `down` would remove; raises Problem if a run there is active."""

    def save_ended(self, records: Iterable[Record]) -> None:
        """Copies runs that have ended to this machine; raises Problem if one is active, or cannot be asked."""
        for record in records:
            state = self.state(record)
            if state.phase in ("queued", "running"):
                raise Problem(f"{record.run.name} is {state.phase} on {self.name}: drivetrain stop {record.run.name} first, or --force")
            if not record.facts["pulled"]:
                self.pull(record)
                record.seen(state.phase, state.code, state.reason).update(pulled=True)

    def down(self) -> str:
        """Removes what drivetrain keeps there. Returns a line that tells what was removed."""
        return "nothing is kept there"
