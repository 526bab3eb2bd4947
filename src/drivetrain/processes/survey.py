"""A child process that looks at a task for the plan: its profile, or measured steps. What it finds goes into a file."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from drivetrain.outcomes import Outcome
from drivetrain.runs import die_with_parent


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    die_with_parent(int(sys.argv[3]))
    os.chdir(job["folder"]) if os.path.isdir(job["folder"]) else None
    out = Path(sys.argv[2])
    try:
        _look(job, out)
    except BaseException as error:
        from drivetrain.processes.worker import explain

        outcome, message = explain(error, job)
        _write(out, {"outcome": outcome, "message": message})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _look(job: dict[str, Any], out: Path) -> None:
    from drivetrain.task_ref import TaskRef, instantiate

    task = instantiate(TaskRef(**job["task"]), job["settings"])
    if job["mode"] == "survey":
        from drivetrain.engine.measure.survey import survey

        first = partial(_write, out.with_name("first.json"))
        _write(out, {"outcome": Outcome.OK, "found": survey(task, job["plan"]["precision"], first, job["with_values"]).to_json()})
        return
    import torch

    from drivetrain.engine.measure.probe import Probe
    from drivetrain.plan import Plan
    from drivetrain.plan.fit import Point, next_to_measure

    probe = Probe(task, Plan.from_json(job["plan"]), torch.device(job["plan"]["device"]))
    points: list[Point] = []
    while (size := next_to_measure(points, job["micro_batches"], dict(job["predicted"]))) is not None:
        points.append(probe.at(size))
        found = [p.to_json() for p in points]
        _write(out, {"outcome": Outcome.OK, "found": found})  # each at once: what was measured outlives a time limit


def _write(out: Path, value: dict[str, Any]) -> None:
    hidden = out.with_suffix(".part")
    hidden.write_text(json.dumps(value))
    hidden.replace(out)


if __name__ == "__main__":
    main()
