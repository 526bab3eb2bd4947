"""The names of a step's metrics, and their slots in the row of floats that is all-reduced with the gradients."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.engine.numerics.losses import LossPart
from drivetrain.outcomes import Problem

# A row: the gradient norm, three requests that any rank may make, fp16's scale and skipped steps, then the step's metrics.
NORM, FIRST_REQUEST, _SAVE, _EVALUATE, SCALE, SKIPPED, FIRST_METRIC = range(7)
PIGGYBACK_FLOATS = 64  # the most floats of a row


class MetricSlots:
    """The names of a step's metrics and the slots of their totals and counts, fixed by the first loss."""

    def __init__(self, parts: list[LossPart], logged: list[LossPart]) -> None:
        self.parts = [p.name for p in parts]
        self.names = [p.name for p in (*parts, *logged)]
        if len(set(self.names)) != len(self.names):
            raise Problem(f"loss() uses a name twice: {self.names}")
        if len(self.parts) > 1 and "loss" in self.names:
            raise Problem("loss() names one of several figures 'loss', but that is the name of the parts' sum: choose another name")
        counted = [p.name for p in (*parts, *logged) if p.count is not None]
        self.total_slots = {name: FIRST_METRIC + i for i, name in enumerate(self.names)}  # name -> slot of its total
        first_count = FIRST_METRIC + len(self.names)
        self.count_slots = {name: first_count + i for i, name in enumerate(counted)}
        self.num_used = first_count + len(self.count_slots)
        if self.num_used > PIGGYBACK_FLOATS:
            raise Problem(f"loss() logs {len(self.names)} figures; at most {(PIGGYBACK_FLOATS - FIRST_METRIC) // 2} fit")

    def to_json(self) -> dict[str, Any]:
        return {"parts": self.parts, "logged": self.names[len(self.parts) :], "counted": list(self.count_slots)}

    @staticmethod
    def from_json(values: dict[str, Any]) -> MetricSlots:
        counted = values["counted"]
        parts, logged = ([LossPart(n, torch.zeros(()), 0 if n in counted else None) for n in values[k]] for k in ("parts", "logged"))
        return MetricSlots(parts, logged)

    def must_be_finite(self) -> list[int]:
        """Returns the slots of the gradient norm and of the parts of the loss, without what is only logged."""
        return [NORM, *(self.total_slots[name] for name in self.parts)]

    def means(self, row: list[float], num_samples: int) -> dict[str, float]:
        """Returns the means over the global batch, from a row of the metric ring."""
        values = {}
        for name in self.names:
            count = row[self.count_slots[name]] if name in self.count_slots else num_samples
            values[name] = row[self.total_slots[name]] / count if count else 0.0
        if len(self.parts) > 1 or self.parts[0] != "loss":
            values["loss"] = sum(values[name] for name in self.parts)
        return values
