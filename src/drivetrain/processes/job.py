"""Jobs of child processes: one frozen class for each purpose. The parent writes a job as JSON; the child reads and checks it."""

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
    """The checks and measurements that the user asked for."""

    find_nan: bool = False
    """If the loss is NaN: repeat its steps, and name the module that causes it."""
    profile: int = 0
    """The number of steps to profile."""
    check_collectives: bool = False
    """Before each collective, compare it over all ranks."""
    nan_step: int | None = None
    """The step at which the loss was found to be NaN: the modules of all steps up to it are checked."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The fields of every job."""

    purpose: ClassVar[str]
    run: str
    """The run's directory; for jobs without a run, a directory for files."""
    task: TaskRef
    plan: Plan
    folder: str
    """The working directory of the task's code."""
    scratch: str | None = None
    """A directory for sockets and other files that are needed only while processes run."""


@dataclass(frozen=True, kw_only=True)
class TaskJob(Job):
    """A job that creates one instance of the task."""

    settings: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TrainJob(TaskJob):
    """Train to the end, from the last good checkpoint if there is one."""

    purpose: ClassVar = "train"
    end: float | None = None
    """The time limit, in seconds since the epoch: by then the run must be saved and all processes ended."""
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
    """The recipe's own global batch; a Source works with no other."""
    full_plan: Plan
    """The plan for `full_global_batch`."""


@dataclass(frozen=True, kw_only=True)
class EvaluateJob(TaskJob):
    """Evaluate the run's model on the task's evaluation data."""

    purpose: ClassVar = "eval"
    num_resamples: int = 0
    """Bootstrap resamples of the evaluation data on which the metrics are computed, too."""


@dataclass(frozen=True)
class PopulationMember:
    """One trial of a population."""

    trial: int
    run: str
    settings: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PopulationJob(Job):
    """Train a generation of trials; trials of one shape are trained at once, as one population."""

    purpose: ClassVar = "population"
    members: list[PopulationMember]
    size: int
    """The largest number of trials that are trained at once."""


@dataclass(frozen=True, kw_only=True)
class SurveyJob(TaskJob):
    """Measure a task's profile: its memory and work."""

    purpose: ClassVar = "survey"
    with_values: bool
    """Whether to use real tensors only, after a survey with fake tensors crashed."""


@dataclass(frozen=True, kw_only=True)
class ProbeJob(TaskJob):
    """Measure steps of several micro-batch sizes."""

    purpose: ClassVar = "probe"
    micro_batches: list[int]
    predicted: list[tuple[int, float]]
    """(micro-batch size, predicted seconds of work) of every size that fits."""


JobT = TypeVar("JobT", bound=Job)
JOBS: dict[str, type[Job]] = {
    job_class.purpose: job_class for job_class in (TrainJob, VerifyJob, SmokeJob, EvaluateJob, PopulationJob, SurveyJob, ProbeJob)
}


def to_json(job: Job) -> dict[str, Any]:
    return {"purpose": job.purpose, **asdict(job)}


def from_json(values: object) -> Job:
    """Returns the job that JSON values describe; raises `strict.Mismatch` for an unknown, missing or wrongly typed field."""
    if not isinstance(values, dict) or values.get("purpose") not in JOBS:
        raise strict.Mismatch(f"job: its purpose is none of {', '.join(JOBS)}")
    job_values = {key: value for key, value in values.items() if key != "purpose"}
    return strict.read(JOBS[values["purpose"]], job_values, "job")


def write(job: Job, file: Path) -> None:
    file.write_text(json.dumps(to_json(job)))


def read(job_class: type[JobT], file: Path) -> JobT:
    """Returns the job in a file; raises `strict.Mismatch` if it is of another class."""
    job = from_json(json.loads(file.read_text()))
    if not isinstance(job, job_class):
        raise strict.Mismatch(f"job: its purpose is {job.purpose}, not that of a {job_class.__name__}")
    return job
