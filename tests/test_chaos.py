"""`drivetrain chaos`: many faults on a small task, and nothing comes out otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain.chaos import outages, read
from drivetrain.chaos.report import show
from drivetrain.cli.chaos import USUAL, draw
from drivetrain.outcomes import Problem
from drivetrain.watch.screen import Screen
from tests.command import bad, drivetrain, good, write_task


def test_faults_are_drawn_from_a_seed() -> None:
    faults = draw(1, 30, 100, 4, USUAL)
    assert faults == draw(1, 30, 100, 4, USUAL) != draw(2, 30, 100, 4, USUAL)
    assert {fault.partition("@")[0] for fault in faults} == set(USUAL)
    assert len({fault.split(":")[1] for fault in faults}) == 30
    with pytest.raises(Problem, match="raise --steps"):
        draw(0, 30, 20, 1, USUAL)


def test_hosts_are_lost_in_turn() -> None:
    drawn = outages.draw(1, 6, 11, 120, 3, list(outages.KINDS))
    assert drawn == outages.draw(1, 6, 11, 120, 3, list(outages.KINDS)) != outages.draw(2, 6, 11, 120, 3, list(outages.KINDS))
    assert {one.kind for one in drawn} == set(outages.KINDS) and {one.host for one in drawn} <= {2, 3}, "the first leads"
    assert drawn[0].step >= 11 and drawn[-1].step < 120 and sorted(drawn, key=lambda one: one.step) == drawn
    assert [outages.read(str(one), 3) for one in drawn] == drawn
    with pytest.raises(Problem, match="raise --steps"):
        outages.draw(1, 120, 11, 120, 2, ["cut"])


@pytest.mark.system  # it takes its time
@pytest.mark.timeout(1200)
def test_one_fault_of_each_kind(folder: Path) -> None:
    write_task()
    output = good("chaos", "small.py", "--procs", "2", "--faults", str(len(USUAL)), "--steps", "60", "--keep", "kept", seconds=800)
    report = json.loads(Path("kept/report.json").read_text())
    assert report["struck"] == report["faults"] == len(USUAL), output
    assert report["weights_equal"] and report["rows_equal"] and not report["samples_lost"] + report["samples_repeated"]
    assert "passed" in output and "none lost, none repeated" in output


def test_no_room_for_the_last_checkpoint(folder: Path) -> None:
    """The command ends, and says what to do; repeated, it finishes."""
    write_task(change=("return F.cross", "import time; time.sleep(0.1 * model.training)\n        return F.cross"))
    output = good("chaos", "small.py", "--schedule", "full@save:24:rank=0", "--steps", "24")
    assert "the command ended after full@save:24" in output and "passed" in output


def test_a_step_that_is_replayed_as_a_graph_is_struck_too() -> None:
    """It tells no moment between its beginning and its end."""
    for fault, strikes in (("slow@step:2", True), ("oom@step:2", False), ("slow@step:3", False), ("slow@update:2", False)):
        strike: Any = read(fault, 0)
        strike.act = lambda _: None
        for name in ("step", "take", "taken", "step", "take", "fetched", "taken"):
            strike.moment(name)
        assert strike.struck is strikes, fault
    strike = read("slow@step:1", 0)
    strike.act = lambda _: None
    for name in ("step", "take", "fetched", "backward"):
        strike.moment(name)
    assert strike.struck, "where it can be within, it is"


def test_a_task_that_does_not_repeat_fails(folder: Path) -> None:
    """The comparison can fail: a model that draws anew at each start comes out otherwise."""
    write_task(
        change=("return nn.Sequential(", "import os; torch.manual_seed(int.from_bytes(os.urandom(4)))\n        return nn.Sequential(")
    )
    done = drivetrain("chaos", "small.py", "--schedule", "slow@step:3", "--steps", "12")
    assert done.returncode == 1 and "NOT SO: differ" in done.stdout, done.stdout + done.stderr


def test_mistakes_are_told(folder: Path) -> None:
    write_task()
    assert "--kinds flood: there are" in bad("chaos", "small.py", "--kinds", "flood")
    assert "--kinds cut: there are die" in bad("chaos", "small.py", "--kinds", "cut")
    assert "--kinds die: there are host, agent, cut" in bad("chaos", "small.py", "--hosts", "2", "--kinds", "die")
    assert "argument --hosts: 1: write a whole number of 2 to 8" in bad("chaos", "small.py", "--hosts", "1")
    assert "a host from 2 to 2" in bad("chaos", "small.py", "--hosts", "2", "--schedule", "cut@step:20:host=1")
    assert "write kill@MOMENT:COUNT" in bad("chaos", "small.py", "--schedule", "flood@step:3", "--steps", "12", lines=4)


@pytest.mark.parametrize(("apart", "code"), [(1e-6, 0), (130.0, 1)])
def test_a_plan_that_changed_excuses_small_differences_alone(apart: float, code: int) -> None:
    told: dict[str, Any] = {"weights_equal": False, "rows_equal": False, "replanned": True, "resized": False, "losses_apart": apart}
    told |= {
        "samples_lost": 0,
        "samples_repeated": 0,
        "processes_left": [],
        "files_left": [],
        "seconds": {},
        "missed": [],
        "struck": 1,
        "faults": 1,
    }
    assert show(told, Screen(quiet=True)) == code
