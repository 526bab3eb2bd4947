"""Algorithm distillation on a GPU: collections, training and evaluation are captured and equal eager ones; the cache works in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.engine.data.source_feed import SourceFeed
from drivetrain.engine.group import Group
from drivetrain.engine.setup import prepare
from drivetrain.hardware import detect
from drivetrain.plan.choose import choose
from drivetrain.tasks.distill import histories
from drivetrain.tasks.distill.collect import CollectHistories
from drivetrain.tasks.distill.distill import Distill
from drivetrain.tasks.distill.model import InContextModel
from tests.distill.test_collect import assert_consistent
from tests.distill.test_model import history, length_of, make, play_history
from tests.gpu.hard_tasks import train_task
from tests.sample_tasks import rows, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
WORLDS = ["darkroom", "darkroom-permuted", "key-to-door"]
VARIANTS = ["ad", "compressed", "latent"]
SMALL: dict[str, Any] = {
    "size": 5,
    "limit": 10,
    "streams": 4,
    "num_tasks": 6,
    "epochs": 12,
    "horizon": 20,
    "global_batch": 96,
    "region": 40,
}
TINY: dict[str, Any] = {
    "size": 5, "streams": 8, "episodes": 8, "num_tasks": 12, "window": 40, "region": 40, "regions": 2, "latents": 4, "width": 32, "layers": 2,
    "heads": 2, "inner": 64, "eval_tasks": 2, "eval_streams": 4, "eval_episodes": 4, "steps": 60, "global_batch": 16, "warmup": 5, "log_every": 1,
    "eval_every": 10, "save_every": 20, "deterministic": True,
}  # fmt: skip


def collect(world: str, capture: str) -> list[dict[str, Any]]:
    """Returns eight collections with one policy, and the state after each: environments and histories."""
    task, device = CollectHistories(world=world, **SMALL), torch.device("cuda", 0)
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


@pytest.mark.parametrize("world", WORLDS)
def test_a_collection_is_captured_and_equals_the_eager_one(world: str) -> None:
    for captured, eager in zip(collect(world, "auto"), collect(world, "off"), strict=True):
        assert captured.keys() == eager.keys()
        assert {"history.place", "history.action", "history.reward", "history.next_place"} <= captured.keys()
        for name in captured:
            assert torch.equal(captured[name], eager[name]), name


@pytest.mark.parametrize("world", WORLDS)
def test_histories_recorded_on_a_gpu_are_what_happened(world: str, tmp_path: Path) -> None:
    task = CollectHistories(world=world, **SMALL, eval_episodes=50, deterministic=True)
    train_task(task, tmp_path / "run")
    recorded = histories.read(str(tmp_path / "run"))
    assert recorded.place.shape == (6, 4, 240)
    assert_consistent(recorded)


@torch.no_grad()
@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_cache_gives_the_logits_of_the_whole_history(variant: str, positions: str) -> None:
    model: InContextModel = make(variant, positions).cuda()
    steps = history(64, length_of(variant))
    for name, values in vars(steps).items():
        setattr(steps, name, values.cuda())
    exact = model(steps)
    assert (exact - play_history(model, steps)).abs().max() < 1e-3
    with torch.autocast("cuda", torch.bfloat16):
        at_once, played = model(steps).float(), play_history(model, steps).float()
    rounding = (at_once - exact).abs()
    assert rounding.max() > 0, "bf16 must round, or the test proves nothing"
    difference = (played - at_once).abs()
    assert difference.mean() < 2 * rounding.mean()
    assert difference.max() < 3 * rounding.max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_and_evaluation_are_captured_and_equal_eager_ones(variant: str, tmp_path: Path) -> None:
    train_task(Distill(variant=variant, **TINY), tmp_path / "eager", pins={"capture": "off", "compile": "off"})
    facts = train_task(Distill(variant=variant, **TINY), tmp_path / "captured", pins={"compile": "off"})
    assert facts.plan["capture"] == "on", facts.plan
    assert rows(tmp_path / "captured") == rows(tmp_path / "eager")
    assert weights(tmp_path / "captured") == weights(tmp_path / "eager")


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_runs_and_an_interrupted_one_are_equal(variant: str, tmp_path: Path) -> None:
    train_task(Distill(variant=variant, **TINY, dropout=0.1), tmp_path / "one", pins={"compile": "off"})
    train_task(Distill(variant=variant, **TINY, dropout=0.1), tmp_path / "two", pins={"compile": "off"})
    for stop in (25, None):
        train_task(Distill(variant=variant, **TINY, dropout=0.1), tmp_path / "interrupted", stop, pins={"compile": "off"})
    for name in ("two", "interrupted"):
        assert rows(tmp_path / name) == rows(tmp_path / "one")
        assert weights(tmp_path / name) == weights(tmp_path / "one")
