"""What `drivetrain hardware` tells: this machine in full, or one that was described."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from drivetrain.hardware import NETWORK, UNKNOWN_CAPABILITY, Hardware, gib, with_timeout
from drivetrain.hardware.cards import of_product

SLOW = ("nfs", "cifs", "smb", "fuse", "9p", "lustre", "ceph", "gpfs", "beegfs")
TORCH_SECONDS = 60.0


def gather(hardware: Hardware, folder: Path) -> dict[str, Any]:
    """Everything worth knowing, as plain values; what could not be found is left out."""
    facts: dict[str, Any] = {"format": 1, "hardware": hardware.to_json(), "cards": [_card(hardware, i) for i in range(len(hardware.gpus))]}
    if hardware.described:
        return facts
    facts["shared_memory_bytes"] = _space("/dev/shm")
    facts["disk"] = _disk(folder)
    facts["network"] = _interfaces()
    facts["torch"] = _torch(bool(hardware.gpus))
    facts["topology"] = _topology(len(hardware.gpus)) if len(hardware.gpus) > 1 else []
    return facts


def text(hardware: Hardware, facts: dict[str, Any]) -> str:
    """The same, to read."""
    rows: list[tuple[str, str]] = []
    if hardware.described:
        rows.append(("described", hardware.described))
    if hardware.nodes > 1:
        assumed = "" if hardware.network_gbps else ' (assumed; state it after a comma: ", 100Gb/s")'
        rows.append(("machines", f"{hardware.nodes:,}, {hardware.network_gbps or NETWORK:g} Gb/s between them{assumed}"))
    each = " each" if hardware.nodes > 1 else ""
    rows.append(
        (
            "CPU",
            f"{hardware.cpu_cores} cores{each} (those this process may use)"
            if not hardware.described
            else f"{hardware.cpu_cores} cores{each}",
        )
    )
    rows.append(("RAM", gib(hardware.memory_bytes) + each))
    if facts.get("shared_memory_bytes") is not None:
        rows.append(("/dev/shm", gib(facts["shared_memory_bytes"]) + _shm_advice(facts["shared_memory_bytes"])))
    if disk := facts.get("disk"):
        rows.append(("disk", f"{gib(disk['free_bytes'])} free of {gib(disk['total_bytes'])} ({disk['kind']})"))
    for one in facts.get("network", []):
        speed = f", {one['megabits'] / 1000:g} Gb/s" if one["megabits"] else ""
        rows.append(("network", f"{one['name']} {one['address']}{speed}"))
    if torch := facts.get("torch"):
        parts = [f"torch {torch['version']}", f"CUDA {torch['cuda']}" if torch["cuda"] else "a build for CPUs"]
        parts += [f"{name} {torch[key]}" for key, name in (("cudnn", "cuDNN"), ("nccl", "NCCL")) if torch.get(key)]
        rows.append(("torch", ", ".join(parts)))
    rows += _gpu_rows(hardware, facts)
    return "".join(f"{label:<11}{value}\n" for label, value in rows)


def _gpu_rows(hardware: Hardware, facts: dict[str, Any]) -> list[tuple[str, str]]:
    if not hardware.gpus:
        return [("GPUs", f"none ({hardware.gpu_note})")]
    rows = []
    total, least = sum(g.memory_bytes for g in hardware.gpus), min(g.memory_bytes for g in hardware.gpus)
    driver = f"; driver {hardware.driver}, for CUDA {hardware.driver_cuda[0]}.{hardware.driver_cuda[1]}" if hardware.driver else ""
    each = " in each machine" if hardware.nodes > 1 else ""
    rows.append(("GPUs", f"{len(hardware.gpus)}{each}, {gib(total)} in all, the smallest {gib(least)}{driver}"))
    lines: list[str] = []
    for gpu, card in zip(hardware.gpus, facts["cards"], strict=True):
        free = f" ({gib(gpu.free_bytes)} free)" if gpu.free_bytes else ""
        power = f", {gpu.power_limit_watts:.0f} W" if gpu.power_limit_watts else ""
        kind = ", a slice (MIG)" if gpu.mig else ""
        rates = (
            f", {card['bf16'] or card['fp16']:g} TFLOP/s {'bf16' if card['bf16'] else 'fp16'}, {card['bandwidth']:g} GB/s" if card else ""
        )
        known = gpu.compute_capability != UNKNOWN_CAPABILITY
        capability = ".".join(map(str, gpu.compute_capability)) if known else "unknown"
        lines.append(f"{gpu.name}, {gib(gpu.memory_bytes)}{free}, compute capability {capability}{power}{kind}{rates}")
    for line in dict.fromkeys(lines):
        same = [i for i, other in enumerate(lines) if other == line]
        numbers = (
            str(same[0]) if len(same) == 1 else f"{same[0]}-{same[-1]}" if len(same) == same[-1] - same[0] + 1 else ",".join(map(str, same))
        )
        rows.append((f"  {numbers}", line))
    if hardware.gpu_note:
        rows.append(("", hardware.gpu_note))
    if len({g.memory_bytes for g in hardware.gpus}) > 1 or len({g.name for g in hardware.gpus}) > 1:
        idle = total - least * len(hardware.gpus)
        rows.append(("", f"unequal: the smallest decides what fits, so {gib(idle)} of the others stay empty (--gpus chooses equal ones)"))
    for line in facts.get("topology", []):
        rows.append(("  links", line))
    return rows


def _card(hardware: Hardware, index: int) -> dict[str, Any] | None:
    gpu = hardware.gpus[index]
    card = of_product(gpu.name, gpu.memory_bytes)
    if card is None or gpu.mig:
        return None
    return {k: getattr(card, k) for k in ("bandwidth", "bf16", "fp16", "tf32", "fp32", "nvlink", "source")}


def _shm_advice(size: int) -> str:
    return " (small: loader workers of large batches may fail; in a container --shm-size=8g)" if size < 1 << 30 else ""


def _space(path: str) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def _disk(folder: Path) -> dict[str, Any]:
    usage = shutil.disk_usage(folder)
    return {"folder": str(folder), "total_bytes": usage.total, "free_bytes": usage.free, "kind": _disk_kind(folder)}


def _disk_kind(folder: Path) -> str:
    """A class of speed: what the file system and the block device beneath it say of themselves."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    path = str(folder.resolve())
    inside = [m for m in mounts if path == m[1] or path.startswith(m[1].rstrip("/") + "/")]
    if not inside:
        return "unknown"
    device, _, kind = max(inside, key=lambda m: len(m[1]))[:3]
    if kind == "tmpfs":
        return "memory"
    if kind.startswith(SLOW):
        return f"network, {kind}"
    name = os.path.basename(os.path.realpath(device))
    for block in (name, name.rstrip("0123456789").removesuffix("p")):
        try:
            rotates = Path(f"/sys/class/block/{block}/queue/rotational").read_text().strip() == "1"
        except OSError:
            continue
        if block.startswith(("vd", "xvd")):
            return "a virtual disk"  # what it says of itself is its host's default
        return "a turning disk" if rotates else "NVMe" if block.startswith("nvme") else "solid state"
    return kind


