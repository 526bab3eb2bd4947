"""Detects the hardware of this machine without importing torch in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from drivetrain.hardware import nvml
from drivetrain.hardware.cpu import cpu_cores, memory_bytes
from drivetrain.hardware.hardware import Gpu, Hardware

TORCH_TIMEOUT_SECONDS = 60.0  # importing torch takes most of it


def detect() -> Hardware:
    answer = _find_gpus()
    return Hardware(cpu_cores(), memory_bytes(), answer.gpus, answer.note, answer.driver, answer.driver_cuda)


def _find_gpus() -> nvml.DriverAnswer:
    if not nvml.has_driver():
        return nvml.DriverAnswer(_list_gpus_of_torch() if Path("/dev/kfd").exists() else (), "no driver")
    try:
        return nvml.call_with_timeout(nvml.list_gpus, nvml.NVML_TIMEOUT_SECONDS)
    except TimeoutError:
        return nvml.DriverAnswer((), f"the NVIDIA driver did not answer within {nvml.NVML_TIMEOUT_SECONDS:.0f} s")
    except Exception as error:  # NVML's errors are of a class that exists only where the library loads
        gpus = _list_gpus_of_torch()
        return nvml.DriverAnswer(gpus, f"without NVML, by torch: {error}" if gpus else f"no driver: {error}")


_LIST_GPUS = """\
import json, torch
found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps([[p.name, p.total_memory, p.major, p.minor] for p in found]))
"""


def _list_gpus_of_torch() -> tuple[Gpu, ...]:
    """Returns the GPUs that torch finds, for machines without NVML (ROCm, some containers and boards).

    A child process asks, because this process must not initialize CUDA.
    """
    all_visible = {k: v for k, v in os.environ.items() if not k.endswith("_VISIBLE_DEVICES")}
    command = [sys.executable, "-c", _LIST_GPUS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_TIMEOUT_SECONDS, env=all_visible)
        listed = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return ()
    return tuple(Gpu(i, name, memory, (major, minor), free_bytes=memory) for i, (name, memory, major, minor) in enumerate(listed))
