"""Records the learning histories of PPO on all tasks of an environment at once, each task with a policy of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain.data import Rand, Tensors
from drivetrain.settings import Duration, Range
from drivetrain.tasks.distill import histories
from drivetrain.tasks.distill.envs import DeviceTable, TaskEnv, make_env
from drivetrain.tasks.rl.envs import Env, State, select_rows
from drivetrain.tasks.rl.nets import Agent
from drivetrain.tasks.rl.ppo import Ppo
from drivetrain.tasks.rl.rollout import Rollout


class TabularAgents(Agent):
    """A policy and a critic for each task: tables with a row for each state. Observations are (task, state)."""

    def __init__(self, tasks: int, states: int, actions: int) -> None:
        super().__init__()
        self.states = states
        self.logits, self.values = nn.Parameter(torch.zeros(tasks * states, actions)), nn.Parameter(torch.zeros(tasks * states, 1))

    def _row(self, observation: Tensor) -> Tensor:
        return observation[:, 0].long() * self.states + observation[:, 1].long()

    def policy(self, observation: Tensor, agent_ids: Tensor | None = None) -> Tensor:
        return F.embedding(self._row(observation), self.logits)

    def value(self, observation: Tensor, agent_ids: Tensor | None = None) -> Tensor:
        return F.embedding(self._row(observation), self.values)[:, 0]


class HistoryRollout(Rollout):
    """Plays all tasks in several streams each, and keeps in its state what every environment saw."""

    env: TaskEnv

    def __init__(self, env: TaskEnv, facts: histories.Facts, *rest: Any) -> None:
        super().__init__(env, *rest)
        self.facts = facts
        self.group_bytes += 2 * facts.steps * 9
        self._tasks = DeviceTable(torch.tensor(facts.tasks))

    def collect(self, model: Any, rand: Rand, total: Callable[[Tensor], Tensor]) -> Tensors:
        self._own_tasks = self._tasks.on(rand.ids.device)[rand.ids // self.facts.streams]
        self._next_places: list[Tensor] = []
        return super().collect(model, rand, total)

    def begin(self, rand: Tensor) -> State:
        shape, device = (len(rand), self.facts.steps), rand.device
        empty = {
            "place": torch.zeros(shape, dtype=torch.int16, device=device), "action": torch.zeros(shape, dtype=torch.uint8, device=device),
            "reward": torch.zeros(shape, device=device), "next_place": torch.zeros(shape, dtype=torch.int16, device=device),
        }  # fmt: skip
        env_state = {f"env.{name}": values for name, values in self.env.start(self._own_tasks).items()}
        return super().begin(rand) | env_state | {f"history.{name}": values for name, values in empty.items()}

    def _reset(self, done: Tensor, env_state: State, rand: Tensor) -> State:
        """Begins new episodes of the same tasks."""
        self._next_places.append(env_state["place"])
        return select_rows(done, self.env.start(env_state["task"]), env_state)

    def record(self, played: dict[str, Tensor]) -> None:
        super().record(played)
        position = (self._state["collections"][0] - 1) * self.horizon + torch.arange(self.horizon, device=self._own_tasks.device)
        columns = {
            "place": played["observation"][:, :, 0, 1] % self.env.num_cells, "action": played["action"][..., 0],
            "reward": played["reward"][..., 0], "next_place": torch.stack(self._next_places, 1),
        }  # fmt: skip
        for name, values in columns.items():
            history = self._state[f"history.{name}"]
            self._state[f"history.{name}"] = history.index_copy(1, position, values.to(history.dtype))

    def load(self, state: dict[str, Tensor]) -> None:
        """Restores a state. A resumed run may have more `epochs` than before: its histories then get longer."""
        super().load(state)
        for name, values in self._state.items():
            missing = self.facts.steps - values.shape[1] if name.startswith("history.") else 0
            if missing > 0:
                self._state[name] = F.pad(values, (0, missing))

    def write_files(self, state: dict[str, Tensor], folder: Path) -> None:
        """Writes the collections that were made: a run that ended early has shorter histories."""
        steps = int(state["collections"][0]) * self.horizon
        shape = (len(self.facts.tasks), self.facts.streams)
        columns = {name: state[f"history.{name}"][:, :steps].unflatten(0, shape) for name in ("place", "action", "reward", "next_place")}
        histories.write(folder, histories.Histories(replace(self.facts, steps=steps), **columns))


class CollectHistories(Ppo):
    """Learning histories of PPO on all tasks of an environment at once, for `distill`. Each task has a policy of its own."""

    world: Literal["darkroom", "darkroom-permuted", "key-to-door"] = "darkroom"
    """The environment: a hidden goal, permuted actions, or a hidden key and a hidden door."""
    size: Annotated[int, Range(2, 181)] = 9
    """Width and height of the room."""
    limit: Annotated[int, Range(1)] | None = None
    """Steps of an episode; by default the environment's own number."""
    streams: Annotated[int, Range(1)] = 100
    """Environments of each task, which share its policy: each records a history."""
    num_tasks: Annotated[int, Range(1)] | None = None
    """Number of tasks to record, held-out tasks first; by default all."""
    split_seed: int = 0
    """Seed of the shuffle that determines which tasks are held out."""
    region: Annotated[int, Range(1)] = 80
    """Steps between the region markers of a history."""
    epochs: Annotated[int, Range(1)] = 50
    """Number of collections; a history has `epochs` x `horizon` steps."""
    horizon: Annotated[int, Range(1)] = 20
    """Steps that each environment is played before the policies learn."""
    passes: Annotated[int, Range(1)] = 4
    """Times that the policies learn from a collection."""
    global_batch: Annotated[int, Range(1)] = 40_500
    """Samples in one optimizer step, over all processes: a multiple of the environments (tasks x streams)."""
    learning_rate: Annotated[float, Range(0)] = 0.1
    """The optimizer's peak learning rate."""
    decay: Literal["cosine", "linear", "constant"] = "constant"
    """How the learning rate falls after the warm-up."""
    gamma: Annotated[float, Range(0, 1)] = 0.95
    """Discount factor of future rewards."""
    fused: bool = False
    """Not used: the policies are tables, not perceptrons."""
    greedy: bool = False
    """Whether an evaluation takes the likeliest action, or samples one as training does."""
    eval_episodes: Annotated[int, Range(0)] = 1000
    """New episodes of recorded tasks, chosen at random, that an evaluation plays; 0 evaluates nothing."""
    save_every: Duration = "10ep"
    """Steps (or 1ep, 10min) between checkpoints; the end always saves."""

    tune_population = ""

    def env(self) -> Env:
        """Returns the environment, whose `reset` chooses among the recorded tasks: only their policies learn."""
        env = make_env(self.world, self.size, self.limit)
        env.restrict(self._tasks(env))
        return env

    def _tasks(self, env: TaskEnv) -> list[int]:
        train, held_out = env.split(self.split_seed)
        return (held_out + train)[: self.num_tasks]

    def agent(self, env: Env) -> Agent:
        assert isinstance(env, TaskEnv)
        return TabularAgents(env.num_tasks, env.num_states, env.actions)

    def train_data(self) -> Rollout:
        self.envs = self.streams * len(self._facts().tasks)
        return super().train_data()

    def rollout(self, env: Env, *rest: Any) -> Rollout:
        assert isinstance(env, TaskEnv)
        return HistoryRollout(env, self._facts(), *rest)

    def _facts(self) -> histories.Facts:
        env = make_env(self.world, self.size, self.limit)
        assert env.limit is not None
        tasks = self._tasks(env)
        steps = self._num_collections(len(tasks)) * self.horizon
        return histories.Facts(self.world, self.size, env.limit, tuple(tasks), self.streams, steps, self.region, self.split_seed, "ppo")

    def _num_collections(self, num_tasks: int) -> int:
        """Returns the number of collections of the run; the engine rounds `steps` up to complete ones."""
        if not self.steps:
            return self.epochs
        num_samples = num_tasks * self.streams * self.horizon
        steps_per_collection = max(1, num_samples // self.global_batch) * self.passes
        return -(-self.steps // steps_per_collection)
