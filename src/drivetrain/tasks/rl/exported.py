"""A policy and its environment as modules that compute with tensors (reset, step and policy), for `export`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drivetrain.tasks.rl.envs import Env, State, select_rows
from drivetrain.tasks.rl.episode_random import episode_uniform
from drivetrain.tasks.rl.nets import Agent
from drivetrain.tasks.rl.samples import sample_action, with_memory

STEPS = "steps"
"""The number of steps taken in the episode: an input and output besides the environment's own state."""
NEXT = "next_"


class PolicyGraph(nn.Module):
    """Computes each agent's sampled action, likeliest action, probabilities, and next memory if the agent has one."""

    def __init__(self, env: Env, agent: Agent) -> None:
        super().__init__()
        self.env, self.agent = env, agent

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        observation, random, *memory = inputs
        shape = (-1, self.env.agents)
        rows = with_memory(observation.flatten(0, 1), memory[0].flatten(0, 1)) if memory else observation.flatten(0, 1)
        logits = self.agent.policy(rows).unflatten(0, shape)
        outputs = {"action": sample_action(logits, random), "likeliest": logits.argmax(-1), "probability": logits.softmax(-1)}
        return outputs | {"next_memory": self.agent.next_memory(rows).unflatten(0, shape)} if memory else outputs


class ResetGraph(nn.Module):
    """Begins new episodes."""

    def __init__(self, env: Env) -> None:
        super().__init__()
        self.env = env

    def forward(self, random: Tensor) -> dict[str, Tensor]:
        state = self.env.reset(random[:, : self.env.chances])
        steps = torch.zeros_like(random[:, 0], dtype=torch.int64)
        return _state_outputs(self.env, state, steps)


class StepGraph(nn.Module):
    """Takes one step of all agents; `done` says whether the episode is over, terminated or truncated."""

    def __init__(self, env: Env, names: list[str]) -> None:
        super().__init__()
        self.env, self.names = env, names

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        *values, steps, action, random = inputs
        env, state = self.env, dict(zip(self.names, values, strict=True))
        after, reward, ended = env.step(state, action if env.agents > 1 else action[:, 0], random[:, : env.chances])
        reward, ended = (t.unflatten(0, (-1, 1)) if env.agents == 1 else t for t in (reward, ended))
        length = steps + 1
        done = ended.all(1) if env.limit is None else ended.all(1) | (length >= env.limit)
        return _state_outputs(env, after, length) | {"reward": reward.float(), "ended": ended, "done": done}


def _state_outputs(env: Env, state: State, steps: Tensor) -> dict[str, Tensor]:
    observation = env.observe(state)
    observation = observation.unflatten(0, (-1, 1)) if env.agents == 1 else observation
    return {f"{NEXT}{k}": v.clone() for k, v in state.items()} | {f"{NEXT}{STEPS}": steps, "observation": observation}


def export_graphs(env: Env, agent: Agent, episodes: int = 8, steps: int = 40) -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
    """Returns the three modules by name, each with example inputs from the middle of real episodes."""
    ids = torch.arange(episodes)
    num_env_random = max(1, env.chances)
    with torch.no_grad():
        reset, policy = ResetGraph(env), PolicyGraph(env, agent.eval())
        reset_random = episode_uniform(ids, 0, num_env_random)
        outputs = reset(reset_random)
        names = [k.removeprefix(NEXT) for k in outputs if k.startswith(NEXT) and k != NEXT + STEPS]
        step = StepGraph(env, names)
        step_inputs, policy_inputs = State(), State()
        memory = {"memory": torch.zeros(episodes, env.agents, agent.memory)} if agent.memory else {}
        random_name = "random" if env.chances else "worlds"  # without random numbers the input only gives the number of environments
        for number in range(1, steps + 1):
            random = episode_uniform(ids, number, num_env_random + env.agents)
            policy_inputs = {"observation": outputs["observation"], "random": random[:, num_env_random:], **memory}
            chosen = policy(*policy_inputs.values())
            memory = {"memory": chosen["next_memory"]} if memory else memory
            state = {k: outputs[NEXT + k] for k in (*names, STEPS)}
            step_inputs = state | {"action": chosen["action"], random_name: random[:, :num_env_random]}
            after, fresh = step(*step_inputs.values()), reset(step_inputs[random_name])
            outputs = select_rows(after["done"], fresh, {k: after[k] for k in fresh})
    return {
        "reset": (reset, {random_name: reset_random}),
        "policy": (policy, policy_inputs),
        "step": (step, step_inputs),
    }  # fmt: skip
