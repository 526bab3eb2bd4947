"""Image tasks: nets, augmentation, and folders of images of every kind with their cache."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drivetrain.engine.rand import KeyedRand
from drivetrain.outcomes import Outcome, Problem
from drivetrain.tasks import imagecache, images
from drivetrain.tasks.vision import augment, nets
from drivetrain.tasks.vision.cifar import Cifar10
from drivetrain.tasks.vision.classify import Pixels
from drivetrain.tasks.vision.folder import Folder
from drivetrain.tasks.vision.mnist import Mnist
from tests.command import bad, good
from tests.test_datasets import write_mnist

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))


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
def test_nets_fit_their_images(net: str, channels: int, size: int, classes: int, parameters: int | None) -> None:
    torch.manual_seed(0)
    model = nets.build(net, channels, size, classes, dropout=0.1, hidden=256)
    assert parameters in (None, sum(p.numel() for p in model.parameters()))
    logits = model(torch.randn(2, channels, size, size))
    assert logits.shape == (2, classes)
    logits.logsumexp(1).sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_patches_that_do_not_fit_are_told_a_size_that_does() -> None:
    with pytest.raises(Problem, match="size=96 or size=104"):
        nets.build("vit-s", 3, 100, 10, 0.0, 1)


# --- augmentation ------------------------------------------------------------------------------


def draws(*rows: tuple[float, float, float]) -> Tensor:
    return torch.tensor(rows)


def some_images(height: int = 12, width: int = 20, n: int = 1) -> Tensor:
    return torch.randint(0, 256, (n, 3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_no_turn_and_no_move_changes_nothing() -> None:
    x = some_images()
    y = augment.affine(x, 90.0, 0.5, draws((0.5, 0.5, 0.5)))
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, x.float(), rtol=0, atol=5e-3)


def test_moves_go_right_and_down_by_whole_pixels() -> None:
    x = some_images()  # 20 wide: +-0.25 is +-5 pixels; 12 high: +-3
    right_up = augment.affine(x, 0.0, 0.25, draws((0.0, 1.0, 0.0)))
    expected = torch.zeros_like(right_up)
    expected[..., :-3, 5:] = x[..., 3:, :-5].float()
    torch.testing.assert_close(right_up, expected, rtol=0, atol=5e-3)


def test_a_positive_quarter_turn_is_rot90() -> None:
    x = some_images(16, 16)
    y = augment.affine(x, 90.0, 0.0, draws((1.0, 0.5, 0.5)))
    torch.testing.assert_close(y, torch.rot90(x, 1, (2, 3)).float(), rtol=0, atol=5e-2)
    y = augment.affine(x, 90.0, 0.0, draws((0.0, 0.5, 0.5)))
    torch.testing.assert_close(y, torch.rot90(x, -1, (2, 3)).float(), rtol=0, atol=5e-2)


def test_a_turn_and_a_move_match_a_plain_reference() -> None:
    """Every output pixel looked up by hand, in an image that is not square."""
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


def test_flips_follow_their_draws() -> None:
    x = some_images(n=2)
    y = augment.flip(x, torch.tensor([[0.2], [0.7]]))
    assert torch.equal(y[0], x[0].flip(-1))
    assert torch.equal(y[1], x[1])


def test_a_sample_is_augmented_alike_in_any_batch() -> None:
    task = Cifar10(rotation=15.0)
    x, y = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8), torch.arange(8)
    whole, _ = task.augment((x, y), KeyedRand(torch.arange(8), 1, 2))
    part, labels = task.augment((x[3:5], y[3:5]), KeyedRand(torch.arange(3, 5), 1, 2))
    assert torch.equal(whole[3:5], part)
    assert labels.tolist() == [3, 4]
    assert not torch.equal(whole[3:5], x[3:5].float())


def test_without_settings_images_stay_bytes() -> None:
    batch = (some_images(28, 28), torch.zeros(1))
    assert Mnist().augment(batch, KeyedRand(torch.arange(1), 0)) is batch


def test_channels_are_normalised_each_by_its_own() -> None:
    x = some_images(n=4)
    mean, std = x.float().mean((0, 2, 3)) / 255, x.float().std((0, 2, 3)) / 255
    y = Pixels(tuple(mean.tolist()), tuple(std.tolist())).normalise(x)
    torch.testing.assert_close(y, (x.float() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1))
    grey = Pixels((0.1307,), (0.3081,)).normalise(x[:, :1])
    torch.testing.assert_close(grey, (x[:, :1].float() / 255 - 0.1307) / 0.3081)


class Devices(TorchDispatchMode):
    """Where the inputs and results of every operation are."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.seen |= {t.device.type for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)}
        return result


