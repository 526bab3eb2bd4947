"""NVIDIA's driver library (NVML): lists GPUs without CUDA. Calls have a timeout, because a driver may hang."""

from __future__ import annotations

import platform
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from drivetrain.hardware.hardware import Gpu

NVML_TIMEOUT_SECONDS = 5.0  # a healthy driver answers in milliseconds
T = TypeVar("T")


class DriverAnswer(NamedTuple):
    """The GPUs of this machine, and the versions of their driver."""

    gpus: tuple[Gpu, ...]
    note: str = ""
    """Why there is no GPU, or what is unusual about the GPUs."""
    driver: str = ""
    driver_cuda: tuple[int, int] = (0, 0)


def has_driver() -> bool:
    """Returns whether NVIDIA's driver may be installed."""
    return platform.system() != "Linux" or Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def call_with_timeout(call: Callable[[], T], seconds: float) -> T:
    """Runs a call in a thread; raises TimeoutError if it does not return in time (the thread then goes on running)."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append((True, call()))
        except BaseException as error:
            result.append((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not result:
        raise TimeoutError
    succeeded, value = result[0]
    if not succeeded:
        raise value
    return value  # type: ignore[no-any-return]


def list_gpus() -> DriverAnswer:
    import pynvml

    pynvml.nvmlInit()
    cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    gpus: list[Gpu] = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        whole_gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        slices = _mig_slices(pynvml, whole_gpu)
        for handle in slices or [whole_gpu]:
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            gpus.append(
                Gpu(
                    index=len(gpus) if slices else index,
                    name=_text(pynvml.nvmlDeviceGetName(handle)),
                    memory_bytes=int(memory.total),
                    compute_capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(whole_gpu)),
                    uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
                    free_bytes=int(memory.free),
                    power_limit_watts=_optional(partial(pynvml.nvmlDeviceGetPowerManagementLimit, whole_gpu), 0) / 1000,
                    mig=bool(slices),
                )
            )
    note = "" if gpus else "the driver lists none"
    return DriverAnswer(tuple(gpus), note, _text(pynvml.nvmlSystemGetDriverVersion()), (cuda // 1000, cuda % 1000 // 10))


def _mig_slices(nvml: Any, handle: Any) -> list[Any]:
    """Returns the MIG slices of a GPU. If there are any, CUDA sees only them, not the GPU itself."""
    if _optional(lambda: nvml.nvmlDeviceGetMigMode(handle)[0], 0) != 1:
        return []
    slices = []
    for index in range(_optional(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle), 0)):
        try:
            slices.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except Exception:  # NVML's own class: no slice has this number
            continue
    return slices


def _optional(call: Callable[[], T], default: T) -> T:
    """Returns the call's value, or the default if the card or driver does not support it."""
    try:
        return call()
    except Exception:  # NVML's own class
        return default


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
