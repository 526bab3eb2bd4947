"""Paints the images of the synthetic twin: an outline of a chest with lungs, ribs, heart and spine, and findings that are visible.

Positions are in units of the image (0 to 1); the patient's right side is on the left of a frontal image.
"""

from __future__ import annotations

import io
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

Box = tuple[float, float, float, float]
"""x1, y1, x2, y2."""
Plane = np.ndarray[Any, np.dtype[np.float32]]
SOFT, DENSE = 0.58, 0.72
"""Brightness of soft tissue, and of fluid and dense tissue."""


@dataclass(frozen=True)
class Ellipse:
    """An ellipse: its centre and radii."""

    x: float
    y: float
    rx: float
    ry: float

    @property
    def box(self) -> Box:
        return self.x - self.rx, self.y - self.ry, self.x + self.rx, self.y + self.ry

    def distance(self, u: Plane, v: Plane) -> Plane:
        """Returns 1 on the ellipse, less inside it and more outside."""
        squares: Plane = ((u - self.x) / self.rx) ** 2 + ((v - self.y) / self.ry) ** 2
        return np.sqrt(squares, out=squares)


@dataclass(frozen=True)
class Chest:
    """Where the organs of a patient are in a view."""

    lateral: bool
    right_lung: Ellipse
    left_lung: Ellipse
    heart: Ellipse
    middle: float
    """x of the mediastinum."""
    spine: float
    """x of the spine."""

    def lung(self, side: str) -> Ellipse:
        return self.right_lung if side == "right" else self.left_lung

    def hilum(self, side: str) -> tuple[float, float]:
        lung = self.lung(side)
        inward = 0.0 if self.lateral else (0.6 if side == "right" else -0.6)
        return lung.x + inward * lung.rx, lung.y

    def cell(self, side: str, zone: str) -> tuple[float, float]:
        """Returns the centre of a lung zone: upper, mid or lower."""
        lung = self.lung(side)
        outward = 0.0 if self.lateral else (-0.15 if side == "right" else 0.15)
        return lung.x + outward * lung.rx, lung.y + {"upper": -0.52, "mid": 0.0, "lower": 0.5}[zone] * lung.ry


@dataclass(frozen=True)
class PlantedFinding:
    """A finding that a study's images show."""

    entity: str
    side: str = "middle"
    """right, left, both or middle."""
    zone: str = ""
    """upper, mid or lower, for findings in a lung zone."""
    severity: int = 2
    """1 mild, 2 moderate, 3 severe."""
    is_uncertain: bool = False

    @property
    def sides(self) -> tuple[str, ...]:
        return ("right", "left") if self.side == "both" else (self.side,)

    @property
    def strength(self) -> float:
        return 0.6 if self.is_uncertain else 1.0


def make_chest(rng: np.random.Generator, lateral: bool, has_low_volumes: bool, heart_scale: float) -> Chest:
    """Returns the anatomy of a patient; `rng` draws its small differences."""
    dx, dy, size = rng.normal(0, 0.008), rng.normal(0, 0.01), 1 + rng.normal(0, 0.02)
    lung_y, lung_ry = (0.38, 0.225 * size) if has_low_volumes else (0.45, 0.295 * size)
    if lateral:
        lung = Ellipse(0.5 + dx, lung_y + dy, 0.25 * size, lung_ry)
        heart = Ellipse(0.38 + dx, lung_y + dy + 0.45 * lung_ry, 0.105 * heart_scale, 0.12 * heart_scale)
        return Chest(True, lung, lung, heart, 0.46 + dx, 0.82 + dx)
    right, left = (Ellipse(x + dx, lung_y + dy, 0.15 * size, lung_ry) for x in (0.305, 0.695))
    heart = Ellipse(0.54 + dx + 0.03 * (heart_scale - 1), lung_y + dy + 0.58 * lung_ry, 0.115 * heart_scale, 0.12 * heart_scale)
    return Chest(False, right, left, heart, 0.5 + dx, 0.5 + dx)


def heart_scale(findings: tuple[PlantedFinding, ...]) -> float:
    """Returns the size of the heart: 1, or more in cardiomegaly."""
    return next((1 + 0.1 + 0.17 * f.severity * (0.8 if f.is_uncertain else 1) for f in findings if f.entity == "cardiomegaly"), 1.0)


def _inside(distance: Plane, edge: float) -> Plane:
    """Returns 1 inside, 0 outside and a smooth edge between."""
    inside: Plane = distance * (-1 / edge)
    inside += 1 / edge + 0.5
    np.minimum(inside, 1, out=inside)
    np.maximum(inside, 0, out=inside)
    return inside


