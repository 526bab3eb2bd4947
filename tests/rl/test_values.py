"""A critic that learns targets of mean 0 and spread 1: its values are worth what returns are, however a run is broken or spread."""

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
from drivetrain.tasks.rl.rollout import Rollout, facts_of
from drivetrain.tasks.rl.worlds import CartPole
from drivetrain.watch.files import MetricsFile
from tests.engine.test_invariance import same
from tests.processes import on_ranks
from tests.rl.test_ppo import Clock, Table
from tests.samples import HARDWARE, rows, weights

SMALL: dict[str, Any] = {"epochs": 4, "envs": 8, "horizon": 8, "global_batch": 32, "passes": 2, "eval_episodes": 0, "log_every": 1, "save_every": "1ep"}  # fmt: skip
ALONE = Group(0, 1, torch.device("cpu"))


class Says(Agent):
    """Says of an observation what it shows, times a factor, plus something."""

    def __init__(self, factor: float, plus: float) -> None:
        super().__init__()
        self.factor, self.plus = factor, plus

    def policy(self, seen: Tensor, who: Tensor | None = None) -> Tensor:
        return torch.zeros(len(seen), 2)

    def value(self, seen: Tensor, who: Tensor | None = None) -> Tensor:
        return self.factor * seen[:, 0] + self.plus


def collected(rollout: Rollout, agent: Agent) -> dict[str, Tensor]:
    return facts_of(rollout.collect(agent, Table(2), lambda t: t)[:])


def test_a_scaled_critic_is_the_plain_one_that_says_the_same_of_returns() -> None:
    """Over steps, cut-off episodes and the end of a collection."""
    plain, scaled = (Rollout(Clock(), 2, 7, 1, 0.9, 0.8, scaled_values=given) for given in (False, True))
    first, expected = collected(scaled, Says(0.5, 1.0)), collected(plain, Says(0.5, 1.0))
    mean, spread = float(expected["target"].mean()), float(expected["target"].std(correction=0))
    assert torch.allclose(first["target"] * spread + mean, expected["target"], atol=1e-5), "as it says before anything is known"
    assert abs(float(first["target"].mean())) < 1e-5 and abs(float(first["target"].std(correction=0)) - 1) < 1e-4
    second, expected = collected(scaled, Says(0.5, 1.0)), collected(plain, Says(0.5 * spread, 1.0 * spread + mean))
    assert torch.allclose(second["advantage"], expected["advantage"], atol=1e-5)
    assert torch.allclose(second["value"] * spread + mean, expected["value"], atol=1e-5), "kept as it was said, for value_clip"
    count, total, squares = scaled.state()["targets"][0].tolist()
    now = ((squares / count) - (total / count) ** 2) ** 0.5
    assert count == 28 and torch.allclose(second["target"] * now + total / count, expected["target"], atol=1e-4)
    assert torch.allclose(second["explained_variance"], expected["explained_variance"], atol=1e-3)


def train(folder: str, settings: dict[str, Any], stop: int | None, group: Group) -> tuple[list[dict[str, Any]], list[float], float]:
    """The rows, the targets' count and sums, and what the critic says of a pole at rest."""
    task = CartPole(**settings, scale_values=True)
    plan = choose(task.settings(), HARDWARE, device="cpu", world_size=group.size, local_procs=group.size, pins={"threads": 1})
    observer = Observers([MetricsFile(Run(folder))] if group.rank == 0 else [])
    training: Any = Training(task, plan, Run(folder), group, observer, False)
    training.run_to_end(stop)
    observer.close()
    said = float(training.model.value(torch.zeros(1, 4)).detach())
    return rows(folder) if group.rank == 0 else [], training.feed.source.state()["targets"][0].tolist(), said


def test_processes_have_one_scale_and_one_curve(tmp_path: Path) -> None:
    [(alone, known, _)] = on_ranks(1, train, str(tmp_path / "one"), SMALL, None)
    (shared, first, _), (_, second, _) = on_ranks(2, train, str(tmp_path / "two"), SMALL, None)
    same(alone, shared, 2e-4)
    assert first == second and torch.allclose(torch.tensor(first), torch.tensor(known), rtol=1e-4)


def test_a_broken_run_is_the_unbroken_one(tmp_path: Path) -> None:
    train(str(tmp_path / "whole"), SMALL, None, ALONE)
    for stop in (6, 9, None):
        train(str(tmp_path / "broken"), SMALL, stop, ALONE)
    assert rows(tmp_path / "broken") == rows(tmp_path / "whole")
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")


def test_cartpole_is_learned_and_its_values_are_returns(tmp_path: Path) -> None:
    """Rewards as they are: a pole that stands for 500 steps is worth up to 1 / (1 - gamma) = 20."""
    settings = {
        "scale_rewards": False, "gamma": 0.95, "envs": 256, "global_batch": 1024, "eval_every": "1000ep", "eval_episodes": 50,
        "passes": 4, "learning_rate": 2.5e-3, "width": 64, "activation": "tanh",
    }  # fmt: skip
    told, (count, total, squares), said = train(str(tmp_path), settings, None, ALONE)
    assert told[-1]["eval/return"] > 400, told[-1]
    mean, spread = total / count, (squares / count - (total / count) ** 2) ** 0.5
    assert 15 < said * spread + mean < 21 and abs(said) < 4, (said, mean, spread)
