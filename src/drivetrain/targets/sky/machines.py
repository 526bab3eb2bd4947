"""The machines of a cluster, once sky has started them: machines behind SSH."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import ClassVar

from drivetrain.names import private_cache
from drivetrain.outcomes import Outcome, Problem
from drivetrain.targets.host.connection import SshHost
from drivetrain.targets.record import Record
from drivetrain.targets.sky.program import SkyProgram
from drivetrain.targets.sky.settings import SkySettings
from drivetrain.targets.sky.task_file import ADDRESSES
from drivetrain.targets.ssh import SshSettings, SshTarget

SSH_FILES = "~/.sky/generated/ssh"
"""Where SkyPilot writes the SSH configuration of each cluster."""
SETUP_SECONDS = 900.0
WAIT_SECONDS = 3.0


class SkyMachines(SshTarget):
    """The machines of a cluster. Sky's SSH file checks no host keys; here each machine's key is noted at first contact, and must stay the same."""

    kind: ClassVar[str] = "sky machines"

    def __init__(self, name: str, settings: SkySettings, cluster: str, hosts: list[str], leader_address: str | None = None) -> None:
        options = [
            "-F", str(ssh_file(cluster)), "-o", "StrictHostKeyChecking=accept-new", "-o", keys_option(),
            "-o", "LogLevel=ERROR",
        ]  # fmt: skip
        ssh = SshSettings(
            env=settings.env, hosts=hosts, options=options, dir=settings.dir, python=settings.python, torch=settings.torch,
            rendezvous=leader_address or f"ADDRESS-OF-{cluster}",
        )  # fmt: skip
        super().__init__(name, ssh)
        self.cluster, self.sky = cluster, SkyProgram(settings.program)

    def why_gone(self) -> str:
        """Returns why there are no machines that could be reached; "" if there are, or if they are being started."""
        found = self.sky.clusters(self.cluster)
        if not found:
            return f"its machines are gone: the cloud took them back, or they were removed (sky does not know {self.cluster})"
        status, is_unhealthy = found[0].status, found[0].is_unhealthy
        if status in ("STOPPED", "AUTOSTOPPING"):
            return f"its machines are stopped, with their disks ({self.cluster})"
        if status == "INIT" and is_unhealthy:
            return f"some of its machines are gone: the cloud took them back ({self.cluster})"
        return ""

    def is_gone(self, record: Record) -> bool:
        with contextlib.suppress(Problem):  # if sky does not answer, nothing is known
            return bool(self.why_gone())
        return False

    def wait_for_setup(self, launch: str) -> list[str]:
        """Waits until each machine is set up; returns their addresses in their own network, the first one's first."""
        deadline = time.monotonic() + SETUP_SECONDS
        addresses: list[str] = []
        for host in self.hosts():
            while not (lines := self._read_addresses(host)) or lines[0] != launch:
                if time.monotonic() > deadline:
                    log = f"sky logs {self.cluster}"
                    raise Problem(f"{host.name} was not set up within {SETUP_SECONDS / 60:.0f} minutes: `{log}` shows why", Outcome.INFRA)
                time.sleep(WAIT_SECONDS)
            addresses = addresses or lines[1:]
        return addresses

    def _read_addresses(self, host: SshHost) -> list[str]:
        try:
            answer = host.call("execute", words=["cat", ADDRESSES], secrets={})
        except Problem:  # no Python there yet, or the SSH server begins to answer
            return []
        return str(answer["output"]).split()


def ssh_file(cluster: str) -> Path:
    return Path(os.path.expanduser(SSH_FILES)) / cluster


def forget_keys(hosts: list[str]) -> None:
    """Forgets the host keys of machines that were replaced."""
    for host in hosts:
        (_keys_folder() / host).unlink(missing_ok=True)


def _keys_folder() -> Path:
    return private_cache("sky-keys")


def keys_option() -> str:
    """Returns the option with a file of host keys for each machine: behind docker, all machines have the address localhost."""
    return f'UserKnownHostsFile="{str(_keys_folder()).replace("%", "%%")}/%n"'
