"""Two hosts, each with its own command: when one dies or its cable is cut, the run continues on the other and later on both.

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
from tests.command import COMMAND, TASK, environment, run_ok, write_task
from tests.sample_tasks import rows
from tests.waiting import Stopwatch, wait_until

SLOW = ("return F.cross", "import time; time.sleep(0.05 * model.training)\n        return F.cross")
STEPS = "steps=260"
MAX_DETECTION_SECONDS = 15.0


@pytest.fixture
def two_hosts() -> Iterator[list[Host]]:
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
        """Kills the command with SIGKILL, and its workers too if `workers` is true."""
        command = psutil.Process(self.process.pid)
        children: list[Any] = command.children(recursive=True) if workers else []
        for process in [command, *children]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


def start(host: Host) -> Agent:
    where = "10.77.0.11:29500"
    words = ["small.py", STEPS, "save_every=10", "plan.threads=1", "plan.compile=off", "--nodes", "1:2", "--rendezvous", where]
    return Agent(host, "train", *words, "--name", "both")


def write_slow_task() -> None:
    """Writes a task with slow steps; without dropout, whose masks depend on the number of processes."""
    write_task(change=SLOW, text=TASK.replace("nn.Dropout(0.2)", "nn.Identity()"))


def events(kind: str) -> list[dict[str, Any]]:
    return [event for event in Run("runs/both").events() if event["event"] == kind]


def seconds_until(description: str, condition: Callable[[], Any], seconds: float = 240) -> float:
    """Waits until the condition is true; returns the seconds it took, without steal time."""
    stopwatch = Stopwatch()
    try:
        wait_until(condition, description, seconds)
    except AssertionError as error:
        logs = "\n".join(f"--- {path.stem}\n{path.read_text()}" for path in sorted(Path().glob("host*.log")))
        raise AssertionError(f"{error}\n{logs}") from None
    return stopwatch.seconds


def step() -> int:
    return max((row["step"] for row in Run("runs/both").rows()), default=0) if Path("runs/both/metrics.jsonl").exists() else 0


def cause_loss(fault: str, host: Host, second: Agent) -> None:
    if fault == "host":
        second.kill(workers=True)
    else:
        host.cut_cable()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fault", ["host", "cable"])
def test_a_lost_host_costs_seconds_and_comes_back(fault: str, two_hosts: list[Host], folder: Path) -> None:
    write_slow_task()
    run_ok("train", "small.py", STEPS, "plan.threads=1", "plan.compile=off", "--name", "reference", DRIVETRAIN_SAMPLES="1")
    one, two = two_hosts
    first = start(one)
    seconds_until("a host that waits", lambda: "waiting at" in first.output)
    second = start(two)
    try:
        seconds_until("steps of both", lambda: step() >= 15)
        cause_loss(fault, two, second)
        seconds_to_restart = seconds_until("a fresh start", lambda: events("restarted"))
        assert seconds_to_restart < MAX_DETECTION_SECONDS, f"{seconds_to_restart:.1f} s"
        seconds_to_continue = seconds_until("steps of one", lambda: any(e["world_size"] == 1 for e in events("resumed")))
        print(f"{fault}: lost for {seconds_to_restart:.1f} s, on one host {seconds_to_continue:.1f} s later")
        if fault == "cable":
            two.mend_cable()
        else:
            seconds_until("no orphans", lambda: not two.processes(), 20)
            second = start(two)
        seconds_until("steps of both again", lambda: [e["world_size"] for e in events("resumed")][-1] == 2)
        assert first.process.wait(400) == 0, first.output
        assert second.process.wait(120) == 0, second.output
    finally:
        two.mend_cable()
        for agent in (first, second):
            if agent.process.poll() is None:
                agent.kill(workers=True)
    assert compare_samples(Run("runs/reference"), Run("runs/both")) == (0, 0)
    rows_of_both, expected_rows = rows("runs/both"), rows("runs/reference")
    assert [row["step"] for row in rows_of_both] == [row["step"] for row in expected_rows]
    assert [row["train/loss"] for row in rows_of_both] == pytest.approx([row["train/loss"] for row in expected_rows], rel=1e-3)
    assert not one.processes() + two.processes()


@pytest.mark.timeout(1200)
def test_the_leading_host_may_be_restarted(two_hosts: list[Host], folder: Path) -> None:
    write_slow_task()
    one, two = two_hosts
    first = start(one)
    seconds_until("a host that waits", lambda: "waiting at" in first.output)
    second = start(two)
    try:
        seconds_until("steps of both", lambda: step() >= 15)
        first.kill(workers=False)
        seconds_until("a member that looks for its leader", lambda: "reconnecting" in second.output)
        first = start(one)
        assert first.process.wait(400) == 0, first.output
        assert second.process.wait(120) == 0, second.output
    finally:
        for agent in (first, second):
            if agent.process.poll() is None:
                agent.kill(workers=True)
    assert json.loads(Path("runs/both/run.json").read_text())["status"] == "finished"
