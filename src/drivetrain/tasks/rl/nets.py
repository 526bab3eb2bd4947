"""Policies with a value: small nets that say what to do and what it is worth."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Activation = Literal["tanh", "relu"]


class Agent(nn.Module):
    """A policy and its value; `policy` gives the actions' logits. `who` numbers each row's player, where that matters; without
    it, rows are all players of one environment after the other.

    An agent with a `memory` finds so many numbers of its own behind each flattened observation, and `remember` gives the next."""

    memory: int = 0
    together: bool = False
    """Whether logits and value come out of one pass, cheaper than each by itself."""

    def remember(self, seen: Tensor) -> Tensor:
        raise NotImplementedError

    def policy(self, seen: Tensor, who: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def value(self, seen: Tensor, who: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def forward(self, seen: Tensor, who: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.policy(seen, who), self.value(seen, who)

    def unrolled(self, seen: Tensor, anew: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and values of [rows, steps, ...], of an agent with a memory."""
        raise NotImplementedError


class Independent(Agent):
    """A policy of its own for each player. All are asked about every row: small nets, and no rows to sort."""

    def __init__(self, players: Sequence[Agent]) -> None:
        super().__init__()
        self.players = nn.ModuleList(players)

    def policy(self, seen: Tensor, who: Tensor | None = None) -> Tensor:
        return self._own([player.policy(seen) for player in self.players], who)  # type: ignore[operator]

    def value(self, seen: Tensor, who: Tensor | None = None) -> Tensor:
        return self._own([player.value(seen) for player in self.players], who)  # type: ignore[operator]

    def _own(self, said: list[Tensor], who: Tensor | None) -> Tensor:
        if who is None:
            who = torch.arange(said[0].shape[0], device=said[0].device) % len(said)
        total = torch.zeros_like(said[0])
        for number, answer in enumerate(said):
            mine = (who == number).view(-1, *(1,) * (answer.dim() - 1))
            total = torch.where(mine, answer, total)
        return total


class Rivals(Agent):
    """A policy, and beside it an earlier one of its own that it is measured against."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.agent, self.rival = agent, copy.deepcopy(agent).requires_grad_(False)
        self.memory, self.together = agent.memory, agent.together

    def remember(self, seen: Tensor) -> Tensor:
        return self.agent.remember(seen)

    def policy(self, seen: Tensor, who: Tensor | None = None) -> Tensor:
        return self.agent.policy(seen, who)

    def value(self, seen: Tensor, who: Tensor | None = None) -> Tensor:
        return self.agent.value(seen, who)

    def forward(self, seen: Tensor, who: Tensor | None = None) -> tuple[Tensor, Tensor]:
        logits, value = self.agent(seen, who)
        return logits, value

    def unrolled(self, seen: Tensor, anew: Tensor) -> tuple[Tensor, Tensor]:
        return self.agent.unrolled(seen, anew)

    def keep(self, now: Tensor) -> None:
        """The policy becomes its own rival, if `now` is true."""
        for kept, present in zip(self.rival.parameters(), self.agent.parameters(), strict=True):
            kept.copy_(torch.where(now, present, kept))


class MlpAgent(Agent):
    """Two nets that share nothing."""

    def __init__(self, inputs: int, actions: int, width: int, layers: int, activation: Activation) -> None:
        super().__init__()
        self.inputs, self.actions, self.width, self.layers, self.activation = inputs, actions, width, layers, activation
        self.actor = _mlp(inputs, width, layers, actions, activation, 0.01)
        self.critic = _mlp(inputs, width, layers, 1, activation, 1.0)

    def policy(self, seen: Tensor, who: Tensor | None = None) -> Tensor:
        logits: Tensor = self.actor(seen.flatten(1))
        return logits

    def value(self, seen: Tensor, who: Tensor | None = None) -> Tensor:
        value: Tensor = self.critic(seen.flatten(1))
        return value[:, 0]


class LstmAgent(Agent):
    """A layer, an LSTM cell that remembers, and both heads on what it makes of it."""

    def __init__(self, inputs: int, actions: int, width: int) -> None:
        super().__init__()
        self.inputs, self.memory = inputs, 2 * width
        self.sight, self.cell = _begin(nn.Linear(inputs, width), math.sqrt(2)), nn.LSTMCell(width, width)
        self.actor, self.critic = _begin(nn.Linear(width, actions), 0.01), _begin(nn.Linear(width, 1), 1.0)

    def _look(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        hidden, kept = seen[:, self.inputs :].chunk(2, 1)
        hidden, kept = self.cell(self.sight(seen[:, : self.inputs]).tanh(), (hidden, kept))
        return hidden, kept

    def remember(self, seen: Tensor) -> Tensor:
        return torch.cat(self._look(seen), 1)

    def policy(self, seen: Tensor, who: Tensor | None = None) -> Tensor:
        logits: Tensor = self.actor(self._look(seen)[0])
        return logits

    def value(self, seen: Tensor, who: Tensor | None = None) -> Tensor:
        value: Tensor = self.critic(self._look(seen)[0])
        return value[:, 0]

    def unrolled(self, seen: Tensor, anew: Tensor) -> tuple[Tensor, Tensor]:
        """Of [rows, steps, ...] in a row: only the first step's memory is taken as it was, and each new episode begins without."""
        memory, hidden = seen[:, 0, self.inputs :], []
        for step in range(seen.shape[1]):
            memory = memory * (1 - anew[:, step, None])
            state = self._look(torch.cat((seen[:, step, : self.inputs], memory), 1))
            memory = torch.cat(state, 1)
            hidden.append(state[0])
        made = torch.stack(hidden, 1).flatten(0, 1)
        return self.actor(made), self.critic(made)[:, 0]


class ConvAgent(Agent):
    """Guide 003's: three small convolutions and a layer of 64 for both."""

    together = True

    def __init__(self, shape: tuple[int, ...], actions: int) -> None:
        super().__init__()
        channels, height, width = shape
        convs = [m for a, b in ((channels, 8), (8, 16), (16, 16)) for m in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU())]
        self.body = nn.Sequential(*convs, nn.Flatten(), nn.Linear(16 * height * width, 64), nn.ReLU())
        self.actor, self.critic = nn.Linear(64, actions), nn.Linear(64, 1)
        for module in self.body:
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                _begin(module, math.sqrt(2))
        _begin(self.actor, 0.01)
        _begin(self.critic, 1.0)

    def policy(self, seen: Tensor, who: Tensor | None = None) -> Tensor:
        logits: Tensor = self.actor(self.body(seen))
        return logits

    def value(self, seen: Tensor, who: Tensor | None = None) -> Tensor:
        value: Tensor = self.critic(self.body(seen))
        return value[:, 0]

    def forward(self, seen: Tensor, who: Tensor | None = None) -> tuple[Tensor, Tensor]:
        body = self.body(seen)
        return self.actor(body), self.critic(body)[:, 0]


def _mlp(inputs: int, width: int, layers: int, outputs: int, activation: Activation, last: float) -> nn.Sequential:
    kind = nn.Tanh if activation == "tanh" else nn.ReLU
    modules: list[nn.Module] = []
    for layer in range(layers):
        modules += [_begin(nn.Linear(width if layer else inputs, width), math.sqrt(2)), kind()]
    return nn.Sequential(*modules, _begin(nn.Linear(width, outputs), last))


def _begin(layer: nn.Linear | nn.Conv2d, gain: float) -> nn.Module:
    """Orthogonal weights, no bias: what PPO is known to begin well from."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        torch.nn.init.zeros_(layer.bias)
    return layer
