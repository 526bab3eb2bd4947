"""Environments equal independent implementations step by step: Gymnasium's CartPole, and Snake in plain Python."""

from __future__ import annotations

import os

import gymnasium
import pytest
import torch
from torch import Tensor

from drivetrain.tasks.rl.envs import Env
from drivetrain.tasks.rl.envs.cartpole import CartPoleEnv
from drivetrain.tasks.rl.envs.snake import SnakeEnv
from tests.rl.reference_snake import Game

STEPS = int(os.environ.get("DRIVETRAIN_STEPS", 200_000))  # in each long comparison


def compare_cartpole(rows: int, steps: int) -> int:
    """Compares many poles with Gymnasium's environment, which steps them one by one; both in float64. Returns the number of ends."""
    random = torch.Generator().manual_seed(0)
    env, gym_env = CartPoleEnv(), gymnasium.make("CartPole-v1").unwrapped
    state = env.reset(torch.rand(rows, 4, generator=random, dtype=torch.float64))
    num_ends = 0
    for _ in range(steps):
        action = torch.randint(2, (rows,), generator=random)
        before = state["motion"]
        state, reward, ended = env.step(state, action, torch.empty(rows, 0))
        for row in range(rows):
            gym_env.reset()
            gym_env.state = before[row].numpy()
            _, expected_reward, expected_end, _, _ = gym_env.step(int(action[row]))
            assert torch.allclose(state["motion"][row], torch.tensor(gym_env.state, dtype=torch.float64), rtol=0, atol=1e-12)
            assert (expected_reward, expected_end) == (float(reward[row]), bool(ended[row]))
        num_ends += int(ended.sum())
        new_state = env.reset(torch.rand(rows, 4, generator=random, dtype=torch.float64))
        state = {"motion": torch.where(ended[:, None], new_state["motion"], state["motion"])}
    return num_ends


def test_cartpole_equals_gymnasiums() -> None:
    assert compare_cartpole(40, 100) > 50


