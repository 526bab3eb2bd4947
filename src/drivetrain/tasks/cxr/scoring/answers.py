"""Answers in words: the names of classes, the head of a free question, and what `predict` prints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drivetrain.tasks.cxr.net.losses import HEADS
from drivetrain.tasks.cxr.vocabulary import CHEXPERT, SEVERITIES

YES_OR_NO = ("no", "yes")
_HEAD_OF_QUESTION = (
    (r"\bhow (severe|bad|large|extensive)|\bseverity\b|\bdegree\b", "severity"),
    (r"^\W*where|\b(which|what) (part|region|area|side|lung|lobe|location)|\blocat", "region"),
    (r"^\W*(is|are|does|do|has|have|can|any|was|were|could|should)\b", "binary"),
)
"""The first pattern in a question names the head that answers it; without one it is `category`."""


@dataclass(frozen=True)
class ClassNames:
    """The names of the classes of each head."""

    region: Sequence[str]

    def of(self, head: str) -> Sequence[str]:
        return {"binary": YES_OR_NO, "category": CHEXPERT, "region": self.region, "severity": SEVERITIES}[head]

    def answer(self, head: int, value: int) -> str:
        """Returns a class in words; empty without a head."""
        return str(self.of(HEADS[head])[value]) if head >= 0 else ""


def head_of_question(question: str) -> str:
    """Returns the head that answers a free question, by its wording."""
    return next((head for pattern, head in _HEAD_OF_QUESTION if re.search(pattern, question.lower())), "category")


def describe(probability: Tensor, names: Sequence[str], most: int = 3) -> str:
    """Returns the likeliest classes with their probabilities."""
    values, places = probability.topk(min(most, len(names)))
    return ", ".join(f"{names[place]} {value:.0%}" for value, place in zip(values.tolist(), places.tolist(), strict=True))


def describe_labels(scores: Tensor) -> Iterator[str]:
    """Yields a line for each CheXpert label, likeliest first."""
    probability = scores.float().sigmoid()
    for place in torch.argsort(probability, descending=True).tolist():
        yield f"  {CHEXPERT[place]:<28}{probability[place]:6.0%}\n"
