"""Augmentation of image batches on the device: a pure function of the images and the random numbers given.

Nothing here waits for the device or looks at a value, so that a CUDA graph can hold it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def affine(images: Tensor, rotation_degrees: float, translation: float, draws: Tensor) -> Tensor:
    """Each image turned about its centre, then moved; bilinear, black outside; floats in the images' own scale.

    `draws` [n, 3] in [0, 1) give the angle within +-rotation_degrees (positive turns counter-clockwise, as
    `torch.rot90` does) and the moves to the right and down within +-translation of the width and height.
    """
    height, width = images.shape[-2:]
    centred = 2.0 * draws - 1.0
    angle = centred[:, 0] * math.radians(rotation_degrees)
    cos, sin = torch.cos(angle), torch.sin(angle)
    right, down = (centred[:, 1:] * (2.0 * translation)).unbind(1)  # a width or height is 2 in grid_sample's coordinates
    # Where an output pixel comes from: undo the move, then the turn. Written out rather than left to F.affine_grid,
    # whose matrix product would round the places in tf32 and may round them differently in another micro-batch.
    per_x = torch.stack([cos, sin * (width / height)], 1)[:, None, None]
    per_y = torch.stack([sin * (-height / width), cos], 1)[:, None, None]
    x = torch.linspace(1.0 / width - 1.0, 1.0 - 1.0 / width, width, device=images.device)
    y = torch.linspace(1.0 / height - 1.0, 1.0 - 1.0 / height, height, device=images.device)
    across = (x - right[:, None])[:, None, :, None] * per_x
    along = (y - down[:, None])[:, :, None, None] * per_y
    return F.grid_sample(images.float(), across + along, mode="bilinear", padding_mode="zeros", align_corners=False)


def flip(images: Tensor, draws: Tensor) -> Tensor:
    """Each image mirrored left to right where its draw ([n, 1] in [0, 1)) is under a half."""
    return torch.where(draws[:, :, None, None] < 0.5, images.flip(-1), images)
