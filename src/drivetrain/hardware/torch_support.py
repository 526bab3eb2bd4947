"""Which GPUs a run may use, and whether the installed torch can use them."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drivetrain.hardware.hardware import Hardware
from drivetrain.outcomes import Problem


@dataclass(frozen=True)
class TorchBuild:
    """What the installed torch was built for."""

    version: str
    cuda: str | None
    hip: str | None


def torch_build() -> TorchBuild:
    """Reads torch's version.py without importing torch."""
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


def visible_gpus(hardware: Hardware, environment: Mapping[str, str], selection: str | None = None) -> list[str]:
    """Returns the GPUs that a run may use, named as in CUDA_VISIBLE_DEVICES; `selection` is --gpus: indices into them."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        names = [g.uuid if g.mig else str(g.index) for g in hardware.gpus]
    else:
        names = []
        for name in (n.strip() for n in listed.split(",")):
            if not name or name == "-1":
                break  # CUDA ignores everything after an invalid entry
            names.append(name)
    if selection is None:
        return names
    chosen = []
    for text in selection.split(","):
        if not text.strip().isdigit() or int(text) >= len(names):
            available = f"0 to {len(names) - 1}" if names else "none"
            raise Problem(f"--gpus {selection}: there is no GPU {text!r} here ({available}; see `nvidia-smi`)")
        chosen.append(names[int(text)])
    return chosen


def restrict_to_gpus(hardware: Hardware, names: list[str]) -> Hardware:
    """Returns the same machine with only the named GPUs: a plan must not depend on GPUs that the run does not use."""
    used = tuple(g for g in hardware.gpus if str(g.index) in names or (g.uuid and any(g.uuid.startswith(n) for n in names)))
    return replace(hardware, gpus=used) if used else hardware


def check_torch_can_use(hardware: Hardware, build: TorchBuild, environment: Mapping[str, str]) -> None:
    """Raises Problem if the machine has a GPU that torch cannot use; otherwise training would silently run on the CPU."""
    if not hardware.gpus or build.hip:
        return
    subject = f"this machine has {len(hardware.gpus)} x {hardware.gpus[0].name}, but "
    alternative = "; or say --device cpu"
    if build.cuda is None:
        raise Problem(
            f"{subject}torch {build.version} is a CPU build: pip install --force-reinstall torch"
            f" (a build for CUDA {hardware.driver_cuda[0]}.{hardware.driver_cuda[1]} or earlier){alternative}"
        )
    if not visible_gpus(hardware, environment):
        value = environment.get("CUDA_VISIBLE_DEVICES", "")
        raise Problem(f"{subject}CUDA_VISIBLE_DEVICES={value!r} hides them: unset it{alternative}")
    needed = int(build.cuda.split(".")[0])
    if hardware.driver_cuda[0] and hardware.driver_cuda[0] < needed:
        raise Problem(
            f"{subject}driver {hardware.driver} reaches CUDA {hardware.driver_cuda[0]}.{hardware.driver_cuda[1]} and"
            f" torch {build.version} needs {build.cuda}: update the driver, or install a torch built for"
            f" CUDA {hardware.driver_cuda[0]}{alternative}"
        )
