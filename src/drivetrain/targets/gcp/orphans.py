"""Finds resources with drivetrain's label that Terraform's state does not know, as a crash of `up` leaves them, and deletes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain.outcomes import Problem
from drivetrain.targets.base import Orphan
from drivetrain.targets.gcp.deployment import Deployment
from drivetrain.targets.gcp.failures import ApiOff, plain
from drivetrain.targets.gcp.machines import LABEL

BY_LABEL = f"labels.{LABEL}:*"
BY_NOTE = f"description~^{LABEL}="
NOTE = re.compile(rf"{LABEL}=([a-z0-9-]+)")


@dataclass(frozen=True)
class Kind:
    """A kind of resource, as gcloud lists and deletes it."""

    noun: str
    words: tuple[str, ...]
    """gcloud's words before list and delete."""
    filter: str
    """Resources without labels have the deployment's name in their description."""
    place: str = ""
    """The flag that says where it is: zone, region or location."""

    def location(self, row: Mapping[str, Any]) -> str:
        if self.place == "location":  # projects/P/locations/L/repositories/NAME
            parts = str(row.get("name", "")).split("/")
            return parts[3] if len(parts) > 3 else ""
        return str(row.get(self.place, "")).rpartition("/")[2] if self.place else ""


KINDS = (
    Kind("machine", ("compute", "instances"), BY_LABEL, "zone"),
    Kind("disk", ("compute", "disks"), BY_LABEL, "zone"),
    Kind("address", ("compute", "addresses"), BY_LABEL, "region"),
    Kind("firewall rule", ("compute", "firewall-rules"), BY_NOTE),
    Kind("subnetwork", ("compute", "networks", "subnets"), BY_NOTE, "region"),
    Kind("network", ("compute", "networks"), BY_NOTE),
    Kind("service account", ("iam", "service-accounts"), BY_NOTE),
    Kind("bucket", ("storage", "buckets"), BY_LABEL),
    Kind("image repository", ("artifacts", "repositories"), BY_LABEL, "location"),
)
"""In the order in which they can be deleted."""


def find_orphans(deployment: Deployment) -> Iterator[Orphan]:
    """Yields what has this deployment's name, but is not in Terraform's state."""
    known = deployment.known_to_terraform() or set()
    rows = [(kind, row) for kind in KINDS for row in _list(deployment, kind)]
    disks_of_machines = {
        short_name(disk.get("source", "")) for kind, row in rows if kind.noun == "machine" for disk in row.get("disks") or []
    }
    for kind, row in rows:
        name = name_of(kind, row)
        is_part = kind.noun == "disk" and name in disks_of_machines  # it goes with its machine
        if owner_of(row) == deployment.name and not is_part and name not in known:
            yield Orphan(kind.noun, name, tuple(delete_words(kind, row)))


def _list(deployment: Deployment, kind: Kind) -> list[dict[str, Any]]:
    try:
        return deployment.cloud.gcloud(*kind.words, "list", f"--filter={kind.filter}") or []
    except ApiOff:  # `up` was stopped before it was on: there are none
        return []


def owner_of(row: Mapping[str, Any]) -> str:
    """Returns the deployment that a resource belongs to."""
    label = (row.get("labels") or {}).get(LABEL)
    note = NOTE.fullmatch(str(row.get("description", "")))
    return str(label) if label else note[1] if note else ""


def short_name(text: object) -> str:
    return str(text).rstrip("/").rpartition("/")[2]


def name_of(kind: Kind, row: Mapping[str, Any]) -> str:
    return str(row["email"]) if "email" in row else short_name(row["name"])


def delete_words(kind: Kind, row: Mapping[str, Any]) -> list[str]:
    """Returns gcloud's words that delete a resource."""
    name, place = name_of(kind, row), kind.location(row)
    target = f"gs://{name}" if kind.noun == "bucket" else name
    return [*kind.words, "delete", target, *([f"--{kind.place}={place}"] if place else [])]


def delete_orphans(deployment: Deployment, orphans: list[Orphan], notice: Callable[[str], None]) -> int:
    """Deletes the resources; goes on after one that cannot be deleted. Returns how many are left."""
    num_left = 0
    for orphan in orphans:
        try:
            deployment.cloud.gcloud(*orphan.delete_words)
            notice(f"deleted {orphan}")
        except Problem as problem:
            num_left += 1
            is_full = orphan.noun == "bucket" and "empty" in plain(str(problem))
            fix = f"it has files: gcloud storage rm -r gs://{orphan.name} deletes it with them" if is_full else str(problem)
            notice(f"{orphan} is left: {fix}")
    return num_left
