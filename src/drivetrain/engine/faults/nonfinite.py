"""Names the module that the first non-finite value comes from: takes the step again with a check in every module."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.engine.data.batches import tensors_in
from drivetrain.engine.setup import Setup
from drivetrain.engine.state.checkpoint import CheckpointWriter
from drivetrain.engine.step import Step
from drivetrain.outcomes import Outcome, Problem


def _has_nonfinite(value: Any) -> bool:
    return any(t.is_floating_point() and not bool(torch.isfinite(t).all()) for t in tensors_in(value))


class NonFiniteFinder:
    """Stops a training at the first module whose outputs, or whose gradients, are not finite, and names it."""

    def __init__(self, setup: Setup, step: Step, last_step: int) -> None:
        """`last_step` is the step whose loss was not finite; after it the search ends."""
        self.setup, self.step, self.last_step = setup, step, last_step
        for name, module in setup.model.named_modules():
            for parameter_name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and step.loss_scale is None:  # with fp16, some gradients overflow in a healthy training
                    parameter.register_hook(self._gradient_hook(f"{name}.{parameter_name}".lstrip("."), type(module).__name__))
            if not any(module.children()):
                module.register_forward_hook(self._output_hook(name or "the model"))
        step.observe_loss(self._check_batch, self._check_loss)

    def _check_batch(self, batch: Any) -> None:
        if self.step.number >= self.last_step:
            raise nothing_found_error(self.last_step)
        if _has_nonfinite(batch):
            fault = self.setup.source.fault() if self.setup.source is not None else ""
            raise self._problem(f"the batch itself, as the task's loss() gets it: {fault or 'look at the data, and at augment()'}")

    def _check_loss(self, value: Any) -> None:
        if _has_nonfinite(value):
            raise self._problem("the loss: every module's outputs are numbers, so it is loss() itself (a logarithm or a division?)")

    def _output_hook(self, name: str) -> Any:
        def check(module: nn.Module, inputs: Any, output: Any) -> None:
            if module.training and _has_nonfinite(output):
                bad_parameters = [n for n, p in module.named_parameters(recurse=False) if _has_nonfinite(p.detach())]
                if bad_parameters:
                    cause = f"its {' and '.join(bad_parameters)} is not: an update went wrong before"
                else:
                    cause = "its inputs and weights are numbers"
                float_inputs = [t.detach() for t in tensors_in(inputs) if t.is_floating_point() and t.numel()]
                largest = max((float(t.abs().max()) for t in float_inputs), default=0.0)
                raise self._problem(f"the output of {name} ({type(module).__name__}); {cause} (largest input {largest:.3g})")

        return check

    def _gradient_hook(self, name: str, kind: str) -> Any:
        def check(gradient: Tensor) -> None:
            if _has_nonfinite(gradient):
                raise self._problem(f"the gradient of {name} ({kind}): the forward pass is all numbers, its derivative is not")

        return check

    def _problem(self, source: str) -> Problem:
        return Problem(f"the first value that is not a number, at step {self.step.number + 1:,}: {source}", Outcome.NAN)


def not_finite_error(setup: Setup, step: int, writer: CheckpointWriter | None) -> Problem:
    """Returns the error that ends a training whose loss or gradient is not finite at a step (from 0)."""
    if writer is not None:
        writer.wait()
    saved_steps = setup.run.checkpoint_steps()
    checkpoint = f"the last good checkpoint is step {saved_steps[-1]:,}" if saved_steps else "no checkpoint was written before"
    if setup.group.is_main:
        setup.run.log_event("nan", step=step + 1)
    if setup.source is not None and (fault := setup.source.fault()):
        return Problem(f"{fault}.\nSo the loss is not a number from step {step + 1:,} on; {checkpoint}", Outcome.NAN)
    return Problem(
        f"the loss or its gradient is not a number at step {step + 1:,} (epoch {step // setup.steps_per_epoch + 1});"
        f" {checkpoint}.\nTry a lower learning_rate, clip=1, a warmup, or precision=fp32;"
        f" drivetrain resume {setup.run.name} --find-nan names the module it comes from",
        Outcome.NAN,
    )


def nothing_found_error(step: int) -> Problem:
    """Returns the error for a search that found nothing; the outcome stays "nan"."""
    at_step = f" at step {step:,}" if step < sys.maxsize else ""
    return Problem(
        f"the loss or its gradient was not a number{at_step}, but --find-nan found nothing: when the step was taken again,"
        " without graphs or compiled code, all values were numbers.\nThe error does not repeat, or compiled code causes it:"
        " try plan.capture=off plan.compile=off, deterministic=true, or precision=fp32",
        Outcome.NAN,
    )
