"""What a child process is to do: one frozen class a purpose, written to JSON by the parent and read back, checked, by the child."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from drivetrain import strict
from drivetrain.plan import Plan
from drivetrain.task_ref import TaskRef


@dataclass(frozen=True)
class Diagnostics:
    """What a training checks closely, as the user asks for."""

    find_nan: bool = False
    """Repeat the steps of a loss that is no number, and name the module."""
    profile: int = 0
    """Steps to profile."""
    check_collectives: bool = False
    """Compare every collective over all ranks before it begins."""
    nan_step: int | None = None
    """The step by which the loss was no number; its modules are checked up to there."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every purpose has in common."""

    purpose: ClassVar[str]
    run: str
    """The run's directory; for purposes that have no run, a directory for files."""
    task: TaskRef
    plan: Plan
    folder: str
    """The working directory of the task's code."""
    scratch: str | None = None
    """A directory for sockets and other files that only live processes need."""


@dataclass(frozen=True, kw_only=True)
class TaskJob(Job):
    """A job on one instance of the task."""

    settings: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TrainJob(TaskJob):
    """Train to the end, from the last good checkpoint on."""

    purpose: ClassVar = "train"
    end: float | None = None
    """When all must be saved and over, in seconds since the epoch."""
    diagnostics: Diagnostics = field(default_factory=Diagnostics)


@dataclass(frozen=True, kw_only=True)
class VerifyJob(TaskJob):
    """Train a few steps whose results `verify-resume` compares."""

    purpose: ClassVar = "verify"
    fingerprint: str | None = None
    """The file to which rank 0 writes a fingerprint of every step."""
    names_operations: bool = False
    """Whether the fingerprint also names operations without a deterministic form."""


@dataclass(frozen=True, kw_only=True)
class SmokeJob(TaskJob):
    """Train, save, resume and evaluate on a few samples."""

    purpose: ClassVar = "smoke"
    max_samples: int
    full_global_batch: int
    """The recipe's own global batch, which a Source needs."""
    full_plan: Plan
    """The plan for that batch."""


@dataclass(frozen=True, kw_only=True)
class EvaluateJob(TaskJob):
    """Evaluate the run's model on the task's evaluation data."""

    purpose: ClassVar = "eval"


@dataclass(frozen=True)
class PopulationMember:
    """One trial of a population."""

    trial: int
    run: str
    settings: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PopulationJob(Job):
    """Train a generation of trials, those of one shape as one program."""

    purpose: ClassVar = "population"
    members: list[PopulationMember]
    size: int
    """Trials that are trained at once, at most."""


@dataclass(frozen=True, kw_only=True)
class SurveyJob(TaskJob):
    """Find a task's profile: its memory and work."""

    purpose: ClassVar = "survey"
    with_values: bool
    """Whether tensors have values, for a task that fails without (on the meta device)."""


@dataclass(frozen=True, kw_only=True)
class ProbeJob(TaskJob):
    """Measure steps of several micro-batch sizes."""

    purpose: ClassVar = "probe"
    micro_batches: list[int]
    predicted: list[tuple[int, float]]
    """Micro-batch size and predicted seconds of work, of every size that fits."""


JobT = TypeVar("JobT", bound=Job)
JOBS: dict[str, type[Job]] = {
    kind.purpose: kind for kind in (TrainJob, VerifyJob, SmokeJob, EvaluateJob, PopulationJob, SurveyJob, ProbeJob)
}


def to_json(job: Job) -> dict[str, Any]:
    return {"purpose": job.purpose, **asdict(job)}


def from_json(values: object) -> Job:
    """Returns the job that JSON describes; an unknown, missing or wrongly typed field is a `strict.Mismatch`."""
    if not isinstance(values, dict) or values.get("purpose") not in JOBS:
        raise strict.Mismatch(f"job: its purpose is none of {', '.join(JOBS)}")
    return strict.read(JOBS[values["purpose"]], {key: value for key, value in values.items() if key != "purpose"}, "job")


def write(job: Job, file: Path) -> None:
    file.write_text(json.dumps(to_json(job)))


def read(kind: type[JobT], file: Path) -> JobT:
    """Returns the file's job, which must be of this kind."""
    job = from_json(json.loads(file.read_text()))
    if not isinstance(job, kind):
        raise strict.Mismatch(f"job: its purpose is {job.purpose}, not that of a {kind.__name__}")
    return job
