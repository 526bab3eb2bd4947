"""Every process holds the whole model, and gradients are summed over them.

Gradients live in one flat buffer with a fixed layout (torch's DDP rebuilds its buckets after the first
step, so a resumed run would sum in another order). Its tail carries the step's figures and requests,
which therefore cost no message of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.engine.group import Group

BUCKET_BYTES = 25 * 2**20
ALIGN = 32  # elements: kernels read vectors


@dataclass
class _Bucket:
    buffer: Tensor
    waiting: int = 0
    members: int = 0
    work: Any = None


class Replicated:
    def __init__(self, model: nn.Module, group: Group, tail: int) -> None:
        self.model, self.group = model, group
        # Backward reaches the last layers first: their gradients leave first.
        self.parameters = [p for p in reversed(list(model.parameters())) if p.requires_grad]
        self.flats: list[Tensor] = []
        self._buckets: list[_Bucket] = []
        self._of: dict[Tensor, _Bucket] = {}
        dtypes = {p.dtype for p in self.parameters} - {torch.float32}
        for dtype in sorted(dtypes, key=str):
            self._lay_out(dtype, 0)
        self.tail = self._lay_out(torch.float32, tail)
        self._launched = len(self._buckets)
        if len(self._buckets) > 1:
            for parameter in self.parameters:
                parameter.register_post_accumulate_grad_hook(self._ready)

    def _lay_out(self, dtype: torch.dtype, tail: int) -> Tensor:
        """Make the flat buffer of one dtype, its parameters' gradients views of it; gives the tail."""
        members = [p for p in self.parameters if p.dtype == dtype]
        offsets, end = [], 0
        for p in members:
            offsets.append(end)
            end += -(-p.numel() // ALIGN) * ALIGN
        flat = torch.zeros(end + tail, dtype=dtype, device=self.group.device)
        self.flats.append(flat)
        start, count, waiting = 0, 0, []
        for p, offset in zip(members, offsets, strict=True):
            p.grad = _view(flat, offset, p)
            waiting.append(p)
            count = offset + p.numel() - start
            if count * flat.element_size() >= BUCKET_BYTES:
                stop = offset + -(-p.numel() // ALIGN) * ALIGN
                self._add_bucket(flat[start:stop], waiting)
                start, waiting = stop, []
        if start < len(flat):
            self._add_bucket(flat[start:], waiting)
        return flat[end:]

    def _add_bucket(self, buffer: Tensor, members: list[nn.Parameter]) -> None:
        bucket = _Bucket(buffer, members=len(members))
        self._buckets.append(bucket)
        self._of |= dict.fromkeys(members, bucket)

    def zero(self) -> None:
        for flat in self.flats:
            flat.zero_()

    def before_last_backward(self) -> None:
        """From now on a bucket leaves as soon as its gradients are whole."""
        self._launched = 0
        for bucket in self._buckets:
            bucket.waiting = bucket.members

    def _ready(self, parameter: Tensor) -> None:
        if self._launched >= len(self._buckets):
            return  # an earlier micro-batch
        self._of[parameter].waiting -= 1
        # All ranks send in the same order; the last bucket holds the tail and waits for `reduce`.
        while self._launched < len(self._buckets) - 1 and self._buckets[self._launched].waiting <= 0:
            self._launch()

    def _launch(self) -> None:
        bucket = self._buckets[self._launched]
        bucket.work = dist.all_reduce(bucket.buffer, async_op=True)
        self._launched += 1

    def reduce(self) -> None:
        """Sum gradients and tail over all ranks."""
        while self._launched < len(self._buckets):
            self._launch()
        for bucket in self._buckets:
            bucket.work.wait()
            bucket.work = None

    def norm(self) -> Tensor:
        """The norm of all gradients (the tail is no gradient)."""
        *others, last = self.flats
        parts = [torch.linalg.vector_norm(f, dtype=torch.float32) for f in others]
        parts.append(torch.linalg.vector_norm(last[: len(last) - len(self.tail)]))
        total: Tensor = torch.linalg.vector_norm(torch.stack(parts)) if others else parts[0]
        return total

    def scale(self, factor: Tensor) -> None:
        for flat in self.flats:
            flat.mul_(factor)

    def share_buffers(self) -> None:
        """Give every rank rank 0's buffers (BatchNorm statistics), before evaluating or saving."""
        self.group.broadcast([b for b in self.model.buffers() if b is not None])


def _view(flat: Tensor, offset: int, parameter: nn.Parameter) -> Tensor:
    """A gradient laid out in memory as its parameter is."""
    part = flat[offset : offset + parameter.numel()]
    if parameter.is_contiguous():
        return part.view(parameter.shape)
    dense = sorted(zip(parameter.stride(), parameter.shape, strict=True), reverse=True)
    expected = 1
    for stride, size in reversed(dense):
        if size > 1 and stride != expected:
            return part.view(parameter.shape)  # overlapping or with gaps
        expected *= size
    return part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
