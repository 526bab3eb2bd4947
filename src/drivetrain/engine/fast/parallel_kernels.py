"""Runs kernels that do not depend on each other in parallel on the GPU.

One stream runs one kernel after the other, however little of the GPU each of them fills. While a step is captured,
independent kernels become branches of its graph: the same kernels with the same numbers, in less time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FUSED_OPTIMIZERS = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_")
MIN_PIECE = 4096  # elements: fewer are not worth a processor of their own
MAX_BRANCHES = 8  # more parallel launches than these fill the GPU anyway
TENSORS_PER_LAUNCH = 30  # of each list, that one launch of a fused optimizer takes, of however many lists


def parallel_optimizer_kernels(device: torch.device) -> AbstractContextManager[object]:
    """Inside, a captured step of a fused optimizer is split into branches; any other step is unchanged."""
    is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return ParallelFusedOptimizer(device) if is_capturing else nullcontext()


class ParallelFusedOptimizer(TorchDispatchMode):
    """Splits the tensors of a fused optimizer into pieces, launched in parallel.

    A launch gives 65,536 elements to each of the GPU's processors, and takes 30 to 36 tensors: with a small model, most
    processors have nothing to do. Pieces keep all busy."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.num_processors = torch.cuda.get_device_properties(device).multi_processor_count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in FUSED_OPTIMIZERS:
            return func(*args, **(kwargs or {}))
        lists = split_tensors(args, self.num_processors)
        starts = range(0, len(lists[0]), TENSORS_PER_LAUNCH)
        run_in_parallel([partial(func, *(tensors[start:][:TENSORS_PER_LAUNCH] for tensors in lists), **(kwargs or {})) for start in starts])
        return None


_STREAMS: list[torch.cuda.Stream] = []  # of high priority: no other stream of the process is one of those


def run_in_parallel(launches: Sequence[Callable[[], object]]) -> None:
    """Launches in parallel: all begin after the current stream's work, and that stream goes on after all of them."""
    main = torch.cuda.current_stream()
    while len(_STREAMS) < min(len(launches), MAX_BRANCHES) - 1:
        _STREAMS.append(torch.cuda.Stream(priority=-1))
    streams = (main, *_STREAMS[: len(launches) - 1])
    for stream in streams[1:]:
        stream.wait_stream(main)
    for number, launch in enumerate(launches):
        with torch.cuda.stream(streams[number % len(streams)]):
            launch()
    for stream in streams[1:]:
        main.wait_stream(stream)


def split_tensors(lists: Sequence[Sequence[Tensor]], num_processors: int) -> list[list[Tensor]]:
    """Returns a fused optimizer's lists (parameters, gradients, state, step counts) with long tensors split into views of their parts."""
    piece_size = max(MIN_PIECE, sum(p.numel() for p in lists[0]) // num_processors) // 8 * 8
    split: list[list[Tensor]] = [[] for _ in lists]
    for i, parameter in enumerate(lists[0]):
        row = [tensors[i] if tensors else None for tensors in lists]
        for start in _piece_starts(parameter, row, piece_size):
            for column, tensor in zip(split, row, strict=True):
                if tensor is not None:
                    column.append(tensor if start is None or not tensor.dim() else _flat_piece(tensor, start, piece_size))
    return split


def _piece_starts(parameter: Tensor, row: list[Tensor | None], piece_size: int) -> Sequence[int | None]:
    """Returns where a parameter's pieces begin; one None where it stays whole."""
    elementwise = [t for t in row if t is not None and t.dim()]  # all but the step count
    if parameter.numel() <= piece_size or not all(_is_dense(t) and t.stride() == parameter.stride() for t in elementwise):
        return [None]
    return range(0, parameter.numel(), piece_size)


def _is_dense(tensor: Tensor) -> bool:
    """Returns whether the elements fill their memory without gaps, in whatever order."""
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)


def _flat_piece(tensor: Tensor, start: int, length: int) -> Tensor:
    return tensor.as_strided((min(length, tensor.numel() - start),), (1,), tensor.storage_offset() + start)
