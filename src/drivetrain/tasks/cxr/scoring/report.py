"""The metrics of an evaluation, from the values of all its samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drivetrain.tasks.cxr.net.losses import HEADS, LossWeights, Uncertain, label_targets
from drivetrain.tasks.cxr.net.model import GRAPH_SOURCES, GraphSource
from drivetrain.tasks.cxr.scoring import scores
from drivetrain.tasks.cxr.scoring.texts import AnswerTexts
from drivetrain.tasks.cxr.vocabulary import CHEXPERT, QUESTION_TYPES

Array = np.ndarray
MIN_LABELS = 10
"""Fewer labels of one finding give no AUROC."""


@dataclass(frozen=True)
class Scoring:
    """How an evaluation is scored."""

    graph: GraphSource
    """The graph of the metrics without a suffix."""
    weights: LossWeights
    uncertain: Uncertain
    regions: Sequence[str]
    """Names of the classes of the region head."""
    samples_of_image: Array
    """Number of samples of each image: with its inverse as weight, each image counts once, also in a resample."""
    texts: AnswerTexts


def summarise(values: dict[str, Tensor], scoring: Scoring) -> dict[str, Any]:
    """Returns the metrics of an evaluation: numbers, tables, and the confusion of the category head."""
    array = {name: value.cpu().numpy() for name, value in values.items()}
    counted = array["head"] >= 0
    flat = {name: array[name][counted] for name in ("head", "target", "type", "question", "head_loss")}
    answers = {source: array[f"answer_{source}"][counted] for source in GRAPH_SOURCES}
    label_scores, label_table = _labels(array, scoring)
    result: dict[str, Any] = {"loss": _loss(flat, array, scoring)}
    for source in (scoring.graph, *(source for source in GRAPH_SOURCES if source != scoring.graph)):
        suffix = "" if source == scoring.graph else f"_{source}"
        result |= {name + suffix: value for name, value in _accuracies(flat, answers[source]).items()}
    result |= label_scores | _grounding(array)
    own = answers[scoring.graph]
    result |= {f"{name} by head": table for name, table in _by_head(flat, own).items()}
    result["accuracy by question type"] = _by_type(flat, own)
    result["accuracy by region"] = _by_class(flat, own, "region", scoring.regions)
    is_binary = flat["head"] == HEADS.index("binary")
    result["yes or no"] = _finite(scores.rates(flat["target"][is_binary], own[is_binary]))
    result["answers as text"] = scoring.texts.table(flat["question"], flat["head"], flat["target"], own)
    result["AUROC by label"] = label_table
    result["confusion"] = _confusion(flat, own, "category", len(CHEXPERT))
    return {name: value for name, value in result.items() if not _is_empty(value)}


def _accuracies(flat: dict[str, Array], answers: Array) -> dict[str, float]:
    """Returns the share of right answers, of all heads and of each."""
    right = answers == flat["target"]
    result = {"accuracy": _mean(right)}
    for index, name in enumerate(HEADS):
        result[f"{name}_accuracy"] = _mean(right[flat["head"] == index])
    return result


def _by_head(flat: dict[str, Array], answers: Array) -> dict[str, dict[str, float]]:
    table = {}
    for index, name in enumerate(HEADS):
        rows = flat["head"] == index
        table[name] = scores.macro_f1(flat["target"][rows], answers[rows])
    return {"macro F1": _finite(table)}


def _by_type(flat: dict[str, Array], answers: Array) -> dict[str, float]:
    right = answers == flat["target"]
    return _finite({name: _mean(right[flat["type"] == index]) for index, name in enumerate(QUESTION_TYPES)})


def _by_class(flat: dict[str, Array], answers: Array, head: str, names: Sequence[str]) -> dict[str, float]:
    """Returns the share of right answers for each right class of a head."""
    right, rows = answers == flat["target"], flat["head"] == HEADS.index(head)
    return _finite({name: _mean(right[rows & (flat["target"] == index)]) for index, name in enumerate(names)})


def _confusion(flat: dict[str, Array], answers: Array, head: str, classes: int) -> Tensor:
    rows = flat["head"] == HEADS.index(head)
    counts = np.bincount(flat["target"][rows].astype(np.int64) * classes + answers[rows], minlength=classes**2)
    return torch.from_numpy(counts.reshape(classes, classes))


def _labels(array: dict[str, Array], scoring: Scoring) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the mean AUROC over the labels, and that of each; every image counts once.

    Uncertain labels count as the policy says; with uncertain=soft they are neither, and are left out.
    """
    policy: Uncertain = "ignore" if scoring.uncertain == "soft" else scoring.uncertain
    target, counted = (part.numpy() for part in label_targets(torch.from_numpy(array["chexpert_label"]), policy))
    share, table = 1 / scoring.samples_of_image[array["image"]], {}
    for index, name in enumerate(CHEXPERT):
        rows = counted[:, index]
        if share[rows].sum() >= MIN_LABELS:
            table[name] = scores.auroc(target[rows, index], array["chexpert_score"][rows, index], share[rows])
    table = _finite(table)
    return {"chexpert_auroc": float(np.mean(list(table.values()))) if table else math.nan}, table


def _loss(flat: dict[str, Array], array: dict[str, Array], scoring: Scoring) -> float:
    """Returns the loss of the answers and labels; a part without samples adds nothing."""
    parts = [scoring.weights.of(name) * _mean(flat["head_loss"][flat["head"] == index]) for index, name in enumerate(HEADS)]
    rows = ~np.isnan(array["chexpert_loss"])
    share = (rows / scoring.samples_of_image[array["image"]][:, None])[rows]  # each image counts once
    if share.sum() > 0:
        parts.append(scoring.weights.chexpert * float(np.average(array["chexpert_loss"][rows], weights=share)))
    return float(np.nansum(parts))


def _grounding(array: dict[str, Array]) -> dict[str, float]:
    """Returns the mean overlap with the answers' boxes, and how often the attention's peak is in the box."""
    rows = array["is_inside"] >= 0
    result = {"pointing": _mean(array["is_inside"][rows])}
    return result | ({"box_iou": _mean(array["box_overlap"][rows])} if "box_overlap" in array else {})


def _mean(values: Array) -> float:
    return float(values.mean(dtype=np.float64)) if len(values) else math.nan


def _finite(table: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in table.items() if not math.isnan(value)}


def _is_empty(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not bool(value.any())
    return math.isnan(value) if isinstance(value, float) else not value
