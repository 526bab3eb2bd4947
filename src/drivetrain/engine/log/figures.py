"""The named figures of a step, and where they travel: behind the gradients, in one row."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.engine.numerics.losses import LossPart
from drivetrain.outcomes import Problem

# The tail of the gradient buffer: the norm, three requests any rank may make, fp16's scale and skipped
# steps, then the figures.
TAIL = 64
NORM, STOP, SAVE, EVALUATE, SCALE, SKIPPED, FIGURES = range(7)


class Figures:
    """The named figures of a step and their slots in the tail, fixed by the first loss."""

    def __init__(self, parts: list[LossPart], logged: list[LossPart]) -> None:
        self.parts = [p.name for p in parts]
        self.names = [p.name for p in (*parts, *logged)]
        if len(set(self.names)) != len(self.names):
            raise Problem(f"loss() uses a name twice: {self.names}")
        if len(self.parts) > 1 and "loss" in self.names:
            raise Problem("loss() names one of several figures 'loss', which is the name of the parts' sum: choose another")
        own = [p.count is not None for p in (*parts, *logged)]
        self.total = {name: FIGURES + i for i, name in enumerate(self.names)}
        first = FIGURES + len(self.names)
        self.count = {name: first + i for i, name in enumerate(n for n, o in zip(self.names, own, strict=True) if o)}
        self.used = first + len(self.count)
        if self.used > TAIL:
            raise Problem(f"loss() logs {len(self.names)} figures; at most {(TAIL - FIGURES) // 2} fit")

    def to_json(self) -> dict[str, Any]:
        return {"parts": self.parts, "logged": self.names[len(self.parts) :], "counted": list(self.count)}

    @staticmethod
    def from_json(known: dict[str, Any]) -> Figures:
        parts, logged = (
            [LossPart(n, torch.zeros(()), 0 if n in known["counted"] else None) for n in known[k]] for k in ("parts", "logged")
        )
        return Figures(parts, logged)

    def guarded(self) -> list[int]:
        """The slots that must be numbers: the norm and the parts, not what is only logged."""
        return [NORM, *(self.total[name] for name in self.parts)]

    def read(self, row: list[float], size: int) -> dict[str, float]:
        """The global means, from a row of the ledger."""
        values = {}
        for name in self.names:
            count = row[self.count[name]] if name in self.count else size
            values[name] = row[self.total[name]] / count if count else 0.0
        if len(self.parts) > 1 or self.parts[0] != "loss":
            values["loss"] = sum(values[name] for name in self.parts)
        return values
