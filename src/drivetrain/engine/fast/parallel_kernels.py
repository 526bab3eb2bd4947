"""Runs kernels that do not depend on each other in parallel on the GPU.

A stream runs one kernel after the other, even if each kernel uses only a small part of the GPU. While a step is captured,
independent kernels become parallel branches of its CUDA graph: the same kernels and results, in less time.
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
MIN_PIECE_SIZE = 4096  # elements; a smaller piece does not pay for its launch
MAX_BRANCHES = 8  # parallel streams; more gain nothing, because these fill the GPU
TENSORS_PER_LAUNCH = 30  # from each list; a fused optimizer takes 30 to 36 in one launch, depending on the number of lists


def parallel_optimizer_kernels(device: torch.device) -> AbstractContextManager[object]:
    """A context that splits the captured step of a fused optimizer into parallel branches; all other steps are unchanged."""
    is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return ParallelFusedOptimizer(device) if is_capturing else nullcontext()


class ParallelFusedOptimizer(TorchDispatchMode):
    """Splits the tensors of a fused optimizer into pieces, launched in parallel.

    A launch takes 30 to 36 tensors and gives 65,536 elements to each multiprocessor of the GPU. With a small model, most
    multiprocessors would be idle; smaller pieces keep all of them busy."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in FUSED_OPTIMIZERS:
            return func(*args, **(kwargs or {}))
        lists = split_tensors(args, self.num_multiprocessors)
        launches = []
        for start in range(0, len(lists[0]), TENSORS_PER_LAUNCH):
            chunks = [tensors[start : start + TENSORS_PER_LAUNCH] for tensors in lists]
            launches.append(partial(func, *chunks, **(kwargs or {})))
        run_in_parallel(launches)
        return None


_STREAMS: list[torch.cuda.Stream] = []  # of high priority, so that torch gives none of them to other code of this process


def run_in_parallel(launches: Sequence[Callable[[], object]]) -> None:
    """Runs launches in parallel. They begin after the work of the current stream, which continues when all of them are done."""
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


def split_tensors(lists: Sequence[Sequence[Tensor]], num_multiprocessors: int) -> list[list[Tensor]]:
    """Splits long tensors in a fused optimizer's lists (parameters, gradients, state, step counts) into views of their parts."""
    piece_size = max(MIN_PIECE_SIZE, sum(p.numel() for p in lists[0]) // num_multiprocessors) // 8 * 8
    split_lists: list[list[Tensor]] = [[] for _ in lists]
    for i, parameter in enumerate(lists[0]):
        entries = [tensors[i] if tensors else None for tensors in lists]  # all tensors of this parameter
        for start in _piece_starts(parameter, entries, piece_size):
            for split_list, tensor in zip(split_lists, entries, strict=True):
                if tensor is None:
                    continue
                if start is None or not tensor.dim():
                    split_list.append(tensor)
                else:
                    split_list.append(_flat_piece(tensor, start, piece_size))
    return split_lists


def _piece_starts(parameter: Tensor, entries: list[Tensor | None], piece_size: int) -> Sequence[int | None]:
    """Returns the offsets where a parameter's pieces begin; [None] if it is not split."""
    elementwise = [t for t in entries if t is not None and t.dim()]  # all but the step count
    if parameter.numel() <= piece_size or not all(_is_dense(t) and t.stride() == parameter.stride() for t in elementwise):
        return [None]
    return range(0, parameter.numel(), piece_size)


def _is_dense(tensor: Tensor) -> bool:
    """Returns whether the elements fill their memory without gaps, in any order."""
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)


def _flat_piece(tensor: Tensor, start: int, length: int) -> Tensor:
    return tensor.as_strided((min(length, tensor.numel() - start),), (1,), tensor.storage_offset() + start)
