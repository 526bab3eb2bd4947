"""Memory and time of a task under a candidate plan, from its profile and a machine's published rates.

The shares of published rates that real work reaches (`Reached`) were measured on one GPU and are taken for all; a table in
docs/plan.md has the error of every prediction that was checked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from drivetrain.hardware import ASSUMED_NETWORK_GBPS, Hardware
from drivetrain.hardware.cards import LISTED_SHARE_WITH_ECC, Card, card_of_product, generic_card
from drivetrain.plan.profile import Pass, Profile, Work, staging

CONTEXT = 600 << 20  # bytes that CUDA and its libraries take for themselves, outside of what torch counts
LIBRARIES = 66 << 20  # bytes that matrix products take from torch's own count, once
NCCL = 400 << 20  # bytes of a process group's buffers
BUCKET = 500_000_000  # numbers that DeepSpeed sums at once
SLACK = 0.95  # share of what is free that can be used: the rest goes to gaps between blocks
CPU_FLOPS, CPU_BANDWIDTH = 0.05e12, 8e9  # of one core
CPU_RATE, CPU_FLOOR, GPU_FLOOR, CONV_FLOOR = 0.5, 8e-6, 2.8e-6, 16e-6
HOST = 43e-6  # seconds in which Python starts one operation of an eager step,
GATHER, GATHER_TWICE = 1.0e-3, 1.5e-3  # and hands a block's parameters out and its gradients in; also out again, in the backward pass
PCIE = 11e9  # bytes a second between GPUs without NVLink
LINK = 0.7  # share of a link's published rate that collectives reach
SPLIT = 512  # terms of a long sum that are worth a processor of their own
SORTED_FROM, SORT = 3072, 40e-6  # rows from which on torch sorts an embedding's gradients, and seconds that takes
CHANNEL = 4e9  # bytes a second of a norm's channel: each has a processor of its own, and that alone
WALK = 8e-9  # seconds a row in which it walks over fewer rows, one after the other
GROUP = 32  # channels that a GPU's matrix units take at once
OVERLAP = 0.7  # share of FSDP's communication that hides behind the work


@dataclass(frozen=True)
class Reached:
    """Shares of the published rates."""

    bandwidth: float = 0.62
    scattered: float = 0.22
    picked: float = 0.11
    added: float = 0.055
    gemm: float = 0.70
    conv: float = 0.17
    grouped: float = 0.20
    """Of the fp32 rate, by convolutions with few channels in a group,"""
    grouped_flat: float = 0.03
    """and where channels do not lie innermost."""
    attention: float = 0.35
    recurrent: float = 0.42
    recurrent_step: float = 4.5e-6


REACHED = Reached()


@dataclass(frozen=True)
class Machine:
    """What predictions need of a machine: its weakest GPU (or its CPU), and how GPUs reach each other."""

    card: Card
    on_gpu: bool
    usable_bytes: int
    """On each device."""
    host_bytes: int
    """Of RAM, a process's share."""
    link: float
    """Bytes a second between the processes of one machine."""
    network: float
    """Bytes a second between machines."""
    cores: int

    @staticmethod
    def of(hardware: Hardware, device: str, local_procs: int) -> Machine:
        host = hardware.memory_bytes // max(1, local_procs)
        network = (hardware.network_gbps or ASSUMED_NETWORK_GBPS) * 1e9 / 8 * LINK
        cores = max(1, hardware.cpu_cores // max(1, local_procs))
        if device != "cuda" or not hardware.gpus:
            card = Card("CPU", host / 2**30, CPU_BANDWIDTH * cores / 1e9, 0, 0, 0, CPU_FLOPS * cores / 1e12, 0, (0, 0), 1, "a guess")
            return Machine(card, False, int(host * SLACK), host, 4e9, network, cores)
        weakest = min(hardware.gpus, key=lambda g: g.memory_bytes)
        card = card_of_product(weakest.name, weakest.memory_bytes) or generic_card(
            weakest.name, weakest.memory_bytes / 2**30, weakest.compute_capability
        )
        if weakest.mig:
            card = card.mig_slice(weakest.name, weakest.memory_bytes)
        free = min(g.free_bytes or g.memory_bytes for g in hardware.gpus)
        link = card.nvlink * 1e9 / 2 * LINK if card.nvlink else PCIE
        return Machine(card, True, int((free - CONTEXT) * SLACK), host, link, network, cores)


def named_gigabytes(need: float) -> int:
    """The GB that a GPU must have by its name, for so many bytes to be usable on any such card."""
    return math.ceil((need / SLACK + CONTEXT) / (LISTED_SHARE_WITH_ECC * 2**30))


@dataclass(frozen=True)
class Candidate:
    """A way to run that may or may not fit."""

    strategy: str
    micro_batch: int
    accumulation: int
    world_size: int
    nodes: int = 1
    zero_stage: int = 0
    checkpointing: bool = False
    offload: str = "none"

    @property
    def sharded(self) -> bool:
        return self.strategy in ("fsdp", "deepspeed")

    def name(self) -> str:
        words = [self.strategy if not self.zero_stage else f"{self.strategy} (ZeRO-{self.zero_stage})"]
        words += ["activation checkpointing"] if self.checkpointing else []
        words += [f"offload of {'the optimizer' if self.offload == 'optimizer' else 'all state'}"] if self.offload != "none" else []
        return " + ".join(words)


def passed(profile: Profile, candidate: Candidate) -> Pass:
    """The pass that a candidate makes."""
    found = profile.checkpointed if candidate.checkpointing else profile.plain
    assert found is not None
    return found


# --- memory -------------------------------------------------------------------------------------


def memory(profile: Profile, candidate: Candidate, on_gpu: bool = True, resident: bool = True) -> dict[str, int]:
    """Bytes on each device by part, at the highest moment of a step."""
    work, micro = passed(profile, candidate), candidate.micro_batch
    parts = state(profile, candidate)
    if candidate.sharded:
        spared = work.weight_copies if candidate.strategy == "fsdp" else 0.0  # which gathers parameters in half precision
        parts["activations"] = int(max(0.0, work.peak(micro, gradients=False) - spared))
    elif candidate.world_size == candidate.accumulation == 1:
        parts["activations"] = int(work.peak(micro, gradients=False))
        parts["gradients"] = int(work.peak(micro, gradients=True)) - parts["activations"]  # they come as activations go
    else:
        parts["activations"] = int(work.peak(micro, gradients=False)) + profile.largest_bytes
    parts["data"] = profile.data_bytes if resident else 2 * micro * profile.sample_bytes
    if on_gpu:
        parts["libraries"] = LIBRARIES if work.multiplies or any(w.kind == "recurrent" for w in work.work) else 0
        parts["libraries"] += NCCL if candidate.world_size > 1 or candidate.sharded else 0
    return {name: int(size) for name, size in parts.items()}


def state(profile: Profile, candidate: Candidate) -> dict[str, int]:
    """Bytes on each device of the model's state, without activations: the least that a step takes, whatever it does."""
    parts = {
        "parameters": profile.parameter_bytes, "gradients": profile.trained_bytes, "optimizer": profile.optimizer_bytes,
        "buffers": profile.buffer_bytes,
    }  # fmt: skip
    return parts | (_sharded(profile, candidate) if candidate.sharded else {})


def _sharded(profile: Profile, candidate: Candidate) -> dict[str, int]:
    world, half = candidate.world_size, _gathered(profile)
    root = profile.parameter_bytes - profile.blocks * profile.block_bytes
    parameters, gradients, optimizer = (size / world for size in (profile.parameter_bytes, profile.trained_bytes, profile.optimizer_bytes))
    at_once = 2 * profile.block_bytes + root if profile.blocks else profile.parameter_bytes
    if candidate.strategy == "deepspeed":
        # Parameters stay in fp32, beside a flat copy of the part that this process updates.
        kept = parameters + at_once if candidate.zero_stage == 3 else float(profile.parameter_bytes)
        parameters = kept + profile.trained_bytes / world
        gradients = profile.trained_bytes * (1.0 if candidate.zero_stage == 1 else 1 / world) + 4 * min(BUCKET, profile.trained)
    else:
        parameters += (profile.parameter_bytes if candidate.zero_stage == 2 else at_once) * half
        gradients += (profile.block_bytes or profile.trained_bytes) * (1 + half)
    if candidate.offload == "all":
        parameters, gradients, optimizer = at_once * half, (profile.block_bytes or profile.trained_bytes) * (1 + half), 0.0
    elif candidate.offload == "optimizer":
        optimizer = 0.0
    return {"parameters": int(parameters), "gradients": int(gradients), "optimizer": int(optimizer)}


def _gathered(profile: Profile) -> float:
    """The share of parameters' bytes in which they are gathered: those that are not stored in half precision yet are made so."""
    return min(1.0, 2 * profile.parameters / profile.parameter_bytes) if profile.precision in ("bf16", "fp16") else 1.0


def host_memory(profile: Profile, candidate: Candidate) -> int:
    """Bytes of RAM that a process's offloaded state takes."""
    kept = {"none": 0, "optimizer": profile.optimizer_bytes + profile.trained_bytes}
    whole = kept.get(candidate.offload, profile.parameter_bytes + profile.trained_bytes + profile.optimizer_bytes)
    return whole // candidate.world_size


# --- time ---------------------------------------------------------------------------------------


def step_seconds(profile: Profile, candidate: Candidate, machine: Machine) -> dict[str, float]:
    """Seconds of one optimizer step by part."""
    work = passed(profile, candidate)
    device = sum(w.times * _seconds(w, candidate.micro_batch, machine, profile.precision) for w in work.work)
    if machine.on_gpu and (candidate.sharded or candidate.checkpointing):  # eager: no graph starts its operations
        device = max(device, HOST * sum(w.times for w in work.work))
    if machine.on_gpu and candidate.sharded:
        device += max(1, profile.blocks) * (GATHER_TWICE if candidate.zero_stage == 3 else GATHER)
    parts = {"work": candidate.accumulation * device, "update": _update(profile, candidate, machine), "communication": 0.0}
    if candidate.world_size > 1:
        parts["communication"] = _communication(profile, candidate, machine, parts["work"])
    return parts


def _seconds(work: Work, samples: int, machine: Machine, precision: str) -> float:
    """Seconds of an operation: never fewer than its FLOPs and bytes take at the card's published rates."""
    flops, moved, tiles, depth = (max(0.0, pair[0] + pair[1] * samples) for pair in (work.flops, work.bytes, work.tiles, work.depth))
    rate, bandwidth = _rate(work, machine, precision), machine.card.bandwidth * 1e9
    return max(_estimate(work, flops, moved, tiles, depth, rate, machine), flops / rate, moved / bandwidth)


def _estimate(work: Work, flops: float, moved: float, tiles: float, depth: float, rate: float, machine: Machine) -> float:
    by_bytes = moved / (machine.card.bandwidth * 1e9 * REACHED.bandwidth)
    if not machine.on_gpu:
        return max(flops / (rate * CPU_RATE), by_bytes) + CPU_FLOOR
    if work.kind == "gemm":
        return max(flops / (rate * REACHED.gemm * _busy(tiles, depth, machine.card.processors)), by_bytes) + GPU_FLOOR
    if work.kind == "conv":
        return flops / (rate * REACHED.conv) + 2 * by_bytes + CONV_FLOOR
    if work.kind in ("grouped", "grouped_flat"):
        share = REACHED.grouped if work.kind == "grouped" else REACHED.grouped_flat
        by_flops = flops / max(machine.card.fp32 * 1e12 * share, rate * REACHED.conv * min(1.0, depth / GROUP))
        return by_flops + 2 * by_bytes + CONV_FLOOR
    if work.kind == "attention":
        return max(flops / (rate * REACHED.attention), by_bytes) + GPU_FLOOR
    if work.kind == "recurrent":
        return flops / (rate * REACHED.recurrent) + depth * REACHED.recurrent_step
    if work.kind == "embedding":
        return by_bytes + (SORT if depth > SORTED_FROM else depth * WALK + GPU_FLOOR)
    if work.kind in ("scattered", "picked", "added"):
        share = {"scattered": REACHED.scattered, "picked": REACHED.picked, "added": REACHED.added}[work.kind]
        return by_bytes * REACHED.bandwidth / share + GPU_FLOOR
    if work.kind == "channels":
        return max(by_bytes, moved / (CHANNEL * depth)) + GPU_FLOOR
    if work.kind == "summed":
        return by_bytes * (1 + 2 * staging(int(depth), tiles) / moved) + GPU_FLOOR
    return by_bytes + GPU_FLOOR


def _busy(tiles: float, depth: float, processors: int) -> float:
    """The share of a GPU's processors that a matrix product keeps busy. (Libraries have tiles of many sizes, and avoid a last
    round that is nearly empty.)"""
    return max(1 / processors, min(1.0, tiles * max(1.0, depth / SPLIT) / processors))


def _rate(work: Work, machine: Machine, precision: str) -> float:
    card = machine.card
    if not machine.on_gpu:
        return card.fp32 * 1e12
    full = card.tf32 if precision == "tf32" and card.tf32 and work.kind in ("gemm", "conv") else card.fp32
    return {"bfloat16": card.bf16, "float16": card.fp16}.get(work.dtype, full) * 1e12 or full * 1e12


def _update(profile: Profile, candidate: Candidate, machine: Machine) -> float:
    """The optimizer reads gradients and reads and writes parameters and state."""
    moved = (3 * profile.trained_bytes + 2 * profile.optimizer_bytes) / (candidate.world_size if candidate.sharded else 1)
    if candidate.offload != "none":  # on the host, and over the bus: parameters there and gradients back
        bus = 2 * profile.trained_bytes
        if candidate.offload == "all":  # for every micro-batch, and parameters for its backward pass again
            bus = candidate.accumulation * (2 * profile.parameter_bytes + profile.trained_bytes)
        return moved / (CPU_BANDWIDTH * machine.cores) + bus / candidate.world_size / PCIE
    return moved / (machine.card.bandwidth * 1e9 * REACHED.bandwidth) + 20e-6


def _communication(profile: Profile, candidate: Candidate, machine: Machine, work: float) -> float:
    """What is not hidden behind the work."""
    world = candidate.world_size
    share = (world - 1) / world
    link = min(machine.link, machine.network) if candidate.nodes > 1 else machine.link
    if not candidate.sharded:
        return 2 * share * profile.trained_bytes / link  # one sum, after the last backward pass
    gathers = 1 if candidate.zero_stage < 3 else 2
    each = share * (gathers * profile.parameter_bytes * _gathered(profile) + profile.trained_bytes)
    total = candidate.accumulation * each / link
    return total - min(OVERLAP * total, work)


def smallest(profile: Profile, candidate: Candidate, on_gpu: bool) -> int:
    """Bytes that a way to run needs at the least: with one sample at a time."""
    return sum(
        memory(profile, replace(candidate, micro_batch=2 if profile.batchnorm else 1, accumulation=2), on_gpu, resident=False).values()
    )
