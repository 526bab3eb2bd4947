"""Finds where the first value that is not a finite number comes from: a step is taken again, and every module is checked."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.engine.data.batches import tensors_in
from drivetrain.outcomes import Outcome, Problem


def _has_nonfinite(value: Any) -> bool:
    return any(t.is_floating_point() and not bool(torch.isfinite(t).all()) for t in tensors_in(value))


class NonFiniteFinder:
    """Stops a training at the first module whose outputs or gradients are not finite, and names it."""

    def __init__(self, training: Any, until: int) -> None:
        """`until` is the step whose loss was not finite: when it has been taken again, the search ends."""
        self.training, self.until = training, until
        for name, module in training.model.named_modules():
            for parameter_name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and training.step.loss_scale is None:  # fp16 overflows in a sound training, too
                    parameter.register_hook(self._gradient_hook(f"{name}.{parameter_name}".lstrip("."), type(module).__name__))
            if not any(module.children()):
                module.register_forward_hook(self._output_hook(name or "the model"))
        self._check_loss()

    def _check_loss(self) -> None:
        training, until = self.training, self.until
        original_loss = training.task.loss

        def loss(model: nn.Module, batch: Any) -> Any:
            if model.training and training.done >= until:
                raise nothing_found(until)
            if model.training and _has_nonfinite(batch):
                fault = training.source.fault() if training.source is not None else ""
                raise self._problem(f"the batch itself, as the task's loss() gets it: {fault or 'look at the data, and at augment()'}")
            value = original_loss(model, batch)
            if model.training and _has_nonfinite(value):
                raise self._problem("the loss: every module's outputs are numbers, so it is loss() itself (a logarithm or a division?)")
            return value

        training.task.loss = loss

    def _output_hook(self, name: str) -> Any:
        def check(module: nn.Module, inputs: Any, output: Any) -> None:
            if module.training and _has_nonfinite(output):
                weights = [n for n, p in module.named_parameters(recurse=False) if _has_nonfinite(p.detach())]
                cause = (
                    f"its {' and '.join(weights)} is not: an update went wrong before" if weights else "its inputs and weights are numbers"
                )
                largest = max(
                    (float(t.detach().abs().max()) for t in tensors_in(inputs) if t.is_floating_point() and t.numel()), default=0.0
                )
                raise self._problem(f"the output of {name} ({type(module).__name__}); {cause} (largest input {largest:.3g})")

        return check

    def _gradient_hook(self, name: str, kind: str) -> Any:
        def check(gradient: Tensor) -> None:
            if _has_nonfinite(gradient):
                raise self._problem(f"the gradient of {name} ({kind}): the forward pass is all numbers, its derivative is not")

        return check

    def _problem(self, source: str) -> Problem:
        return Problem(f"the first value that is not a number, at step {self.training.done + 1:,}: {source}", Outcome.NAN)


def nothing_found(step: int) -> Problem:
    """Returns the error for a search that found nothing; the outcome stays "nan"."""
    where = f" at step {step:,}" if step < sys.maxsize else ""
    return Problem(
        f"the loss or its gradient was not a number{where}, but --find-nan found nothing: taken again with every module looked"
        " at, and without graphs or compiled code, all values are numbers.\nIt does not repeat, or compiled code makes it:"
        " try plan.capture=off plan.compile=off, deterministic=true, or precision=fp32",
        Outcome.NAN,
    )
