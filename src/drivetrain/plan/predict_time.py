"""Predicts time: takes a task's profile, a candidate and a machine's capacity, returns the seconds of a step by part.

The shares of published rates that real work reaches (`REACHED`) were measured on one GPU and are used for all GPUs. A table in
docs/plan.md lists the errors of checked predictions.
"""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.plan.candidates import Candidate
from drivetrain.plan.capacity import CPU_CORE_BANDWIDTH, PCIE_BYTES_PER_SECOND, MachineCapacity
from drivetrain.plan.predict_memory import pass_of, share_of_bytes_gathered
from drivetrain.plan.profile import Profile, Work, reduction_buffer_bytes

CPU_FLOPS_SHARE = 0.5  # of a CPU's FLOP/s that operations reach
# The shortest time of an operation.
CPU_OPERATION_SECONDS, GPU_OPERATION_SECONDS, CONV_SECONDS = 8e-6, 2.8e-6, 16e-6
HOST_SECONDS_PER_OPERATION = 43e-6  # for Python to launch one operation of an eager step
# For the host to gather a block's parameters and reduce its gradients. ZeRO-3 gathers a second time, for the backward pass.
GATHER_SECONDS, GATHER_TWICE_SECONDS = 1.0e-3, 1.5e-3
UPDATE_SECONDS = 20e-6  # to launch the optimizer's update
TERMS_PER_SPLIT = 512  # a long sum is divided over processors in parts of this many terms
EMBEDDING_SORT_ROWS, EMBEDDING_SORT_SECONDS = 3072, 40e-6  # with more rows, torch sorts an embedding's gradients
EMBEDDING_BACKWARD_SECONDS_PER_ROW = 8e-9  # without sorting
NORM_CHANNEL_BYTES_PER_SECOND = 4e9  # a normalization runs each channel on one processor
MATRIX_UNIT_CHANNELS = 32  # channels per group from which a grouped convolution is as fast as others
OVERLAP_SHARE = 0.7  # the share of FSDP's communication that overlaps with computation


@dataclass(frozen=True)
class Reached:
    """The shares of published rates that real work reaches: of the bandwidth for the first four, else of the FLOP/s."""

    bandwidth: float = 0.62
    scattered: float = 0.22
    picked: float = 0.11
    added: float = 0.055
    gemm: float = 0.70
    conv: float = 0.17
    grouped: float = 0.20
    """Of the fp32 rate: convolutions with few channels in a group."""
    grouped_channels_first: float = 0.03
    """The same if channels are not the innermost dimension."""
    attention: float = 0.35
    recurrent: float = 0.42
    recurrent_step: float = 4.5e-6
    """Seconds of one step of a recurrent layer."""


REACHED = Reached()


def step_seconds(profile: Profile, candidate: Candidate, machine: MachineCapacity) -> dict[str, float]:
    """Returns the seconds of one optimizer step by part."""
    work = pass_of(profile, candidate)
    device = sum(w.num_calls * operation_seconds(w, candidate.micro_batch, machine, profile.precision) for w in work.work)
    if machine.on_gpu and (candidate.is_sharded or candidate.checkpointing):  # eager: the host starts every operation
        device = max(device, HOST_SECONDS_PER_OPERATION * sum(w.num_calls for w in work.work))
    if machine.on_gpu and candidate.is_sharded:
        device += max(1, profile.blocks) * (GATHER_TWICE_SECONDS if candidate.zero_stage == 3 else GATHER_SECONDS)
    parts = {"work": candidate.accumulation * device, "update": _update_seconds(profile, candidate, machine), "communication": 0.0}
    if candidate.world_size > 1:
        parts["communication"] = _communication_seconds(profile, candidate, machine, parts["work"])
    return parts


# --- one operation ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Operation:
    """Operations of one kind at a given micro-batch size."""

    kind: str
    flops: float
    bytes: float
    tiles: float
    depth: float
    rate: float
    """FLOP/s that the card publishes for its number format."""
    seconds_by_bytes: float
    """Seconds to move its bytes at the reached bandwidth."""


def operation_seconds(work: Work, samples: int, machine: MachineCapacity, precision: str) -> float:
    """Returns the seconds of an operation, at least the time of its FLOPs and bytes at the card's published rates."""
    flops, num_bytes, tiles, depth = (max(0.0, pair[0] + pair[1] * samples) for pair in (work.flops, work.bytes, work.tiles, work.depth))
    rate, bandwidth = _published_rate(work, machine, precision), machine.card.bandwidth * 1e9
    operation = _Operation(work.kind, flops, num_bytes, tiles, depth, rate, num_bytes / (bandwidth * REACHED.bandwidth))
    estimate = _gpu_estimate(operation, machine) if machine.on_gpu else _cpu_estimate(operation)
    return max(estimate, flops / rate, num_bytes / bandwidth)


def _cpu_estimate(op: _Operation) -> float:
    return max(op.flops / (op.rate * CPU_FLOPS_SHARE), op.seconds_by_bytes) + CPU_OPERATION_SECONDS


