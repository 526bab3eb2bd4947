"""The plan: how a recipe runs on given hardware, with a reason for each choice. Reads and writes the plan's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Annotated, Any, get_origin, get_type_hints

from drivetrain.outcomes import Problem
from drivetrain.plan.choices import Backend, DataLocation, Device, Offload, Precision, Strategy, Switch, ZeroStage, is_sharding
from drivetrain.plan.environment import check_environment
from drivetrain.settings import Range, brief, coerce

HOST_SYNC_REASON = "the host waits there for the device's result"  # follows the line of code that prevents capture


@dataclass(frozen=True)
class Plan:
    strategy: Strategy = "single"
    zero_stage: ZeroStage = 0
    """What fsdp and deepspeed shard: 1 optimizer state, 2 also gradients, 3 also parameters (fsdp knows 2 and 3)."""
    device: str = "cpu"
    backend: Backend = "none"
    world_size: Annotated[int, Range(1, 1_000_000)] = 1
    nodes: Annotated[int, Range(1, 100_000)] = 1
    global_batch: Annotated[int, Range(1, 2**31 - 1)] = 1
    micro_batch: Annotated[int, Range(1, 2**31 - 1)] = 1
    eval_micro_batch: Annotated[int, Range(1, 2**31 - 1)] = 1
    accumulation: Annotated[int, Range(1, 2**31 - 1)] = 1
    precision: Precision = "fp32"
    deterministic: bool = False
    threads: Annotated[int, Range(1, 1024)] = 1
    activation_checkpointing: bool = False
    """Whether blocks store only their inputs and run again in the backward pass."""
    offload: Offload = "none"
    """What is stored in the host's memory: nothing, the optimizer's state, or also parameters and gradients."""
    deepspeed_config: dict[str, Any] = field(default_factory=dict)
    """The keys of DeepSpeed's configuration that the user set."""
    capture: Switch = "auto"
    compile: Switch = "auto"
    compile_from: Annotated[int, Range(0, 2**63 - 1)] | None = None
    """The step from which on compiled code runs, if the run decided it."""
    data: DataLocation = "auto"
    workers: Annotated[int, Range(0, 256)] = 0
    prefetch: Annotated[int, Range(1, 64)] = 2
    pin_memory: bool = False
    channels_last: bool = False
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the workers, unless the user set them; `plan.environment` lists the allowed names."""
    predicted: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    rejected: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_environment(self.env)  # here, because plans from any source must not set other variables

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Plan:
        """Returns the plan of a JSON object. Unknown keys are ignored; a value of the wrong type raises Problem."""
        types = json_types()
        return Plan(**{key: _checked(key, types[key], value) for key, value in values.items() if key in types})

    @property
    def is_sharded(self) -> bool:
        """Whether processes hold parts of the model's state, so that parameters are gathered and freed within a step."""
        return is_sharding(self.strategy)

    def first_compiled_step(self, step: int, saved: int | None) -> int | None:
        """Returns the step from which on compiled code runs, in a run that begins or resumes after `step`.

        A pinned `compile` decides; otherwise the checkpoint's value (`saved`), otherwise the plan's own.
        """
        if self.is_sharded:
            return None
        if self.reasons.get("compile") != "pinned":
            return self.compile_from if saved is None else saved
        if self.compile == "on":
            return step if saved is None else saved
        return None

    def sentence(self) -> str:
        strategy = self.strategy if not self.zero_stage else f"{self.strategy} ZeRO-{self.zero_stage}"
        processes = f"{self.world_size} processes ({strategy}, {self.backend})"
        if self.world_size == 1:
            processes = "single process" if self.strategy == "single" else f"one process ({strategy})"
        batch = f"global batch {self.global_batch} = {self.micro_batch} x {self.accumulation}"
        if self.world_size > 1:
            batch += f" x {self.world_size}"
        more = ", activation checkpointing" if self.activation_checkpointing else ""
        more += "" if self.offload == "none" else f", {'optimizer state' if self.offload == 'optimizer' else 'all state'} in RAM"
        return f"{processes}, {self.precision}, {batch}{more}"


@cache
def json_types() -> dict[str, Any]:
    """Returns the type of each key of a plan's JSON."""
    return get_type_hints(Plan, include_extras=True) | {"device": Device}


def _checked(key: str, kind: Any, value: Any) -> Any:
    """Returns a key's value in its type; raises Problem where it does not fit."""
    try:
        container = get_origin(kind)
        if container not in (dict, list):
            return coerce(kind, value)
        if not isinstance(value, container):
            raise ValueError("an object" if container is dict else "a list")
        if key == "reasons" and not all(isinstance(text, str) for text in value.values()):
            raise ValueError("an object of texts")
        if key == "rejected" and not all(_is_rejected(entry) for entry in value):
            raise ValueError("a list of objects with a choice and a why")
        if key == "predicted" and value and not _is_prediction(value):
            raise ValueError("an object with memory_bytes, usable_bytes, step_seconds, seconds_by_part and samples_per_second")
    except ValueError as error:
        raise Problem(f"plan.{key}: {brief(value)} does not fit: it is {error}") from None
    return value


def _is_rejected(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("choice"), str) and isinstance(entry.get("why"), str)


def _is_prediction(values: Mapping[str, Any]) -> bool:
    parts = [part for key in ("memory_bytes", "seconds_by_part") if isinstance(part := values.get(key), dict)]
    if len(parts) < 2:
        return False
    numbers = [
        *(n for part in parts for n in part.values()),
        *(values.get(k) for k in ("usable_bytes", "step_seconds", "samples_per_second")),
    ]
    return all(isinstance(n, (int, float)) and not isinstance(n, bool) and 0 <= n < 2**63 for n in numbers)
