"""Image files in folders, one folder a class: found, and decoded to squares of bytes whatever their format."""

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

# Formats whose reading starts no other program (EPS would start Ghostscript).
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "DIB", "WEBP", "TIFF", "PPM", "MPO", "JPEG2000", "AVIF", "ICO", "QOI")
HIDDEN = ("thumbs.db", "desktop.ini")  # Windows' own, beside names that begin with a dot


# --- listing -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Item:
    """One file: its path below the folder, its class, and what tells that it has changed."""

    path: str
    label: int
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Listing:
    folder: Path
    classes: tuple[str, ...]
    splits: dict[str, tuple[Item, ...]]
    """The files of `train`, and of `test` where there is such a folder."""

    def without(self, split: str) -> list[str]:
        """The classes of which a split has no files."""
        seen = {item.label for item in self.splits[split]}
        return [name for label, name in enumerate(self.classes) if label not in seen]


def list_images(folder: Path) -> Listing:
    """All files of `folder/train/<class>/` and `folder/test/<class>/`; Problem where they make no data set."""
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
        listing = Listing(folder, classes, {"train": _items(folder, "train", classes)})
        if empty := listing.without("train"):
            raise Problem(f"{train / empty[0]} has no images: put some there, or remove the folder")
        if not test.is_dir():
            return listing
        if foreign := sorted(set(_class_names(test)) - set(classes)):
            raise Problem(f"{test / foreign[0]} is no class of training ({some(classes)}): remove it, or add {train / foreign[0]}")
        listing = Listing(folder, classes, listing.splits | {"test": _items(folder, "test", classes)})
    except OSError as error:
        raise Problem(f"cannot read {error.filename or folder}: {error.strerror or error}", Outcome.DATA) from None
    if not listing.splits["test"]:
        raise Problem(f"{test} has no images: put some into {test}/<class>/, or remove the folder to train without evaluation")
    return listing


def some(names: Iterable[str], most: int = 3) -> str:
    """The first names of a list."""
    first = list(names)
    return ", ".join(first[:most]) + (f" and {len(first) - most:,} more" if len(first) > most else "")


def _hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in HIDDEN


def _class_names(folder: Path) -> tuple[str, ...]:
    with os.scandir(folder) as entries:
        return tuple(sorted(e.name for e in entries if not _hidden(e.name) and e.is_dir()))


def _items(folder: Path, split: str, classes: tuple[str, ...]) -> tuple[Item, ...]:
    found = []
    for label, name in enumerate(classes):
        if os.path.isdir(folder / split / name):
            found += [Item(path, label, size, mtime) for path, size, mtime in _files(folder, f"{split}/{name}")]
    return tuple(found)


def _files(folder: Path, below: str) -> list[tuple[str, int, int]]:
    """(path, size, time of change) of every file below, in order; a folder that links lead to twice counts once."""
    found, seen, waiting = [], set(), [below]
    while waiting:
        here = waiting.pop()
        status = os.stat(folder / here)
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(folder / here) as entries:
            known = sorted((e for e in entries if not _hidden(e.name)), key=lambda e: e.name, reverse=True)
        for entry in known:
            path = f"{here}/{entry.name}"
            try:
                if entry.is_dir():
                    waiting.append(path)
                elif entry.is_file():
                    status = entry.stat()
                    found.append((path, status.st_size, status.st_mtime_ns))
                elif entry.is_symlink():
                    found.append((path, 0, 0))  # leads nowhere: a bad sample, which decoding will name
            except OSError:
                found.append((path, 0, 0))
    return sorted(found)


# --- decoding ----------------------------------------------------------------------------------


def decode(path: Path, size: int, colour: Colour) -> np.ndarray:
    """The file's centre square as bytes [1 or 3, size, size]. With `auto`, 1 where no pixel of it has a colour."""
    with Image.open(path, formats=_formats()) as file:
        file.draft(None, (2 * size, 2 * size))  # a large JPEG is decoded at a fraction of its size, at no loss here
        file.load()
        try:
            image = ImageOps.exif_transpose(file)
        except Exception:
            image = file  # only its EXIF data is broken: the pixels are there
        image = _opaque(image)
        if colour != "auto":
            image = image.convert("L" if colour == "grey" else "RGB")
        side = min(image.size)
        left, top = (image.width - side) / 2, (image.height - side) / 2
        # The square first: resizing all of a very long image would blow it up.
        image = image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
    pixels = np.asarray(image)
    if pixels.ndim == 2:
        return pixels[None]
    if colour == "auto" and (pixels[..., 0] == pixels[..., 1]).all() and (pixels[..., 1] == pixels[..., 2]).all():
        return pixels[None, ..., 0]
    return pixels.transpose(2, 0, 1)


def why_unreadable(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "it has no image format that is known here"
    text = str(getattr(error, "strerror", None) or error or type(error).__name__)
    return text.splitlines()[0]


def _formats() -> list[str]:
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]  # what this Pillow was built with


def _opaque(image: Image.Image) -> Image.Image:
    """The image in mode L or RGB, transparent parts on white."""
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_as_bytes(np.asarray(image)))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        above = image.convert("RGBA")
        below = Image.new("RGBA", above.size, "white")
        below.alpha_composite(above)
        return below.convert("RGB")
    if image.mode in ("L", "RGB"):
        return image
    return image.convert("L" if image.mode == "1" else "RGB")


def _as_bytes(values: np.ndarray) -> np.ndarray:
    """Deep grey values scaled, not clipped, to 0..255: from the smallest usual range that holds them."""
    scales = (1.0, 255.0, 65535.0) if values.dtype.kind == "f" else (65535.0, 2.0**31 - 1)
    values = np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0).clip(0.0)
    top = float(values.max())
    whole = next((scale for scale in scales if top <= scale), top)
    return np.rint(values * (255.0 / whole)).astype(np.uint8)
