"""Planning before a training has a time limit, and a second training uses the cached measurements."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from drivetrain.hardware import detect
from drivetrain.hardware.described import parse
from drivetrain.launch import planning, profiling, survey_process
from drivetrain.launch.machine import Cluster
from drivetrain.launch.planning import Measure, make_plan
from drivetrain.outcomes import Problem
from drivetrain.plan import Plan
from drivetrain.recipe import load
from drivetrain.watch.screen import Screen
from tests.command import write_task


@pytest.fixture(autouse=True)
def _own_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    write_task()


def planned(steps: int, measure: Measure = Measure.IF_WORTHWHILE) -> tuple[Plan, float]:
    """Returns the plan of a training with this number of steps, and the seconds that planning took."""
    [recipe] = load("small.py", [f"steps={steps}"])
    start = time.monotonic()
    return make_plan(recipe, Cluster(detect(), "cpu", 1, 1), Screen(quiet=True), measure=measure), time.monotonic() - start


def no_process(*args: Any) -> None:
    raise AssertionError("surveyed again")


@pytest.mark.system
def test_a_long_training_measures_once_and_a_short_one_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "MIN_SECONDS", 60.0)  # enough time for the survey of the task, which is not tested here
    plan, _ = planned(28)
    assert plan.predicted and not plan.measured
    plan, seconds = planned(10**8)
    points = plan.measured["points"]
    assert len(points) >= 3 and all(p["step_seconds"] > 0 for p in points)
    assert seconds < 0.05 * 10**8 * plan.predicted["step_seconds"]
    monkeypatch.setattr(profiling, "SurveyProcess", no_process)
    second_plan, seconds = planned(10**8)
    assert second_plan.measured == plan.measured and seconds < 1
    assert planned(28)[0].measured == plan.measured, "a short training uses the measurements of a long one"


@pytest.mark.system
def test_measuring_ends_at_its_limit_and_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "MIN_SECONDS", 60.0)
    plan, _ = planned(28)
    monkeypatch.setattr(planning, "MIN_MEASURING_SECONDS", 0.01)
    steps = int(20 * 0.5 / plan.predicted["step_seconds"])  # half a second: not even an interpreter with torch has started
    plan, seconds = planned(steps)
    assert not plan.measured and seconds < 3
    with monkeypatch.context() as patch:
        patch.setattr(profiling, "SurveyProcess", no_process)
        assert not planned(steps)[0].measured
    assert planned(steps, Measure.ALWAYS)[0].measured, "measuring on request has no limit"


def test_survey_and_measuring_share_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []

    def measure_points(*args: Any) -> list[Any]:
        limits.append(args[-1])
        return []

    monkeypatch.setattr(profiling, "MIN_SECONDS", 60.0)
    monkeypatch.setattr(planning, "measure_points", measure_points)
    plan, seconds = planned(10**8)
    budget = 0.05 * 10**8 * plan.predicted["step_seconds"]
    assert limits[0] is not None and budget - seconds <= limits[0] < budget - 0.5 * seconds, (limits, budget, seconds)


def test_a_training_on_a_cpu_has_the_plan_that_the_plan_command_shows() -> None:
    [recipe] = load("small.py", ["global_batch=16"])
    cluster, screen = Cluster(detect(), "cpu", 1, 1), Screen(quiet=True)
    before = make_plan(recipe, cluster, screen, measure=Measure.IF_WORTHWHILE, survey=False)
    surveyed = make_plan(recipe, cluster, screen)
    after = make_plan(recipe, cluster, screen, measure=Measure.IF_WORTHWHILE, survey=False)
    assert not before.predicted and surveyed.predicted == after.predicted != {}
    assert [(plan.micro_batch, plan.accumulation) for plan in (before, surveyed, after)] == [(16, 1)] * 3


CRASHES = ("return F.cross_entropy(model(x), y)", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")


def test_after_a_crash_of_the_survey_the_plan_follows_from_the_models_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "MAX_PARAMETERS_WITH_VALUES", 0)  # without a second survey with real values
    write_task(change=CRASHES)
    [recipe] = load("small.py", [])
    plan = make_plan(recipe, Cluster(parse("1xT4"), "cuda", 1, 1), Screen(quiet=True))
    assert "could not be traced: the process that traced it died of SIGSEGV; the memory counts parameters" in plan.reasons["predicted"]
    assert "its state alone needs" in plan.reasons["strategy"] and not plan.predicted


class _BusyProcess(survey_process.SurveyProcess):
    """Runs `code` instead of a survey."""

    def __init__(self, code: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", code])


def test_a_survey_is_limited_by_cpu_time_and_much_later_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey_process, "WORK_LIMIT_SECONDS", 0.5)
    with pytest.raises(Problem, match=r"longer than .* s: --planner off"):
        profiling.ended_in_time(_BusyProcess("while True: pass"), None)
    assert profiling.ended_in_time(_BusyProcess("import time; time.sleep(1.5)"), None), "a process that only waits uses no CPU time"
    monkeypatch.setattr(survey_process, "WALL_LIMIT_SECONDS", 1.0)
    with pytest.raises(Problem, match="took longer than 1 s"):
        profiling.ended_in_time(_BusyProcess("import time; time.sleep(60)"), None)
