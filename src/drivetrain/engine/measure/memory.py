"""Reads the peak memory of a process, and turns all failed allocations into one kind of error."""

from __future__ import annotations

import resource
import sys
from types import TracebackType

import torch


def peak_memory(device: torch.device) -> int:
    """Returns the peak bytes that were allocated on a GPU; for other devices, the peak bytes of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


OUT_OF_MEMORY_MESSAGES = ("DefaultCPUAllocator: ", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory")


class _AllocationErrorsAsOom:
    """A context in which every failed allocation raises torch.OutOfMemoryError, also one of host memory, cuBLAS or cuDNN."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            message = next((line for line in str(error).splitlines() if any(text in line for text in OUT_OF_MEMORY_MESSAGES)), None)
            if message is not None:
                raise torch.OutOfMemoryError(message) from error


allocation_errors_as_oom = _AllocationErrorsAsOom()
