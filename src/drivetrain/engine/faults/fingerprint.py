"""Writes a fingerprint of every step, to find the first difference between two trainings that should be equal."""

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
from drivetrain.engine.step import Step


def digest(tensors: Any) -> str:
    """Returns a hash of all bytes of nested tensors."""
    sha256 = hashlib.sha256()
    for tensor in tensors_in(tensors):
        sha256.update(local_tensor(tensor).cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()[:16]


class Fingerprint:
    """Writes, for each step, digests of the batches, of each module's outputs and of each gradient."""

    def __init__(self, step: Step, path: Path, name_operations: bool = False) -> None:
        self.step = step
        self.file = open(path, "a")  # noqa: SIM115 (open as long as the run)
        self.batches: list[str] = []
        self.outputs: dict[str, str] = {}
        if name_operations:
            self._name_operations()
        self._names = {
            p: f"{module_name}.{name} ({type(module).__name__}'s backward)".lstrip(".")
            for module_name, module in step.model.named_modules()
            for name, p in module.named_parameters(recurse=False)
        }
        step.observe_loss(lambda batch: self.batches.append(digest(batch)), lambda value: None)
        step.update_hooks.append(self._write_row)
        for name, module in step.model.named_modules():
            module.register_forward_hook(self._output_hook(name or "(model)"))

    def _write_row(self) -> None:
        gradients = {self._names[p]: digest(p.grad) for p in self.step.model.parameters() if p.grad is not None}
        row = {"step": self.step.number + 1, "batch": self.batches, "outputs": self.outputs, "gradients": gradients}
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        self.batches, self.outputs = [], {}

    def _name_operations(self) -> None:
        """Writes the name of each operation that has no deterministic form, as torch's warnings name it."""
        torch.use_deterministic_algorithms(True, warn_only=True)
        show_warning = warnings.showwarning

        def write_operation(message: Any, *args: Any, **options: Any) -> None:
            operation, separator, _ = str(message).partition(" does not have a deterministic implementation")
            if separator:
                self.file.write(json.dumps({"operation": operation.split()[-1]}) + "\n")
            else:
                show_warning(message, *args, **options)

        warnings.showwarning = write_operation
        warnings.simplefilter("always")

    def _output_hook(self, name: str) -> Any:
        def record_output(module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
            if module.training:
                self.outputs[f"{name}:{type(module).__name__}"] = digest(output)

        return record_output
