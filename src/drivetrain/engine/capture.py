"""CUDA graphs: pieces of device work, captured once for each form of their inputs and replayed from then on.

A replay is the same kernels in the same order with the same numbers, launched all at once. What a graph
cannot follow (waiting for the device, Python state that changes) is looked for before anything is captured.
"""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from drivetrain.settings import PACKAGE

WARM = 2  # times a form is seen before it is worth a graph
MOST = 24  # forms kept as graphs
COUNTED = 1000  # forms looked at: beyond them, batches have no common form


PLAIN = (int, float, str, bool, bytes, type(None))


def form_of(given: Any) -> Hashable:
    """The layout of nested tensors, with all values that are no tensors: None for None."""
    if given is None:
        return None
    leaves, layout = tree_flatten(given)
    marks = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else _constant(leaf) for leaf in leaves)
    return str(layout), marks


def _constant(leaf: Any) -> Hashable:
    return leaf if isinstance(leaf, PLAIN) else object()  # like nothing else


def opaque(given: Any) -> str:
    """The class of something in a batch that a graph cannot be handed anew, or nothing."""
    return next((type(leaf).__name__ for leaf in tree_flatten(given)[0] if not isinstance(leaf, (Tensor, *PLAIN))), "")


@dataclass(frozen=True, slots=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    places: list[Tensor]
    """Where the work reads its inputs."""
    output: Any


class Graphs:
    """Does work by replaying it, where it was seen before in the same form; else by calling it."""

    def __init__(self, device: torch.device, notice: Callable[[str], None]) -> None:
        self._device, self._notice = device, notice
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[Hashable, Captured] = {}
        self._seen: Counter[Hashable] = Counter()
        self._said = False

    def __call__(self, key: Hashable, work: Callable[..., Any], inputs: Any, *constants: Any) -> Any:
        """`work(inputs, *constants)`; its output stands until the next call."""
        found = self._captured.get(key)
        if found is None:
            if not self._ripe(key):
                return work(inputs, *constants)
            try:
                found = self.capture(work, inputs, *constants)
            except Exception as error:
                self._notice(f"a batch of another form is not captured: {blame(error)}")
                return work(inputs, *constants)
            self._captured[key] = found
        for place, value in zip(found.places, _tensors(inputs), strict=True):
            place.copy_(value)
        found.graph.replay()
        return found.output

    def _ripe(self, key: Hashable) -> bool:
        if len(self._seen) >= COUNTED or len(self._captured) >= MOST:
            if not self._said:
                self._said = True
                self._notice("batches come in many forms (shapes, or values that are no tensors): those beyond the first few run eager")
            return False
        self._seen[key] += 1
        return self._seen[key] == WARM + 1

    def capture(self, work: Callable[..., Any], inputs: Any, *constants: Any) -> Captured:
        leaves, layout = tree_flatten(inputs)
        fixed = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, self._pool, torch.cuda.current_stream(), "thread_local"):
                output = work(tree_unflatten(fixed, layout), *constants)
        except BaseException:
            _free_generator(self._device)
            raise
        return Captured(graph, [f for f in fixed if isinstance(f, Tensor)], output)


def _tensors(inputs: Any) -> list[Tensor]:
    if type(inputs) is tuple and all(part is None for part in inputs):  # the common case, by the shortest way
        return []
    return [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]


def _free_generator(device: torch.device) -> None:
    """A capture that failed leaves the generator believing that it goes on: give it a fresh state."""
    generator = torch.cuda.default_generators[device.index or 0]
    generator.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())


# --- what a graph cannot follow -----------------------------------------------------------------


@contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, an operation for which the host waits for the device is an error that names it."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def blame(error: BaseException) -> str:
    """One sentence about why code could not be captured or compiled, with the user's line where there is one."""
    while error.__context__ is not None and "capture" in str(error):  # the end of a failed capture hides its cause
        error = error.__context__
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if "synchroniz" in text or "capturing" in text:
        text = "the host waits there for the device's result"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library(f.filename)]
    if not frames:
        return text
    place = frames[-1]
    line = (place.line or linecache.getline(place.filename, place.lineno or 0)).strip()
    return f"{os.path.basename(place.filename)}:{place.lineno}, `{line}`: {text}"


def _is_library(filename: str) -> bool:
    torch_folder = os.path.dirname(torch.__file__)
    ours = os.path.join(str(PACKAGE), "tasks")
    return filename.startswith((torch_folder, "<", sys.prefix, sys.base_prefix)) or (
        filename.startswith(str(PACKAGE)) and not filename.startswith(ours)
    )


def marks(task: Any, model: nn.Module) -> dict[str, object]:
    """Everything of a task and a model that Python code may change beside parameters' and buffers' values."""
    found: dict[str, object] = {}
    owners: dict[str, dict[str, Any]] = {"the task": vars(task)}
    classes: set[type] = {type(task)}
    for name, module in model.named_modules():
        owners[f"module {name or type(module).__name__}"] = vars(module) | module._buffers
        classes.add(type(module))
    own = {c for c in classes if not c.__module__.startswith(("torch.", "drivetrain."))}
    owners |= {f"class {c.__name__}": dict(vars(c)) for c in own}
    owners |= {f"file {m}": vars(sys.modules[m]) for m in {c.__module__ for c in own} if m in sys.modules}
    for owner, values in owners.items():
        for name, value in values.items():
            if not name.startswith("__") and name not in _INNER:
                found[f"{name} of {owner}"] = _mark(value, 2)
    return found


_INNER = set(vars(nn.Module()))


def _mark(value: Any, depth: int) -> object:
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, (list, tuple, set, dict)) and depth:
        items = list(value.items()) if isinstance(value, dict) else list(value)
        return len(items), tuple(_mark(item, depth - 1) for item in items[:100])
    return id(value)


def changed(before: dict[str, object], after: dict[str, object]) -> str:
    """The name of something that changes from step to step, or nothing."""
    return next((name for name in after if name not in before or before[name] != after[name]), "")
