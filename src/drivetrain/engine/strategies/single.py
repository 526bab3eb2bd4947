"""One process: gradients stay where autograd puts them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drivetrain.engine.group import Group
from drivetrain.engine.strategies.base import Strategy


class Single(Strategy):
    """The strategy of a process on its own; `Replicated` does the same for many."""

    whole = True

    def __init__(self, model: nn.Module, group: Group, tail: int) -> None:
        super().__init__(model, group)
        # There is nobody to send figures to; but a captured step needs one place for them.
        self.tail = torch.zeros(tail, device=group.device) if group.runs_ahead else None

    def zero(self) -> None:
        if self.tail is not None:
            self.tail.zero_()
        for parameter in self.parameters:
            parameter.grad = None  # backward then need not add to zeros

    def reduce(self) -> None:
        """Make gradients whole: a parameter that took no part has a gradient of zeros, whatever the plan."""
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None:
                parameter.grad = torch.zeros_like(parameter)
            elif gradient.is_sparse:
                parameter.grad = gradient.to_dense()

    def scale(self, factor: Tensor) -> None:
        torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], factor)

    def share_buffers(self) -> None:
        """There is nobody to share with."""
