"""Draws questions on a chest X-ray: the image with its boxes, what the model looked at, and its answer."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.outcomes import Problem

GREEN, ORANGE, BLUE, RED = "#2a9d4a", "#e08a1e", "#3d8bd4", "#c8372d"
COLUMNS = 4
"""Questions in one row of a picture."""
EVEN = 4.0
"""Attention of so many times the mean has the full colour."""


@dataclass(frozen=True)
class Shown:
    """One question on an image, with the model's answer."""

    image: np.ndarray
    """[side, side] bytes."""
    question: str
    answer: str
    """The model's."""
    confidence: float
    reference: str = ""
    """The right answer; empty if it is unknown."""
    attention: np.ndarray | None = None
    """[height, width]: how the question attends to the image's cells."""
    answer_box: Sequence[float] | None = None
    """Where the right answer is: x1, y1, x2, y2 in 0..1."""
    predicted_box: Sequence[float] | None = None
    nodes: Sequence[tuple[str, Sequence[float]]] = field(default_factory=tuple)
    """Names and boxes of a scene graph."""

    @property
    def is_right(self) -> bool:
        return self.answer == self.reference


def draw(shown: Sequence[Shown], title: str = "") -> np.ndarray:
    """Returns a picture [height, width, 3] with two images for each question: with boxes, and with the attention over it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    figure, axes = pyplot.subplots(
        2 * rows, columns, figsize=(3.1 * columns, 6.6 * rows + 0.5), layout="constrained", squeeze=False,
        gridspec_kw={"height_ratios": [1.0, 1.0] * rows},
    )  # fmt: skip
    for axis in axes.flatten():
        axis.axis("off")
    for number, entry in enumerate(shown):
        row, column = divmod(number, columns)
        _draw_boxes(axes[2 * row, column], entry)
        _draw_attention(axes[2 * row + 1, column], entry)
    if title:
        figure.suptitle(title, fontsize=11)
    _legend(figure, shown)
    return _pixels(figure)


def write_picture(shown: Sequence[Shown], file: str) -> None:
    """Writes a PNG file, or a page if the file's name ends in .html."""
    from PIL import Image

    from drivetrain.tasks.cxr.scoring.page import page

    path = Path(file).expanduser()
    try:
        if path.suffix == ".html":
            path.write_text(page(shown, "Answer"), encoding="utf-8")
        else:
            Image.fromarray(draw(shown)).save(path, "PNG")
    except OSError as error:
        raise Problem(f"picture={file} cannot be written: {error.strerror or error}") from None


def _draw_boxes(axis: Any, entry: Shown) -> None:
    side = entry.image.shape[0]
    axis.imshow(entry.image, cmap="gray", vmin=0, vmax=255)
    for name, box in entry.nodes:
        _rectangle(axis, box, side, BLUE, 0.8)
        axis.text(box[0] * side, box[1] * side - 1, name, color=BLUE, fontsize=6, va="bottom", clip_on=True)
    if entry.answer_box is not None:
        _rectangle(axis, entry.answer_box, side, GREEN, 1.8)
    if entry.predicted_box is not None:
        _rectangle(axis, entry.predicted_box, side, ORANGE, 1.8, "--")
    axis.set_title("\n".join(textwrap.wrap(entry.question, 40)), fontsize=8)


def _draw_attention(axis: Any, entry: Shown) -> None:
    side = entry.image.shape[0]
    axis.imshow(entry.image, cmap="gray", vmin=0, vmax=255)
    if entry.attention is not None:
        share = attention_share(entry)
        axis.imshow(share, cmap="inferno", alpha=0.6 * share, vmin=0, vmax=1)
    if entry.answer_box is not None:
        _rectangle(axis, entry.answer_box, side, GREEN, 1.4)
    text = f"{entry.answer} ({entry.confidence:.0%})"
    colour = "black"
    if entry.reference:
        colour = GREEN if entry.is_right else RED
        text += "" if entry.is_right else f"\nexpected: {entry.reference}"
    axis.set_title(text, fontsize=8, color=colour)


def attention_share(entry: Shown) -> np.ndarray:
    """Returns how much attention each pixel gets, from 0 to 1. Even attention stays pale: 1 is at least EVEN times the mean."""
    assert entry.attention is not None
    weights = _enlarged(entry.attention, entry.image.shape[0])
    share: np.ndarray = weights / max(float(weights.max()), EVEN * float(weights.mean()), 1e-9)
    return share


def _enlarged(attention: np.ndarray, side: int) -> np.ndarray:
    from PIL import Image

    image = Image.fromarray(attention.astype(np.float32)).resize((side, side), Image.Resampling.BILINEAR)
    return np.asarray(image)


def _rectangle(axis: Any, box: Sequence[float], side: int, colour: str, width: float, style: str = "-") -> None:
    from matplotlib.patches import Rectangle

    x1, y1, x2, y2 = (float(value) * side - 0.5 for value in box)
    axis.add_patch(Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, edgecolor=colour, linewidth=width, linestyle=style))


def _legend(figure: Any, shown: Sequence[Shown]) -> None:
    from matplotlib.lines import Line2D

    lines = []
    if any(entry.answer_box is not None for entry in shown):
        lines.append(Line2D([], [], color=GREEN, linewidth=1.8, label="box of the right answer"))
    if any(entry.predicted_box is not None for entry in shown):
        lines.append(Line2D([], [], color=ORANGE, linewidth=1.8, linestyle="--", label="predicted box"))
    if any(entry.nodes for entry in shown):
        lines.append(Line2D([], [], color=BLUE, linewidth=0.8, label="nodes of the scene graph"))
    if lines:
        figure.legend(handles=lines, loc="outside lower center", ncols=3, fontsize=8, frameon=False)


def _pixels(figure: Any) -> np.ndarray:
    from matplotlib import pyplot

    figure.set_dpi(110)
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()
    pyplot.close(figure)
    return pixels
