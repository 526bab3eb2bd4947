"""Measures how busy each GPU is. A collective that waits forever looks busy, but draws little power."""

from __future__ import annotations

from typing import NamedTuple

from drivetrain.hardware.nvml import NVML_TIMEOUT_SECONDS, call_with_timeout, has_driver

BUSY_PERCENT = 95  # from which utilisation on a GPU counts as busy
IDLE_POWER_SHARE = 0.35  # of the power limit: below it a busy GPU computes nothing


class Activity(NamedTuple):
    gpu: int
    busy_percent: int
    watts: float
    limit_watts: float

    @property
    def is_spinning(self) -> bool:
        """Whether a kernel runs, but only waits."""
        return self.busy_percent >= BUSY_PERCENT and 0 < self.watts < IDLE_POWER_SHARE * self.limit_watts

    def __str__(self) -> str:
        return f"GPU {self.gpu} is {self.busy_percent} % busy at {self.watts:.0f} of {self.limit_watts:.0f} W" + (
            ": it waits in a kernel" if self.is_spinning else ""
        )


def gpu_activity() -> list[Activity]:
    """Returns the activity of every GPU; an empty list without a driver, or if it does not answer in time."""
    if not has_driver():
        return []
    try:
        return call_with_timeout(_read_activity, NVML_TIMEOUT_SECONDS)
    except Exception:  # NVML's errors are of a class that exists only where the library loads
        return []


def _read_activity() -> list[Activity]:
    import pynvml

    pynvml.nvmlInit()
    activities = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        watts = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000  # NVML gives milliwatts
        limit_watts = pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
        activities.append(Activity(index, int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu), watts, limit_watts))
    return activities
