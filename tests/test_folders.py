"""Folders of images: every kind of image file, unreadable files, and the cache of decoded images."""

from __future__ import annotations

import json
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

from drivetrain.outcomes import Outcome, Problem
from drivetrain.tasks import imagecache, images
from drivetrain.tasks.vision.folder import Folder
from tests.command import expect_error, run_ok

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))


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
        for number, name in enumerate(classes):
            (top / split / name).mkdir(parents=True)
            for i in range(count):
                Image.new("L", (20, 24), 40 + 150 * number + i).save(top / split / name / f"{i}.png")
    return top


def load(top: Path, size: int = 16, colour: Any = "auto", bad_samples: Any = "stop") -> imagecache.Images:
    return imagecache.load(str(top), size, colour, bad_samples)


def no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("an image was opened")

    monkeypatch.setattr(Image, "open", refuse)


def caches(top: Path) -> list[str]:
    return sorted(p.name for p in (top / imagecache.CACHE_FOLDER).iterdir() if not p.name.startswith("."))


def test_a_folder_becomes_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    top = write_folder(tmp_path / "my data")
    (top / "train/été/more/deeper").mkdir(parents=True)
    Image.new("L", (9, 9), 200).save(top / "train/été/more/deeper/x.webp")
    (top / "train/été/.hidden").write_text("no image")
    (top / "train/été/Thumbs.db").write_text("no image")
    (top / "train/README").write_text("no class")
    data = load(top)
    x, y = data.train[:]
    assert data.classes == ("dark night", "été")
    assert (x.shape, x.dtype) == ((13, 1, 16, 16), torch.uint8)
    assert y.tolist() == [0] * 6 + [1] * 7
    assert [int(v) for v in x[:, 0, 0, 0]] == [40, 41, 42, 43, 44, 45, 190, 191, 192, 193, 194, 195, 200]
    assert data.test is not None
    assert len(data.test) == 6
    assert data.mean[0] == pytest.approx(x.double().mean().item() / 255, rel=1e-9)
    assert data.std[0] == pytest.approx(x.double().std(correction=0).item() / 255, rel=1e-9)
    assert capsys.readouterr().err == ""


def test_one_coloured_image_makes_all_coloured(tmp_path: Path) -> None:
    top = write_folder(tmp_path)
    Image.new("RGB", (20, 20), (255, 0, 0)).save(top / "test/été/red.png")
    assert load(top).train[:][0].shape[1] == 3
    assert load(top, colour="grey").train[:][0].shape[1] == 1
    task = Folder(data_dir=str(top), size=16, net="mlp")
    assert task.model()(task.prepare(task.train_data()[:2][0])).shape == (2, 2)
    assert task.channels == 3


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    top = write_folder(tmp_path / "data")
    (top / "train/été/loop").symlink_to(top / "train/été")
    (top / "train/été/up").symlink_to(top)
    assert len(images.list_images(top).splits["train"]) == 12 + 6 + 6  # through `up`, all images are listed once more
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
    return json.loads((top / imagecache.CACHE_FOLDER / name / "facts.json").read_text())["bad"]  # type: ignore[no-any-return]


def remove(top: Path, name: str) -> None:
    shutil.rmtree(top / name)


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
def test_a_folder_that_is_no_data_set_is_refused_with_the_fix(change: Any, message: str, tmp_path: Path) -> None:
    top = write_folder(tmp_path / "data")
    change(top)
    with pytest.raises(Problem, match=message) as caught:
        load(top)
    assert caught.value.outcome is Outcome.USAGE


def test_missing_test_images_give_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    top = write_folder(tmp_path)
    remove(top, "test/été")
    load(top)
    assert "test has no images of été" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    load(top)
    assert capsys.readouterr().err == "", "only rank 0 warns"
    monkeypatch.setenv("RANK", "0")
    remove(top, "test")
    assert Folder(data_dir=str(top)).eval_data() is None
    assert "nothing is evaluated" in capsys.readouterr().err


