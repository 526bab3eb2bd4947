"""Where the first value that is no number comes from: a step is taken again, and every module looked at."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.engine.data.batches import tensors_in
from drivetrain.outcomes import Outcome, Problem


def _bad(value: Any) -> bool:
    return any(t.is_floating_point() and not bool(torch.isfinite(t).all()) for t in tensors_in(value))


class NonFiniteFinder:
    """Stops a training at the first module whose outputs, or whose gradients, are not numbers; and names it."""

    def __init__(self, training: Any, until: int) -> None:
        """`until` is the step whose loss was not a number; once it has been taken again, nothing is left to find."""
        self.training, self.until = training, until
        self._forward = ""
        for name, module in training.model.named_modules():
            for parameter_name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and training.step.loss_scale is None:  # fp16's overflow is nothing to stop for
                    parameter.register_hook(self._gradient_hook(f"{name}.{parameter_name}".lstrip("."), type(module).__name__))
            if not any(module.children()):
                module.register_forward_hook(self._hook(name or "the model"))
        plain = training.task.loss

        def loss(model: nn.Module, batch: Any) -> Any:
            if model.training and training.done >= until:
                raise nothing_found(until)
            if model.training and _bad(batch):
                fault = training.source.fault() if training.source is not None else ""
                raise self._found(f"the batch itself, as the task's loss() gets it: {fault or 'look at the data, and at augment()'}")
            value = plain(model, batch)
            if model.training and _bad(value):
                raise self._found("the loss: every module's outputs are numbers, so it is loss() itself (a logarithm or a division?)")
            return value

        training.task.loss = loss

    def _hook(self, name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if module.training and _bad(output):
                weights = [n for n, p in module.named_parameters(recurse=False) if _bad(p.detach())]
                why = (
                    f"its {' and '.join(weights)} is not: an update went wrong before" if weights else "its inputs and weights are numbers"
                )
                largest = max(
                    (float(t.detach().abs().max()) for t in tensors_in(inputs) if t.is_floating_point() and t.numel()), default=0.0
                )
                raise self._found(f"the output of {name} ({type(module).__name__}); {why} (largest input {largest:.3g})")

        return look

    def _gradient_hook(self, name: str, kind: str) -> Any:
        def look(gradient: Tensor) -> None:
            if _bad(gradient):
                raise self._found(f"the gradient of {name} ({kind}): the forward pass is all numbers, its derivative is not")

        return look

    def _found(self, what: str) -> Problem:
        return Problem(f"the first value that is not a number, at step {self.training.done + 1:,}: {what}", Outcome.NAN)


def nothing_found(step: int) -> Problem:
    """The end of a search that met no bad value: the original outcome stays."""
    where = f" at step {step:,}" if step < sys.maxsize else ""
    return Problem(
        f"the loss or its gradient was not a number{where}, but --find-nan found nothing: taken again with every module looked"
        " at, and without graphs or compiled code, all values are numbers.\nIt does not repeat, or compiled code makes it:"
        " try plan.capture=off plan.compile=off, deterministic=true, or precision=fp32",
        Outcome.NAN,
    )
