"""How long a training waits for its plan, and what is remembered of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from drivetrain.cli import planning
from drivetrain.hardware import detect
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
