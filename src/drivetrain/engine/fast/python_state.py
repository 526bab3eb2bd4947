"""What Python code changes from step to step beside the values of parameters and buffers.

A graph replays what was captured and a compiler assumes what it saw, so whatever else changes is looked for
before either is trusted, and again where other code (evaluation, collecting) had its turn.
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
HOLDERS: tuple[Any, ...] = (dict, list, tuple, set, deque)
DEPTH = 3  # objects within objects that are looked into


class Same:
    """An object, equal only to itself; held, so that no other can take its place in memory."""

    __slots__ = ("it",)

    def __init__(self, it: object) -> None:
        self.it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.it is other.it

    __hash__ = None  # type: ignore[assignment]


def read_python_state(task: Any, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, object]:
    """Names and marks of everything that Python code may change, of a task, a model and an optimizer that is captured."""
    found: dict[str, object] = {}
    on_gpu = any(p.device.type != "cpu" for p in model.parameters())
    owners: dict[str, dict[str, Any]] = {"the task": vars(task)}
    classes: set[type] = {type(task)}
    for name, module in model.named_modules():
        own = {k: v for k, v in vars(module).items() if k not in _INNER or k == "training"}
        owners[f"module {name or type(module).__name__}"] = own | module._buffers | module._parameters
        classes |= set(type(module).__mro__)
    if optimizer is not None:
        owners["the optimizer"] = {k: v for k, v in vars(optimizer).items() if k not in _OF_THE_OPTIMIZER}
        for number, group in enumerate(optimizer.param_groups):
            owners[f"parameter group {number}"] = {k: v for k, v in group.items() if k not in ("params", "lr")}
    users = {c for c in classes if not _is_library(c)}
    owners |= {f"class {c.__name__}": dict(vars(c)) for c in users}
    owners |= {f"file {m}": vars(sys.modules[m]) for m in {c.__module__ for c in users} if m in sys.modules}
    for owner, values in owners.items():
        for name, value in values.items():
            if not name.startswith("__") and name != "forward":  # compiled blocks have one of ours
                found[f"{name} of {owner}"] = _mark(value, DEPTH, on_gpu)
    return found


_INNER = set(vars(nn.Module()))
_OF_THE_OPTIMIZER = ("state", "param_groups", "defaults", "grad_scale", "found_inf")  # torch's and the engine's to change


def _is_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in LIBRARIES


def _mark(value: Any, depth: int, on_gpu: bool) -> object:
    """By types alone, and past overridden methods: libraries have mappings, modules and proxies that import when they are looked at."""
    kind = type(value)
    if issubclass(kind, PLAIN_TYPES):
        return value
    if issubclass(kind, Tensor):
        host = value._version if on_gpu and value.device.type == "cpu" else None  # kernels get a single number by value
        return Same(value), value.data_ptr() if value.layout is torch.strided else None, value.requires_grad, host
    if issubclass(kind, np.random.Generator):
        return str(value.bit_generator.state)
    if issubclass(kind, random.Random):
        return hash(value.getstate())
    if issubclass(kind, torch.Generator):
        return value.get_state().numpy().tobytes()
    holder = next((base for base in HOLDERS if issubclass(kind, base)), None)
    if holder is not None and depth:
        items = [part for pair in dict.items(value) for part in pair] if holder is dict else list(holder.__iter__(value))
        return len(items), [_mark(item, depth - 1, on_gpu) for item in items[:200]]
    if depth and not issubclass(kind, (nn.Module, type, ModuleType)) and not _is_library_object(value):
        attributes = _attributes(value)
        if attributes is not None:
            return Same(value), [(k, _mark(v, depth - 1, on_gpu)) for k, v in list(attributes.items())[:100]]
    return Same(value)


def _attributes(value: Any) -> dict[str, Any] | None:
    """An object's own; None where it has none, or has made them up."""
    descriptor = next((base.__dict__["__dict__"] for base in type(value).__mro__ if "__dict__" in base.__dict__), None)
    return descriptor.__get__(value) if isinstance(descriptor, (GetSetDescriptorType, MemberDescriptorType)) else None


def _is_library_object(value: Any) -> bool:
    kind = type(value)
    return _is_library(kind) and kind.__name__ != "SimpleNamespace"


def first_change(before: dict[str, object], after: dict[str, object]) -> str:
    """The name of something that is not as it was, or nothing."""
    names = [*after, *(name for name in before if name not in after)]
    return next((name for name in names if name not in before or name not in after or before[name] != after[name]), "")


def untrained_tensors(task: Any, model: nn.Module) -> list[Tensor]:
    """Tensors that training does not change by itself: frozen parameters, and attributes that are tensors."""
    found: list[Tensor] = [p for p in model.parameters() if not p.requires_grad]
    for owner in (task, *model.modules()):
        found += [v for k, v in vars(owner).items() if k not in _INNER and isinstance(v, Tensor)]
    return [t for t in found if t.layout is torch.strided and t.numel()]
