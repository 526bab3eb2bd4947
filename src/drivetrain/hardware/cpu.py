"""CPU cores and memory that this process may use, within the limits of its container."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP_ROOT = "/sys/fs/cgroup"


def cpu_cores() -> int:
    """Returns the number of cores that CPU affinity and cgroup quotas allow this process to use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroup_folders("cpu"):
        quota, _, period = _read(f"{folder}/cpu.max").partition(" ")
        if not quota:
            quota, period = _read(f"{folder}/cpu.cfs_quota_us"), _read(f"{folder}/cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def memory_bytes() -> int:
    """Returns the RAM that cgroup limits allow this process to use."""
    import psutil

    total = int(psutil.virtual_memory().total)
    for folder in _cgroup_folders("memory"):
        limit = _read(f"{folder}/memory.max") or _read(f"{folder}/memory.limit_in_bytes")
        if limit.isdigit():
            total = min(total, int(limit))
    return total


def _cgroup_folders(controller: str) -> list[str]:
    """Returns the folders of this process's cgroup and of all its parents: each of them may set a limit."""
    folders = [CGROUP_ROOT, f"{CGROUP_ROOT}/{controller}"]
    for line in _read("/proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if not names or controller in names.split(","):
            base = f"{CGROUP_ROOT}/{controller}" if names else CGROUP_ROOT
            parts = [p for p in path.split("/") if p not in ("", "..")]
            folders += ["/".join((base, *parts[:count])) for count in range(1, len(parts) + 1)]
    return folders


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
