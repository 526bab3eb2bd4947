"""Gymnasium's environments by name. They run one by one on the CPU, slower than environments that are tensor functions."""

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
from drivetrain.tasks.rl.envs import Env, State
from drivetrain.tasks.rl.episode_random import episode_uniform
from drivetrain.tasks.rl.exported import PolicyGraph
from drivetrain.tasks.rl.nets import Agent
from drivetrain.tasks.rl.ppo import Ppo
from drivetrain.tasks.rl.rollout import Rollout
from drivetrain.tasks.rl.samples import sample_action, with_memory

NUM_SEEDS = 2**31 - 1
FIRST_EVAL_SEED = 10**6
IMAGE_CHANNELS = (1, 3, 4)
"""Possible numbers of channels of an image: grey, RGB, RGBA."""


class ObservationReader:
    """Turns Gymnasium observations into tensors: images into [channels, height, width] in 0..1, class numbers into one-hot rows."""

    def __init__(self, env_name: str, space: Any) -> None:
        self.env_name = env_name
        self.classes = int(space.n) if type(space).__name__ == "Discrete" else 0
        self.first_class = int(space.start) if self.classes else 0
        self.space_shape: tuple[int, ...] = () if self.classes else tuple(space.shape)
        self.axes: tuple[int, ...] = ()
        """The order of axes to transpose an image to; empty: no transpose."""
        self.divisor = 1.0
        self.notes: list[str] = []
        if self.classes:
            self.shape: tuple[int, ...] = (self.classes,)
            return
        if not self.space_shape or 0 in self.space_shape:
            raise Problem(f"{env_name} has observations of {space}: a Box needs at least one number, such as shape (4,)")
        self.shape = self._channels_first()
        if space.dtype == np.uint8 or (len(self.space_shape) == 3 and space.low.min() == 0 and space.high.max() == 255):
            self.divisor = max(1.0, float(space.high.max()))
            self.notes.append(f"{env_name}: observations are divided by {self.divisor:.0f}, so that they are 0..1")

    def _channels_first(self) -> tuple[int, ...]:
        """Returns the shape with an image's channels first, and sets `axes` where they come last."""
        if len(self.space_shape) != 3:
            return self.space_shape
        may_be_first, may_be_last = (size in IMAGE_CHANNELS for size in (self.space_shape[0], self.space_shape[2]))
        sizes = " x ".join(map(str, self.space_shape))
        if may_be_last:
            self.axes = (2, 0, 1)
            hint = "; if they are channels x height x width, let the environment give height x width x channels" if may_be_first else ""
            self.notes.append(f"{self.env_name}: observations of {sizes} are read as height x width x channels{hint}")
            return tuple(self.space_shape[axis] for axis in self.axes)
        if not may_be_first:
            self.notes.append(
                f"{self.env_name}: observations of {sizes} are read as channels x height x width (neither end is 1, 3 or 4 channels)"
            )
        return self.space_shape

    def __call__(self, observation: Any, where: str) -> Tensor:
        """Returns an observation as a tensor; `where` names the call that returned it, for error messages."""
        if self.classes:
            number = int(observation) - self.first_class
            if not 0 <= number < self.classes:
                last = self.first_class + self.classes - 1
                raise Problem(f"{self.env_name} {where} gave the observation {observation}: its space has {self.first_class} to {last}")
            return nn.functional.one_hot(torch.tensor(number), self.classes).float()
        array = self._checked_array(observation, where)
        if self.axes:
            array = np.ascontiguousarray(array.transpose(self.axes))
        return torch.from_numpy(array / self.divisor if self.divisor != 1.0 else array)

    def _checked_array(self, observation: Any, where: str) -> np.ndarray:
        try:
            array = np.array(observation, dtype=np.float32)
        except (TypeError, ValueError):
            form = type(observation).__name__
            raise Problem(f"{self.env_name} {where} gave an observation of {form}: it must be an array of numbers") from None
        if array.shape != self.space_shape:
            shapes = f"shape {list(array.shape)}: its space says {list(self.space_shape)}"
            raise Problem(f"{self.env_name} {where} gave an observation of {shapes}")
        if not np.isfinite(array).all():
            raise Problem(f"{self.env_name} {where} gave an observation of {array[~np.isfinite(array)][0]}: they must be finite numbers")
        return array


