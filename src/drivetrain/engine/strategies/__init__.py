"""How a model is spread over processes."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from drivetrain.engine.group import Group
from drivetrain.engine.strategies.replicate import Replicated
from drivetrain.engine.strategies.single import Single


class Strategy(Protocol):
    """What a step asks of the gradients."""

    whole: bool
    """Whether nothing lies between a step's backward and its update."""

    @property
    def tail(self) -> Tensor | None:
        """Where a step's figures and requests travel with the gradients, if they travel."""
        ...

    def zero(self) -> None: ...
    def reduce(self) -> None: ...
    def norm(self) -> Tensor: ...
    def scale(self, factor: Tensor) -> None: ...
    def share_buffers(self) -> None: ...


def spread(model: nn.Module, group: Group, tail: int, at_once: bool) -> Strategy:
    return Single(model, group, tail) if at_once else Replicated(model, group, tail)