@pytest.mark.parametrize("net", ["cnn", "conv4", "mlp", "resnet18", "vit-s"])
def test_a_step_stays_on_the_device(net: str) -> None:
    """On the meta device nothing has a value: whatever looks at one (a host sync) or brings one along fails."""
    task = Cifar10(net=net, rotation=10.0, label_smoothing=0.1, dropout=0.1)
    model = task.model().to("meta")

    class Draws:
        def uniform(self, k: int) -> Tensor:
            return torch.empty(8, k, device="meta")

    batch = (torch.empty(8, 3, 32, 32, dtype=torch.uint8, device="meta"), torch.empty(8, dtype=torch.long, device="meta"))
    with Devices() as devices:
        value, _ = task.loss(model, task.augment(batch, Draws()))  # type: ignore[arg-type]
        value.backward()
    assert devices.seen == {"meta"}


def test_a_loss_compiles_once_and_whole() -> None:
    task, counter = Cifar10(net="cnn"), CompileCounter()
    model = task.model()
    batch = (torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8), torch.arange(4))
    compiled = torch.compile(lambda batch: task.loss(model, batch)[0], backend=counter, fullgraph=True)
    for _ in range(2):
        compiled(batch)
    assert counter.frame_count == 1


def test_smoothing_is_for_training_only() -> None:
    x, y = some_images(28, 28, n=4)[:, :1], torch.tensor([1, 2, 3, 4])
    plain, smooth = Mnist(dropout=0.0), Mnist(dropout=0.0, label_smoothing=0.3)
    model = plain.model().eval()
    assert plain.loss(model, (x, y))[0] != smooth.loss(model, (x, y))[0]
    assert torch.equal(plain.metrics(model, (x, y))["loss"], smooth.metrics(model, (x, y))["loss"])


# --- images of every kind ----------------------------------------------------------------------


