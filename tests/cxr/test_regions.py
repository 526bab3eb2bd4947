"""Features of boxes are those of roi-align."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from drivetrain.tasks.cxr.net.model import cell_boxes
from drivetrain.tasks.cxr.net.regions import box_geometry, box_means, box_overlap


def roi_align(features: Tensor, box: list[float], points: int) -> Tensor:
    """Roi-align of one box, literally: the mean over points x points places, each interpolated from its four neighbours."""
    channels, height, width = features.shape
    x1, y1, x2, y2 = box[0] * width - 0.5, box[1] * height - 0.5, box[2] * width - 0.5, box[3] * height - 0.5
    total = torch.zeros(channels)
    for i in range(points):
        for j in range(points):
            y = min(max(y1 + (i + 0.5) * (y2 - y1) / points, 0.0), height - 1.0)
            x = min(max(x1 + (j + 0.5) * (x2 - x1) / points, 0.0), width - 1.0)
            top, left = min(math.floor(y), height - 2), min(math.floor(x), width - 2)
            dy, dx = y - top, x - left
            total += (1 - dy) * ((1 - dx) * features[:, top, left] + dx * features[:, top, left + 1])
            total += dy * ((1 - dx) * features[:, top + 1, left] + dx * features[:, top + 1, left + 1])
    return total / points**2


@pytest.mark.parametrize("points", [1, 4])
def test_box_means_equal_a_literal_roi_align(points: int) -> None:
    torch.manual_seed(0)
    features = torch.randn(2, 3, 5, 7)
    boxes = torch.rand(2, 4, 2, 2).sort(2)[0].flatten(2)
    boxes[0, 0] = torch.tensor([0.0, 0.0, 1.0, 1.0])
    boxes[0, 1] = torch.tensor([0.9, 0.95, 1.0, 1.0])  # the points lie beyond the last cell's centre
    found = box_means(features, boxes, points)
    for n in range(2):
        for k in range(4):
            torch.testing.assert_close(found[n, k], roi_align(features[n], boxes[n, k].tolist(), points), rtol=1e-5, atol=1e-5)


def test_the_box_of_a_cell_has_the_features_of_the_cell() -> None:
    features = torch.arange(12.0).view(1, 1, 3, 4)
    found = box_means(features, cell_boxes(3, 4, features.device)[None], points=1)
    torch.testing.assert_close(found[0, :, 0], torch.arange(12.0))


def test_gradients_reach_only_the_cells_of_the_box() -> None:
    features = torch.zeros(1, 1, 4, 4, requires_grad=True)
    box_means(features, torch.tensor([[[0.0, 0.0, 0.5, 0.5]]])).sum().backward()
    assert features.grad is not None
    assert features.grad[0, 0, :2, :2].min() > 0
    assert features.grad[0, 0, 3].abs().max() == 0 and features.grad[0, 0, :, 3].abs().max() == 0


def test_geometry_and_overlap() -> None:
    box = torch.tensor([0.25, 0.25, 0.75, 0.5])
    geometry = box_geometry(box)
    torch.testing.assert_close(geometry[:4], box)
    assert geometry[4] == pytest.approx(0.125) and geometry[5] == pytest.approx(math.log(2), abs=0.01)
    assert float(box_overlap(box, box)) == pytest.approx(1)
    assert float(box_overlap(torch.tensor([0.0, 0.0, 0.5, 1.0]), torch.tensor([0.25, 0.0, 0.75, 1.0]))) == pytest.approx(1 / 3)
    assert float(box_overlap(torch.zeros(4), box)) == 0
    assert box_geometry(torch.zeros(4)).isfinite().all()
