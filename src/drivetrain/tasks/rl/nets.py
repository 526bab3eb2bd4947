"""Agents: small networks that give a policy and a value."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Activation = Literal["tanh", "relu"]


class Agent(nn.Module):
    """A policy and its value function; `policy` returns the logits of the actions.

    `agent_ids` holds the agent's number of each row, for agents with several policies; without it, rows are sorted by environment,
    then by agent. For an agent with a memory, its `memory` numbers follow each flattened observation; `next_memory` returns their
    next values.
    """

    memory: int = 0
    """Numbers in the memory."""
    shares_body: bool = False
    """Whether the policy and the value share layers, so that one forward pass for both is cheaper than two."""

    def next_memory(self, observation: Tensor) -> Tensor:
        raise NotImplementedError

    def policy(self, observation: Tensor, agent_ids: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def value(self, observation: Tensor, agent_ids: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def forward(self, observation: Tensor, agent_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.policy(observation, agent_ids), self.value(observation, agent_ids)

    def unroll(self, observation: Tensor, is_first: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits and values of [rows, steps, ...], for an agent with a memory."""
        raise NotImplementedError


class IndependentAgents(Agent):
    """One policy for each agent. Every policy computes every row: the networks are small, and this saves sorting the rows."""

    def __init__(self, players: Sequence[Agent]) -> None:
        super().__init__()
        self.players = nn.ModuleList(players)

    def policy(self, observation: Tensor, agent_ids: Tensor | None = None) -> Tensor:
        return self._select([player.policy(observation) for player in self.players], agent_ids)  # type: ignore[operator]

    def value(self, observation: Tensor, agent_ids: Tensor | None = None) -> Tensor:
        return self._select([player.value(observation) for player in self.players], agent_ids)  # type: ignore[operator]

    def _select(self, outputs: list[Tensor], agent_ids: Tensor | None) -> Tensor:
        """Returns each row from the output of the row's agent."""
        if agent_ids is None:
            agent_ids = torch.arange(outputs[0].shape[0], device=outputs[0].device) % len(outputs)
        selected = torch.zeros_like(outputs[0])
        for number, output in enumerate(outputs):
            is_own = (agent_ids == number).view(-1, *(1,) * (output.dim() - 1))
            selected = torch.where(is_own, output, selected)
        return selected


