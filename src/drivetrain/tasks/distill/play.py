"""Plays episodes in context: the model's weights stay as they are, and only its context grows from episode to episode."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drivetrain.tasks.distill.envs import TaskEnv
from drivetrain.tasks.distill.model import InContextModel
from drivetrain.tasks.rl.episode_random import episode_uniform
from drivetrain.tasks.rl.samples import at_least_fp32, sample_action


@dataclass
class Played:
    returns: Tensor
    """The return of each episode: [rows, episodes]."""
    places: Tensor
    """The player's cells in the last episode, from its start to its end: [rows, steps + 1]."""


def play(env: TaskEnv, model: InContextModel, task: Tensor, stream: Tensor, episodes: int, greedy: bool) -> Played:
    """Plays `episodes` episodes of each row's task, one after another. The random numbers depend only on task and stream."""
    assert env.limit is not None
    context, key = model.start(), task.long() * 1_000_003 + stream.long()
    returns = []
    for episode in range(episodes):
        state, total = env.start(task.long()), torch.zeros(len(task), device=task.device)
        places = [state["place"]]
        for step in range(env.limit):
            place = state["place"]
            logits = at_least_fp32(model.act(context, place))
            uniform = episode_uniform(key, episode * env.limit + step, 1)
            action = logits.argmax(-1) if greedy else sample_action(logits, uniform[:, 0])
            state, reward, _ = env.step(state, action, uniform[:, :0])
            model.observe(context, (place, action, reward, state["place"]))
            total = total + reward
            places.append(state["place"])
        returns.append(total)
    return Played(torch.stack(returns, 1), torch.stack(places, 1))
