"""Waits until new machines can train: it reads their serial consoles, through the installation of the driver and the restart after it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from drivetrain.outcomes import Outcome, Problem
from drivetrain.targets.gcp.cloud import run_program
from drivetrain.targets.gcp.deployment import Deployment
from drivetrain.targets.gcp.failures import explain_cloud
from drivetrain.targets.gcp.machines import Machine, names_text
from drivetrain.targets.host.connection import SshHost
from drivetrain.terminal import one_line

PROGRESS = re.compile(r"^.*?drivetrain: (.*?)\s*$", re.MULTILINE)
"""A line that the machine's start-up script writes."""
NEXT = re.compile(r"--start=(\d+)")
BEGIN, READY, FAILED = "preparing this machine", "ready", "failed: "
IS_READY = "cmp -s /var/lib/drivetrain/ready /proc/sys/kernel/random/boot_id"
"""Whether the start-up script has ended well since the machine's last start."""
POLL_SECONDS = 5.0
LOOK_SECONDS = 60.0
"""Between two questions whether the machines still run, and to a machine whose console says nothing."""
RESTART_SECONDS = 120.0
"""A machine that failed before may have been restarted just now: for so long its console can still end with the old failure."""


@dataclass
class Console:
    """What a machine has written to its serial console."""

    machine: Machine
    position: int = 0
    last: str = "its console is empty so far"
    is_ready: bool = False
    asked: float = field(default_factory=time.monotonic)
    """When the machine itself was asked last."""
    was_read: bool = False
    give_up: float = 0.0
    """From then on a failure counts: at once if it is new, and after the time of a restart if it was there at the first reading."""

    def read(self, deployment: Deployment) -> list[str]:
        """Returns the new progress lines."""
        machine = self.machine
        done = deployment.cloud.gcloud_text(
            "compute", "instances", "get-serial-port-output", machine.name, f"--zone={machine.zone}", f"--start={self.position}"
        )  # fmt: skip
        if done.code:
            problem = explain_cloud("gcloud", done.err, done.code, deployment.project)
            if problem.outcome is Outcome.USAGE:
                raise problem
            return []  # the machine restarts, or the connection broke
        if match := NEXT.search(done.err):
            self.position = int(match[1])
        return self.take(done.out)

    def take(self, text: str) -> list[str]:
        """Returns the progress lines of new text; raises Problem if the machine cannot be prepared."""
        lines = [one_line(line) for line in PROGRESS.findall(text)]
        for line in lines:
            self.last = line
            self.is_ready = line == READY
        is_first, self.was_read = not self.was_read, True
        if lines:
            self.give_up = time.monotonic() + RESTART_SECONDS if is_first else 0.0
        if not self.last.startswith(FAILED):
            return lines
        restart = f"gcloud compute instances reset {self.machine.name} --zone={self.machine.zone}"
        if time.monotonic() >= self.give_up:
            raise Problem(
                f"{self.machine.name} could not be prepared: {self.last.removeprefix(FAILED)}: restart it ({restart}) and repeat `drivetrain up`",
                Outcome.INFRA,
            )
        return [*lines, f"waiting {RESTART_SECONDS:.0f} s for its restart ({restart})"] if lines else []


def wait_until_ready(
    deployment: Deployment, hosts: Sequence[SshHost], machines: Sequence[Machine], minutes: float, show: Callable[[str], None]
) -> None:
    """Returns when all machines can train; raises Problem after so many minutes, with the last line of a console."""
    waiting = {machine.name: (Console(machine), host) for machine, host in zip(machines, hosts, strict=True)}
    deadline, next_look = time.monotonic() + minutes * 60, time.monotonic() + LOOK_SECONDS
    while True:
        for name, (console, host) in list(waiting.items()):
            for line in console.read(deployment):
                show(f"{name}: {line}")
            if _is_due(console) and is_ready(host):
                del waiting[name]
        if not waiting:
            return
        if time.monotonic() > next_look:
            _check_running(deployment, set(waiting))
            next_look = time.monotonic() + LOOK_SECONDS
        if time.monotonic() > deadline:
            name, (console, _) = next(iter(waiting.items()))
            raise Problem(
                f"{name} is not ready after {minutes:g} minutes; its last line: {console.last}: repeat `drivetrain up` to wait on, or `drivetrain down` to remove it",
                Outcome.INFRA,
            )
        time.sleep(POLL_SECONDS)


def _is_due(console: Console) -> bool:
    """Whether to ask the machine itself: when its console says that it is ready, and from time to time."""
    if console.is_ready or time.monotonic() > console.asked + LOOK_SECONDS:
        console.asked = time.monotonic()
        return True
    return False


def is_ready(host: SshHost) -> bool:
    """Asks a machine whether it can train."""
    return run_program([*host.ssh, "--", host.address, IS_READY]).code == 0


def _check_running(deployment: Deployment, names: set[str]) -> None:
    stopped = [machine for machine in deployment.find_machines() if machine.name in names and machine.is_stopped]
    if stopped:
        raise Problem(
            f"{names_text(stopped)} stopped while it was prepared (a spot machine, or its time limit): repeat `drivetrain up`",
            Outcome.INFRA,
        )
