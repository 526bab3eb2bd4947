"""Resume is exact: a run that stops anywhere and resumes gives the rows and weights of an uninterrupted run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observer
from tests.engine.test_invariance import assert_same_metrics
from tests.processes import on_ranks
from tests.sample_tasks import rows, train, training, weights

ALONE = Group(0, 1, torch.device("cpu"))


def run(name: str, folder: Path, world: int = 1, stop: int | None = None, pins: dict[str, Any] | None = None, **settings: Any) -> None:
    on_ranks(world, train, name, str(folder), settings, pins, stop)


@pytest.mark.parametrize(
    ("name", "world", "pins"),
    [
        ("Augmented", 1, {}),
        ("Augmented", 3, {"micro_batch": 3}),
        ("LoaderTask", 1, {"workers": 2}),
        ("LoaderTask", 2, {"workers": 1}),
        ("LossParts", 1, {}),
        ("HostRandomness", 1, {"micro_batch": 5}),
        ("UnusualModel", 2, {"workers": 1}),
    ],
)
def test_a_run_stopped_in_and_at_the_end_of_an_epoch_is_resumed(name: str, world: int, pins: dict[str, Any], tmp_path: Path) -> None:
    options = {"clip": 1.0, "eval_every": 5}
    run(name, tmp_path / "uninterrupted", world, pins=pins, **options)
    for stop in (2, 4, 7, 8, None):  # an epoch has 7 steps
        run(name, tmp_path / "resumed", world, stop, pins, **options)
    assert rows(tmp_path / "resumed") == rows(tmp_path / "uninterrupted")
    assert weights(tmp_path / "resumed") == weights(tmp_path / "uninterrupted")


@pytest.mark.parametrize("kind", ["rmsprop", "count"])
def test_a_users_own_optimizer_is_resumed(kind: str, tmp_path: Path) -> None:
    run("OwnOptimizer", tmp_path / "uninterrupted", 2, kind=kind, clip=0.5)
    for stop in (3, 9, None):
        run("OwnOptimizer", tmp_path / "resumed", 2, stop, kind=kind, clip=0.5)
    assert rows(tmp_path / "resumed") == rows(tmp_path / "uninterrupted")
    assert weights(tmp_path / "resumed") == weights(tmp_path / "uninterrupted")


@pytest.mark.parametrize("name", ["RandomWalkTask", "UnkeyedRandomTask"])
def test_a_source_is_resumed_with_its_state(name: str, tmp_path: Path) -> None:
    run(name, tmp_path / "uninterrupted", 2)
    for stop in (1, 9, None):  # a run with a source stops at the end of the epoch
        run(name, tmp_path / "resumed", 2, stop)
    assert rows(tmp_path / "resumed") == rows(tmp_path / "uninterrupted")
    assert weights(tmp_path / "resumed") == weights(tmp_path / "uninterrupted")


@pytest.mark.parametrize("name", ["Plain", "LoaderTask", "RandomWalkTask"])
def test_another_world_size_keeps_order_and_curve(name: str, tmp_path: Path) -> None:
    options = {"optim": "sgd", "clip": 0.5, "learning_rate": 0.1}
    run(name, tmp_path / "uninterrupted", 2, **options)
    for world, stop in ((2, 4), (1, 8), (3, None)):
        run(name, tmp_path / "resumed", world, stop, **options)
    assert_same_metrics(rows(tmp_path / "uninterrupted"), rows(tmp_path / "resumed"))


def test_a_finished_run_is_extended(tmp_path: Path) -> None:
    run("Plain", tmp_path / "run", decay="constant")
    run("Plain", tmp_path / "run", decay="constant", epochs=3)
    run("Plain", tmp_path / "uninterrupted", decay="constant", epochs=3)
    assert rows(tmp_path / "run") == rows(tmp_path / "uninterrupted")


def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_is_used(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_every": 2, "keep": 5}
    run("Augmented", tmp_path / "uninterrupted", **options)
    run("Augmented", tmp_path / "first", 1, 6, **options)
    shard = "checkpoints/step-00000006/__0_0.distcp"
    damages = {
        "truncated": lambda data: data[:-10],
        "flipped": lambda data: data[:500] + bytes([data[500] ^ 1]) + data[501:],
    }
    for kind, damage in damages.items():
        damaged = tmp_path / kind
        shutil.copytree(tmp_path / "first", damaged)
        (damaged / shard).write_bytes(damage((damaged / shard).read_bytes()))
        run("Augmented", damaged, **options)
        assert rows(damaged) == rows(tmp_path / "uninterrupted")
        assert weights(damaged) == weights(tmp_path / "uninterrupted")
        events = (damaged / "events.jsonl").read_text()
        assert "damaged-checkpoint" in events
        assert '"resumed", "rank": 0, "step": 4' in events


def test_dropout_differs_between_steps_and_samples(tmp_path: Path) -> None:
    """Keyed randomness must still be random: with dropout the curve differs from the one without."""
    run("Plain", tmp_path / "without")
    run("Plain", tmp_path / "with", dropout=0.3)
    run("Plain", tmp_path / "seed", dropout=0.3, seed=1)
    curves = [tuple(r["train/loss"] for r in rows(tmp_path / n)) for n in ("without", "with", "seed")]
    assert len(set(curves)) == 3


def test_each_micro_batch_draws_dropout_of_its_own(tmp_path: Path) -> None:
    job = training("Plain", str(tmp_path), ALONE, {"dropout": 0.3}, {"micro_batch": 4})
    seeds: list[int] = []
    job.execution.step.micro_batch_hooks.append(lambda seed, inputs, form: seeds.append(seed))
    for step in range(3):
        job.execution.step(step)
    assert len(set(seeds)) == 3 * 4


def test_rows_are_on_the_disk_before_their_checkpoint_is_written(tmp_path: Path) -> None:
    class AtSaves(Observer):
        """Records the newest row on the disk when a checkpoint is about to be written."""

        last_rows: list[int] = []

        def reached(self, name: str) -> None:
            if name == "save":
                self.last_rows.append(rows(tmp_path)[-1]["step"])

        def __bool__(self) -> bool:
            return False

    observer = AtSaves()
    job = training("Plain", str(tmp_path), ALONE, {"save_every": 4, "keep": 10}, stop=observer)
    job.run_to_end()
    assert observer.last_rows == job.setup.run.checkpoint_steps() == [4, 8, 12, 14]


def test_best_keeps_and_exports_the_best_checkpoint(tmp_path: Path) -> None:
    run("Plain", tmp_path, best="loss", learning_rate=3.0, optim="sgd", epochs=4, keep=1, decay="constant")
    losses = {r["step"]: r["eval/loss"] for r in rows(tmp_path) if "eval/loss" in r}
    best = min(losses, key=lambda s: losses[s])
    assert best != max(losses), "the last evaluation must not be the best, or the test proves nothing"
    saved_steps = sorted(int(p.name.split("-")[1]) for p in (tmp_path / "checkpoints").iterdir())
    assert saved_steps == [best, max(losses)]
    exported = weights(tmp_path)
    # A damaged best checkpoint is reported, and the last weights are exported.
    shard = tmp_path / f"checkpoints/step-{best:08d}/__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-5])
    run("Plain", tmp_path, best="loss", learning_rate=3.0, optim="sgd", epochs=4, keep=1, decay="constant")
    assert "the best checkpoint" in (tmp_path / "events.jsonl").read_text()
    assert weights(tmp_path) != exported


def test_the_best_of_a_source_has_a_checkpoint(tmp_path: Path) -> None:
    run("RandomWalkTask", tmp_path, best="loss", eval_every=3, epochs=6, learning_rate=0.3, keep=1)
    evaluations = [row for row in rows(tmp_path) if "eval/loss" in row]
    assert all(row["step"] % 8 == 0 for row in evaluations), "evaluations wait for the end of an epoch, where a checkpoint can be written"
    best = min(evaluations, key=lambda row: row["eval/loss"])["step"]
    assert (tmp_path / f"checkpoints/step-{best:08d}").is_dir()
