"""A training on several hosts that are lost one after another and come back."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from drivetrain.chaos.hosts import Host
from drivetrain.launch.request import Request
from drivetrain.outcomes import Outcome, Problem
from drivetrain.runs import Run

KINDS = ("host", "agent", "cut")
PORT = 29500
PATIENCE_SECONDS = 180.0  # the experiment fails after this long without progress of the run


class Outage(NamedTuple):
    """The loss of one host, once all hosts have reached a step."""

    kind: str
    step: int
    host: int

    def __str__(self) -> str:
        return f"{self.kind}@step:{self.step}:host={self.host}"


def read_outage(text: str, num_hosts: int) -> Outage:
    match = re.fullmatch(rf"({'|'.join(KINDS)})@step:(\d+):host=(\d+)", text)
    if match is None or not 2 <= int(match[3]) <= num_hosts:
        raise Problem(
            f"{text}: with --hosts write FAULT@step:STEP:host=H, with a fault of {', '.join(KINDS)} and a host from 2 to {num_hosts}"
        )
    return Outage(match[1], int(match[2]), int(match[3]))


def draw_outages(seed: int, count: int, first_step: int, steps: int, num_hosts: int, kinds: list[str]) -> list[Outage]:
    """Draws outages: all kinds equally often, at steps spread from `first_step` to the end, never of host 1, the leader."""
    rng = random.Random(seed)
    span = (steps - first_step) / (count + 1)
    if span < 1:
        raise Problem(f"--faults {count}: too many for {steps} steps; raise --steps")
    drawn_kinds = [kinds[i % len(kinds)] for i in range(count)]
    rng.shuffle(drawn_kinds)
    return [Outage(kind, first_step + int(span * (i + rng.random())), rng.randint(2, num_hosts)) for i, kind in enumerate(drawn_kinds)]


class TrainingOnHosts:
    """Runs the same command on every host, and loses and restores hosts according to the outages."""

    def __init__(
        self, hosts: list[Host], request: Request, run: Run, environment: Mapping[str, str], notify: Callable[[str], None]
    ) -> None:
        self.hosts, self.run, self.environment, self.notify = hosts, run, environment, notify
        self.request = replace(request, nodes=len(hosts), min_nodes=1, rendezvous=f"{hosts[0].address}:{PORT}")
        self.full_world_size = (request.procs or 1) * len(hosts)
        self.commands: dict[str, subprocess.Popen[bytes]] = {}

    def train(self, outages: list[Outage]) -> None:
        """Trains to the end; raises Problem unless every host that still takes part ends with exit code 0."""
        for host in self.hosts:
            self._start(host)
        for outage in outages:
            self._wait_for(f"step {outage.step} on all hosts", partial(self._has_reached, outage.step))
            if self._is_finished():
                break
            self._lose_and_restore(outage)
        self._wait_for("the end of the run", self._is_finished)
        for host in self.hosts:
            command = self.commands[host.name]
            is_back = host is self.hosts[0] or self._all_take_part()
            if not is_back:
                command.terminate()  # it came back after the end of the run, and would wait for a leader
            try:
                code = command.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                raise self._failure(f"{host.name} does not end") from None
            if is_back and code != 0:
                raise self._failure(f"the command on {host.name} ended with {code}")

    def _lose_and_restore(self, outage: Outage) -> None:
        host, command = self.hosts[outage.host - 1], self.commands[f"host{outage.host}"]
        num_first_steps = self._num_events("stepped")
        self.run.log_event("injected", fault=str(outage))
        if outage.kind == "cut":
            host.cut_cable()
        elif outage.kind == "host":
            host.kill()
        else:
            command.kill()
        self._wait_for(
            f"the others to go on without {host.name}",
            lambda: self._num_events("stepped") > num_first_steps and not self._all_take_part(),
        )
        self.notify(f"{outage}: the others go on; {host.name} comes back")
        if outage.kind == "cut":
            host.mend_cable()
        else:
            command.wait()
            if pids := host.processes():
                raise Problem(f"{outage}: processes were left on {host.name}: {pids}", Outcome.INFRA)
            self._start(host)

    def _start(self, host: Host) -> None:
        with open(self._log_path(host), "ab") as log:
            self.commands[host.name] = host.start(
                [sys.executable, "-P", "-m", "drivetrain", *self.request.command()], self.environment, log
            )

    def _log_path(self, host: Host) -> Path:
        return self.run.path.parent / f"{host.name}.log"

    # --- the run's progress, as its files show it ---

    def _num_events(self, kind: str) -> int:
        return sum(event["event"] == kind for event in self.run.events()) if self.run.events_path.exists() else 0

    def _all_take_part(self) -> bool:
        if not self.run.events_path.exists():
            return False
        sizes = [event["world_size"] for event in self.run.events() if event["event"] in ("started", "resumed")]
        return sizes[-1:] == [self.full_world_size]

    def _has_reached(self, step: int) -> bool:
        return self._all_take_part() and self.run.last_row().get("step", 0) >= step

    def _is_finished(self) -> bool:
        return self._num_events("finished") > 0

    def _wait_for(self, description: str, condition: Callable[[], bool]) -> None:
        """Waits for a condition or the end of the run; fails if the leader's command fails or the run makes no progress."""
        sizes, last_progress = self._file_sizes(), time.monotonic()
        while not condition() and not self._is_finished():
            leader = self.commands[self.hosts[0].name]
            if leader.poll() not in (None, 0):
                raise self._failure(f"the command on {self.hosts[0].name} ended with {leader.returncode}")
            if (new_sizes := self._file_sizes()) != sizes:
                sizes, last_progress = new_sizes, time.monotonic()
            elif time.monotonic() - last_progress > PATIENCE_SECONDS:
                raise self._failure(f"waited {PATIENCE_SECONDS:.0f} s for {description}")
            time.sleep(0.05)

    def _file_sizes(self) -> list[int]:
        """Returns the sizes of the files that grow when the run makes progress."""
        return [path.stat().st_size if path.exists() else 0 for path in (self.run.events_path, self.run.metrics_path)]

    def _failure(self, message: str) -> Problem:
        parts = [message]
        for host in self.hosts:
            last_lines = self._log_path(host).read_text(errors="replace").splitlines()[-15:]
            parts += [f"--- {host.name}", "\n".join(last_lines)]
        return Problem("\n".join(parts), Outcome.INFRA)
