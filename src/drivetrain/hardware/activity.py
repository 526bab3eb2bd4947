"""What the GPUs do at this moment. A collective that waits for ever looks like work, but takes next to no power."""

from __future__ import annotations

from typing import NamedTuple

from drivetrain.hardware import NVML_TIMEOUT, has_driver, with_timeout

BUSY, LITTLE = 95, 0.35  # percent of the time; share of the power limit under which nothing is computed


class Activity(NamedTuple):
    gpu: int
    busy: int
    watts: float
    limit: float

    @property
    def spins(self) -> bool:
        return self.busy >= BUSY and 0 < self.watts < LITTLE * self.limit

    def __str__(self) -> str:
        return f"GPU {self.gpu} is {self.busy} % busy at {self.watts:.0f} of {self.limit:.0f} W" + (
            ": it waits in a kernel" if self.spins else ""
        )


def activity() -> list[Activity]:
    """Of every GPU that answers; none where there is no driver, or it does not answer in time."""
    if not has_driver():
        return []
    try:
        return with_timeout(_ask, NVML_TIMEOUT)
    except Exception:  # NVML's errors are of a class that exists only where the library loads
        return []


def _ask() -> list[Activity]:
    import pynvml

    pynvml.nvmlInit()
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        watts, limit = (ask(handle) / 1000 for ask in (pynvml.nvmlDeviceGetPowerUsage, pynvml.nvmlDeviceGetPowerManagementLimit))
        found.append(Activity(index, int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu), watts, limit))
    return found
