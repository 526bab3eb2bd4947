"""Checks an environment. Messages name the environment, the method and the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drivetrain.outcomes import Problem
from drivetrain.tasks.rl.envs import Env, State, select_rows
from drivetrain.tasks.rl.episode_random import episode_uniform

NUM_CHECK_STEPS = 3
"""Steps of every environment that are played and checked before the first collection."""


def check_env(env: Any, task: str) -> Env:
    """Checks the attributes of the environment that a task's env() returned, and returns it; takes no step."""
    name = type(env).__name__
    if not isinstance(env, Env):
        gym = "; Gymnasium's are played by their name: drivetrain train gym world=NAME" if hasattr(env, "action_space") else ""
        raise Problem(f"{task}.env() gave a {name}, which is no Env: derive it from drivetrain.tasks.rl.envs.Env{gym}")
    for method in ("reset", "step", "observe"):
        if getattr(type(env), method) is getattr(Env, method):
            raise Problem(f"{name} has no {method}(): an environment needs reset, step and observe")
    _check_whole_number(env, "actions", 1)
    _check_whole_number(env, "agents", 1)
    _check_whole_number(env, "chances", 0)
    if env.limit is not None:
        _check_whole_number(env, "limit", 1)
    if not isinstance(env.shape, tuple):
        raise Problem(f"{name}.shape is {env.shape!r}: write it as a tuple, such as (4,)")
    if not env.shape or not all(_is_whole_number(size) and size > 0 for size in env.shape):
        raise Problem(f"{name}.shape is {env.shape!r}: it must be the sizes of one agent's observation, each at least 1, such as (4,)")
    return env


def _is_whole_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_whole_number(env: Env, attribute: str, minimum: int) -> None:
    value = getattr(env, attribute)
    if not _is_whole_number(value) or value < minimum:
        none = ", or None where episodes are not truncated" if attribute == "limit" else ""
        raise Problem(f"{type(env).__name__}.{attribute} is {value!r}: it must be a whole number, at least {minimum}{none}")


def check_reset(env: Env, state: Any, rows: int) -> None:
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) and v.dim() and len(v) == rows for v in state.values()):
        raise Problem(f"{type(env).__name__}.reset() must give a dict of tensors, each with {rows} rows, one an environment")


def check_first_steps(env: Env, state: State) -> None:
    """Plays some steps of every environment, with different actions at each step, and checks everything that they return."""
    _check_observation(env, state, "after reset()")
    rows, device = len(next(iter(state.values()))), next(iter(state.values())).device
    action_shape = (rows,) if env.agents == 1 else (rows, env.agents)
    episodes = torch.arange(rows, device=device)
    for number in range(1, NUM_CHECK_STEPS + 1):
        action = (torch.arange(rows * env.agents, device=device) + number - 1).view(action_shape) % env.actions
        rand = episode_uniform(episodes, number, 2 * env.chances)
        where = f"at step {number}"
        returned = env.step(state, action, rand[:, : env.chances])
        after, terminated = _check_step(env, state, returned, list(action_shape), where)
        _check_observation(env, after, where)
        done = terminated.view(rows, -1).all(1)
        state = select_rows(done, env.reset(rand[:, env.chances :]), after)


def _check_observation(env: Env, state: State, where: str) -> None:
    name, rows = type(env).__name__, len(next(iter(state.values())))
    observation = env.observe(state)
    if not isinstance(observation, Tensor):
        raise Problem(f"{name}.observe() gave a {type(observation).__name__} {where}: it must be a tensor of float32")
    if observation.dtype != torch.float32:
        raise Problem(f"{name}.observe() gave {observation.dtype} {where}: it must be a tensor of float32 (add .float())")
    expected = [rows, *env.shape] if env.agents == 1 else [rows, env.agents, *env.shape]
    if list(observation.shape) != expected:
        raise Problem(
            f"{name}.observe() gave {list(observation.shape)} {where}, not {expected}: rows{', agents' * (env.agents > 1)}, then `shape`"
        )
    if not _is_finite(observation):
        raise Problem(f"{name}.observe() gave {_first_nonfinite(observation)} {where}: observations must be finite numbers")


