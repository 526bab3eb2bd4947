"""Data parallelism: every process holds the full model, and gradients are summed over micro-batches and ranks.

Gradients are views of flat buffers with a fixed layout, so that a resumed run sums in the same order (torch's DDP
rebuilds its buckets after the first step). The last buffer ends with the piggyback: the step's metrics and requests,
which need no separate all-reduce that way.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.engine.group import Group
from drivetrain.engine.strategies.base import Strategy

ALIGNMENT = 32  # elements; kernels read aligned memory faster


class Replicated(Strategy):
    """Data parallelism over any number of ranks, one included, and micro-batches."""

    piggyback: Tensor

    def __init__(self, model: nn.Module, group: Group, piggyback_size: int) -> None:
        super().__init__(model, group)
        self._flat_gradients: list[Tensor] = []
        for dtype in sorted({p.dtype for p in self.parameters} - {torch.float32}, key=str):
            self._make_flat_gradient(dtype, 0)
        self.piggyback = self._make_flat_gradient(torch.float32, piggyback_size)

    def _make_flat_gradient(self, dtype: torch.dtype, num_extra: int) -> Tensor:
        """Makes a flat buffer, whose views become the gradients of all parameters of one type; returns the extra elements at its end."""
        parameters = [p for p in self.parameters if p.dtype == dtype]
        aligned_sizes = [math.ceil(p.numel() / ALIGNMENT) * ALIGNMENT for p in parameters]
        flat = torch.zeros(sum(aligned_sizes) + num_extra, dtype=dtype, device=self.group.device)
        self._flat_gradients.append(flat)
        offset = 0
        for parameter, size in zip(parameters, aligned_sizes, strict=True):
            parameter.grad = _view_like(parameter, flat, offset)
            offset += size
        return flat[offset:]

    def zero_gradients(self) -> None:
        for flat in self._flat_gradients:
            flat.zero_()

    def reduce_gradients(self) -> None:
        if self.group.size == 1:
            return
        for work in [dist.all_reduce(flat, async_op=True) for flat in self._flat_gradients]:
            work.wait()

    def scale_gradients(self, factor: Tensor) -> None:
        *others, last = self._flat_gradients
        for flat in (*others, last[: len(last) - len(self.piggyback)]):
            flat.mul_(factor)


def _view_like(parameter: nn.Parameter, flat: Tensor, offset: int) -> Tensor:
    """Returns a view of a flat buffer with the parameter's shape, and with its strides if its elements have no gaps between them."""
    view = flat[offset : offset + parameter.numel()]
    if parameter.is_contiguous():
        return view.view(parameter.shape)
    dense_stride = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1 and stride != dense_stride:
            return view.view(parameter.shape)  # overlapping or with gaps
        dense_stride *= size
    return view.as_strided(parameter.shape, parameter.stride(), view.storage_offset())
