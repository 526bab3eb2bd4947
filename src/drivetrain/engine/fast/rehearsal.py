"""Steps that are tried out and count for nothing: what they touch is put back, what they gave is compared."""

from __future__ import annotations

import torch

from drivetrain.engine.fast.python_state import untrained_tensors
from drivetrain.engine.step import Step

CLONED = 2 << 30  # bytes of tensors beside the trained ones that are put back after a rehearsal


class Sandbox:
    """Inside, work may be tried out: tensors that the forward pass may change are put back, gradients and figures cleared."""

    def __init__(self, step: Step) -> None:
        self.step = step
        kept = untrained_tensors(step.task, step.model)
        if sum(t.nbytes for t in kept) > CLONED:
            kept = []  # a large frozen model: nobody changes that in a forward pass
        self.before = [(t, t.clone()) for t in (*step.strategy.dense_buffers(), *kept)]

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, kept in self.before:
                tensor.copy_(kept)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()
        self.step.clear()


def relative_difference(one: list[float], two: list[float]) -> float:
    """The largest difference, relative to the value or, for the smallest, to a thousandth of the largest."""
    tensors = torch.tensor([one, two], dtype=torch.float64)
    same = (tensors[0] == tensors[1]) | tensors.isnan().all(0)
    finite = tensors.abs().amax(0)
    scale = torch.maximum(finite, finite.nan_to_num(posinf=0.0).max() * 1e-3).clamp_min(1e-30)
    return float(torch.where(same, 0.0, (tensors[0] - tensors[1]).abs() / scale).nan_to_num(nan=1e9, posinf=1e9).max())


def describe_metrics(figures: list[float]) -> str:
    return f"loss {figures[0]:.5g}, gradients' norm {sum(f * f for f in figures[1:]) ** 0.5:.5g}"