def break_images(top: Path) -> dict[str, str]:
    """Writes three unreadable image files; returns the reason for each."""
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (90, 90, 3)).astype(np.uint8)).save(top / "train/été/cut.jpg")
    data = (top / "train/été/cut.jpg").read_bytes()
    (top / "train/été/cut.jpg").write_bytes(data[: len(data) // 2])
    (top / "train/été/page.html.png").write_text("<html>404</html>")
    (top / "test/été/empty.png").touch()
    return {"train/été/cut.jpg": "truncated", "train/été/page.html.png": "no image format", "test/été/empty.png": "no image format"}


def test_a_bad_image_stops_or_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    top = write_folder(tmp_path)
    unreadable = break_images(top)
    with pytest.raises(Problem, match=r"cut\.jpg cannot be read \(.*truncated.*bad_samples=skip") as caught:
        load(top)
    assert caught.value.outcome is Outcome.DATA
    assert caches(top) == []
    data = load(top, bad_samples="skip")
    warning = capsys.readouterr().err
    assert "3 images could not be read and are left out" in warning
    assert all(name in warning and reason in warning for name, reason in unreadable.items())
    assert data.test is not None
    assert (len(data.train), len(data.test)) == (12, 6)
    with pytest.raises(Problem, match=r"cut\.jpg"):
        load(top)  # even though a cache without the image exists


def test_a_class_without_a_good_image(tmp_path: Path) -> None:
    top = write_folder(tmp_path)
    for path in (top / "train/été").iterdir():
        path.write_bytes(b"broken")
    with pytest.raises(Problem, match=r"none of the images in .*/train/été could be read"):
        load(top, bad_samples="skip")


def test_decompression_bombs_and_postscript_are_bad_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    second = load(top)
    assert torch.equal(first.train[:][0], second.train[:][0])
    assert (second.mean, second.std, second.classes) == (first.mean, first.std, first.classes)


@pytest.mark.parametrize("change", ["added", "removed", "changed"])
def test_a_changed_folder_is_decoded_again(change: str, tmp_path: Path) -> None:
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
    assert len(after) == 2, "the old cache with these settings is removed"
    assert len(set(before) & set(after)) == 1, "the cache of the other size is kept"


@pytest.mark.parametrize("file", ["train-images.npy", "test-images.npy", "train-labels.npy", "facts.json"])
def test_a_damaged_cache_is_rebuilt(file: str, tmp_path: Path) -> None:
    top = write_folder(tmp_path)
    pixels = load(top).train[:][0].clone()
    (name,) = caches(top)
    damaged = top / imagecache.CACHE_FOLDER / name / file
    data = damaged.read_bytes()
    damaged.unlink()  # a new file, because the first load has the old one mapped into memory
    damaged.write_bytes(data[:-50])
    assert torch.equal(load(top).train[:][0], pixels)
    assert damaged.read_bytes() == data


def test_the_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    top = write_folder(tmp_path)
    load(top)
    (name,) = caches(top)
    os.rename(top / imagecache.CACHE_FOLDER / name, top / imagecache.CACHE_FOLDER / f"{name}.tmp")
    load(top)
    assert caches(top) == [name]


def test_without_write_access_the_cache_is_in_the_users_folder_or_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    top = write_folder(tmp_path / "data")
    (top / imagecache.CACHE_FOLDER).touch()  # a file takes the folder's place, which stops root, too
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user cache"))
    first = load(top).train[:][0]
    with monkeypatch.context() as patch:
        no_decoding(patch)
        assert torch.equal(load(top).train[:][0], first)
    assert list((tmp_path / "user cache").rglob("train-images.npy"))
    shutil.rmtree(tmp_path / "user cache")
    (tmp_path / "user cache").touch()
    assert torch.equal(load(top).train[:][0], first)
    assert "could not be kept on disk" in capsys.readouterr().err


def test_on_a_full_disk_the_images_stay_in_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    top = write_folder(tmp_path / "data")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user cache"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        data = load(top)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "could not be kept on disk" in capsys.readouterr().err
    assert caches(top) == [], "no half-written file is left"
    assert torch.equal(data.train[:][0], load(top).train[:][0])


def _load_and_count(top: Path, counter: Any) -> None:
    original = images.Image.open

    def counted(*args: Any, **options: Any) -> Any:
        with counter.get_lock():
            counter.value += 1
        return original(*args, **options)

    images.Image.open = counted  # type: ignore[assignment]
    assert len(load(top).train) == 12


def test_processes_that_load_at_the_same_time_decode_once(tmp_path: Path) -> None:
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
    run_ok("train", "folder", *words, "--name", "first")
    output = run_ok("eval", "first")
    assert "accuracy 100.0 %" in output
    assert "(12 samples; weights of step 25)" in output
    assert Path("runs/first/confusion.png").is_file()
    summary = Path("runs/first/summary.txt").read_text()
    assert "Dataset:            my photos" in summary
    assert "Classes:            2" in summary
    assert "Channels:           1" in summary


def test_a_bad_image_ends_the_command(folder: Path) -> None:
    top = write_folder(Path("photos"))
    break_images(top)
    assert "bad_samples=skip" in expect_error("train", "folder", "data_dir=photos", "size=16", code=Outcome.DATA.code)
    output = run_ok("train", "folder", "data_dir=photos", "size=16", "net=mlp", "steps=1", "bad_samples=skip", "--procs", "2")
    assert output.count("3 images could not be read") == 1
