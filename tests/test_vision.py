"""Image tasks: nets, augmentation on the device, and the shipped recipes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drivetrain.engine.data.keyed_random import KeyedRand
from drivetrain.outcomes import Problem
from drivetrain.tasks.vision import augment, nets
from drivetrain.tasks.vision.cifar import Cifar10
from drivetrain.tasks.vision.classify import Pixels
from drivetrain.tasks.vision.mnist import Mnist
from tests.command import run_ok
from tests.test_datasets import write_mnist

OF_OTHER_FAMILIES = {"guide-002", "guide-004", "lora-guide-000"}
RECIPES = [p for p in sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml")) if p.stem not in OF_OTHER_FAMILIES]


# --- nets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("net", "channels", "size", "classes", "parameters"),
    [
        ("cnn", 1, 28, 10, 225_034),  # guide 000
        ("cnn", 3, 64, 5, None),
        ("conv4", 1, 28, 10, 463_882),  # guide 001
        ("conv4", 3, 32, 10, 465_482),
        ("conv4", 1, 16, 3, None),
        ("mlp", 3, 32, 10, 3072 * 256 + 256 + 2570),
        ("resnet18", 3, 224, 1000, 11_689_512),  # as published
        ("resnet18", 3, 32, 10, 11_173_962),
        ("resnet18", 1, 16, 2, None),
        ("vit-s", 3, 224, 1000, 22_050_664 - 2 * 384),  # as published, without the class token and its position
        ("vit-s", 1, 28, 10, None),
        ("vit-s", 3, 64, 10, None),
    ],
)
def test_nets_have_their_number_of_parameters_and_train(net: str, channels: int, size: int, classes: int, parameters: int | None) -> None:
    torch.manual_seed(0)
    model = nets.build(net, channels, size, classes, dropout=0.1, hidden=256)
    assert parameters in (None, sum(p.numel() for p in model.parameters()))
    logits = model(torch.randn(2, channels, size, size))
    assert logits.shape == (2, classes)
    logits.logsumexp(1).sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_a_size_that_patches_do_not_divide_is_refused_with_one_that_fits() -> None:
    with pytest.raises(Problem, match="size=96 or size=104"):
        nets.build("vit-s", 3, 100, 10, 0.0, 1)


# --- augmentation ------------------------------------------------------------------------------


def draws(*rows: tuple[float, float, float]) -> Tensor:
    return torch.tensor(rows)


def some_images(height: int = 12, width: int = 20, n: int = 1) -> Tensor:
    return torch.randint(0, 256, (n, 3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_no_rotation_and_no_translation_changes_nothing() -> None:
    images = some_images()
    augmented = augment.affine(images, 90.0, 0.5, draws((0.5, 0.5, 0.5)))
    assert augmented.dtype == torch.float32
    torch.testing.assert_close(augmented, images.float(), rtol=0, atol=5e-3)


def test_translations_go_right_and_down_by_whole_pixels() -> None:
    x = some_images()  # 20 wide: +-0.25 is +-5 pixels; 12 high: +-3
    right_up = augment.affine(x, 0.0, 0.25, draws((0.0, 1.0, 0.0)))
    expected = torch.zeros_like(right_up)
    expected[..., :-3, 5:] = x[..., 3:, :-5].float()
    torch.testing.assert_close(right_up, expected, rtol=0, atol=5e-3)


def test_a_positive_rotation_of_90_degrees_is_rot90() -> None:
    x = some_images(16, 16)
    y = augment.affine(x, 90.0, 0.0, draws((1.0, 0.5, 0.5)))
    torch.testing.assert_close(y, torch.rot90(x, 1, (2, 3)).float(), rtol=0, atol=5e-2)
    y = augment.affine(x, 90.0, 0.0, draws((0.0, 0.5, 0.5)))
    torch.testing.assert_close(y, torch.rot90(x, -1, (2, 3)).float(), rtol=0, atol=5e-2)


def test_rotation_and_translation_match_a_plain_reference() -> None:
    """The reference computes every output pixel in a loop; the image is not square."""
    x, degrees, part = some_images(9, 14, n=2), 40.0, 0.2
    random = torch.rand(2, 3, generator=torch.Generator().manual_seed(1))
    expected = torch.zeros(2, 3, 9, 14)
    for n in range(2):
        angle, right, down = ((2 * random[n] - 1) * torch.tensor([math.radians(degrees), part * 14, part * 9])).tolist()
        for row in range(9):
            for column in range(14):
                dx, dy = column - 6.5 - right, row - 4.0 - down
                u = 6.5 + math.cos(angle) * dx - math.sin(angle) * dy
                v = 4.0 + math.sin(angle) * dx + math.cos(angle) * dy
                for i in (math.floor(v), math.floor(v) + 1):
                    for j in (math.floor(u), math.floor(u) + 1):
                        if 0 <= i < 9 and 0 <= j < 14:
                            expected[n, :, row, column] += (1 - abs(v - i)) * (1 - abs(u - j)) * x[n, :, i, j]
    torch.testing.assert_close(augment.affine(x, degrees, part, random), expected, rtol=0, atol=1e-2)


def test_an_image_is_flipped_if_its_number_is_under_a_half() -> None:
    x = some_images(n=2)
    y = augment.flip(x, torch.tensor([[0.2], [0.7]]))
    assert torch.equal(y[0], x[0].flip(-1))
    assert torch.equal(y[1], x[1])


def test_a_sample_is_augmented_the_same_way_in_any_batch() -> None:
    task = Cifar10(rotation=15.0)
    x, y = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8), torch.arange(8)
    augmented_batch, _ = task.augment((x, y), KeyedRand(torch.arange(8), 1, 2))
    augmented_part, labels = task.augment((x[3:5], y[3:5]), KeyedRand(torch.arange(3, 5), 1, 2))
    assert torch.equal(augmented_batch[3:5], augmented_part)
    assert labels.tolist() == [3, 4]
    assert not torch.equal(augmented_batch[3:5], x[3:5].float())


def test_without_settings_images_stay_bytes() -> None:
    batch = (some_images(28, 28), torch.zeros(1))
    assert Mnist().augment(batch, KeyedRand(torch.arange(1), 0)) is batch


def test_each_channel_is_normalised_by_its_own_mean_and_deviation() -> None:
    x = some_images(n=4)
    mean, std = x.float().mean((0, 2, 3)) / 255, x.float().std((0, 2, 3)) / 255
    y = Pixels(tuple(mean.tolist()), tuple(std.tolist())).normalise(x)
    torch.testing.assert_close(y, (x.float() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1))
    grey = Pixels((0.1307,), (0.3081,)).normalise(x[:, :1])
    torch.testing.assert_close(grey, (x[:, :1].float() / 255 - 0.1307) / 0.3081)


class Devices(TorchDispatchMode):
    """Collects the devices of every operation's inputs and results."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.types |= {t.device.type for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)}
        return result


