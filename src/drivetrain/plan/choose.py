"""From a recipe's settings and a machine to a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from drivetrain.hardware import ASSUMED_NETWORK_GBPS, UNKNOWN_CAPABILITY, Hardware
from drivetrain.outcomes import Problem
from drivetrain.plan import Plan, read_pins
from drivetrain.plan.deepspeed import configuration
from drivetrain.plan.fit import Fit, Point
from drivetrain.plan.predict import Machine
from drivetrain.plan.profile import Profile
from drivetrain.plan.search import Search
from drivetrain.structured import parse_json, read_text

GPU_LOADER_WORKERS = 4
SHARDS = {"zero_stage": "fsdp or deepspeed", "offload": "fsdp or deepspeed", "deepspeed_config": "deepspeed"}


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
    """The plan for a recipe's settings on this hardware. `global_batch` is always kept.

    With a profile, the fastest way that fits; with points measured on this machine, by these. With a profile without passes, the
    first way that the model's state fits. With none, each process takes its share at once.
    """
    pin = read_pins(pins or {})
    reasons: dict[str, str] = {}
    global_batch = int(settings["global_batch"])
    share = -(-global_batch // world_size)
    if world_size > global_batch:
        raise Problem(f"global_batch={global_batch} is less than one sample for each of {world_size} processes: raise it, or lower --procs")
    if "accumulation" in pin and "micro_batch" not in pin:
        pin["micro_batch"] = -(-share // pin["accumulation"])
    searched: dict[str, Any] = {}
    found_reasons: dict[str, str] = {}
    if profile is not None:
        searched, found_reasons = _search(profile, hardware, device, world_size, local_procs, nodes, global_batch, pin, points)

    def pinned(key: str, default: Any, reason: str) -> Any:
        reasons[key] = "pinned" if key in pin else found_reasons.get(key, reason)
        return pin.get(key, searched.get(key, default))

    alone = world_size == 1
    strategy = pinned("strategy", "single" if alone else "ddp", "one process" if alone else "the model fits each process")
    sharding = _sharding(strategy, pin, pinned)
    if not sharding and (strategy == "single") != alone:
        raise Problem(f"plan.strategy={strategy} does not go with {world_size} process{'' if alone else 'es'} (--procs)")
    backend = "none" if alone and not sharding else "nccl" if device == "cuda" else "gloo"
    reasons["backend"] = {"none": "one process needs none", "nccl": "GPUs", "gloo": "CPU processes"}[backend]
    precision, reasons["precision"] = _precision(settings["precision"], device, hardware)
    micro_batch = min(share, pinned("micro_batch", share, "each process takes its share of the global batch at once"))
    accumulation = -(-share // micro_batch)
    if pin.get("accumulation", accumulation) != accumulation:
        raise Problem(
            f"plan.accumulation={pin['accumulation']} and plan.micro_batch={micro_batch} do not make a share of {share}"
            f" samples a process: leave one of them out"
        )
    reasons["accumulation"] = f"{share} samples a process in micro-batches of at most {micro_batch}"
    cores = max(1, hardware.cpu_cores // max(1, local_procs))
    threads = pinned("threads", cores, f"{hardware.cpu_cores} cores over {local_procs} local process{'es' if local_procs > 1 else ''}")
    gpu = device == "cuda"
    half = gpu and precision in ("bf16", "fp16")
    plan = Plan(
        strategy=strategy,
        device=device,
        backend=backend,
        world_size=world_size,
        nodes=nodes,
        global_batch=global_batch,
        micro_batch=micro_batch,
        eval_micro_batch=pinned("eval_micro_batch", micro_batch, "as in training"),
        accumulation=accumulation,
        precision=precision,
        deterministic=bool(settings["deterministic"]),
        activation_checkpointing=pinned("activation_checkpointing", False, "not asked for"),
        **sharding,
        threads=threads,
        **_pace(strategy, bool(sharding), gpu, half, profile is None or profile.conv2d, pin, reasons),
        data=pinned("data", "auto", "tensors stay on the device, data sets go through the loader"),
        workers=pinned("workers", min(GPU_LOADER_WORKERS, cores) if gpu else 0, "of a GPU's host" if gpu else "the CPU is busy training"),
        prefetch=pinned("prefetch", 2, "two batches ahead a worker"),
        pin_memory=gpu,
        env=_environment(device, threads, bool(sharding)),
        predicted=searched.get("predicted", {}),
        measured=searched.get("measured", {}),
        reasons=reasons,
        rejected=searched.get("rejected", []),
    )
    if nodes > 1 and not hardware.network_gbps:
        reasons["network"] = (
            f"{ASSUMED_NETWORK_GBPS:g} Gb/s between machines are assumed; state their network after a comma:"
            f' --hardware "{nodes} nodes x {local_procs}xNAME-MEMORYGB, 100Gb/s"'
        )
    if strategy == "deepspeed":
        configuration(plan, float(settings["clip"]))  # what conflicts is said before anything starts
    return plan


def _pace(strategy: str, shards: bool, gpu: bool, half: bool, conv2d: bool, pin: dict[str, Any], reasons: dict[str, str]) -> dict[str, Any]:
    """How steps run, where the first ones do not decide it."""
    faster = "convolutions in half precision run faster so" if half else "no gain in full precision"
    chosen = {
        "capture": ("auto", "the first steps show") if gpu else ("off", "graphs are a GPU's"),
        "compile": ("auto", "the first steps show"),
        "channels_last": (half, faster) if conv2d else (False, "the model has no nn.Conv2d"),
    }
    if shards:
        why = f"parameters come and go under {strategy}"
        chosen = {"capture": ("off", why), "compile": ("off", why), "channels_last": (False, "parts of parameters lie flat")}
        for key, off in (("capture", "off"), ("compile", "off"), ("channels_last", False)):
            if pin.get(key, off) not in (off, "auto"):
                raise Problem(f"plan.{key}={pin[key]} does not go with plan.strategy={strategy}: {chosen[key][1]}")
    for key, (_, reason) in chosen.items():
        pinnable = key in pin and (gpu or key != "capture")
        reasons[key] = "pinned" if pinnable and not shards else reason
    return {k: pin.get(k, value) if reasons[k] == "pinned" else value for k, (value, _) in chosen.items()}


def _search(
    profile: Profile, hardware: Hardware, device: str, world_size: int, local_procs: int, nodes: int, global_batch: int,
    pin: Mapping[str, Any], points: Sequence[Point],
) -> tuple[dict[str, Any], dict[str, str]]:  # fmt: skip
    """What the search found, by the plan's words, and its reasons."""
    machine = Machine.of(hardware, device, local_procs)
    fit, deepspeed = Fit.of(points), find_spec("deepspeed") is not None
    search = Search(profile, machine, global_batch, world_size, nodes, fit)
    if profile.plain is None:
        way, reasons, rejected = search.choose_by_state(pin, deepspeed)
        return {"strategy": way.strategy, "zero_stage": way.zero_stage, "offload": way.offload, "rejected": rejected}, reasons
    choice = search.choose(pin, deepspeed)
    best, candidate = choice.best, choice.best.candidate
    figures = {
        "memory_bytes": best.memory, "usable_bytes": best.usable, "step_seconds": best.step, "seconds_by_part": best.seconds,
        "samples_per_second": best.rate,
    }  # fmt: skip
    found = {
        "strategy": candidate.strategy, "zero_stage": candidate.zero_stage, "micro_batch": candidate.micro_batch,
        "activation_checkpointing": candidate.checkpointing, "offload": candidate.offload,
        "eval_micro_batch": choice.eval_micro_batch, "rejected": choice.rejected, "predicted": figures,
    }  # fmt: skip
    if fit is not None:
        found["measured"] = {"points": [p.to_json() for p in points]}
    return found, choice.reasons


