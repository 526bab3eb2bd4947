"""Machines, from what gcloud prints about them. Pure."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

LABEL = "drivetrain"
"""The label of every resource that drivetrain makes; its value is the deployment's name."""
WORKER = re.compile(r"dt-worker(?:-(\d+))?(?:-|$)")
ON, COMING = ("RUNNING",), ("PROVISIONING", "STAGING", "REPAIRING", "PENDING")


@dataclass(frozen=True)
class Machine:
    name: str
    id: str
    """Google's number of it, which another machine of the same name does not have."""
    zone: str
    status: str = "RUNNING"
    address: str = ""
    """Its external address; "" while it is stopped."""
    internal: str = ""
    is_spot: bool = False
    started: float | None = None
    """The time of its last start, in seconds since 1970."""
    ends: float | None = None
    """The time at which Google stops it."""

    @property
    def is_running(self) -> bool:
        return self.status in ON

    @property
    def is_stopped(self) -> bool:
        return self.status not in (*ON, *COMING)


def read_machine(row: Mapping[str, Any]) -> Machine:
    """Returns a machine from an entry of `gcloud compute instances list --format=json`."""
    networks = row.get("networkInterfaces") or [{}]
    access = networks[0].get("accessConfigs") or [{}]
    scheduling = row.get("scheduling") or {}
    ends = (row.get("resourceStatus") or {}).get("scheduling", {}).get("terminationTimestamp")
    return Machine(
        name=str(row["name"]), id=str(row.get("id", "")), zone=str(row.get("zone", "")).rpartition("/")[2], status=str(row.get("status", "")),
        address=str(access[0].get("natIP", "")), internal=str(networks[0].get("networkIP", "")),
        is_spot=scheduling.get("provisioningModel") == "SPOT" or bool(scheduling.get("preemptible")),
        started=read_time(row.get("lastStartTimestamp")), ends=read_time(ends),
    )  # fmt: skip


def read_time(text: object) -> float | None:
    """Returns a time of Google's in seconds since 1970; None for a time that is not there."""
    return datetime.fromisoformat(str(text)).timestamp() if text else None


def read_machines(rows: Sequence[Mapping[str, Any]]) -> list[Machine]:
    """Returns the machines, the master first and the workers by number."""
    return sorted((read_machine(row) for row in rows), key=lambda machine: _order(machine.name))


def _order(name: str) -> tuple[bool, int, str]:
    number = WORKER.match(name)
    return (not name.startswith("dt-master"), int(number[1] or 1) if number else 0, name)


def to_facts(machines: Sequence[Machine]) -> list[dict[str, Any]]:
    return [asdict(machine) for machine in machines]


def from_facts(facts: Sequence[Mapping[str, Any]]) -> list[Machine]:
    return [Machine(**entry) for entry in facts]


def seconds_left(machines: Sequence[Machine]) -> float | None:
    """Returns the time until Google stops the first of the machines; None if it stops none."""
    ends = [machine.ends for machine in machines if machine.ends is not None]
    return min(ends) - time.time() if ends else None


def names_text(machines: Sequence[Machine]) -> str:
    """Returns the machines' names, for a message."""
    names = [machine.name for machine in machines]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
