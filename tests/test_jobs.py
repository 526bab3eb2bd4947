"""Jobs: what a parent writes, a child reads back; anything else is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivetrain.plan import Plan
from drivetrain.processes.job import (
    Diagnostics,
    EvaluateJob,
    Job,
    PopulationJob,
    PopulationMember,
    ProbeJob,
    SmokeJob,
    SurveyJob,
    TrainJob,
    VerifyJob,
    read,
    to_json,
    write,
)
from drivetrain.strict import Mismatch
from drivetrain.task_ref import find_task

COMMON: dict[str, Any] = {"run": "/runs/one", "task": find_task("digits"), "plan": Plan(reasons={"device": "no GPU"}), "folder": "/home"}
SETTINGS = {"epochs": 3, "best": None, "start": "here"}
JOBS: list[Job] = [
    TrainJob(**COMMON, settings=SETTINGS, end=1e9, diagnostics=Diagnostics(find_nan=True, nan_step=7)),
    VerifyJob(**COMMON, settings=SETTINGS, fingerprint="file", names_operations=True),
    SmokeJob(**COMMON, settings=SETTINGS, max_samples=64, full_global_batch=512, full_plan=Plan(global_batch=512)),
    EvaluateJob(**COMMON, settings=SETTINGS),
    PopulationJob(**COMMON, members=[PopulationMember(0, "/runs/two", SETTINGS)], size=4),
    SurveyJob(**COMMON, settings=SETTINGS, with_values=True),
    ProbeJob(**COMMON, settings=SETTINGS, micro_batches=[1, 8], predicted=[(1, 0.5), (8, 1.0)]),
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.purpose)
def test_a_child_reads_the_job_that_its_parent_wrote(job: Job, tmp_path: Path) -> None:
    job = replace(job, scratch="/tmp/scratch")
    write(job, tmp_path / "job.json")
    assert read(Job, tmp_path / "job.json") == job


@pytest.mark.parametrize(
    "change",
    [
        {"surprise": 1},
        {"run": None},
        {"settings": None},
        {"plan": {"world_size": "two"}},
        {"task": {"label": "digits"}},
        {"purpose": "dance"},
        {"purpose": "survey"},
        {"diagnostics": {"find_nan": 1}},
    ],
    ids=str,
)
def test_a_job_with_an_unknown_missing_or_wrongly_typed_field_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    values = to_json(JOBS[0]) | change
    (tmp_path / "job.json").write_text(json.dumps({key: value for key, value in values.items() if value is not None or key == "scratch"}))
    with pytest.raises(Mismatch):
        read(TrainJob, tmp_path / "job.json")


def test_a_whole_job_of_another_purpose_is_refused(tmp_path: Path) -> None:
    write(JOBS[1], tmp_path / "job.json")
    with pytest.raises(Mismatch, match="its purpose is verify, not that of a TrainJob"):
        read(TrainJob, tmp_path / "job.json")
