"""The plan: how a recipe runs on given hardware, every choice with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from drivetrain.hardware import Hardware
from drivetrain.outcomes import Problem
from drivetrain.settings import coerce, nearest, read_type

GPU_LOADER_WORKERS = 4


@dataclass(frozen=True)
class Plan:
    strategy: Literal["single", "ddp"] = "single"
    device: str = "cpu"
    backend: str = "none"
    world_size: int = 1
    nodes: int = 1
    global_batch: int = 1
    micro_batch: int = 1
    eval_micro_batch: int = 1
    accumulation: int = 1
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    deterministic: bool = False
    threads: int = 1
    capture: Literal["auto", "on", "off"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    compile_from: int | None = None
    """The step from which on compiled code ran, where that was decided on the way."""
    data: Literal["auto", "device", "loader"] = "auto"
    workers: int = 0
    prefetch: int = 2
    pin_memory: bool = False
    channels_last: bool = False
    env: dict[str, str] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    rejected: list[dict[str, str]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Plan:
        known = {f.name for f in fields(Plan)}
        return Plan(**{k: v for k, v in values.items() if k in known})

    def compiled_from(self, step: int, saved: int | None) -> int | None:
        """The step from which on compiled code runs, for a run that begins or goes on after `step`: as a checkpoint
        saved it or as it was decided, unless it is pinned now."""
        if self.reasons.get("compile") != "pinned":
            return self.compile_from if saved is None else saved
        if self.compile == "on":
            return step if saved is None else saved
        return None

    def sentence(self) -> str:
        kind = "single process" if self.world_size == 1 else f"{self.world_size} processes ({self.strategy}, {self.backend})"
        batch = f"global batch {self.global_batch} = {self.micro_batch} x {self.accumulation}"
        if self.world_size > 1:
            batch += f" x {self.world_size}"
        return f"{kind}, {self.precision}, {batch}"


PINNABLE = {
    "micro_batch": "Annotated[int, Range(1)]",
    "eval_micro_batch": "Annotated[int, Range(1)]",
    "accumulation": "Annotated[int, Range(1)]",
    "strategy": "Literal['single', 'ddp']",
    "threads": "Annotated[int, Range(1)]",
    "data": "Literal['auto', 'device', 'loader']",
    "workers": "Annotated[int, Range(0, 256)]",
    "prefetch": "Annotated[int, Range(1, 64)]",
    "capture": "Literal['auto', 'on', 'off']",
    "compile": "Literal['auto', 'on', 'off']",
    "channels_last": "bool",
}


def read_pins(given: Mapping[str, object]) -> dict[str, Any]:
    """Check `plan.KEY=VALUE` choices of the user."""
    pins = {}
    for key, value in given.items():
        if key not in PINNABLE:
            raise Problem(f"the plan has no choice {key!r} to pin{nearest(key, PINNABLE)} (these can be: {', '.join(PINNABLE)})")
        try:
            pins[key] = coerce(read_type(PINNABLE[key]), value)
        except ValueError as error:
            raise Problem(f"plan.{key}={value} does not fit: it is {error}") from None
    return pins


def choose(
    settings: Mapping[str, Any],
    hardware: Hardware,
    *,
    device: str,
    world_size: int,
    local_procs: int,
    nodes: int = 1,
    pins: Mapping[str, object] | None = None,
) -> Plan:
    """The plan for a recipe's settings on this hardware. `global_batch` is always kept."""
    pin = read_pins(pins or {})
    reasons: dict[str, str] = {}

    def pinned(key: str, default: Any, reason: str) -> Any:
        reasons[key] = "pinned" if key in pin else reason
        return pin.get(key, default)

    single = world_size == 1
    strategy = pinned("strategy", "single" if single else "ddp", "one process" if single else "the model fits each process")
    if (strategy == "single") != single:
        raise Problem(f"plan.strategy={strategy} does not go with {world_size} process{'' if single else 'es'} (--procs)")
    backend = "none" if single else "nccl" if device == "cuda" else "gloo"
    reasons["backend"] = {"none": "one process needs none", "nccl": "GPUs", "gloo": "CPU processes"}[backend]
    precision, reasons["precision"] = _precision(settings["precision"], device, hardware)
    global_batch = int(settings["global_batch"])
    share = -(-global_batch // world_size)
    if "accumulation" in pin and "micro_batch" not in pin:
        pin["micro_batch"] = -(-share // pin["accumulation"])
    micro_batch = min(share, pinned("micro_batch", share, "each process takes its share of the global batch at once"))
    accumulation = -(-share // micro_batch)
    if pin.get("accumulation", accumulation) != accumulation:
        raise Problem(
            f"plan.accumulation={pin['accumulation']} and plan.micro_batch={micro_batch} do not make a share of {share}"
            f" samples a process: leave one of them out"
        )
    reasons["accumulation"] = f"{share} samples a process in micro-batches of at most {micro_batch}"
    cores = max(1, hardware.cpu_cores // max(1, local_procs))
    gpu = device == "cuda"
    half = gpu and precision in ("bf16", "fp16")
    if not gpu:
        reasons["capture"] = "graphs are a GPU's"
    return Plan(
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
        threads=pinned("threads", cores, f"{hardware.cpu_cores} cores over {local_procs} local processes"),
        capture=pinned("capture", "auto", "the first steps show") if gpu else "off",
        compile=pinned("compile", "auto", "the first steps show"),
        data=pinned("data", "auto", "tensors stay on the device, data sets go through the loader"),
        workers=pinned("workers", min(GPU_LOADER_WORKERS, cores) if gpu else 0, "of a GPU's host" if gpu else "the CPU is busy training"),
        prefetch=pinned("prefetch", 2, "two batches ahead a worker"),
        pin_memory=gpu,
        channels_last=pinned(
            "channels_last", half, "convolutions in half precision run faster so" if half else "no gain in full precision"
        ),
        reasons=reasons,
    )


def _precision(asked: str, device: str, hardware: Hardware) -> tuple[Any, str]:
    if asked == "tf32" and device != "cuda":
        raise Problem("precision=tf32 needs an NVIDIA GPU (Ampere or later): use precision=fp32 here")
    if asked != "auto":
        return asked, "asked for"
    if device != "cuda":
        return "fp32", "exact, and half precision gains nothing on most CPUs"
    oldest = min((g.compute_capability for g in hardware.gpus), default=(8, 0))
    if oldest >= (8, 0):
        return "bf16", f"compute capability {oldest[0]}.{oldest[1]} has it"
    return "fp16", f"compute capability {oldest[0]}.{oldest[1]} has no bf16"
