"""The report of `drivetrain hardware`: takes `Hardware`, gathers further facts about this machine, returns JSON values or text."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from drivetrain.hardware.cards import card_of_product
from drivetrain.hardware.hardware import ASSUMED_NETWORK_GBPS, UNKNOWN_CAPABILITY, Gpu, Hardware
from drivetrain.hardware.nvml import call_with_timeout
from drivetrain.hardware.torch_support import torch_build
from drivetrain.hardware.units import format_gib

NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "fuse", "9p", "lustre", "ceph", "gpfs", "beegfs")
TORCH_TIMEOUT_SECONDS = 60.0
TOPOLOGY_TIMEOUT_SECONDS = 5.0
MAX_NVLINKS = 18  # of one GPU


def gather(hardware: Hardware, folder: Path) -> dict[str, Any]:
    """Returns all facts as JSON values, without those that cannot be determined."""
    facts: dict[str, Any] = {"format": 1, "hardware": hardware.to_json(), "cards": [_card_facts(gpu) for gpu in hardware.gpus]}
    if hardware.described:
        return facts
    facts["shared_memory_bytes"] = _total_bytes("/dev/shm")
    facts["disk"] = _disk(folder)
    facts["network"] = _interfaces()
    facts["torch"] = _torch(bool(hardware.gpus))
    facts["topology"] = _topology(len(hardware.gpus)) if len(hardware.gpus) > 1 else []
    return facts


def text(hardware: Hardware, facts: dict[str, Any]) -> str:
    """Returns the facts as lines for a person."""
    rows = _machine_rows(hardware, facts) + _gpu_rows(hardware, facts)
    return "".join(f"{label:<11}{value}\n" for label, value in rows)


# --- text ---------------------------------------------------------------------------------------


def _machine_rows(hardware: Hardware, facts: dict[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    if hardware.described:
        rows.append(("described", hardware.described))
    if hardware.nodes > 1:
        assumed = "" if hardware.network_gbps else ' (assumed; state it after a comma: ", 100Gb/s")'
        rows.append(("machines", f"{hardware.nodes:,}, {hardware.network_gbps or ASSUMED_NETWORK_GBPS:g} Gb/s between them{assumed}"))
    each = " each" if hardware.nodes > 1 else ""
    limited = "" if hardware.described else " (those this process may use)"
    rows.append(("CPU", f"{hardware.cpu_cores} cores{each}{limited}"))
    rows.append(("RAM", format_gib(hardware.memory_bytes) + each))
    if facts.get("shared_memory_bytes") is not None:
        rows.append(("/dev/shm", format_gib(facts["shared_memory_bytes"]) + _shared_memory_advice(facts["shared_memory_bytes"])))
    if disk := facts.get("disk"):
        rows.append(("disk", f"{format_gib(disk['free_bytes'])} free of {format_gib(disk['total_bytes'])} ({disk['kind']})"))
    for interface in facts.get("network", []):
        speed = f", {interface['megabits'] / 1000:g} Gb/s" if interface["megabits"] else ""
        rows.append(("network", f"{interface['name']} {interface['address']}{speed}"))
    if torch := facts.get("torch"):
        parts = [f"torch {torch['version']}", f"CUDA {torch['cuda']}" if torch["cuda"] else "a build for CPUs"]
        parts += [f"{name} {torch[key]}" for key, name in (("cudnn", "cuDNN"), ("nccl", "NCCL")) if torch.get(key)]
        rows.append(("torch", ", ".join(parts)))
    return rows


def _gpu_rows(hardware: Hardware, facts: dict[str, Any]) -> list[tuple[str, str]]:
    if not hardware.gpus:
        return [("GPUs", f"none ({hardware.gpu_note})")]
    total, least = sum(g.memory_bytes for g in hardware.gpus), min(g.memory_bytes for g in hardware.gpus)
    driver = f"; driver {hardware.driver}, for CUDA {hardware.driver_cuda[0]}.{hardware.driver_cuda[1]}" if hardware.driver else ""
    each = " in each machine" if hardware.nodes > 1 else ""
    rows = [("GPUs", f"{len(hardware.gpus)}{each}, {format_gib(total)} in all, the smallest {format_gib(least)}{driver}")]
    lines = [_gpu_line(gpu, card) for gpu, card in zip(hardware.gpus, facts["cards"], strict=True)]
    for line in dict.fromkeys(lines):
        rows.append((f"  {_number_range([i for i, other in enumerate(lines) if other == line])}", line))
    if hardware.gpu_note:
        rows.append(("", hardware.gpu_note))
    if len({g.memory_bytes for g in hardware.gpus}) > 1 or len({g.name for g in hardware.gpus}) > 1:
        unused = format_gib(total - least * len(hardware.gpus))
        rows.append(("", f"unequal: the smallest decides what fits, so {unused} of the others stay unused (choose equal ones with --gpus)"))
    return rows + [("  links", line) for line in facts.get("topology", [])]


def _gpu_line(gpu: Gpu, card: dict[str, Any] | None) -> str:
    free = f" ({format_gib(gpu.free_bytes)} free)" if gpu.free_bytes else ""
    power = f", {gpu.power_limit_watts:.0f} W" if gpu.power_limit_watts else ""
    kind = ", a slice (MIG)" if gpu.mig else ""
    rates = ""
    if card:
        rates = f", {card['bf16'] or card['fp16']:g} TFLOP/s {'bf16' if card['bf16'] else 'fp16'}, {card['bandwidth']:g} GB/s"
    is_known = gpu.compute_capability != UNKNOWN_CAPABILITY
    capability = ".".join(map(str, gpu.compute_capability)) if is_known else "unknown"
    return f"{gpu.name}, {format_gib(gpu.memory_bytes)}{free}, compute capability {capability}{power}{kind}{rates}"


def _number_range(numbers: list[int]) -> str:
    """Returns "3", "0-3" for numbers without a gap, or "0,2"."""
    first, last = numbers[0], numbers[-1]
    if first == last:
        return str(first)
    return f"{first}-{last}" if len(numbers) == last - first + 1 else ",".join(map(str, numbers))


def _shared_memory_advice(num_bytes: int) -> str:
    return " (small: loader workers of large batches may fail; in a container --shm-size=8g)" if num_bytes < 1 << 30 else ""


# --- facts --------------------------------------------------------------------------------------


def _card_facts(gpu: Gpu) -> dict[str, Any] | None:
    card = card_of_product(gpu.name, gpu.memory_bytes)
    if card is None or gpu.mig:
        return None
    return {k: getattr(card, k) for k in ("bandwidth", "bf16", "fp16", "tf32", "fp32", "nvlink", "source")}


def _total_bytes(path: str) -> int | None:
    try:
        file_system = os.statvfs(path)
    except OSError:
        return None
    return file_system.f_frsize * file_system.f_blocks


def _disk(folder: Path) -> dict[str, Any]:
    usage = shutil.disk_usage(folder)
    return {"folder": str(folder), "total_bytes": usage.total, "free_bytes": usage.free, "kind": _disk_kind(folder)}


def _disk_kind(folder: Path) -> str:
    """Returns the kind of a disk, from its file system and block device."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    path = str(folder.resolve())
    containing = [m for m in mounts if path == m[1] or path.startswith(m[1].rstrip("/") + "/")]
    if not containing:
        return "unknown"
    device, _, file_system = max(containing, key=lambda m: len(m[1]))[:3]
    if file_system == "tmpfs":
        return "memory"
    if file_system.startswith(NETWORK_FILE_SYSTEMS):
        return f"network, {file_system}"
    return _block_device_kind(os.path.basename(os.path.realpath(device))) or file_system