class Canvas:
    """An image that is being painted: brightness 0 to 1."""

    def __init__(self, height: int, width: int) -> None:
        self.u: Plane = ((np.arange(width) + 0.5) / width).astype(np.float32)[None, :]
        self.v: Plane = ((np.arange(height) + 0.5) / height).astype(np.float32)[:, None]
        self.plane: Plane = np.full((height, width), 0.03, np.float32)

    def window(self, box: Box) -> tuple[Plane, Plane, Plane]:
        """Returns the coordinates and the pixels of a part of the image."""
        height, width = self.plane.shape
        x1, x2 = (int(min(max(x * width, 0), width)) for x in (box[0], box[2]))
        y1, y2 = (int(min(max(y * height, 0), height)) for y in (box[1], box[3]))
        return self.u[:, x1:x2], self.v[y1:y2], self.plane[y1:y2, x1:x2]

    def add_blob(self, x: float, y: float, rx: float, ry: float, amount: float) -> None:
        """Adds a soft spot without an edge."""
        u, v, pixels = self.window((x - 2.5 * rx, y - 2.5 * ry, x + 2.5 * rx, y + 2.5 * ry))
        pixels += amount * np.exp(-(((u - x) / rx) ** 2)) * np.exp(-(((v - y) / ry) ** 2))

    def fill(self, ellipse: Ellipse, value: float, edge: float = 0.1, amount: float = 1.0) -> None:
        """Blends an ellipse with a brightness."""
        grow = 1 + edge
        rx, ry = ellipse.rx * grow, ellipse.ry * grow
        u, v, pixels = self.window((ellipse.x - rx, ellipse.y - ry, ellipse.x + rx, ellipse.y + ry))
        pixels += (value - pixels) * (_inside(ellipse.distance(u, v), edge) * amount)

    def add_line(self, points: list[tuple[float, float]], width: float, amount: float) -> None:
        """Brightens a line through points."""
        for (x1, y1), (x2, y2) in itertools.pairwise(points):
            box = (min(x1, x2) - 3 * width, min(y1, y2) - 3 * width, max(x1, x2) + 3 * width, max(y1, y2) + 3 * width)
            u, v, pixels = self.window(box)
            length = max((x2 - x1) ** 2 + (y2 - y1) ** 2, 1e-9)
            along = (u - x1) * ((x2 - x1) / length) + (v - y1) * ((y2 - y1) / length)
            along = np.minimum(np.maximum(along, 0), 1)
            share = np.exp(((u - x1 - along * (x2 - x1)) ** 2 + (v - y1 - along * (y2 - y1)) ** 2) * (-1 / width**2))
            np.maximum(pixels, pixels + (amount - pixels) * share, out=pixels)


