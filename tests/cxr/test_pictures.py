"""The picture of an evaluation: boxes in their colours and places, and attention over the image."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from drivetrain.tasks.cxr.scoring.page import page
from drivetrain.tasks.cxr.scoring.pictures import BLUE, GREEN, ORANGE, RED, Shown, draw

PLAIN = Shown(np.full((64, 64), 128, np.uint8), "Is there an effusion?", "yes", 0.9)


def of_colour(pixels: np.ndarray, colour: str, tolerance: int = 40) -> np.ndarray:
    """Returns which pixels have a colour such as #2a9d4a."""
    rgb = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return np.abs(pixels.astype(int) - rgb).max(-1) < tolerance


def halves(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the image with boxes and the image with attention, without the legend at the lower edge."""
    middle = len(pixels) // 2
    return pixels[:middle], pixels[middle : len(pixels) - 40]


def columns_of(mask: np.ndarray) -> tuple[float, float]:
    """Returns from where to where a mask reaches, as shares of the width."""
    places = np.flatnonzero(mask.any(0)) / mask.shape[1]
    return float(places.min()), float(places.max())


@pytest.mark.parametrize(
    ("name", "value", "colour"),
    [
        ("answer_box", (0.5, 0.1, 0.9, 0.6), GREEN),
        ("predicted_box", (0.5, 0.1, 0.9, 0.6), ORANGE),
        ("nodes", [("edema", (0.5, 0.1, 0.9, 0.6))], BLUE),
    ],
)
def test_boxes_are_drawn_in_their_colour_and_place(name: str, value: object, colour: str) -> None:
    assert not of_colour(draw([PLAIN]), colour).any()
    upper, _ = halves(draw([replace(PLAIN, **{name: value})]))
    drawn = of_colour(upper, colour)
    assert drawn.sum() > 50
    left, right = columns_of(drawn)
    assert 0.45 < left < 0.6 and 0.8 < right < 0.95, "the box is in the right half of the image"


def test_attention_colours_the_place_that_is_attended_to() -> None:
    def is_coloured(pixels: np.ndarray) -> np.ndarray:
        return np.ptp(pixels.astype(int), -1) > 30

    attention = np.zeros((4, 4))
    attention[2, 3] = 1.0
    assert not is_coloured(halves(draw([PLAIN]))[1]).any()
    upper, lower = halves(draw([replace(PLAIN, attention=attention)]))
    assert not is_coloured(upper).any() and is_coloured(lower).sum() > 200
    assert columns_of(is_coloured(lower))[0] > 0.5


class Elements(HTMLParser):
    """Collects the tags of a page with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def test_a_page_holds_image_boxes_attention_and_answers_and_nothing_from_elsewhere() -> None:
    attention = np.zeros((4, 4))
    attention[0, 3] = 1.0
    entry = replace(
        PLAIN, question="<script>alert(1)</script> & 'why'?", answer="no", reference="yes", attention=attention, answer_box=(0.5, 0.1, 0.9, 0.6),
        predicted_box=(0.0, 0.0, 0.5, 0.5), nodes=[("<b>edema</b>", (0.1, 0.2, 0.3, 0.4))],
    )  # fmt: skip
    text = page([PLAIN, entry], "scene graph: <none>")
    elements = Elements(text)
    assert not elements.of("script") and not elements.of("b") and "&lt;script&gt;alert(1)&lt;/script&gt; &amp; &#x27;why&#x27;?" in text
    assert [box["class"] for box in elements.of("rect")] == ["node", "answer", "predicted"]
    assert {name: float(elements.of("rect")[1][name] or 0) for name in ("x", "y", "width", "height")} == {
        "x": 0.5, "y": 0.1, "width": 0.4, "height": 0.5,
    }  # fmt: skip
    assert all((image["src"] or "").startswith("data:image/png;base64,") for image in elements.of("img")) and "http" not in text
    layers = [np.asarray(Image.open(io.BytesIO(base64.b64decode((image["src"] or "").split(",")[1])))) for image in elements.of("img")]
    assert [layer.shape for layer in layers] == [(64, 64), (64, 64), (64, 64, 4)]
    assert (layers[1] == entry.image).all() and layers[2][4, 60, 3] > 150 and layers[2][60, 4, 3] == 0
    assert "expected: yes" in text and "no (90%)" in text


def test_a_wrong_answer_is_red_and_a_right_one_green() -> None:
    right, wrong = (halves(draw([replace(PLAIN, reference=reference)]))[1] for reference in ("yes", "no"))
    assert of_colour(right, GREEN).any() and not of_colour(right, RED).any()
    assert of_colour(wrong, RED).any() and not of_colour(wrong, GREEN).any()
