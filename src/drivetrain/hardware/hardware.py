"""Facts about a machine: `Hardware` and its `Gpu`s."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from drivetrain.hardware.units import format_gib

ASSUMED_NETWORK_GBPS = 25.0  # between machines, if the description does not state a network
UNKNOWN_CAPABILITY = (0, 0)


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    """UNKNOWN_CAPABILITY if a described GPU's name does not determine it."""
    uuid: str = ""
    free_bytes: int = 0
    power_limit_watts: float = 0.0
    mig: bool = False
    """Whether it is a MIG slice of a GPU."""


@dataclass(frozen=True)
class Hardware:
    cpu_cores: int
    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()
    gpu_note: str = ""
    """Why there is no GPU, or what is unusual about the GPUs."""
    driver: str = ""
    driver_cuda: tuple[int, int] = (0, 0)
    nodes: int = 1
    network_gbps: float = 0.0
    """Between machines; 0 if not stated."""
    described: str = ""
    """The text that describes the machine; empty for this machine."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def sentence(self) -> str:
        cores = f"{self.cpu_cores} CPU core{'s' if self.cpu_cores != 1 else ''}, {format_gib(self.memory_bytes)} RAM"
        if not self.gpus:
            return f"{cores}, no GPU ({self.gpu_note})"
        smallest = min(self.gpus, key=lambda g: g.memory_bytes)
        unequal = " (the smallest of unequal ones)" if len({(g.name, g.memory_bytes) for g in self.gpus}) > 1 else ""
        machines = f"{self.nodes} machines of " if self.nodes > 1 else ""
        return f"{machines}{len(self.gpus)} x {smallest.name} {format_gib(smallest.memory_bytes)}{unequal}, {cores}"
