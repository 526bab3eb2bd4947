"""Learning histories: what a learner saw, did and got, from its first step to its last, for every task in many streams.

A folder of histories holds `histories.json` and an array for each field of guide 002, [tasks, streams, steps, ...], which are
read through memory maps. `histories.json` is written last, so a folder without it is not complete.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drivetrain.outcomes import Problem
from drivetrain.settings import brief
from drivetrain.tasks.distill.envs import TaskEnv, make_env
from drivetrain.tasks.rl.episode_random import episode_uniform

FORMAT = 1
MAX_SIZE = 181
"""Largest width of a room, whose cells fit in 16 bits."""
INDEX = "histories.json"
FIELDS = ("states", "actions", "rewards", "next_states", "dones", "compress_markers")
TYPES = {"states": np.uint8, "actions": np.uint8, "rewards": np.float32, "next_states": np.uint8}
BYTES_OF_STEP = 9
MAX_NOISE_BYTES = 4_000_000_000
"""Most memory of histories that are made, not recorded."""
CHECKED_TASKS, CHECKED_EPISODES = 100, 4
"""What is played again to see whether histories are of the environment that their index names: the first stream of so many tasks."""
MARKER_START, MARKER_END = 1, 2
"""Values of `compress_markers` at the first and the last step of a region; 0 elsewhere."""


@dataclass(frozen=True)
class Facts:
    """What histories were recorded in, and how."""

    world: str
    size: int
    limit: int
    """Steps of an episode."""
    tasks: tuple[int, ...]
    """The tasks' numbers, in the order of the arrays."""
    streams: int
    steps: int
    region: int
    """Steps between two region markers."""
    split_seed: int
    """Seed of the shuffle that determines which tasks are held out."""
    learner: str

    def env(self) -> TaskEnv:
        return make_env(self.world, self.size, self.limit)

    @staticmethod
    def from_json(values: dict[str, Any]) -> Facts:
        """Returns the facts of a JSON object. A ValueError says what is wrong with them."""
        names = [field.name for field in fields(Facts)]
        if values.keys() != set(names):
            raise ValueError(f"its keys are not {', '.join(names)}")
        for name in ("world", "learner"):
            _check(isinstance(values[name], str), name, values, "text")
        for name in ("size", "limit", "streams", "steps", "region"):
            low, high = (2, MAX_SIZE) if name == "size" else (1, 2**31 - 1)
            _check(_is_whole(values[name]) and low <= values[name] <= high, name, values, f"a whole number from {low} to {high:,}")
        _check(_is_whole(values["split_seed"]), "split_seed", values, "a whole number")
        _check(isinstance(values["tasks"], list) and all(map(_is_whole, values["tasks"])), "tasks", values, "a list of whole numbers")
        facts = Facts(**values | {"tasks": tuple(values["tasks"])})
        num_tasks = facts.env().num_tasks
        is_valid = len(facts.tasks) == len(set(facts.tasks)) > 0 and 0 <= min(facts.tasks) <= max(facts.tasks) < num_tasks
        _check(is_valid, "tasks", values, f"a list of different numbers from 0 to {num_tasks - 1}")
        return facts


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(is_valid: bool, name: str, values: dict[str, Any], expected: str) -> None:
    if not is_valid:
        raise ValueError(f"{name} is {brief(values[name])}, not {expected}")


@dataclass(frozen=True)
class Histories:
    """Histories as tensors: cells and actions are whole numbers."""

    facts: Facts
    place: Tensor
    """[tasks, streams, steps]: the player's cell before each action."""
    action: Tensor
    reward: Tensor
    next_place: Tensor
    """The cell after each action; at the end of an episode, the one before the next episode begins."""

    def returns(self) -> Tensor:
        """Returns the mean return of each episode over the streams: [tasks, episodes]."""
        limit = self.facts.limit
        num_episodes = self.facts.steps // limit
        returns: Tensor = self.reward[..., : num_episodes * limit].float().unflatten(-1, (num_episodes, limit)).sum(-1)
        return returns.mean(1)

    def split(self) -> tuple[list[int], list[int]]:
        """Returns the rows of the tasks to train on, and of those held out."""
        train, held_out = self.facts.env().split(self.facts.split_seed)
        rows = {task: row for row, task in enumerate(self.facts.tasks)}
        return [rows[task] for task in train if task in rows], [rows[task] for task in held_out if task in rows]


