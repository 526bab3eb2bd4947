"""MNIST and Fashion-MNIST: guide 000's and guide 001's data set."""

from __future__ import annotations

from typing import Annotated

from drivetrain.data import Tensors
from drivetrain.settings import Range
from drivetrain.tasks import datasets
from drivetrain.tasks.vision.classify import ImageClassifier, Pixels


class Mnist(ImageClassifier):
    """Handwritten digits (28x28) from IDX files in data_dir, downloaded where they are missing."""

    epochs: Annotated[int, Range(1)] = 5
    """Passes over the training data."""
    global_batch: Annotated[int, Range(1)] = 64
    """Samples in one optimizer step, over all processes."""
    data_dir: str = "data"
    """Folder of the IDX files (gzipped or not), itself or in a subfolder named after the data set."""
    dropout: Annotated[float, Range(0, 1)] = 0.25
    """Dropout before the last linear layers (the mlp has none)."""

    dataset = "mnist"
    pixels = Pixels((0.1307,), (0.3081,))

    def train_data(self) -> Tensors:
        return datasets.idx(self.dataset, "train", self.data_dir)

    def eval_data(self) -> Tensors:
        return datasets.idx(self.dataset, "test", self.data_dir)


class FashionMnist(Mnist):
    """Clothing (28x28) from IDX files in data_dir, downloaded where they are missing."""

    dataset = "fashion-mnist"
    pixels = Pixels((0.2860,), (0.3530,))
    classes = ("T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
