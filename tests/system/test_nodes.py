"""Two hosts, each with its own command: one dies, its command dies, the cable is cut; the run shrinks, and grows back."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drivetrain.cli.chaos import compare_samples
from drivetrain.runs import Run
from tests.command import TASK, good, write_task
from tests.samples import rows
from tests.system.hosts import HOSTS, Agent, cut, mend, network, pids

SLOW = ("return F.cross", "import time; time.sleep(0.05 * model.training)\n        return F.cross")
STEPS = "steps=260"
DETECTED = 15.0


@pytest.fixture(scope="module")
def hosts() -> Iterator[None]:
    if shutil.which("ip") is None or subprocess.run(["ip", "netns", "list"], capture_output=True).returncode != 0:
        pytest.skip("needs root, iproute2 and network namespaces")
    with network():
        yield


def start(host: str, port: int) -> Agent:
    where = f"{HOSTS['dt1']}:{port}"
    words = ["small.py", STEPS, "save_every=10", "plan.threads=1", "plan.compile=off", "--nodes", "1:2", "--rendezvous", where]
    return Agent(host, "train", *words, "--name", "both", DRIVETRAIN_SAMPLES="1")


def write() -> None:
    """A task whose steps take their time; without dropout, whose masks another number of processes draws anew."""
    write_task(change=SLOW, text=TASK.replace("nn.Dropout(0.2)", "nn.Identity()"))


def events(kind: str) -> list[dict[str, Any]]:
    return [event for event in Run("runs/both").events() if event["event"] == kind]


def until(what: str, holds: Callable[[], Any], seconds: float = 60) -> float:
    """Wait; gives the seconds it took."""
    begun = time.monotonic()
    while not holds():
        told = "\n".join(f"--- {host}\n{Path(f'{host}.log').read_text()}" for host in HOSTS if Path(f"{host}.log").exists())
        assert time.monotonic() - begun < seconds, f"{what}: not within {seconds:.0f} s\n{told}"
        time.sleep(0.05)
    return time.monotonic() - begun


def step() -> int:
    return max((row["step"] for row in Run("runs/both").rows()), default=0) if Path("runs/both/metrics.jsonl").exists() else 0


def break_it(way: str, second: Agent) -> None:
    if way == "host":
        second.kill(workers=True)
    elif way == "agent":
        second.kill(workers=False)
    else:
        cut("dt2")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", ["host", "agent", "cable"])
def test_a_lost_host_costs_seconds_and_comes_back(way: str, hosts: None, folder: Path) -> None:
    write()
    good("train", "small.py", STEPS, "plan.threads=1", "plan.compile=off", "--name", "whole", DRIVETRAIN_SAMPLES="1")
    port = 29501 + ["host", "agent", "cable"].index(way)
    first = start("dt1", port)
    until("a host that waits", lambda: "waiting at" in first.output)
    second = start("dt2", port)
    try:
        until("steps of both", lambda: step() >= 15)
        break_it(way, second)
        took = until("a fresh start", lambda: events("restarted"), DETECTED + 10)
        assert took < DETECTED, f"{took:.1f} s"
        shrunk = until("steps of one", lambda: any(e["world_size"] == 1 for e in events("resumed")))
        print(f"{way}: lost for {took:.1f} s, on one host {shrunk:.1f} s later")
        if way == "cable":
            mend("dt2")
        else:
            until("no orphans", lambda: not pids("dt2"), 5)
            second = start("dt2", port)
        until("steps of both again", lambda: [e["world_size"] for e in events("resumed")][-1] == 2)
        assert first.process.wait(120) == 0, first.output
        assert second.process.wait(30) == 0, second.output
    finally:
        mend("dt2")
        for agent in (first, second):
            if agent.process.poll() is None:
                agent.kill(workers=True)
    assert compare_samples(Run("runs/whole"), Run("runs/both")) == (0, 0)
    mine, theirs = rows("runs/both"), rows("runs/whole")
    assert [row["step"] for row in mine] == [row["step"] for row in theirs]
    assert [row["train/loss"] for row in mine] == pytest.approx([row["train/loss"] for row in theirs], rel=1e-3)
    assert not [p for host in HOSTS for p in pids(host)]


@pytest.mark.timeout(1200)
def test_the_host_that_leads_may_be_started_again(hosts: None, folder: Path) -> None:
    write()
    first = start("dt1", 29510)
    until("a host that waits", lambda: "waiting at" in first.output)
    second = start("dt2", 29510)
    try:
        until("steps of both", lambda: step() >= 15)
        first.kill(workers=False)
        until("a guest that looks for it", lambda: "looking for it again" in second.output, DETECTED)
        first = start("dt1", 29510)
        assert first.process.wait(120) == 0, first.output
        assert second.process.wait(30) == 0, second.output
    finally:
        for agent in (first, second):
            if agent.process.poll() is None:
                agent.kill(workers=True)
    assert json.loads(Path("runs/both/run.json").read_text())["status"] == "finished"
