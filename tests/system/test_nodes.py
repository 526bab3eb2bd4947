"""Two hosts, each with its own command: one dies, the cable is cut; the run shrinks, and grows back.

A command that dies without its workers is one of the faults of `chaos --hosts` (test_chaos.py).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from drivetrain.chaos.hosts import Host, hosts
from drivetrain.chaos.report import compare_samples
from drivetrain.outcomes import Problem
from drivetrain.runs import Run
from tests.command import COMMAND, TASK, environment, good, write_task
from tests.patience import Stopwatch, until
from tests.samples import rows

SLOW = ("return F.cross", "import time; time.sleep(0.05 * model.training)\n        return F.cross")
STEPS = "steps=260"
DETECTED = 15.0


@pytest.fixture
def pair() -> Iterator[list[Host]]:
    try:
        with hosts(2) as made:
            yield made
    except Problem as problem:
        pytest.skip(str(problem))


class Agent:
    """The command on one host."""

    def __init__(self, host: Host, *words: str) -> None:
        self.log = Path(f"{host.name}.log")
        with open(self.log, "ab") as log:
            self.process = host.start([*COMMAND, *words], environment(DRIVETRAIN_SAMPLES="1"), log)

    @property
    def output(self) -> str:
        return self.log.read_text()

    def kill(self, workers: bool) -> None:
        """-9 to the command, and first to its workers, if that is asked for."""
        front = psutil.Process(self.process.pid)
        family: list[Any] = front.children(recursive=True) if workers else []
        for process in [front, *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


def start(host: Host) -> Agent:
    where = "10.77.0.11:29500"
    words = ["small.py", STEPS, "save_every=10", "plan.threads=1", "plan.compile=off", "--nodes", "1:2", "--rendezvous", where]
    return Agent(host, "train", *words, "--name", "both")


def write() -> None:
    """A task whose steps take their time; without dropout, whose masks another number of processes draws anew."""
    write_task(change=SLOW, text=TASK.replace("nn.Dropout(0.2)", "nn.Identity()"))


def events(kind: str) -> list[dict[str, Any]]:
    return [event for event in Run("runs/both").events() if event["event"] == kind]


def reached(what: str, holds: Callable[[], Any], seconds: float = 240) -> float:
    """Wait; gives the seconds it took, with all of the machine."""
    watch = Stopwatch()
    try:
        until(holds, what, seconds)
    except AssertionError as never:
        told = "\n".join(f"--- {path.stem}\n{path.read_text()}" for path in sorted(Path().glob("host*.log")))
        raise AssertionError(f"{never}\n{told}") from None
    return watch.seconds


def step() -> int:
    return max((row["step"] for row in Run("runs/both").rows()), default=0) if Path("runs/both/metrics.jsonl").exists() else 0


def break_it(way: str, host: Host, second: Agent) -> None:
    if way == "host":
        second.kill(workers=True)
    else:
        host.cut_cable()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", ["host", "cable"])
def test_a_lost_host_costs_seconds_and_comes_back(way: str, pair: list[Host], folder: Path) -> None:
    write()
    good("train", "small.py", STEPS, "plan.threads=1", "plan.compile=off", "--name", "whole", DRIVETRAIN_SAMPLES="1")
    one, two = pair
    first = start(one)
    reached("a host that waits", lambda: "waiting at" in first.output)
    second = start(two)
    try:
        reached("steps of both", lambda: step() >= 15)
        break_it(way, two, second)
        took = reached("a fresh start", lambda: events("restarted"))
        assert took < DETECTED, f"{took:.1f} s"
        shrunk = reached("steps of one", lambda: any(e["world_size"] == 1 for e in events("resumed")))
        print(f"{way}: lost for {took:.1f} s, on one host {shrunk:.1f} s later")
        if way == "cable":
            two.mend_cable()
        else:
            reached("no orphans", lambda: not two.processes(), 20)
            second = start(two)
        reached("steps of both again", lambda: [e["world_size"] for e in events("resumed")][-1] == 2)
        assert first.process.wait(400) == 0, first.output
        assert second.process.wait(120) == 0, second.output
    finally:
        two.mend_cable()
        for agent in (first, second):
            if agent.process.poll() is None:
                agent.kill(workers=True)
    assert compare_samples(Run("runs/whole"), Run("runs/both")) == (0, 0)
    mine, theirs = rows("runs/both"), rows("runs/whole")
    assert [row["step"] for row in mine] == [row["step"] for row in theirs]
    assert [row["train/loss"] for row in mine] == pytest.approx([row["train/loss"] for row in theirs], rel=1e-3)
    assert not one.processes() + two.processes()


@pytest.mark.timeout(1200)
def test_the_host_that_leads_may_be_started_again(pair: list[Host], folder: Path) -> None:
    write()
    one, two = pair
    first = start(one)
    reached("a host that waits", lambda: "waiting at" in first.output)
    second = start(two)
    try:
        reached("steps of both", lambda: step() >= 15)
        first.kill(workers=False)
        reached("a guest that looks for it", lambda: "reconnecting" in second.output)
        first = start(one)
        assert first.process.wait(400) == 0, first.output
        assert second.process.wait(120) == 0, second.output
    finally:
        for agent in (first, second):
            if agent.process.poll() is None:
                agent.kill(workers=True)
    assert json.loads(Path("runs/both/run.json").read_text())["status"] == "finished"
