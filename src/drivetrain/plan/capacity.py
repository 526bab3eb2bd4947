"""The capacity of a machine: takes `Hardware`, returns the figures that memory and time predictions need."""

from __future__ import annotations

import math
from dataclasses import dataclass

from drivetrain.hardware import ASSUMED_NETWORK_GBPS, Hardware
from drivetrain.hardware.cards import LISTED_SHARE_WITH_ECC, Card, card_of_product, generic_card

CUDA_CONTEXT_BYTES = 600 << 20  # CUDA and its libraries allocate them outside of torch's allocator
USABLE_SHARE = 0.95  # of the free memory: the rest is lost to fragmentation
CPU_CORE_FLOPS, CPU_CORE_BANDWIDTH = 0.05e12, 8e9  # FLOP/s and bytes per second of one core
CPU_LINK_BYTES_PER_SECOND = 4e9  # between processes on one host
PCIE_BYTES_PER_SECOND = 11e9  # between GPUs without NVLink
LINK_SHARE = 0.7  # of a link's published rate that collectives reach


@dataclass(frozen=True)
class MachineCapacity:
    """The weakest GPU of a machine (or its CPU), and how processes are linked."""

    card: Card
    on_gpu: bool
    usable_bytes: int
    """Of memory on each device."""
    host_bytes: int
    """Of RAM for each process."""
    link: float
    """Bytes per second between processes on one machine."""
    network: float
    """Bytes per second between machines."""
    cores: int
    """For each process."""

    @staticmethod
    def of(hardware: Hardware, device: str, local_procs: int) -> MachineCapacity:
        host_bytes = hardware.memory_bytes // max(1, local_procs)
        network = (hardware.network_gbps or ASSUMED_NETWORK_GBPS) * 1e9 / 8 * LINK_SHARE
        cores = max(1, hardware.cpu_cores // max(1, local_procs))
        if device != "cuda" or not hardware.gpus:
            bandwidth, fp32 = CPU_CORE_BANDWIDTH * cores / 1e9, CPU_CORE_FLOPS * cores / 1e12
            card = Card("CPU", host_bytes / 2**30, bandwidth, 0, 0, 0, fp32, 0, (0, 0), 1, "a guess")
            return MachineCapacity(card, False, int(host_bytes * USABLE_SHARE), host_bytes, CPU_LINK_BYTES_PER_SECOND, network, cores)
        weakest = min(hardware.gpus, key=lambda g: g.memory_bytes)
        card = card_of_product(weakest.name, weakest.memory_bytes) or generic_card(
            weakest.name, weakest.memory_bytes / 2**30, weakest.compute_capability
        )
        if weakest.mig:
            card = card.mig_slice(weakest.name, weakest.memory_bytes)
        free_bytes = min(g.free_bytes or g.memory_bytes for g in hardware.gpus)
        link = card.nvlink * 1e9 / 2 * LINK_SHARE if card.nvlink else PCIE_BYTES_PER_SECOND
        return MachineCapacity(card, True, int((free_bytes - CUDA_CONTEXT_BYTES) * USABLE_SHARE), host_bytes, link, network, cores)


def gigabytes_to_buy(usable_bytes: float) -> int:
    """Returns the GB in a GPU's name from which on any card has this many usable bytes."""
    return math.ceil((usable_bytes / USABLE_SHARE + CUDA_CONTEXT_BYTES) / (LISTED_SHARE_WITH_ECC * 2**30))
