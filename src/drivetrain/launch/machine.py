"""The devices and processes that a run uses."""

from __future__ import annotations

import os
from dataclasses import dataclass

from drivetrain import hardware
from drivetrain.hardware import Hardware
from drivetrain.launch.request import Request
from drivetrain.outcomes import Problem


@dataclass(frozen=True)
class LocalMachine:
    """The devices and processes of this machine that a run uses."""

    hardware: Hardware
    device: str
    gpus: list[str]
    """As CUDA_VISIBLE_DEVICES names them, one for each process; empty without a GPU."""
    procs: int


def detect_machine(request: Request) -> LocalMachine:
    """Returns the devices and processes that the request asks for; raises Problem where this machine lacks them."""
    detected = hardware.detect()
    device, gpus = _device_and_gpus(request, detected)
    procs = request.procs if request.procs is not None else max(1, len(gpus))
    if procs < 1:
        raise Problem(f"--procs {procs}: a run needs at least one process")
    if device == "cuda" and procs > len(gpus):
        are, plural = ("is", "") if len(gpus) == 1 else ("are", "s")
        raise Problem(f"--procs {procs}: there {are} {len(gpus)} GPU{plural} to use; at most one process each (or --device cpu)")
    if device == "mps" and procs > 1:
        raise Problem("--device mps runs one process")
    used = gpus[:procs]
    return LocalMachine(hardware.restrict_to_gpus(detected, used), device, used, procs)


def _device_and_gpus(request: Request, detected: Hardware) -> tuple[str, list[str]]:
    """Returns the device (cuda, cpu or mps) and the GPUs that may be used."""
    if request.device not in (None, "cuda"):
        if request.gpus is not None:
            raise Problem(f"--gpus does not go with --device {request.device}")
        return str(request.device), []
    if detected.gpus or request.device == "cuda":
        hardware.check_torch_can_use(detected, hardware.torch_build(), os.environ)
    gpus = hardware.visible_gpus(detected, os.environ, request.gpus) if detected.gpus else []
    if gpus:
        return "cuda", gpus
    if request.device == "cuda":
        raise Problem(f"--device cuda: there is no GPU here ({detected.gpu_note}); leave the flag out, or use --device cpu")
    if request.gpus is not None:
        raise Problem(f"--gpus {request.gpus}: there is no GPU here ({detected.gpu_note})")
    return "cpu", []


@dataclass(frozen=True)
class Cluster:
    """What a plan is made for: all processes of a run, and the hardware of one node. All nodes are equal."""

    hardware: Hardware
    device: str
    world_size: int
    local_procs: int
    nodes: int = 1
    gpu: str = ""
    """The GPU that steps are measured on, as CUDA_VISIBLE_DEVICES names it."""


def cluster_of(machine: LocalMachine, world_size: int | None = None, nodes: int = 1) -> Cluster:
    """Returns the cluster of this machine, and of `nodes` machines that are equal to it."""
    gpu = machine.gpus[0] if machine.gpus else ""
    return Cluster(machine.hardware, machine.device, world_size or machine.procs * nodes, machine.procs, nodes, gpu)