class GymEnv(Env):
    """Gymnasium environments, one in each row. Their state cannot be saved; instead, `restore` replays the episode's seed and actions."""

    chances, limit = 1, 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.gym_envs: list[Any] = []
        example = self.make()
        space, observation_space = example.action_space, example.observation_space
        if type(space).__name__ != "Discrete":
            raise Problem(f"{name} takes actions of {space}: only Discrete actions are supported")
        if type(observation_space).__name__ not in ("Box", "Discrete"):
            raise Problem(f"{name} has observations of {type(observation_space).__name__}: only Box and Discrete are supported")
        steps = example.spec.max_episode_steps
        if not steps:
            raise Problem(f"{name} has no limit of steps (max_episode_steps): episodes need one")
        self.actions, self.first_action, self.limit = int(space.n), int(space.start), int(steps)
        self.read = ObservationReader(name, observation_space)
        self.shape = self.read.shape

    def make(self) -> Any:
        """Makes one Gymnasium environment."""
        try:
            import gymnasium
        except ImportError:
            raise Problem("Gymnasium is not installed: pip install 'drivetrain[rl]'") from None
        try:
            return gymnasium.make(self.name)
        except (gymnasium.error.Error, ImportError) as error:
            raise Problem(f"world={self.name}: {str(error).splitlines()[0]}") from None

    # --- one environment ---

    def reset_one(self, gym_env: Any, seed: int) -> Tensor:
        """Begins an episode; returns its first observation."""
        where = f"reset(seed={seed})"
        returned = self._call(where, lambda: gym_env.reset(seed=seed))
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise Problem(f"{self.name} {where} gave {_form(returned)}: it must return (observation, info)")
        return self.read(returned[0], where)

    def step_one(self, gym_env: Any, action: int, number: int) -> tuple[Tensor, float, bool, bool]:
        """Takes an episode's step `number`; returns (observation, reward, terminated, truncated)."""
        where = f"step() at step {number}"
        returned = self._call(where, lambda: gym_env.step(self.first_action + action))
        if not isinstance(returned, tuple) or len(returned) != 5:
            form = _form(returned)
            raise Problem(f"{self.name} {where} gave {form}: it must return (observation, reward, terminated, truncated, info)")
        observation, reward, terminated, truncated, _ = returned
        try:
            reward = float(reward)
        except (TypeError, ValueError):
            raise Problem(f"{self.name} {where} gave a reward of {type(reward).__name__}: it must be a number") from None
        if not math.isfinite(reward):
            raise Problem(f"{self.name} {where} gave a reward of {reward}: rewards must be finite numbers")
        return self.read(observation, where), reward, bool(terminated), bool(truncated)

    def _call(self, where: str, call: Callable[[], Any]) -> Any:
        """Runs a call of Gymnasium. Errors of Gymnasium's own checks become one line; errors of the environment keep their traceback."""
        import gymnasium

        try:
            return call()
        except Exception as error:
            raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
            package = Path(gymnasium.__file__).parent
            if not raised_in.is_relative_to(package) or raised_in.is_relative_to(package / "envs"):
                raise
            raise Problem(f"{self.name} {where}: {next(iter(str(error).splitlines()), type(error).__name__)}") from None

    # --- rows of environments ---

    def reset(self, rand: Tensor) -> State:
        rows = rand.shape[0]
        self.gym_envs = [self.make() for _ in range(rows)]
        seed = (rand[:, 0].double() * NUM_SEEDS).long()
        observations = [self.reset_one(gym_env, s) for gym_env, s in zip(self.gym_envs, seed.tolist(), strict=True)]
        dtype = torch.int16 if self.actions < 2**15 else torch.int32
        taken = torch.zeros(rows, self.limit or 0, dtype=dtype, device=rand.device)
        return {
            "seen": torch.stack(observations).to(rand.device), "seed": seed, "count": torch.zeros_like(seed), "taken": taken,
            "truncated": seed < 0,
        }  # fmt: skip

    def step(self, state: State, action: Tensor, rand: Tensor) -> tuple[State, Tensor, Tensor]:
        numbers = (state["count"] + 1).tolist()
        results = [self.step_one(gym_env, a, n) for gym_env, a, n in zip(self.gym_envs, action.tolist(), numbers, strict=True)]
        taken = state["taken"].scatter(1, state["count"][:, None], action[:, None].to(state["taken"].dtype))
        observations, *columns = zip(*results, strict=True)
        reward, terminated, truncated = (torch.tensor(values, device=action.device) for values in columns)
        seen = torch.stack(observations).to(action.device)
        return state | {"seen": seen, "count": state["count"] + 1, "taken": taken, "truncated": truncated}, reward, terminated

    def reset_rows(self, state: State, done: Tensor, rand: Tensor) -> State:
        """Begins new episodes where one is done."""
        seen, seed = state["seen"].clone(), torch.where(done, (rand[:, 0].double() * NUM_SEEDS).long(), state["seed"])
        for row in done.nonzero()[:, 0].tolist():
            seen[row] = self.reset_one(self.gym_envs[row], int(seed[row]))
        count, truncated = torch.where(done, 0, state["count"]), state["truncated"] & ~done
        return {"seen": seen, "seed": seed, "count": count, "taken": state["taken"], "truncated": truncated}

    def restore(self, state: State) -> None:
        """Makes new environments and brings them to a state, by replaying each episode."""
        self.gym_envs = [self.make() for _ in state["seed"]]
        for gym_env, seed, count, taken in zip(self.gym_envs, state["seed"], state["count"], state["taken"], strict=True):
            self.reset_one(gym_env, int(seed))
            for number, action in enumerate(taken[: int(count)].tolist(), 1):
                self.step_one(gym_env, action, number)

    def observe(self, state: State) -> Tensor:
        return state["seen"]


