"""Chooses the plan: takes a recipe's settings, hardware, pins and (where known) the task's profile; returns a `Plan` with reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.hardware import ASSUMED_NETWORK_GBPS, UNKNOWN_CAPABILITY, Hardware
from drivetrain.outcomes import Problem
from drivetrain.plan.capacity import MachineCapacity
from drivetrain.plan.choices import Backend, is_sharding
from drivetrain.plan.deepspeed import configuration, is_deepspeed_installed
from drivetrain.plan.fit import Fit, Point
from drivetrain.plan.pins import read_pins
from drivetrain.plan.plan import Plan
from drivetrain.plan.profile import Profile
from drivetrain.plan.rating import Rater
from drivetrain.plan.search import choose_by_state, choose_fastest
from drivetrain.structured import parse_json, read_text

MAX_LOADER_WORKERS_PER_GPU = 4
STRATEGY_OF_KEY = {"zero_stage": "fsdp or deepspeed", "offload": "fsdp or deepspeed", "deepspeed_config": "deepspeed"}


@dataclass(frozen=True)
class _Searched:
    """The search's choices, by the plan's keys, and their reasons."""

    values: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


class _Picker:
    """Picks the value of each key (the user's pin, else the search's, else a default) and records the reason."""

    def __init__(self, pins: dict[str, Any], searched: _Searched) -> None:
        self.pins = pins
        self.reasons: dict[str, str] = {}
        self._searched = searched

    def pick(self, key: str, default: Any, reason: str) -> Any:
        self.reasons[key] = "pinned" if key in self.pins else self._searched.reasons.get(key, reason)
        return self.pins.get(key, self._searched.values.get(key, default))


def choose(
    settings: Mapping[str, Any],
    hardware: Hardware,
    *,
    device: str,
    world_size: int,
    local_procs: int,
    nodes: int = 1,
    pins: Mapping[str, object] | None = None,
    profile: Profile | None = None,
    points: Sequence[Point] = (),
) -> Plan:
    """Returns the plan for a recipe's settings on this hardware. `global_batch` never changes.

    With a profile: the fastest candidate that fits; `points`, measured on this machine, correct the predictions. With a profile
    without passes: the first candidate whose state fits. Without a profile: each process takes its share in one micro-batch.
    """
    pin = read_pins(pins or {})
    share = _share(int(settings["global_batch"]), world_size, pin)
    searched = _Searched()
    if profile is not None:
        machine = MachineCapacity.of(hardware, device, local_procs)
        searched = _search(Rater(profile, machine, int(settings["global_batch"]), world_size, nodes, Fit.of(points)), pin, points)
    picker = _Picker(pin, searched)
    reasons, is_gpu = picker.reasons, device == "cuda"
    strategy = _strategy(picker, world_size)
    sharding = _sharding(strategy, picker, world_size)
    backend: Backend = "none" if world_size == 1 and not sharding else "nccl" if is_gpu else "gloo"
    reasons["backend"] = {"none": "one process needs none", "nccl": "GPUs", "gloo": "CPU processes"}[backend]
    precision, reasons["precision"] = _precision(settings["precision"], device, hardware)
    micro_batch, accumulation = _micro_batch(picker, share)
    cores = max(1, hardware.cpu_cores // max(1, local_procs))
    threads = picker.pick("threads", cores, f"{hardware.cpu_cores} cores over {local_procs} local process{'es' if local_procs > 1 else ''}")
    has_fast_half = is_gpu and precision in ("bf16", "fp16")
    plan = Plan(
        strategy=strategy,
        device=device,
        backend=backend,
        world_size=world_size,
        nodes=nodes,
        global_batch=int(settings["global_batch"]),
        micro_batch=micro_batch,
        eval_micro_batch=picker.pick("eval_micro_batch", micro_batch, "as in training"),
        accumulation=accumulation,
        precision=precision,
        deterministic=bool(settings["deterministic"]),
        activation_checkpointing=picker.pick("activation_checkpointing", False, "not asked for"),
        **sharding,
        threads=threads,
        **_execution(strategy, is_gpu, has_fast_half, profile is None or profile.conv2d, picker),
        **_data(is_gpu, cores, picker),
        pin_memory=is_gpu,
        env=_environment(device, threads, bool(sharding)),
        **{key: searched.values[key] for key in ("predicted", "measured", "rejected") if key in searched.values},
        reasons=reasons,
    )
    if nodes > 1 and not hardware.network_gbps:
        reasons["network"] = _assumed_network(nodes, local_procs)
    if strategy == "deepspeed":
        configuration(plan, float(settings["clip"]))  # raises Problem for conflicts, before anything starts
    return plan


# --- batches ------------------------------------------------------------------------------------


def _share(global_batch: int, world_size: int, pins: dict[str, Any]) -> int:
    """Returns the samples that one process takes. A pinned accumulation alone also pins the micro-batch that follows from it."""
    share = -(-global_batch // world_size)
    if world_size > global_batch:
        raise Problem(f"global_batch={global_batch} is less than one sample for each of {world_size} processes: raise it, or lower --procs")
    if "accumulation" in pins and "micro_batch" not in pins:
        pins["micro_batch"] = -(-share // pins["accumulation"])
    return share


def _micro_batch(picker: _Picker, share: int) -> tuple[int, int]:
    """Returns micro-batch and accumulation."""
    micro_batch = min(share, picker.pick("micro_batch", share, "each process takes its share of the global batch at once"))
    accumulation = -(-share // micro_batch)
    if picker.pins.get("accumulation", accumulation) != accumulation:
        raise Problem(
            f"plan.accumulation={picker.pins['accumulation']} and plan.micro_batch={micro_batch} do not make a share of {share}"
            f" samples a process: leave one of them out"
        )
    picker.reasons["accumulation"] = f"{share} samples a process in micro-batches of at most {micro_batch}"
    return micro_batch, accumulation


# --- strategy -----------------------------------------------------------------------------------


def _search(rater: Rater, pins: Mapping[str, Any], points: Sequence[Point]) -> _Searched:
    deepspeed = is_deepspeed_installed()
    if rater.profile.plain is None:
        candidate, reasons, rejected = choose_by_state(rater, pins, deepspeed)
        state_values = {"strategy": candidate.strategy, "zero_stage": candidate.zero_stage, "offload": candidate.offload}
        return _Searched(state_values | {"rejected": rejected}, reasons)
    choice = choose_fastest(rater, pins, deepspeed)
    best, candidate = choice.best, choice.best.candidate
    predicted = {
        "memory_bytes": best.memory, "usable_bytes": best.usable_bytes, "step_seconds": best.step_seconds, "seconds_by_part": best.seconds,
        "samples_per_second": best.samples_per_second,
    }  # fmt: skip
    values: dict[str, Any] = {
        "strategy": candidate.strategy, "zero_stage": candidate.zero_stage, "micro_batch": candidate.micro_batch,
        "activation_checkpointing": candidate.checkpointing, "offload": candidate.offload,
        "eval_micro_batch": choice.eval_micro_batch, "rejected": choice.rejected, "predicted": predicted,
    }  # fmt: skip
    if rater.fit is not None:
        values["measured"] = {"points": [p.to_json() for p in points]}
    return _Searched(values, choice.reasons)


def _strategy(picker: _Picker, world_size: int) -> Any:
    if world_size == 1:
        return picker.pick("strategy", "single", "one process")
    return picker.pick("strategy", "ddp", "the model fits each process")


def _sharding(strategy: str, picker: _Picker, world_size: int) -> dict[str, Any]:
    """Returns zero_stage, offload and deepspeed_config for strategies that shard, {} for others; raises Problem for impossible pins."""
    if not is_sharding(strategy):
        for key in ("zero_stage", "offload", "deepspeed_config"):
            if picker.pins.get(key, "none") != "none":
                raise Problem(f"plan.{key} does not go with plan.strategy={strategy}: add plan.strategy={STRATEGY_OF_KEY[key]}")
        if (strategy == "single") != (world_size == 1):
            raise Problem(f"plan.strategy={strategy} does not go with {world_size} process{'' if world_size == 1 else 'es'} (--procs)")
        return {}
    stage = picker.pick("zero_stage", 3 if strategy == "fsdp" else 2, "asked for the strategy alone")
    offload = picker.pick("offload", "none", "state fits the device")
    if strategy == "fsdp":
        _check_fsdp(stage, offload, picker.pins)
        return {"zero_stage": stage, "offload": offload}
    if not is_deepspeed_installed():
        raise Problem("plan.strategy=deepspeed: DeepSpeed is not installed; pip install 'drivetrain[deepspeed]'")
    if offload == "all" and stage != 3:
        raise Problem("plan.offload=all moves parameters too, which needs plan.zero_stage=3")
    return {"zero_stage": stage, "offload": offload, "deepspeed_config": _read_json(picker.pins.get("deepspeed_config"))}


def _check_fsdp(stage: int, offload: str, pins: Mapping[str, Any]) -> None:
    if stage == 1:
        raise Problem("plan.zero_stage=1 is DeepSpeed's: fsdp knows 2 (parameters stay after the forward pass) and 3")
    if offload == "optimizer":
        raise Problem("plan.offload=optimizer is DeepSpeed's: fsdp moves parameters, gradients and optimizer state together (all)")
    if "deepspeed_config" in pins:
        raise Problem("plan.deepspeed_config does not go with plan.strategy=fsdp")


def _read_json(path: str | dict[str, Any] | None) -> dict[str, Any]:
    if path is None or isinstance(path, dict):
        return path or {}
    content = parse_json(read_text(Path(path), "plan.deepspeed_config"), Path(path))
    if not isinstance(content, dict):
        raise Problem(f"plan.deepspeed_config={path}: DeepSpeed's configuration is an object, not a {type(content).__name__}")
    return content


# --- how steps run ------------------------------------------------------------------------------


def _precision(setting: str, device: str, hardware: Hardware) -> tuple[Any, str]:
    """Returns the precision and its reason."""
    if setting == "tf32" and device != "cuda":
        raise Problem("precision=tf32 needs an NVIDIA GPU (Ampere or later): use precision=fp32 here")
    if setting != "auto":
        return setting, "asked for"
    if device != "cuda":
        return "fp32", "exact, and half precision gains nothing on most CPUs"
    oldest = min((g.compute_capability for g in hardware.gpus), default=(8, 0))
    if oldest == UNKNOWN_CAPABILITY:
        return "fp16", "the GPU's compute capability is unknown, so bf16 is not counted on (precision=bf16 where it has it)"
    if oldest >= (8, 0):
        return "bf16", f"compute capability {oldest[0]}.{oldest[1]} has it"
    return "fp16", f"compute capability {oldest[0]}.{oldest[1]} has no bf16"


def _execution(strategy: str, is_gpu: bool, has_fast_half: bool, has_conv2d: bool, picker: _Picker) -> dict[str, Any]:
    """Returns capture, compile and channels_last; "auto" where the first steps of the run decide."""
    pins = picker.pins
    faster = "convolutions in half precision run faster so" if has_fast_half else "no gain in full precision"
    defaults: dict[str, tuple[Any, str]] = {
        "capture": ("auto", "the first steps show") if is_gpu else ("off", "graphs are a GPU's"),
        "compile": ("auto", "the first steps show"),
        "channels_last": (has_fast_half, faster) if has_conv2d else (False, "the model has no nn.Conv2d"),
    }
    if is_sharding(strategy):
        why = f"parameters come and go under {strategy}"
        defaults = {"capture": ("off", why), "compile": ("off", why), "channels_last": (False, "parts of parameters lie flat")}
        for key, (off, reason) in defaults.items():
            if pins.get(key, off) not in (off, "auto"):
                raise Problem(f"plan.{key}={pins[key]} does not go with plan.strategy={strategy}: {reason}")
    chosen = {}
    for key, (default, reason) in defaults.items():
        is_pinned = key in pins and (is_gpu or key != "capture") and not is_sharding(strategy)
        picker.reasons[key] = "pinned" if is_pinned else reason
        chosen[key] = pins[key] if is_pinned else default
    return chosen


def _data(is_gpu: bool, cores: int, picker: _Picker) -> dict[str, Any]:
    """Returns where the data lives and how it is loaded."""
    workers, why_workers = (min(MAX_LOADER_WORKERS_PER_GPU, cores), "of a GPU's host") if is_gpu else (0, "the CPU is busy training")
    return {
        "data": picker.pick("data", "auto", "tensors stay on the device, data sets go through the loader"),
        "workers": picker.pick("workers", workers, why_workers),
        "prefetch": picker.pick("prefetch", 2, "two batches ahead a worker"),
    }


def _assumed_network(nodes: int, local_procs: int) -> str:
    return (
        f"{ASSUMED_NETWORK_GBPS:g} Gb/s between machines are assumed; state their network after a comma:"
        f' --hardware "{nodes} nodes x {local_procs}xNAME-MEMORYGB, 100Gb/s"'
    )


def _environment(device: str, threads: int, is_sharded: bool) -> dict[str, str]:
    """Returns the environment variables of the workers, unless the user set them."""
    # Threads that spin while they wait occupy cores that other processes need: under load a step took ten times as long (measured).
    variables = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    # Gathering and freeing parameters fragments memory; expandable segments avoid this, but make captured steps ten times slower
    # (measured), and sharded steps are never captured.
    return variables | ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if device == "cuda" and is_sharded else {})
