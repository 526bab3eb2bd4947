"""Base classes of image classifiers: cross-entropy, accuracy, confusion matrix, nets, augmentation and normalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.data import Rand
from drivetrain.settings import Range
from drivetrain.task import Task
from drivetrain.tasks.vision import augment, nets


@dataclass(frozen=True)
class Pixels:
    """The mean and standard deviation of each channel, for pixels of 0 to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalise(self, images: Tensor) -> Tensor:
        """Returns images of 0 to 255 (bytes or floats) as floats with mean 0 and standard deviation 1."""
        scale, shift = self._scale_and_shift(images.device)
        return images * scale + shift

    def _scale_and_shift(self, device: torch.device) -> tuple[float | Tensor, float | Tensor]:
        if len(self.mean) == 1:
            return 1.0 / (255.0 * self.std[0]), -self.mean[0] / self.std[0]
        if torch.compiler.is_compiling():
            return self._tensors(device)  # constants for the compiler; filling the dict here would make it compile twice
        if (self, device) not in _SCALE_AND_SHIFT:
            _SCALE_AND_SHIFT[self, device] = self._tensors(device)
        return _SCALE_AND_SHIFT[self, device]

    def _tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the scale and shift of each channel. Creates them on the device, so that no step copies them there."""
        scale = [torch.full((1, 1, 1, 1), 1.0 / (255.0 * std), device=device) for std in self.std]
        shift = [torch.full((1, 1, 1, 1), -mean / std, device=device) for mean, std in zip(self.mean, self.std, strict=True)]
        return torch.cat(scale, 1), torch.cat(shift, 1)


_SCALE_AND_SHIFT: dict[tuple[Pixels, torch.device], tuple[Tensor, Tensor]] = {}


class Classifier(Task):
    """An image classifier on (images, labels) batches."""

    classes = tuple(str(i) for i in range(10))
    channels = 1
    label_smoothing = 0.0

    def prepare(self, images: Tensor) -> Tensor:
        """Turns raw images into inputs of the net; runs on the device."""
        return images

    def loss(self, model: nn.Module, batch: Any) -> Any:
        images, labels = batch
        logits = model(self.prepare(images))
        return F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing), {"accuracy": logits.argmax(-1) == labels}

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        images, labels = batch
        logits = model(self.prepare(images))
        predicted = logits.argmax(-1)
        losses = F.cross_entropy(logits, labels, reduction="none")
        return {"accuracy": predicted == labels, "loss": losses, "predicted": predicted, "label": labels}

    def exports(self, model: nn.Module) -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
        data = self.eval_data()
        images = torch.stack([torch.as_tensor(data[i][0]) for i in range(min(8, len(data)))])
        return {"model": (Prepared(self, model), {"images": images})}

    def summary_fields(self) -> dict[str, Any]:
        return {"Classes": len(self.classes), "Channels": self.channels}

    def summary(self, values: dict[str, Tensor]) -> dict[str, Any]:
        """Returns the confusion matrix, whose rows are the true classes."""
        count = len(self.classes)
        cells = torch.bincount(values["label"] * count + values["predicted"], minlength=count * count)
        return {"confusion": cells.reshape(count, count)}


class Prepared(nn.Module):
    """A classifier that takes raw images and returns logits and probabilities, for `export`."""

    def __init__(self, task: Classifier, net: nn.Module) -> None:
        super().__init__()
        self.task, self.net = task, net

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        logits = self.net(self.task.prepare(images))
        return {"logits": logits, "probability": logits.softmax(-1)}


class ImageClassifier(Classifier):
    """A classifier of square images given as bytes [n, channels, size, size], with a choice of nets and augmentation."""

    net: Literal["cnn", "conv4", "mlp", "resnet18", "vit-s"] = "cnn"
    """The network: guide 000's small CNN, guide 001's four convolutions, a two-layer net, ResNet-18 or a small ViT."""
    dropout: Annotated[float, Range(0, 1)] = 0.0
    """Dropout before the last linear layers (the mlp has none)."""
    hidden: Annotated[int, Range(1, 65536)] = 256
    """Width of the mlp's hidden layer."""
    rotation: Annotated[float, Range(0, 180)] = 0.0
    """Training images are rotated by up to this many degrees in either direction."""
    translation: Annotated[float, Range(0, 1)] = 0.0
    """Training images are moved by up to this fraction of their width and height."""
    flip: bool = False
    """Half of the training images are mirrored left to right."""
    label_smoothing: Annotated[float, Range(0, 1)] = 0.0
    """The share of a training target that is spread over all classes; evaluation is not smoothed."""

    dataset = ""
    channels = 1
    size = 28
    pixels = Pixels((0.0,), (1.0,))

    def summary_fields(self) -> dict[str, Any]:
        dataset = {"Dataset": self.dataset} if self.dataset else {}
        return dataset | {"Model": self.net} | super().summary_fields()

    def model(self) -> nn.Module:
        return nets.build(self.net, self.channels, self.size, len(self.classes), self.dropout, self.hidden)

    def augment(self, batch: Any, rand: Rand) -> Any:
        if not (self.rotation or self.translation or self.flip):
            return batch
        images, labels = batch
        draws = rand.uniform(4)
        if self.flip:
            images = augment.flip(images, draws[:, 3:])
        if self.rotation or self.translation:
            images = augment.affine(images, self.rotation, self.translation, draws[:, :3])
        return images, labels

    def prepare(self, images: Tensor) -> Tensor:
        return self.pixels.normalise(images)
