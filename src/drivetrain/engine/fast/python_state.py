"""What Python code changes from step to step beside the values of parameters and buffers.

A CUDA graph replays what was captured, and a compiler assumes what it saw: what else changes must be known before
either is used, and again after other code (evaluation, collecting) has run.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from types import GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PLAIN_TYPES = (int, float, str, bool, bytes, type(None))
LIBRARIES = ("torch", "numpy", "builtins", "drivetrain", "collections", "random", "functools", "types", "typing")
CONTAINERS: tuple[Any, ...] = (dict, list, tuple, set, deque)
MAX_DEPTH = 3  # of objects within objects
MAX_ITEMS = 200  # of a container
MAX_ATTRIBUTES = 100  # of an object


class Identity:
    """Equal only for the same object, which it keeps alive so that no other can get its address."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


def read_python_state(task: Any, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, object]:
    """Returns, by name, comparable values of all that Python code may change in a task, a model and a captured optimizer."""
    owners: dict[str, dict[str, Any]] = {"the task": vars(task)}
    classes: set[type] = {type(task)}
    for name, module in model.named_modules():
        own = {k: v for k, v in vars(module).items() if k not in _MODULE_INTERNALS or k == "training"}
        owners[f"module {name or type(module).__name__}"] = own | module._buffers | module._parameters
        classes |= set(type(module).__mro__)
    if optimizer is not None:
        owners["the optimizer"] = {k: v for k, v in vars(optimizer).items() if k not in _OPTIMIZER_INTERNALS}
        for number, group in enumerate(optimizer.param_groups):
            owners[f"parameter group {number}"] = {k: v for k, v in group.items() if k not in ("params", "lr")}
    users_classes = {c for c in classes if not _is_library_class(c)}
    owners |= {f"class {c.__name__}": dict(vars(c)) for c in users_classes}
    owners |= {f"file {m}": vars(sys.modules[m]) for m in {c.__module__ for c in users_classes} if m in sys.modules}
    on_gpu = any(p.device.type != "cpu" for p in model.parameters())
    return {
        f"{name} of {owner}": _comparable(value, MAX_DEPTH, on_gpu)
        for owner, values in owners.items()
        for name, value in values.items()
        if not name.startswith("__") and name != "forward"  # compiled blocks have a forward of the engine's
    }


_MODULE_INTERNALS = set(vars(nn.Module()))
_OPTIMIZER_INTERNALS = ("state", "param_groups", "defaults", "grad_scale", "found_inf")  # changed by torch and the engine


def _is_library_class(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in LIBRARIES


def _comparable(value: Any, depth: int, on_gpu: bool) -> object:
    """Returns something that is equal as long as the value is unchanged.

    It asks types, and calls no overridden method: libraries have mappings, modules and proxies that import when they are read."""
    kind = type(value)
    if issubclass(kind, PLAIN_TYPES):
        return value
    if issubclass(kind, Tensor):
        version = value._version if on_gpu and value.device.type == "cpu" else None  # kernels get a single number by value
        return Identity(value), value.data_ptr() if value.layout is torch.strided else None, value.requires_grad, version
    if issubclass(kind, (np.random.Generator, random.Random, torch.Generator)):
        return _generator_state(value)
    container = next((base for base in CONTAINERS if issubclass(kind, base)), None)
    if container is not None and depth:
        items = [part for pair in dict.items(value) for part in pair] if container is dict else list(container.__iter__(value))
        return len(items), [_comparable(item, depth - 1, on_gpu) for item in items[:MAX_ITEMS]]
    attributes = _attributes(value) if depth and _has_users_attributes(kind) else None
    if attributes is not None:
        return Identity(value), [(k, _comparable(v, depth - 1, on_gpu)) for k, v in list(attributes.items())[:MAX_ATTRIBUTES]]
    return Identity(value)


def _generator_state(generator: np.random.Generator | random.Random | torch.Generator) -> object:
    if isinstance(generator, np.random.Generator):
        return str(generator.bit_generator.state)
    if isinstance(generator, random.Random):
        return hash(generator.getstate())
    return generator.get_state().numpy().tobytes()


def _has_users_attributes(kind: type) -> bool:
    if issubclass(kind, (nn.Module, type, ModuleType)):
        return False
    return not _is_library_class(kind) or kind.__name__ == "SimpleNamespace"


def _attributes(value: Any) -> dict[str, Any] | None:
    """Returns an object's own attributes; None where it has none, or computes them."""
    descriptor = next((base.__dict__["__dict__"] for base in type(value).__mro__ if "__dict__" in base.__dict__), None)
    return descriptor.__get__(value) if isinstance(descriptor, (GetSetDescriptorType, MemberDescriptorType)) else None


def first_change(before: dict[str, object], after: dict[str, object]) -> str:
    """Returns the name of something that changed; empty if nothing did."""
    names = [*after, *(name for name in before if name not in after)]
    return next((name for name in names if name not in before or name not in after or before[name] != after[name]), "")


def untrained_tensors(task: Any, model: nn.Module) -> list[Tensor]:
    """Returns tensors that training itself does not change: frozen parameters, and attributes that are tensors."""
    tensors: list[Tensor] = [p for p in model.parameters() if not p.requires_grad]
    for owner in (task, *model.modules()):
        tensors += [v for k, v in vars(owner).items() if k not in _MODULE_INTERNALS and isinstance(v, Tensor)]
    return [t for t in tensors if t.layout is torch.strided and t.numel()]
