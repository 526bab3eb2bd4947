"""Encodes the pictures that `remarks` returns as PNG images."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from drivetrain.data import Picture
from drivetrain.outcomes import Problem

NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")


@dataclass(frozen=True)
class PngImage:
    """A picture as a PNG file."""

    name: str
    height: int
    width: int
    is_grey: bool
    content: bytes
    page: str = ""
    """HTML to write beside it."""


def encode_pictures(pictures: Iterable[Picture]) -> tuple[list[PngImage], str]:
    """Returns the images, and what is wrong with the first picture that is none ("" if all are)."""
    images: dict[str, PngImage] = {}
    faults = []
    for picture in pictures:
        try:
            image = _encode(picture)
            if image.name in images:
                raise Problem(f"remarks() gave two Pictures with the name {image.name!r}: give each its own")
            images[image.name] = image
        except Exception as error:  # a picture must not end the training
            reason = str(error).partition("\n")[0] or type(error).__name__
            faults.append(reason if isinstance(error, Problem) else f"remarks() gave a Picture that cannot be encoded: {reason}")
    return list(images.values()), next(iter(faults), "")


def _encode(picture: Picture) -> PngImage:
    from PIL import Image

    if not isinstance(picture.name, str) or not NAME.fullmatch(picture.name):
        raise Problem(f"remarks() gave a Picture with the name {picture.name!r:.120}: write letters, digits, - and _, at most 100")
    pixels = _pixels(picture)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return PngImage(picture.name, pixels.shape[0], pixels.shape[1], pixels.ndim == 2, buffer.getvalue(), str(picture.page))


def _pixels(picture: Picture) -> np.ndarray[Any, Any]:
    """Returns uint8 pixels of shape [height, width, 3] or [height, width]."""
    image = picture.image
    if not isinstance(image, (Tensor, np.ndarray)):
        description = type(image).__name__
    else:
        dtype, shape = str(image.dtype).removeprefix("torch."), list(image.shape)
        if dtype == "uint8" and (len(shape) == 2 or shape[2:] == [3]) and 0 not in shape:
            return np.ascontiguousarray(image.cpu().numpy() if isinstance(image, Tensor) else image)
        description = f"{dtype} of shape {shape}"
    raise Problem(
        f"remarks() gave {description} for the Picture {picture.name!r}: uint8 of shape [height, width, 3] or [height, width] is needed"
    )