def _gpu_estimate(op: _Operation, machine: MachineCapacity) -> float:
    if op.kind in ("gemm", "conv", "grouped", "grouped_channels_first", "attention", "recurrent"):
        return _matrix_estimate(op, machine)
    if op.kind == "embedding":
        is_sorted = op.depth > EMBEDDING_SORT_ROWS
        unsorted_seconds = op.depth * EMBEDDING_BACKWARD_SECONDS_PER_ROW + GPU_OPERATION_SECONDS
        return op.seconds_by_bytes + (EMBEDDING_SORT_SECONDS if is_sorted else unsorted_seconds)
    if op.kind in ("scattered", "picked", "added"):
        share = {"scattered": REACHED.scattered, "picked": REACHED.picked, "added": REACHED.added}[op.kind]
        return op.seconds_by_bytes * REACHED.bandwidth / share + GPU_OPERATION_SECONDS
    if op.kind == "channels":
        return max(op.seconds_by_bytes, op.bytes / (NORM_CHANNEL_BYTES_PER_SECOND * op.depth)) + GPU_OPERATION_SECONDS
    if op.kind == "summed":
        return op.seconds_by_bytes * (1 + 2 * reduction_buffer_bytes(int(op.depth), op.tiles) / op.bytes) + GPU_OPERATION_SECONDS
    return op.seconds_by_bytes + GPU_OPERATION_SECONDS


def _matrix_estimate(op: _Operation, machine: MachineCapacity) -> float:
    if op.kind == "gemm":
        busy = _busy_share(op.tiles, op.depth, machine.card.processors)
        return max(op.flops / (op.rate * REACHED.gemm * busy), op.seconds_by_bytes) + GPU_OPERATION_SECONDS
    if op.kind == "attention":
        return max(op.flops / (op.rate * REACHED.attention), op.seconds_by_bytes) + GPU_OPERATION_SECONDS
    if op.kind == "recurrent":
        return op.flops / (op.rate * REACHED.recurrent) + op.depth * REACHED.recurrent_step
    if op.kind == "conv":
        return op.flops / (op.rate * REACHED.conv) + 2 * op.seconds_by_bytes + CONV_SECONDS
    share = REACHED.grouped if op.kind == "grouped" else REACHED.grouped_channels_first
    by_flops = op.flops / max(machine.card.fp32 * 1e12 * share, op.rate * REACHED.conv * min(1.0, op.depth / MATRIX_UNIT_CHANNELS))
    return by_flops + 2 * op.seconds_by_bytes + CONV_SECONDS


def _busy_share(tiles: float, depth: float, processors: int) -> float:
    """Returns the share of a GPU's processors that a matrix product keeps busy.

    (Libraries have tiles of many sizes and avoid a nearly empty last round.)
    """
    return max(1 / processors, min(1.0, tiles * max(1.0, depth / TERMS_PER_SPLIT) / processors))


def _published_rate(work: Work, machine: MachineCapacity, precision: str) -> float:
    card = machine.card
    if not machine.on_gpu:
        return card.fp32 * 1e12
    full = card.tf32 if precision == "tf32" and card.tf32 and work.kind in ("gemm", "conv") else card.fp32
    return {"bfloat16": card.bf16, "float16": card.fp16}.get(work.dtype, full) * 1e12 or full * 1e12


# --- update and communication -------------------------------------------------------------------


def _update_seconds(profile: Profile, candidate: Candidate, machine: MachineCapacity) -> float:
    """Returns the seconds of the update: it reads gradients, and reads and writes parameters and the optimizer's state."""
    num_bytes = (3 * profile.trained_bytes + 2 * profile.optimizer_bytes) / (candidate.world_size if candidate.is_sharded else 1)
    if candidate.offload == "none":
        return num_bytes / (machine.card.bandwidth * 1e9 * REACHED.bandwidth) + UPDATE_SECONDS
    bus_bytes = 2 * profile.trained_bytes  # parameters to the device, gradients back
    if candidate.offload == "all":  # for every micro-batch, and the parameters again for its backward pass
        bus_bytes = candidate.accumulation * (2 * profile.parameter_bytes + profile.trained_bytes)
    return num_bytes / (CPU_CORE_BANDWIDTH * machine.cores) + bus_bytes / candidate.world_size / PCIE_BYTES_PER_SECOND


def _communication_seconds(profile: Profile, candidate: Candidate, machine: MachineCapacity, work_seconds: float) -> float:
    """Returns the seconds of communication that do not overlap with computation."""
    share = (candidate.world_size - 1) / candidate.world_size
    link = min(machine.link, machine.network) if candidate.nodes > 1 else machine.link
    if not candidate.is_sharded:
        return 2 * share * profile.trained_bytes / link  # one all-reduce, after the last backward pass
    num_gathers = 1 if candidate.zero_stage < 3 else 2
    num_bytes = share * (num_gathers * profile.parameter_bytes * share_of_bytes_gathered(profile) + profile.trained_bytes)
    total = candidate.accumulation * num_bytes / link
    return total - min(OVERLAP_SHARE * total, work_seconds)