@pytest.mark.timeout(5000)
@pytest.mark.system  # slow
def test_cartpole_equals_gymnasiums_for_many_steps() -> None:
    assert compare_cartpole(STEPS // 500, 500) > STEPS // 100


def cells(body: Tensor, width: int) -> list[list[list[tuple[int, int]]]]:
    """Returns the cells of each body as [row][agent], the head first."""
    cells_of_agents: list[list[list[tuple[int, int]]]] = [[[] for _ in range(body.shape[1])] for _ in range(body.shape[0])]
    positions = body.nonzero()
    for row, agent, cell in positions[body[positions.unbind(1)].argsort(descending=True)].tolist():
        cells_of_agents[row][agent].append((cell % width, cell // width))
    return cells_of_agents


def expected_observation(env: SnakeEnv, games: list[Game]) -> Tensor:
    """Returns the observations by the rules of the reference."""
    size, marked, start = env.width * env.height, [], 0
    for game in games:
        for agent in range(env.agents):
            for channel in game.observation(agent):
                marked += [start + y * env.width + x for x, y in channel]
                start += size
    flat = torch.zeros(start)
    flat[torch.tensor(marked)] = 1.0
    return flat.view(len(games), env.agents, *env.shape)


def compare_snake(env: SnakeEnv, rows: int, steps: int, eager: float) -> dict[str, int]:
    """Compares snakes with the reference; actions are random, or lead to the food so that snakes grow long enough to meet.

    Returns the number of deaths and meals, and the greatest length.
    """
    random = torch.Generator().manual_seed(1)
    counts = {"deaths": 0, "meals": 0, "longest": 0}
    first = torch.rand(rows, 1, generator=random)
    state = env.reset(first)
    games = [Game(env.width, env.height, env.agents, env.walls) for _ in range(rows)]
    for game, chance in zip(games, first[:, 0].tolist(), strict=True):
        game.begin(chance)
    for _ in range(steps):
        action = torch.randint(4, (rows, env.agents), generator=random)
        hungry = torch.rand(rows, env.agents, generator=random) < eager
        action = torch.where(hungry, toward_food(env, state["head"], state["food"]), action)
        chance = torch.rand(rows, 1, generator=random)
        state, *reward_and_end = env.step(state, action if env.agents > 1 else action[:, 0], chance)
        reward, ended = (t.view(rows, env.agents) for t in reward_and_end)
        bodies, draws = cells(state["body"], env.width), chance[:, 0].tolist()
        actions, food, has_ended, lengths, rewards = (t.tolist() for t in (action, state["food"], ended, state["length"], reward))
        for row, game in enumerate(games):
            expected_rewards = game.step(actions[row], draws[row])
            assert game.food == (food[row] % env.width, food[row] // env.width)
            for agent, snake in enumerate(game.snakes):
                body = bodies[row][agent]
                assert (
                    body == snake.cells if snake.alive else set(body) == set(snake.cells)
                )  # a dead snake's head may be on its own body, so that a cell occurs twice
                assert has_ended[row][agent] is not snake.alive
                assert lengths[row][agent] == len(snake.cells)
                assert abs(rewards[row][agent] - expected_rewards[agent]) < 1e-4
                counts["longest"] = max(counts["longest"], len(snake.cells))
                counts["meals"] += expected_rewards[agent] > 50
                counts["deaths"] += expected_rewards[agent] == -0.1
        assert torch.equal(env.observe(state).view(rows, env.agents, *env.shape), expected_observation(env, games))
        is_over = ended.all(1)
        new_state = env.reset(chance)
        state = {k: torch.where(is_over.view(-1, *(1,) * (v.dim() - 1)), new_state[k], v) for k, v in state.items()}
        for row in is_over.nonzero()[:, 0].tolist():
            games[row].begin(float(chance[row, 0]))
    return counts


def toward_food(env: SnakeEnv, head: Tensor, food: Tensor) -> Tensor:
    across = food[:, None] % env.width - head % env.width
    down = food[:, None] // env.width - head // env.width
    return torch.where(across.abs() > down.abs(), torch.where(across > 0, 3, 2), torch.where(down > 0, 1, 0))


@pytest.mark.parametrize(
    "env",
    [SnakeEnv(agents, *size, walls) for agents, size in enumerate(((7, 7), (5, 5), (6, 9), (8, 6)), 1) for walls in (False, True)],
    ids=lambda e: f"{e.agents}-{e.shape}-{e.walls}",
)
def test_snake_equals_the_reference(env: SnakeEnv) -> None:
    counts = compare_snake(env, 20, 150, 0.8)
    assert counts["meals"] > 20 and counts["deaths"] > 20 and counts["longest"] > 4, counts


@pytest.mark.timeout(5000)
@pytest.mark.system  # slow
def test_snake_equals_the_reference_for_many_steps() -> None:
    counts = {"meals": 0, "deaths": 0}
    for env, share in ((SnakeEnv(), 0.4), (SnakeEnv(4, 9, 9), 0.4), (SnakeEnv(3, 8, 8, walls=True), 0.2)):
        counts_of_env = compare_snake(env, int(share * STEPS) // 1000, 1000, 0.8)
        counts = {k: counts[k] + counts_of_env[k] for k in counts}
    assert counts["meals"] > STEPS // 100 and counts["deaths"] > STEPS // 100, counts


def test_a_head_on_collision_kills_the_lower_number_first() -> None:
    env = SnakeEnv(2, 8, 8)
    state = env.reset(torch.zeros(1, 1))
    state["head"] = torch.tensor([[17, 19]])  # (1, 2) goes right, (3, 2) goes left: both to (2, 2)
    state["body"] = torch.zeros(1, 2, 64, dtype=torch.int64).scatter(2, state["head"][..., None], 1)
    _, _, ended = env.step(state, torch.tensor([[3, 2]]), torch.zeros(1, 1))
    assert ended.tolist() == [[True, False]]


@pytest.mark.parametrize("env", [CartPoleEnv(), SnakeEnv(2, 6, 6)], ids=["cartpole", "snake"])
def test_rules_are_pure_functions_of_their_arguments(env: Env) -> None:
    random = torch.Generator().manual_seed(2)
    state = env.reset(torch.rand(5, env.chances, generator=random))
    before = {k: v.clone() for k, v in state.items()}
    action = torch.randint(env.actions, (5, env.agents) if env.agents > 1 else (5,), generator=random)
    chance = torch.rand(5, env.chances, generator=random)
    first, second = env.step(state, action, chance), env.step(state, action, chance)
    assert all(torch.equal(state[k], before[k]) for k in state), "arguments are not changed"
    assert all(torch.equal(first[0][k], second[0][k]) for k in state)
    single_row = env.step({k: v[2:3] for k, v in state.items()}, action[2:3], chance[2:3])
    assert all(torch.allclose(single_row[0][k][0].double(), first[0][k][2].double()) for k in state), "rows do not influence each other"


def test_snake_shows_each_agent_itself_and_the_others() -> None:
    env = SnakeEnv(2, 6, 6)
    state = env.reset(torch.tensor([[0.5]]))
    channels = env.observe(state)[0]
    heads = state["head"][0].tolist()
    for agent in range(2):
        body, head, others, food, edge = channels[agent].flatten(1)
        assert body.nonzero().tolist() == head.nonzero().tolist() == [[heads[agent]]]
        assert others.nonzero().tolist() == [[heads[1 - agent]]]
        assert food.nonzero().tolist() == [[18]] and int(edge.sum()) == 20
