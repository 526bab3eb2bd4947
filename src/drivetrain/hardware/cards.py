"""Facts about GPUs, as their makers publish them: what a plan for a machine that is not here is made from.

Rates are dense (without sparsity) in TFLOP/s with fp32 accumulation, bandwidth in GB/s, NVLink in GB/s of one GPU, both
directions together. A rate of 0: the card has no such units.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from itertools import pairwise

from drivetrain.outcomes import Problem


@dataclass(frozen=True)
class Card:
    name: str
    memory_gb: float
    bandwidth: float
    bf16: float
    fp16: float
    tf32: float
    fp32: float
    nvlink: float
    compute_capability: tuple[int, int]
    processors: int
    """Streaming multiprocessors: how much can be worked on at once."""
    source: str

    @property
    def memory_bytes(self) -> int:
        """What the driver lists: makers count in 1,000s or 1,024s, and some is kept back; a little under the name's figure."""
        return int(self.memory_gb * 0.96 * 2**30)

    def slice(self, product: str, memory_bytes: int) -> Card:
        """A part of it: "NVIDIA A100-SXM4-40GB MIG 1g.5gb" has one of seven parts of its processors, and the memory's share of its bandwidth."""
        memory = memory_bytes / self.memory_bytes
        of_seven = re.search(r"MIG (\d)[cg]\b", product)
        share = int(of_seven[1]) / 7 if of_seven else memory
        rates = {rate: getattr(self, rate) * share for rate in ("bf16", "fp16", "tf32", "fp32")}
        return replace(
            self, memory_gb=self.memory_gb * memory, bandwidth=self.bandwidth * min(1.0, memory), nvlink=0.0,
            processors=max(1, round(self.processors * share)), **rates,
        )  # fmt: skip


_PASCAL, _VOLTA, _TURING, _AMPERE, _GA10X, _ADA, _HOPPER, _BLACKWELL = (6, 0), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0)

CARDS = (
    Card("P100", 16, 732, 0, 21.2, 0, 10.6, 160, _PASCAL, 56, "Tesla P100 datasheet, SXM2"),
    Card("V100", 16, 900, 0, 125, 0, 15.7, 300, _VOLTA, 80, "V100 datasheet, SXM2"),
    Card("V100", 32, 900, 0, 125, 0, 15.7, 300, _VOLTA, 80, "V100 datasheet, SXM2"),
    Card("T4", 16, 320, 0, 65, 0, 8.1, 0, _TURING, 40, "T4 datasheet"),
    Card("A10", 24, 600, 125, 125, 62.5, 31.2, 0, _GA10X, 72, "A10 datasheet"),
    Card("A10G", 24, 600, 70, 70, 35, 31.5, 0, _GA10X, 80, "A10G datasheet"),
    Card("A40", 48, 696, 149.7, 149.7, 74.8, 37.4, 112.5, _GA10X, 84, "A40 datasheet"),
    Card("A100", 40, 1555, 312, 312, 156, 19.5, 600, _AMPERE, 108, "A100 datasheet, SXM4"),
    Card("A100", 80, 2039, 312, 312, 156, 19.5, 600, _AMPERE, 108, "A100 datasheet, SXM4"),
    Card("L4", 24, 300, 121, 121, 60, 30.3, 0, _ADA, 58, "L4 datasheet"),
    Card("L40", 48, 864, 181, 181, 90.5, 90.5, 0, _ADA, 142, "L40 datasheet"),
    Card("L40S", 48, 864, 362, 362, 183, 91.6, 0, _ADA, 142, "L40S datasheet"),
    Card("RTX3090", 24, 936, 71, 71, 35.6, 35.6, 112.5, _GA10X, 82, "GA102 whitepaper"),
    Card("RTX4090", 24, 1008, 165.2, 165.2, 82.6, 82.6, 0, _ADA, 128, "Ada whitepaper"),
    Card("RTXA6000", 48, 768, 154.8, 154.8, 77.4, 38.7, 112.5, _GA10X, 84, "RTX A6000 datasheet"),
    Card("RTX5090", 32, 1792, 209.5, 209.5, 104.8, 104.8, 0, (12, 0), 170, "RTX Blackwell whitepaper"),
    Card("H100", 80, 3350, 989, 989, 494, 67, 900, _HOPPER, 132, "H100 datasheet, SXM5"),
    Card("H100NVL", 94, 3900, 835, 835, 417, 60, 600, _HOPPER, 132, "H100 datasheet, NVL"),
    Card("H100PCIe", 80, 2000, 756, 756, 378, 51, 600, _HOPPER, 114, "H100 datasheet, PCIe"),
    Card("H200", 141, 4800, 989, 989, 494, 67, 900, _HOPPER, 132, "H200 datasheet, SXM"),
    Card("B200", 180, 7700, 2250, 2250, 1125, 75, 1800, _BLACKWELL, 148, "DGX B200 datasheet, a GPU's share"),
)  # fmt: skip


def find(name: str, memory_gb: float | None) -> Card | None:
    """The card of this name (with this memory, where a name has several); None where the table has none such."""
    wanted = _plain(name)
    same = [c for c in CARDS if _plain(c.name) == wanted]
    if memory_gb is None:
        return max(same, key=lambda c: c.memory_gb, default=None)
    return next((c for c in same if abs(c.memory_gb - memory_gb) <= 0.06 * memory_gb), None)


def other_size(name: str, memory_gb: float) -> Card | None:
    """A card of the table with another memory than the table knows of it."""
    same = [c for c in CARDS if _plain(c.name) == _plain(name)]
    nearest = min(same, key=lambda c: abs(c.memory_gb - memory_gb), default=None)
    known = nearest and f"the table's {nearest.name} has {nearest.memory_gb:g} GB; its rates are taken"
    return nearest and replace(nearest, memory_gb=memory_gb, source=known or "")


def of_product(product: str, memory_bytes: int) -> Card | None:
    """The card that a driver's product name means: "NVIDIA A100-SXM4-40GB"."""
    words = [_plain(w) for w in re.split(r"[\s-]+", product)]
    said = {*words, *(a + b for a, b in pairwise(words))}
    named = [c for c in CARDS if _plain(c.name) in said]
    longest = max((len(c.name) for c in named), default=0)
    return min((c for c in named if len(c.name) == longest), key=lambda c: abs(c.memory_bytes - memory_bytes), default=None)


def generic(name: str, memory_gb: float) -> Card:
    """A card that is not in the table: cautious rates of its generation's middle."""
    return Card(name or f"{memory_gb:g} GB GPU", memory_gb, 300, 60, 60, 30, 15, 0, _GA10X, 60, "not in the table: cautious rates")


def unknown(name: str) -> Problem:
    names = sorted({c.name for c in CARDS})
    near = difflib.get_close_matches(_plain(name), [_plain(n) for n in names], 3, 0.4)
    listed = [n for n in names if _plain(n) in near] or names
    return Problem(
        f"there is no GPU {name!r} in the table (nearest: {', '.join(listed)}); give its memory to plan with cautious rates: {name}-24GB"
    )


def _plain(name: str) -> str:
    return name.upper().replace("NVIDIA", "").replace("TESLA", "").replace("GEFORCE", "").replace(" ", "").replace("_", "")
