"""One process: gradients stay where autograd puts them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drivetrain.engine.group import Group


def norm_of(parameters: list[nn.Parameter]) -> Tensor:
    """The norm over all gradients, tensor by tensor, so that it is the same in every strategy."""
    norms = torch._foreach_norm([p.grad for p in parameters if p.grad is not None])
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.float() for n in norms]))
    return total


class Single:
    """The strategy of a process on its own; `Replicated` does the same for many."""

    def __init__(self, model: nn.Module, group: Group, tail: int) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        # There is nobody to send figures to; but a captured step needs one place for them.
        self.tail = torch.zeros(tail, device=group.device) if group.runs_ahead else None

    whole = True

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

    def norm(self) -> Tensor:
        """The norm of all gradients."""
        return norm_of(self.parameters)

    def scale(self, factor: Tensor) -> None:
        torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], factor)

    def share_buffers(self) -> None:
        """There is nobody to share with."""