def paint(
    chest: Chest, findings: tuple[PlantedFinding, ...], has_artifact: bool, size: tuple[int, int], rng: np.random.Generator
) -> tuple[bytes, dict[int, list[Box]]]:
    """Returns the JPEG of a study's view, and the boxes of each finding by its position."""
    canvas = Canvas(*size)
    _paint_anatomy(canvas, chest, rng)
    boxes = {number: _PAINTERS[finding.entity](canvas, chest, finding, rng) for number, finding in enumerate(findings)}
    if has_artifact:
        stripes = np.sin(canvas.v * 160) * (np.abs(canvas.v - 0.5) < 0.3)
        canvas.plane += 0.06 * stripes
    coarse = Image.fromarray(rng.standard_normal((12, 12), dtype=np.float32)).resize(size[::-1], Image.Resampling.BILINEAR)
    plane = canvas.plane * (1 + rng.normal(0, 0.03)) + 0.012 * np.asarray(coarse)
    plane += 0.045 * (rng.random(plane.shape, np.float32) + rng.random(plane.shape, np.float32) - 1)
    file = io.BytesIO()
    plane *= 255
    Image.fromarray(np.minimum(np.maximum(plane, 0), 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue(), boxes


def _paint_anatomy(canvas: Canvas, chest: Chest, rng: np.random.Generator) -> None:
    body = Ellipse(0.5, 0.62, 0.43 if chest.lateral else 0.47, 0.62)
    canvas.fill(body, 0.5, 0.06)
    canvas.fill(Ellipse(chest.middle, 0.0, 0.13, 0.2), 0.5, 0.2)
    for lung in dict.fromkeys((chest.right_lung, chest.left_lung)):
        canvas.fill(lung, 0.16, 0.12)
        u, v, pixels = canvas.window(lung.box)
        rib = np.cos((v - lung.y + 0.9 * (u - chest.middle) ** 2) * 2 * np.pi * 11)
        pixels += 0.10 * np.maximum(rib - 0.45, 0) * _inside(lung.distance(u, v), 0.2)
    for side in ("right", "left"):
        x, y = chest.hilum(side)
        for _ in range(4):
            canvas.add_line([(x, y), (x + rng.normal(0, 0.06), y + rng.normal(0, 0.09))], 0.006, 0.33)
        if not chest.lateral:
            lung = chest.lung(side)
            outer = lung.x - lung.rx * 0.9 if side == "right" else lung.x + lung.rx * 0.9
            canvas.add_line([(chest.middle, lung.y - 0.8 * lung.ry), (outer, lung.y - 0.95 * lung.ry)], 0.014, 0.66)
    canvas.fill(Ellipse(chest.spine, 0.5, 0.03, 0.6), 0.62, 0.3, 0.8)
    canvas.fill(Ellipse(chest.middle, 0.33, 0.05, 0.28), SOFT, 0.3)
    canvas.fill(Ellipse(chest.middle, 0.1, 0.012, 0.16), 0.38, 0.5)
    heart = chest.heart
    canvas.fill(Ellipse(heart.x - 0.25 * heart.rx, heart.y - 0.2 * heart.ry, 0.75 * heart.rx, 0.8 * heart.ry), 0.61, 0.15)
    canvas.fill(Ellipse(heart.x + 0.12 * heart.rx, heart.y + 0.1 * heart.ry, 0.88 * heart.rx, 0.86 * heart.ry), 0.63, 0.15)


# --- findings ------------------------------------------------------------------------------------


def _cell(canvas: Canvas, chest: Chest, finding: PlantedFinding) -> tuple[float, float]:
    return chest.cell(finding.side, finding.zone)


def _around(x: float, y: float, rx: float, ry: float) -> list[Box]:
    return [(x - rx, y - ry, x + rx, y + ry)]


def _consolidation(canvas: Canvas, chest: Chest, finding: PlantedFinding, rng: np.random.Generator) -> list[Box]:
    x, y = _cell(canvas, chest, finding)
    radius = 0.05 + 0.016 * finding.severity
    for dx, dy in rng.uniform(-0.4, 0.4, (3, 2)) * radius:
        canvas.fill(Ellipse(x + dx, y + dy, 0.62 * radius, 0.75 * radius), DENSE, 0.35, 0.85 * finding.strength)
    canvas.add_line([(x - 0.5 * radius, y - 0.5 * radius), (x, y), (x + 0.4 * radius, y + 0.6 * radius)], 0.004, 0.45)
    return _around(x, y, radius, 1.15 * radius)


def _opacity(canvas: Canvas, chest: Chest, finding: PlantedFinding, rng: np.random.Generator) -> list[Box]:
    x, y = _cell(canvas, chest, finding)
    radius = 0.05 + 0.01 * finding.severity
    canvas.add_blob(x, y, radius, radius, (0.18 + 0.05 * finding.severity) * finding.strength)
    return _around(x, y, 1.4 * radius, 1.4 * radius)


def _pneumonia(canvas: Canvas, chest: Chest, finding: PlantedFinding, rng: np.random.Generator) -> list[Box]:
    x, y = _cell(canvas, chest, finding)
    radius = 0.05 + 0.01 * finding.severity
    for angle in np.arange(7) * 2 * np.pi / 7:
        spread = radius * rng.uniform(0.5, 1)
        canvas.add_blob(x + spread * np.cos(angle), y + spread * np.sin(angle), 0.013, 0.013, 0.45 * finding.strength)
    return _around(x, y, radius + 0.015, radius + 0.015)


def _nodule(canvas: Canvas, chest: Chest, finding: PlantedFinding, rng: np.random.Generator) -> list[Box]:
    x, y = _cell(canvas, chest, finding)
    radius = 0.016 + 0.007 * finding.severity
    canvas.fill(Ellipse(x, y, radius, radius), 0.85, 0.2, finding.strength)
    return _around(x, y, radius, radius)


def _atelectasis(canvas: Canvas, chest: Chest, finding: PlantedFinding, rng: np.random.Generator) -> list[Box]:
    x, y = _cell(canvas, chest, finding)
    half = 0.045 + 0.012 * finding.severity
    for offset in (-0.03, 0.0, 0.03)[: finding.severity]:
        canvas.add_line([(x - half, y + offset), (x + half, y + offset - 0.015)], 0.007, 0.4 + 0.35 * finding.strength)
    return _around(x, y, half, 0.045)


def _edema(canvas: Canvas, chest: Chest, finding: PlantedFinding, rng: np.random.Generator) -> list[Box]:
    boxes = []
    for side in ("right",) if chest.lateral else ("right", "left"):
        x, y = chest.hilum(side)
        radius = 0.07 + 0.012 * finding.severity
        canvas.add_blob(x, y, radius, 1.6 * radius, (0.16 + 0.07 * finding.severity) * finding.strength)
        boxes += _around(x, y, radius, 1.5 * radius)
    return boxes


def _effusion(canvas: Canvas, chest: Chest, finding: PlantedFinding, rng: np.random.Generator) -> list[Box]:
    boxes = []
    for side in finding.sides:
        lung = chest.lung(side)
        bottom = lung.y + lung.ry
        level = bottom - (0.06 + 0.055 * finding.severity)
        box = (lung.x - lung.rx, level - 0.03, lung.x + lung.rx, bottom)
        u, v, pixels = canvas.window(box)
        meniscus = level - 0.05 * np.clip(np.abs(u - chest.middle) / (2.2 * lung.rx), 0, 1) ** 2
        amount = np.clip((v - meniscus) / 0.012, 0, 1) * _inside(lung.distance(u, v), 0.1) * 0.95 * finding.strength
        pixels += (DENSE - pixels) * amount
        boxes.append(box)
    return boxes


def _pneumothorax(canvas: Canvas, chest: Chest, finding: PlantedFinding, rng: np.random.Generator) -> list[Box]:
    boxes = []
    for side in finding.sides:
        lung = chest.lung(side)
        gap = 0.025 + 0.018 * finding.severity
        inward = 0.0 if chest.lateral else (0.8 * gap if side == "right" else -0.8 * gap)
        inner = Ellipse(lung.x + inward, lung.y + 0.9 * gap, lung.rx - 0.6 * gap, lung.ry - 0.5 * gap)
        box = (lung.x - lung.rx, lung.y - lung.ry, lung.x + lung.rx, lung.y)
        u, v, pixels = canvas.window(box)
        distance = inner.distance(u, v)
        outside = np.clip((distance - 1) / 0.03, 0, 1) * _inside(lung.distance(u, v), 0.08) * np.clip((lung.y - v) / 0.05, 0, 1)
        pixels += (0.04 - pixels) * (outside * 0.95 * finding.strength)
        line = np.exp(-(((distance - 1) / 0.03) ** 2)) * (v < lung.y - 0.02)
        pixels += (0.75 - pixels) * line * 0.8 * finding.strength
        boxes.append(box)
    return boxes


def _thickening(canvas: Canvas, chest: Chest, finding: PlantedFinding, rng: np.random.Generator) -> list[Box]:
    lung = chest.lung(finding.side)
    outward = 1 if chest.lateral or finding.side == "left" else -1
    width = 0.018 + 0.008 * finding.severity
    edge = [(lung.x + outward * lung.rx * 0.97 * np.cos(a), lung.y + lung.ry * 0.97 * np.sin(a)) for a in np.linspace(-0.5, 0.55, 8)]
    canvas.add_line(edge, width * 0.6, 0.35 + 0.45 * finding.strength)
    x = [point[0] for point in edge]
    return [(min(x) - width, edge[0][1], max(x) + width, edge[-1][1])]


def _mediastinum(canvas: Canvas, chest: Chest, finding: PlantedFinding, rng: np.random.Generator) -> list[Box]:
    shape = Ellipse(chest.middle, 0.27, 0.085 + 0.016 * finding.severity, 0.15)
    canvas.fill(shape, 0.66, 0.15, 0.5 + 0.5 * finding.strength)
    return [shape.box]


def _cardiomegaly(canvas: Canvas, chest: Chest, finding: PlantedFinding, rng: np.random.Generator) -> list[Box]:
    return [chest.heart.box]  # the heart itself is larger


def _fracture(canvas: Canvas, chest: Chest, finding: PlantedFinding, rng: np.random.Generator) -> list[Box]:
    lung = chest.lung(finding.side)
    outward = 1 if chest.lateral or finding.side == "left" else -1
    x, y = lung.x + outward * lung.rx * 0.72, lung.y + {"upper": -0.35, "mid": 0.05, "lower": 0.35}[finding.zone] * lung.ry
    bright, length, shift = 0.45 + 0.5 * finding.strength, 0.032 + 0.008 * finding.severity, 0.014 * finding.severity
    canvas.add_line([(x - length, y + 0.012), (x - 0.006, y)], 0.010, bright)
    canvas.add_line([(x + 0.006, y + shift), (x + length, y + shift + 0.012)], 0.010, bright)
    return [(x - length - 0.012, y - 0.012, x + length + 0.012, y + shift + 0.026)]


def _tube(canvas: Canvas, chest: Chest, finding: PlantedFinding, rng: np.random.Generator) -> list[Box]:
    for offset in (-0.008, 0.008):
        canvas.add_line([(chest.middle + offset, 0.0), (chest.middle + offset, 0.24)], 0.005, 0.5 + 0.5 * finding.strength)
    return [(chest.middle - 0.02, 0.0, chest.middle + 0.02, 0.25)]


def _catheter(canvas: Canvas, chest: Chest, finding: PlantedFinding, rng: np.random.Generator) -> list[Box]:
    x = chest.middle
    points = [(x - 0.2, 0.12), (x - 0.13, 0.2), (x - 0.06, 0.24), (x - 0.045, 0.32), (x - 0.045, 0.47)]
    canvas.add_line(points, 0.006, 0.5 + 0.5 * finding.strength)
    return [(x - 0.21, 0.11, x - 0.03, 0.48)]


def _pacemaker(canvas: Canvas, chest: Chest, finding: PlantedFinding, rng: np.random.Generator) -> list[Box]:
    lung = chest.left_lung
    x, y = (lung.x - 0.6 * lung.rx, 0.14) if chest.lateral else (lung.x + 0.35 * lung.rx, lung.y - 0.78 * lung.ry)
    canvas.fill(Ellipse(x, y, 0.045, 0.04), 0.98, 0.1, 0.6 + 0.4 * finding.strength)
    canvas.add_line([(x, y + 0.03), (chest.middle + 0.02, y + 0.1), (chest.heart.x, chest.heart.y)], 0.005, 0.5 + 0.5 * finding.strength)
    left, right = sorted((x, chest.heart.x))
    return [(left - 0.05, y - 0.05, right + 0.05, chest.heart.y)]


_PAINTERS = {
    "atelectasis": _atelectasis, "cardiomegaly": _cardiomegaly, "consolidation": _consolidation, "pulmonary edema": _edema,
    "widened mediastinum": _mediastinum, "rib fracture": _fracture, "lung nodule": _nodule, "lung opacity": _opacity,
    "pleural effusion": _effusion, "pneumonia": _pneumonia, "pneumothorax": _pneumothorax, "pleural thickening": _thickening,
    "endotracheal tube": _tube, "central venous catheter": _catheter, "pacemaker": _pacemaker,
}  # fmt: skip


def region_boxes(chest: Chest) -> dict[str, Box]:
    """Returns the boxes of the anatomical regions that a view shows."""
    boxes: dict[str, Box] = {"chest": (0.03, 0.03, 0.97, 0.97), "heart": chest.heart.box}
    x = chest.middle
    boxes |= {"mediastinum": (x - 0.1, 0.05, x + 0.1, 0.75), "upper mediastinum": (x - 0.1, 0.05, x + 0.1, 0.4)}
    boxes |= {"trachea": (x - 0.03, 0.0, x + 0.03, 0.27), "spine": (chest.spine - 0.04, 0.05, chest.spine + 0.04, 0.97)}
    for side in ("right", "left"):
        lung = chest.lung(side)
        x1, y1, x2, y2 = lung.box
        third = (y2 - y1) / 3
        boxes |= {f"{side} lung": lung.box, f"{side} pleural space": lung.box, f"{side} ribs": lung.box}
        for number, zone in enumerate(("upper", "mid", "lower")):
            boxes[f"{side} {zone} lung zone"] = (x1, y1 + number * third, x2, y1 + (number + 1) * third)
        hx, hy = chest.hilum(side)
        boxes[f"{side} hilum"] = (hx - 0.06, hy - 0.09, hx + 0.06, hy + 0.09)
        boxes[f"{side} hemidiaphragm"] = (x1, y2 - 0.06, x2, y2 + 0.03)
        outer = (x2 - 0.08, x2 + 0.02) if side == "left" else (x1 - 0.02, x1 + 0.08)
        boxes[f"{side} costophrenic angle"] = (outer[0], y2 - 0.1, outer[1], y2 + 0.01)
        boxes[f"{side} clavicle"] = (min(x, lung.x), y1, max(x, lung.x), y1 + 0.08)
    right, left = chest.right_lung.box, chest.left_lung.box
    boxes["lungs"] = (min(right[0], left[0]), right[1], max(right[2], left[2]), right[3])
    return boxes
