"""The environments of algorithm distillation: their rules, their splits and their optimal policies."""

from __future__ import annotations

import pytest
import torch

from drivetrain.outcomes import Problem
from drivetrain.tasks.distill.envs import Darkroom, DarkroomPermuted, KeyToDoor, TaskEnv, make_env

WORLDS = [Darkroom(), Darkroom(17, 40), DarkroomPermuted(), KeyToDoor(5, 30)]


def episode_returns(env: TaskEnv) -> torch.Tensor:
    """Returns what the optimal policy gets in one episode of every task."""
    task = torch.arange(env.num_tasks)
    state, total = env.start(task), torch.zeros(env.num_tasks)
    for _ in range(env.limit or 0):
        state, reward, _ = env.step(state, env.best_action(state), torch.zeros(len(task), 0))
        total += reward
    return total


def test_the_held_out_goals_are_those_of_guide_002() -> None:
    env = Darkroom()
    train, held_out = env.split(0)
    assert [env.label(task) for task in held_out] == ["(4,2)", "(5,6)", "(6,8)", "(7,2)", "(3,6)", "(0,5)", "(5,8)", "(5,4)"]
    assert len(train) == 73
    assert set(train) | set(held_out) == set(range(81))
    assert env.optimum(torch.tensor(held_out)).tolist() == [19, 18, 15, 16, 18, 16, 16, 20]


@pytest.mark.parametrize("env", WORLDS, ids=lambda env: type(env).__name__)
def test_the_optimal_policy_reaches_the_optimum_of_every_task(env: TaskEnv) -> None:
    assert torch.equal(episode_returns(env), env.optimum(torch.arange(env.num_tasks)))


def test_walls_stop_the_player_and_every_action_moves_as_the_guide_says() -> None:
    env = Darkroom()
    corner, middle = torch.zeros(5, dtype=torch.long), torch.full((5,), env.cell(4, 4))
    actions = torch.arange(5)
    assert env.move(middle, actions).tolist() == [env.cell(5, 4), env.cell(3, 4), env.cell(4, 5), env.cell(4, 3), env.cell(4, 4)]
    assert env.move(corner, actions).tolist() == [env.cell(1, 0), 0, env.cell(0, 1), 0, 0]


def test_a_reward_follows_every_step_that_ends_on_the_goal() -> None:
    env = Darkroom()
    state = env.start(torch.tensor([env.cell(4, 5)]))
    rewards = []
    for action in (2, 4, 3, 2, 4):
        state, reward, terminated = env.step(state, torch.tensor([action]), torch.zeros(1, 0))
        rewards.append(float(reward))
        assert not terminated.any()
    assert rewards == [1, 1, 0, 1, 1]


def test_permutations_change_the_meaning_of_actions_only() -> None:
    env = DarkroomPermuted()
    state = env.start(torch.arange(120))
    places = torch.stack([env.step(state, torch.full((120,), action), torch.zeros(120, 0))[0]["place"] for action in range(5)], 1)
    assert {tuple(sorted(row)) for row in places.tolist()} == {(0, 0, 0, 1, 9)}  # two walls and staying; right; down
    assert len({tuple(row) for row in places.tolist()}) == 20  # the three that do not move look alike in this corner


def test_the_door_pays_once_and_only_after_the_key() -> None:
    env = KeyToDoor()
    key, door = env.cell(4, 5), env.cell(4, 3)
    state = env.start(torch.tensor([key * 81 + door]))
    rewards = []
    for action in (3, 2, 2, 2, 3, 3, 3, 4, 2, 3):  # the door first, then the key, on, back over the key, to the door, stay, away, back
        state, reward, _ = env.step(state, torch.tensor([action]), torch.zeros(1, 0))
        rewards.append(float(reward))
    assert rewards == [0, 0, 1, 0, 0, 0, 1, 0, 0, 0]


def test_an_unknown_world_is_named() -> None:
    with pytest.raises(Problem, match="there is no world 'maze': darkroom"):
        make_env("maze", 9, None)
