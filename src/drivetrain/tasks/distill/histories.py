"""Learning histories: what a learner saw, did and got, from its first step to its last, for every task in many streams.

A folder of histories holds `histories.json` and an array for each field of guide 002, [tasks, streams, steps, ...], which are
read through memory maps. `histories.json` is written last, so a folder without it is not complete.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drivetrain.outcomes import Problem
from drivetrain.tasks.distill.envs import TaskEnv, make_env
from drivetrain.tasks.rl.episode_random import episode_uniform

FORMAT = 1
INDEX = "histories.json"
FIELDS = ("states", "actions", "rewards", "next_states", "dones", "compress_markers")
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
    shutil.rmtree(folder, ignore_errors=True)
    hidden.rename(folder)


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
    shape = (len(facts.tasks), facts.streams, facts.steps)
    for name, array in arrays.items():
        if array.shape[:3] != shape:
            raise Problem(f"{folder}/{name}.npy has the shape {array.shape[:3]}, not {shape} as {INDEX} says: collect again")
    places = [
        torch.from_numpy(arrays[name][..., 0].astype(np.int16) * facts.size + arrays[name][..., 1]) for name in ("states", "next_states")
    ]
    action = torch.from_numpy(np.array(arrays["actions"]))
    if int(action.max()) >= facts.env().actions or max(int(p.max()) for p in places) >= facts.size**2:
        raise Problem(f"{folder} has actions or places that {facts.world} does not have: it was recorded in another environment")
    return Histories(facts, places[0], action, torch.from_numpy(np.array(arrays["rewards"])), places[1])


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
        sizes, version = index.pop("files"), index.pop("format")
        facts = Facts(**index | {"tasks": tuple(index["tasks"])})
        facts.env()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Problem(f"{folder / INDEX} cannot be read ({error}): collect again") from None
    if version != FORMAT:
        raise Problem(f"{folder} has histories of format {version}; this version reads format {FORMAT}")
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
    task = torch.tensor(tasks).repeat_interleave(streams)
    streams_id = torch.arange(len(task)) + seed * 1_000_003
    columns: dict[str, list[Tensor]] = {"place": [], "action": [], "reward": [], "next_place": []}
    state = env.start(task)
    for step in range(steps):
        if step % env.limit == 0:
            state = env.start(task)
        uniform = episode_uniform(streams_id, step, 2)
        random_action = (uniform[:, 1] * env.actions).long().clamp(max=env.actions - 1)
        action = torch.where(uniform[:, 0] < 1 - step / steps, random_action, env.best_action(state))
        columns["place"].append(state["place"].to(torch.int16))
        state, reward, _ = env.step(state, action, uniform[:, :0])
        columns["action"].append(action.to(torch.uint8))
        columns["reward"].append(reward)
        columns["next_place"].append(state["place"].to(torch.int16))
    facts = Facts(world, size, env.limit, tuple(tasks), streams, steps, region, 0, "noise")
    return Histories(facts, **{name: torch.stack(values, 1).unflatten(0, (len(tasks), streams)) for name, values in columns.items()})
