"""The parts of the loss, each a total with its count. Counts depend on the batch alone, so that micro-batches change nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from drivetrain.tasks.cxr.net.graph import nodes_of
from drivetrain.tasks.cxr.net.regions import box_overlap

HEADS = ("binary", "category", "region", "severity")
Uncertain = Literal["ignore", "positive", "negative", "soft"]
UNCERTAIN, MISSING = -1, -2
TARGET_OF_UNCERTAIN = {"positive": 1.0, "negative": 0.0, "soft": 0.5}
Part = tuple[Tensor, Tensor]
"""(total, count)"""


@dataclass(frozen=True)
class LossWeights:
    """The weight of each part; a part with weight 0 is left out."""

    binary: float = 1.0
    category: float = 0.5
    region: float = 0.5
    severity: float = 0.3
    chexpert: float = 0.3
    box: float = 0.1
    graph: float = 0.1

    def of(self, part: str) -> float:
        return float(getattr(self, part.partition("_")[0]))


class GraphTargets(NamedTuple):
    """What each entity query should find, from the first node of that entity: [n, entities] and [n, entities, 4]."""

    is_present: Tensor
    region: Tensor
    """-1: unknown, or the entity is not there."""
    boxes: Tensor
    has_box: Tensor


def label_targets(labels: Tensor, uncertain: Uncertain) -> tuple[Tensor, Tensor]:
    """Returns (targets, which of them count) of CheXpert labels: 1 positive, 0 negative, -1 uncertain, -2 missing."""
    is_uncertain = labels == UNCERTAIN
    counted = labels != MISSING
    if uncertain == "ignore":
        return (labels == 1).float(), counted & ~is_uncertain
    value = torch.full_like(labels, TARGET_OF_UNCERTAIN[uncertain], dtype=torch.float32)
    return torch.where(is_uncertain, value, (labels == 1).float()), counted


def graph_targets(batch: dict[str, Tensor], num_entities: int) -> GraphTargets:
    nodes = nodes_of(batch)
    is_same = nodes.entity[:, None, :] == torch.arange(1, num_entities, device=nodes.entity.device)[:, None]
    is_same = F.pad(is_same, (0, 0, 1, 0))  # entity 0 is unknown
    first = is_same.int().argmax(-1)
    is_present = is_same.any(-1)
    region = nodes.region.gather(1, first)
    boxes = nodes.boxes.gather(1, first[..., None].expand(-1, -1, 4))
    return GraphTargets(is_present, torch.where(is_present & (region > 0), region, -1), boxes, nodes.has_box.gather(1, first) & is_present)


def counts(batch: dict[str, Tensor], weights: LossWeights, uncertain: Uncertain, num_entities: int) -> dict[str, Tensor]:
    """Returns the count of each part of the loss."""
    result = {name: (batch[name] >= 0).sum() for name in HEADS}
    result["chexpert"] = label_targets(batch["chexpert"], uncertain)[1].sum()
    result["box"] = batch["has_answer_box"].sum()
    if weights.graph:
        targets = graph_targets(batch, num_entities)
        result["graph_entity"] = targets.is_present.new_ones(targets.is_present.shape).sum()
        result["graph_region"] = (targets.region >= 0).sum()
        result["graph_box"] = targets.has_box.sum()
    return {name: count for name, count in result.items() if weights.of(name)}


def losses(
    outputs: dict[str, Tensor], batch: dict[str, Tensor], weights: LossWeights, uncertain: Uncertain, num_entities: int
) -> dict[str, Part]:
    """Returns the weighted parts of the loss: name -> (total, count)."""
    parts = {name: _cross_entropy(outputs[name], batch[name]) for name in HEADS}
    target, counted = label_targets(batch["chexpert"], uncertain)
    by_label = F.binary_cross_entropy_with_logits(outputs["chexpert"].float(), target, reduction="none")
    parts["chexpert"] = (by_label * counted).sum()
    parts["box"] = (_box_errors(outputs["answer_box"], batch["answer_boxes"]) * batch["has_answer_box"]).sum()
    if weights.graph:
        targets = graph_targets(batch, num_entities)
        present = targets.is_present.float()
        parts["graph_entity"] = F.binary_cross_entropy_with_logits(outputs["graph_presence"].float(), present, reduction="sum")
        parts["graph_region"] = _cross_entropy(outputs["graph_region"], targets.region)
        parts["graph_box"] = (_box_errors(outputs["graph_boxes"], targets.boxes) * targets.has_box).sum()
    count_of = counts(batch, weights, uncertain, num_entities)
    return {name: (weights.of(name) * parts[name], count) for name, count in count_of.items()}


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Returns the sum over the targets that are not -1."""
    return F.cross_entropy(logits.float().flatten(0, -2), target.long().flatten(), ignore_index=-1, reduction="sum")


def _box_errors(predicted: Tensor, target: Tensor) -> Tensor:
    """Returns the distance of the corners plus one minus the overlap, for each box."""
    return (predicted - target).abs().mean(-1) + 1 - box_overlap(predicted, target)