def halves(left: Any, right: Any, mode: str, size: tuple[int, int] = (40, 40)) -> Image.Image:
    """An image whose halves have one value each."""
    image = Image.new(mode, size, left)
    image.paste(right, (size[0] // 2, 0, size[0], size[1]))
    return image


def palette(transparent: bool) -> Image.Image:
    image = halves(0, 1, "P")
    image.putpalette([255, 0, 0, 0, 0, 255] + [0] * 762)
    if transparent:
        image.info["transparency"] = 1
    return image


def deep(mode: str) -> Image.Image:
    values = np.zeros((40, 40), np.uint16 if mode == "I;16" else np.int32)
    values[:, :20], values[:, 20:] = 0x4000, 0xFFFF
    return Image.fromarray(values)


KINDS: dict[str, tuple[Any, str, tuple[int, ...], tuple[int, ...]]] = {
    "grey": (lambda: halves(10, 200, "L"), "png", (10,), (200,)),
    "colour": (lambda: halves((255, 0, 0), (0, 128, 255), "RGB"), "png", (255, 0, 0), (0, 128, 255)),
    "colour without colours": (lambda: halves((9, 9, 9), (99, 99, 99), "RGB"), "bmp", (9,), (99,)),
    "one bit": (lambda: halves(0, 1, "1"), "png", (0,), (255,)),
    "16 bits": (lambda: deep("I;16"), "png", (64,), (255,)),
    "16 bits of 32": (lambda: deep("I"), "tiff", (64,), (255,)),
    "floats": (lambda: halves(0.25, 1.0, "F"), "tiff", (64,), (255,)),
    "alpha": (lambda: halves((0, 0, 255, 255), (0, 0, 0, 0), "RGBA"), "png", (0, 0, 255), (255, 255, 255)),
    "half transparent": (lambda: halves((0, 0, 0, 255), (0, 0, 0, 51), "RGBA"), "png", (0,), (204,)),
    "grey with alpha": (lambda: halves((30, 255), (0, 0), "LA"), "png", (30,), (255,)),
    "palette": (lambda: palette(False), "png", (255, 0, 0), (0, 0, 255)),
    "transparent palette": (lambda: palette(True), "png", (255, 0, 0), (255, 255, 255)),
    "gif": (lambda: palette(False), "gif", (255, 0, 0), (0, 0, 255)),
    "cmyk": (lambda: halves((0, 255, 255, 0), (0, 0, 0, 255), "CMYK"), "tiff", (255, 0, 0), (0, 0, 0)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_images_of_every_kind(kind: str, tmp_path: Path) -> None:
    make, suffix, left, right = KINDS[kind]
    path = tmp_path / f"image.{suffix}"
    make().save(path)
    pixels = images.decode(path, 20, "auto")
    assert pixels.shape == (len(left), 20, 20)
    assert pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels[:, 10, 2], left)
    np.testing.assert_array_equal(pixels[:, 10, 17], right)
    assert images.decode(path, 20, "rgb").shape[0] == 3
    assert images.decode(path, 20, "grey").shape[0] == 1


def test_exif_rotation_is_applied(tmp_path: Path) -> None:
    image = halves(10, 200, "L")
    exif = image.getexif()
    exif[0x0112] = 6  # turn clockwise to see it upright: left becomes top
    image.save(tmp_path / "a.jpg", exif=exif, quality=100)
    pixels = images.decode(tmp_path / "a.jpg", 20, "auto")[0]
    assert (pixels[:5] < 20).all()
    assert (pixels[-5:] > 190).all()


def test_the_centre_square_is_kept(tmp_path: Path) -> None:
    image = halves(0, 255, "L", (300, 30))
    image.paste(77, (130, 0, 170, 30))  # the middle 30 columns, and what smoothing sees beside them
    image.save(tmp_path / "long.png")
    assert (images.decode(tmp_path / "long.png", 16, "auto") == 77).all()
    Image.new("L", (1, 3000), 50).save(tmp_path / "line.png")
    assert (images.decode(tmp_path / "line.png", 16, "auto") == 50).all()


def test_shrinking_averages(tmp_path: Path) -> None:
    checks = (np.indices((640, 640)).sum(0) % 2 * 255).astype(np.uint8)
    Image.fromarray(checks).save(tmp_path / "checks.png")
    pixels = images.decode(tmp_path / "checks.png", 32, "auto")
    assert abs(pixels.astype(int) - 127).max() <= 2


# --- folders -----------------------------------------------------------------------------------


def write_folder(top: Path, train: int = 6, test: int = 3, classes: tuple[str, ...] = ("dark night", "été")) -> Path:
    """Images of 20x24 whose class is their brightness."""
    for split, count in (("train", train), ("test", test)):
        for place, name in enumerate(classes):
            (top / split / name).mkdir(parents=True)
            for i in range(count):
                Image.new("L", (20, 24), 40 + 150 * place + i).save(top / split / name / f"{i}.png")
    return top


def load(top: Path, size: int = 16, colour: Any = "auto", bad_samples: Any = "stop") -> imagecache.Images:
    return imagecache.load(str(top), size, colour, bad_samples)


def no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("an image was opened")

    monkeypatch.setattr(Image, "open", refuse)


def caches(top: Path) -> list[str]:
    return sorted(p.name for p in (top / imagecache.HOME).iterdir() if not p.name.startswith("."))


def test_a_folder_becomes_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    top = write_folder(tmp_path / "my data")
    (top / "train/été/more/deeper").mkdir(parents=True)
    Image.new("L", (9, 9), 200).save(top / "train/été/more/deeper/x.webp")
    (top / "train/été/.hidden").write_text("no image")
    (top / "train/été/Thumbs.db").write_text("no image")
    (top / "train/README").write_text("no class")
    found = load(top)
    x, y = found.train[:]
    assert found.classes == ("dark night", "été")
    assert (x.shape, x.dtype) == ((13, 1, 16, 16), torch.uint8)
    assert y.tolist() == [0] * 6 + [1] * 7
    assert [int(v) for v in x[:, 0, 0, 0]] == [40, 41, 42, 43, 44, 45, 190, 191, 192, 193, 194, 195, 200]
    assert found.test is not None
    assert len(found.test) == 6
    assert found.mean[0] == pytest.approx(x.double().mean().item() / 255, rel=1e-9)
    assert found.std[0] == pytest.approx(x.double().std(correction=0).item() / 255, rel=1e-9)
    assert capsys.readouterr().err == ""


def test_one_coloured_image_makes_all_coloured(tmp_path: Path) -> None:
    top = write_folder(tmp_path)
    Image.new("RGB", (20, 20), (255, 0, 0)).save(top / "test/été/red.png")
    assert load(top).train[:][0].shape[1] == 3
    assert load(top, colour="grey").train[:][0].shape[1] == 1
    task = Folder(data_dir=str(top), size=16, net="mlp")
    assert task.model()(task.prepare(task.train_data()[:2][0])).shape == (2, 2)
    assert task.channels == 3


def test_links_do_not_lead_astray(tmp_path: Path) -> None:
    top = write_folder(tmp_path / "data")
    (top / "train/été/loop").symlink_to(top / "train/été")
    (top / "train/été/up").symlink_to(top)
    assert len(images.list_images(top).splits["train"]) == 12 + 6 + 6  # through `up` all else is seen once
    (top / "train/été/up").unlink()
    shutil.move(top / "train/été", tmp_path / "elsewhere")
    (top / "train/été").symlink_to(tmp_path / "elsewhere")
    assert len(images.list_images(top).splits["train"]) == 12
    (top / "train/été/self").symlink_to("self")
    (top / "train/été/nowhere.png").symlink_to("/nowhere.png")
    assert {Path(p).name for p, _ in bad_items(top)} == {"self", "nowhere.png"}


def bad_items(top: Path) -> list[list[str]]:
    load(top, bad_samples="skip")
    (name,) = caches(top)
    return json.loads((top / imagecache.HOME / name / "facts.json").read_text())["bad"]  # type: ignore[no-any-return]


def remove(top: Path, what: str) -> None:
    shutil.rmtree(top / what)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda top: remove(top, "."), r"there is no folder .*data_dir=FOLDER"),
        (lambda top: remove(top, "train"), r"there is no folder .*/train: put images into"),
        (lambda top: [remove(top, f"train/{c}") for c in ("été", "dark night")], r"/train has no folders: put the images of each class"),
        (lambda top: remove(top, "train/été"), r"single class \(dark night\): a classifier needs two or more"),
        (lambda top: [p.unlink() for p in (top / "train/été").iterdir()], r"/train/été has no images: put some there, or remove"),
        (lambda top: [p.unlink() for p in (top / "test").glob("*/*")], r"/test has no images: .*remove the folder to train without"),
        (
            lambda top: (top / "test/other").mkdir(),
            r"/test/other is no class of training \(dark night, été\): remove it, or add .*/train/other",
        ),
    ],
)
def test_what_is_no_data_set_is_told_what_would_be(change: Any, message: str, tmp_path: Path) -> None:
    top = write_folder(tmp_path / "data")
    change(top)
    with pytest.raises(Problem, match=message) as caught:
        load(top)
    assert caught.value.outcome is Outcome.USAGE


