"""What this machine has: cores, memory and GPUs, found without importing torch."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from drivetrain.outcomes import Problem

NVML_TIMEOUT = 5.0  # a wedged driver never answers; a healthy one does in milliseconds
TORCH_TIMEOUT = 60.0  # it is imported first
NETWORK = 25.0  # Gb/s that are assumed between machines where nothing was said of their network
UNKNOWN_CAPABILITY = (0, 0)
CGROUPS = "/sys/fs/cgroup"
T = TypeVar("T")


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    """UNKNOWN_CAPABILITY where a card was described by a name that does not tell it."""
    uuid: str = ""
    free_bytes: int = 0
    power_limit_watts: float = 0.0
    mig: bool = False
    """A slice of a GPU."""


@dataclass(frozen=True)
class Hardware:
    cpu_cores: int
    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()
    gpu_note: str = ""
    """Why there is no GPU, or what is odd about those there are."""
    driver: str = ""
    driver_cuda: tuple[int, int] = (0, 0)
    nodes: int = 1
    network_gbps: float = 0.0
    """Between machines; 0 where nothing was said of it."""
    described: str = ""
    """The words of a machine that is not here."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def sentence(self) -> str:
        cores = f"{self.cpu_cores} CPU core{'s' if self.cpu_cores != 1 else ''}, {gib(self.memory_bytes)} RAM"
        if not self.gpus:
            return f"{cores}, no GPU ({self.gpu_note})"
        first = min(self.gpus, key=lambda g: g.memory_bytes)
        unequal = " (the smallest of unequal ones)" if len({(g.name, g.memory_bytes) for g in self.gpus}) > 1 else ""
        machines = f"{self.nodes} machines of " if self.nodes > 1 else ""
        return f"{machines}{len(self.gpus)} x {first.name} {gib(first.memory_bytes)}{unequal}, {cores}"


def size(count: float) -> str:
    return gib(count) if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def gib(size: float) -> str:
    return f"{size / 2**30:.0f} GiB" if size >= 10 * 2**30 else f"{size / 2**30:.1f} GiB"


def need_of_room(need: float, room: float, show: Callable[[float], str] = gib) -> str:
    """ "13 GiB of 14 GiB", with as many digits as tell the two apart."""
    texts = show(need), show(room)
    for digits in (1, 2, 3):
        if texts[0] == texts[1]:
            texts = f"{need / 2**30:.{digits}f} GiB", f"{room / 2**30:.{digits}f} GiB"
    return f"{texts[0]} of {texts[1]}"


def detect() -> Hardware:
    gpus, note, driver, driver_cuda = _gpus()
    return Hardware(cpu_cores(), memory_bytes(), gpus, note, driver, driver_cuda)


