"""The task file for `sky launch`, and the names of clusters and machines (pure)."""

from __future__ import annotations

import hashlib
import math
import platform
import re
from pathlib import Path
from typing import Any

import yaml

from drivetrain.targets.sky.settings import SkySettings

PREFIX = "drivetrain-"
"""Begins the name of every cluster of drivetrain."""
MAX_TARGET_NAME = 12
ADDRESSES = "~/.drivetrain-addresses"
"""The file on each machine with the launch it belongs to, then the machines' addresses in their own network, the first one's first."""
LAUNCH_VARIABLE = "DRIVETRAIN_LAUNCH"
SETUP = """\
set -e
as=; if [ "$(id -u)" != 0 ]; then as=sudo; fi
command -v rsync >/dev/null || { $as apt-get update -qq; $as apt-get install -y -qq rsync; }
has_python() {
  for p in python3.14 python3.13 python3.12 python3.11 python3; do
    if "$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then return 0; fi
  done
  return 1
}
if ! has_python; then
  uv="$HOME/.local/bin/uv"
  "$uv" python install 3.12
  $as ln -sf "$("$uv" python find 3.12)" /usr/local/bin/python3.12
fi
has_python
printf '%s\\n' "$DRIVETRAIN_LAUNCH" "$SKYPILOT_SETUP_NODE_IPS" > ~/.drivetrain-addresses.new
mv ~/.drivetrain-addresses.new ~/.drivetrain-addresses
"""
"""Brings rsync and Python 3.11 where an image lacks them: SkyPilot has installed uv there. Ends with the file that drivetrain waits for."""
RUN = """\
# The machine is not idle while a run of drivetrain is active on it. Until one has begun: for 20 minutes.
left=40
while [ "$left" -gt 0 ]; do
  sleep 30
  if grep -qs DRIVETRAIN_JOB= /proc/[0-9]*/environ; then left=2; else left=$((left - 1)); fi
done
"""
"""SkyPilot counts a machine as idle when no job of its own queue runs. This job lasts as long as drivetrain's processes."""


def task_file(settings: SkySettings, nodes: int, max_hourly: float | None = None) -> str:
    """Returns the task file. `max_hourly`: what the machines together may cost in an hour; sky takes no dearer ones."""
    resources: dict[str, Any] = {
        "infra": settings.infra, "instance_type": settings.instance_type, "accelerators": settings.gpus, "cpus": settings.cpus,
        "memory": settings.memory, "image_id": settings.image,
    }  # fmt: skip
    resources = {key: value for key, value in resources.items() if value is not None}
    resources |= {"use_spot": settings.spot, "disk_size": settings.disk_gb}
    resources["autostop"] = {"idle_minutes": settings.idle_minutes, "down": settings.down_when_idle, "wait_for": "jobs"}
    if max_hourly is not None:
        resources["max_hourly_cost"] = math.ceil(max_hourly / nodes * 100 + 1) / 100  # sky prints prices rounded to a cent
    task = {"name": "drivetrain", "num_nodes": nodes, "resources": resources, "setup": SETUP, "run": RUN}
    return _dump(task)


def _dump(task: dict[str, Any]) -> str:
    class Dumper(yaml.SafeDumper):
        """Writes texts of several lines as blocks."""

    def represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, represent)
    return yaml.dump(task, Dumper=Dumper, sort_keys=False, width=200)


def cluster_prefix(target: str) -> str:
    """Returns how the clusters begin that this target starts for this folder."""
    plain = re.sub(r"[^a-z0-9]+", "-", target.lower()).strip("-")[:MAX_TARGET_NAME].strip("-")
    digest = hashlib.sha256(f"{platform.node()}\0{Path.cwd()}\0{target}".encode(errors="surrogateescape")).hexdigest()[:8]
    return f"{PREFIX}{plain or 'target'}-{digest}"


def cluster_name(target: str, nodes: int) -> str:
    """Returns the cluster of a target's runs with so many machines."""
    return cluster_prefix(target) + (f"-x{nodes}" if nodes > 1 else "")


def is_of_target(cluster: str, target: str) -> bool:
    """Whether this target starts clusters of this name for this folder."""
    return re.fullmatch(rf"{re.escape(cluster_prefix(target))}(-x\d+)?", cluster) is not None


def host_names(cluster: str, nodes: int) -> list[str]:
    """Returns the names that SkyPilot gives the machines in its SSH configuration."""
    return [cluster, *(f"{cluster}-worker{number}" for number in range(1, nodes))]
