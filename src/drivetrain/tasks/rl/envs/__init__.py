"""Environments as pure functions of tensors: each row is one environment, and random numbers are passed in."""

from __future__ import annotations

import torch
from torch import Tensor

State = dict[str, Tensor]


def select_rows(condition: Tensor, new: State, old: State) -> State:
    """Returns a state with the rows of `new` where the condition holds, and the rows of `old` elsewhere."""
    return {k: torch.where(condition.view(-1, *(1,) * (old[k].dim() - 1)), new[k], old[k]) for k in old}


class Env:
    """The rules of an environment: derive a class and write `reset`, `step` and `observe`.

    The first dimension of every tensor counts environments. Random numbers (uniform in [0, 1)) are passed in as rows of
    `chances` numbers, so that the same code runs on any device, in a CUDA graph, and in a browser.
    """

    actions: int = 2
    """Number of actions."""
    agents: int = 1
    """Agents in one environment. With several, actions, rewards and terminations are [rows, agents]."""
    shape: tuple[int, ...] = ()
    """Shape of one agent's observation."""
    bits: bool = False
    """Whether observations hold only zeros and ones; a collection then stores them as bytes."""
    chances: int = 0
    """Number of random numbers that a reset or a step may use."""
    limit: int | None = None
    """Steps after which an episode is truncated. The last step's advantage still includes the value of the next observation."""

    def reset(self, rand: Tensor) -> State:
        """Returns the state of new episodes, one for each row of `rand`."""
        raise NotImplementedError

    def step(self, state: State, action: Tensor, rand: Tensor) -> tuple[State, Tensor, Tensor]:
        """Returns (state, reward, terminated) after the action of every agent; a terminated agent no longer acts."""
        raise NotImplementedError

    def observe(self, state: State) -> Tensor:
        """Returns the agents' observations: [rows, *shape], or [rows, agents, *shape]."""
        raise NotImplementedError

    def figures(self, state: State) -> dict[str, Tensor]:
        """Returns further metrics of finished episodes by agent, besides return and length."""
        return {}
