"""How much memory a process took at most, and how one tells that there was not enough."""

from __future__ import annotations

import resource
import sys
from types import TracebackType

import torch


def peak_memory(device: torch.device) -> int:
    """Bytes: of the device where it has its own memory, else of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


SHORT = ("DefaultCPUAllocator: ", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory")


class _AllocationErrorsAsOom:
    """Around a pass of the model: a shortage that torch's allocator was not asked for (the host's memory, what cuBLAS or
    cuDNN take for themselves) is raised as the same error as its own."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            said = next((line for line in str(error).splitlines() if any(words in line for words in SHORT)), None)
            if said is not None:
                raise torch.OutOfMemoryError(said) from error


allocation_errors_as_oom = _AllocationErrorsAsOom()
