"""Plays complete episodes for evaluation: with one policy, or with a policy against its rival."""

from __future__ import annotations

import torch
from torch import Tensor

from drivetrain.outcomes import Problem
from drivetrain.tasks.rl.envs import Env, select_rows
from drivetrain.tasks.rl.episode_random import episode_uniform
from drivetrain.tasks.rl.nets import Agent, AgentWithRival
from drivetrain.tasks.rl.samples import at_least_fp32, sample_action, with_memory


def play_episodes(env: Env, model: Agent, episodes: Tensor, greedy: bool) -> dict[str, Tensor]:
    """Returns metrics of complete episodes, one in each row. Random numbers depend only on the episodes' numbers."""
    all_agents = torch.ones(len(episodes), env.agents, dtype=torch.bool, device=episodes.device)
    return {k: v.mean(1) for k, v in _play(env, (model, model), all_agents, episodes, greedy).items()}


def win_rate(env: Env, model: AgentWithRival, episodes: Tensor, greedy: bool) -> Tensor:
    """Returns for each episode 1 if the policy wins against its rival, 0 if it loses, 0.5 for a draw.

    Each side plays half of the agents; sides change from episode to episode. The side with the higher return wins.
    """
    position = torch.arange(env.agents, device=episodes.device) + episodes[:, None]
    is_policy = position % 2 == 0
    returns = _play(env, (model.agent, model.rival), is_policy, episodes, greedy)["return"]
    lead = (returns * is_policy).sum(1) - (returns * ~is_policy).sum(1)
    return (1 + lead.sign()) / 2


def _play(env: Env, sides: tuple[Agent, Agent], is_first_side: Tensor, episodes: Tensor, greedy: bool) -> dict[str, Tensor]:
    """Returns metrics of complete episodes by agent; `is_first_side` marks the agents that the first side plays."""
    if env.limit is None:
        raise Problem(f"{type(env).__name__} has no limit: evaluated episodes need one")
    state = env.reset(episode_uniform(episodes, 0, env.chances))
    rows, agents = len(episodes), env.agents
    terminated = torch.zeros(rows, agents, dtype=torch.bool, device=episodes.device)
    returns, length = torch.zeros(rows, agents, device=episodes.device), torch.zeros(rows, agents, device=episodes.device)
    memories = [torch.zeros(rows * agents, side.memory, device=episodes.device) for side in sides]
    for step in range(1, env.limit + 1):
        observation = env.observe(state).reshape(-1, *env.shape)
        inputs = [with_memory(observation, memory) for memory in memories]
        logits = at_least_fp32(sides[0].policy(inputs[0])).view(rows, agents, -1)
        if sides[0] is not sides[1]:
            logits = torch.where(is_first_side[..., None], logits, at_least_fp32(sides[1].policy(inputs[1])).view(rows, agents, -1))
        if sides[0].memory:
            memories = [side.next_memory(rows) for side, rows in zip(sides, inputs, strict=True)]
        uniform = episode_uniform(episodes, step, env.chances + agents)
        action = logits.argmax(-1) if greedy else sample_action(logits, uniform[:, env.chances :])
        next_state, reward, terminated_now = env.step(state, action if agents > 1 else action[:, 0], uniform[:, : env.chances])
        state = select_rows(terminated.all(1), state, next_state)
        returns += reward.view(-1, agents) * ~terminated
        length += (~terminated).float()
        terminated = terminated | terminated_now.view(-1, agents)
        if episodes.device.type == "cpu" and bool(terminated.all()):
            break
    return {"return": returns, "length": length} | {k: v.view(rows, -1) for k, v in env.figures(state).items()}
