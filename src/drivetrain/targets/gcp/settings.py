"""The settings of a target on Google Cloud, and the variables that Terraform gets from them. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from drivetrain.outcomes import Problem
from drivetrain.targets.ssh import HostSettings

SSH_USER = "drivetrain"
IAP_RANGE = "35.235.240.0/20"
"""The addresses from which Google's Identity-Aware Proxy reaches machines."""
MAX_NAME = 18  # Google's names of service accounts are short
LABEL_VALUE = re.compile(r"[a-z](?:[a-z0-9-]{0,16}[a-z0-9])?")
PROJECT = re.compile(r"(?:[a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]")
ZONE = re.compile(r"[a-z]+(?:-[a-z]+)+\d+-[a-z]")
SPECIFIC = {
    "nvidia-l4": {1: "g2-standard-4", 2: "g2-standard-24", 4: "g2-standard-48", 8: "g2-standard-96"},
    "nvidia-tesla-a100": {1: "a2-highgpu-1g", 2: "a2-highgpu-2g", 4: "a2-highgpu-4g", 8: "a2-highgpu-8g", 16: "a2-megagpu-16g"},
    "nvidia-a100-80gb": {1: "a2-ultragpu-1g", 2: "a2-ultragpu-2g", 4: "a2-ultragpu-4g", 8: "a2-ultragpu-8g"},
}
"""The smallest machine type with so many of these GPUs, which are part of the machine type."""
ATTACHED = {
    "nvidia-tesla-t4": {1: "n1-standard-4", 2: "n1-standard-8", 4: "n1-standard-16"},
    "nvidia-tesla-p4": {1: "n1-standard-4", 2: "n1-standard-8", 4: "n1-standard-16"},
    "nvidia-tesla-p100": {1: "n1-standard-8", 2: "n1-standard-16", 4: "n1-standard-32"},
    "nvidia-tesla-v100": {1: "n1-standard-8", 2: "n1-standard-16", 4: "n1-standard-32", 8: "n1-standard-64"},
}
"""A machine type with enough cores for so many of these GPUs, which are attached to it."""


@dataclass(frozen=True, kw_only=True)
class GcpSettings(HostSettings):
    project: str = ""
    """The project's id (default: gcloud's own, gcloud config set project ID)."""
    zone: str = "us-central1-a"
    """Where the machines are; its region is theirs."""
    zones: list[str] = field(default_factory=list)
    """Several zones of a region, instead of zone: the machines are spread over them, where GPUs are scarce."""
    use_gpu: bool = True
    """Machines with GPUs; false: machine_type without any."""
    accelerator_type: str = "nvidia-tesla-t4"
    """nvidia-tesla-t4, -v100, -p100 or -p4 (on n1), nvidia-l4 (on g2), nvidia-tesla-a100 or nvidia-a100-80gb (on a2)."""
    gpus_per_machine: int = 1
    """GPUs of each machine."""
    gpu_machine_type: str = ""
    """The machine type with GPUs (default: the smallest one that has them)."""
    machine_type: str = "e2-medium"
    """The machine type with use_gpu: false."""
    spot: bool = False
    """Spot machines: cheaper, and Google may stop them at any time. The run saves; `up` and `resume` go on."""
    max_cost: float | None = None
    """US dollars: `up` lets Google stop the machines when they have cost so much. Runs save before that."""
    hourly_price: float | None = None
    """US dollars for an hour of one machine, where the list of prices is not yours."""
    idle_minutes: int = 60
    """A machine on which nothing has run for so long stops itself; 0: never."""
    start_minutes: int = 30
    """`up` waits so long for the drivers of new machines."""
    boot_disk_gb: int = 50
    """Size of each machine's disk, which has the code, environments and runs."""
    ssh_source_ranges: list[str] = field(default_factory=list)
    """Networks that may reach port 22, as 203.0.113.7/32; default: only Google's Identity-Aware Proxy, through which ssh then goes."""
    ssh_key: str = ""
    """A private key for ssh, with its public key beside it, as ~/.ssh/id_ed25519 (default: one that `up` makes)."""
    deployment: str = ""
    """The name of these machines in the project, and their label (default: the target's name and yours)."""
    state_bucket: str = ""
    """A bucket for Terraform's state, so that several computers can use the machines, with the same ssh_key (default: the state stays here)."""
    cloud_build_user: str = ""
    """The e-mail address of the account with which you log in, if it may build images with `image build --cloud-build --on TARGET`."""
    budget_amount: int = 0
    """US dollars a month: a budget in Google's billing that warns by mail; needs billing_account."""
    billing_account: str = ""
    """The billing account of the budget, as 012345-567890-ABCDEF."""


