"""`drivetrain chaos`: many faults during a small training change nothing in its result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain.chaos import outages
from drivetrain.chaos.experiment import USUAL_KINDS, draw_faults
from drivetrain.chaos.report import show
from drivetrain.engine.faults.injection import read_fault
from drivetrain.outcomes import Problem
from drivetrain.watch.screen import Screen
from tests.command import expect_error, run_drivetrain, run_ok, write_task


def test_faults_are_drawn_from_a_seed() -> None:
    faults = draw_faults(1, 30, 100, 4, USUAL_KINDS)
    assert faults == draw_faults(1, 30, 100, 4, USUAL_KINDS) != draw_faults(2, 30, 100, 4, USUAL_KINDS)
    assert {fault.partition("@")[0] for fault in faults} == set(USUAL_KINDS)
    assert len({fault.split(":")[1] for fault in faults}) == 30
    with pytest.raises(Problem, match="raise --steps"):
        draw_faults(0, 30, 20, 1, USUAL_KINDS)


def test_outages_are_drawn_from_a_seed_and_spare_the_leader() -> None:
    kinds = list(outages.KINDS)
    drawn = outages.draw_outages(1, 6, 11, 120, 3, kinds)
    assert drawn == outages.draw_outages(1, 6, 11, 120, 3, kinds) != outages.draw_outages(2, 6, 11, 120, 3, kinds)
    assert {outage.kind for outage in drawn} == set(kinds) and {outage.host for outage in drawn} <= {2, 3}
    assert drawn[0].step >= 11 and drawn[-1].step < 120 and sorted(drawn, key=lambda outage: outage.step) == drawn
    assert [outages.read_outage(str(outage), 3) for outage in drawn] == drawn
    with pytest.raises(Problem, match="raise --steps"):
        outages.draw_outages(1, 120, 11, 120, 2, ["cut"])


@pytest.mark.system  # slow
@pytest.mark.timeout(1200)
def test_one_fault_of_each_kind_changes_nothing(folder: Path) -> None:
    write_task()
    output = run_ok(
        "chaos", "small.py", "--procs", "2", "--faults", str(len(USUAL_KINDS)), "--steps", "60", "--keep", "results", seconds=800
    )
    report = json.loads(Path("results/report.json").read_text())
    assert report["struck"] == report["faults"] == len(USUAL_KINDS), output
    assert report["weights_equal"] and report["rows_equal"] and not report["samples_lost"] + report["samples_repeated"]
    assert "passed" in output and "none lost, none repeated" in output


def test_a_disk_full_at_the_last_checkpoint_ends_the_command_and_a_repeat_finishes(folder: Path) -> None:
    write_task(change=("return F.cross", "import time; time.sleep(0.1 * model.training)\n        return F.cross"))
    output = run_ok("chaos", "small.py", "--schedule", "full@save:24:rank=0", "--steps", "24")
    assert "the command ended after full@save:24" in output and "passed" in output


@pytest.mark.parametrize(
    ("fault", "strikes"), [("slow@step:2", True), ("oom@step:2", False), ("slow@step:3", False), ("slow@update:2", False)]
)
def test_a_fault_strikes_at_the_end_of_a_replayed_step(fault: str, strikes: bool) -> None:
    """A CUDA graph replay reaches no observation point inside the step."""
    injector: Any = read_fault(fault, 0)
    injector.action = lambda _: None
    for name in ("step", "take", "taken", "step", "take", "fetched", "taken"):
        injector.reached(name)
    assert injector.is_injected is strikes


def test_a_fault_strikes_inside_an_eager_step() -> None:
    injector: Any = read_fault("slow@step:1", 0)
    injector.action = lambda _: None
    for name in ("step", "take", "fetched", "backward"):
        injector.reached(name)
    assert injector.is_injected


def test_a_task_with_unseeded_randomness_fails(folder: Path) -> None:
    """The comparison can fail: this model is initialised differently at each start."""
    write_task(
        change=("return nn.Sequential(", "import os; torch.manual_seed(int.from_bytes(os.urandom(4)))\n        return nn.Sequential(")
    )
    process = run_drivetrain("chaos", "small.py", "--schedule", "slow@step:3", "--steps", "12")
    assert process.returncode == 1 and "NOT SO: differ" in process.stdout, process.stdout + process.stderr


def test_wrong_flags_are_refused(folder: Path) -> None:
    write_task()
    assert "--kinds flood: there are" in expect_error("chaos", "small.py", "--kinds", "flood")
    assert "--kinds cut: there are die" in expect_error("chaos", "small.py", "--kinds", "cut")
    assert "--kinds die: there are host, agent, cut" in expect_error("chaos", "small.py", "--hosts", "2", "--kinds", "die")
    assert "argument --hosts: 1: write a whole number of 2 to 8" in expect_error("chaos", "small.py", "--hosts", "1")
    assert "a host from 2 to 2" in expect_error("chaos", "small.py", "--hosts", "2", "--schedule", "cut@step:20:host=1")
    assert "write kill@POINT:COUNT" in expect_error("chaos", "small.py", "--schedule", "flood@step:3", "--steps", "12", max_lines=4)


@pytest.mark.parametrize(("difference", "passes"), [(1e-6, True), (130.0, False)])
def test_a_changed_plan_excuses_only_small_differences(difference: float, passes: bool) -> None:
    report: dict[str, Any] = {
        "weights_equal": False, "rows_equal": False, "replanned": True, "resized": False, "losses_apart": difference,
        "samples_lost": 0, "samples_repeated": 0, "processes_left": [], "files_left": [], "seconds": {}, "missed": [],
        "struck": 1, "faults": 1,
    }  # fmt: skip
    assert show(report, Screen(quiet=True)) is passes
