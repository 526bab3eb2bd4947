"""Augmentation on the device: images turn, move, scale and change in brightness; boxes move with them.

A pure function of the images and their random numbers. The host never reads a value, so that a CUDA graph can capture it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Strength:
    """The largest changes; 0 turns one off."""

    rotation: float = 5.0
    """Degrees."""
    translation: float = 0.05
    """Share of the side."""
    scaling: float = 0.05
    brightness: float = 0.1
    """Share of the range of brightness; the contrast changes by up to the same share."""

    @property
    def is_on(self) -> bool:
        return any((self.rotation, self.translation, self.scaling, self.brightness))


DRAWS = 6
"""Random numbers that an image needs."""


def augment(images: Tensor, boxes: list[Tensor], draws: Tensor, strength: Strength) -> tuple[Tensor, list[Tensor]]:
    """Returns the changed images as floats in 0..1, and their boxes [n, any, 4].

    `images` are bytes [n, 1, side, side], `draws` numbers [n, 6] in [0, 1).
    """
    centred = 2 * draws - 1
    angle, scale = centred[:, 0] * math.radians(strength.rotation), 1 + centred[:, 1] * strength.scaling
    move = centred[:, 2:4] * strength.translation
    cos, sin = torch.cos(angle), torch.sin(angle)
    changed = _resample(images.float() / 255, cos, sin, scale, move)
    contrast, shift = (centred[:, 4:] * strength.brightness).view(-1, 2, 1, 1, 1).unbind(1)
    changed = ((changed - 0.5) * (1 + contrast) + 0.5 + shift).clamp(0, 1)
    return changed, [_moved(each, cos, sin, scale, move) for each in boxes]


def _resample(images: Tensor, cos: Tensor, sin: Tensor, scale: Tensor, move: Tensor) -> Tensor:
    """Returns images turned about their centres, scaled, then moved; bilinear, black outside."""
    side = images.shape[-1]
    axis = (torch.arange(side, device=images.device) + 0.5) / side - 0.5
    x = axis.view(1, 1, -1) - move[:, 0].view(-1, 1, 1)
    y = axis.view(1, -1, 1) - move[:, 1].view(-1, 1, 1)
    cos, sin, scale = (value.view(-1, 1, 1) for value in (cos, sin, scale))
    source = torch.stack([(cos * x + sin * y) / scale, (-sin * x + cos * y) / scale], -1)
    return F.grid_sample(images, 2 * source, align_corners=False)


def _moved(boxes: Tensor, cos: Tensor, sin: Tensor, scale: Tensor, move: Tensor) -> Tensor:
    """Returns the smallest upright boxes around the turned ones, cut at the image's edge."""
    cos, sin, scale = (value.view(-1, 1, 1) for value in (cos, sin, scale))
    x, y = boxes[..., [0, 2, 0, 2]] - 0.5, boxes[..., [1, 1, 3, 3]] - 0.5
    corners = torch.stack([(cos * x - sin * y) * scale, (sin * x + cos * y) * scale], -1) + (move + 0.5)[:, None, None]
    return torch.cat([corners.amin(-2), corners.amax(-2)], -1).clamp(0, 1)
