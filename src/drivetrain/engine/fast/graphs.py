"""CUDA graphs: pieces of device work, captured once for each form of their inputs and replayed from then on.

A replay is the same kernels in the same order with the same numbers, launched all at once. Code for which the
host waits cannot be captured: it is found out while it runs plainly, because a capture that fails leaves the process
in a state that is not to be relied on.
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
from typing import Any, TextIO

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from drivetrain.engine.fast.python_state import PLAIN_TYPES
from drivetrain.plan import HOST_SYNC_REASON
from drivetrain.settings import PACKAGE

WARM_UP_CALLS = 2  # times a form is seen before it is worth a graph
MOST = 24  # forms kept as graphs
COUNTED = 1000  # forms looked at: beyond them, batches have no common form


def form_of(given: Any) -> Hashable:
    """The layout of nested tensors, with all values that are no tensors: None for None."""
    if given is None:
        return None
    leaves, layout = tree_flatten(given)
    marks = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else _constant(leaf) for leaf in leaves)
    return str(layout), marks


def _constant(leaf: Any) -> Hashable:
    return leaf if isinstance(leaf, PLAIN_TYPES) else object()  # like nothing else


def uncapturable_kind(given: Any) -> str:
    """The kind of something in a batch that a graph cannot be handed anew, or nothing."""
    for leaf in tree_flatten(given)[0]:
        if isinstance(leaf, Tensor):
            if leaf.layout is not torch.strided or leaf.is_nested:
                return "tensor that is sparse or nested"
        elif not isinstance(leaf, PLAIN_TYPES):
            return type(leaf).__name__
    return ""


@dataclass(frozen=True, slots=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    places: list[Tensor]
    """Where the work reads its inputs."""
    output: Any


class Graphs:
    """Does work by replaying it, where it was seen before in the same form; else by calling it.

    `tight` memory: a form is captured at its first sight, in the graphs' own memory, rather than run beside it.
    """

    def __init__(self, device: torch.device, notice: Callable[[str], None], tight: bool = False) -> None:
        self._device, self._notice, self._tight = device, notice, tight
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[Hashable, Captured] = {}
        self._seen: Counter[Hashable] = Counter()
        self._said = False
        self.num_eager = 0
        """Calls that were no replays."""
        self._settled: set[Hashable] = set()
        self.disabled_reason = ""
        """Why nothing is captured any more."""

    def __call__(self, key: tuple[Hashable, ...], work: Callable[..., Any], inputs: Any, *constants: Any) -> Any:
        """`work(inputs, *constants)`; its output stands until the next call."""
        found = self._captured.get(key)
        if found is None:
            self.num_eager += 1
            turn = self._turn(key)
            if turn < 0:
                return work(inputs, *constants)
            if turn > 0:
                return self._watch(key, work, inputs, *constants)
            try:
                found = self._captured[key] = self.capture(work, inputs, *constants)
            except Exception as error:
                self.disable(f"{key[0]}: {explain_failure(error)}")
                return work(inputs, *constants)
        for place, value in zip(found.places, _tensors(inputs), strict=True):
            place.copy_(value)
        found.graph.replay()
        return found.output

    def has_graph_of(self, kind: str) -> bool:
        return any(isinstance(key, tuple) and key[0] == kind for key in self._captured)

    def note_step(self, kind: Hashable, plain: int) -> None:
        """A step of this kind was taken, and `plain` calls had been made before: whether it was all replays."""
        (self._settled.add if self.num_eager == plain else self._settled.discard)(kind)

    def only_replayed(self, kind: Hashable) -> bool:
        """Whether the last step of this kind was all replays: such a one needs no memory."""
        return kind in self._settled

    def clear(self) -> None:
        """What was captured no longer holds: begin anew."""
        self._settled.clear()
        self._captured.clear()
        self._seen.clear()

    def _turn(self, key: tuple[Hashable, ...]) -> int:
        """What to do with a form that is not captured: 0 capture it, 1 run it under watch, -1 just run it."""
        if self.disabled_reason or len(self._seen) >= COUNTED or len(self._captured) >= MOST:
            if not self.disabled_reason and not self._said:
                self._said = True
                self._notice("batches come in many forms (shapes, or values that are no tensors): those beyond the first few run eager")
            return -1
        self._seen[key] += 1
        warm = 0 if self._tight and self.has_graph_of(str(key[0])) else WARM_UP_CALLS
        seen = self._seen[key]
        return 0 if seen == warm + 1 else 1 if seen == warm else -1

    def _watch(self, key: Hashable, work: Callable[..., Any], inputs: Any, *constants: Any) -> Any:
        """Run it once more plainly; if the host waits in it, it is never captured."""
        with watch_host_syncs() as waits:
            output = work(inputs, *constants)
        if waits:
            self._seen[key] += WARM_UP_CALLS  # past its turn
            self._notice(f"a part of the work is not captured: {waits[0]}")
        return output

    def capture(self, work: Callable[..., Any], inputs: Any, *constants: Any) -> Captured:
        leaves, layout = tree_flatten(inputs)
        fixed = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        graph = torch.cuda.CUDAGraph()
        try:
            with capturing(graph, self._pool):
                output = work(tree_unflatten(fixed, layout), *constants)
        except BaseException:
            self._clean_up()
            raise
        return Captured(graph, [f for f in fixed if isinstance(f, Tensor)], output)

    def disable(self, why: str) -> None:
        self.disabled_reason = why
        self._settled.clear()
        self._captured.clear()  # they were captured with the generator's old state
        self._notice(f"nothing is captured from here on: {why}")

    def _clean_up(self) -> None:
        """After a capture that failed: end the use of its memory, and give the generator, which believes that the
        capture goes on, a fresh state."""
        index = self._device.index or 0
        with contextlib.suppress(Exception):
            torch._C._cuda_endAllocateToPool(index, self._pool)
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(torch.Generator(self._device).graphsafe_get_state())


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """What is done inside becomes the graph. Meanwhile no garbage is collected: with a dead graph among it, the capture would fail."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool, torch.cuda.current_stream(), "thread_local"):
            yield
    finally:
        if collects:
            gc.enable()


