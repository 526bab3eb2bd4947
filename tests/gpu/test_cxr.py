"""Chest X-rays on a GPU: captured, compiled and bf16 steps learn as plain ones, resumes are bit-equal, and scores are those of a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain.engine.group import Group
from drivetrain.tasks.cxr.cxr import Cxr
from drivetrain.tasks.cxr.net.augmentation import DRAWS, Strength, augment
from drivetrain.tasks.cxr.net.losses import HEADS
from drivetrain.tasks.cxr.net.regions import box_means
from drivetrain.tasks.cxr.twin.write import write_twin
from tests.cxr.batches import random_batch, small_model
from tests.sample_tasks import TASKS, rows, train, training, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
GPU = torch.device("cuda", 0)
EAGER = {"compile": "off", "capture": "off"}
SETTINGS: dict[str, Any] = {
    "encoder": "nano", "encoder_weights": "none", "text": "small", "text_layers": 1, "width": 32, "heads": 2, "layers": 1, "image_size": 64,
    "max_tokens": 16, "grade": "unrated", "questions_per_image": 4, "global_batch": 8, "steps": 60, "learning_rate": 1e-3, "warmup": 5,
    "dropout": 0.1, "best": None, "check": False, "log_every": 1, "eval_every": "1000ep",
}  # fmt: skip


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_twin(tmp_path_factory.mktemp("cxr-twin"), 40)


@pytest.fixture
def settings(twin: tuple[Path, Path], folder: Path) -> dict[str, Any]:
    TASKS["Cxr"] = Cxr
    return SETTINGS | {"data": str(twin[0]), "questions": str(twin[1])}


def losses_of(folder: Path, settings: dict[str, Any], pins: dict[str, Any]) -> list[float]:
    """Trains in a folder, and returns the loss of each step."""
    job = training("Cxr", str(folder), Group(0, 1, GPU), settings, pins)
    job.run_to_end()
    job.setup.observer.close()
    return [row["train/loss"] for row in rows(folder)]


def test_captured_steps_are_eager_ones(settings: dict[str, Any], folder: Path) -> None:
    """They are bit-equal: augmentation, dropped graphs and dropout draw the same numbers."""
    settings |= {"precision": "bf16", "deterministic": True}
    captured, eager = (losses_of(folder / how, settings, {"compile": "off", "capture": how}) for how in ("on", "off"))
    assert captured == eager and weights(folder / "on") == weights(folder / "off")
    assert np.mean(captured[-10:]) < 0.9 * np.mean(captured[:5])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_as_full_precision_does(precision: str, settings: dict[str, Any], folder: Path) -> None:
    full, half = (losses_of(folder / kind, settings | {"precision": kind, "steps": 100}, EAGER) for kind in ("fp32", precision))
    assert np.mean(half[-10:]) < 0.9 * np.mean(half[:5])
    assert np.mean(half[-10:]) == pytest.approx(np.mean(full[-10:]), rel=0.1)


def test_compiled_steps_learn_as_eager_ones_do(settings: dict[str, Any], folder: Path) -> None:
    settings |= {"precision": "fp32", "dropout": 0.0, "steps": 20, "learning_rate": 1e-4}
    compiled, eager = (losses_of(folder / how, settings, {"compile": how, "capture": "off"}) for how in ("on", "off"))
    assert compiled == pytest.approx(eager, rel=0.02)


@pytest.mark.parametrize("pins", [{}, EAGER], ids=["planned", "eager"])
def test_a_resumed_run_equals_an_uninterrupted_one(pins: dict[str, Any], settings: dict[str, Any], folder: Path) -> None:
    """They are bit-equal, with a checkpoint in the middle of an epoch."""
    settings |= {"precision": "bf16", "deterministic": True, "steps": 40}
    for name, parts in (("uninterrupted", [None]), ("resumed", [17, None])):
        for stop in parts:
            train("Cxr", str(folder / name), settings, pins, stop, Group(0, 1, GPU))
    assert rows(folder / "resumed") == rows(folder / "uninterrupted") and len(rows(folder / "uninterrupted")) == 40
    assert weights(folder / "resumed") == weights(folder / "uninterrupted")


def test_an_evaluation_gives_the_answers_of_a_cpu() -> None:
    task, model, batch = Cxr(**SETTINGS), small_model(), random_batch(images=8, questions=4)
    with torch.no_grad():
        on_cpu = task.metrics(model, batch)
        on_gpu = task.metrics(model.to(GPU), {name: value.to(GPU) for name, value in batch.items()})
    assert on_gpu.keys() == on_cpu.keys()
    for name in ("head_loss", "chexpert_score", "box_overlap"):
        torch.testing.assert_close(on_gpu[name].cpu(), on_cpu[name], rtol=1e-2, atol=1e-2)
    for source in ("none", "oracle", "predicted"):
        assert float((on_gpu[f"answer_{source}"].cpu() == on_cpu[f"answer_{source}"]).float().mean()) > 0.9


def test_gradients_of_every_head_are_those_of_a_cpu() -> None:
    task, batch = Cxr(**SETTINGS), random_batch(images=8, questions=4)
    task.__dict__["_index"] = type("Index", (), {"entity_names": ["unknown"] * 12})()
    gradients = []
    for device in (torch.device("cpu"), GPU):
        model = small_model().to(device)
        parts, _ = task.loss(model, {name: value.to(device) for name, value in batch.items()})
        assert set(HEADS) < set(parts)
        sum(total / count.clamp(min=1) for total, count in parts.values()).backward()
        gradients.append({name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert float((gradients[1][name] - gradient).norm()) < 0.02 * float(gradient.norm()) + 1e-5, name


def test_boxes_in_bf16_are_near_those_in_float64() -> None:
    torch.manual_seed(0)
    features, boxes = torch.randn(4, 64, 7, 7, dtype=torch.float64), torch.rand(4, 9, 2, 2).sort(2)[0].flatten(2)
    exact = box_means(features, boxes)
    means = box_means(features.to(GPU, torch.bfloat16), boxes.to(GPU)).cpu().double()
    assert means.shape == exact.shape and float((means - exact).norm() / exact.norm()) < 0.02


def test_augmentation_is_that_of_a_cpu() -> None:
    torch.manual_seed(0)
    images, boxes = torch.randint(0, 256, (5, 1, 48, 48), dtype=torch.uint8), torch.rand(5, 3, 2, 2).sort(2)[0].flatten(2)
    draws, strength = torch.rand(5, DRAWS), Strength(20, 0.1, 0.1, 0.2)
    image, (moved,) = augment(images, [boxes], draws, strength)
    image_on_gpu, (moved_on_gpu,) = augment(images.to(GPU), [boxes.to(GPU)], draws.to(GPU), strength)
    torch.testing.assert_close(image_on_gpu.cpu(), image, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(moved_on_gpu.cpu(), moved, rtol=1e-4, atol=1e-4)