def cpu_cores() -> int:
    """Cores this process may use: affinity and the container's quota, not the host's count."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups("cpu"):
        quota, _, period = _read(f"{group}/cpu.max").partition(" ")
        if not quota:
            quota, period = _read(f"{group}/cpu.cfs_quota_us"), _read(f"{group}/cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def memory_bytes() -> int:
    import psutil

    total = int(psutil.virtual_memory().total)
    for group in _groups("memory"):
        limit = _read(f"{group}/memory.max") or _read(f"{group}/memory.limit_in_bytes")
        if limit.isdigit():
            total = min(total, int(limit))
    return total


def _groups(controller: str) -> list[str]:
    """The folders of this process's control group and of those it is in: each may limit it."""
    found = [CGROUPS, f"{CGROUPS}/{controller}"]
    for line in _read("/proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if not names or controller in names.split(","):
            base = f"{CGROUPS}/{controller}" if names else CGROUPS
            parts = [p for p in path.split("/") if p not in ("", "..")]
            found += ["/".join((base, *parts[:count])) for count in range(1, len(parts) + 1)]
    return found


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def with_timeout(call: Callable[[], T], seconds: float) -> T:
    """Run a call that may never return; TimeoutError then (its thread is left behind)."""
    box: list[Any] = []

    def run() -> None:
        try:
            box.append((True, call()))
        except BaseException as error:
            box.append((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not box:
        raise TimeoutError
    ok, value = box[0]
    if not ok:
        raise value
    return value  # type: ignore[no-any-return]


def has_driver() -> bool:
    """Whether it is worth asking NVIDIA's driver."""
    return platform.system() != "Linux" or Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def _gpus() -> tuple[tuple[Gpu, ...], str, str, tuple[int, int]]:
    if not has_driver():
        return (_ask_torch() if Path("/dev/kfd").exists() else ()), "no driver", "", (0, 0)
    try:
        return with_timeout(_ask_nvml, NVML_TIMEOUT)
    except TimeoutError:
        return (), f"the NVIDIA driver did not answer within {NVML_TIMEOUT:.0f} s", "", (0, 0)
    except Exception as error:  # NVML's errors are of a class that exists only where the library loads
        found = _ask_torch()
        return found, f"without NVML, by torch: {error}" if found else f"no driver: {error}", "", (0, 0)


_LIST = """\
import json, torch
found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps([[p.name, p.total_memory, p.major, p.minor] for p in found]))
"""


def _ask_torch() -> tuple[Gpu, ...]:
    """The GPUs that torch finds where there is no NVML (ROCm, some containers and boards): in a process of its own,
    because this one must not touch them."""
    everything = {k: v for k, v in os.environ.items() if not k.endswith("_VISIBLE_DEVICES")}
    try:
        told = subprocess.run([sys.executable, "-c", _LIST], capture_output=True, text=True, timeout=TORCH_TIMEOUT, env=everything)
        listed = json.loads(told.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return ()
    return tuple(Gpu(i, name, memory, (major, minor), free_bytes=memory) for i, (name, memory, major, minor) in enumerate(listed))


def _ask_nvml() -> tuple[tuple[Gpu, ...], str, str, tuple[int, int]]:
    import pynvml

    pynvml.nvmlInit()
    cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    gpus: list[Gpu] = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        whole = pynvml.nvmlDeviceGetHandleByIndex(index)
        slices = _mig_slices(pynvml, whole)
        for handle in slices or [whole]:
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            gpus.append(
                Gpu(
                    len(gpus) if slices else index,
                    _text(pynvml.nvmlDeviceGetName(handle)),
                    int(memory.total),
                    tuple(pynvml.nvmlDeviceGetCudaComputeCapability(whole)),
                    _text(pynvml.nvmlDeviceGetUUID(handle)),
                    int(memory.free),
                    _optional(partial(pynvml.nvmlDeviceGetPowerManagementLimit, whole), 0) / 1000,
                    bool(slices),
                )
            )
    note = "" if gpus else "the driver lists none"
    return tuple(gpus), note, _text(pynvml.nvmlSystemGetDriverVersion()), (cuda // 1000, cuda % 1000 // 10)


def _mig_slices(nvml: Any, handle: Any) -> list[Any]:
    """The slices that a GPU is cut into; CUDA sees these, not the GPU itself."""
    if _optional(lambda: nvml.nvmlDeviceGetMigMode(handle)[0], 0) != 1:
        return []
    count = _optional(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle), 0)
    found = []
    for index in range(count):
        try:
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except Exception:  # NVML's own class: there is no slice of this number
            continue
    return found


def _optional(call: Callable[[], T], otherwise: T) -> T:
    """What some cards and drivers do not tell."""
    try:
        return call()
    except Exception:  # NVML's own class
        return otherwise


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


@dataclass(frozen=True)
class TorchBuild:
    """What the installed torch was built for, read from its files."""

    version: str
    cuda: str | None
    hip: str | None


def torch_build() -> TorchBuild:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise Problem("torch is not installed in this environment: pip install torch")
    values: dict[str, Any] = {}
    for node in ast.parse((Path(spec.origin).parent / "version.py").read_text()).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                values[target.id] = node.value.value
    return TorchBuild(values.get("__version__", "?"), values.get("cuda"), values.get("hip"))


def visible_gpus(hardware: Hardware, environment: Mapping[str, str], wanted: str | None = None) -> list[str]:
    """The GPUs a run may use, as CUDA_VISIBLE_DEVICES would name them; `wanted` is --gpus, an index into these."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        names = [g.uuid if g.mig else str(g.index) for g in hardware.gpus]
    else:
        names = []
        for name in (n.strip() for n in listed.split(",")):
            if not name or name == "-1":
                break  # CUDA ignores all that follows an invalid entry
            names.append(name)
    if wanted is None:
        return names
    chosen = []
    for text in wanted.split(","):
        if not text.strip().isdigit() or int(text) >= len(names):
            have = f"0 to {len(names) - 1}" if names else "none"
            raise Problem(f"--gpus {wanted}: there is no GPU {text!r} here ({have}; see `nvidia-smi`)")
        chosen.append(names[int(text)])
    return chosen


def only(hardware: Hardware, names: list[str]) -> Hardware:
    """The same machine with those GPUs alone that a run uses: the others' size, kind and load do not concern its plan."""
    used = tuple(g for g in hardware.gpus if str(g.index) in names or (g.uuid and any(g.uuid.startswith(n) for n in names)))
    return replace(hardware, gpus=used) if used else hardware


def check_torch_can_use(hardware: Hardware, build: TorchBuild, environment: Mapping[str, str]) -> None:
    """Stop where a GPU is there but training would silently leave it idle; the text names cause and fix."""
    if not hardware.gpus or build.hip:
        return
    found = f"this machine has {len(hardware.gpus)} x {hardware.gpus[0].name}, but "
    otherwise = "; or say --device cpu"
    if build.cuda is None:
        raise Problem(
            f"{found}torch {build.version} is a CPU build: pip install --force-reinstall torch"
            f" (a build for CUDA {hardware.driver_cuda[0]}.{hardware.driver_cuda[1]} or earlier){otherwise}"
        )
    if not visible_gpus(hardware, environment):
        value = environment.get("CUDA_VISIBLE_DEVICES", "")
        raise Problem(f"{found}CUDA_VISIBLE_DEVICES={value!r} hides them: unset it{otherwise}")
    needed = int(build.cuda.split(".")[0])
    if hardware.driver_cuda[0] and hardware.driver_cuda[0] < needed:
        raise Problem(
            f"{found}driver {hardware.driver} reaches CUDA {hardware.driver_cuda[0]}.{hardware.driver_cuda[1]} and"
            f" torch {build.version} needs {build.cuda}: update the driver, or install a torch built for"
            f" CUDA {hardware.driver_cuda[0]}{otherwise}"
        )
