"""What a loss may change besides its result, taken down so that it can be compared and put back."""

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

DEPTH = 3  # objects within objects that are looked into
LONG, ENDLESS = 200, 100_000  # items of a container that are looked into; and of one that is not even copied, for it is data
LARGEST = 64 << 20, 1 << 30  # bytes of tensors that are copied, on a CPU and on a GPU: what is beyond is weights, or data


class Snapshot:
    """Values of a task, a model and the user's own classes and files, as they are now."""

    def __init__(self, task: Any, model: nn.Module) -> None:
        self.complete = True
        """Whether nothing was met that cannot be put back, such as an open file or an iterator."""
        self._held: list[tuple[str, Any, Any]] = []
        self._dicts: list[tuple[str, dict[Any, Any], dict[Any, Any]]] = []
        self._classes: list[tuple[type, dict[str, Any]]] = []
        self._setters: list[Callable[[], object]] = []
        self._tensors: list[tuple[str, Tensor, Tensor]] = []
        self._seen: dict[int, object] = {}
        self._met: list[tuple[str, Tensor]] = []
        self.state: set[str] = set()
        """Names of the model's tensors that are saved with it."""
        for prefix, module in model.named_modules():
            dot = f"{prefix}." if prefix else ""
            for own in (module._buffers, module._parameters):
                self._walk_dict(dot, own, DEPTH)
            saved = [n for n in module._buffers if n not in module._non_persistent_buffers_set]
            self.state |= {dot + n for n in (*saved, *module._parameters)}
        for prefix, module in model.named_modules():
            self._walk_dict(f"{prefix}." if prefix else "model.", vars(module), DEPTH)
        self._walk_dict("self.", vars(task), DEPTH)
        kinds = {c for owner in (task, *model.modules()) for c in type(owner).__mro__ if _is_users_module(c.__module__)}
        for kind in kinds:
            values = {k: v for k, v in vars(kind).items() if not k.startswith("__")}
            self._classes.append((kind, values))
            for name, value in values.items():
                self._walk(f"{kind.__name__}.{name}", value, DEPTH)
        for name in {kind.__module__ for kind in kinds}:
            self._walk_dict("", vars(sys.modules[name]), 1)
        self._copy_tensors(model)

    def changed(self) -> set[str]:
        """Names of what is not as it was, and of what came new (a cache, for example)."""
        names = {name for name, tensor, kept in self._tensors if not _equal(tensor, kept)}
        tensors = {id(tensor): kept for _, tensor, kept in self._tensors}
        for prefix, now, then in self._dicts:
            names |= {f"{prefix}{k}" for k, v in then.items() if not _same(dict.get(now, k), v, tensors)}
            names |= {f"{prefix}{k}" for k in dict.keys(now) - then.keys()}
        names |= {name for name, now, then in self._held if [*map(id, now)] != [*map(id, then)]}
        for kind, then in self._classes:
            names |= {f"{kind.__name__}.{k}" for k, v in then.items() if not _same(vars(kind).get(k), v, tensors)}
        return names

    def restore(self) -> None:
        """Put back what was changed."""
        for _, now, then in self._dicts:
            if [*now] != [*then]:
                dict.clear(now)
                dict.update(now, then)
                continue
            for key, value in then.items():
                if dict.get(now, key) is not value:
                    dict.__setitem__(now, key, value)
        for _, now, then in self._held:
            if [*map(id, now)] != [*map(id, then)]:
                now.clear()
                now.update(then) if isinstance(now, set) else now.extend(then)
        for kind, values in self._classes:
            for name in [k for k in vars(kind) if not k.startswith("__") and k not in values]:
                delattr(kind, name)
            for name, value in values.items():
                if vars(kind).get(name) is not value:
                    setattr(kind, name, value)
        with torch.no_grad():
            for _, tensor, kept in self._tensors:
                if not _equal(tensor, kept):
                    tensor.data.copy_(kept)
        for put_back in self._setters:
            put_back()

    # --- taking it down ---

    def _walk_dict(self, prefix: str, values: dict[Any, Any], depth: int) -> None:
        if id(values) in self._seen:
            return
        self._seen[id(values)] = values
        if len(values) > ENDLESS:
            return
        copied = dict(dict.items(values))  # not a subclass's own items(): a library's lazy mapping would load all it has
        self._dicts.append((prefix, values, copied))
        for key, value in list(copied.items())[:LONG] if depth else ():
            self._walk(f"{prefix}{key}", value, depth - 1)

    def _walk(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, (*PLAIN_TYPES, type)) or id(value) in self._seen:
            return
        if isinstance(value, nn.Module):  # the model's own have had, or will have, their turn
            for module in value.modules():
                self._walk_dict(f"{name}.", vars(module), DEPTH)
            return
        if isinstance(value, dict):
            self._walk_dict(f"{name}.", value, depth)
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._met.append((name, value))
        elif isinstance(value, np.ndarray):
            self._hold_array(value)
        elif isinstance(value, (list, set, deque, tuple)):
            if not isinstance(value, tuple) and len(value) <= ENDLESS:
                self._held.append((name, value, list(value)))
            for item in list(value)[:LONG] if depth else ():
                self._walk(name, item, depth - 1)
        elif isinstance(value, torch.Generator):
            self._setters.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._setters.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, np.random.Generator):
            self._setters.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif isinstance(value, Iterator):
            self.complete = False
        elif depth and _is_users_module(type(value).__module__) and hasattr(value, "__dict__"):
            self._walk_dict(f"{name}.", vars(value), depth)

    def _hold_array(self, array: np.ndarray[Any, Any]) -> None:
        if array.nbytes <= LARGEST[0] and array.flags.writeable and not array.dtype.hasobject:
            self._setters.append(partial(np.copyto, array, array.copy()))

    def _copy_tensors(self, model: nn.Module) -> None:
        """Copy the values of tensors: those that training does not change by itself first, then as many as there is room for."""
        trained = {id(p): p.requires_grad for p in model.parameters()}
        room = LARGEST[any(p.device.type != "cpu" for p in model.parameters())]
        for name, tensor in sorted(self._met, key=lambda one: (id(one[1]) in trained) + trained.get(id(one[1]), False)):
            if is_sharded(tensor) or unsavable_form(tensor) or tensor.is_meta or tensor.nbytes > room:
                continue
            room -= tensor.nbytes
            self._tensors.append((name, tensor, tensor.detach().clone()))
        self._met.clear()


@lru_cache(maxsize=1024)
def _is_users_module(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return bool(file) and is_users(str(file))


def _same(now: Any, then: Any, tensors: dict[int, Tensor]) -> bool:
    """Whether a name stands for what it stood for: the same object, or the same value in another one."""
    if now is then:
        return True
    if isinstance(now, Tensor) and isinstance(then, Tensor):
        return now.shape == then.shape and now.dtype == then.dtype and _equal(now, tensors.get(id(then), then))
    return isinstance(now, PLAIN_TYPES) and type(now) is type(then) and now == then


def _equal(one: Tensor, two: Tensor) -> bool:
    one, two = one.detach(), two.detach()
    if unsavable_form(one) or one.is_meta or one.device != two.device:
        return False
    return torch.equal(one, two) or (one.is_floating_point() and bool(((one == two) | (one.isnan() & two.isnan())).all()))
