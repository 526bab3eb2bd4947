"""Gymnasium's environments by name: stepped one by one on the CPU, so slower than worlds that are functions of tensors."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from drivetrain.outcomes import Problem
from drivetrain.settings import Range
from drivetrain.tasks.rl.chance import chance
from drivetrain.tasks.rl.envs import Env, State
from drivetrain.tasks.rl.nets import Agent
from drivetrain.tasks.rl.played import Policy
from drivetrain.tasks.rl.ppo import Ppo
from drivetrain.tasks.rl.rollout import Rollout, choose, with_memory

SEEDS = 2**31 - 1
JUDGED = 10**6  # the seeds of evaluated episodes begin here


class GymEnv(Env):
    """Live environments, one a row. Their state cannot be saved: the episode's seed and actions can, and lead there again."""

    chances, limit = 1, 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.live: list[Any] = []
        one = self.make()
        space, seen = one.action_space, one.observation_space
        if type(space).__name__ != "Discrete":
            raise Problem(f"{name} takes actions of {space}: only numbered ones (Discrete) can be learned")
        if type(seen).__name__ not in ("Box", "Discrete"):
            raise Problem(f"{name} is seen as {type(seen).__name__}: only Box and Discrete can be learned from")
        steps = one.spec.max_episode_steps
        if not steps:
            raise Problem(f"{name} has no limit of steps (max_episode_steps): episodes need one")
        self.actions, self.first, self.limit = int(space.n), int(space.start), int(steps)
        self.classes = int(seen.n) if type(seen).__name__ == "Discrete" else 0
        self.shape = (self.classes,) if self.classes else tuple(seen.shape)

    def make(self) -> Any:
        try:
            import gymnasium
        except ImportError:
            raise Problem("Gymnasium is not installed: pip install 'drivetrain[rl]'") from None
        try:
            return gymnasium.make(self.name)
        except gymnasium.error.Error as error:
            raise Problem(f"world={self.name}: {str(error).splitlines()[0]}") from None

    # --- rows of live environments ---

    def reset(self, rand: Tensor) -> State:
        rows = rand.shape[0]
        self.live = [self.make() for _ in range(rows)]
        seed = (rand[:, 0].double() * SEEDS).long()
        seen = torch.stack([self.see(env.reset(seed=int(s))[0]) for env, s in zip(self.live, seed, strict=True)]).to(rand.device)
        taken = torch.zeros(rows, self.limit or 0, dtype=torch.int16, device=rand.device)
        return {"seen": seen, "seed": seed, "count": torch.zeros_like(seed), "taken": taken}

    def step(self, state: State, action: Tensor, rand: Tensor) -> tuple[State, Tensor, Tensor]:
        told = [env.step(self.first + int(a)) for env, a in zip(self.live, action.tolist(), strict=True)]
        taken = state["taken"].scatter(1, state["count"][:, None], action[:, None].to(torch.int16))
        seen = torch.stack([self.see(t[0]) for t in told]).to(action.device)
        reward = torch.tensor([float(t[1]) for t in told], device=action.device)
        ended = torch.tensor([bool(t[2]) for t in told], device=action.device)
        return state | {"seen": seen, "count": state["count"] + 1, "taken": taken}, reward, ended

    def begin(self, state: State, over: Tensor, rand: Tensor) -> State:
        """New episodes where one is over."""
        seen, seed = state["seen"].clone(), torch.where(over, (rand[:, 0].double() * SEEDS).long(), state["seed"])
        for row in over.nonzero()[:, 0].tolist():
            seen[row] = self.see(self.live[row].reset(seed=int(seed[row]))[0])
        return {"seen": seen, "seed": seed, "count": torch.where(over, 0, state["count"]), "taken": state["taken"]}

    def restore(self, state: State) -> None:
        """Lead live environments to a state: each episode is played again."""
        self.live = [self.make() for _ in state["seed"]]
        for env, seed, count, taken in zip(self.live, state["seed"], state["count"], state["taken"], strict=True):
            env.reset(seed=int(seed))
            for action in taken[: int(count)].tolist():
                env.step(self.first + action)

    def observe(self, state: State) -> Tensor:
        return state["seen"]

    def see(self, seen: Any) -> Tensor:
        if self.classes:
            return nn.functional.one_hot(torch.tensor(int(seen)), self.classes).float()
        return torch.from_numpy(np.array(seen, dtype=np.float32))


class GymRollout(Rollout):
    pure = False
    env: GymEnv

    def load(self, state: dict[str, Tensor]) -> None:
        super().load(state)
        self.env.restore(self._world(state))

    def _anew(self, over: Tensor, world: State, rand: Tensor) -> State:
        return self.env.begin(world, over, rand)

    def check(self, state: State) -> None:
        """Gymnasium has checked it."""


class Gym(Ppo):
    """A Gymnasium environment with numbered actions, by its name; stepped one by one on the CPU, slower than the built-in worlds."""

    world: str = "CartPole-v1"
    """The environment's name, such as Acrobot-v1."""
    epochs: Annotated[int, Range(1)] = 100
    """Collections; what one brings is learned from `passes` times."""
    envs: Annotated[int, Range(1)] = 16
    """Environments that are played at once, over all processes."""
    horizon: Annotated[int, Range(1)] = 128
    """Steps that each is played before the policy learns."""
    global_batch: Annotated[int, Range(1)] = 512
    """Samples in one optimizer step, over all processes: a multiple of the environments."""
    learning_rate: Annotated[float, Range(0)] = 1e-3
    """The optimizer's peak learning rate."""
    eval_episodes: Annotated[int, Range(0)] = 20
    """Fresh episodes that an evaluation plays; 0 evaluates nothing."""

    def env(self) -> GymEnv:
        return GymEnv(self.world)

    def rollout(self, env: Env, *rest: Any) -> Rollout:
        return GymRollout(env, *rest)

    def metrics(self, model: Agent, batch: Tensor) -> dict[str, Tensor]:
        return judged(self.env(), model, batch, self.greedy)

    def exports(self, model: Agent) -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
        """The policy alone: the rules are Gymnasium's."""
        env = self.env()
        seen = env.reset(torch.linspace(0, 0.9, 8)[:, None])["seen"][:, None]
        memory = {"memory": torch.zeros(8, 1, model.memory)} if model.memory else {}
        return {"policy": (Policy(env, model), {"observation": seen, "random": torch.linspace(0, 0.9, 8)[:, None], **memory})}


def judged(env: GymEnv, model: Agent, episodes: Tensor, greedy: bool) -> dict[str, Tensor]:
    """Whole episodes, whose seeds are their numbers."""
    device, live = episodes.device, [env.make() for _ in episodes]
    seen = torch.stack([env.see(one.reset(seed=JUDGED + int(i))[0]) for one, i in zip(live, episodes, strict=True)])
    sums, length, going = torch.zeros(len(live)), torch.zeros(len(live)), torch.ones(len(live), dtype=torch.bool)
    memory = torch.zeros(len(live), model.memory, device=device)
    while going.any():
        own = with_memory(seen.to(device), memory)
        logits = model.policy(own).cpu()
        memory = model.remember(own) if model.memory else memory
        step = int(length.max())
        action = logits.argmax(-1) if greedy else choose(logits, chance(episodes.cpu(), step, 1)[:, 0])
        for row in going.nonzero()[:, 0].tolist():
            found, reward, ended, cut, _ = live[row].step(env.first + int(action[row]))
            seen[row], going[row] = env.see(found), not (ended or cut)
            sums[row] += float(reward)
            length[row] += 1
    return {"return": sums.to(device), "length": length.to(device)}