def test_missing_tests_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    top = write_folder(tmp_path)
    remove(top, "test/été")
    load(top)
    assert "test has no images of été" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    load(top)
    assert capsys.readouterr().err == "", "one rank speaks"
    monkeypatch.setenv("RANK", "0")
    remove(top, "test")
    assert Folder(data_dir=str(top)).eval_data() is None
    assert "nothing is evaluated" in capsys.readouterr().err


def break_images(top: Path) -> dict[str, str]:
    """Three files that are no whole images, and what is wrong with them."""
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (90, 90, 3)).astype(np.uint8)).save(top / "train/été/cut.jpg")
    data = (top / "train/été/cut.jpg").read_bytes()
    (top / "train/été/cut.jpg").write_bytes(data[: len(data) // 2])
    (top / "train/été/page.html.png").write_text("<html>404</html>")
    (top / "test/été/empty.png").touch()
    return {"train/été/cut.jpg": "truncated", "train/été/page.html.png": "no image format", "test/été/empty.png": "no image format"}


def test_a_bad_image_stops_or_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    top = write_folder(tmp_path)
    broken = break_images(top)
    with pytest.raises(Problem, match=r"cut\.jpg cannot be read \(.*truncated.*bad_samples=skip") as caught:
        load(top)
    assert caught.value.outcome is Outcome.DATA
    assert caches(top) == []
    found = load(top, bad_samples="skip")
    said = capsys.readouterr().err
    assert "3 images could not be read and are left out" in said
    assert all(name in said and why in said for name, why in broken.items())
    assert found.test is not None
    assert (len(found.train), len(found.test)) == (12, 6)
    with pytest.raises(Problem, match=r"cut\.jpg"):
        load(top)  # also where a cache without it exists


def test_a_class_without_a_good_image(tmp_path: Path) -> None:
    top = write_folder(tmp_path)
    for path in (top / "train/été").iterdir():
        path.write_bytes(b"broken")
    with pytest.raises(Problem, match=r"none of the images in .*/train/été could be read"):
        load(top, bad_samples="skip")


def test_bombs_and_programs_are_bad_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top = write_folder(tmp_path)
    Image.new("1", (300, 300)).save(top / "train/été/bomb.png")
    Image.new("L", (8, 8)).save(top / "train/été/program.eps")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40_000)
    reasons = {Path(path).name: why for path, why in bad_items(top)}
    assert reasons.keys() == {"bomb.png", "program.eps"}
    assert "decompression bomb" in reasons["bomb.png"]


# --- the cache ---------------------------------------------------------------------------------


def test_the_second_load_decodes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top = write_folder(tmp_path)
    first = load(top)
    no_decoding(monkeypatch)
    again = load(top)
    assert torch.equal(first.train[:][0], again.train[:][0])
    assert (again.mean, again.std, again.classes) == (first.mean, first.std, first.classes)


@pytest.mark.parametrize("change", ["added", "removed", "changed"])
def test_a_changed_folder_is_decoded_anew(change: str, tmp_path: Path) -> None:
    top = write_folder(tmp_path)
    load(top)
    load(top, size=20)
    before = caches(top)
    if change == "removed":
        (top / "train/été/0.png").unlink()
    else:
        Image.new("L", (20, 24), 255).save(top / "train/été" / ("0.png" if change == "changed" else "zz.png"))
    x, _ = load(top).train[:]
    assert len(x) == {"added": 13, "removed": 11, "changed": 12}[change]
    assert (int(x.max()) == 255) == (change != "removed")
    after = caches(top)
    assert len(after) == 2, "the old one of these settings is gone"
    assert len(set(before) & set(after)) == 1, "that of another size is kept"


@pytest.mark.parametrize("file", ["train-images.npy", "test-images.npy", "train-labels.npy", "facts.json"])
def test_a_damaged_cache_is_made_anew(file: str, tmp_path: Path) -> None:
    top = write_folder(tmp_path)
    whole = load(top).train[:][0].clone()
    (name,) = caches(top)
    damaged = top / imagecache.HOME / name / file
    data = damaged.read_bytes()
    damaged.unlink()  # a new file: the first load's map keeps the old one
    damaged.write_bytes(data[:-50])
    assert torch.equal(load(top).train[:][0], whole)
    assert damaged.read_bytes() == data


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    top = write_folder(tmp_path)
    load(top)
    (name,) = caches(top)
    os.rename(top / imagecache.HOME / name, top / imagecache.HOME / f"{name}.tmp")
    load(top)
    assert caches(top) == [name]


def test_a_data_dir_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    top = write_folder(tmp_path / "data")
    (top / imagecache.HOME).touch()  # a file where the folder should be: holds for root too
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    first = load(top).train[:][0]
    with monkeypatch.context() as patch:
        no_decoding(patch)
        assert torch.equal(load(top).train[:][0], first)
    assert list((tmp_path / "mine").rglob("train-images.npy"))
    shutil.rmtree(tmp_path / "mine")
    (tmp_path / "mine").touch()
    assert torch.equal(load(top).train[:][0], first)
    assert "could not be kept on disk" in capsys.readouterr().err


def test_a_full_disk_leaves_them_in_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    top = write_folder(tmp_path / "data")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        found = load(top)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "could not be kept on disk" in capsys.readouterr().err
    assert caches(top) == [], "nothing half-written stays"
    assert torch.equal(found.train[:][0], load(top).train[:][0])


def _load_and_count(top: Path, counter: Any) -> None:
    original = images.Image.open

    def counted(*args: Any, **options: Any) -> Any:
        with counter.get_lock():
            counter.value += 1
        return original(*args, **options)

    images.Image.open = counted  # type: ignore[assignment]
    assert len(load(top).train) == 12


def test_processes_that_ask_together_decode_once(tmp_path: Path) -> None:
    top = write_folder(tmp_path)
    context = multiprocessing.get_context("fork")
    counter = context.Value("i", 0)
    children = [context.Process(target=_load_and_count, args=(top, counter)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [c.exitcode for c in children] == [0, 0, 0]
    assert counter.value == 18


# --- the command -------------------------------------------------------------------------------


def test_a_folder_trains_and_evaluates(folder: Path) -> None:
    write_folder(Path("my photos"), train=20, test=6)
    words = ("data_dir=my photos", "size=16", "net=cnn", "steps=25", "global_batch=16", "rotation=10", "flip=true")
    good("train", "folder", *words, "--name", "first")
    output = good("eval", "first")
    assert "accuracy 100.0 %" in output
    assert "(12 samples)" in output
    assert Path("runs/first/confusion.png").is_file()
    summary = Path("runs/first/summary.txt").read_text()
    assert "Dataset:            my photos" in summary
    assert "Classes:            2" in summary
    assert "Channels:           1" in summary


def test_a_bad_image_ends_the_command(folder: Path) -> None:
    top = write_folder(Path("photos"))
    break_images(top)
    assert "bad_samples=skip" in bad("train", "folder", "data_dir=photos", "size=16", code=Outcome.DATA.code)
    output = good("train", "folder", "data_dir=photos", "size=16", "net=mlp", "steps=1", "bad_samples=skip", "--procs", "2")
    assert output.count("3 images could not be read") == 1


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_trains(recipe: Path, folder: Path) -> None:
    write_mnist(Path("data"), samples=40)
    assert f"drivetrain train recipes/{recipe.name}" in recipe.read_text()
    output = good("train", str(recipe), "steps=3", "global_batch=16", DRIVETRAIN_OFFLINE="1")
    assert "step 3/3" in output


def test_there_are_recipes() -> None:
    assert {p.stem for p in RECIPES} >= {"guide-000", "guide-001"}
