"""Worlds as pure functions of tensors: a row is one environment, and chance comes from outside."""

from __future__ import annotations

import torch
from torch import Tensor

State = dict[str, Tensor]


def merged(over: Tensor, new: State, old: State) -> State:
    """New episodes where one is over."""
    return {k: torch.where(over.view(-1, *(1,) * (old[k].dim() - 1)), new[k], old[k]) for k in old}


class Env:
    """The rules of a world. Derive from it and write `reset`, `step` and `observe`.

    Every tensor's first dimension counts environments. Random numbers (uniform, 0 to 1) are handed in as rows of
    `chances` numbers, so that the same code runs on any device, in a graph, and in a browser.
    """

    actions: int = 2
    """Choices an agent has."""
    agents: int = 1
    """Players of one environment. With several, actions, rewards and ends are [rows, agents]."""
    shape: tuple[int, ...] = ()
    """Of one agent's observation."""
    bits: bool = False
    """Whether an observation is all zeros and ones: a collection then keeps it in bytes."""
    chances: int = 0
    """Random numbers that a reset or a step may use."""
    limit: int | None = None
    """Steps after which an episode is cut off; that is not an end, and what would have come still counts."""

    def reset(self, rand: Tensor) -> State:
        """The state of as many new episodes as `rand` has rows."""
        raise NotImplementedError

    def step(self, state: State, action: Tensor, rand: Tensor) -> tuple[State, Tensor, Tensor]:
        """(state, reward, ended) after everybody's action; an agent that has ended takes no further part."""
        raise NotImplementedError

    def observe(self, state: State) -> Tensor:
        """What agents see: [rows, *shape], or [rows, agents, *shape]."""
        raise NotImplementedError

    def figures(self, state: State) -> dict[str, Tensor]:
        """Figures of an episode at its end, by agent, beside its return and length."""
        return {}