def capture_graph(work: Callable[[], object]) -> Callable[[], None]:
    """Work that needs no inputs, as a graph: what to call to replay it."""
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        work()
    return graph.replay


def _tensors(inputs: Any) -> list[Tensor]:
    if type(inputs) is tuple and all(part is None for part in inputs):  # the common case, by the shortest way
        return []
    return [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]


# --- waiting ------------------------------------------------------------------------------------


@contextlib.contextmanager
def watch_host_syncs() -> Iterator[list[str]]:
    """Collects a sentence for each operation inside for which this thread waits for the device.

    Others, such as the one that writes checkpoints, may wait: torch warns of them, too.
    """
    found: list[str] = []
    before, thread = torch.cuda.get_sync_debug_mode(), threading.get_ident()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        show = warnings.showwarning

        def look(
            message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
        ) -> None:
            if "called a synchronizing" not in str(message):
                if "Synchronization debug mode" not in str(message):
                    show(message, category, filename, lineno, file, line)
            elif threading.get_ident() == thread:
                found.append(_sentence(filename, lineno, HOST_SYNC_REASON))

        warnings.showwarning = look
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)


def explain_failure(error: BaseException) -> str:
    """One sentence about why code could not be captured or compiled, with the user's line where there is one."""
    while error.__context__ is not None and "capture" in str(error):  # the end of a failed capture hides its cause
        error = error.__context__
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if "capturing" in text:
        text = "this cannot be done while a graph is captured"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library(f.filename)]
    return _sentence(frames[-1].filename, frames[-1].lineno or 0, text) if frames else text


def _sentence(filename: str, line: int, text: str) -> str:
    code = linecache.getline(filename, line).strip()
    return text if _is_library(filename) or not code else f"{os.path.basename(filename)}:{line}, `{code}`: {text}"


def _is_library(filename: str) -> bool:
    ours = os.path.join(str(PACKAGE), "tasks")
    folders = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")} | {os.path.dirname(torch.__file__)}
    inside = any(filename.startswith(folder + os.sep) for folder in folders if folder)
    return filename.startswith("<") or ((inside or filename.startswith(str(PACKAGE) + os.sep)) and not filename.startswith(ours + os.sep))
