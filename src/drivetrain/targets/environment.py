"""The lock of a run's environment: the exact versions of the packages that its code imports."""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from drivetrain.outcomes import Problem
from drivetrain.task_ref import TaskRef

EXTRAS_OF_FAMILIES = {"lora": ("lora",), "rl": ("rl",)}
"""The folder of a built-in task -> the extras of this package that it needs."""
CORE = ("torch", "numpy", "pyyaml", "psutil", "nvidia-ml-py", "safetensors", "tensorboard", "cloudpickle", "matplotlib", "pillow")
"""This package's requirements, as in pyproject.toml."""
OF_TORCH = re.compile(r"nvidia-|cuda-|triton|pytorch-triton")
"""What a build of torch needs beside it; another build needs others."""
MIN_DRIVERS = {"13.0": 580, "12.6": 525}
"""CUDA version of the builds of torch -> the oldest major version of NVIDIA's driver: that of its CUDA family, 12 or 13."""


@dataclass(frozen=True)
class EnvironmentLock:
    requirements: tuple[str, ...]
    """NAME==VERSION, sorted."""

    def name(self, torch: str) -> str:
        """Returns the name of the environment with a build of torch (auto: the one for the machine's driver)."""
        digest = hashlib.sha256("\n".join(self.requirements).encode()).hexdigest()[:32]
        return digest if torch == "auto" else f"{digest}-{torch}"


def lock_environment(tasks: Iterable[TaskRef]) -> EnvironmentLock:
    """Returns the packages of this environment that drivetrain and the tasks need, with their versions here."""
    extras: set[str] = set()
    names: set[str] = set()
    for task in tasks:
        if task.built_in:
            extras.update(EXTRAS_OF_FAMILIES.get(Path(task.path).parent.name, ()))
        elif not task.pickled:
            names |= _imported_packages(task.modules().values())
    versions: dict[str, str] = {}
    for requirement in _own_requirements():
        _add(Requirement(requirement), versions, frozenset(extras))
    for name in names:
        _add(Requirement(name), versions)
    return EnvironmentLock(tuple(sorted(f"{name}=={version}" for name, version in versions.items())))


def _own_requirements() -> Iterable[str]:
    try:
        return metadata.requires("drivetrain") or ()
    except metadata.PackageNotFoundError:  # it runs from its source folder
        return CORE


def _add(requirement: Requirement, versions: dict[str, str], extras: frozenset[str] = frozenset({""})) -> None:
    """Adds an installed package, and those that it needs."""
    name = re.sub(r"[-_.]+", "-", requirement.name).lower()
    if requirement.marker is not None and not any(requirement.marker.evaluate({"extra": extra}) for extra in (extras or {""})):
        return
    if name in versions or name == "drivetrain":
        return
    try:
        versions[name] = metadata.version(name).partition("+")[0]  # 2.13.0+cpu: the build is chosen there
    except metadata.PackageNotFoundError:
        return  # an optional package that is not installed here
    for text in metadata.requires(name) or ():
        if not (name == "torch" and OF_TORCH.match(text)):
            _add(Requirement(text), versions, frozenset(requirement.extras) or frozenset({""}))


def _imported_packages(files: Iterable[Path]) -> set[str]:
    """Returns the names of the installed packages that the files import."""
    packages: set[str] = set()
    for file in files:
        if file.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(file.read_bytes())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                modules = [node.module]
            for module in modules:
                packages.update(_packages_of(module.partition(".")[0]))
    return packages - {"drivetrain"}


@cache
def _packages_of(module: str) -> tuple[str, ...]:
    """Returns the names of the installed packages that provide a module."""
    if module in sys.stdlib_module_names:
        return ()
    try:
        metadata.version(module)
        return (module,)
    except metadata.PackageNotFoundError:
        return tuple(_distributions().get(module, ()))


@cache
def _distributions() -> dict[str, list[str]]:
    """Returns module -> packages. It reads the metadata of every installed package, which takes half a second."""
    return dict(metadata.packages_distributions())


def torch_backend(drivers: Iterable[str]) -> str:
    """Returns the build of torch for a machine's GPU drivers, as `uv --torch-backend` names it."""
    majors = [int(driver.partition(".")[0]) for driver in drivers if driver.partition(".")[0].isdigit()]
    if not majors:
        return "cpu"
    for version, oldest in MIN_DRIVERS.items():
        if min(majors) >= oldest:
            return "cu" + version.replace(".", "")
    raise Problem(f"the NVIDIA driver there ({min(majors)}) is older than torch needs ({min(MIN_DRIVERS.values())}): ask for a newer one")
