"""CUDA graphs: device work that is captured once for each form of its inputs, and replayed from then on.

A replay launches the same kernels in the same order, all at once, so its results are the same. Code in which the host
waits for the device cannot be captured. An eager call finds this out first, because a failed capture leaves the
process in an unreliable state.
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

WARM_UP_CALLS = 2  # eager calls of a form before it is captured
MAX_GRAPHS = 24  # graphs in memory; further forms run eager
MAX_FORMS = 1000  # forms that are counted; with more, forms hardly ever repeat


def form_of(inputs: Any) -> Hashable:
    """Returns the structure of nested inputs, with shape and type of each tensor and the value of each other leaf; None for None."""
    if inputs is None:
        return None
    leaves, layout = tree_flatten(inputs)
    leaf_forms = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else _constant(leaf) for leaf in leaves)
    return str(layout), leaf_forms


def _constant(leaf: Any) -> Hashable:
    return leaf if isinstance(leaf, PLAIN_TYPES) else object()  # a new object is equal to no other, so its form never repeats


def uncapturable_kind(inputs: Any) -> str:
    """Names the kind of a value in a batch that cannot be copied into a graph's inputs; empty if there is none."""
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
    """A CUDA graph with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    """The static tensors into which inputs are copied before a replay."""
    output: Any


class Graphs:
    """Replays a CUDA graph for each call whose form was captured, and runs all other calls eager.

    With `tight_memory`, a further form of the same work is captured at its first call: an eager call first would take
    memory in addition to the graphs' own.
    """

    def __init__(self, device: torch.device, notice: Callable[[str], None], tight_memory: bool = False) -> None:
        self._device, self._notice, self._tight_memory = device, notice, tight_memory
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[Hashable, CapturedGraph] = {}
        self._num_calls: Counter[Hashable] = Counter()
        self._has_reported_limit = False
        self._replayed_steps: set[Hashable] = set()
        self.num_eager = 0
        """Number of calls that were no replays."""
        self.disabled_reason = ""
        """Why graphs are not used any more; empty while they are."""

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
        for static_input, value in zip(captured.inputs, _tensors(inputs), strict=True):
            static_input.copy_(value)
        captured.graph.replay()
        return captured.output

    def has_graph_of(self, kind: str) -> bool:
        """Returns whether there is a graph of this kind of work, such as "step"."""
        return any(isinstance(key, tuple) and key[0] == kind for key in self._captured)

    def note_step(self, kind: Hashable, num_eager_before: int) -> None:
        """Records whether a step of this kind was only replays; `num_eager_before` is `num_eager` from before the step."""
        if self.num_eager == num_eager_before:
            self._replayed_steps.add(kind)
        else:
            self._replayed_steps.discard(kind)

    def only_replayed(self, kind: Hashable) -> bool:
        """Returns whether the last step of this kind was only replays, which allocate no memory."""
        return kind in self._replayed_steps

    def clear(self) -> None:
        """Drops all graphs, because the values or memory that they assume have changed."""
        self._replayed_steps.clear()
        self._captured.clear()
        self._num_calls.clear()

    def disable(self, reason: str) -> None:
        """Drops all graphs and captures nothing from now on."""
        self.disabled_reason = reason
        self._replayed_steps.clear()
        self._captured.clear()  # these graphs use the generator state that a failed capture replaces
        self._notice(f"nothing is captured from here on: {reason}")

    def _choose(self, key: tuple[Hashable, ...]) -> GraphAction:
        if self.disabled_reason or len(self._num_calls) >= MAX_FORMS or len(self._captured) >= MAX_GRAPHS:
            if not self.disabled_reason and not self._has_reported_limit:
                self._has_reported_limit = True
                self._notice("batches come in many forms (shapes, or values that are no tensors): those beyond the first few run eager")
            return GraphAction.EAGER
        self._num_calls[key] += 1
        num_warm_up = 0 if self._tight_memory and self.has_graph_of(str(key[0])) else WARM_UP_CALLS
        if self._num_calls[key] == num_warm_up + 1:
            return GraphAction.CAPTURE
        return GraphAction.CHECK if self._num_calls[key] == num_warm_up else GraphAction.EAGER

    def _call_and_check(self, key: Hashable, function: Callable[..., Any], inputs: Any, *constants: Any) -> Any:
        """Calls the function eager; if the host waits for the device in it, its form is never captured."""
        with watch_host_syncs() as waits:
            output = function(inputs, *constants)
        if waits:
            self._num_calls[key] += WARM_UP_CALLS  # skips the call at which the form would be captured
            self._notice(f"a part of the work is not captured: {waits[0]}")
        return output

    def capture(self, function: Callable[..., Any], inputs: Any, *constants: Any) -> CapturedGraph:
        """Captures `function(inputs, *constants)` as a graph that reads copies of the input tensors."""
        leaves, layout = tree_flatten(inputs)
        static_leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        graph = torch.cuda.CUDAGraph()
        try:
            with capturing(graph, self._pool):
                output = function(tree_unflatten(static_leaves, layout), *constants)
        except BaseException:
            self._clean_up_capture()
            raise
        return CapturedGraph(graph, [leaf for leaf in static_leaves if isinstance(leaf, Tensor)], output)

    def _clean_up_capture(self) -> None:
        """Repairs torch after a failed capture: stops allocating from its memory pool, and resets the generator, which still expects a capture."""
        index = self._device.index or 0
        with contextlib.suppress(Exception):
            torch._C._cuda_endAllocateToPool(index, self._pool)
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(torch.Generator(self._device).graphsafe_get_state())


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Captures the device work inside as a graph. Garbage collection is off: if it freed another graph, the capture would fail."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool, torch.cuda.current_stream(), "thread_local"):
            yield
    finally:
        if was_enabled:
            gc.enable()


def capture_graph(function: Callable[[], object]) -> Callable[[], None]:
    """Captures a function without inputs as a graph; returns the function that replays it."""
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        function()
    return graph.replay


def _tensors(inputs: Any) -> list[Tensor]:
    if type(inputs) is tuple and all(part is None for part in inputs):  # a fast path: tree_leaves is slow
        return []
    return [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]


# --- host syncs ---------------------------------------------------------------------------------


@contextlib.contextmanager
def watch_host_syncs() -> Iterator[list[str]]:
    """Yields a list that gets a sentence for each operation inside that makes this thread wait for the device.

    Waits of other threads, such as the one that writes checkpoints, are left out: torch warns of them, too.
    """
    waits: list[str] = []
    mode_before, thread = torch.cuda.get_sync_debug_mode(), threading.get_ident()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        show_warning = warnings.showwarning

        def collect(
            message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
        ) -> None:
            if "called a synchronizing" in str(message):
                if threading.get_ident() == thread:
                    waits.append(_with_users_line(filename, lineno, HOST_SYNC_REASON))
            elif "Synchronization debug mode" not in str(message):
                show_warning(message, category, filename, lineno, file, line)

        warnings.showwarning = collect
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(mode_before)


def explain_failure(error: BaseException) -> str:
    """Returns one sentence about why code could not be captured or compiled, with the user's line where there is one."""
    while error.__context__ is not None and "capture" in str(error):  # ending a failed capture raises a second error
        error = error.__context__
    lines = [line.strip() for line in str(error).splitlines()]
    # torch.compile puts "backend='inductor' raised:" before the error itself.
    text = next((line for line in lines if line and not line.endswith(" raised:")), type(error).__name__)
    if "capturing" in text:
        text = "this cannot be done while a graph is captured"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library_file(f.filename)]
    return _with_users_line(frames[-1].filename, frames[-1].lineno or 0, text) if frames else text


def _with_users_line(filename: str, line: int, text: str) -> str:
    """Puts the file, number and code of a line before a text, if the line is the user's."""
    code = linecache.getline(filename, line).strip()
    return text if _is_library_file(filename) or not code else f"{os.path.basename(filename)}:{line}, `{code}`: {text}"


def _is_library_file(filename: str) -> bool:
    """Returns whether a file belongs to Python, an installed library or drivetrain; drivetrain's tasks count as the user's."""
    tasks = os.path.join(str(PACKAGE), "tasks")
    folders = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")} | {os.path.dirname(torch.__file__)}
    in_library = any(filename.startswith(folder + os.sep) for folder in folders if folder)
    in_drivetrain = filename.startswith(str(PACKAGE) + os.sep)
    return filename.startswith("<") or ((in_library or in_drivetrain) and not filename.startswith(tasks + os.sep))
