"""Faults of a world are named, with the world, the method and the step, before they become a riddle elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drivetrain.outcomes import Problem
from drivetrain.tasks.rl.chance import chance
from drivetrain.tasks.rl.envs import Env, State, merged

FIRST_STEPS = 3  # steps that every environment plays before the first collection, to be checked


def checked(env: Any, task: str) -> Env:
    """Returns what a task's env() gave, if it can be a world; needs no step of it."""
    name = type(env).__name__
    if not isinstance(env, Env):
        gym = "; Gymnasium's are played by their name: drivetrain train gym world=NAME" if hasattr(env, "action_space") else ""
        raise Problem(f"{task}.env() gave a {name}, which is no Env: derive it from drivetrain.tasks.rl.envs.Env{gym}")
    for method in ("reset", "step", "observe"):
        if getattr(type(env), method) is getattr(Env, method):
            raise Problem(f"{name} has no {method}(): a world needs reset, step and observe")
    _whole(env, "actions", 1)
    _whole(env, "agents", 1)
    _whole(env, "chances", 0)
    if env.limit is not None:
        _whole(env, "limit", 1)
    if not isinstance(env.shape, tuple):
        raise Problem(f"{name}.shape is {env.shape!r}: write it as a tuple, such as (4,)")
    if not env.shape or not all(_is_whole(size) and size > 0 for size in env.shape):
        raise Problem(f"{name}.shape is {env.shape!r}: it must be the sizes of one agent's observation, each at least 1, such as (4,)")
    return env


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(env: Env, field: str, least: int) -> None:
    value = getattr(env, field)
    if not _is_whole(value) or value < least:
        none = ", or None where episodes are not cut off" if field == "limit" else ""
        raise Problem(f"{type(env).__name__}.{field} is {value!r}: it must be a whole number, at least {least}{none}")


def check_reset(env: Env, world: Any, rows: int) -> None:
    if not isinstance(world, dict) or not all(isinstance(v, Tensor) and v.dim() and len(v) == rows for v in world.values()):
        raise Problem(f"{type(env).__name__}.reset() must give a dict of tensors, each with {rows} rows, one an environment")


def check_first_steps(env: Env, world: State) -> None:
    """Plays some steps of every environment, with other actions at each, and looks at all that they give."""
    _check_observation(env, world, "after reset()")
    rows, device = len(next(iter(world.values()))), next(iter(world.values())).device
    players = (rows,) if env.agents == 1 else (rows, env.agents)
    episodes = torch.arange(rows, device=device)
    for number in range(1, FIRST_STEPS + 1):
        action = (torch.arange(rows * env.agents, device=device) + number - 1).view(players) % env.actions
        draws = chance(episodes, number, 2 * env.chances)
        where = f"at step {number}"
        given = env.step(world, action, draws[:, : env.chances])
        after, ended = _check_step(env, world, given, list(players), where)
        _check_observation(env, after, where)
        over = ended.view(rows, -1).all(1)
        world = merged(over, env.reset(draws[:, env.chances :]), after)


def _check_observation(env: Env, world: State, where: str) -> None:
    name, rows = type(env).__name__, len(next(iter(world.values())))
    seen = env.observe(world)
    if not isinstance(seen, Tensor):
        raise Problem(f"{name}.observe() gave a {type(seen).__name__} {where}: it must be a tensor of float32")
    if seen.dtype != torch.float32:
        raise Problem(f"{name}.observe() gave {seen.dtype} {where}: it must be a tensor of float32 (add .float())")
    expected = [rows, *env.shape] if env.agents == 1 else [rows, env.agents, *env.shape]
    if list(seen.shape) != expected:
        raise Problem(
            f"{name}.observe() gave {list(seen.shape)} {where}, not {expected}: rows{', agents' * (env.agents > 1)}, then `shape`"
        )
    if not _is_finite(seen):
        raise Problem(f"{name}.observe() gave {_odd(seen)} {where}: observations must be finite numbers")


