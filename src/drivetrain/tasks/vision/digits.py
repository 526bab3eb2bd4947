"""Handwritten digits, 8x8, included in the package: a run takes seconds on any machine."""

from __future__ import annotations

from typing import Annotated

from torch import nn

from drivetrain.data import Tensors
from drivetrain.settings import Range
from drivetrain.tasks import datasets
from drivetrain.tasks.vision.classify import Classifier
from drivetrain.tasks.vision.nets import mlp


class Digits(Classifier):
    """Handwritten digits (8x8, included in the package) with a two-layer net."""

    epochs: Annotated[int, Range(1)] = 30
    """Passes over the training data."""
    global_batch: Annotated[int, Range(1)] = 64
    """Samples in one optimizer step, over all processes."""
    learning_rate: Annotated[float, Range(0)] = 5e-3
    """The optimizer's peak learning rate."""
    hidden: Annotated[int, Range(1, 65536)] = 256
    """Width of the hidden layer."""

    def model(self) -> nn.Module:
        return mlp(64, self.hidden, 10)

    def train_data(self) -> Tensors:
        return datasets.digits("train")

    def eval_data(self) -> Tensors:
        return datasets.digits("test")
