"""On a real GPU, planning takes at most 3 s or 5 % of a training, and almost no time when it is repeated."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from drivetrain.hardware import detect
from drivetrain.launch import planning, profiling
from drivetrain.launch.machine import Cluster
from drivetrain.launch.planning import Measure, make_plan
from drivetrain.plan import Plan
from drivetrain.recipe import load
from drivetrain.watch.screen import Screen

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
MODELS = Path(__file__).parent.parent.parent / "benchmarks" / "plan_models.py"


def planned(name: str, steps: int) -> tuple[Plan, float]:
    [recipe] = load(f"{MODELS}:{name}", [f"steps={steps}"])
    start = time.monotonic()
    plan = make_plan(recipe, Cluster(detect(), "cuda", 1, 1), Screen(quiet=True), measure=Measure.IF_WORTHWHILE)
    return plan, time.monotonic() - start


@pytest.mark.parametrize("name", ["Cnn", "VitB"])
def test_the_time_for_planning_is_limited(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _, seconds_of_short_run = planned(name, 10)
    assert seconds_of_short_run < 3.5, f"a short run waited {seconds_of_short_run:.1f} s"
    for _ in range(300):  # the survey of the task continues in another process
        if list(tmp_path.rglob("profile-*")):
            break
        time.sleep(0.2)
    plan, seconds_from_cache = planned(name, 10)
    assert plan.predicted and not plan.measured and seconds_from_cache < 0.5
    steps = int(60 / 0.05 / plan.predicted["step_seconds"])
    plan, seconds = planned(name, steps)
    print(
        f"{name}: {seconds_of_short_run:.1f} s before a short run, {seconds:.1f} s of {0.05 * steps * plan.predicted['step_seconds']:.0f} before a long one"
    )
    assert len(plan.measured["points"]) >= 3 and seconds <= 0.05 * steps * plan.predicted["step_seconds"]
    plan, seconds_from_cache = planned(name, steps)
    assert plan.measured and seconds_from_cache < 0.5


def test_measurements_before_the_time_limit_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(profiling, "MIN_SECONDS", 60.0)
    plan, _ = planned("VitB", 10)
    monkeypatch.setattr(planning, "MIN_MEASURING_SECONDS", 1.0)
    steps = int(2 / 0.05 / plan.predicted["step_seconds"])
    plan, seconds = planned("VitB", steps)
    assert seconds < 3, "2 s, of which a process with CUDA takes most"
    monkeypatch.setattr(profiling, "SurveyProcess", None)
    second_plan, seconds = planned("VitB", steps)
    assert second_plan.measured == plan.measured and seconds < 0.5