def _check_step(env: Env, world: State, given: Any, players: list[int], where: str) -> tuple[State, Tensor]:
    name = type(env).__name__
    if not isinstance(given, tuple) or len(given) != 3 or not isinstance(given[0], dict):
        parts = f"{len(given)} values" if isinstance(given, tuple) else f"a {type(given).__name__}"
        raise Problem(f"{name}.step() gave {parts}: it must return (state, reward, ended), the state as reset() makes it")
    after, reward, ended = given
    for what, value in (("a reward", reward), ("ends", ended)):
        if not isinstance(value, Tensor):
            raise Problem(f"{name}.step() gave {what} as a {type(value).__name__}, not as a tensor of shape {players}")
        if list(value.shape) != players:
            raise Problem(f"{name}.step() gave {what} of shape {list(value.shape)}, not {players}")
    if ended.dtype != torch.bool:
        raise Problem(f"{name}.step() gave ends as {ended.dtype}: they must be true or false (torch.bool)")
    if reward.is_complex() or not _is_finite(reward):
        raise Problem(f"{name}.step() gave a reward of {_odd(reward)} {where}: rewards must be finite numbers")
    if more := [key for key in after if key not in world]:
        raise Problem(f"{name}.step() gave a state {more[0]!r} that reset() does not make: both must have the same names")
    for key, value in world.items():
        new = after.get(key)
        if not isinstance(new, Tensor) or new.shape != value.shape or new.dtype != value.dtype:
            now = (
                "nothing"
                if new is None
                else f"{new.dtype} of shape {list(new.shape)}"
                if isinstance(new, Tensor)
                else f"a {type(new).__name__}"
            )
            raise Problem(f"{name}.step() gave {now} for state {key!r}, which reset() makes {value.dtype} of shape {list(value.shape)}")
    return after, ended


def _is_finite(values: Tensor) -> bool:
    return values.is_meta or bool(values.isfinite().all())  # a tensor without values has none that is odd


def _odd(values: Tensor) -> str:
    """The first value that is not finite, as text, and the environment it is of."""
    rows, *_ = (~values.isfinite()).nonzero(as_tuple=True)
    if not len(rows):
        return str(values.dtype)
    row = int(rows[0])
    odd = values[row][~values[row].isfinite()] if values.dim() > 1 else values[row : row + 1]
    return f"{float(odd.flatten()[0])} in environment {row}"


# --- while it is played: nothing may wait for the device, so each environment's first fault is noted in the state ---


def first_fault(known: Tensor, collections: Tensor, reward: Tensor, seen: Tensor) -> Tensor:
    """For each environment, the first step of the run that gave what is not finite: 0 for none, else a number that `fault_text` reads.
    `reward` and `seen` are of one collection, [environments, steps, ...]; `known` is what was noted before."""
    steps = reward.shape[1]
    # A sum is not finite where a part is not, and reads the collection only once.
    sums = {1: reward.flatten(2).sum(2)} | ({0: seen.flatten(2).sum(2)} if seen.is_floating_point() else {})
    step = (collections - 1)[:, None] * steps + torch.arange(steps, device=reward.device)
    none = torch.iinfo(torch.int64).max
    first = torch.stack([torch.where(total.isfinite(), none, 2 * step + kind + 1).amin(1) for kind, total in sums.items()]).amin(0)
    return torch.where((known == 0) & (first < none), first, known)


def fault_text(env: Env, faults: Tensor, steps: int) -> str:
    """What `first_fault` noted, for the user; empty where it noted nothing."""
    rows = faults.nonzero()[:, 0]
    if not len(rows):
        return ""
    row = int(rows[faults[rows].argmin()])
    step, kind = divmod(int(faults[row]) - 1, 2)
    method = "step() gave a reward" if kind else "observe() gave a value"
    where = f"environment {row}, step {step % steps + 1} of collection {step // steps + 1:,}"
    return f"{type(env).__name__}.{method} that is not finite (nan or inf): {where}"