def _environment(device: str, threads: int, sharded: bool) -> dict[str, str]:
    """Variables that workers get, unless the user has set them."""
    # Threads that wait by spinning take the cores from whatever else runs on them: beside other load a step took ten times as long (measured).
    variables = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    # Parameters that come and go leave gaps, which growing segments close. Captured steps are ten times slower with them (measured).
    return variables | ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if device == "cuda" and sharded else {})


def _sharding(strategy: str, pin: dict[str, Any], pinned: Callable[[str, Any, str], Any]) -> dict[str, Any]:
    """What is sharded and where it lives, for the strategies that shard."""
    if strategy not in ("fsdp", "deepspeed"):
        for key in ("zero_stage", "offload", "deepspeed_config"):
            if pin.get(key, "none") != "none":
                raise Problem(f"plan.{key} does not go with plan.strategy={strategy}: add plan.strategy={SHARDS[key]}")
        return {}
    stage = pinned("zero_stage", 3 if strategy == "fsdp" else 2, "asked for the strategy alone")
    offload = pinned("offload", "none", "state fits the device")
    if strategy == "fsdp":
        if stage == 1:
            raise Problem("plan.zero_stage=1 is DeepSpeed's: fsdp knows 2 (parameters stay after the forward pass) and 3")
        if offload == "optimizer":
            raise Problem("plan.offload=optimizer is DeepSpeed's: fsdp moves parameters, gradients and optimizer state together (all)")
        if "deepspeed_config" in pin:
            raise Problem("plan.deepspeed_config does not go with plan.strategy=fsdp")
        return {"zero_stage": stage, "offload": offload}
    if find_spec("deepspeed") is None:
        raise Problem("plan.strategy=deepspeed: DeepSpeed is not installed; pip install 'drivetrain[deepspeed]'")
    if offload == "all" and stage != 3:
        raise Problem("plan.offload=all moves parameters too, which needs plan.zero_stage=3")
    return {"zero_stage": stage, "offload": offload, "deepspeed_config": _read_json(pin.get("deepspeed_config"))}


def _read_json(path: str | dict[str, Any] | None) -> dict[str, Any]:
    if path is None or isinstance(path, dict):
        return path or {}
    found = parse_json(read_text(Path(path), "plan.deepspeed_config"), Path(path))
    if not isinstance(found, dict):
        raise Problem(f"plan.deepspeed_config={path}: DeepSpeed's configuration is an object, not a {type(found).__name__}")
    return found


def _precision(asked: str, device: str, hardware: Hardware) -> tuple[Any, str]:
    if asked == "tf32" and device != "cuda":
        raise Problem("precision=tf32 needs an NVIDIA GPU (Ampere or later): use precision=fp32 here")
    if asked != "auto":
        return asked, "asked for"
    if device != "cuda":
        return "fp32", "exact, and half precision gains nothing on most CPUs"
    oldest = min((g.compute_capability for g in hardware.gpus), default=(8, 0))
    if oldest == UNKNOWN_CAPABILITY:
        return "fp16", "the GPU's compute capability is unknown, so bf16 is not counted on (precision=bf16 where it has it)"
    if oldest >= (8, 0):
        return "bf16", f"compute capability {oldest[0]}.{oldest[1]} has it"
    return "fp16", f"compute capability {oldest[0]}.{oldest[1]} has no bf16"
