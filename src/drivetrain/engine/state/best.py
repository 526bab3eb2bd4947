"""The best evaluation of a run."""

from __future__ import annotations

import math
from typing import Any

from drivetrain.outcomes import Problem


class Best:
    """The best evaluation so far, by the metric that `best` names."""

    def __init__(self, setting: str | None, patience: int = 0) -> None:
        self.patience, self.waited = patience, 0
        direction, _, name = (setting or "").rpartition(":")
        self.name = name
        falling = ("loss", "perplexity", "error")
        self.sign = {"max": 1, "min": -1}.get(direction) or (-1 if any(w in name for w in falling) else 1)
        self.value: float | None = None
        self.step: int | None = None

    def update(self, metrics: dict[str, float], step: int) -> bool:
        if not self.name:
            return False
        if self.name not in metrics:
            raise Problem(f"best={self.name}: the evaluation gives {', '.join(metrics)}")
        value = metrics[self.name]
        if math.isnan(value) or (self.value is not None and self.sign * value <= self.sign * self.value):
            self.waited += 1
            return False
        self.value, self.step, self.waited = value, step, 0
        return True

    @property
    def settled(self) -> bool:
        """Whether so many evaluations were no better that the run shall end."""
        return 0 < self.patience <= self.waited

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "step": self.step, "waited": self.waited}

    def load(self, values: dict[str, Any]) -> None:
        if values["name"] == self.name:
            self.value, self.step, self.waited = values["value"], values["step"], values.get("waited", 0)
