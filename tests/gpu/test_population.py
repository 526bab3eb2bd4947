"""On a GPU, a captured population equals an eager one, each member equals an ordinary run, and the population is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observers
from drivetrain.engine.loop import Training
from drivetrain.hardware import detect
from drivetrain.plan.choose import choose
from drivetrain.processes.job import PopulationJob, PopulationMember
from drivetrain.processes.population import train_population
from drivetrain.runs import Run
from drivetrain.task_ref import find_task
from drivetrain.tasks.rl.worlds import CartPole
from drivetrain.watch.files import MetricsFile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SMALL: dict[str, Any] = {  # tanh: near the corner of a relu, rounding decides the gradient
    "envs": 64, "horizon": 8, "global_batch": 256, "activation": "tanh", "eval_episodes": 5, "eval_every": "2ep", "best": "max:return",
}  # fmt: skip
TRIALS: list[dict[str, Any]] = [
    {"learning_rate": 1e-3, "gamma": 0.9},
    {"learning_rate": 3e-3, "entropy_weight": 0.05, "value_clip": 0.2},
    {"learning_rate": 2e-3, "gae": 0.5, "clip": 0.1, "seed": 5},
]


def train_population_of(folder: Path, epochs: int, trials: list[dict[str, Any]], capture: str = "auto", **more: Any) -> list[str]:
    """Trains them as one program; returns the notices."""
    reported = []
    members = []
    for number, changes in enumerate(trials):
        (folder / str(number)).mkdir(parents=True)
        settings = CartPole(**SMALL | changes | more, epochs=epochs).settings()
        members.append(PopulationMember(number, str(folder / str(number)), settings))
    plan = choose(members[0].settings, detect(), device="cuda", world_size=1, local_procs=1, pins={"capture": capture})
    job = PopulationJob(run=str(folder), task=find_task("cartpole"), plan=plan, folder=".", members=members, size=64)
    train_population(job, Group(0, 1, torch.device("cuda", 0)), lambda kind, value: reported.append((kind, value)), False)
    assert sum(kind == "member_end" for kind, _ in reported) == len(trials)
    return [str(value) for kind, value in reported if kind == "notice"]


def test_a_captured_population_equals_the_eager_one(tmp_path: Path) -> None:
    assert train_population_of(tmp_path / "captured", 12, TRIALS) == [], "no notice: everything can be captured"
    train_population_of(tmp_path / "eager", 12, TRIALS, capture="off")
    for number in range(len(TRIALS)):
        rows, expected = (Run(tmp_path / kind / str(number)).rows() for kind in ("captured", "eager"))
        assert len(rows) == 6
        for row, other in zip(rows[:3], expected[:3], strict=True):
            assert row["train/loss"] == pytest.approx(other["train/loss"], rel=1e-2, abs=1e-4)
            assert row["train/entropy"] == pytest.approx(other["train/entropy"], rel=1e-2)


def test_a_member_equals_an_ordinary_run(tmp_path: Path) -> None:
    train_population_of(tmp_path / "together", 4, TRIALS)
    for number, changes in enumerate(TRIALS):
        run = Run(tmp_path / "alone" / str(number))
        task = CartPole(**SMALL | changes, epochs=4)
        plan = choose(task.settings(), detect(), device="cuda", world_size=1, local_procs=1)
        observer = Observers([MetricsFile(run)])
        Training(task, plan, run, Group(0, 1, torch.device("cuda", 0)), observer, False).run_to_end()
        observer.close()
        expected = load_file(run.model_path)
        for name, weight in load_file(tmp_path / "together" / str(number) / "model" / "model.safetensors").items():
            assert torch.allclose(weight, expected[name], rtol=1e-2, atol=1e-3), (number, name)


def test_a_population_is_fast(tmp_path: Path) -> None:
    """25 policies of the default size take more than ten million steps a second together."""
    rates = [{"learning_rate": 1e-4 * 1.2**i} for i in range(25)]
    train_population_of(tmp_path, 60, rates, envs=1024, horizon=16, global_batch=4096, eval_every="20ep")
    rows = Run(tmp_path / "0").rows()
    assert rows[-1]["samples_per_second"] * len(rates) / CartPole().passes > 10e6