def _block_device_kind(name: str) -> str | None:
    for block in (name, name.rstrip("0123456789").removesuffix("p")):
        try:
            rotates = Path(f"/sys/class/block/{block}/queue/rotational").read_text().strip() == "1"
        except OSError:
            continue
        if block.startswith(("vd", "xvd")):
            return "a virtual disk"  # its `rotational` is only a default of the host
        return "a hard disk" if rotates else "NVMe" if block.startswith("nvme") else "solid state"
    return None


def _interfaces() -> list[dict[str, Any]]:
    import psutil

    states = psutil.net_if_stats()
    interfaces = []
    for name, addresses in psutil.net_if_addrs().items():
        state = states.get(name)
        ipv4 = [a.address for a in addresses if a.family == socket.AF_INET]
        if name != "lo" and ipv4 and state is not None and state.isup:
            interfaces.append({"name": name, "address": ipv4[0], "megabits": state.speed})
    return interfaces


def _torch(has_gpus: bool) -> dict[str, Any]:
    """Returns the versions of torch and, on a machine with GPUs, of its libraries. Importing torch takes seconds in a child process."""
    build = torch_build()
    facts: dict[str, Any] = {"version": build.version, "cuda": build.cuda}
    if has_gpus and build.cuda:
        code = "import json, torch; n = torch.cuda.nccl.version(); print(json.dumps([torch.backends.cudnn.version(), list(n)]))"
        try:
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TORCH_TIMEOUT_SECONDS)
            cudnn, nccl = json.loads(done.stdout)
            facts |= {"cudnn": cudnn, "nccl": ".".join(map(str, nccl))}
        except (subprocess.TimeoutExpired, ValueError, OSError):
            pass
    return facts


def _topology(num_gpus: int) -> list[str]:
    """Returns lines that describe the links between pairs of GPUs: one line for all pairs with the same kind of link."""
    try:
        return call_with_timeout(lambda: _read_topology(num_gpus), TOPOLOGY_TIMEOUT_SECONDS)
    except Exception:  # NVML's own class, or no answer
        return []


def _read_topology(num_gpus: int) -> list[str]:
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(num_gpus)]
    num_links = [sum(_is_link_up(pynvml, h, i) for i in range(MAX_NVLINKS)) for h in handles]
    shared = {
        pynvml.NVML_TOPOLOGY_INTERNAL: "the same board",
        pynvml.NVML_TOPOLOGY_SINGLE: "one PCIe switch",
        pynvml.NVML_TOPOLOGY_MULTIPLE: "several PCIe switches",
        pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "the PCIe host bridge",
        pynvml.NVML_TOPOLOGY_NODE: "one CPU socket",
        pynvml.NVML_TOPOLOGY_SYSTEM: "the link between CPU sockets",
    }
    lines = []
    if any(num_links):
        lines.append(f"NVLink: {', '.join(map(str, num_links))} links up")
    pairs: dict[str, list[str]] = {}
    for a in range(num_gpus):
        for b in range(a + 1, num_gpus):
            level = pynvml.nvmlDeviceGetTopologyCommonAncestor(handles[a], handles[b])
            pairs.setdefault(shared.get(level, str(level)), []).append(f"{a}-{b}")
    return lines + [f"{', '.join(numbers)} over {link}" for link, numbers in pairs.items()]


def _is_link_up(nvml: Any, handle: Any, link: int) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
    except Exception:  # there is no such link
        return False
