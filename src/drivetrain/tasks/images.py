"""Image files in folders, one folder for each class: lists them, and decodes any format to squares of bytes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from drivetrain.outcomes import Outcome, Problem

Colour = Literal["auto", "rgb", "grey"]

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "DIB", "WEBP", "TIFF", "PPM", "MPO", "JPEG2000", "AVIF", "ICO", "QOI")
"""Formats that Pillow decodes itself. EPS is not among them: it would start Ghostscript."""
WINDOWS_FILES = ("thumbs.db", "desktop.ini")


# --- listing -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A file: its path below the folder, the number of its class, its size and its modification time."""

    path: str
    label: int
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Listing:
    """The image files of a data set."""

    folder: Path
    classes: tuple[str, ...]
    splits: dict[str, tuple[ImageFile, ...]]
    """The files of `train`, and of `test` if that folder exists."""

    def empty_classes(self, split: str) -> list[str]:
        """Returns the classes without a file in a split."""
        labels = {file.label for file in self.splits[split]}
        return [name for label, name in enumerate(self.classes) if label not in labels]


def list_images(folder: Path) -> Listing:
    """Returns all files of `folder/train/<class>/` and `folder/test/<class>/`; raises Problem if they are no valid data set."""
    train, test = folder / "train", folder / "test"
    layout = f"put images into {train}/<class>/ and {test}/<class>/, or say data_dir=FOLDER"
    if not folder.is_dir():
        raise Problem(f"there is no folder {folder} (looked in {Path.cwd()}): {layout}")
    if not train.is_dir():
        raise Problem(f"there is no folder {train}: {layout}")
    try:
        classes = _class_names(train)
        if not classes:
            raise Problem(f"{train} has no folders: put the images of each class into a folder of its own, such as {train}/cat/")
        if len(classes) == 1:
            raise Problem(f"{train} has a single class ({classes[0]}): a classifier needs two or more, each in a folder of its own")
        listing = Listing(folder, classes, {"train": _list_split(folder, "train", classes)})
        if empty := listing.empty_classes("train"):
            raise Problem(f"{train / empty[0]} has no images: put some there, or remove the folder")
        if not test.is_dir():
            return listing
        if foreign := sorted(set(_class_names(test)) - set(classes)):
            raise Problem(f"{test / foreign[0]} is no class of training ({first_names(classes)}): remove it, or add {train / foreign[0]}")
        listing = Listing(folder, classes, listing.splits | {"test": _list_split(folder, "test", classes)})
    except OSError as error:
        raise Problem(f"cannot read {error.filename or folder}: {error.strerror or error}", Outcome.DATA) from None
    if not listing.splits["test"]:
        raise Problem(f"{test} has no images: put some into {test}/<class>/, or remove the folder to train without evaluation")
    return listing


def first_names(names: Iterable[str], limit: int = 3) -> str:
    """Returns the first names as text, and the number of further ones."""
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit:,} more" if len(names) > limit else "")


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in WINDOWS_FILES


def _class_names(folder: Path) -> tuple[str, ...]:
    with os.scandir(folder) as entries:
        return tuple(sorted(e.name for e in entries if not _is_hidden(e.name) and e.is_dir()))


def _list_split(folder: Path, split: str, classes: tuple[str, ...]) -> tuple[ImageFile, ...]:
    files = []
    for label, name in enumerate(classes):
        if os.path.isdir(folder / split / name):
            files += [ImageFile(path, label, size, mtime) for path, size, mtime in _files(folder, f"{split}/{name}")]
    return tuple(files)


def _files(folder: Path, subfolder: str) -> list[tuple[str, int, int]]:
    """Returns (path, size, modification time) of every file below a subfolder, sorted. Visits a folder with several links only once."""
    files, visited, to_visit = [], set(), [subfolder]
    while to_visit:
        current = to_visit.pop()
        status = os.stat(folder / current)
        if (status.st_dev, status.st_ino) in visited:
            continue
        visited.add((status.st_dev, status.st_ino))
        with os.scandir(folder / current) as entries:
            visible = sorted((e for e in entries if not _is_hidden(e.name)), key=lambda e: e.name, reverse=True)
        for entry in visible:
            path = f"{current}/{entry.name}"
            try:
                if entry.is_dir():
                    to_visit.append(path)
                elif entry.is_file():
                    status = entry.stat()
                    files.append((path, status.st_size, status.st_mtime_ns))
                elif entry.is_symlink():
                    files.append((path, 0, 0))  # a broken link: decoding reports it as a bad sample
            except OSError:
                files.append((path, 0, 0))
    return sorted(files)


# --- decoding ----------------------------------------------------------------------------------


def decode(path: Path, size: int, colour: Colour) -> np.ndarray:
    """Returns the file's centre square as bytes [channels, size, size]. With `auto`, one channel if all pixels are grey, else three."""
    with Image.open(path, formats=_formats()) as file:
        file.draft(None, (2 * size, 2 * size))  # decodes a large JPEG at a fraction of its size, which is enough
        file.load()
        try:
            image = ImageOps.exif_transpose(file)
        except Exception:
            image = file  # only its EXIF data is broken
        image = _opaque(image)
        if colour != "auto":
            image = image.convert("L" if colour == "grey" else "RGB")
        side = min(image.size)
        left, top = (image.width - side) / 2, (image.height - side) / 2
        # Crop and resize in one call: resizing all of a very long image first would take much memory.
        image = image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
    pixels = np.asarray(image)
    if pixels.ndim == 2:
        return pixels[None]
    if colour == "auto" and (pixels[..., 0] == pixels[..., 1]).all() and (pixels[..., 1] == pixels[..., 2]).all():
        return pixels[None, ..., 0]
    return pixels.transpose(2, 0, 1)


def why_unreadable(error: Exception) -> str:
    """Returns an error of `decode` as one line."""
    if isinstance(error, UnidentifiedImageError):
        return "it has no image format that is known here"
    text = str(getattr(error, "strerror", None) or error or type(error).__name__)
    return text.splitlines()[0]


def _formats() -> list[str]:
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]  # those that this Pillow was built with


def _opaque(image: Image.Image) -> Image.Image:
    """Returns the image in mode L or RGB, with white behind transparent parts."""
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_as_bytes(np.asarray(image)))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        foreground = image.convert("RGBA")
        background = Image.new("RGBA", foreground.size, "white")
        background.alpha_composite(foreground)
        return background.convert("RGB")
    if image.mode in ("L", "RGB"):
        return image
    return image.convert("L" if image.mode == "1" else "RGB")


def _as_bytes(values: np.ndarray) -> np.ndarray:
    """Scales grey values of more than 8 bits to 0..255, from the smallest usual range that contains them."""
    maxima = (1.0, 255.0, 65535.0) if values.dtype.kind == "f" else (65535.0, 2.0**31 - 1)
    values = np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0).clip(0.0)
    highest = float(values.max())
    maximum = next((maximum for maximum in maxima if highest <= maximum), highest)
    return np.rint(values * (255.0 / maximum)).astype(np.uint8)
