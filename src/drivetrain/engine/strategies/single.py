"""One process with one micro-batch: gradients stay in the tensors that autograd creates."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drivetrain.engine.group import Group
from drivetrain.engine.strategies.base import Strategy


class Single(Strategy):
    """One process that takes the global batch as one micro-batch; `Replicated` takes several micro-batches or ranks."""

    is_one_piece = True

    def __init__(self, model: nn.Module, group: Group, piggyback_size: int) -> None:
        super().__init__(model, group)
        # There is no all-reduce, but a captured step must write metrics to a fixed address.
        self.piggyback = torch.zeros(piggyback_size, device=group.device) if group.device_counters else None

    def zero_gradients(self) -> None:
        if self.piggyback is not None:
            self.piggyback.zero_()
        for parameter in self.parameters:
            parameter.grad = None  # backward then writes gradients instead of adding to zeros

    def reduce_gradients(self) -> None:
        """Gives each parameter a dense gradient, of zeros where backward made none, as every strategy does."""
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None:
                parameter.grad = torch.zeros_like(parameter)
            elif gradient.is_sparse:
                parameter.grad = gradient.to_dense()

    def scale_gradients(self, factor: Tensor) -> None:
        torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], factor)

    def broadcast_buffers(self) -> None:
        """Does nothing: there is no other rank."""
