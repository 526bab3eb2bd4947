"""Guide 004's table: a plan looked up by the memory of the smallest GPU, nothing predicted or measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from drivetrain.hardware import UNKNOWN_CAPABILITY, Hardware, format_gib
from drivetrain.plan import Plan, read_pins
from drivetrain.plan.choose import choose

EFFECTIVE_BATCH = 256
WORKERS_A_GPU, SPARE_CORES = 3, 2
HALF_FROM = (7, 0)  # compute capability: the table knows fp16 alone, bf16 or not
ORIGIN = "the guide's table"


@dataclass(frozen=True)
class Row:
    """GPUs from `least_gb` of memory on, in GB of 1,000^3 bytes: so a card falls into the row of the size it is sold by,
    although its driver lists fewer GiB."""

    least_gb: float
    micro_batch: int
    zero_stage: int
    words: str


ROWS = (
    Row(20, 16, 2, ">= 20 GB"),
    Row(14, 12, 2, "14-20 GB"),
    Row(10, 8, 2, "10-14 GB"),
    Row(6, 4, 2, "6-10 GB"),
    Row(0, 2, 3, "< 6 GB"),
)
CPU_MICRO_BATCH, CPU_ACCUMULATION = 4, 8
STRATEGIES = {
    "single": "one GPU trains alone",
    "deepspeed": "DeepSpeed for two or more GPUs",
    "ddp": "DDP for two or more GPUs where DeepSpeed is not installed",
}
PREFETCH = ((64, 4), (32, 3), (0, 2))  # GiB of RAM that must be exceeded -> batches ahead a worker


def row_of(hardware: Hardware) -> Row:
    """The row of a machine's smallest GPU."""
    least = min(g.memory_bytes for g in hardware.gpus)
    return next(row for row in ROWS if least >= row.least_gb * 1e9)


def table(
    settings: Mapping[str, Any],
    hardware: Hardware,
    *,
    device: str,
    world_size: int,
    local_procs: int,
    nodes: int = 1,
    pins: Mapping[str, object] | None = None,
    deepspeed_installed: bool,
) -> Plan:
    """The plan that the guide's table gives. It sets `global_batch`; what is pinned wins over the table."""
    pins = dict(pins or {})
    pin = read_pins(pins)
    gpu = device == "cuda" and bool(hardware.gpus)
    said, reasons = _of_host(hardware)
    more, why = _of_gpus(hardware, world_size, local_procs, deepspeed_installed, pin) if gpu else _without_gpu()
    said, reasons = said | more, reasons | why
    micro_batch: int = (said | pin)["micro_batch"]
    default, reasons["accumulation"] = _accumulation(micro_batch, world_size, gpu)
    accumulation: int = pin.get("accumulation", default)
    batch = micro_batch * accumulation * world_size
    asked = int(settings["global_batch"])
    kept = "as the recipe has it" if batch == asked else f"the recipe's {asked} does not hold under --planner table"
    reasons["global_batch"] = f"{ORIGIN} sets it: {micro_batch} x {accumulation} x {world_size} = {batch}; {kept}"
    precision = settings["precision"]
    if precision == "auto":
        precision, reasons["precision"] = _precision(hardware) if gpu else ("fp32", f"{ORIGIN}: fp32 without a GPU")
    wanted = dict(settings) | {"global_batch": batch, "precision": precision}
    plan = choose(
        wanted, hardware, device=device, world_size=world_size, local_procs=local_procs, nodes=nodes,
        pins=said | pins | {"micro_batch": micro_batch, "accumulation": accumulation},
    )  # fmt: skip
    return replace(plan, reasons=plan.reasons | reasons | dict.fromkeys(pin, "pinned"))


Said = tuple[dict[str, Any], dict[str, str]]
"""Choices of the table, as pins, and the reason of each."""


def _of_host(hardware: Hardware) -> Said:
    prefetch = next(ahead for least, ahead in PREFETCH if not least or hardware.memory_bytes > least * 2**30)
    why = f"{ORIGIN}: 4, 3 or 2 with more than 64, more than 32 or less GiB of RAM; here {format_gib(hardware.memory_bytes)}"
    return {"prefetch": prefetch}, {"prefetch": why}


def _without_gpu() -> Said:
    return {"micro_batch": CPU_MICRO_BATCH, "workers": 0}, {
        "micro_batch": f"{ORIGIN} has no row without a GPU; its code takes {CPU_MICRO_BATCH} there",
        "workers": f"{ORIGIN} counts {WORKERS_A_GPU} a GPU, and there is none",
    }


def _of_gpus(hardware: Hardware, world_size: int, local_procs: int, deepspeed: bool, pin: Mapping[str, Any]) -> Said:
    row = row_of(hardware)
    least = min(g.memory_bytes for g in hardware.gpus) / 1e9
    workers = max(0, min(WORKERS_A_GPU * local_procs, hardware.cpu_cores - SPARE_CORES)) // local_procs
    strategy = "single" if world_size == 1 else "deepspeed" if deepspeed else "ddp"
    said: dict[str, Any] = {"micro_batch": row.micro_batch, "activation_checkpointing": True, "workers": workers, "strategy": strategy}
    reasons = {
        "micro_batch": f"{ORIGIN}, row {row.words}: the smallest GPU has {least:.1f} GB",
        "activation_checkpointing": f"{ORIGIN} has it on for every GPU",
        "workers": f"{ORIGIN}: {WORKERS_A_GPU} a GPU, no more in all than {hardware.cpu_cores} cores less {SPARE_CORES}",
        "strategy": f"{ORIGIN}: {STRATEGIES[strategy]}",
    }
    if pin.get("strategy", strategy) == "deepspeed":
        said |= {"zero_stage": row.zero_stage, "offload": "optimizer"}
        reasons["zero_stage"] = f"{ORIGIN}: ZeRO-3 under 6 GB, else ZeRO-2"
        reasons["offload"] = f"{ORIGIN}: its DeepSpeed configuration keeps the optimizer's state in the host's memory"
    return said, reasons


def _accumulation(micro_batch: int, world_size: int, gpu: bool) -> tuple[int, str]:
    if not gpu:
        return CPU_ACCUMULATION, f"{ORIGIN} has no row without a GPU; its code takes {CPU_ACCUMULATION} there"
    steps = max(1, EFFECTIVE_BATCH // (micro_batch * world_size))
    return steps, f"{ORIGIN}: {EFFECTIVE_BATCH} // ({micro_batch} x {world_size}), at least 1"


def _precision(hardware: Hardware) -> tuple[str, str]:
    oldest = min(g.compute_capability for g in hardware.gpus)
    here = "unknown" if oldest == UNKNOWN_CAPABILITY else f"{oldest[0]}.{oldest[1]}"
    return "fp16" if oldest >= HALF_FROM else "fp32", f"{ORIGIN}: fp16 from compute capability 7.0 on; here {here}"
