"""What a plan of Terraform would do, from `terraform show -json`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MACHINE = "google_compute_instance"


@dataclass(frozen=True)
class Changes:
    """The resources that a plan touches, by address."""

    created: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    replaced_machines: tuple[str, ...] = ()
    """Machines that it would delete, with their disks."""
    new_machines: tuple[str, ...] = ()
    """Names of the machines that it would make."""

    @property
    def is_empty(self) -> bool:
        return not (self.created or self.changed or self.replaced_machines)


def read_plan(facts: Mapping[str, Any]) -> Changes:
    """Returns what `terraform show -json PLAN` tells."""
    created: list[str] = []
    changed: list[str] = []
    replaced: list[str] = []
    names: list[str] = []
    for entry in facts.get("resource_changes") or []:
        actions: Sequence[str] = entry["change"]["actions"]
        if entry.get("mode") == "data" or actions in (["no-op"], ["read"]):
            continue
        is_machine = entry["type"] == MACHINE
        if "delete" in actions and is_machine:
            replaced.append(entry["address"])
        if actions == ["create"]:
            created.append(entry["address"])
            if is_machine:
                names.append(str((entry["change"].get("after") or {}).get("name", "")))
        else:
            changed.append(entry["address"])
    return Changes(tuple(created), tuple(changed), tuple(replaced), tuple(names))
