"""A policy and its world as modules of tensors, for programs that play without us: reset, step and policy."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drivetrain.tasks.rl.chance import chance
from drivetrain.tasks.rl.envs import Env, State, merged
from drivetrain.tasks.rl.nets import Agent
from drivetrain.tasks.rl.rollout import choose, with_memory

STEPS = "steps"  # taken in this episode, beside the world's own state
NEXT = "next_"


class Policy(nn.Module):
    """What each agent does: drawn as in training by a uniform number, and the likeliest; and what it remembers, if it does."""

    def __init__(self, env: Env, agent: Agent) -> None:
        super().__init__()
        self.env, self.agent = env, agent

    def forward(self, *given: Tensor) -> dict[str, Tensor]:
        observation, random, *memory = given
        players = (-1, self.env.agents)
        seen = with_memory(observation.flatten(0, 1), memory[0].flatten(0, 1)) if memory else observation.flatten(0, 1)
        logits = self.agent.policy(seen).unflatten(0, players)
        told = {"action": choose(logits, random), "likeliest": logits.argmax(-1), "probability": logits.softmax(-1)}
        return told | {"next_memory": self.agent.remember(seen).unflatten(0, players)} if memory else told


class Reset(nn.Module):
    """New episodes."""

    def __init__(self, env: Env) -> None:
        super().__init__()
        self.env = env

    def forward(self, random: Tensor) -> dict[str, Tensor]:
        world = self.env.reset(random[:, : self.env.chances])
        steps = torch.zeros_like(random[:, 0], dtype=torch.int64)
        return _told(self.env, world, steps)


class Step(nn.Module):
    """One step of everybody; `done` says that the episode is over, by its end or by its limit."""

    def __init__(self, env: Env, names: list[str]) -> None:
        super().__init__()
        self.env, self.names = env, names

    def forward(self, *given: Tensor) -> dict[str, Tensor]:
        *state, steps, action, random = given
        env, world = self.env, dict(zip(self.names, state, strict=True))
        after, reward, ended = env.step(world, action if env.agents > 1 else action[:, 0], random[:, : env.chances])
        reward, ended = (t.unflatten(0, (-1, 1)) if env.agents == 1 else t for t in (reward, ended))
        count = steps + 1
        done = ended.all(1) if env.limit is None else ended.all(1) | (count >= env.limit)
        return _told(env, after, count) | {"reward": reward.float(), "ended": ended, "done": done}


def _told(env: Env, world: State, steps: Tensor) -> dict[str, Tensor]:
    seen = env.observe(world)
    seen = seen.unflatten(0, (-1, 1)) if env.agents == 1 else seen
    return {f"{NEXT}{k}": v.clone() for k, v in world.items()} | {f"{NEXT}{STEPS}": steps, "observation": seen}


def graphs(env: Env, agent: Agent, episodes: int = 8, steps: int = 40) -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
    """The three modules, each with inputs from the middle of real episodes."""
    ids = torch.arange(episodes)
    with torch.no_grad():
        reset, policy = Reset(env), Policy(env, agent.eval())
        begun = chance(ids, 0, max(1, env.chances))
        told = reset(begun)
        names = [k.removeprefix(NEXT) for k in told if k.startswith(NEXT) and k != NEXT + STEPS]
        step = Step(env, names)
        inputs, asked = State(), State()
        memory = {"memory": torch.zeros(episodes, env.agents, agent.memory)} if agent.memory else {}
        given = "random" if env.chances else "worlds"  # a world without chance is only told how many it is
        for number in range(1, steps + 1):
            draws = chance(ids, number, max(1, env.chances) + env.agents)
            asked = {"observation": told["observation"], "random": draws[:, max(1, env.chances) :], **memory}
            chosen = policy(*asked.values())
            memory = {"memory": chosen["next_memory"]} if memory else memory
            state = {k: told[NEXT + k] for k in (*names, STEPS)}
            inputs = state | {"action": chosen["action"], given: draws[:, : max(1, env.chances)]}
            after, anew = step(*inputs.values()), reset(inputs[given])
            told = merged(after["done"], anew, {k: after[k] for k in anew})
    return {
        "reset": (reset, {given: begun}),
        "policy": (policy, asked),
        "step": (step, inputs),
    }  # fmt: skip
