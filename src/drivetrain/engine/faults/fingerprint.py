"""Fingerprints of every step, to find where two trainings that should be equal part ways."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.engine.data.batches import tensors_in
from drivetrain.engine.state.tensors import local_tensor


def digest(tensors: Any) -> str:
    found = hashlib.sha256()
    for tensor in tensors_in(tensors):
        found.update(local_tensor(tensor).cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


class Fingerprint:
    """Notes, for each step, digests of the batches, of each module's outputs and of each gradient."""

    def __init__(self, training: Any, path: Path, name_operations: bool = False) -> None:
        self.file = open(path, "a")  # noqa: SIM115 (open as long as the run)
        self.batches: list[str] = []
        self.outputs: dict[str, str] = {}
        if name_operations:
            self._name_operations()
        names = {
            p: f"{prefix}.{name} ({type(module).__name__}'s backward)".lstrip(".")
            for prefix, module in training.model.named_modules()
            for name, p in module.named_parameters(recurse=False)
        }
        task, step = training.task, training.step
        plain_loss, plain_update = task.loss, step._update

        def loss(model: nn.Module, batch: Any) -> Any:
            if model.training:
                self.batches.append(digest(batch))
            return plain_loss(model, batch)

        def update(*args: Any) -> None:
            gradients = {names[p]: digest(p.grad) for p in training.model.parameters() if p.grad is not None}
            row = {"step": training.done + 1, "batch": self.batches, "outputs": self.outputs, "gradients": gradients}
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
            self.batches, self.outputs = [], {}
            plain_update(*args)

        task.loss, step._update = loss, update
        for name, module in training.model.named_modules():
            module.register_forward_hook(self._hook(name or "(model)"))

    def _name_operations(self) -> None:
        """Note what torch says of operations without a deterministic form, and go on."""
        torch.use_deterministic_algorithms(True, warn_only=True)
        show = warnings.showwarning

        def note(message: Any, *args: Any, **more: Any) -> None:
            operation, found, _ = str(message).partition(" does not have a deterministic implementation")
            if found:
                self.file.write(json.dumps({"operation": operation.split()[-1]}) + "\n")
            else:
                show(message, *args, **more)

        warnings.showwarning = note
        warnings.simplefilter("always")

    def _hook(self, name: str) -> Any:
        def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
            if module.training:
                self.outputs[f"{name}:{type(module).__name__}"] = digest(output)

        return note
