"""Rates candidates: takes a candidate and a micro-batch, returns the memory it needs and the time it takes on one machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from drivetrain.hardware import format_need
from drivetrain.plan.candidates import Candidate, list_candidates, micro_batch_sizes
from drivetrain.plan.capacity import MachineCapacity
from drivetrain.plan.fit import Fit
from drivetrain.plan.predict_memory import host_memory, least_memory, memory_by_part, state_by_part
from drivetrain.plan.predict_time import step_seconds
from drivetrain.plan.profile import Profile

HOST_SHARE = 0.8  # the share of a process's RAM that offloaded state may take
RESIDENT_DATA_SHARE = 0.5  # the share of a device's memory, without the model's state, that a data set may take


@dataclass(frozen=True)
class RatedCandidate:
    """A candidate with what it needs and how long its step takes."""

    candidate: Candidate
    memory: dict[str, int]
    """Bytes on each device by part."""
    seconds: dict[str, float]
    """Of a step, by part."""
    usable_bytes: int
    host_bytes: int
    usable_host_bytes: int
    global_batch: int
    is_measured: bool = False

    @property
    def needed_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.usable_bytes and self.host_bytes <= self.usable_host_bytes

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def samples_per_second(self) -> float:
        return self.global_batch / self.step_seconds

    def shortage(self) -> str:
        """Returns the memory that it needs and does not have, as text."""
        if self.needed_bytes > self.usable_bytes:
            return f"needs {format_need(self.needed_bytes, self.usable_bytes)}"
        return f"needs {format_need(self.host_bytes, self.usable_host_bytes)} of the host's memory"


class Rater:
    """Rates all candidates for one task on one machine. A `fit` of measurements corrects the predictions for unsharded steps."""

    def __init__(
        self, profile: Profile, machine: MachineCapacity, global_batch: int, world_size: int, nodes: int, fit: Fit | None = None
    ) -> None:
        self.profile, self.machine, self.fit = profile, machine, fit
        self.global_batch, self.world_size, self.nodes = global_batch, world_size, nodes
        self.share = -(-global_batch // world_size)
        """Samples of a global batch that one process takes."""
        self.usable_host_bytes = int(machine.host_bytes * HOST_SHARE)
        state_bytes = profile.parameter_bytes + profile.trained_bytes + profile.optimizer_bytes
        bytes_beside_state = max(0, machine.usable_bytes - state_bytes)
        self.is_data_resident = bool(profile.data_bytes) and profile.data_bytes <= RESIDENT_DATA_SHARE * bytes_beside_state

    def candidates(self, pins: Mapping[str, Any], deepspeed: bool) -> list[Candidate]:
        """Returns the candidates that agree with the pins, the simplest first; each has a micro-batch of one sample."""
        plain = Candidate("single" if self.world_size == 1 else "ddp", 1, self.share, self.world_size, self.nodes)
        return list_candidates(plain, pins, deepspeed, self.profile.checkpointed is not None, self.machine.on_gpu)

    def micro_batches(self, pins: Mapping[str, Any]) -> Iterator[int]:
        return micro_batch_sizes(self.share, pins, self.profile.batchnorm)

    def rate(self, candidate: Candidate, micro_batch: int) -> RatedCandidate:
        candidate = replace(candidate, micro_batch=micro_batch, accumulation=-(-self.share // micro_batch))
        parts = memory_by_part(self.profile, candidate, self.machine.on_gpu, self.is_data_resident)
        seconds = step_seconds(self.profile, candidate, self.machine)
        is_measured = self.fit is not None and not candidate.is_sharded and not candidate.checkpointing
        if self.fit is not None and is_measured:
            seconds = self._fitted_seconds(self.fit, candidate, seconds)
            single = replace(candidate, world_size=1, accumulation=1, strategy="single")
            fitted_bytes = self.fit.peak_bytes(micro_batch, lambda size: self._predicted_bytes(single, size))
            ratio = fitted_bytes / self._predicted_bytes(single, micro_batch)
            if ratio:  # 0 on a CPU, where memory is not measured
                parts = {name: int(size * ratio) for name, size in parts.items()}
        return RatedCandidate(
            candidate, parts, seconds, self.machine.usable_bytes, host_memory(self.profile, candidate),
            self.usable_host_bytes, self.global_batch, is_measured,
        )  # fmt: skip

    def least_bytes(self, candidate: Candidate) -> int:
        """Returns the bytes on each device with the smallest micro-batch; only of the state if no pass was traced."""
        if self.profile.plain is None:
            return sum(state_by_part(self.profile, candidate).values())
        return least_memory(self.profile, candidate, self.machine.on_gpu)

    def _predicted_bytes(self, candidate: Candidate, micro_batch: int) -> float:
        resized = replace(candidate, micro_batch=micro_batch)
        return float(sum(memory_by_part(self.profile, resized, self.machine.on_gpu, self.is_data_resident).values()))

    def _fitted_seconds(self, fit: Fit, candidate: Candidate, predicted: dict[str, float]) -> dict[str, float]:
        def predicted_work(micro_batch: int) -> float:
            return step_seconds(self.profile, replace(candidate, micro_batch=micro_batch, accumulation=1), self.machine)["work"]

        work = candidate.accumulation * fit.work_seconds(candidate.micro_batch, predicted_work)
        return predicted | {"work": work, "update": fit.update_seconds()}


def format_rate(samples_per_second: float) -> str:
    return f"{samples_per_second:,.0f} samples/s" if samples_per_second >= 100 else f"{samples_per_second:.3g} samples/s"
