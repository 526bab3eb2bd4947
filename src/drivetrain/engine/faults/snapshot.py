"""Records all values that a loss may change as a side effect, to compare and restore them."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from drivetrain.engine.fast.python_state import PLAIN_TYPES
from drivetrain.engine.state.tensors import is_sharded, unsavable_form
from drivetrain.project import is_users

MAX_DEPTH = 3  # levels of nested objects that are recorded
MAX_ITEMS = 200  # items of a container that are recorded
MAX_CONTAINER = 100_000  # items; a larger container holds data, and is not copied
MAX_TENSOR_BYTES_CPU = 64 << 20  # copied in total; further tensors are weights or data
MAX_TENSOR_BYTES_GPU = 1 << 30  # the same on a GPU
CONTAINERS = (list, set, deque, tuple)


class Snapshot:
    """The values of a task, a model and the user's own classes and files at one moment."""

    def __init__(self, task: Any, model: nn.Module) -> None:
        self.is_complete = True
        """Whether everything can be restored; False if there is an iterator, such as an open file."""
        self.saved_names: set[str] = set()
        """Names of the model's tensors that checkpoints hold."""
        self._containers: list[tuple[str, Any, list[Any]]] = []
        """Name, list or set, and its items."""
        self._dicts: list[tuple[str, dict[Any, Any], dict[Any, Any]]] = []
        """Prefix of names, dictionary, and its copy."""
        self._classes: list[tuple[type, dict[str, Any]]] = []
        """Class, and a copy of its attributes."""
        self._tensors: list[tuple[str, Tensor, Tensor]] = []
        """Name, tensor, and its copy."""
        self._restorers: list[Callable[[], object]] = []
        """Functions that restore generators and arrays."""
        self._recorded: dict[int, object] = {}
        """id -> object, for each object that is already recorded."""
        self._uncopied: list[tuple[str, Tensor]] = []
        self._record_model(model)
        self._record_dict("self.", vars(task), MAX_DEPTH)
        classes = {c for owner in (task, *model.modules()) for c in type(owner).__mro__}
        self._record_classes({c for c in classes if _is_users_module(c.__module__)})
        self._copy_tensors(model)

    def changed(self) -> set[str]:
        """Returns the names of values that changed, and of new ones (a cache, for example)."""
        names = {name for name, tensor, copy in self._tensors if not _equal(tensor, copy)}
        copies = {id(tensor): copy for _, tensor, copy in self._tensors}
        for prefix, values, original in self._dicts:
            names |= {f"{prefix}{k}" for k, v in original.items() if not _is_unchanged(dict.get(values, k), v, copies)}
            names |= {f"{prefix}{k}" for k in dict.keys(values) - original.keys()}
        names |= {name for name, container, items in self._containers if not _has_items(container, items)}
        for kind, attributes in self._classes:
            names |= {f"{kind.__name__}.{k}" for k, v in attributes.items() if not _is_unchanged(vars(kind).get(k), v, copies)}
        return names

    def restore(self) -> None:
        """Restores all values that changed."""
        for _, values, original in self._dicts:
            _restore_dict(values, original)
        for _, container, items in self._containers:
            _restore_items(container, items)
        for kind, attributes in self._classes:
            _restore_class(kind, attributes)
        with torch.no_grad():
            for _, tensor, copy in self._tensors:
                if not _equal(tensor, copy):
                    tensor.data.copy_(copy)
        for restore in self._restorers:
            restore()

    # --- recording ---

    def _record_model(self, model: nn.Module) -> None:
        """Records tensors first, so that their names are those of the model's state dict."""
        for module_name, module in model.named_modules():
            prefix = f"{module_name}." if module_name else ""
            for tensors in (module._buffers, module._parameters):
                self._record_dict(prefix, tensors, MAX_DEPTH)
            persistent = [n for n in module._buffers if n not in module._non_persistent_buffers_set]
            self.saved_names |= {prefix + n for n in (*persistent, *module._parameters)}
        for module_name, module in model.named_modules():
            self._record_dict(f"{module_name}." if module_name else "model.", vars(module), MAX_DEPTH)

    def _record_classes(self, kinds: set[type]) -> None:
        """Records the user's classes and the files that they are defined in."""
        for kind in kinds:
            attributes = {k: v for k, v in vars(kind).items() if not k.startswith("__")}
            self._classes.append((kind, attributes))
            for name, value in attributes.items():
                self._record(f"{kind.__name__}.{name}", value, MAX_DEPTH)
        for name in {kind.__module__ for kind in kinds}:
            self._record_dict("", vars(sys.modules[name]), 1)

    def _record_dict(self, prefix: str, values: dict[Any, Any], depth: int) -> None:
        if id(values) in self._recorded:
            return
        self._recorded[id(values)] = values
        if len(values) > MAX_CONTAINER:
            return
        copy = dict(dict.items(values))  # not a subclass's own items(), which could load all values of a lazy mapping
        self._dicts.append((prefix, values, copy))
        for key, value in list(copy.items())[:MAX_ITEMS] if depth else ():
            self._record(f"{prefix}{key}", value, depth - 1)

    def _record(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, (*PLAIN_TYPES, type)) or id(value) in self._recorded:
            return
        if isinstance(value, nn.Module):  # of the task; `_record_model` records the model's own
            for module in value.modules():
                self._record_dict(f"{name}.", vars(module), MAX_DEPTH)
            return
        if isinstance(value, dict):
            self._record_dict(f"{name}.", value, depth)
            return
        self._recorded[id(value)] = value
        if isinstance(value, Tensor):
            self._uncopied.append((name, value))
        elif isinstance(value, CONTAINERS):
            self._record_container(name, value, depth)
        elif restorer := _restorer(value):
            self._restorers.append(restorer)
        elif isinstance(value, Iterator):
            self.is_complete = False
        elif depth and _is_users_module(type(value).__module__) and hasattr(value, "__dict__"):
            self._record_dict(f"{name}.", vars(value), depth)

    def _record_container(self, name: str, value: Any, depth: int) -> None:
        if not isinstance(value, tuple) and len(value) <= MAX_CONTAINER:
            self._containers.append((name, value, list(value)))
        for item in list(value)[:MAX_ITEMS] if depth else ():
            self._record(name, item, depth - 1)

    def _copy_tensors(self, model: nn.Module) -> None:
        """Copies tensors as far as they fit: buffers and other tensors first, then frozen parameters, then trained ones."""
        requires_grad = {id(p): p.requires_grad for p in model.parameters()}
        on_gpu = any(p.device.type != "cpu" for p in model.parameters())
        free_bytes = MAX_TENSOR_BYTES_GPU if on_gpu else MAX_TENSOR_BYTES_CPU

        def copy_order(name_and_tensor: tuple[str, Tensor]) -> int:
            tensor_id = id(name_and_tensor[1])
            if tensor_id not in requires_grad:
                return 0
            return 2 if requires_grad[tensor_id] else 1

        for name, tensor in sorted(self._uncopied, key=copy_order):
            if is_sharded(tensor) or unsavable_form(tensor) or tensor.is_meta or tensor.nbytes > free_bytes:
                continue
            free_bytes -= tensor.nbytes
            self._tensors.append((name, tensor, tensor.detach().clone()))
        self._uncopied.clear()


