"""From measured points to figures at any micro-batch: the prediction's shape, corrected by what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

SPAN = 4  # from one of the micro-batches that are measured first to the next
WIDE = 2  # further apart than this, or with errors of the prediction that differ by more than UNEVEN: what lies between is measured too
UNEVEN = 0.03


def worth_measuring(sizes: Sequence[int], best: int) -> list[int]:
    """Of the micro-batches that should fit, three whose figures tell those of the others around the one predicted best."""
    if best not in sizes:
        return [best]
    high = max(s for s in sizes if s <= SPAN * best)
    low = min(s for s in sizes if s * SPAN**2 >= high)
    middle = min(sizes, key=lambda s: abs(math.log(s * s / (low * high))))
    return sorted({low, middle, high})


@dataclass(frozen=True)
class Point:
    """What was measured at one micro-batch: one step of one micro-batch on one device."""

    micro_batch: int
    fits: bool = True
    peak_bytes: int = 0
    step_seconds: float = 0.0
    update_seconds: float = 0.0
    """The optimizer's part of it, once a step whatever the accumulation."""
    kind: str = ""
    """How the step ran: eager or captured."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def next_to_measure(points: Sequence[Point], wanted: Sequence[int], predicted: Mapping[int, float]) -> int | None:
    """The wanted micro-batches from the smallest up, until one does not fit; then those halfway between two that are so far
    apart, or whose times the prediction (of forward and backward at each) explains so differently, that they do not tell
    what lies between."""
    if any(not p.fits for p in points):
        return None
    known = {
        p.micro_batch: (p.step_seconds - p.update_seconds) / predicted[p.micro_batch] for p in sorted(points, key=lambda p: p.micro_batch)
    }
    if missing := [size for size in sorted(wanted) if size not in known]:
        return missing[0]
    for low, high in pairwise(known):
        between = [size for size in predicted if low < size < high]
        if between and (high > WIDE * low or abs(math.log(known[high] / known[low])) > UNEVEN):
            return min(between, key=lambda size: abs(math.log(size * size / (low * high))))
    return None


@dataclass(frozen=True)
class Fit:
    """Measured points of a task on this machine."""

    points: tuple[Point, ...]

    @staticmethod
    def of(points: Sequence[Point]) -> Fit | None:
        good = tuple(sorted((p for p in points if p.fits), key=lambda p: p.micro_batch))
        return Fit(good) if good else None

    @property
    def largest(self) -> int:
        return self.points[-1].micro_batch

    def update_seconds(self) -> float:
        return min(p.update_seconds for p in self.points)

    def work_seconds(self, micro_batch: int, predicted: Callable[[int], float]) -> float:
        """Forward and backward of one micro-batch."""
        update = self.update_seconds()
        return self._corrected(micro_batch, predicted, lambda p: max(1e-9, p.step_seconds - update))

    def peak_bytes(self, micro_batch: int, predicted: Callable[[int], float]) -> float:
        return self._corrected(micro_batch, predicted, lambda p: float(p.peak_bytes))

    def _corrected(self, micro_batch: int, predicted: Callable[[int], float], measured: Callable[[Point], float]) -> float:
        """The prediction times the ratio seen at the points around (on a logarithmic scale of samples)."""
        ratios = [(p.micro_batch, measured(p) / max(1e-12, predicted(p.micro_batch))) for p in self.points]
        below = [r for r in ratios if r[0] <= micro_batch]
        above = [r for r in ratios if r[0] >= micro_batch]
        if not below or not above:
            return predicted(micro_batch) * (ratios[0][1] if not below else ratios[-1][1])
        (low, first), (high, last) = below[-1], above[0]
        part = 0.0 if low == high else math.log(micro_batch / low) / math.log(high / low)
        return predicted(micro_batch) * (first + part * (last - first))
