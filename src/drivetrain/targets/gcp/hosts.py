"""How ssh reaches the machines. Pure, but for the paths of the deployment's folder."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from drivetrain.targets.gcp.deployment import Deployment
from drivetrain.targets.gcp.machines import Machine
from drivetrain.targets.gcp.settings import SSH_USER
from drivetrain.targets.host.connection import SshHost


@dataclass(frozen=True)
class GcpHost(SshHost):
    """A machine of Google Cloud."""

    label: str = ""

    @property
    def name(self) -> str:
        return self.label


def host_of(machine: Machine, deployment: Deployment, python: str | None, is_direct: bool) -> GcpHost:
    """Returns the machine as ssh reaches it: directly, or through Google's Identity-Aware Proxy, which needs no open port."""
    options = [
        "-i", _path(deployment.key), "-o", "IdentitiesOnly=yes", "-o", f'UserKnownHostsFile="{_path(deployment.known_hosts)}"',
        "-o", "StrictHostKeyChecking=accept-new", "-o", f"HostKeyAlias=drivetrain-{machine.id}",
    ]  # fmt: skip
    if not is_direct:
        options += ["-o", f"ProxyCommand={shlex.join(tunnel_words(machine, deployment.project))}"]
    address = machine.address if is_direct else machine.name
    return GcpHost(python, f"{SSH_USER}@{address}", tuple(options), machine.name)


def hosts_of(machines: Sequence[Machine], deployment: Deployment, python: str | None, is_direct: bool) -> list[SshHost]:
    return [host_of(machine, deployment, python, is_direct) for machine in machines]


def tunnel_words(machine: Machine, project: str) -> list[str]:
    words = ["gcloud", "compute", "start-iap-tunnel", machine.name, "22", "--listen-on-stdin", f"--zone={machine.zone}"]
    return [*words, f"--project={project}", "--verbosity=error"]


def _path(path: object) -> str:
    return str(path).replace("%", "%%")  # ssh replaces % and a letter
