"""Every process holds the whole model, and gradients are summed over micro-batches and processes.

Gradients live in flat buffers with a fixed layout, so that a resumed run sums in the same order (torch's
DDP rebuilds its buckets after the first step). The tail of the last one carries the step's figures and
requests, which therefore cost no message of their own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.engine.group import Group
from drivetrain.engine.strategies.base import Strategy

ALIGN = 32  # elements: kernels read vectors


class Replicated(Strategy):
    tail: Tensor

    def __init__(self, model: nn.Module, group: Group, tail: int) -> None:
        super().__init__(model, group)
        self.flats: list[Tensor] = []
        for dtype in sorted({p.dtype for p in self.parameters} - {torch.float32}, key=str):
            self._lay_out(dtype, 0)
        self.tail = self._lay_out(torch.float32, tail)

    def _lay_out(self, dtype: torch.dtype, tail: int) -> Tensor:
        """Make the flat buffer of one dtype, its parameters' gradients views of it; gives the tail."""
        members = [p for p in self.parameters if p.dtype == dtype]
        sizes = [-(-p.numel() // ALIGN) * ALIGN for p in members]
        flat = torch.zeros(sum(sizes) + tail, dtype=dtype, device=self.group.device)
        self.flats.append(flat)
        offset = 0
        for parameter, size in zip(members, sizes, strict=True):
            parameter.grad = _view(flat, offset, parameter)
            offset += size
        return flat[offset:]

    def zero(self) -> None:
        for flat in self.flats:
            flat.zero_()

    def reduce(self) -> None:
        """Sum gradients and tail over all ranks."""
        if self.group.size == 1:
            return
        for work in [dist.all_reduce(flat, async_op=True) for flat in self.flats]:
            work.wait()

    def scale(self, factor: Tensor) -> None:
        *others, last = self.flats
        for flat in (*others, last[: len(last) - len(self.tail)]):  # the tail is no gradient
            flat.mul_(factor)


def _view(flat: Tensor, offset: int, parameter: nn.Parameter) -> Tensor:
    """A gradient laid out in memory as its parameter is."""
    part = flat[offset : offset + parameter.numel()]
    if parameter.is_contiguous():
        return part.view(parameter.shape)
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1 and stride != expected:
            return part.view(parameter.shape)  # overlapping or with gaps
        expected *= size
    return part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
