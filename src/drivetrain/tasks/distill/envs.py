"""Environments with many tasks, such as goals: what differs between tasks is hidden, and a player must find it out."""

from __future__ import annotations

import itertools
import random

import torch
from torch import Tensor

from drivetrain.outcomes import Problem
from drivetrain.tasks.rl.envs import Env, State

DOWN, UP, RIGHT, LEFT, STAY = range(5)
"""The actions."""


class DeviceTable:
    """A constant tensor that is copied to each device once: a copy in each step would make the host wait for a GPU."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._copies: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        if device == self._values.device:
            return self._values
        if device not in self._copies:
            self._copies[device] = self._values.to(device)
        return self._copies[device]


class TaskEnv(Env):
    """A square grid with many tasks. Each row plays the task whose number is in its state; episodes have a fixed length.

    Rewards and rules depend on the task. A model sees only the player's place; `observe` shows the task, too, for learners
    that have a policy for each task.
    """

    actions, shape, chances, limit = 5, (2,), 1, 20
    num_tasks: int
    num_states: int
    """Number of different `source_state` values in one task."""
    train_share = 0.9
    """Share of the tasks to train on; the others are held out."""

    _reset_tasks: DeviceTable | None = None
    """The tasks of `reset`, if they are not all tasks."""

    def __init__(self, size: int, limit: int) -> None:
        self.size, self.limit = size, limit
        self.num_cells = self.num_states = size * size

    def restrict(self, tasks: list[int]) -> None:
        """Makes `reset` choose among these tasks only."""
        if len(tasks) < self.num_tasks:
            self._reset_tasks = DeviceTable(torch.tensor(tasks))

    def start(self, task: Tensor) -> State:
        """Returns the state at the beginning of an episode of each row's task."""
        raise NotImplementedError

    def reset(self, rand: Tensor) -> State:
        """Begins an episode of a random task in each row."""
        tasks = None if self._reset_tasks is None else self._reset_tasks.on(rand.device)
        num_tasks = self.num_tasks if tasks is None else len(tasks)
        task = (rand[:, 0] * num_tasks).long().clamp(max=num_tasks - 1)
        return self.start(task if tasks is None else tasks[task])

    def source_state(self, state: State) -> Tensor:
        """Returns the number of what a policy of one task may depend on."""
        return state["place"]

    def best_action(self, state: State) -> Tensor:
        """Returns an action of an optimal policy."""
        raise NotImplementedError

    def optimum(self, task: Tensor) -> Tensor:
        """Returns the largest possible return of an episode of each task."""
        raise NotImplementedError

    def label(self, task: int) -> str:
        """Returns a short name of a task, for logs and pictures."""
        return str(task)

    def goals(self, task: int) -> tuple[int, ...]:
        """Returns the cells to go to, in their order, for pictures."""
        return ()

    def observe(self, state: State) -> Tensor:
        return torch.stack((state["task"], self.source_state(state)), 1).float()

    def split(self, seed: int) -> tuple[list[int], list[int]]:
        """Returns the tasks to train on and those held out, with guide 002's shuffle."""
        tasks = list(range(self.num_tasks))
        random.Random(seed).shuffle(tasks)
        num_train = round(self.num_tasks * self.train_share)
        return tasks[:num_train], tasks[num_train:]

    # --- the grid ---

    def cell(self, row: int, column: int) -> int:
        return row * self.size + column

    def move(self, place: Tensor, action: Tensor) -> Tensor:
        """Returns the cell after a move; walls surround the grid."""
        row = (place // self.size + (action == DOWN).long() - (action == UP).long()).clamp(0, self.size - 1)
        column = (place % self.size + (action == RIGHT).long() - (action == LEFT).long()).clamp(0, self.size - 1)
        return row * self.size + column

    def distance(self, place: Tensor, target: Tensor) -> Tensor:
        """Returns the number of moves between two cells."""
        rows, columns = place // self.size - target // self.size, place % self.size - target % self.size
        return rows.abs() + columns.abs()

    def toward(self, place: Tensor, target: Tensor) -> Tensor:
        """Returns the action that goes to a cell on a shortest way, or stays there."""
        rows, columns = target // self.size - place // self.size, target % self.size - place % self.size
        vertical = torch.where(rows > 0, DOWN, UP)
        horizontal = torch.where(columns > 0, RIGHT, torch.where(columns < 0, LEFT, STAY))
        return torch.where(rows != 0, vertical, horizontal)

    def _stay_return(self, distance: Tensor) -> Tensor:
        """Returns the return of going to a goal and staying there: a reward for each step that ends on it."""
        assert self.limit is not None
        return (self.limit - (distance - 1).clamp(min=0)).clamp(min=0)


class Darkroom(TaskEnv):
    """A hidden goal in a dark room: a reward of 1 for every step that ends on it. A task is a goal."""

    def __init__(self, size: int = 9, limit: int = 20) -> None:
        super().__init__(size, limit)
        self.num_tasks = self.num_cells
        self.center = self.cell(size // 2, size // 2)

    def start(self, task: Tensor) -> State:
        return {"task": task, "place": torch.full_like(task, self.center)}

    def step(self, state: State, action: Tensor, rand: Tensor) -> tuple[State, Tensor, Tensor]:
        place = self.move(state["place"], action)
        reward = (place == state["task"]).float()
        return state | {"place": place}, reward, torch.zeros_like(reward, dtype=torch.bool)

    def best_action(self, state: State) -> Tensor:
        return self.toward(state["place"], state["task"])

    def optimum(self, task: Tensor) -> Tensor:
        return self._stay_return(self.distance(torch.full_like(task, self.center), task)).float()

    def label(self, task: int) -> str:
        return f"({task // self.size},{task % self.size})"

    def goals(self, task: int) -> tuple[int, ...]:
        return (task,)


class DarkroomPermuted(TaskEnv):
    """A goal in the far corner, but each task has another meaning of the five actions: 120 permutations."""

    def __init__(self, size: int = 9, limit: int = 50) -> None:
        super().__init__(size, limit)
        permutations = list(itertools.permutations(range(self.actions)))
        self._permutations = DeviceTable(torch.tensor(permutations))
        self._labels = ["".join(map(str, permutation)) for permutation in permutations]
        self.num_tasks = len(permutations)
        self.goal = self.cell(size - 1, size - 1)

    def start(self, task: Tensor) -> State:
        return {"task": task, "place": torch.zeros_like(task)}

    def step(self, state: State, action: Tensor, rand: Tensor) -> tuple[State, Tensor, Tensor]:
        meaning = self._permutations.on(action.device)[state["task"], action]
        place = self.move(state["place"], meaning)
        reward = (place == self.goal).float()
        return state | {"place": place}, reward, torch.zeros_like(reward, dtype=torch.bool)

    def best_action(self, state: State) -> Tensor:
        meaning = self.toward(state["place"], torch.full_like(state["place"], self.goal))
        return (self._permutations.on(meaning.device)[state["task"]] == meaning[:, None]).long().argmax(1)

    def optimum(self, task: Tensor) -> Tensor:
        return self._stay_return(torch.full_like(task, 2 * (self.size - 1))).float()

    def label(self, task: int) -> str:
        return self._labels[task]

    def goals(self, task: int) -> tuple[int, ...]:
        return (self.goal,)


class KeyToDoor(TaskEnv):
    """A hidden key and a hidden door: a reward of 1 for the key, and then one for the door. A task is a pair of cells."""

    train_share = 0.95

    def __init__(self, size: int = 9, limit: int = 50) -> None:
        super().__init__(size, limit)
        self.num_tasks = self.num_cells**2
        self.num_states = 2 * self.num_cells
        self.center = self.cell(size // 2, size // 2)

    def start(self, task: Tensor) -> State:
        no = torch.zeros_like(task, dtype=torch.bool)
        return {"task": task, "place": torch.full_like(task, self.center), "has_key": no, "is_open": no}

    def step(self, state: State, action: Tensor, rand: Tensor) -> tuple[State, Tensor, Tensor]:
        place = self.move(state["place"], action)
        finds_key = ~state["has_key"] & (place == state["task"] // self.num_cells)
        opens = state["has_key"] & ~state["is_open"] & (place == state["task"] % self.num_cells)
        reward = (finds_key | opens).float()
        after = {"place": place, "has_key": state["has_key"] | finds_key, "is_open": state["is_open"] | opens}
        return state | after, reward, torch.zeros_like(opens)

    def source_state(self, state: State) -> Tensor:
        return state["place"] + self.num_cells * state["has_key"].long()

    def best_action(self, state: State) -> Tensor:
        target = torch.where(state["has_key"], state["task"] % self.num_cells, state["task"] // self.num_cells)
        return self.toward(state["place"], target)

    def optimum(self, task: Tensor) -> Tensor:
        assert self.limit is not None
        key, door = task // self.num_cells, task % self.num_cells
        to_key = self.distance(torch.full_like(key, self.center), key).clamp(min=1)
        to_door = self.distance(key, door).clamp(min=1)
        return (to_key <= self.limit).float() + (to_key + to_door <= self.limit).float()

    def label(self, task: int) -> str:
        key, door = divmod(task, self.num_cells)
        return f"({key // self.size},{key % self.size})->({door // self.size},{door % self.size})"

    def goals(self, task: int) -> tuple[int, ...]:
        return divmod(task, self.num_cells)


WORLDS: dict[str, type[Darkroom | DarkroomPermuted | KeyToDoor]] = {
    "darkroom": Darkroom,
    "darkroom-permuted": DarkroomPermuted,
    "key-to-door": KeyToDoor,
}


def make_env(world: str, size: int, limit: int | None) -> TaskEnv:
    """Returns an environment by its name; `limit` is the length of an episode, by default the environment's own."""
    if world not in WORLDS:
        raise Problem(f"there is no world {world!r}: {', '.join(WORLDS)}")
    return WORLDS[world](size) if limit is None else WORLDS[world](size, limit)
