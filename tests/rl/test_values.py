"""`scale_values` gives the critic targets with mean 0 and deviation 1, also after interruptions and on several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observers
from drivetrain.engine.loop import Training
from drivetrain.plan.choose import choose
from drivetrain.runs import Run
from drivetrain.tasks.rl.nets import Agent
from drivetrain.tasks.rl.rollout import Rollout
from drivetrain.tasks.rl.samples import columns_of
from drivetrain.tasks.rl.worlds import CartPole
from drivetrain.watch.files import MetricsFile
from tests.engine.test_invariance import assert_same_metrics
from tests.processes import on_ranks
from tests.rl.test_ppo import Clock, SequentialRand
from tests.sample_tasks import HARDWARE, rows, weights

SMALL: dict[str, Any] = {"epochs": 4, "envs": 8, "horizon": 8, "global_batch": 32, "passes": 2, "eval_episodes": 0, "log_every": 1, "save_every": "1ep"}  # fmt: skip
ALONE = Group(0, 1, torch.device("cpu"))


class LinearCritic(Agent):
    """Its value of an observation is the observed number times a factor, plus an offset."""

    def __init__(self, factor: float, offset: float) -> None:
        super().__init__()
        self.factor, self.offset = factor, offset

    def policy(self, observation: Tensor, agent_ids: Tensor | None = None) -> Tensor:
        return torch.zeros(len(observation), 2)

    def value(self, observation: Tensor, agent_ids: Tensor | None = None) -> Tensor:
        return self.factor * observation[:, 0] + self.offset


def collect(rollout: Rollout, agent: Agent) -> dict[str, Tensor]:
    return columns_of(rollout.collect(agent, SequentialRand(2), lambda t: t)[:])


def test_a_scaled_critic_gives_the_advantages_of_an_equal_unscaled_one() -> None:
    """This holds for steps, truncated episodes and the end of a collection."""
    plain, scaled = (Rollout(Clock(), 2, 7, 1, 0.9, 0.8, scale_values=scale) for scale in (False, True))
    first, expected = collect(scaled, LinearCritic(0.5, 1.0)), collect(plain, LinearCritic(0.5, 1.0))
    mean, deviation = float(expected["target"].mean()), float(expected["target"].std(correction=0))
    assert torch.allclose(first["target"] * deviation + mean, expected["target"], atol=1e-5), "the first outputs are not scaled"
    assert abs(float(first["target"].mean())) < 1e-5 and abs(float(first["target"].std(correction=0)) - 1) < 1e-4
    second, expected = collect(scaled, LinearCritic(0.5, 1.0)), collect(plain, LinearCritic(0.5 * deviation, 1.0 * deviation + mean))
    assert torch.allclose(second["advantage"], expected["advantage"], atol=1e-5)
    assert torch.allclose(second["value"] * deviation + mean, expected["value"], atol=1e-5), "stored as the critic's output, for value_clip"
    count, total, squares = scaled.state()["targets"][0].tolist()
    new_deviation = ((squares / count) - (total / count) ** 2) ** 0.5
    assert count == 28 and torch.allclose(second["target"] * new_deviation + total / count, expected["target"], atol=1e-4)
    assert torch.allclose(second["explained_variance"], expected["explained_variance"], atol=1e-3)


def train(folder: str, settings: dict[str, Any], stop: int | None, group: Group) -> tuple[list[dict[str, Any]], list[float], float]:
    """Returns the rows, the targets' count and sums, and the critic's output for a pole at rest."""
    task = CartPole(**settings, scale_values=True)
    plan = choose(task.settings(), HARDWARE, device="cpu", world_size=group.size, local_procs=group.size, pins={"threads": 1})
    observer = Observers([MetricsFile(Run(folder))] if group.rank == 0 else [])
    training: Any = Training(task, plan, Run(folder), group, observer, False)
    training.run_to_end(stop)
    observer.close()
    output = float(training.setup.model.value(torch.zeros(1, 4)).detach())
    return rows(folder) if group.rank == 0 else [], training.setup.feed.source.state()["targets"][0].tolist(), output


def test_processes_share_one_scale_and_one_curve(tmp_path: Path) -> None:
    [(rows_of_one, expected, _)] = on_ranks(1, train, str(tmp_path / "one"), SMALL, None)
    (rows_of_two, first, _), (_, second, _) = on_ranks(2, train, str(tmp_path / "two"), SMALL, None)
    assert_same_metrics(rows_of_one, rows_of_two, 2e-4)
    assert first == second and torch.allclose(torch.tensor(first), torch.tensor(expected), rtol=1e-4)


def test_an_interrupted_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    train(str(tmp_path / "uninterrupted"), SMALL, None, ALONE)
    for stop in (6, 9, None):
        train(str(tmp_path / "interrupted"), SMALL, stop, ALONE)
    assert rows(tmp_path / "interrupted") == rows(tmp_path / "uninterrupted")
    assert weights(tmp_path / "interrupted") == weights(tmp_path / "uninterrupted")


def test_cartpole_is_learned_and_its_values_are_returns(tmp_path: Path) -> None:
    """Rewards are not scaled: the return of a pole that stands for 500 steps is nearly 1 / (1 - gamma) = 20."""
    settings = {
        "scale_rewards": False, "gamma": 0.95, "envs": 256, "global_batch": 1024, "eval_every": "1000ep", "eval_episodes": 50,
        "passes": 4, "learning_rate": 2.5e-3, "width": 64, "activation": "tanh",
    }  # fmt: skip
    logged, (count, total, squares), output = train(str(tmp_path), settings, None, ALONE)
    assert logged[-1]["eval/return"] > 400, logged[-1]
    mean, deviation = total / count, (squares / count - (total / count) ** 2) ** 0.5
    assert 15 < output * deviation + mean < 21 and abs(output) < 4, (output, mean, deviation)
