"""What the engine asks of a strategy, and how it is done where every process holds the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.engine.fast.branches import side_by_side
from drivetrain.engine.group import Group
from drivetrain.engine.maths.optim import has_short_way, short_step, takes_factor
from drivetrain.engine.state import tensors as state


class Strategy:
    """How a model is spread over processes; the step and the loop know nothing else of it."""

    whole = False
    """Whether nothing lies between a step's backward and its update."""
    obstacle = ""
    """Why steps can be neither captured nor compiled, if so."""
    tail: Tensor | None
    """Where a step's figures and requests travel from rank to rank, if they travel."""
    optimizer: torch.optim.Optimizer
    files: Any = None
    """The group over which each rank writes its own parts of a checkpoint; None where rank 0 writes all of it."""
    _takes_factor = _short = False

    def __init__(self, model: nn.Module, group: Group) -> None:
        self.model, self.group = model, group
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer that was made for the model as it is spread now."""
        self.optimizer = optimizer
        self._takes_factor, self._short = takes_factor(optimizer), has_short_way(optimizer)

    # --- the model's forward and backward passes ---

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that uses the model."""
        return function(*args)

    def collect(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that may use the model on one process more often than on another."""
        return function(*args)

    def backward(self, objective: Tensor) -> None:
        """Add this micro-batch's gradients."""
        objective.backward()

    # --- gradients ---

    def zero(self) -> None:
        raise NotImplementedError

    def reduce(self) -> None:
        """Make gradients whole, and sum them and the tail over all ranks."""
        raise NotImplementedError

    def norm(self) -> Tensor:
        """The norm of all gradients."""
        return norm_of(self.parameters)

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients."""
        raise NotImplementedError

    def update(self, factor: Tensor | None, clip: float, with_norm: bool, guarded: bool, enough: Tensor | None = None) -> Tensor | None:
        """Multiply gradients by a factor, clip them, take the optimizer's step; gives their norm where it was needed.
        Guarded, a norm that is no number means no step; nor is there one where it is `enough`."""
        norm: Tensor | None = None
        overflow = enough
        if with_norm or clip or guarded:
            norm = self.norm() if factor is None else self.norm() * factor
            if clip:
                clipping = (clip / (norm + 1e-6)).clamp_(max=1.0)
                factor = clipping if factor is None else factor * clipping
            if guarded:
                bad = (~torch.isfinite(norm)).float()
                overflow = bad if enough is None else torch.maximum(bad, enough)
        optimizer: Any = self.optimizer
        if self._takes_factor:
            if factor is not None:
                optimizer.grad_scale = 1.0 / factor
            if overflow is not None:
                optimizer.found_inf = overflow
        else:
            if overflow is not None and overflow.item():
                return norm  # an optimizer that cannot skip by itself: this costs a host sync
            if factor is not None:
                self.scale(factor)
        if self._short:
            short_step(optimizer)
        else:
            with side_by_side(self.group.device):
                optimizer.step()
        return norm

    # --- state ---

    def begin(self) -> None:
        """Before the first step of a new run: every rank has rank 0's weights."""
        self.group.broadcast([*self.model.parameters(), *self.shared_buffers()])

    def share_buffers(self) -> None:
        """Give every rank rank 0's buffers (BatchNorm statistics), before evaluating or saving."""
        self.group.broadcast(self.shared_buffers())

    def shared_buffers(self) -> list[Tensor]:
        """Buffers of plain numbers: others (sparse ones) are not saved either, and every rank has made its own."""
        return [b for b in self.model.buffers() if not state.odd_form(b)]

    def finite(self) -> bool:
        """Whether every trained parameter is a number; one wait for the device."""
        return state.all_finite(self.parameters)

    def model_tensors(self, parts: bool = False) -> tuple[dict[str, Any], dict[str, str]]:
        """The model's tensors by name, on rank 0 whole, or each rank's parts of them; a collective call."""
        return state.model_tensors(self.model)

    def optimizer_tensors(self, parts: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
        """The optimizer's state by parameter name, on rank 0 whole, or each rank's parts of it; a collective call."""
        return state.optimizer_tensors(dict(self.model.named_parameters()), self.optimizer)

    def load_model(self, stored: state.Stored, aliases: dict[str, str], where: str) -> None:
        state.load_model(self.model, stored, aliases, where)

    def load_optimizer(self, stored: state.Stored, plain: dict[str, Any]) -> None:
        state.load_optimizer(dict(self.model.named_parameters()), self.optimizer, stored, plain)


def norm_of(parameters: list[nn.Parameter]) -> Tensor:
    """The norm over all gradients, tensor by tensor, so that it is the same in every strategy."""
    norms = torch._foreach_norm([p.grad for p in parameters if p.grad is not None])
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.float() for n in norms]))
    return total
