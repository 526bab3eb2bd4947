"""The plan: how a recipe runs on given hardware, every choice with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Literal

from drivetrain.outcomes import Problem
from drivetrain.plan.environment import check_environment
from drivetrain.settings import Range, brief, coerce, nearest, read_type

HOST_WAITS = "the host waits there for the device's result"  # why steps are not captured, behind the line it is about


@dataclass(frozen=True)
class Plan:
    strategy: Literal["single", "ddp", "fsdp", "deepspeed"] = "single"
    zero_stage: Literal[0, 1, 2, 3] = 0
    """What fsdp and deepspeed shard: 1 optimizer state, 2 gradients too, 3 parameters too (fsdp knows 2 and 3)."""
    device: str = "cpu"
    backend: str = "none"
    world_size: Annotated[int, Range(1, 1_000_000)] = 1
    nodes: Annotated[int, Range(1, 100_000)] = 1
    global_batch: Annotated[int, Range(1, 2**31 - 1)] = 1
    micro_batch: Annotated[int, Range(1, 2**31 - 1)] = 1
    eval_micro_batch: Annotated[int, Range(1, 2**31 - 1)] = 1
    accumulation: Annotated[int, Range(1, 2**31 - 1)] = 1
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    deterministic: bool = False
    threads: Annotated[int, Range(1, 1024)] = 1
    activation_checkpointing: bool = False
    """Blocks keep only their inputs and run again in the backward pass."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What lives in the host's memory: nothing, the optimizer's state, or parameters and gradients too."""
    deepspeed_config: dict[str, Any] = field(default_factory=dict)
    """Keys of DeepSpeed's configuration that the user gave."""
    capture: Literal["auto", "on", "off"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    compile_from: Annotated[int, Range(0, 2**63 - 1)] | None = None
    """The step from which on compiled code ran, where that was decided on the way."""
    data: Literal["auto", "device", "loader"] = "auto"
    workers: Annotated[int, Range(0, 256)] = 0
    prefetch: Annotated[int, Range(1, 64)] = 2
    pin_memory: bool = False
    channels_last: bool = False
    env: dict[str, str] = field(default_factory=dict)
    """Variables that workers get unless the user has set them; `plan.environment` lists the names that are allowed."""
    predicted: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    rejected: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_environment(self.env)  # so that no plan exists, wherever it came from, with a variable that it may not set

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Plan:
        """Returns the plan that JSON describes; a value that no plan has is a Problem, an unknown key is left out."""
        kinds = {f.name: str(f.type) for f in fields(Plan)}
        return Plan(**{key: _checked(key, kinds[key], value) for key, value in values.items() if key in kinds})

    @property
    def shards(self) -> bool:
        """Whether processes hold parts of the model's state, so that parameters come and go within a step."""
        return self.strategy in ("fsdp", "deepspeed")

    def compiled_from(self, step: int, saved: int | None) -> int | None:
        """The step from which on compiled code runs, for a run that begins or goes on after `step`: as a checkpoint
        saved it or as it was decided, unless it is pinned now."""
        if self.shards:
            return None
        if self.reasons.get("compile") != "pinned":
            return self.compile_from if saved is None else saved
        if self.compile == "on":
            return step if saved is None else saved
        return None

    def halved(self, step: int, share: int, evaluation: bool) -> Smaller | None:
        """What changes once memory ran out at a step: half as many samples at a time, of the `share` of a whole batch that
        a process takes; None where it is one already."""
        was, now = half(share, self.eval_micro_batch if evaluation else self.micro_batch)
        if was == 1:
            return None
        why = f"halved from {was}: out of memory {'in the evaluation ' if evaluation else ''}at step {step:,}"
        if evaluation:
            return Smaller(was, now, {"eval_micro_batch": now, "reasons": self.reasons | {"eval_micro_batch": why}})
        accumulation = -(-share // now)
        reasons = self.reasons | {
            "micro_batch": why,
            "accumulation": f"{share} samples a process in micro-batches of at most {now}",
        }
        changes: dict[str, Any] = {"micro_batch": now, "accumulation": accumulation, "measured": {}, "reasons": reasons}
        # How steps run best is found out anew, unless the user said how.
        for key, open_choice in (("capture", "auto" if self.device == "cuda" else "off"), ("compile", "auto")):
            if self.reasons.get(key) != "pinned":
                changes[key] = open_choice
        if "compile" in changes:
            changes["compile_from"] = None
        return Smaller(was, now, changes)

    def sentence(self) -> str:
        how = self.strategy if not self.zero_stage else f"{self.strategy} ZeRO-{self.zero_stage}"
        kind = f"{self.world_size} processes ({how}, {self.backend})"
        if self.world_size == 1:
            kind = "single process" if self.strategy == "single" else f"one process ({how})"
        batch = f"global batch {self.global_batch} = {self.micro_batch} x {self.accumulation}"
        if self.world_size > 1:
            batch += f" x {self.world_size}"
        more = ", activation checkpointing" if self.activation_checkpointing else ""
        more += "" if self.offload == "none" else f", {'optimizer state' if self.offload == 'optimizer' else 'all state'} in RAM"
        return f"{kind}, {self.precision}, {batch}{more}"


def half(share: int, micro: int) -> tuple[int, int]:
    """How many samples of a share run at a time, where it is cut into equal pieces of at most `micro`; and half of that."""
    was = -(-share // -(-share // micro))
    return was, -(-was // 2)


@dataclass(frozen=True)
class Smaller:
    """A change of the plan to fewer samples at a time."""

    was: int
    now: int
    changes: dict[str, Any]
    """The plan's keys that change."""

    def sizes(self) -> dict[str, int]:
        return {k: v for k, v in self.changes.items() if k in ("micro_batch", "eval_micro_batch", "accumulation")}

    def sentence(self) -> str:
        what = "micro-batch" if "micro_batch" in self.changes else "evaluation's micro-batch"
        return f"{what} {self.was} -> {self.now}"

    def facts(self, step: int, rank: int, during: str) -> dict[str, Any]:
        """For whoever starts the run anew."""
        text = f"out of memory at step {step:,} on rank {rank}: {self.sentence()}"
        oom = {"step": step, "rank": rank, "was": self.was, "now": self.now, "during": during}
        return {"plan": self.changes, "sizes": self.sizes(), "oom": oom, "sentence": text}


_FREE = ("micro_batch", "eval_micro_batch", "accumulation", "strategy", "zero_stage", "activation_checkpointing", "offload", "deepspeed_config",
         "threads", "data", "workers", "prefetch", "capture", "compile", "channels_last")  # fmt: skip
PINNABLE = {f.name: str(f.type) for f in fields(Plan) if f.name in _FREE} | {
    "zero_stage": "Annotated[int, Range(1, 3)]",  # 0 is what other strategies have
    "deepspeed_config": "str",  # a file
}


WORDS = {"device": "Literal['cuda', 'cpu', 'mps']", "backend": "Literal['none', 'nccl', 'gloo']"}  # of a str within Plan


def _checked(key: str, kind: str, value: Any) -> Any:
    """Returns a key's value in its type."""
    container = {"dict": dict, "list": list}.get(kind.partition("[")[0])
    try:
        if container is None:
            return coerce(read_type(WORDS.get(key, kind)), value)
        if not isinstance(value, container):
            raise ValueError("an object" if container is dict else "a list")
        if key == "reasons" and not all(isinstance(text, str) for text in value.values()):
            raise ValueError("an object of texts")
        if key == "rejected" and not all(
            isinstance(lost, dict) and isinstance(lost.get("choice"), str) and isinstance(lost.get("why"), str) for lost in value
        ):
            raise ValueError("a list of objects with a choice and a why")
        if key == "predicted" and value and not _is_prediction(value):
            raise ValueError("an object with memory_bytes, usable_bytes, step_seconds, seconds_by_part and samples_per_second")
    except ValueError as error:
        raise Problem(f"plan.{key}: {brief(value)} does not fit: it is {error}") from None
    return value


def _is_prediction(values: Mapping[str, Any]) -> bool:
    parts = [part for key in ("memory_bytes", "seconds_by_part") if isinstance(part := values.get(key), dict)]
    if len(parts) < 2:
        return False
    numbers = [
        *(n for part in parts for n in part.values()),
        *(values.get(k) for k in ("usable_bytes", "step_seconds", "samples_per_second")),
    ]
    return all(isinstance(n, (int, float)) and not isinstance(n, bool) and 0 <= n < 2**63 for n in numbers)


def read_pins(given: Mapping[str, object]) -> dict[str, Any]:
    """Check `plan.KEY=VALUE` choices of the user."""
    pins = {}
    for key, value in given.items():
        if key not in PINNABLE:
            raise Problem(f"the plan has no choice {brief(key)} to pin{nearest(key, PINNABLE)} (these can be: {', '.join(PINNABLE)})")
        if key == "deepspeed_config" and isinstance(value, Mapping):
            pins[key] = dict(value)  # the content itself, read from a file already
            continue
        try:
            pins[key] = coerce(read_type(PINNABLE[key]), value)
        except ValueError as error:
            raise Problem(f"plan.{key}={brief(value)} does not fit: it is {error}") from None
    return pins