def _restorer(value: Any) -> Callable[[], object] | None:
    """Returns a function that restores the present state of a generator or an array; None for other objects and large arrays."""
    if isinstance(value, np.ndarray):
        is_copied = value.nbytes <= MAX_TENSOR_BYTES_CPU and value.flags.writeable and not value.dtype.hasobject
        return partial(np.copyto, value, value.copy()) if is_copied else None
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def _restore_dict(values: dict[Any, Any], original: dict[Any, Any]) -> None:
    if [*values] != [*original]:
        dict.clear(values)
        dict.update(values, original)
        return
    for key, value in original.items():
        if dict.get(values, key) is not value:
            dict.__setitem__(values, key, value)


def _restore_items(container: Any, items: list[Any]) -> None:
    if _has_items(container, items):
        return
    container.clear()
    if isinstance(container, set):
        container.update(items)
    else:
        container.extend(items)


def _restore_class(kind: type, attributes: dict[str, Any]) -> None:
    for name in [k for k in vars(kind) if not k.startswith("__") and k not in attributes]:
        delattr(kind, name)
    for name, value in attributes.items():
        if vars(kind).get(name) is not value:
            setattr(kind, name, value)


@lru_cache(maxsize=1024)
def _is_users_module(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return bool(file) and is_users(str(file))


def _has_items(container: Any, items: list[Any]) -> bool:
    """Returns whether a container holds exactly these objects in this order."""
    return [*map(id, container)] == [*map(id, items)]


def _is_unchanged(value: Any, original: Any, copies: dict[int, Tensor]) -> bool:
    """Returns whether a value is the original object, or another object with an equal value. `copies`: id of a tensor -> its copy."""
    if value is original:
        return True
    if isinstance(value, Tensor) and isinstance(original, Tensor):
        has_same_form = value.shape == original.shape and value.dtype == original.dtype
        return has_same_form and _equal(value, copies.get(id(original), original))
    return isinstance(value, PLAIN_TYPES) and type(value) is type(original) and value == original


def _equal(first: Tensor, second: Tensor) -> bool:
    """Returns whether two tensors hold the same numbers; NaN equals NaN."""
    first, second = first.detach(), second.detach()
    if unsavable_form(first) or first.is_meta or first.device != second.device:
        return False
    if torch.equal(first, second):
        return True
    return first.is_floating_point() and bool(((first == second) | (first.isnan() & second.isnan())).all())