def _form(returned: Any) -> str:
    return f"{len(returned)} values" if isinstance(returned, tuple) else f"a {type(returned).__name__}"


class GymRollout(Rollout):
    pure, truncates_once = False, False  # Gymnasium environments may truncate an episode at any step
    env: GymEnv

    def load(self, state: dict[str, Tensor]) -> None:
        super().load(state)
        self.env.restore(self._env_state(state))

    def _done(self, terminated: Tensor, length: Tensor, env_state: State) -> Tensor:
        return super()._done(terminated, length, env_state) | env_state["truncated"]

    def _reset(self, done: Tensor, env_state: State, rand: Tensor) -> State:
        return self.env.reset_rows(env_state, done, rand)

    def check(self, state: State) -> None:
        """Checks nothing: trial steps cannot be undone here, and every real step is checked."""


class Gym(Ppo):
    """A Gymnasium environment with discrete actions, by its name; runs on the CPU, slower than the built-in environments."""

    tune_population = ""  # Gymnasium environments are not tensor functions
    world: str = "CartPole-v1"
    """The environment's name, such as Acrobot-v1."""
    epochs: Annotated[int, Range(1)] = 100
    """Number of collections; the policy learns from each one `passes` times."""
    envs: Annotated[int, Range(1)] = 16
    """Environments that are played at once, over all processes."""
    horizon: Annotated[int, Range(1)] = 128
    """Steps that each environment is played before the policy learns."""
    global_batch: Annotated[int, Range(1)] = 512
    """Samples in one optimizer step, over all processes: a multiple of the environments."""
    learning_rate: Annotated[float, Range(0)] = 1e-3
    """The optimizer's peak learning rate."""
    eval_episodes: Annotated[int, Range(0)] = 20
    """New episodes that an evaluation plays; 0 evaluates nothing."""

    def env(self) -> GymEnv:
        return GymEnv(self.world)

    def train_data(self) -> Rollout:
        rollout = super().train_data()
        if os.environ.get("RANK", "0") == "0" and isinstance(rollout.env, GymEnv):
            for note in rollout.env.read.notes:
                print(f"note    {note}", file=sys.stderr, flush=True)
        return rollout

    def rollout(self, env: Env, *rest: Any) -> Rollout:
        return GymRollout(env, *rest)

    def metrics(self, model: Agent, batch: Tensor) -> dict[str, Tensor]:
        return play_gym_episodes(self.env(), model, batch, self.greedy)

    def exports(self, model: Agent) -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
        """Exports only the policy: the rules belong to Gymnasium."""
        env = self.env()
        observation = env.reset(torch.linspace(0, 0.9, 8)[:, None])["seen"][:, None]
        memory = {"memory": torch.zeros(8, 1, model.memory)} if model.memory else {}
        inputs = {"observation": observation, "random": torch.linspace(0, 0.9, 8)[:, None], **memory}
        return {"policy": (PolicyGraph(env, model), inputs)}


def play_gym_episodes(env: GymEnv, model: Agent, episodes: Tensor, greedy: bool) -> dict[str, Tensor]:
    """Returns metrics of complete episodes; each episode's number determines its seed."""
    device, gym_envs = episodes.device, [env.make() for _ in episodes]
    observation = torch.stack([env.reset_one(gym_env, FIRST_EVAL_SEED + i) for gym_env, i in zip(gym_envs, episodes.tolist(), strict=True)])
    num_envs = len(gym_envs)
    returns, length, is_running = torch.zeros(num_envs), torch.zeros(num_envs), torch.ones(num_envs, dtype=torch.bool)
    memory = torch.zeros(num_envs, model.memory, device=device)
    while is_running.any():
        inputs = with_memory(observation.to(device), memory)
        logits = model.policy(inputs).cpu()
        memory = model.next_memory(inputs) if model.memory else memory
        step = int(length.max())
        action = logits.argmax(-1) if greedy else sample_action(logits, episode_uniform(episodes.cpu(), step, 1)[:, 0])
        for row in is_running.nonzero()[:, 0].tolist():
            observation[row], reward, terminated, truncated = env.step_one(gym_envs[row], int(action[row]), int(length[row]) + 1)
            is_running[row] = not (terminated or truncated or length[row] + 1 >= env.limit)
            returns[row] += reward
            length[row] += 1
    return {"return": returns.to(device), "length": length.to(device)}
