"""Tries micro-batches without training on them: restores what they change, and compares what they compute."""

from __future__ import annotations

import torch

from drivetrain.engine.fast.python_state import untrained_tensors
from drivetrain.engine.step import Step

MAX_CLONED_BYTES = 2 << 30  # of untrained tensors; more are not copied


class Sandbox:
    """A context in which micro-batches may be tried. Its end clears gradients and metrics, and restores changed tensors."""

    def __init__(self, step: Step) -> None:
        self.step = step
        untrained = untrained_tensors(step.task, step.model)
        if sum(t.nbytes for t in untrained) > MAX_CLONED_BYTES:
            untrained = []  # they are a large frozen model, which no forward pass changes
        self._originals = [(t, t.clone()) for t in (*step.strategy.dense_buffers(), *untrained)]

    def restore(self) -> None:
        """Restores the tensors that a forward pass may have changed."""
        with torch.no_grad():
            for tensor, original in self._originals:
                tensor.copy_(original)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()
        self.step.clear()


def relative_difference(first: list[float], second: list[float]) -> float:
    """Returns the largest difference, relative to the value or, for small values, to a thousandth of the largest value."""
    pairs = torch.tensor([first, second], dtype=torch.float64)
    is_equal = (pairs[0] == pairs[1]) | pairs.isnan().all(0)
    magnitude = pairs.abs().amax(0)
    scale = torch.maximum(magnitude, magnitude.nan_to_num(posinf=0.0).max() * 1e-3).clamp_min(1e-30)
    differences = torch.where(is_equal, 0.0, (pairs[0] - pairs[1]).abs() / scale)
    return float(differences.nan_to_num(nan=1e9, posinf=1e9).max())


def describe_metrics(metrics: list[float]) -> str:
    """Returns the loss and the gradients' norm of a rehearsal as text."""
    return f"loss {metrics[0]:.5g}, gradients' norm {sum(m * m for m in metrics[1:]) ** 0.5:.5g}"