def deployment_name(settings: GcpSettings, target: str, user: str) -> str:
    """Returns the name of the machines, which is the value of a label and part of names. Two users of a project have different ones."""
    name = settings.deployment or re.sub(r"[^a-z0-9]+", "-", f"{target}-{user}".lower()).strip("-")[:MAX_NAME].strip("-")
    if not LABEL_VALUE.fullmatch(name):
        raise Problem(
            f"deployment {name!r} is no label of Google Cloud: write `deployment: NAME` in the target, with at most 18 of a-z, 0-9 and -"
        )
    return name


def check_project(name: str) -> str:
    if not name:
        raise Problem("no project of Google Cloud: write `project: ID` in the target, or gcloud config set project ID")
    if not PROJECT.fullmatch(name):
        raise Problem(f"{name[:60]!r} is no id of a project of Google Cloud: correct project: in the target (gcloud projects list)")
    return name


def region_of(zone: str) -> str:
    if not ZONE.fullmatch(zone):
        raise Problem(f"{zone[:60]!r} is no zone: write one as us-central1-a (gcloud compute zones list)")
    return zone.rpartition("-")[0]


def region(settings: GcpSettings) -> str:
    """Returns the region of all machines."""
    zones = settings.zones or [settings.zone]
    for zone in zones[1:]:
        if region_of(zone) != region_of(zones[0]):
            raise Problem(f"zones: {zone} is not in {region_of(zones[0])}, as {zones[0]} is: machines of a target are in one region")
    return region_of(zones[0])


def num_machines(settings: GcpSettings) -> int:
    return settings.nodes or 1


def machine_type(settings: GcpSettings) -> str:
    """Returns the machine type; raises Problem for GPUs that no machine type has."""
    if not settings.use_gpu:
        return settings.machine_type
    by_number = (SPECIFIC | ATTACHED).get(settings.accelerator_type)
    if by_number is None:
        raise Problem(f"there is no accelerator_type {settings.accelerator_type[:60]!r}: one of {', '.join(ATTACHED | SPECIFIC)}")
    if settings.gpus_per_machine not in by_number:
        numbers = ", ".join(map(str, by_number))
        raise Problem(
            f"a machine has {numbers} GPUs of {settings.accelerator_type}, not {settings.gpus_per_machine}: correct gpus_per_machine:"
        )
    return settings.gpu_machine_type or by_number[settings.gpus_per_machine]


def terraform_variables(settings: GcpSettings, project: str, deployment: str, public_key: str, max_minutes: int) -> dict[str, Any]:
    """Returns the content of terraform.tfvars.json."""
    variables: dict[str, Any] = {
        "project_id": project, "region": region(settings), "zone": (settings.zones or [settings.zone])[0], "zones": settings.zones, "num_workers": num_machines(settings) - 1,
        "deployment": deployment, "use_gpu": settings.use_gpu, "accelerator_type": settings.accelerator_type, "gpus_per_machine": settings.gpus_per_machine,
        "spot": settings.spot, "max_run_minutes": max_minutes, "idle_minutes": settings.idle_minutes, "boot_disk_gb": settings.boot_disk_gb,
        "ssh_user": SSH_USER, "ssh_public_key": public_key, "ssh_source_ranges": settings.ssh_source_ranges or [IAP_RANGE],
    }  # fmt: skip
    variables["gpu_machine_type" if settings.use_gpu else "machine_type"] = machine_type(settings)
    if settings.cloud_build_user:
        variables["cloud_build_user"] = settings.cloud_build_user
    if settings.budget_amount:
        variables |= {"budget_amount": settings.budget_amount, "billing_account": settings.billing_account}
    return variables
