"""A training over several hosts that are lost on the way, one after another, and come back."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from drivetrain.chaos.hosts import Host
from drivetrain.outcomes import Outcome, Problem
from drivetrain.runs import Run

KINDS = ("host", "agent", "cut")
PORT = 29500
PATIENCE = 180.0  # seconds without anything new from the run


class Outage(NamedTuple):
    kind: str
    step: int
    host: int

    def __str__(self) -> str:
        return f"{self.kind}@step:{self.step}:host={self.host}"


def read(text: str, count: int) -> Outage:
    match = re.fullmatch(rf"({'|'.join(KINDS)})@step:(\d+):host=(\d+)", text)
    if match is None or not 2 <= int(match[3]) <= count:
        raise Problem(f"{text}: with --hosts write FAULT@step:STEP:host=H, with a fault of {', '.join(KINDS)} and a host from 2 to {count}")
    return Outage(match[1], int(match[2]), int(match[3]))


def draw(seed: int, faults: int, first: int, steps: int, count: int, kinds: list[str]) -> list[Outage]:
    """All kinds in turn, spread over the steps from the first checkpoint on; any host but the one that leads."""
    rng = random.Random(seed)
    span = (steps - first) / (faults + 1)
    if span < 1:
        raise Problem(f"--faults {faults}: too many for {steps} steps; raise --steps")
    dealt = [kinds[i % len(kinds)] for i in range(faults)]
    rng.shuffle(dealt)
    return [Outage(kind, first + int(span * (i + rng.random())), rng.randint(2, count)) for i, kind in enumerate(dealt)]


class Outages:
    """The same command on every host, and what is done to them."""

    def __init__(
        self, hosts: list[Host], procs: int, command: list[str], run: Run, environment: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self.hosts, self.full, self.run, self.environment, self.say = hosts, procs * len(hosts), run, environment, say
        self.words = [*command, "--nodes", f"1:{len(hosts)}", "--rendezvous", f"{hosts[0].address}:{PORT}"]
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def train(self, outages: list[Outage]) -> None:
        """To the end, which each host's command must reach well."""
        for host in self.hosts:
            self._start(host)
        for outage in outages:
            self._until(f"step {outage.step} on all hosts", partial(self._reached, outage.step))
            if self._finished():
                break
            self._lose(outage)
        self._until("the end of the run", self._finished)
        for host in self.hosts:
            if host is not self.hosts[0] and not self._together():
                host.kill()  # the run came to its end before this one was back
                continue
            try:
                code = self.started[host.name].wait(PATIENCE)
            except subprocess.TimeoutExpired:
                raise self._failure(f"{host.name} does not end") from None
            if code != 0:
                raise self._failure(f"the command on {host.name} ended with {code}")

    def _lose(self, outage: Outage) -> None:
        host, command = self.hosts[outage.host - 1], self.started[f"host{outage.host}"]
        stepped = self._count("stepped")
        self.run.log_event("injected", fault=str(outage))
        if outage.kind == "cut":
            host.cut()
        elif outage.kind == "host":
            host.kill()
        else:
            command.kill()
        self._until(f"the others to go on without {host.name}", lambda: self._count("stepped") > stepped and not self._together())
        self.say(f"{outage}: the others go on; {host.name} comes back")
        if outage.kind == "cut":
            host.mend()
        else:
            command.wait()
            if left := host.processes():
                raise Problem(f"{outage}: processes were left on {host.name}: {left}", Outcome.INFRA)
            self._start(host)

    def _start(self, host: Host) -> None:
        with open(self._log(host), "ab") as log:
            self.started[host.name] = host.start([sys.executable, "-P", "-m", "drivetrain", *self.words], self.environment, log)

    def _log(self, host: Host) -> Path:
        return self.run.path.parent / f"{host.name}.log"

    # --- what the run tells ---

    def _count(self, kind: str) -> int:
        return sum(event["event"] == kind for event in self.run.events()) if self.run.events_path.exists() else 0

    def _together(self) -> bool:
        """Whether all hosts take part."""
        if not self.run.events_path.exists():
            return False
        sizes = [event["world_size"] for event in self.run.events() if event["event"] in ("started", "resumed")]
        return sizes[-1:] == [self.full]

    def _reached(self, step: int) -> bool:
        return self._together() and self.run.last_row().get("step", 0) >= step

    def _finished(self) -> bool:
        return self._count("finished") > 0

    def _until(self, what: str, holds: Callable[[], bool]) -> None:
        news, heard = self._news(), time.monotonic()
        while not holds() and not self._finished():
            lead = self.started[self.hosts[0].name]
            if lead.poll() not in (None, 0):
                raise self._failure(f"the command on {self.hosts[0].name} ended with {lead.returncode}")
            if (latest := self._news()) != news:
                news, heard = latest, time.monotonic()
            elif time.monotonic() - heard > PATIENCE:
                raise self._failure(f"waited {PATIENCE:.0f} s for {what}")
            time.sleep(0.05)

    def _news(self) -> list[int]:
        """What changes when the run gets on."""
        return [path.stat().st_size if path.exists() else 0 for path in (self.run.events_path, self.run.metrics_path)]

    def _failure(self, what: str) -> Problem:
        ends = {host.name: "\n".join(self._log(host).read_text(errors="replace").splitlines()[-15:]) for host in self.hosts}
        return Problem(f"{what}\n" + "\n".join(f"--- {name}\n{text}" for name, text in ends.items()), Outcome.INFRA)
