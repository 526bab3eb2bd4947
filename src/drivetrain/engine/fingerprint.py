"""Fingerprints of every step, to find where two trainings that should be equal part ways."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.engine.data import tensors_in


def digest(tensors: Any) -> str:
    found = hashlib.sha256()
    for tensor in tensors_in(tensors):
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


class Fingerprint:
    """Notes, for each step, digests of the batches, of each module's outputs and of each gradient."""

    def __init__(self, training: Any, path: Path) -> None:
        self.file = open(path, "a")  # noqa: SIM115 (open as long as the run)
        self.batches: list[str] = []
        self.outputs: dict[str, str] = {}
        task, step = training.task, training.step
        plain_loss, plain_update = task.loss, step._update

        def loss(model: nn.Module, batch: Any) -> Any:
            if model.training:
                self.batches.append(digest(batch))
            return plain_loss(model, batch)

        def update(*args: Any) -> None:
            gradients = {n: digest(p.grad) for n, p in training.model.named_parameters() if p.grad is not None}
            row = {"step": training.done + 1, "batch": self.batches, "outputs": self.outputs, "gradients": gradients}
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
            self.batches, self.outputs = [], {}
            plain_update(*args)

        task.loss, step._update = loss, update
        for name, module in training.model.named_modules():
            module.register_forward_hook(self._hook(name or "(model)"))

    def _hook(self, name: str) -> Any:
        def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
            if module.training:
                self.outputs[f"{name}:{type(module).__name__}"] = digest(output)

        return note