@pytest.mark.parametrize("net", ["cnn", "conv4", "mlp", "resnet18", "vit-s"])
def test_a_step_stays_on_the_device(net: str) -> None:
    """Tensors on the meta device have no values: an operation that reads one (a host sync), or that uses another device, fails."""
    task = Cifar10(net=net, rotation=10.0, label_smoothing=0.1, dropout=0.1)
    model = task.model().to("meta")

    class Draws:
        def uniform(self, k: int) -> Tensor:
            return torch.empty(8, k, device="meta")

    batch = (torch.empty(8, 3, 32, 32, dtype=torch.uint8, device="meta"), torch.empty(8, dtype=torch.long, device="meta"))
    with Devices() as devices:
        value, _ = task.loss(model, task.augment(batch, Draws()))  # type: ignore[arg-type]
        value.backward()
    assert devices.types == {"meta"}


def test_a_loss_compiles_once_as_one_graph() -> None:
    task, counter = Cifar10(net="cnn"), CompileCounter()
    model = task.model()
    batch = (torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8), torch.arange(4))
    compiled = torch.compile(lambda batch: task.loss(model, batch)[0], backend=counter, fullgraph=True)
    for _ in range(2):
        compiled(batch)
    assert counter.frame_count == 1


def test_label_smoothing_changes_the_loss_but_not_the_metrics() -> None:
    x, y = some_images(28, 28, n=4)[:, :1], torch.tensor([1, 2, 3, 4])
    plain, smoothed = Mnist(dropout=0.0), Mnist(dropout=0.0, label_smoothing=0.3)
    model = plain.model().eval()
    assert plain.loss(model, (x, y))[0] != smoothed.loss(model, (x, y))[0]
    assert torch.equal(plain.metrics(model, (x, y))["loss"], smoothed.metrics(model, (x, y))["loss"])


# --- recipes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_trains(recipe: Path, folder: Path) -> None:
    write_mnist(Path("data"), samples=40)
    assert f"drivetrain train recipes/{recipe.name}" in recipe.read_text()
    output = run_ok("train", str(recipe), "steps=3", "global_batch=16", DRIVETRAIN_OFFLINE="1")
    assert "step 3/3" in output


def test_the_recipes_of_the_guides_exist() -> None:
    assert {p.stem for p in RECIPES} >= {"guide-000", "guide-001"}
