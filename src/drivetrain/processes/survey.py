"""A child process that measures a task for the plan: its profile, or a few steps. It writes the result to a file."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from drivetrain.outcomes import Outcome
from drivetrain.processes import failures
from drivetrain.processes.job import ProbeJob, SurveyJob, TaskJob, read
from drivetrain.runs import die_with_parent


def main() -> None:
    job, result_file = read(TaskJob, Path(sys.argv[1])), Path(sys.argv[2])
    die_with_parent(int(sys.argv[3]))
    if os.path.isdir(job.folder):
        os.chdir(job.folder)
    try:
        _survey(job, result_file) if isinstance(job, SurveyJob) else _probe(job, result_file)
    except BaseException as error:
        outcome, message = failures.explain(error, Path(job.run), job.plan.workers)
        _write(result_file, {"outcome": outcome, "message": message})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _survey(job: SurveyJob, result_file: Path) -> None:
    """Writes the task's profile; before that, writes the model's sizes to first.json."""
    from drivetrain.engine.measure.survey import survey
    from drivetrain.task_ref import instantiate

    task = instantiate(job.task, job.settings)
    profile = survey(task, job.plan.precision, partial(_write, result_file.with_name("first.json")), job.with_values)
    _write(result_file, {"outcome": Outcome.OK, "result": profile.to_json()})


def _probe(job: TaskJob, result_file: Path) -> None:
    """Writes the measured points after each measurement, so that a time limit loses none."""
    import torch

    from drivetrain.engine.measure.probe import Probe
    from drivetrain.plan.fit import Point, next_size_to_measure
    from drivetrain.task_ref import instantiate

    assert isinstance(job, ProbeJob)
    probe = Probe(instantiate(job.task, job.settings), job.plan, torch.device(job.plan.device))
    points: list[Point] = []
    while (micro_batch := next_size_to_measure(points, job.micro_batches, dict(job.predicted))) is not None:
        points.append(probe.measure(micro_batch))
        _write(result_file, {"outcome": Outcome.OK, "result": [point.to_json() for point in points]})


def _write(file: Path, value: dict[str, Any]) -> None:
    temporary_file = file.with_suffix(".part")
    temporary_file.write_text(json.dumps(value))
    temporary_file.replace(file)


if __name__ == "__main__":
    main()
