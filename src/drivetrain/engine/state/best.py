"""Remembers the best evaluation of a run."""

from __future__ import annotations

import math
from typing import Any

from drivetrain.outcomes import Problem


class Best:
    """The best evaluation so far, by the metric of the setting `best`, and the number of evaluations since then that were no better."""

    def __init__(self, setting: str | None, patience: int = 0) -> None:
        self.patience, self._num_worse = patience, 0
        direction, _, name = (setting or "").rpartition(":")
        self.name = name
        lower_is_better = any(word in name for word in ("loss", "perplexity", "error"))
        self.sign = {"max": 1, "min": -1}.get(direction) or (-1 if lower_is_better else 1)
        self.value: float | None = None
        self.step: int | None = None

    def update(self, metrics: dict[str, float], step: int) -> bool:
        """Compares an evaluation with the best so far; returns whether it is better."""
        if not self.name:
            return False
        if self.name not in metrics:
            raise Problem(f"best={self.name}: the evaluation has no such metric; choose one of {', '.join(metrics)}")
        value = metrics[self.name]
        if math.isnan(value) or (self.value is not None and self.sign * value <= self.sign * self.value):
            self._num_worse += 1
            return False
        self.value, self.step, self._num_worse = value, step, 0
        return True

    @property
    def out_of_patience(self) -> bool:
        """Whether `patience` evaluations in a row were no better, so that the run ends."""
        return 0 < self.patience <= self._num_worse

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "step": self.step, "waited": self._num_worse}

    def load(self, values: dict[str, Any]) -> None:
        """Loads what `to_json` returned, unless `best` now names another metric."""
        if values["name"] == self.name:
            self.value, self.step, self._num_worse = values["value"], values["step"], values.get("waited", 0)
