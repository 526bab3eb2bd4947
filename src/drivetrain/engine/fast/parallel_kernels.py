"""Kernels that do not need each other, side by side on the GPU.

One stream runs a kernel after the other, however little of the GPU each of them fills. While a step is captured, those
that can go beside each other become branches of its graph: the same kernels with the same numbers, in less time.
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
PIECE = 4096  # numbers: the least that is worth a processor of its own
BRANCHES = 8  # at once: more launches than these fill the GPU anyway
LAUNCHED = 30  # tensors of each list that one launch of a fused optimizer takes, of however many lists


def parallel_optimizer_kernels(device: torch.device) -> AbstractContextManager[object]:
    """Around an optimizer's step, captured or not."""
    return ParallelFusedOptimizer(device) if device.type == "cuda" and torch.cuda.is_current_stream_capturing() else nullcontext()


class ParallelFusedOptimizer(TorchDispatchMode):
    """A fused optimizer gives 65,536 numbers to each of the GPU's processors, and 30 to 36 tensors to a launch, so that most
    processors have nothing to do with a small model. Pieces of parameters, launched beside each other, keep all busy."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in FUSED_OPTIMIZERS:
            return func(*args, **(kwargs or {}))
        lists = split_tensors(args, self.processors)
        firsts = range(0, len(lists[0]), LAUNCHED)
        run_in_parallel([partial(func, *(some[first:][:LAUNCHED] for some in lists), **(kwargs or {})) for first in firsts])
        return None


_STREAMS: list[torch.cuda.Stream] = []  # of high priority: no other stream of the process is one of those


def run_in_parallel(works: Sequence[Callable[[], object]]) -> None:
    """Do these beside each other: all begin after what the stream at hand holds, and it goes on after all of them."""
    main = torch.cuda.current_stream()
    while len(_STREAMS) < min(len(works), BRANCHES) - 1:
        _STREAMS.append(torch.cuda.Stream(priority=-1))
    streams = (main, *_STREAMS[: len(works) - 1])
    for stream in streams[1:]:
        stream.wait_stream(main)
    for number, work in enumerate(works):
        with torch.cuda.stream(streams[number % len(streams)]):
            work()
    for stream in streams[1:]:
        main.wait_stream(stream)


def split_tensors(lists: Sequence[Sequence[Tensor]], processors: int) -> list[list[Tensor]]:
    """The lists of a fused optimizer (parameters, gradients, state, counts), with long tensors as views of their parts."""
    each = max(PIECE, sum(p.numel() for p in lists[0]) // processors) // 8 * 8
    cut: list[list[Tensor]] = [[] for _ in lists]
    for i, parameter in enumerate(lists[0]):
        row = [some[i] if some else None for some in lists]
        whole = [t for t in row if t is not None and t.dim()]  # all but the count of steps
        if parameter.numel() <= each or not all(_dense(t) and t.stride() == parameter.stride() for t in whole):
            starts: Sequence[int | None] = [None]
        else:
            starts = range(0, parameter.numel(), each)
        for start in starts:
            for column, tensor in zip(cut, row, strict=True):
                if tensor is not None:
                    column.append(tensor if start is None or not tensor.dim() else _part(tensor, start, each))
    return cut


def _dense(tensor: Tensor) -> bool:
    """Whether its numbers lie one beside the other, in whatever order."""
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)


def _part(tensor: Tensor, start: int, length: int) -> Tensor:
    return tensor.as_strided((min(length, tensor.numel() - start),), (1,), tensor.storage_offset() + start)
