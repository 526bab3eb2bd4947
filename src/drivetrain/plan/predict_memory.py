"""Predicts memory: takes a task's profile and a candidate, returns the bytes on each device by part, and in the host's memory."""

from __future__ import annotations

from dataclasses import replace

from drivetrain.plan.candidates import Candidate
from drivetrain.plan.profile import Pass, Profile

MATRIX_WORKSPACE_BYTES = 66 << 20  # allocated once for matrix products by torch's allocator
NCCL_BUFFER_BYTES = 400 << 20  # of a process group
DEEPSPEED_BUCKET_NUMBERS = 500_000_000  # number of gradients in one of DeepSpeed's buckets


def pass_of(profile: Profile, candidate: Candidate) -> Pass:
    """Returns the pass that a candidate runs: with or without activation checkpointing."""
    traced = profile.checkpointed if candidate.checkpointing else profile.plain
    assert traced is not None
    return traced


def memory_by_part(profile: Profile, candidate: Candidate, on_gpu: bool = True, resident: bool = True) -> dict[str, int]:
    """Returns the bytes on each device by part, at the peak of a step. `resident`: whether the data set lives on the device."""
    work, micro_batch = pass_of(profile, candidate), candidate.micro_batch
    parts = state_by_part(profile, candidate)
    if candidate.is_sharded:
        saved_copies = work.weight_copies if candidate.strategy == "fsdp" else 0.0  # fsdp gathers parameters in half precision already
        parts["activations"] = int(max(0.0, work.peak(micro_batch, gradients=False) - saved_copies))
    elif candidate.world_size == candidate.accumulation == 1:
        parts["activations"] = int(work.peak(micro_batch, gradients=False))
        # Gradients are allocated while activations are freed.
        parts["gradients"] = int(work.peak(micro_batch, gradients=True)) - parts["activations"]
    else:
        parts["activations"] = int(work.peak(micro_batch, gradients=False)) + profile.largest_bytes
    parts["data"] = profile.data_bytes if resident else 2 * micro_batch * profile.sample_bytes
    if on_gpu:
        parts["libraries"] = MATRIX_WORKSPACE_BYTES if work.multiplies or any(w.kind == "recurrent" for w in work.work) else 0
        parts["libraries"] += NCCL_BUFFER_BYTES if candidate.world_size > 1 or candidate.is_sharded else 0
    return {name: int(size) for name, size in parts.items()}


def least_memory(profile: Profile, candidate: Candidate, on_gpu: bool) -> int:
    """Returns the bytes on each device with the smallest possible micro-batch."""
    smallest = replace(candidate, micro_batch=2 if profile.batchnorm else 1, accumulation=2)
    return sum(memory_by_part(profile, smallest, on_gpu, resident=False).values())


def state_by_part(profile: Profile, candidate: Candidate) -> dict[str, int]:
    """Returns the bytes on each device of the model's state, without activations."""
    parts = {
        "parameters": profile.parameter_bytes, "gradients": profile.trained_bytes, "optimizer": profile.optimizer_bytes,
        "buffers": profile.buffer_bytes,
    }  # fmt: skip
    return parts | (_sharded_state(profile, candidate) if candidate.is_sharded else {})


def _sharded_state(profile: Profile, candidate: Candidate) -> dict[str, int]:
    world_size, gathered_share = candidate.world_size, share_of_bytes_gathered(profile)
    outside_blocks = profile.parameter_bytes - profile.blocks * profile.block_bytes
    parameters, gradients, optimizer = (
        size / world_size for size in (profile.parameter_bytes, profile.trained_bytes, profile.optimizer_bytes)
    )
    gathered = 2 * profile.block_bytes + outside_blocks if profile.blocks else profile.parameter_bytes
    if candidate.strategy == "deepspeed":
        # Parameters stay in fp32; there is also a flat copy of the part that this process updates.
        stored = parameters + gathered if candidate.zero_stage == 3 else float(profile.parameter_bytes)
        parameters = stored + profile.trained_bytes / world_size
        gradients = profile.trained_bytes * (1.0 if candidate.zero_stage == 1 else 1 / world_size)
        gradients += 4 * min(DEEPSPEED_BUCKET_NUMBERS, profile.trained)
    else:
        parameters += (profile.parameter_bytes if candidate.zero_stage == 2 else gathered) * gathered_share
        gradients += (profile.block_bytes or profile.trained_bytes) * (1 + gathered_share)
    if candidate.offload == "all":
        parameters, optimizer = gathered * gathered_share, 0.0
        gradients = (profile.block_bytes or profile.trained_bytes) * (1 + gathered_share)
    elif candidate.offload == "optimizer":
        optimizer = 0.0
    return {"parameters": int(parameters), "gradients": int(gradients), "optimizer": int(optimizer)}


def share_of_bytes_gathered(profile: Profile) -> float:
    """Returns the size of gathered parameters relative to stored ones: half-precision training gathers two bytes for each."""
    return min(1.0, 2 * profile.parameters / profile.parameter_bytes) if profile.precision in ("bf16", "fp16") else 1.0


def host_memory(profile: Profile, candidate: Candidate) -> int:
    """Returns the bytes of RAM that a process's offloaded state takes."""
    offloaded = {
        "none": 0,
        "optimizer": profile.optimizer_bytes + profile.trained_bytes,
        "all": profile.parameter_bytes + profile.trained_bytes + profile.optimizer_bytes,
    }
    return offloaded[candidate.offload] // candidate.world_size
