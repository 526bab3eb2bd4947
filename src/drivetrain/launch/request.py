"""The arguments of `train` or `resume` as one frozen object, which can also write itself back as a command line."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import PurePath
from typing import Literal

from drivetrain.buckets.layout import check_uploadable
from drivetrain.names import check_folder, check_name
from drivetrain.outcomes import Problem
from drivetrain.plan import Plan
from drivetrain.processes.job import Diagnostics
from drivetrain.supervise import RestartPolicy

Verb = Literal["train", "resume"]
Planner = Literal["auto", "table", "off"]
Device = Literal["cuda", "cpu", "mps"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for. A field with the name of a flag has the flag's value, and the same default."""

    verb: Verb = "train"
    target: str = ""
    """The task (train) or the run (resume) as the user wrote it; "" if it was a Python object."""
    settings: tuple[str, ...] = ()
    """The key=value words; the recipe has their parsed values."""
    procs: int | None = None
    nodes: int = 1
    """The largest number of machines that train together."""
    min_nodes: int | None = None
    """The smallest number of machines that train together; None: `nodes`."""
    rendezvous: str | None = None
    node_rank: int | None = None
    gpus: str | None = None
    device: str | None = None
    run_dir: str | None = None
    name: str | None = None
    bucket: str | None = None
    """The address of the run in a bucket, which --run-dir gave; `run_dir` is its folder on this machine then."""
    upload: str | None = None
    """The address below which the finished model is uploaded."""
    planner: Planner = "auto"
    plan_file: str | None = None
    restarts: int = 3
    hang_after: float = 30.0
    """Seconds."""
    time_limit: float | None = None
    """Seconds after which the run must be saved and all processes ended."""
    find_nan: bool = False
    profile: int = 0
    """The number of steps to profile."""
    check_collectives: bool = False
    dry_run: bool = False
    smoke: bool = False
    quiet: bool = False
    verbose: bool = False
    saved_plan: Plan | None = field(default=None, compare=False)
    """The plan in `plan_file`, after that was read."""
    asked_at: float = field(default_factory=time.time, compare=False)
    """When the time limit began to count, in seconds since the epoch."""

    def __post_init__(self) -> None:
        if self.name is not None:
            check_name(self.name, "--name")
        if self.run_dir is not None:
            check_folder(self.run_dir, "--run-dir")
        if self.name is not None and self.run_dir is not None:
            raise Problem("--run-dir and --name both say where the run goes: give one")
        if self.upload is not None:
            check_uploadable(self.name or PurePath(self.run_dir or "").name)

    @property
    def node_range(self) -> tuple[int, int]:
        """The smallest and the largest number of machines that train together."""
        return self.min_nodes or self.nodes, self.nodes

    @property
    def policy(self) -> RestartPolicy:
        """What the supervisor does after a process was lost or hung."""
        return RestartPolicy(self.restarts, self.hang_after)

    @property
    def deadline(self) -> float | None:
        """The end of the time limit, in seconds since the epoch."""
        return None if self.time_limit is None else self.asked_at + self.time_limit

    @property
    def diagnostics(self) -> Diagnostics:
        """The checks and measurements for workers."""
        return Diagnostics(self.find_nan, self.profile, self.check_collectives)

    def command(self) -> list[str]:
        """Returns the words after `drivetrain` on a command line for this request."""
        words = [self.verb, self.target, *self.settings]
        for flag, value in self._flags().items():
            if value is True:
                words.append(flag)
            elif value is not None and value is not False:
                words += [f"{flag}={value}"] if value.startswith("-") else [flag, value]
        return words

    def _flags(self) -> dict[str, str | bool | None]:
        """Returns flag -> text; None or False for a flag that has its default."""
        return {
            "--procs": _text(self.procs),
            "--nodes": None if self.node_range == (1, 1) else _range(*self.node_range),
            "--rendezvous": self.rendezvous,
            "--node-rank": _text(self.node_rank),
            "--gpus": self.gpus,
            "--device": self.device,
            "--run-dir": self.bucket or self.run_dir,
            "--name": self.name,
            "--upload": self.upload,
            "--planner": None if self.planner == "auto" else self.planner,
            "--plan": self.plan_file,
            "--restarts": None if self.restarts == Request.restarts else str(self.restarts),
            "--hang-after": None if self.hang_after == Request.hang_after else _seconds(self.hang_after),
            "--time-limit": None if self.time_limit is None else _seconds(self.time_limit),
            "--find-nan": self.find_nan,
            "--profile": _text(self.profile or None),
            "--check-collectives": self.check_collectives,
            "--dry-run": self.dry_run,
            "--smoke": self.smoke,
            "--quiet": self.quiet,
            "--verbose": self.verbose,
        }


def _text(number: int | None) -> str | None:
    return None if number is None else str(number)


def _range(low: int, high: int) -> str:
    return str(high) if low == high else f"{low}:{high}"


def _seconds(value: float) -> str:
    """Formats a time for a flag: exact, and never in scientific notation."""
    text = format(Decimal(repr(value)), "f")
    return f"{text.removesuffix('.0')}s"