def write(folder: Path, histories: Histories) -> None:
    """Writes a folder of histories; an earlier one is replaced."""
    facts = histories.facts
    hidden = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    for name, array in _arrays(histories).items():
        np.save(hidden / f"{name}.npy", array)
    index = {"format": FORMAT, **asdict(facts), "files": {name: (hidden / f"{name}.npy").stat().st_size for name in FIELDS}}
    (hidden / INDEX).write_text(json.dumps(index))
    earlier = folder.with_name(f"{hidden.name}.earlier")
    shutil.rmtree(earlier, ignore_errors=True)
    if has_earlier := folder.exists():
        folder.rename(earlier)
    try:
        hidden.rename(folder)
    except BaseException:
        if has_earlier:
            earlier.rename(folder)
        raise
    shutil.rmtree(earlier, ignore_errors=True)


def _arrays(histories: Histories) -> dict[str, np.ndarray]:
    facts = histories.facts
    step = np.arange(facts.steps)
    markers = np.where(step % facts.region == 0, MARKER_START, 0)
    markers = np.where(step % facts.region == facts.region - 1, MARKER_END, markers)
    shape = histories.place.shape
    return {
        "states": _coordinates(histories.place, facts.size),
        "actions": histories.action.numpy().astype(np.uint8),
        "rewards": histories.reward.numpy().astype(np.float32),
        "next_states": _coordinates(histories.next_place, facts.size),
        "dones": np.broadcast_to(step % facts.limit == facts.limit - 1, shape),
        "compress_markers": np.broadcast_to(markers.astype(np.uint8), shape),
    }


