"""Augmentation: boxes stay on what they enclose, and nothing changes where all strengths are 0."""

from __future__ import annotations

import pytest
import torch

from drivetrain.tasks.cxr.net.augmentation import DRAWS, Strength, augment

SIZE = 64


def image_with_patch() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a black image with a white patch, and the patch's box."""
    image = torch.zeros(1, 1, SIZE, SIZE, dtype=torch.uint8)
    image[0, 0, 20:36, 32:44] = 255
    return image, torch.tensor([[[32 / SIZE, 20 / SIZE, 44 / SIZE, 36 / SIZE]]])


@pytest.mark.parametrize("seed", range(8))
def test_boxes_move_with_the_image(seed: int) -> None:
    image, boxes = image_with_patch()
    draws = torch.rand(1, DRAWS, generator=torch.Generator().manual_seed(seed))
    changed, (moved,) = augment(image, [boxes], draws, Strength(rotation=10, translation=0.15, scaling=0.2, brightness=0))
    rows, columns = torch.nonzero(changed[0, 0] > 0.5, as_tuple=True)
    found = torch.tensor([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]) / SIZE
    torch.testing.assert_close(moved[0, 0], found, rtol=0, atol=2.5 / SIZE)
    assert not torch.allclose(moved, boxes, atol=1 / SIZE)


def test_brightness_changes_pixels_only() -> None:
    image, boxes = image_with_patch()
    draws = torch.full((1, DRAWS), 0.9)
    changed, (moved,) = augment(image, [boxes], draws, Strength(0, 0, 0, 0.2))
    torch.testing.assert_close(moved, boxes)
    assert changed.min() >= 0 and changed.max() <= 1 and len(changed.unique()) == 2
    assert not torch.equal(changed, image / 255)


def test_no_strength_changes_nothing() -> None:
    image, boxes = image_with_patch()
    changed, (moved,) = augment(image, [boxes], torch.rand(1, DRAWS), Strength(0, 0, 0, 0))
    torch.testing.assert_close(changed, image / 255)
    torch.testing.assert_close(moved, boxes)
    assert not Strength(0, 0, 0, 0).is_on and Strength().is_on


def test_an_empty_box_stays_within_the_image() -> None:
    _, (moved,) = augment(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), [torch.zeros(1, 2, 4)], torch.rand(1, DRAWS), Strength())
    assert moved.min() >= 0 and moved.max() <= 1
