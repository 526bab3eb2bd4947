"""What all image classifiers share: cross-entropy, accuracy and the confusion matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.task import Task


class Classifier(Task):
    """An image classifier on (images, labels) batches."""

    classes = tuple(str(i) for i in range(10))

    def prepare(self, images: Tensor) -> Tensor:
        """Raw images as the net wants them; on the device."""
        return images

    def loss(self, model: nn.Module, batch: Any) -> Any:
        images, labels = batch
        logits = model(self.prepare(images))
        return F.cross_entropy(logits, labels), {"accuracy": logits.argmax(-1) == labels}

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        images, labels = batch
        logits = model(self.prepare(images))
        predicted = logits.argmax(-1)
        losses = F.cross_entropy(logits, labels, reduction="none")
        return {"accuracy": predicted == labels, "loss": losses, "predicted": predicted, "label": labels}

    def summary(self, values: dict[str, Tensor]) -> dict[str, Any]:
        """The confusion matrix: rows are the true classes."""
        count = len(self.classes)
        cells = torch.bincount(values["label"] * count + values["predicted"], minlength=count * count)
        return {"confusion": cells.reshape(count, count)}
