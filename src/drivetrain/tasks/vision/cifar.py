"""CIFAR-10: small colour photographs of ten kinds of things."""

from __future__ import annotations

from typing import Annotated, Literal

from drivetrain.data import Tensors
from drivetrain.settings import Duration, Range
from drivetrain.tasks import datasets
from drivetrain.tasks.vision.classify import ImageClassifier, Pixels


class Cifar10(ImageClassifier):
    """Photographs (32x32, colour) from CIFAR-10's binary files in data_dir, downloaded where they are missing."""

    epochs: Annotated[int, Range(1)] = 30
    """Passes over the training data."""
    global_batch: Annotated[int, Range(1)] = 128
    """Samples in one optimizer step, over all processes."""
    learning_rate: Annotated[float, Range(0)] = 1e-3
    """The optimizer's peak learning rate."""
    weight_decay: Annotated[float, Range(0)] = 0.05
    """Weight decay of the optimizer."""
    warmup: Duration = "1ep"
    """Steps (or epochs, 1ep) over which the learning rate rises to its peak."""
    data_dir: str = "data"
    """Folder of the binary files (data_batch_1.bin ...) or of cifar-10-binary.tar.gz, itself or its subfolder cifar10."""
    net: Literal["cnn", "conv4", "mlp", "resnet18", "vit-s"] = "resnet18"
    """The network: guide 000's small CNN, guide 001's four convolutions, a two-layer net, ResNet-18 or a small ViT."""
    translation: Annotated[float, Range(0, 1)] = 0.125
    """Training images are moved by up to this fraction of their width and height."""
    flip: bool = True
    """Half of the training images are mirrored left to right."""

    dataset = "cifar10"
    classes = datasets.CIFAR10_CLASSES
    channels, size = 3, 32
    pixels = Pixels((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))

    def train_data(self) -> Tensors:
        return datasets.cifar10("train", self.data_dir)

    def eval_data(self) -> Tensors:
        return datasets.cifar10("test", self.data_dir)