def _coordinates(place: Tensor, size: int) -> np.ndarray:
    """Returns (row, column) of cells."""
    return np.stack((place.numpy() // size, place.numpy() % size), -1).astype(np.uint8)


def read(text: str) -> Histories:
    """Returns the histories of a folder, or of a run that recorded some; arrays are memory maps."""
    folder = _folder(Path(text).expanduser())
    facts = _read_facts(folder)
    arrays = {name: _read_array(folder, name) for name in ("states", "actions", "rewards", "next_states")}
    _check_arrays(folder, facts, arrays)
    places = [
        torch.from_numpy(arrays[name][..., 0].astype(np.int16) * facts.size + arrays[name][..., 1]) for name in ("states", "next_states")
    ]
    action, reward = torch.from_numpy(np.array(arrays["actions"])), torch.from_numpy(np.array(arrays["rewards"]))
    histories = Histories(facts, places[0], action, reward, places[1])
    _check_rules(folder, histories)
    return histories


def _check_arrays(folder: Path, facts: Facts, arrays: dict[str, np.ndarray]) -> None:
    """Raises Problem for arrays of other shapes or types than the index says, and for values that the environment does not have."""
    for name, array in arrays.items():
        shape = (len(facts.tasks), facts.streams, facts.steps, *((2,) if name in ("states", "next_states") else ()))
        if array.shape[:3] != shape[:3]:
            raise Problem(f"{folder}/{name}.npy has the shape {array.shape[:3]}, not {shape[:3]} as {INDEX} says: collect again")
        if array.shape != shape or array.dtype != TYPES[name]:
            raise Problem(
                f"{folder}/{name}.npy has {array.dtype}{list(array.shape)}, not {np.dtype(TYPES[name])}{list(shape)}: collect again"
            )
    largest = {name: int(array.max()) for name, array in arrays.items() if name != "rewards"}
    if largest["actions"] >= facts.env().actions or max(largest["states"], largest["next_states"]) >= facts.size:
        raise Problem(f"{folder} has actions or places that {facts.world} does not have: it was recorded in another environment")


def _check_rules(folder: Path, histories: Histories) -> None:
    """Raises Problem unless the first episodes are what the environment gives for their actions: they may be of another one."""
    facts, env = histories.facts, histories.facts.env()
    columns = (histories.place, histories.action, histories.reward, histories.next_place)
    place, action, reward, next_place = (values[:CHECKED_TASKS, 0, : CHECKED_EPISODES * facts.limit] for values in columns)
    task = torch.tensor(facts.tasks[:CHECKED_TASKS])
    state, no_rand = env.start(task), torch.zeros(len(task), 0)
    for step in range(place.shape[1]):
        if step % facts.limit == 0:
            state = env.start(task)
        is_equal = state["place"] == place[:, step]
        state, expected, _ = env.step(state, action[:, step].long(), no_rand)
        is_equal &= (expected == reward[:, step]) & (state["place"] == next_place[:, step])
        if not is_equal.all():
            row = int((~is_equal).nonzero()[0, 0])
            raise Problem(
                f"{folder} was not recorded in {facts.world} with size={facts.size} and limit={facts.limit}, as {INDEX} says: step {step} of"
                f" task {env.label(facts.tasks[row])} goes otherwise. Collect again"
            )


def are_at(text: str) -> bool:
    """Returns whether there is anything at a path that `read` may take for histories."""
    path = Path(text).expanduser()
    return any((folder / name).exists() for folder in (path, path / "data") for name in (INDEX, *(f"{field}.npy" for field in FIELDS)))


def _folder(path: Path) -> Path:
    for folder in (path, path / "data"):
        if (folder / INDEX).is_file():
            return folder
    if any((folder / f"{name}.npy").exists() for folder in (path, path / "data") for name in FIELDS):
        raise Problem(f"data={path} is not complete: it has no {INDEX}, which is written last. Collect again")
    raise Problem(f"data={path} has no histories ({INDEX}): give a run of the task `histories`, or data=noise")


def _read_facts(folder: Path) -> Facts:
    try:
        index = json.loads((folder / INDEX).read_text())
        _check(
            isinstance(index, dict) and {"format", "files"} <= index.keys(), "index", {"index": index}, "an object with format and files"
        )
        sizes, version = index.pop("files"), index.pop("format")
        if version != FORMAT:
            raise Problem(f"{folder} has histories of format {brief(version)}; this version reads format {FORMAT}")
        _check(isinstance(sizes, dict) and all(map(_is_whole, sizes.values())), "files", {"files": sizes}, "the sizes of files")
        facts = Facts.from_json(index)
    except (OSError, ValueError, RecursionError) as error:
        raise Problem(f"{folder / INDEX} cannot be read ({error}): collect again") from None
    for name in FIELDS:
        file = folder / f"{name}.npy"
        size = file.stat().st_size if file.is_file() else 0
        if size != sizes.get(name):
            raise Problem(f"{file} has {size:,} bytes of {sizes.get(name, 0):,}: it was not written or copied to its end. Collect again")
    return facts


def _read_array(folder: Path, name: str) -> Any:
    try:
        return np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise Problem(f"{folder}/{name}.npy cannot be read ({error}): collect again") from None


def noisy_histories(
    world: str, size: int, limit: int | None, streams: int, episodes: int, region: int, num_tasks: int | None, seed: int
) -> Histories:
    """Returns histories of an optimal policy whose share of random actions falls from 1 to 0 (noise distillation, AD-eps)."""
    env = make_env(world, size, limit)
    assert env.limit is not None
    train, held_out = env.split(0)
    tasks = (held_out + train)[: num_tasks or env.num_tasks]
    steps = episodes * env.limit
    _check_noise_fits(world, len(tasks), streams, steps)
    task = torch.tensor(tasks).repeat_interleave(streams)
    streams_id = torch.arange(len(task)) + seed * 1_000_003
    types = {"place": torch.int16, "action": torch.uint8, "reward": torch.float32, "next_place": torch.int16}
    columns = {name: torch.empty(len(task), steps, dtype=kind) for name, kind in types.items()}
    state = env.start(task)
    for step in range(steps):
        if step % env.limit == 0:
            state = env.start(task)
        uniform = episode_uniform(streams_id, step, 2)
        random_action = (uniform[:, 1] * env.actions).long().clamp(max=env.actions - 1)
        action = torch.where(uniform[:, 0] < 1 - step / steps, random_action, env.best_action(state))
        after, reward, _ = env.step(state, action, uniform[:, :0])
        for name, values in (("place", state["place"]), ("action", action), ("reward", reward), ("next_place", after["place"])):
            columns[name][:, step] = values
        state = after
    facts = Facts(world, size, env.limit, tuple(tasks), streams, steps, region, 0, "noise")
    return Histories(facts, **{name: values.unflatten(0, (len(tasks), streams)) for name, values in columns.items()})


def _check_noise_fits(world: str, num_tasks: int, streams: int, steps: int) -> None:
    """Raises Problem for histories that would fill the memory."""
    bytes_of_task = streams * steps * BYTES_OF_STEP
    if num_tasks * bytes_of_task > MAX_NOISE_BYTES:
        fewer = MAX_NOISE_BYTES // bytes_of_task
        fix = f"take num_tasks={fewer}, or fewer streams" if fewer > 1 else "take fewer streams or episodes"
        raise Problem(
            f"data=noise would make {num_tasks:,} tasks of {world} x {streams:,} streams x {steps:,} steps:"
            f" {num_tasks * bytes_of_task / 1e9:.1f} GB, more than {MAX_NOISE_BYTES / 1e9:.0f} GB: {fix}"
        )
