"""Reinforcement learning on a GPU: a captured collection equals the eager one, an interrupted run an uninterrupted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.engine.data.source_feed import SourceFeed
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observers
from drivetrain.engine.loop import Training
from drivetrain.engine.setup import prepare
from drivetrain.hardware import detect
from drivetrain.plan.choose import choose
from drivetrain.runs import Run
from drivetrain.tasks.rl.worlds import CartPole, Snake
from drivetrain.watch.files import MetricsFile
from tests.sample_tasks import rows, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
TASKS: dict[str, Any] = {
    "cartpole": (CartPole, {"envs": 64, "horizon": 8, "global_batch": 256, "epochs": 12}),
    "snake": (Snake, {"envs": 8, "horizon": 8, "global_batch": 64, "epochs": 8, "grid": 6, "agents": 2}),
}


def train(name: str, folder: Path, stop: int | None = None, **pins: Any) -> Training:
    task_class, settings = TASKS[name]
    task = task_class(
        **settings, eval_episodes=0, log_every=1, save_every="1ep", deterministic=True
    )  # otherwise convolutions are not bit-equal
    plan = choose(task.settings(), detect(), device="cuda", world_size=1, local_procs=1, pins=pins)
    observer = Observers([MetricsFile(Run(folder))])
    training = Training(task, plan, Run(folder), Group(0, 1, torch.device("cuda", 0)), observer, False)
    training.run_to_end(stop)
    observer.close()
    return training


def collect(name: str, capture: str) -> list[dict[str, Any]]:
    """Returns eight collections with one policy, and the environments' state after each."""
    task_class, settings = TASKS[name]
    task, device = task_class(**settings), torch.device("cuda", 0)
    plan = choose(task.settings(), detect(), device="cuda", world_size=1, local_procs=1, pins={"capture": capture})
    prepare(plan, Group(0, 1, device))  # graphs want a stream of their own
    torch.manual_seed(0)
    model, source = task.model().to(device), task.train_data()
    feed = SourceFeed(source, plan, Group(0, 1, device), 0)
    collections = []
    for epoch in range(8):
        feed.begin_epoch(epoch, model)
        assert feed._data is not None and feed._data.names is not None
        collections.append({k: v.clone() for k, v in (*zip(feed._data.names, feed._data.columns, strict=True), *source.state().items())})
    assert (feed._graphs is not None and feed._graphs.has_graph_of("collect")) is (capture == "auto")
    return collections


@pytest.mark.parametrize("task", TASKS)
def test_a_captured_collection_equals_the_eager_one(task: str) -> None:
    for a, b in zip(collect(task, "auto"), collect(task, "off"), strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("task", TASKS)
def test_an_interrupted_run_equals_an_uninterrupted_one(task: str, tmp_path: Path) -> None:
    uninterrupted = train(task, tmp_path / "uninterrupted", compile="off")
    per_epoch = uninterrupted.setup.steps_per_epoch
    for stop in (2 * per_epoch, 5 * per_epoch + 1, None):
        train(task, tmp_path / "interrupted", stop, compile="off")
    assert rows(tmp_path / "interrupted") == rows(tmp_path / "uninterrupted")
    assert weights(tmp_path / "interrupted") == weights(tmp_path / "uninterrupted")
