"""Gymnasium's environments are learned, resumed bit for bit, or refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from torch import Tensor

from drivetrain.outcomes import Problem
from drivetrain.tasks.rl.gym import Gym
from drivetrain.tasks.rl.samples import columns_of
from tests.command import expect_error, run_ok
from tests.rl.test_ppo import SequentialRand, TenTimesCount

SMALL = ["epochs=3", "envs=4", "horizon=32", "global_batch=64", "eval_episodes=2", "log_every=1"]


@pytest.mark.system  # slow
def test_acrobot_is_learned(folder: Path) -> None:
    run_ok("train", "gym", "world=Acrobot-v1", "epochs=30", "--name", "one")
    last_row = [json.loads(line) for line in Path("runs/one/metrics.jsonl").read_text().splitlines()][-1]
    assert last_row["eval/return"] > -120, last_row  # random actions end at -500


@pytest.mark.system  # slow
def test_an_interrupted_run_equals_an_uninterrupted_one(folder: Path) -> None:
    assert "bit-equal" in run_ok("verify-resume", "gym", "world=Acrobot-v1", "--steps", "24", *SMALL)


@pytest.mark.parametrize(
    ("world", "words"),
    [
        ("Acrobut-v1", "world=Acrobut-v1: Environment `Acrobut` doesn't exist. Did you mean: `Acrobot`?"),
        ("Pendulum-v1", "Pendulum-v1 takes actions of Box(-2.0, 2.0, (1,), float32): only Discrete actions"),
        ("Blackjack-v1", "Blackjack-v1 has observations of Tuple: only Box and Discrete"),
    ],
)
def test_an_unsupported_environment_is_named(world: str, words: str, folder: Path) -> None:
    assert words in expect_error("train", "gym", f"world={world}")


def test_numbered_observations(folder: Path) -> None:
    run_ok("train", "gym", "world=FrozenLake-v1", *SMALL, "--name", "one")
    run_ok("export", "one", "-q")
    card = json.loads(Path("runs/one/model/export.json").read_text())
    assert list(card["graphs"]) == ["policy"] and card["graphs"]["policy"]["inputs"][0]["shape"] == ["rows", 1, 16]


class Short(gymnasium.Env[np.ndarray, int]):
    """Truncates after 10 steps; the observation is the number of the step, and 1000 after the end."""

    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Box(-2000, 2000, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        self.count += 1
        return np.full(1, self.count if self.count <= 10 else 1000, np.float32), 1.0, False, self.count >= 10, {}


def register(name: str, **change: Any) -> str:
    """Registers an environment like `Short` with other attributes or methods; returns its name."""
    gymnasium.register(f"{name}-v0", entry_point=type(name, (Short,), change), max_episode_steps=100)
    return f"{name}-v0"


def collect(world: str, horizon: int = 25) -> dict[str, Tensor]:
    task = Gym(world=world, envs=2, horizon=horizon, global_batch=2 * horizon, eval_episodes=2, scale_rewards=False)
    batch = task.train_data().collect(TenTimesCount(), SequentialRand(2), lambda t: t)[:]
    return columns_of(batch) | {"observation": batch["observation"]}


def test_a_truncated_episode_ends_and_counts_the_next_value() -> None:
    columns = collect(register("Cut"))
    assert columns["observation"].view(2, 25)[0].tolist() == [*range(10), *range(10), *range(5)], "no step after the end becomes a sample"
    assert columns["length"].tolist() == [10.0] * 50
    targets = columns["target"].view(2, 25)[0]
    assert targets[9] == targets[19] == 1 + 0.99 * 100, "the observation after truncation (10) has the value 100"


def test_a_terminated_episode_counts_no_next_value() -> None:
    def step(self: Short, action: int) -> Any:
        seen, reward, _, cut, info = Short.step(self, action)
        return seen, reward, cut, False, info

    assert collect(register("Dead", step=step))["target"].view(2, 25)[0][9] == 1.0


def image(*shape: int, high: int = 255, kind: Any = np.uint8) -> dict[str, Any]:
    """Returns attributes of an environment that shows one picture, all 0 except at [1, 0, 0]."""
    picture = np.zeros(shape, kind)
    picture[1, 0, 0] = high
    return {
        "observation_space": gymnasium.spaces.Box(0, high, shape, kind),
        "reset": lambda self, seed=None, options=None: (picture, {}),
        "step": lambda self, action: (picture, 0.0, False, False, {}),
    }


@pytest.mark.parametrize(
    ("name", "shape", "expected", "words"),
    [
        ("Rows", (6, 5, 3), (3, 6, 5), "read as height x width x channels\n"),
        ("Grey", (6, 5, 1), (1, 6, 5), "read as height x width x channels\n"),
        ("Planes", (4, 6, 5), (4, 6, 5), ""),
        ("Either", (3, 5, 3), (3, 3, 5), "if they are channels x height x width, let the environment"),
        ("Neither", (6, 5, 2), (6, 5, 2), "read as channels x height x width (neither end"),
    ],
)
def test_images_become_channels_first_and_are_scaled(
    name: str, shape: tuple[int, ...], expected: tuple[int, ...], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    world = register(name, **image(*shape))
    observation = collect(world, horizon=2)["observation"]
    assert tuple(observation.shape[1:]) == expected
    bright = observation[0].nonzero().tolist()
    assert bright == [[0, 1, 0]] if expected != shape else bright == [[1, 0, 0]]
    assert float(observation.max()) == 1.0
    notices = capfd.readouterr().err
    assert words in notices and (bool(words) or "read as" not in notices)
    assert f"{world}: observations are divided by 255, so that they are 0..1" in notices


def with_faulty_step(method: str, **change: Any) -> dict[str, Any]:
    """Returns a method for `Short` whose observation or reward is replaced from the third step on."""

    def step(self: Short, action: int) -> Any:
        seen, reward, ended, cut, info = Short.step(self, action)
        if self.count < 3:
            return seen, reward, ended, cut, info
        return change.get("seen", seen), change.get("reward", reward), ended, cut, info

    return {method: step}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("NanSeen", with_faulty_step("step", seen=np.full(1, np.nan, np.float32)), "NanSeen-v0 step() at step 3 gave an observation of nan"),
        ("InfReward", with_faulty_step("step", reward=float("inf")), "InfReward-v0 step() at step 3 gave a reward of inf: rewards must be finite"),
        ("NoReward", with_faulty_step("step", reward="one"), "NoReward-v0 step() at step 3 gave a reward of str: it must be a number"),
        ("Wide", with_faulty_step("step", seen=np.zeros(2, np.float32)), "Wide-v0 step() at step 3 gave an observation of shape [2]: its space says [1]"),
        ("Four", {"step": lambda self, action: (np.zeros(1, np.float32), 0.0, False, {})}, "Four-v0 step() at step 1"),
        ("Bare", {"reset": lambda self, seed=None, options=None: np.zeros(1, np.float32)}, "Bare-v0 reset("),
        ("Empty", {"observation_space": gymnasium.spaces.Box(0, 1, (), np.float32)}, "Empty-v0 has observations of Box(0.0, 1.0, (), float32)"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_faults_of_an_environment_name_it_and_the_step(name: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(Problem) as refused:
        collect(register(name, **change))
    assert words in str(refused.value)


@pytest.mark.filterwarnings("ignore")
def test_an_environment_that_fails_in_its_own_code_keeps_its_traceback() -> None:
    def step(self: Short, action: int) -> Any:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        collect(register("Failing", step=step))
