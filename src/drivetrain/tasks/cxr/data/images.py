"""Reads images as grey squares of one size, through a cache beside the index that fills itself as images are read.

The cache of a size is one file of pixels [images, size, size], which processes read through a memory map, and one of checksums: 0 means that
an image is not there yet. Pixels are written before their checksum, and a wrong checksum counts as absent: a killed process or a full disk
cannot leave a wrong image. Two processes that decode the same image write the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import sys
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image, UnidentifiedImageError

from drivetrain.outcomes import Outcome, Problem
from drivetrain.tasks.cxr.data.columns import CxrIndex

BadImages = Literal["error", "skip"]
FORMAT = 1
BAD_LIST = "bad-images.txt"
"""The images that could not be read, one a line: path, tab, reason."""
Pixels = np.ndarray[Any, np.dtype[np.uint8]]


class BadImageError(Exception):
    """An image that cannot be read. The text says why."""


def decode(path: Path, size: int) -> Pixels:
    """Returns an image as grey [size, size], stretched to a square; raises BadImageError if it is missing, truncated or no image."""
    try:
        with Image.open(path) as image:
            if image.format == "JPEG":
                image.draft("L", (2 * size, 2 * size))  # the decoder scales by 1/2, 1/4 or 1/8, which is several times faster
            grey = image if image.mode == "L" else image.convert("L")
            resized = grey.resize((size, size), Image.Resampling.BILINEAR, reducing_gap=3.0)
            return np.asarray(resized, np.uint8)
    except FileNotFoundError:
        raise BadImageError("the file is missing") from None
    except UnidentifiedImageError:
        raise BadImageError("it is no image") from None
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise BadImageError(" ".join(str(error).split()) or type(error).__name__) from None


class ImageReader:
    """Reads the images of an index by row."""

    def __init__(self, index: CxrIndex, size: int, bad_images: BadImages = "error", cache: bool = True) -> None:
        self.index, self.size, self.bad_images = index, size, bad_images
        self.bad: dict[int, str] = {}
        """Rows of images that this process could not read, and why."""
        self._cache = _ImageCache(index, size) if cache else None

    def read(self, row: int) -> Pixels | None:
        """Returns an image; None if it cannot be read and bad images are skipped. Raises Problem if they stop the run."""
        pixels = self._cache.get(row) if self._cache else None
        if pixels is not None:
            return pixels
        path = self.index.image_path(row)
        try:
            pixels = decode(path, self.size)
        except BadImageError as error:
            if self.bad_images == "error":
                fix = "repair or remove it, or leave such images out with bad_images=skip"
                raise Problem(f"{path} cannot be read ({error}): {fix}", Outcome.DATA) from None
            self._report(row, path, str(error))
            return None
        if self._cache:
            self._cache.put(row, pixels)
        return pixels

    def _report(self, row: int, path: Path, reason: str) -> None:
        """Names a bad image, once in a process, and in the list beside the index."""
        if row in self.bad:
            return
        self.bad[row] = reason
        print(f"note    {path} cannot be read ({reason}) and is left out (bad_images=skip)", file=sys.stderr, flush=True)
        try:
            with open(self.index.folder / BAD_LIST, "a", encoding="utf-8") as file:
                file.write(f"{path}\t{reason}\n")
        except OSError:
            pass  # a folder that cannot be written: the line above names the image


def bad_images(index: CxrIndex) -> dict[str, str]:
    """Returns the images that any process could not read, and why."""
    try:
        lines = (index.folder / BAD_LIST).read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return dict(line.split("\t", 1) for line in lines if "\t" in line)


class _ImageCache:
    """The files of one size. Where they cannot be written, nothing is kept and one notice says so."""

    def __init__(self, index: CxrIndex, size: int) -> None:
        self.index, self.size, self.bytes = index, size, size * size
        name = f"images-{size}-{FORMAT}"
        self.paths = [index.folder.parent / f"{index.folder.name}-{name}.{kind}" for kind in ("pixels", "checksums")]
        self.files: list[int] = []
        self.process = -1
        self.maps: list[Any] = []
        self.is_broken = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"files": [], "maps": [], "process": -1}

    def _open(self) -> bool:
        """Opens the files once in each process; returns whether that was possible."""
        if self.process == os.getpid():
            return not self.is_broken
        self.process = os.getpid()
        try:
            self.files = [os.open(path, os.O_RDWR | os.O_CREAT, 0o666) for path in self.paths]
            for file, length in zip(self.files, (self.bytes, 4), strict=True):
                if os.fstat(file).st_size < self.index.num_images * length:
                    os.truncate(file, self.index.num_images * length)  # no space is used before pixels are written
            shapes: list[tuple[int, ...]] = [(self.index.num_images, self.size, self.size), (self.index.num_images,)]
            types = (np.uint8, np.uint32)
            self.maps = [np.asarray(np.memmap(p, t, "r", shape=s)) for p, t, s in zip(self.paths, types, shapes, strict=True)]
        except OSError as error:
            self._give_up(error)
        return not self.is_broken

    def _give_up(self, error: OSError) -> None:
        self.is_broken = True
        if os.environ.get("RANK", "0") == "0":
            text = f"note    resized images are not kept on disk, so each epoch decodes them again ({self.paths[0]}: {error.strerror or error})"
            print(text, file=sys.stderr, flush=True)

    def get(self, row: int) -> Pixels | None:
        if not self._open() or not self.maps[1][row]:
            return None
        pixels: Pixels = np.array(self.maps[0][row])
        return pixels if _checksum(pixels) == self.maps[1][row] else None

    def put(self, row: int, pixels: Pixels) -> None:
        if not self._open():
            return
        try:
            _write_at(self.files[0], pixels.tobytes(), row * self.bytes)
            _write_at(self.files[1], np.uint32(_checksum(pixels)).tobytes(), row * 4)
        except OSError as error:
            self._give_up(error)


def _write_at(file: int, data: bytes, offset: int) -> None:
    if os.pwrite(file, data, offset) != len(data):
        raise OSError(28, "No space left on device")


def _checksum(pixels: Pixels) -> int:
    """Returns a checksum that is never 0."""
    return zlib.crc32(pixels.tobytes()) or 1


def cache_key(text: str) -> str:
    """Returns a short name for the settings of a cache file."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
