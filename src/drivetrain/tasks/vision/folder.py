"""Your own images, one folder for each class."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from torch import nn

from drivetrain.data import Tensors
from drivetrain.settings import Range
from drivetrain.tasks import imagecache
from drivetrain.tasks.vision.classify import ImageClassifier, Pixels


class Folder(ImageClassifier):
    """Images of any size and format in data_dir/train/<class>/ and data_dir/test/<class>/."""

    epochs: Annotated[int, Range(1)] = 30
    """Passes over the training data."""
    global_batch: Annotated[int, Range(1)] = 64
    """Samples in one optimizer step, over all processes."""
    data_dir: str = "data"
    """Folder that holds train/<class>/ and test/<class>/; decoded images are kept in its .drivetrain-cache."""
    size: Annotated[int, Range(16, 1024)] = 64
    """Side of the images: the shorter side is resized to it, the longer one cropped about the centre."""
    colour: Literal["auto", "rgb", "grey"] = "auto"
    """Three channels or one; auto is grey where no image has a colour."""
    net: Literal["cnn", "conv4", "mlp", "resnet18", "vit-s"] = "resnet18"
    """The network: guide 000's small CNN, guide 001's four convolutions, a two-layer net, ResNet-18 or a small ViT."""
    bad_samples: Literal["stop", "skip"] = "stop"
    """Whether an unreadable file stops the run, or is left out and named."""

    classes = tuple[str, ...]()

    @cached_property
    def _images(self) -> imagecache.Images:
        images = imagecache.load(self.data_dir, self.size, self.colour, self.bad_samples)
        self.classes, self.channels, self.pixels = images.classes, len(images.mean), Pixels(images.mean, images.std)
        return images

    def summary_fields(self) -> dict[str, Any]:
        return super().summary_fields() | {"Dataset": self.data_dir}

    def model(self) -> nn.Module:
        self.train_data()  # sets channels and classes
        return super().model()

    def train_data(self) -> Tensors:
        return self._images.train

    def eval_data(self) -> Tensors | None:
        return self._images.test
