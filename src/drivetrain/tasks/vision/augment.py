"""Augmentation of image batches on the device: pure functions of the images and their random numbers.

The host never reads a value, so that a CUDA graph can capture them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def affine(images: Tensor, rotation_degrees: float, translation: float, draws: Tensor) -> Tensor:
    """Returns each image rotated about its centre, then translated: bilinear, black outside, floats in the same range of values.

    `draws` are numbers [n, 3] in [0, 1): the angle within +-rotation_degrees (positive is counter-clockwise, as for
    `torch.rot90`), and the moves to the right and down within +-translation of the width and height.
    """
    height, width = images.shape[-2:]
    centred = 2.0 * draws - 1.0
    angle = centred[:, 0] * math.radians(rotation_degrees)
    cos, sin = torch.cos(angle), torch.sin(angle)
    right, down = (centred[:, 1:] * (2.0 * translation)).unbind(1)  # a width or height is 2 in grid_sample's coordinates
    # The position of an output pixel in the input: undo the translation, then the rotation. F.affine_grid does this with a matrix
    # product, which would round positions in tf32, and may round them differently in another micro-batch.
    per_x = torch.stack([cos, sin * (width / height)], 1)[:, None, None]
    per_y = torch.stack([sin * (-height / width), cos], 1)[:, None, None]
    x = torch.linspace(1.0 / width - 1.0, 1.0 - 1.0 / width, width, device=images.device)
    y = torch.linspace(1.0 / height - 1.0, 1.0 - 1.0 / height, height, device=images.device)
    across = (x - right[:, None])[:, None, :, None] * per_x
    along = (y - down[:, None])[:, :, None, None] * per_y
    return F.grid_sample(images.float(), across + along, mode="bilinear", padding_mode="zeros", align_corners=False)


def flip(images: Tensor, draws: Tensor) -> Tensor:
    """Returns the images, mirrored left to right where an image's number in `draws` ([n, 1] in [0, 1)) is below 0.5."""
    return torch.where(draws[:, :, None, None] < 0.5, images.flip(-1), images)
