"""Reading images: any JPEG becomes a grey square, bad files are named, and the cache of resized images never gives a wrong one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from drivetrain.outcomes import Problem
from drivetrain.tasks.cxr.data.columns import CxrIndex
from drivetrain.tasks.cxr.data.images import BadImageError, ImageReader, bad_images, decode
from tests.cxr.small_data import answer, build, question, write_data

BAD_FILES = {
    "truncated": (lambda data: data[: len(data) // 2], "truncated"),
    "corrupt": (lambda data: data[:100] + bytes(len(data) - 100), None),
    "no image": (lambda data: b"<html>not found</html>", "it is no image"),
    "empty": (lambda data: b"", "it is no image"),
    "missing": (lambda data: None, "the file is missing"),
}


@pytest.fixture
def index(tmp_path: Path) -> CxrIndex:
    images = (("image-a", "PA"), ("image-b", "LATERAL"))
    return build(*write_data(tmp_path, [question("D02_has_finding", answer("pos"))], images=images))


def damage(path: Path, kind: str) -> None:
    data = BAD_FILES[kind][0](path.read_bytes())
    path.unlink()
    if data is not None:
        path.write_bytes(data)


def test_an_image_becomes_a_grey_square(tmp_path: Path) -> None:
    halves = np.zeros((1200, 1600), np.uint8)
    halves[:, 800:] = 200
    for name, image in (("grey", Image.fromarray(halves)), ("rgb", Image.fromarray(halves).convert("RGB"))):
        image.save(tmp_path / f"{name}.jpg", quality=95)
        pixels = decode(tmp_path / f"{name}.jpg", 64)
        assert pixels.shape == (64, 64)
        assert pixels.dtype == np.uint8
        assert np.abs(pixels[:, :30].astype(int)).max() < 5
        assert np.abs(pixels[:, 34:].astype(int) - 200).max() < 5


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_image_stops_the_run_and_is_named(kind: str, index: CxrIndex) -> None:
    path = index.image_path(0)
    damage(path, kind)
    with pytest.raises(BadImageError, match=BAD_FILES[kind][1]):
        decode(path, 32)
    with pytest.raises(Problem, match=r"bad_images=skip") as raised:
        ImageReader(index, 32).read(0)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_image_is_skipped_named_once_and_listed(kind: str, index: CxrIndex, capfd: pytest.CaptureFixture[str]) -> None:
    path = index.image_path(0)
    damage(path, kind)
    reader = ImageReader(index, 32, "skip")
    assert reader.read(0) is None
    assert reader.read(0) is None
    assert reader.read(1) is not None
    assert capfd.readouterr().err.count(str(path)) == 1
    assert list(bad_images(index)) == [str(path)]
    assert list(reader.bad) == [0]


def test_the_cache_gives_the_decoded_pixels_without_the_file(index: CxrIndex) -> None:
    expected = decode(index.image_path(0), 32)
    assert np.array_equal(ImageReader(index, 32).read(0), expected)
    index.image_path(0).unlink()
    assert np.array_equal(ImageReader(index, 32).read(0), expected)
    with pytest.raises(Problem, match="missing"):
        ImageReader(index, 48).read(0)
    with pytest.raises(Problem, match="missing"):
        ImageReader(index, 32, cache=False).read(0)


def test_pixels_with_a_wrong_checksum_are_decoded_again(index: CxrIndex) -> None:
    expected = ImageReader(index, 32).read(0)
    pixels = next(index.folder.parent.glob("*.pixels"))
    with open(pixels, "r+b") as file:
        file.write(b"\xff" * 10)
    assert np.array_equal(ImageReader(index, 32).read(0), expected)


def test_a_cache_that_cannot_be_written_is_no_error(
    index: CxrIndex, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = ImageReader(index, 32)
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: len(data) // 2)  # as on a full disk
    first, second = reader.read(0), reader.read(0)
    assert np.array_equal(first, second)
    assert "No space left on device" in capfd.readouterr().err


def test_a_forked_reader_opens_its_own_files(index: CxrIndex) -> None:
    reader = ImageReader(index, 32)
    expected = reader.read(0)
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(reader.read(0), expected) and np.array_equal(reader.read(1), decode(index.image_path(1), 32)) else 1)
    assert os.waitpid(child, 0)[1] == 0
    shutil.rmtree(index.mimic)
    assert reader.read(1) is not None, "the child filled the cache of its parent"
