"""What an evaluation keeps of each sample, with each source of the scene graph; `report` makes the metrics of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from drivetrain.tasks.cxr.net.losses import HEADS, Uncertain, label_targets
from drivetrain.tasks.cxr.net.model import GRAPH_SOURCES, CxrModel, GraphSource
from drivetrain.tasks.cxr.net.regions import box_overlap


def routed(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the head that answers each question, and its target; both are -1 where there is none."""
    targets = torch.stack([batch[name].long() for name in HEADS], -1)
    target, head = targets.max(-1)
    return torch.where(target >= 0, head, -1), target


def evaluate(model: CxrModel, batch: dict[str, Tensor], graph: GraphSource, uncertain: Uncertain, with_boxes: bool) -> dict[str, Tensor]:
    """Returns values of each sample: of each question, of each CheXpert label, and of the image."""
    encoded = model.encode(batch)
    head, target = routed(batch)
    values = {"head": head, "target": target, "type": batch["type"].long(), "question": batch["question"]}
    for source in GRAPH_SOURCES:
        nodes = model.nodes(batch, encoded, source)
        outputs = model.answer(encoded, nodes)
        answers = torch.stack([outputs[name].argmax(-1) for name in HEADS], -1)
        values[f"answer_{source}"] = answers.gather(-1, head.clamp(min=0)[..., None])[..., 0]
        if source == graph:
            values["head_loss"] = answer_losses(outputs, batch)
            values["is_inside"] = pointing(model.attention(encoded, nodes), batch)
            if with_boxes:
                values["box_overlap"] = box_overlap(outputs["answer_box"], batch["answer_boxes"])
    scores = model.label(encoded).float()
    return values | _label_values(scores, batch, uncertain)


def asked(values: dict[str, Tensor]) -> Tensor:
    """Returns a row for each question: its number in the index, its image, its type and its target, whatever its sample."""
    image = values["image"][:, None].expand_as(values["question"])
    rows = torch.stack([values["question"], image, values["type"], values["target"]], -1)
    return rows[values["question"] >= 0]


def answer_losses(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Returns the loss of each question; 0 without a target."""
    by_head = [
        F.cross_entropy(outputs[name].float().flatten(0, 1), batch[name].long().flatten(), ignore_index=-1, reduction="none")
        for name in HEADS
    ]
    return torch.stack(by_head).sum(0).view_as(batch["type"])


def _label_values(scores: Tensor, batch: dict[str, Tensor], uncertain: Uncertain) -> dict[str, Tensor]:
    target, counted = label_targets(batch["chexpert"], uncertain)
    loss = F.binary_cross_entropy_with_logits(scores, target, reduction="none").masked_fill(~counted, float("nan"))
    return {
        "chexpert_score": scores, "chexpert_label": batch["chexpert"].long(), "chexpert_loss": loss,
        "image": batch["image_row"],
    }  # fmt: skip


def pointing(attention: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Returns whether the cell with the most attention is in the answer's box: 1, 0, or -1 without a box.

    Its centre must be in the box, or the box's centre in the cell: a box smaller than a cell may contain no cell's centre.
    """
    height, width = attention.shape[-2:]
    peak = attention.flatten(-2).argmax(-1)
    column, row = peak % width, peak // width
    x, y = (column + 0.5) / width, (row + 0.5) / height
    x1, y1, x2, y2 = batch["answer_boxes"].unbind(-1)
    is_inside = (x >= x1) & (x <= x2) & (y >= y1) & (y <= y2)
    is_nearest = ((x1 + x2) / 2 * width).long().eq(column) & ((y1 + y2) / 2 * height).long().eq(row)
    return torch.where(batch["has_answer_box"], (is_inside | is_nearest).long(), -1)
