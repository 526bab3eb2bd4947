"""Corrects predictions by measurements: takes measured points at a few micro-batches, returns time and memory at any micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

SIZE_RATIO = 4  # between neighbours of the micro-batches that are measured first
# A size between two measured micro-batches is measured, too, if their ratio is larger than MAX_SIZE_RATIO, or if the
# prediction's errors at the two differ by more than MAX_ERROR_DIFFERENCE.
MAX_SIZE_RATIO = 2
MAX_ERROR_DIFFERENCE = 0.03


@dataclass(frozen=True)
class Point:
    """A measurement at one micro-batch: one step of one micro-batch on one device."""

    micro_batch: int
    fits: bool = True
    peak_bytes: int = 0
    step_seconds: float = 0.0
    update_seconds: float = 0.0
    """The optimizer's part of the step, which runs once per step with any accumulation."""
    kind: str = ""
    """How the step ran: eager or captured."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def sizes_to_measure(sizes: Sequence[int], best: int) -> list[int]:
    """Returns three of the micro-batches that should fit, near the predicted best one."""
    if best not in sizes:
        return [best]
    high = max(s for s in sizes if s <= SIZE_RATIO * best)
    low = min(s for s in sizes if s * SIZE_RATIO**2 >= high)
    middle = min(sizes, key=lambda s: _log_distance(s, low, high))
    return sorted({low, middle, high})


def next_size_to_measure(points: Sequence[Point], requested: Sequence[int], predicted: Mapping[int, float]) -> int | None:
    """Returns the micro-batch to measure next, or None.

    First come the requested ones, smallest first, until one does not fit; then one between two measured sizes that are far apart
    or have different prediction errors. `predicted`: seconds of forward and backward by size.
    """
    if any(not p.fits for p in points):
        return None
    errors = {
        p.micro_batch: (p.step_seconds - p.update_seconds) / predicted[p.micro_batch] for p in sorted(points, key=lambda p: p.micro_batch)
    }
    if missing := [size for size in sorted(requested) if size not in errors]:
        return missing[0]
    for low, high in pairwise(errors):
        between = [size for size in predicted if low < size < high]
        if between and (high > MAX_SIZE_RATIO * low or abs(math.log(errors[high] / errors[low])) > MAX_ERROR_DIFFERENCE):
            return min(between, key=lambda size: _log_distance(size, low, high))
    return None


def _log_distance(size: int, low: int, high: int) -> float:
    """Returns a size's distance from the middle between two others on a logarithmic scale."""
    return abs(math.log(size * size / (low * high)))


@dataclass(frozen=True)
class Fit:
    """The measured points of a task on this machine, smallest micro-batch first."""

    points: tuple[Point, ...]

    @staticmethod
    def of(points: Sequence[Point]) -> Fit | None:
        fitting = tuple(sorted((p for p in points if p.fits), key=lambda p: p.micro_batch))
        return Fit(fitting) if fitting else None

    @property
    def largest(self) -> int:
        return self.points[-1].micro_batch

    def update_seconds(self) -> float:
        return min(p.update_seconds for p in self.points)

    def work_seconds(self, micro_batch: int, predicted: Callable[[int], float]) -> float:
        """Returns the seconds of forward and backward of one micro-batch."""
        update = self.update_seconds()
        return self._corrected(micro_batch, predicted, lambda p: max(1e-9, p.step_seconds - update))

    def peak_bytes(self, micro_batch: int, predicted: Callable[[int], float]) -> float:
        return self._corrected(micro_batch, predicted, lambda p: float(p.peak_bytes))

    def _corrected(self, micro_batch: int, predicted: Callable[[int], float], measured: Callable[[Point], float]) -> float:
        """Returns the prediction times the ratio measured / predicted, interpolated over log(micro-batch) between the nearest points."""
        ratios = [(p.micro_batch, measured(p) / max(1e-12, predicted(p.micro_batch))) for p in self.points]
        below = [r for r in ratios if r[0] <= micro_batch]
        above = [r for r in ratios if r[0] >= micro_batch]
        if not below or not above:
            return predicted(micro_batch) * (ratios[0][1] if not below else ratios[-1][1])
        (low, low_ratio), (high, high_ratio) = below[-1], above[0]
        part = 0.0 if low == high else math.log(micro_batch / low) / math.log(high / low)
        return predicted(micro_batch) * (low_ratio + part * (high_ratio - low_ratio))