def _check_step(env: Env, state: State, returned: Any, shape: list[int], where: str) -> tuple[State, Tensor]:
    """Checks what a step returned; returns its state and terminations."""
    name = type(env).__name__
    if not isinstance(returned, tuple) or len(returned) != 3 or not isinstance(returned[0], dict):
        form = f"{len(returned)} values" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
        raise Problem(f"{name}.step() gave {form}: it must return (state, reward, terminated), the state as reset() makes it")
    after, reward, terminated = returned
    for label, value in (("a reward", reward), ("terminations", terminated)):
        if not isinstance(value, Tensor):
            raise Problem(f"{name}.step() gave {label} as a {type(value).__name__}, not as a tensor of shape {shape}")
        if list(value.shape) != shape:
            raise Problem(f"{name}.step() gave {label} of shape {list(value.shape)}, not {shape}")
    if terminated.dtype != torch.bool:
        raise Problem(f"{name}.step() gave terminations as {terminated.dtype}: they must be true or false (torch.bool)")
    if reward.is_complex() or not _is_finite(reward):
        raise Problem(f"{name}.step() gave a reward of {_first_nonfinite(reward)} {where}: rewards must be finite numbers")
    _check_state(name, state, after)
    return after, terminated


def _check_state(name: str, state: State, after: State) -> None:
    """Raises Problem if the state after a step has other names, shapes or dtypes than the one of reset()."""
    if additional := [key for key in after if key not in state]:
        raise Problem(f"{name}.step() gave a state {additional[0]!r} that reset() does not make: both must have the same names")
    for key, value in state.items():
        new = after.get(key)
        if not isinstance(new, Tensor) or new.shape != value.shape or new.dtype != value.dtype:
            if new is None:
                form = "nothing"
            elif isinstance(new, Tensor):
                form = f"{new.dtype} of shape {list(new.shape)}"
            else:
                form = f"a {type(new).__name__}"
            raise Problem(f"{name}.step() gave {form} for state {key!r}, which reset() makes {value.dtype} of shape {list(value.shape)}")


def _is_finite(values: Tensor) -> bool:
    return values.is_meta or bool(values.isfinite().all())  # a meta tensor has no values to check


def _first_nonfinite(values: Tensor) -> str:
    """Returns the first value that is not finite, as text, and its environment."""
    rows, *_ = (~values.isfinite()).nonzero(as_tuple=True)
    if not len(rows):
        return str(values.dtype)
    row = int(rows[0])
    nonfinite = values[row][~values[row].isfinite()] if values.dim() > 1 else values[row : row + 1]
    return f"{float(nonfinite.flatten()[0])} in environment {row}"


# --- during training: the host must not wait for the device, so each environment's first fault is stored in the state ---


def first_fault(earlier_faults: Tensor, collections: Tensor, reward: Tensor, observation: Tensor) -> Tensor:
    """Returns for each environment the first step of the run that gave a value that is not finite.

    0 means none; otherwise it is 2 * step + 1 for an observation, 2 * step + 2 for a reward. `reward` and `observation` are those
    of one collection, [environments, steps, ...].
    """
    steps = reward.shape[1]
    # A sum is not finite if one of its terms is not, so each collection is read only once. Keys: 0 for observations, 1 for rewards.
    sums = {1: reward.flatten(2).sum(2)} | ({0: observation.flatten(2).sum(2)} if observation.is_floating_point() else {})
    step = (collections - 1)[:, None] * steps + torch.arange(steps, device=reward.device)
    none = torch.iinfo(torch.int64).max
    first = torch.stack([torch.where(total.isfinite(), none, 2 * step + kind + 1).amin(1) for kind, total in sums.items()]).amin(0)
    return torch.where((earlier_faults == 0) & (first < none), first, earlier_faults)


def fault_text(env: Env, faults: Tensor, steps: int) -> str:
    """Describes the earliest fault that `first_fault` found, for the user; empty if there is none."""
    rows = faults.nonzero()[:, 0]
    if not len(rows):
        return ""
    row = int(rows[faults[rows].argmin()])
    step, kind = divmod(int(faults[row]) - 1, 2)
    method = "step() gave a reward" if kind else "observe() gave a value"
    where = f"environment {row}, step {step % steps + 1} of collection {step // steps + 1:,}"
    return f"{type(env).__name__}.{method} that is not finite (nan or inf): {where}"
