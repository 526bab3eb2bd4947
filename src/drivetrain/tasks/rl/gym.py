"""Gymnasium's environments by name: stepped one by one on the CPU, so slower than worlds that are functions of tensors."""

from __future__ import annotations

import math
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
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
CHANNELS = (1, 3, 4)  # of images: grey, colours, colours and opacity


class Sight:
    """Turns what a Gymnasium world shows into tensors: images to [channels, height, width], bytes to 0..1, numbers to one-hot rows."""

    def __init__(self, world: str, space: Any) -> None:
        self.world = world
        self.classes = int(space.n) if type(space).__name__ == "Discrete" else 0
        self.first = int(space.start) if self.classes else 0
        self.given: tuple[int, ...] = () if self.classes else tuple(space.shape)
        self.order: tuple[int, ...] = ()
        self.unit = 1.0
        self.notes: list[str] = []
        if self.classes:
            self.shape: tuple[int, ...] = (self.classes,)
            return
        if not self.given or 0 in self.given:
            raise Problem(f"{world} is seen as {space}: a Box to learn from needs at least one number, such as shape (4,)")
        self.shape = self._arranged()
        if space.dtype == np.uint8 or (len(self.given) == 3 and space.low.min() == 0 and space.high.max() == 255):
            self.unit = max(1.0, float(space.high.max()))
            self.notes.append(f"{world}: observations are divided by {self.unit:.0f}, so that they are 0..1")

    def _arranged(self) -> tuple[int, ...]:
        if len(self.given) != 3:
            return self.given
        first, last = (size in CHANNELS for size in (self.given[0], self.given[2]))
        sizes = " x ".join(map(str, self.given))
        if last:
            self.order = (2, 0, 1)
            doubt = "; if they are channels x height x width, let the world give them the other way round" if first else ""
            self.notes.append(f"{self.world}: observations of {sizes} are read as height x width x channels{doubt}")
            return tuple(self.given[axis] for axis in self.order)
        if not first:
            self.notes.append(
                f"{self.world}: observations of {sizes} are read as channels x height x width (neither end is 1, 3 or 4 channels)"
            )
        return self.given

    def __call__(self, seen: Any, where: str) -> Tensor:
        if self.classes:
            number = int(seen) - self.first
            if not 0 <= number < self.classes:
                raise Problem(
                    f"{self.world} {where} gave the observation {seen}: its space has {self.first} to {self.first + self.classes - 1}"
                )
            return nn.functional.one_hot(torch.tensor(number), self.classes).float()
        try:
            array = np.array(seen, dtype=np.float32)
        except (TypeError, ValueError):
            raise Problem(f"{self.world} {where} gave an observation of {type(seen).__name__}: it must be an array of numbers") from None
        if array.shape != self.given:
            raise Problem(f"{self.world} {where} gave an observation of shape {list(array.shape)}: its space says {list(self.given)}")
        if not np.isfinite(array).all():
            raise Problem(f"{self.world} {where} gave an observation of {array[~np.isfinite(array)][0]}: they must be finite numbers")
        if self.order:
            array = np.ascontiguousarray(array.transpose(self.order))
        return torch.from_numpy(array / self.unit if self.unit != 1.0 else array)


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
        self.see = Sight(name, seen)
        self.shape = self.see.shape

    def make(self) -> Any:
        try:
            import gymnasium
        except ImportError:
            raise Problem("Gymnasium is not installed: pip install 'drivetrain[rl]'") from None
        try:
            return gymnasium.make(self.name)
        except (gymnasium.error.Error, ImportError) as error:
            raise Problem(f"world={self.name}: {str(error).splitlines()[0]}") from None

    # --- one environment ---

    def begun(self, env: Any, seed: int) -> Tensor:
        """Begins an episode; returns what is seen."""
        where = f"reset(seed={seed})"
        given = self._call(where, lambda: env.reset(seed=seed))
        if not isinstance(given, tuple) or len(given) != 2:
            raise Problem(f"{self.name} {where} gave {_form(given)}: it must return (observation, info)")
        return self.see(given[0], where)

    def stepped(self, env: Any, action: int, number: int) -> tuple[Tensor, float, bool, bool]:
        """Takes an episode's step `number`; returns (what is seen, reward, terminated, truncated)."""
        where = f"step() at step {number}"
        given = self._call(where, lambda: env.step(self.first + action))
        if not isinstance(given, tuple) or len(given) != 5:
            raise Problem(f"{self.name} {where} gave {_form(given)}: it must return (observation, reward, terminated, truncated, info)")
        seen, reward, terminated, truncated, _ = given
        try:
            reward = float(reward)
        except (TypeError, ValueError):
            raise Problem(f"{self.name} {where} gave a reward of {type(reward).__name__}: it must be a number") from None
        if not math.isfinite(reward):
            raise Problem(f"{self.name} {where} gave a reward of {reward}: rewards must be finite numbers")
        return self.see(seen, where), reward, bool(terminated), bool(truncated)

    def _call(self, where: str, work: Callable[[], Any]) -> Any:
        """What Gymnasium's own checks refuse is the world's fault; an error in the world's lines stays as it is, with its frames."""
        import gymnasium

        try:
            return work()
        except Exception as error:
            raised = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
            if not raised.is_relative_to(Path(gymnasium.__file__).parent) or raised.is_relative_to(
                Path(gymnasium.__file__).parent / "envs"
            ):
                raise
            raise Problem(f"{self.name} {where}: {next(iter(str(error).splitlines()), type(error).__name__)}") from None

    # --- rows of live environments ---

    def reset(self, rand: Tensor) -> State:
        rows = rand.shape[0]
        self.live = [self.make() for _ in range(rows)]
        seed = (rand[:, 0].double() * SEEDS).long()
        seen = torch.stack([self.begun(env, s) for env, s in zip(self.live, seed.tolist(), strict=True)]).to(rand.device)
        number = torch.int16 if self.actions < 2**15 else torch.int32
        taken = torch.zeros(rows, self.limit or 0, dtype=number, device=rand.device)
        return {"seen": seen, "seed": seed, "count": torch.zeros_like(seed), "taken": taken, "truncated": seed < 0}

    def step(self, state: State, action: Tensor, rand: Tensor) -> tuple[State, Tensor, Tensor]:
        numbers = (state["count"] + 1).tolist()
        told = [self.stepped(env, a, n) for env, a, n in zip(self.live, action.tolist(), numbers, strict=True)]
        taken = state["taken"].scatter(1, state["count"][:, None], action[:, None].to(state["taken"].dtype))
        found, rewards, terminated, truncated = zip(*told, strict=True)
        reward, ended, cut = (torch.tensor(values, device=action.device) for values in (rewards, terminated, truncated))
        seen = torch.stack(found).to(action.device)
        return state | {"seen": seen, "count": state["count"] + 1, "taken": taken, "truncated": cut}, reward, ended

    def begin(self, state: State, over: Tensor, rand: Tensor) -> State:
        """New episodes where one is over."""
        seen, seed = state["seen"].clone(), torch.where(over, (rand[:, 0].double() * SEEDS).long(), state["seed"])
        for row in over.nonzero()[:, 0].tolist():
            seen[row] = self.begun(self.live[row], int(seed[row]))
        count, truncated = torch.where(over, 0, state["count"]), state["truncated"] & ~over
        return {"seen": seen, "seed": seed, "count": count, "taken": state["taken"], "truncated": truncated}

    def restore(self, state: State) -> None:
        """Lead live environments to a state: each episode is played again."""
        self.live = [self.make() for _ in state["seed"]]
        for env, seed, count, taken in zip(self.live, state["seed"], state["count"], state["taken"], strict=True):
            self.begun(env, int(seed))
            for number, action in enumerate(taken[: int(count)].tolist(), 1):
                self.stepped(env, action, number)

    def observe(self, state: State) -> Tensor:
        return state["seen"]


