"""The samples of a collection: their columns, the actions drawn by a policy, and generalised advantage estimation."""

from __future__ import annotations

import torch
from torch import Tensor

COLLECTION_METRICS = ("return", "length", "explained_variance")
"""Metrics of the last collection in which an episode finished: the same for every sample of a collection."""
COLUMNS = ("action", "log_prob", "advantage", "target", "value", "is_alive", "agent", "is_first", *COLLECTION_METRICS)
"""Columns of a sample besides its observation. The kernels in `fused` read the first six by position."""


def columns_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns a batch's columns by name. They are stored as one tensor, so that one gather reads all columns of a sample."""
    columns = dict(zip(COLUMNS, batch["columns"].flatten(0, -2).unbind(-1), strict=True))
    return columns | {"action": columns["action"].long(), "agent": columns["agent"].long()}


def sample_action(logits: Tensor, uniform: Tensor) -> Tensor:
    """Returns an action with the policy's probabilities, from a uniform random number."""
    action, cumulative = torch.zeros_like(uniform, dtype=torch.int64), torch.zeros_like(uniform)
    for probability in logits.softmax(-1).unbind(-1)[:-1]:  # a GPU's cumsum may differ in the last bit from run to run
        cumulative = cumulative + probability
        action = action + (cumulative <= uniform).long()
    return action


def at_least_fp32(x: Tensor) -> Tensor:
    """Returns a tensor in fp32 if its dtype has less than 32 bits."""
    return x.float() if x.element_size() < 4 else x


def log_probability(logits: Tensor, action: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, action[..., None])[..., 0]


def with_memory(observation: Tensor, memory: Tensor) -> Tensor:
    """Appends the memory to each flattened observation, as agents with a memory expect it."""
    return torch.cat((observation.flatten(1), memory), 1) if memory.shape[1] else observation


def advantages(
    reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """Returns generalised advantages over time, the second dimension.

    `next_value` is ignored where the agent has terminated. Where the episode is done (terminated or truncated), later rewards
    are ignored.
    """
    delta = reward + gamma * torch.where(terminated, 0.0, next_value) - value
    factor = gamma * gae_lambda * (~(terminated | done)).to(value.dtype)
    rows, advantage = [], torch.zeros_like(value[:, 0])
    for step in reversed(range(value.shape[1])):
        advantage = delta[:, step] + factor[:, step] * advantage
        rows.append(advantage)
    return torch.stack(rows[::-1], 1)


def mean_and_deviation(count: Tensor, total: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean and the standard deviation, from the count, the sum and the sum of squares."""
    mean = total / count
    return mean, (squares / count - mean * mean).clamp(min=0).sqrt()
