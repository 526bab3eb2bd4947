"""MNIST and Fashion-MNIST with guide 000's small CNN."""

from __future__ import annotations

from typing import Annotated, Literal

from torch import Tensor, nn

from drivetrain.settings import Range
from drivetrain.task import Tensors
from drivetrain.tasks import datasets
from drivetrain.tasks.vision.classify import Classifier
from drivetrain.tasks.vision.nets import SmallCNN, mlp


class Mnist(Classifier):
    """Handwritten digits (28x28) from IDX files in data_dir, downloaded where they are missing."""

    epochs: Annotated[int, Range(1)] = 5
    """Passes over the training data."""
    global_batch: Annotated[int, Range(1)] = 64
    """Samples in one optimizer step, over all processes."""
    data_dir: str = "data"
    """Folder of the IDX files (gzipped or not), itself or in a subfolder named after the data set."""
    net: Literal["cnn", "mlp"] = "cnn"
    """The network: guide 000's small CNN, or a two-layer net."""
    dropout: Annotated[float, Range(0, 1)] = 0.25
    """Dropout before the CNN's last layer."""
    hidden: Annotated[int, Range(1, 65536)] = 256
    """Width of the mlp's hidden layer."""

    channels = 1
    dataset = "mnist"
    mean, std = 0.1307, 0.3081

    def model(self) -> nn.Module:
        return SmallCNN(10, self.dropout) if self.net == "cnn" else mlp(28 * 28, self.hidden, 10)

    def train_data(self) -> Tensors:
        return datasets.idx(self.dataset, "train", self.data_dir)

    def eval_data(self) -> Tensors:
        return datasets.idx(self.dataset, "test", self.data_dir)

    def prepare(self, images: Tensor) -> Tensor:
        return (images.float() / 255.0 - self.mean) / self.std


class FashionMnist(Mnist):
    """Clothing (28x28) from IDX files in data_dir, downloaded where they are missing."""

    dataset = "fashion-mnist"
    mean, std = 0.2860, 0.3530
    classes = ("T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