def _form(given: Any) -> str:
    return f"{len(given)} values" if isinstance(given, tuple) else f"a {type(given).__name__}"


class GymRollout(Rollout):
    pure, cut_once = False, False  # worlds truncate episodes when they like
    env: GymEnv

    def load(self, state: dict[str, Tensor]) -> None:
        super().load(state)
        self.env.restore(self._world(state))

    def _over(self, ended: Tensor, count: Tensor, world: State) -> Tensor:
        return super()._over(ended, count, world) | world["truncated"]

    def _anew(self, over: Tensor, world: State, rand: Tensor) -> State:
        return self.env.begin(world, over, rand)

    def check(self, state: State) -> None:
        """Nothing more: every step of a live environment is checked as it comes, for its state cannot be played twice."""


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

    def train_data(self) -> Rollout:
        rollout = super().train_data()
        if os.environ.get("RANK", "0") == "0" and isinstance(rollout.env, GymEnv):
            for note in rollout.env.see.notes:
                print(f"note    {note}", file=sys.stderr, flush=True)
        return rollout

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
    seen = torch.stack([env.begun(one, JUDGED + i) for one, i in zip(live, episodes.tolist(), strict=True)])
    sums, length, going = torch.zeros(len(live)), torch.zeros(len(live)), torch.ones(len(live), dtype=torch.bool)
    memory = torch.zeros(len(live), model.memory, device=device)
    while going.any():
        own = with_memory(seen.to(device), memory)
        logits = model.policy(own).cpu()
        memory = model.remember(own) if model.memory else memory
        step = int(length.max())
        action = logits.argmax(-1) if greedy else choose(logits, chance(episodes.cpu(), step, 1)[:, 0])
        for row in going.nonzero()[:, 0].tolist():
            seen[row], reward, ended, cut = env.stepped(live[row], int(action[row]), int(length[row]) + 1)
            going[row] = not (ended or cut or length[row] + 1 >= env.limit)
            sums[row] += reward
            length[row] += 1
    return {"return": sums.to(device), "length": length.to(device)}
