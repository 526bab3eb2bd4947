"""CUDA graphs: pieces of device work, captured once for each form of their inputs and replayed from then on.

A replay is the same kernels in the same order with the same numbers, launched all at once. Code for which the host
waits cannot be captured: that is found out in an eager call, because a failed capture leaves the process in a state
that cannot be relied on.
"""

from __future__ import annotations

import contextlib
import gc
import linecache
import os
import sysconfig
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TextIO

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from drivetrain.engine.fast.python_state import PLAIN_TYPES
from drivetrain.plan import HOST_SYNC_REASON
from drivetrain.settings import PACKAGE

WARM_UP_CALLS = 2  # calls of a form that run eager before it is captured
MAX_GRAPHS = 24
MAX_FORMS = 1000  # with more, batches have no common form


def form_of(inputs: Any) -> Hashable:
    """Returns the layout of nested tensors, with the values of all leaves that are no tensors; None for None."""
    if inputs is None:
        return None
    leaves, layout = tree_flatten(inputs)
    leaf_forms = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else _constant(leaf) for leaf in leaves)
    return str(layout), leaf_forms


def _constant(leaf: Any) -> Hashable:
    return leaf if isinstance(leaf, PLAIN_TYPES) else object()  # an object is equal to nothing else


def uncapturable_kind(inputs: Any) -> str:
    """Returns the kind of something in a batch that cannot be copied into a graph; empty if there is nothing."""
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor):
            if leaf.layout is not torch.strided or leaf.is_nested:
                return "tensor that is sparse or nested"
        elif not isinstance(leaf, PLAIN_TYPES):
            return type(leaf).__name__
    return ""


class GraphAction(Enum):
    """What to do with a call whose form has no graph."""

    EAGER = "call it"
    CHECK = "call it and see whether the host waits"
    CAPTURE = "capture it, then replay"


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    """Where the graph reads its inputs."""
    output: Any


class Graphs:
    """Replays a CUDA graph for each call whose form was seen before, and calls all others.

    With `tight_memory` a form is captured at its first call, in the graphs' own memory, instead of eager beside it.
    """

    def __init__(self, device: torch.device, notice: Callable[[str], None], tight_memory: bool = False) -> None:
        self._device, self._notice, self._tight_memory = device, notice, tight_memory
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[Hashable, CapturedGraph] = {}
        self._num_calls: Counter[Hashable] = Counter()
        self._has_noticed = False
        self._replayed_steps: set[Hashable] = set()
        self.num_eager = 0
        """Calls that were no replays."""
        self.disabled_reason = ""
        """Why nothing is captured any more; empty while graphs are in use."""

    def __call__(self, key: tuple[Hashable, ...], function: Callable[..., Any], inputs: Any, *constants: Any) -> Any:
        """Returns `function(inputs, *constants)`; a graph's output is overwritten by its next replay."""
        captured = self._captured.get(key)
        if captured is None:
            self.num_eager += 1
            action = self._choose(key)
            if action is GraphAction.EAGER:
                return function(inputs, *constants)
            if action is GraphAction.CHECK:
                return self._call_and_check(key, function, inputs, *constants)
            try:
                captured = self._captured[key] = self.capture(function, inputs, *constants)
            except Exception as error:
                self.disable(f"{key[0]}: {explain_failure(error)}")
                return function(inputs, *constants)
        for target, value in zip(captured.inputs, _tensors(inputs), strict=True):
            target.copy_(value)
        captured.graph.replay()
        return captured.output

    def has_graph_of(self, kind: str) -> bool:
        """Returns whether there is a graph of some form of this work, such as "step"."""
        return any(isinstance(key, tuple) and key[0] == kind for key in self._captured)

    def note_step(self, kind: Hashable, num_eager_before: int) -> None:
        """Notes, after a step of this kind, whether it was all replays: `num_eager` was `num_eager_before` at its begin."""
        (self._replayed_steps.add if self.num_eager == num_eager_before else self._replayed_steps.discard)(kind)

    def only_replayed(self, kind: Hashable) -> bool:
        """Returns whether the last step of this kind was all replays, which need no memory."""
        return kind in self._replayed_steps

    def clear(self) -> None:
        """Drops all graphs, because what was captured no longer holds."""
        self._replayed_steps.clear()
        self._captured.clear()
        self._num_calls.clear()

    def disable(self, reason: str) -> None:
        """Captures nothing from now on."""
        self.disabled_reason = reason
        self._replayed_steps.clear()
        self._captured.clear()  # they were captured with the generator's old state
        self._notice(f"nothing is captured from here on: {reason}")

    def _choose(self, key: tuple[Hashable, ...]) -> GraphAction:
        if self.disabled_reason or len(self._num_calls) >= MAX_FORMS or len(self._captured) >= MAX_GRAPHS:
            if not self.disabled_reason and not self._has_noticed:
                self._has_noticed = True
                self._notice("batches come in many forms (shapes, or values that are no tensors): those beyond the first few run eager")
            return GraphAction.EAGER
        self._num_calls[key] += 1
        num_warm_up = 0 if self._tight_memory and self.has_graph_of(str(key[0])) else WARM_UP_CALLS
        if self._num_calls[key] == num_warm_up + 1:
            return GraphAction.CAPTURE
        return GraphAction.CHECK if self._num_calls[key] == num_warm_up else GraphAction.EAGER

    def _call_and_check(self, key: Hashable, function: Callable[..., Any], inputs: Any, *constants: Any) -> Any:
        """Calls it eager; if the host waits in it, it is never captured."""
        with watch_host_syncs() as waits:
            output = function(inputs, *constants)
        if waits:
            self._num_calls[key] += WARM_UP_CALLS  # beyond the call at which it would be captured
            self._notice(f"a part of the work is not captured: {waits[0]}")
        return output

    def capture(self, function: Callable[..., Any], inputs: Any, *constants: Any) -> CapturedGraph:
        leaves, layout = tree_flatten(inputs)
        fixed = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        graph = torch.cuda.CUDAGraph()
        try:
            with capturing(graph, self._pool):
                output = function(tree_unflatten(fixed, layout), *constants)
        except BaseException:
            self._clean_up_capture()
            raise
        return CapturedGraph(graph, [f for f in fixed if isinstance(f, Tensor)], output)

    def _clean_up_capture(self) -> None:
        """After a failed capture: ends the use of its memory pool, and gives the generator, which believes that the capture goes on, a new state."""
        index = self._device.index or 0
        with contextlib.suppress(Exception):
            torch._C._cuda_endAllocateToPool(index, self._pool)
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(torch.Generator(self._device).graphsafe_get_state())


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Inside, work becomes the graph. No garbage is collected meanwhile: with a dead graph among it, the capture would fail."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool, torch.cuda.current_stream(), "thread_local"):
            yield
    finally:
        if is_collecting:
            gc.enable()


