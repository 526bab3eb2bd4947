"""Evaluates a run's model on its task's evaluation data, in worker processes; compares two runs by a paired bootstrap."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

from drivetrain import runs
from drivetrain.launch.job import make_job
from drivetrain.launch.machine import cluster_of, detect_machine
from drivetrain.launch.planning import plan_run
from drivetrain.launch.recorded import recorded_recipe
from drivetrain.launch.report import report_code
from drivetrain.launch.request import Request
from drivetrain.outcomes import Outcome, Problem
from drivetrain.processes.job import EvaluateJob
from drivetrain.runs import Run
from drivetrain.supervise import JobEnd, local_placement, run_workers
from drivetrain.watch.screen import Screen

RECORDED = ("metrics", "samples", "step", "figures", "intervals", "groups")  # the fields of the result that eval.json contains
CONFIDENCE = 0.95


def evaluate(run: Run, request: Request, screen: Screen, num_resamples: int = 0) -> JobEnd:
    """Evaluates the final weights of a finished run, else those of its last good checkpoint, and writes eval.json."""
    recipe, info = recorded_recipe(run), run.read()
    machine = detect_machine(request)
    plan = plan_run(recipe, replace(request, planner="off"), cluster_of(machine), info)
    report_code(recipe, run, screen)
    job = make_job(EvaluateJob, recipe, run, plan, info["folder"], num_resamples=num_resamples)
    ended = run_workers(job, plan, local_placement(machine.procs), screen, machine.gpus, request.verbose)
    if ended.outcome is Outcome.OK:
        ended.result["intervals"] = {name: interval(values) for name, values in ended.result["resamples"].items()}
        facts = {key: ended.result[key] for key in RECORDED}
        runs.write_atomic(run.path / "eval.json", json.dumps({"format": runs.FORMAT} | facts, indent=1) + "\n")
    return ended


def interval(values: list[float]) -> list[float] | None:
    """Returns the bootstrap's 95 % interval (percentiles); None if no resample gives the metric."""
    known = sorted(value for value in values if not math.isnan(value))
    if not known:
        return None
    tail = (1 - CONFIDENCE) / 2
    return [known[round(share * (len(known) - 1))] for share in (tail, 1 - tail)]


@dataclass(frozen=True)
class Difference:
    """A metric of two runs on the same samples."""

    name: str
    value: float
    other: float
    interval: list[float]
    """Of the difference `value - other`."""
    p: float
    """The two-sided bootstrap p-value of no difference."""


def compare(result: dict[str, Any], other: dict[str, Any]) -> list[Difference]:
    """Returns the differences of two evaluations with the same evaluation data and number of resamples."""
    _check_same_data(result, other)
    values, others = _numbers(result), _numbers(other)
    differences = []
    for name, resamples in result["resamples"].items():
        pairs = zip(resamples, other["resamples"].get(name, []), strict=False)
        drawn = [one - two for one, two in pairs if not math.isnan(one - two)]
        bounds = interval(drawn)
        if bounds is None or name not in values or name not in others:
            continue
        below, above = sum(d <= 0 for d in drawn), sum(d >= 0 for d in drawn)
        p = min(1.0, 2 * (min(below, above) + 1) / (len(drawn) + 1))
        differences.append(Difference(name, values[name], others[name], bounds, p))
    if not differences:
        raise Problem("the two runs have no metric in common that is known for each sample: their metrics are (total, count), or differ")
    return differences


def _check_same_data(result: dict[str, Any], other: dict[str, Any]) -> None:
    """Raises Problem if two runs were evaluated on other data: by the task's digest of it, else by the number of samples."""
    digests = [entry.get("digest", "") for entry in (result, other)]
    if digests[0] != digests[1]:
        raise Problem("the two runs have other evaluation data: compare runs that evaluate on the same data, with the same settings of it")
    if not digests[0] and result["samples"] != other["samples"]:
        raise Problem(
            f"the two runs have other evaluation data ({result['samples']:,} and {other['samples']:,} samples): compare runs that evaluate on the same samples"
        )


def _numbers(result: dict[str, Any]) -> dict[str, float]:
    """Returns the metrics and the rows of all tables, as `TABLE: ROW`."""
    tables = {name: figure for name, figure in result["figures"].items() if isinstance(figure, dict)}
    return dict(result["metrics"]) | {f"{name}: {row}": value for name, table in tables.items() for row, value in table.items()}
