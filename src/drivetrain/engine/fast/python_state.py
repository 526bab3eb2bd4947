"""Reads the Python values that a step may depend on, besides the values of parameters and buffers, to detect changes.

A CUDA graph and compiled code assume that these values stay the same. So they are compared before a graph or compiled
code is used, and again after other code (evaluation, collection) has run.
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
MAX_DEPTH = 3  # levels of nested objects that are compared
MAX_ITEMS = 200  # items of a container that are compared
MAX_ATTRIBUTES = 100  # attributes of an object that are compared


class Identity:
    """Wraps an object; two are equal only for the same object. It keeps the object alive, so that its address is not reused."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


class Address:
    """The address of a tensor's memory. It keeps the memory allocated, so that no other memory gets the same address."""

    __slots__ = ("_alias",)

    def __init__(self, tensor: Tensor) -> None:
        self._alias = tensor.detach()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and self._alias.data_ptr() == other._alias.data_ptr()

    __hash__ = None  # type: ignore[assignment]


def read_python_state(task: Any, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, object]:
    """Returns comparable values, by name, of everything that Python code may change in a task, a model and a captured optimizer."""
    owners: dict[str, dict[str, Any]] = {"the task": vars(task)}
    classes: set[type] = {type(task)}
    for name, module in model.named_modules():
        attributes = {k: v for k, v in vars(module).items() if k not in _MODULE_INTERNALS or k == "training"}
        owners[f"module {name or type(module).__name__}"] = attributes | module._buffers | module._parameters
        classes |= set(type(module).__mro__)
    if optimizer is not None:
        owners["the optimizer"] = {k: v for k, v in vars(optimizer).items() if k not in _OPTIMIZER_INTERNALS}
        for number, group in enumerate(optimizer.param_groups):
            owners[f"parameter group {number}"] = {k: v for k, v in group.items() if k not in ("params", "lr")}
    users_classes = {c for c in classes if not _is_library_class(c)}
    owners |= {f"class {c.__name__}": dict(vars(c)) for c in users_classes}
    users_files = {c.__module__ for c in users_classes}
    owners |= {f"file {name}": vars(sys.modules[name]) for name in users_files if name in sys.modules}
    on_gpu = any(p.device.type != "cpu" for p in model.parameters())
    return {
        f"{name} of {owner}": _comparable(value, MAX_DEPTH, on_gpu)
        for owner, values in owners.items()
        for name, value in values.items()
        if not name.startswith("__") and name != "forward"  # the engine sets the forward of compiled blocks
    }


_MODULE_INTERNALS = set(vars(nn.Module()))
_OPTIMIZER_INTERNALS = ("state", "param_groups", "defaults", "grad_scale", "found_inf")  # changed by torch and the engine


def _is_library_class(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in LIBRARIES


def _comparable(value: Any, depth: int, on_gpu: bool) -> object:
    """Returns an object that compares equal as long as the value is unchanged.

    It calls no method that a class overrides: in some libraries, reading a mapping, a module or a proxy starts imports."""
    kind = type(value)
    if issubclass(kind, PLAIN_TYPES):
        return value
    if issubclass(kind, Tensor):
        # A GPU kernel receives a CPU scalar by value, so an in-place change of it counts as a change.
        version = value._version if on_gpu and value.device.type == "cpu" else None
        address = Address(value) if value.layout is torch.strided else None
        return Identity(value), address, value.requires_grad, version
    if issubclass(kind, (np.random.Generator, random.Random, torch.Generator)):
        return _generator_state(value)
    container = next((base for base in CONTAINERS if issubclass(kind, base)), None)
    if container is not None and depth:
        if container is dict:
            items = [key_or_value for pair in dict.items(value) for key_or_value in pair]
        else:
            items = list(container.__iter__(value))
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
    """Returns whether objects of a class are compared by their attributes, which only user code changes."""
    if issubclass(kind, (nn.Module, type, ModuleType)):
        return False
    return not _is_library_class(kind) or kind.__name__ == "SimpleNamespace"


def _attributes(value: Any) -> dict[str, Any] | None:
    """Returns an object's own attributes; None where it has none, or where its class computes them."""
    descriptor = next((base.__dict__["__dict__"] for base in type(value).__mro__ if "__dict__" in base.__dict__), None)
    return descriptor.__get__(value) if isinstance(descriptor, (GetSetDescriptorType, MemberDescriptorType)) else None


def first_change(before: dict[str, object], after: dict[str, object]) -> str:
    """Returns the name of the first value that changed, appeared or disappeared; empty if none did."""
    for name in (*after, *before):
        if name not in before or name not in after or before[name] != after[name]:
            return name
    return ""


def untrained_tensors(task: Any, model: nn.Module) -> list[Tensor]:
    """Returns the tensors that no optimizer step changes: frozen parameters, and attributes that are tensors."""
    tensors: list[Tensor] = [p for p in model.parameters() if not p.requires_grad]
    for owner in (task, *model.modules()):
        tensors += [v for k, v in vars(owner).items() if k not in _MODULE_INTERNALS and isinstance(v, Tensor)]
    return [t for t in tensors if t.layout is torch.strided and t.numel()]