def _interfaces() -> list[dict[str, Any]]:
    import psutil

    states = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        state = states.get(name)
        mine = [a.address for a in addresses if a.family == socket.AF_INET]
        if name != "lo" and mine and state is not None and state.isup:
            found.append({"name": name, "address": mine[0], "megabits": state.speed})
    return found


def _torch(gpus: bool) -> dict[str, Any]:
    """The versions that matter to a GPU; asking torch takes seconds, so only where there is one, and never for long."""
    from drivetrain.hardware import torch_build

    build = torch_build()
    facts: dict[str, Any] = {"version": build.version, "cuda": build.cuda}
    if gpus and build.cuda:
        code = "import json, torch; n = torch.cuda.nccl.version(); print(json.dumps([torch.backends.cudnn.version(), list(n)]))"
        try:
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TORCH_SECONDS)
            cudnn, nccl = json.loads(done.stdout)
            facts |= {"cudnn": cudnn, "nccl": ".".join(map(str, nccl))}
        except (subprocess.TimeoutExpired, ValueError, OSError):
            pass
    return facts


def _topology(count: int) -> list[str]:
    """How GPUs reach each other, pair by pair, alike ones together."""
    try:
        return with_timeout(lambda: _ask_topology(count), 5.0)
    except Exception:  # NVML's own class, or no answer
        return []


def _ask_topology(count: int) -> list[str]:
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
    links = [sum(_link_is_up(pynvml, h, i) for i in range(18)) for h in handles]
    common = {
        pynvml.NVML_TOPOLOGY_INTERNAL: "the same board",
        pynvml.NVML_TOPOLOGY_SINGLE: "one PCIe switch",
        pynvml.NVML_TOPOLOGY_MULTIPLE: "several PCIe switches",
        pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "the PCIe host bridge",
        pynvml.NVML_TOPOLOGY_NODE: "one CPU socket",
        pynvml.NVML_TOPOLOGY_SYSTEM: "the link between CPU sockets",
    }
    lines = []
    if any(links):
        lines.append(f"NVLink: {', '.join(map(str, links))} links up")
    pairs: dict[str, list[str]] = {}
    for a in range(count):
        for b in range(a + 1, count):
            level = pynvml.nvmlDeviceGetTopologyCommonAncestor(handles[a], handles[b])
            pairs.setdefault(common.get(level, str(level)), []).append(f"{a}-{b}")
    return lines + [f"{', '.join(p)} over {way}" for way, p in pairs.items()]


def _link_is_up(nvml: Any, handle: Any, link: int) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
    except Exception:  # no such link
        return False
