"""Guide 004's table: takes settings and hardware, returns a `Plan` looked up by the memory of the smallest GPU. Nothing is predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from drivetrain.hardware import UNKNOWN_CAPABILITY, Hardware, format_gib
from drivetrain.plan.choose import choose
from drivetrain.plan.pins import read_pins
from drivetrain.plan.plan import Plan

EFFECTIVE_BATCH = 256
WORKERS_PER_GPU, SPARE_CORES = 3, 2
FP16_CAPABILITY = (7, 0)  # compute capability from which on the table has fp16; it never has bf16
ORIGIN = "the guide's table"


@dataclass(frozen=True)
class Row:
    """GPUs with at least `min_gb` of memory.

    A GB is 1,000^3 bytes, so that a card is in the row of its nominal size although its driver lists fewer GiB.
    """

    min_gb: float
    micro_batch: int
    zero_stage: int
    label: str


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
PREFETCH = ((64, 4), (32, 3), (0, 2))  # (GiB of RAM that must be exceeded, batches that a worker loads ahead)


def row_of(hardware: Hardware) -> Row:
    """Returns the row of a machine's smallest GPU."""
    smallest = min(g.memory_bytes for g in hardware.gpus)
    return next(row for row in ROWS if smallest >= row.min_gb * 1e9)


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
    """Returns the plan of the guide's table. It sets `global_batch`; pins win over the table."""
    pins = dict(pins or {})
    pin = read_pins(pins)
    gpu = device == "cuda" and bool(hardware.gpus)
    values, reasons = _host_choices(hardware)
    more, why = _gpu_choices(hardware, world_size, local_procs, deepspeed_installed, pin) if gpu else _choices_without_gpu()
    values, reasons = values | more, reasons | why
    micro_batch: int = (values | pin)["micro_batch"]
    default, reasons["accumulation"] = _accumulation(micro_batch, world_size, gpu)
    accumulation: int = pin.get("accumulation", default)
    batch = micro_batch * accumulation * world_size
    recipe_batch = int(settings["global_batch"])
    note = "as the recipe has it" if batch == recipe_batch else f"the recipe's {recipe_batch} does not hold under --planner table"
    reasons["global_batch"] = f"{ORIGIN} sets it: {micro_batch} x {accumulation} x {world_size} = {batch}; {note}"
    precision = settings["precision"]
    if precision == "auto":
        precision, reasons["precision"] = _precision(hardware) if gpu else ("fp32", f"{ORIGIN}: fp32 without a GPU")
    table_settings = dict(settings) | {"global_batch": batch, "precision": precision}
    plan = choose(
        table_settings, hardware, device=device, world_size=world_size, local_procs=local_procs, nodes=nodes,
        pins=values | pins | {"micro_batch": micro_batch, "accumulation": accumulation},
    )  # fmt: skip
    return replace(plan, reasons=plan.reasons | reasons | dict.fromkeys(pin, "pinned"))


Choices = tuple[dict[str, Any], dict[str, str]]
"""The table's choices, as pins, and the reason of each."""


def _host_choices(hardware: Hardware) -> Choices:
    prefetch = next(batches for min_gib, batches in PREFETCH if not min_gib or hardware.memory_bytes > min_gib * 2**30)
    why = f"{ORIGIN}: 4, 3 or 2 with more than 64, more than 32 or less GiB of RAM; here {format_gib(hardware.memory_bytes)}"
    return {"prefetch": prefetch}, {"prefetch": why}


def _choices_without_gpu() -> Choices:
    return {"micro_batch": CPU_MICRO_BATCH, "workers": 0}, {
        "micro_batch": f"{ORIGIN} has no row without a GPU; its code takes {CPU_MICRO_BATCH} there",
        "workers": f"{ORIGIN} counts {WORKERS_PER_GPU} a GPU, and there is none",
    }


def _gpu_choices(hardware: Hardware, world_size: int, local_procs: int, deepspeed: bool, pin: Mapping[str, Any]) -> Choices:
    row = row_of(hardware)
    smallest_gb = min(g.memory_bytes for g in hardware.gpus) / 1e9
    workers = max(0, min(WORKERS_PER_GPU * local_procs, hardware.cpu_cores - SPARE_CORES)) // local_procs
    strategy = "single" if world_size == 1 else "deepspeed" if deepspeed else "ddp"
    values: dict[str, Any] = {"micro_batch": row.micro_batch, "activation_checkpointing": True, "workers": workers, "strategy": strategy}
    reasons = {
        "micro_batch": f"{ORIGIN}, row {row.label}: the smallest GPU has {smallest_gb:.1f} GB",
        "activation_checkpointing": f"{ORIGIN} has it on for every GPU",
        "workers": f"{ORIGIN}: {WORKERS_PER_GPU} a GPU, no more in all than {hardware.cpu_cores} cores less {SPARE_CORES}",
        "strategy": f"{ORIGIN}: {STRATEGIES[strategy]}",
    }
    if pin.get("strategy", strategy) == "deepspeed":
        values |= {"zero_stage": row.zero_stage, "offload": "optimizer"}
        reasons["zero_stage"] = f"{ORIGIN}: ZeRO-3 under 6 GB, else ZeRO-2"
        reasons["offload"] = f"{ORIGIN}: its DeepSpeed configuration keeps the optimizer's state in the host's memory"
    return values, reasons


def _accumulation(micro_batch: int, world_size: int, gpu: bool) -> tuple[int, str]:
    if not gpu:
        return CPU_ACCUMULATION, f"{ORIGIN} has no row without a GPU; its code takes {CPU_ACCUMULATION} there"
    steps = max(1, EFFECTIVE_BATCH // (micro_batch * world_size))
    return steps, f"{ORIGIN}: {EFFECTIVE_BATCH} // ({micro_batch} x {world_size}), at least 1"


def _precision(hardware: Hardware) -> tuple[str, str]:
    oldest = min(g.compute_capability for g in hardware.gpus)
    capability = "unknown" if oldest == UNKNOWN_CAPABILITY else f"{oldest[0]}.{oldest[1]}"
    return "fp16" if oldest >= FP16_CAPABILITY else "fp32", f"{ORIGIN}: fp16 from compute capability 7.0 on; here {capability}"