class AgentWithRival(Agent):
    """A policy and its rival: an earlier copy of the policy, its opponent in evaluations."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.agent, self.rival = agent, copy.deepcopy(agent).requires_grad_(False)
        self.memory, self.shares_body = agent.memory, agent.shares_body

    def next_memory(self, observation: Tensor) -> Tensor:
        return self.agent.next_memory(observation)

    def policy(self, observation: Tensor, agent_ids: Tensor | None = None) -> Tensor:
        return self.agent.policy(observation, agent_ids)

    def value(self, observation: Tensor, agent_ids: Tensor | None = None) -> Tensor:
        return self.agent.value(observation, agent_ids)

    def forward(self, observation: Tensor, agent_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        logits, value = self.agent(observation, agent_ids)
        return logits, value

    def unroll(self, observation: Tensor, is_first: Tensor) -> tuple[Tensor, Tensor]:
        return self.agent.unroll(observation, is_first)

    def update_rival(self, condition: Tensor) -> None:
        """Copies the policy to the rival if the condition is true."""
        for rival, current in zip(self.rival.parameters(), self.agent.parameters(), strict=True):
            rival.copy_(torch.where(condition, current, rival))


class MlpAgent(Agent):
    """Two separate perceptrons, the actor and the critic."""

    def __init__(self, inputs: int, actions: int, width: int, layers: int, activation: Activation) -> None:
        super().__init__()
        self.inputs, self.actions, self.width, self.layers, self.activation = inputs, actions, width, layers, activation
        self.actor = _perceptron(inputs, width, layers, actions, activation, 0.01)
        self.critic = _perceptron(inputs, width, layers, 1, activation, 1.0)

    def policy(self, observation: Tensor, agent_ids: Tensor | None = None) -> Tensor:
        logits: Tensor = self.actor(observation.flatten(1))
        return logits

    def value(self, observation: Tensor, agent_ids: Tensor | None = None) -> Tensor:
        value: Tensor = self.critic(observation.flatten(1))
        return value[:, 0]


class LstmAgent(Agent):
    """A linear layer, an LSTM cell, and a head each for the policy and the value."""

    def __init__(self, inputs: int, actions: int, width: int) -> None:
        super().__init__()
        self.inputs, self.memory = inputs, 2 * width
        self.sight, self.cell = _initialized(nn.Linear(inputs, width), math.sqrt(2)), nn.LSTMCell(width, width)
        self.actor, self.critic = _initialized(nn.Linear(width, actions), 0.01), _initialized(nn.Linear(width, 1), 1.0)

    def _run_cell(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the hidden state and the cell state after an observation."""
        hidden, cell_state = observation[:, self.inputs :].chunk(2, 1)
        hidden, cell_state = self.cell(self.sight(observation[:, : self.inputs]).tanh(), (hidden, cell_state))
        return hidden, cell_state

    def next_memory(self, observation: Tensor) -> Tensor:
        return torch.cat(self._run_cell(observation), 1)

    def policy(self, observation: Tensor, agent_ids: Tensor | None = None) -> Tensor:
        logits: Tensor = self.actor(self._run_cell(observation)[0])
        return logits

    def value(self, observation: Tensor, agent_ids: Tensor | None = None) -> Tensor:
        value: Tensor = self.critic(self._run_cell(observation)[0])
        return value[:, 0]

    def unroll(self, observation: Tensor, is_first: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the cell over the steps. Only the first step uses the stored memory; each new episode begins with zeros."""
        memory, hidden = observation[:, 0, self.inputs :], []
        for step in range(observation.shape[1]):
            memory = memory * (1 - is_first[:, step, None])
            state = self._run_cell(torch.cat((observation[:, step, : self.inputs], memory), 1))
            memory = torch.cat(state, 1)
            hidden.append(state[0])
        all_hidden = torch.stack(hidden, 1).flatten(0, 1)
        return self.actor(all_hidden), self.critic(all_hidden)[:, 0]


class ConvAgent(Agent):
    """The network of guide 003: three small convolutions and a layer of 64, shared by the policy and the value."""

    shares_body = True

    def __init__(self, shape: tuple[int, ...], actions: int) -> None:
        super().__init__()
        channels, height, width = shape
        convs = [m for a, b in ((channels, 8), (8, 16), (16, 16)) for m in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU())]
        self.body = nn.Sequential(*convs, nn.Flatten(), nn.Linear(16 * height * width, 64), nn.ReLU())
        self.actor, self.critic = nn.Linear(64, actions), nn.Linear(64, 1)
        for module in self.body:
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                _initialized(module, math.sqrt(2))
        _initialized(self.actor, 0.01)
        _initialized(self.critic, 1.0)

    def policy(self, observation: Tensor, agent_ids: Tensor | None = None) -> Tensor:
        logits: Tensor = self.actor(self.body(observation))
        return logits

    def value(self, observation: Tensor, agent_ids: Tensor | None = None) -> Tensor:
        value: Tensor = self.critic(self.body(observation))
        return value[:, 0]

    def forward(self, observation: Tensor, agent_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        body = self.body(observation)
        return self.actor(body), self.critic(body)[:, 0]


def _perceptron(inputs: int, width: int, layers: int, outputs: int, activation: Activation, last_gain: float) -> nn.Sequential:
    kind = nn.Tanh if activation == "tanh" else nn.ReLU
    modules: list[nn.Module] = []
    for layer in range(layers):
        modules += [_initialized(nn.Linear(width if layer else inputs, width), math.sqrt(2)), kind()]
    return nn.Sequential(*modules, _initialized(nn.Linear(width, outputs), last_gain))


def _initialized(layer: nn.Linear | nn.Conv2d, gain: float) -> nn.Module:
    """Gives a layer orthogonal weights and zero biases, as is usual for PPO."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        torch.nn.init.zeros_(layer.bias)
    return layer
