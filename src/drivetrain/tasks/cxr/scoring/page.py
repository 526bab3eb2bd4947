"""An HTML page, one file without scripts, that shows questions on chest X-rays: image, boxes, attention and answers."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape

import numpy as np

from drivetrain.tasks.cxr.scoring.pictures import BLUE, GREEN, ORANGE, RED, Shown, attention_share

STYLE = f"""
body {{ font: 15px/1.4 system-ui, sans-serif; margin: 1.5rem; background: #111; color: #eee }}
main {{ display: flex; flex-wrap: wrap; gap: 1.5rem; margin-top: 1rem }}
article {{ width: 340px }} h2 {{ font-size: 1rem; margin: .5rem 0 }}
.view {{ position: relative; width: 340px; height: 340px }}
.view * {{ position: absolute; inset: 0; width: 100%; height: 100% }}
rect {{ fill: none; stroke-width: 2; vector-effect: non-scaling-stroke }}
.answer {{ stroke: {GREEN} }} .predicted {{ stroke: {ORANGE}; stroke-dasharray: 6 4 }} .node {{ stroke: {BLUE}; stroke-width: 1 }}
.right {{ color: {GREEN} }} .wrong {{ color: {RED} }}
#boxes:not(:checked) ~ main svg, #attention:not(:checked) ~ main .attention {{ display: none }}
"""
HINT = "green: box of the right answer; orange: predicted box; blue: nodes of the scene graph; bright: attention"


def page(shown: Sequence[Shown], title: str) -> str:
    """Returns the page; boxes and attention can be switched off in it."""
    entries = "\n".join(_article(entry) for entry in shown)
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>
<h1>{escape(title)}</h1>
<p>{HINT}. Research software, no medical device.</p>
<input type="checkbox" id="boxes" checked><label for="boxes">boxes</label>
<input type="checkbox" id="attention" checked><label for="attention">attention</label>
<main>
{entries}
</main></html>
"""


def _article(entry: Shown) -> str:
    layers = [f'<img src="{_png(entry.image)}" alt="chest X-ray">']
    if entry.attention is not None:
        layers.append(f'<img class="attention" src="{_png(_glow(entry))}" alt="attention">')
    boxes = [_box("node", box, name) for name, box in entry.nodes]
    boxes += [
        _box(kind, box, text)
        for kind, box, text in (("answer", entry.answer_box, "the right answer"), ("predicted", entry.predicted_box, "predicted"))
        if box is not None
    ]
    answer = f"{escape(entry.answer)} ({entry.confidence:.0%})"
    if entry.reference:
        kind, expected = ("right", "") if entry.is_right else ("wrong", f"; expected: {escape(entry.reference)}")
        answer = f'<span class="{kind}">{answer}</span>{expected}'
    svg = f'<svg viewBox="0 0 1 1" preserveAspectRatio="none">{"".join(boxes)}</svg>'
    return f'<article><div class="view">{"".join(layers)}{svg}</div><h2>{escape(entry.question)}</h2><p>{answer}</p></article>'


def _box(kind: str, box: Sequence[float], text: str) -> str:
    x1, y1, x2, y2 = (float(value) for value in box)
    size = f'width="{max(x2 - x1, 0):.4f}" height="{max(y2 - y1, 0):.4f}"'
    return f'<rect class="{kind}" x="{x1:.4f}" y="{y1:.4f}" {size}><title>{escape(text)}</title></rect>'


def _glow(entry: Shown) -> np.ndarray:
    """Returns the attention as a yellow layer [side, side, 4], the more opaque the more attention a place gets."""
    share = attention_share(entry)
    layer = np.empty((*share.shape, 4), np.uint8)
    layer[..., :3], layer[..., 3] = (255, 190, 40), np.clip(share * 190, 0, 255)
    return layer


def _png(pixels: np.ndarray) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
