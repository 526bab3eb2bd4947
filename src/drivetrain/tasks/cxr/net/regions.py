"""Mean features of boxes: a batched roi-align with one output cell.

Bilinear weights are products of a weight for the row and one for the column. The mean over a grid of points in a box is therefore one
matrix product of [boxes, cells] with [cells, channels]: no loop, no atomic additions in the backward pass, any number format.
"""

from __future__ import annotations

import torch
from torch import Tensor

POINTS = 16
"""Points of the grid in a box, along each side."""


def box_means(features: Tensor, boxes: Tensor, points: int = POINTS) -> Tensor:
    """Returns the mean of each box in a feature map [n, channels, height, width] as [n, boxes, channels].

    `boxes` are [n, boxes, 4]: x1, y1, x2, y2 in 0..1 of the image. The values equal roi-align (`aligned=True`) with one output cell and
    `points` x `points` sampling points; points beyond the outermost cells' centres take the values there.
    """
    height, width = features.shape[-2:]
    x1, y1, x2, y2 = boxes.float().unbind(-1)
    rows, columns = _axis_weights(y1, y2, height, points), _axis_weights(x1, x2, width, points)
    weights = (rows[..., :, None] * columns[..., None, :]).flatten(-2)
    return weights.to(features.dtype) @ features.flatten(2).transpose(1, 2)


def _axis_weights(low: Tensor, high: Tensor, size: int, points: int) -> Tensor:
    """Returns the mean bilinear weights [..., size] of points that are spread evenly between `low` and `high`."""
    fraction = (torch.arange(points, device=low.device) + 0.5) / points
    position = low[..., None] + (high - low)[..., None] * fraction
    position = (position * size - 0.5).clamp(0, size - 1)
    distance = position[..., None] - torch.arange(size, device=low.device)
    return (1 - distance.abs()).clamp(min=0).mean(-2)


def box_geometry(boxes: Tensor) -> Tensor:
    """Returns x1, y1, x2, y2, area and aspect (width by height, as a logarithm) of boxes: [..., 6]."""
    boxes = boxes.float()
    width, height = (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).unbind(-1)
    aspect = torch.log((width + 1e-3) / (height + 1e-3))
    return torch.cat([boxes, (width * height)[..., None], aspect[..., None]], -1)


def box_overlap(one: Tensor, other: Tensor) -> Tensor:
    """Returns the intersection over union of boxes [..., 4]."""
    low, high = torch.maximum(one[..., :2], other[..., :2]), torch.minimum(one[..., 2:], other[..., 2:])
    both = (high - low).clamp(min=0).prod(-1)
    areas = [(box[..., 2:] - box[..., :2]).clamp(min=0).prod(-1) for box in (one, other)]
    return both / (areas[0] + areas[1] - both).clamp(min=1e-9)
