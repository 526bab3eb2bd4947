"""How long a training waits for its plan, and what is remembered of it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from drivetrain.hardware import detect
from drivetrain.hardware.described import parse
from drivetrain.launch import planning
from drivetrain.outcomes import Problem
from drivetrain.plan import Plan
from drivetrain.recipe import load
from drivetrain.watch.screen import Screen
from tests.command import write_task


@pytest.fixture(autouse=True)
def _own_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    write_task()


def planned(steps: int, measure: bool | None = None) -> tuple[Plan, float]:
    """The plan of a training of so many steps, and the seconds that it took."""
    [recipe] = load("small.py", [f"steps={steps}"])
    place = planning.Place(detect(), "cpu", 1, 1, 1)
    begun = time.monotonic()
    return planning.plan_for(recipe, place, Screen(quiet=True), measure=measure), time.monotonic() - begun


def no_child(*args: Any) -> None:
    raise AssertionError("looked at again")


def test_a_long_training_measures_once_and_a_short_one_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "LEAST", 60.0)  # the look at the task is not what is timed here
    plan, _ = planned(28)
    assert plan.predicted and not plan.measured
    plan, seconds = planned(10**8)
    points = plan.measured["points"]
    assert len(points) >= 3 and all(p["step_seconds"] > 0 for p in points)
    assert seconds < 0.05 * 10**8 * plan.predicted["step_seconds"]
    monkeypatch.setattr(planning, "_Child", no_child)
    again, seconds = planned(10**8)
    assert again.measured == plan.measured and seconds < 1
    assert planned(28)[0].measured == plan.measured, "what a long one measured serves a short one"


def test_measuring_ends_at_its_limit_and_is_not_tried_again_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "LEAST", 60.0)
    plan, _ = planned(28)
    monkeypatch.setattr(planning, "PROBES", 0.01)
    steps = int(20 * 0.5 / plan.predicted["step_seconds"])  # half a second: not even an interpreter with torch has started
    plan, seconds = planned(steps)
    assert not plan.measured and seconds < 3
    with monkeypatch.context() as patch:
        patch.setattr(planning, "_Child", no_child)
        assert not planned(steps)[0].measured
    assert planned(steps, measure=True)[0].measured, "asked for, it takes the time that it takes"


def test_looking_and_measuring_share_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float | None] = []

    def measured(*args: Any) -> list[Any]:
        asked.append(args[-1])
        return []

    monkeypatch.setattr(planning, "LEAST", 60.0)
    monkeypatch.setattr(planning, "measured", measured)
    plan, seconds = planned(10**8)
    whole = 0.05 * 10**8 * plan.predicted["step_seconds"]
    assert asked[0] is not None and whole - seconds <= asked[0] < whole - 0.5 * seconds, (asked, whole, seconds)


def test_a_training_on_a_cpu_plans_as_plan_says() -> None:
    [recipe] = load("small.py", ["global_batch=16"])
    place = planning.Place(detect(), "cpu", 1, 1, 1)
    unseen = planning.plan_for(recipe, place, Screen(quiet=True), measure=None, look=False)
    looked = planning.plan_for(recipe, place, Screen(quiet=True))
    again = planning.plan_for(recipe, place, Screen(quiet=True), measure=None, look=False)
    assert not unseen.predicted and looked.predicted == again.predicted != {}
    assert (
        (16, 1)
        == (unseen.micro_batch, unseen.accumulation)
        == (looked.micro_batch, looked.accumulation)
        == (again.micro_batch, again.accumulation)
    )


DIES = ("return F.cross_entropy(model(x), y)", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")


def test_a_crash_of_the_look_at_a_task_leaves_a_plan_by_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "REAL_LIMIT", 0)  # one crash suffices here
    write_task(change=DIES)
    [recipe] = load("small.py", [])
    place = planning.Place(parse("1xT4"), "cuda", 1, 1, 1)
    plan = planning.plan_for(recipe, place, Screen(quiet=True))
    assert "could not be traced: the process that looked at it died of SIGSEGV; bounded by its sizes" in plan.reasons["predicted"]
    assert "its state alone needs" in plan.reasons["strategy"] and not plan.predicted


class _Busy:
    """A child of which only its process matters."""

    def __init__(self, code: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", code])

    wait, stop, work_seconds = planning._Child.wait, planning._Child.stop, planning._Child.work_seconds


def test_work_and_not_the_clock_tells_that_a_task_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "WORK_LIMIT", 0.5)
    with pytest.raises(Problem, match=r"longer than .* s to look at: --planner off"):
        planning._ended(_Busy("while True: pass"), None)  # type: ignore[arg-type]
    assert planning._ended(_Busy("import time; time.sleep(1.5)"), None), "waiting for a busy machine is no work"  # type: ignore[arg-type]
    monkeypatch.setattr(planning, "WALL_LIMIT", 1.0)
    with pytest.raises(Problem, match="to look at"):
        planning._ended(_Busy("import time; time.sleep(60)"), None)  # type: ignore[arg-type]
