"""The plan never changes the mathematics: any world size and micro-batch gives the same metrics."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import on_ranks
from tests.sample_tasks import train

# SGD and a small clip: AdamW would hide a wrong scale of the gradient.
SETTINGS = {"optim": "sgd", "clip": 0.5, "learning_rate": 0.2}


def curve(name: str, folder: Path, world: int, pins: dict[str, Any] | None = None, **settings: Any) -> list[dict[str, Any]]:
    return list(on_ranks(world, train, name, str(folder), SETTINGS | settings, pins, None)[0])


def assert_same_metrics(a: list[dict[str, Any]], b: list[dict[str, Any]], tolerance: float = 2e-5) -> None:
    assert [row["step"] for row in a] == [row["step"] for row in b]
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys()
        for key in x:
            if x[key] is None or y[key] is None:  # not a number: fp16 overflowed
                assert x[key] == y[key]
                continue
            assert math.isclose(x[key], y[key], rel_tol=tolerance, abs_tol=1e-6), f"step {x['step']}: {key} {x[key]} against {y[key]}"


@pytest.mark.parametrize("name", ["Plain", "LoaderTask", "TokenMean", "LossParts"])
def test_all_world_sizes_and_micro_batches_give_the_same_metrics(name: str, tmp_path: Path) -> None:
    reference = curve(name, tmp_path / "reference", 1)
    assert reference[-1]["train/loss"] < 0.7 * reference[0]["train/loss"]
    assert any(r["grad_norm"] > SETTINGS["clip"] for r in reference), "some gradient must be clipped, or the test proves nothing"
    for world, micro in [(1, 1), (1, 5), (2, 16), (2, 3), (3, 2), (4, 1), (4, 64)]:
        assert_same_metrics(reference, curve(name, tmp_path / f"{world}-{micro}", world, {"micro_batch": micro}))


def test_accumulation_pinned_instead_of_micro_batch(tmp_path: Path) -> None:
    assert_same_metrics(curve("Plain", tmp_path / "a", 1), curve("Plain", tmp_path / "b", 2, {"accumulation": 3}))


def test_fewer_samples_than_processes(tmp_path: Path) -> None:
    """Ranks without a sample run a dummy micro-batch, so that no rank waits for them."""
    assert_same_metrics(curve("Plain", tmp_path / "a", 1, samples=3, epochs=5), curve("Plain", tmp_path / "b", 4, samples=3, epochs=5))


def test_a_batch_larger_than_the_data(tmp_path: Path) -> None:
    assert_same_metrics(
        curve("Plain", tmp_path / "a", 1, global_batch=4096), curve("Plain", tmp_path / "b", 2, {"micro_batch": 7}, global_batch=4096)
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("OwnOptimizer", {"kind": "rmsprop"}),
        ("OwnOptimizer", {"kind": "count"}),
        ("Float64", {}),
        ("AugmentsInPlace", {}),
        ("UnusualModel", {}),
    ],
)
def test_custom_optimizers_float64_augmentation_in_place_and_an_unusual_model(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    reference = curve(name, tmp_path / "one", 1, clip=0.1, **options)
    assert reference[0]["train/loss"] > 1
    assert_same_metrics(reference, curve(name, tmp_path / "many", 3, {"micro_batch": 3}, clip=0.1, **options), 1e-4)


def test_augmentation_in_place_is_done_once(tmp_path: Path) -> None:
    """The first step's loss is that of a batch that was augmented once, although counts() and loss() both need the batch."""
    from drivetrain.engine.data.keyed_random import KeyedRand
    from drivetrain.engine.group import Group
    from tests.sample_tasks import training

    job = training("AugmentsInPlace", str(tmp_path), Group(0, 1, torch.device("cpu")), {"global_batch": 101})
    order = job.setup.feed.order(0)
    batch = job.setup.task.train_data()[order]
    batch["x"].add_(KeyedRand(order, 0, 0, 1).normal(4))
    parts, _ = job.setup.task.loss(job.setup.model, batch)
    job.execution.step(0)
    job.execution.step.ring.fetch()
    row = job.execution.step.ring.arrived(wait=True)[0].rows[0]
    assert row[job.execution.step.slots.total_slots["all"]] / 101 == pytest.approx(parts["all"].item(), rel=1e-5)


@pytest.mark.parametrize("world", [2, 3])
def test_a_source_gives_the_same_metrics_on_any_world_size(world: int, tmp_path: Path) -> None:
    assert_same_metrics(curve("RandomWalkTask", tmp_path / "one", 1), curve("RandomWalkTask", tmp_path / "many", world, {"micro_batch": 5}))


@pytest.mark.parametrize("optim", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
def test_optimizers_and_schedules_count_steps_not_processes(optim: str, decay: str, tmp_path: Path) -> None:
    options = {"optim": optim, "decay": decay, "warmup": 3, "learning_rate": 0.02, "epochs": 1}
    one_rank, two_ranks = curve("Plain", tmp_path / "one", 1, **options), curve("Plain", tmp_path / "two", 2, **options)
    assert_same_metrics(one_rank, two_ranks, 1e-4)
    rates = [r["learning_rate"] for r in two_ranks]
    assert rates[:3] == pytest.approx([0.02 / 3, 0.04 / 3, 0.02])
    assert (rates[-1] == 0.02) if decay == "constant" else (rates[-1] < 0.01)


def test_the_gradient_is_that_of_the_mean_over_the_global_batch(tmp_path: Path) -> None:
    """It equals plain autograd on the global batch, weighted by tokens."""
    from drivetrain.engine.group import Group
    from tests.sample_tasks import training

    job = training("TokenMean", str(tmp_path), Group(0, 1, torch.device("cpu")), {"global_batch": 101, "optim": "sgd"}, {"micro_batch": 6})
    task = job.setup.task
    total, count = task.loss(job.setup.model, task.train_data()[:])
    expected = torch.autograd.grad(total / count, list(job.setup.model.parameters()))
    job.execution.step(0)
    for parameter, gradient in zip(job.setup.model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_a_clipped_step_is_as_long_as_the_clip_says(tmp_path: Path) -> None:
    """With a mean over tokens, whose number is known only after the backward pass, gradients are scaled and clipped at once."""
    from drivetrain.engine.group import Group
    from tests.sample_tasks import training

    settings = {"optim": "sgd", "momentum": 0, "weight_decay": 0, "learning_rate": 0.2, "clip": 0.1, "decay": "constant"}
    job = training("TokenMean", str(tmp_path), Group(0, 1, torch.device("cpu")), settings, {"micro_batch": 6})
    before = [p.detach().clone() for p in job.setup.model.parameters()]
    job.execution.step(0)
    moved = [p.detach() - old for p, old in zip(job.setup.model.parameters(), before, strict=True)]
    assert torch.linalg.vector_norm(torch.cat([m.flatten() for m in moved])).item() == pytest.approx(0.2 * 0.1, rel=1e-3)