def capture_graph(function: Callable[[], object]) -> Callable[[], None]:
    """Captures a function without inputs as a graph; returns what replays it."""
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        function()
    return graph.replay


def _tensors(inputs: Any) -> list[Tensor]:
    if type(inputs) is tuple and all(part is None for part in inputs):  # the common case, without tree_leaves' time
        return []
    return [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]


# --- host syncs ---------------------------------------------------------------------------------


@contextlib.contextmanager
def watch_host_syncs() -> Iterator[list[str]]:
    """Collects a sentence for each operation inside for which this thread waits for the device.

    Other threads, such as the one that writes checkpoints, may wait: torch warns of them, too.
    """
    waits: list[str] = []
    mode_before, thread = torch.cuda.get_sync_debug_mode(), threading.get_ident()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        show = warnings.showwarning

        def collect(
            message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
        ) -> None:
            if "called a synchronizing" not in str(message):
                if "Synchronization debug mode" not in str(message):
                    show(message, category, filename, lineno, file, line)
            elif threading.get_ident() == thread:
                waits.append(_sentence(filename, lineno, HOST_SYNC_REASON))

        warnings.showwarning = collect
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(mode_before)


def explain_failure(error: BaseException) -> str:
    """Returns one sentence about why code could not be captured or compiled, with the user's line where there is one."""
    while error.__context__ is not None and "capture" in str(error):  # the end of a failed capture hides its cause
        error = error.__context__
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if "capturing" in text:
        text = "this cannot be done while a graph is captured"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library_file(f.filename)]
    return _sentence(frames[-1].filename, frames[-1].lineno or 0, text) if frames else text


def _sentence(filename: str, line: int, text: str) -> str:
    code = linecache.getline(filename, line).strip()
    return text if _is_library_file(filename) or not code else f"{os.path.basename(filename)}:{line}, `{code}`: {text}"


def _is_library_file(filename: str) -> bool:
    """Returns whether a file is of Python, an installed library or drivetrain, except its tasks."""
    tasks = os.path.join(str(PACKAGE), "tasks")
    folders = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")} | {os.path.dirname(torch.__file__)}
    in_library = any(filename.startswith(folder + os.sep) for folder in folders if folder)
    in_drivetrain = filename.startswith(str(PACKAGE) + os.sep)
    return filename.startswith("<") or ((in_library or in_drivetrain) and not filename.startswith(tasks + os.sep))
