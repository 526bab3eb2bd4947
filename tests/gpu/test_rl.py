"""Learning by playing on a GPU: a captured collection is the eager one, and a broken run the unbroken one."""

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
from tests.samples import rows, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
WORLDS: dict[str, Any] = {
    "cartpole": (CartPole, {"envs": 64, "horizon": 8, "global_batch": 256, "epochs": 12}),
    "snake": (Snake, {"envs": 8, "horizon": 8, "global_batch": 64, "epochs": 8, "grid": 6, "agents": 2}),
}


def train(world: str, folder: Path, stop: int | None = None, **pins: Any) -> Training:
    kind, settings = WORLDS[world]
    task = kind(**settings, eval_episodes=0, log_every=1, save_every="1ep", deterministic=True)  # convolutions else repeat nearly
    plan = choose(task.settings(), detect(), device="cuda", world_size=1, local_procs=1, pins=pins)
    observer = Observers([MetricsFile(Run(folder))])
    training = Training(task, plan, Run(folder), Group(0, 1, torch.device("cuda", 0)), observer, False)
    training.run_to_end(stop)
    observer.close()
    return training


def collected(world: str, capture: str) -> list[dict[str, Any]]:
    """What eight collections with one policy bring, and the environments' state after them."""
    kind, settings = WORLDS[world]
    task, device = kind(**settings), torch.device("cuda", 0)
    plan = choose(task.settings(), detect(), device="cuda", world_size=1, local_procs=1, pins={"capture": capture})
    prepare(plan, Group(0, 1, device))  # graphs want a stream of their own
    torch.manual_seed(0)
    model, source = task.model().to(device), task.train_data()
    feed = SourceFeed(source, plan, Group(0, 1, device), 0)
    found = []
    for epoch in range(8):
        feed.begin_epoch(epoch, model)
        assert feed._data is not None and feed._data.names is not None
        found.append({k: v.clone() for k, v in (*zip(feed._data.names, feed._data.columns, strict=True), *source.state().items())})
    assert (feed._graphs is not None and feed._graphs.has_graph_of("collect")) is (capture == "auto")
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_a_captured_collection_is_the_eager_one(world: str) -> None:
    for a, b in zip(collected(world, "auto"), collected(world, "off"), strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("world", WORLDS)
def test_a_broken_run_is_the_unbroken_one(world: str, tmp_path: Path) -> None:
    whole = train(world, tmp_path / "whole", compile="off")
    per_epoch = whole.feed.steps_per_epoch
    for stop in (2 * per_epoch, 5 * per_epoch + 1, None):
        train(world, tmp_path / "broken", stop, compile="off")
    assert rows(tmp_path / "broken") == rows(tmp_path / "whole")
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")
