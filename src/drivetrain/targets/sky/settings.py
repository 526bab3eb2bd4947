"""What a target of kind `sky` may hold in drivetrain.yaml."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.targets.base import TargetSettings
from drivetrain.targets.layout import DEFAULT_BASE


@dataclass(frozen=True, kw_only=True)
class SkySettings(TargetSettings):
    gpus: str | None = None
    """The GPUs of each machine, as NAME:COUNT, such as A100:8 (`sky gpus list`); without it, a machine without GPU."""
    infra: str | None = None
    """Where, such as aws, gcp/us-central1, runpod; without it, the cheapest cloud that sky may use."""
    instance_type: str | None = None
    """A cloud's type of machine, instead of gpus, cpus and memory."""
    cpus: str | None = None
    """CPU cores of each machine, such as 8 or 8+ (at least 8)."""
    memory: str | None = None
    """Memory of each machine in GB, such as 32 or 32+."""
    spot: bool = False
    """Machines that the cloud may take back; cheaper."""
    disk_gb: int = 100
    """The disk of each machine."""
    image: str | None = None
    """An image of the cloud, or docker:NAME."""
    idle_minutes: int = 10
    """Machines without a run stop after so many minutes."""
    down_when_idle: bool = False
    """Whether idle machines are removed with their disks, instead of stopped. Clouds that cannot stop a machine need it."""
    price: float | None = None
    """US dollars an hour for each machine, if you know it better than sky."""
    program: str = "sky"
    """The `sky` to call, as a name or a path."""
    dir: str = DEFAULT_BASE
    """drivetrain's folder on each machine: code, environments, runs."""
    python: str | None = None
    """A Python there with torch and drivetrain's other packages; without it, an environment is built there once."""
    torch: str = "auto"
    """The build of torch: auto (for the GPU's driver), cpu, or as cu126."""
