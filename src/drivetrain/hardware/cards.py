"""The table of cards (GPU models): memory, published rates and compute capability. Takes a name, returns a `Card`.

Plans use these facts, so a plan can also be made for a machine that is only described.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from drivetrain.hardware.hardware import UNKNOWN_CAPABILITY
from drivetrain.outcomes import Problem


@dataclass(frozen=True)
class Card:
    """A GPU model as its maker publishes it.

    `bf16`, `fp16`, `tf32`, `fp32`: TFLOP/s, dense (without sparsity), with fp32 accumulation; 0 if the card has no such units.
    `bandwidth`: GB/s of its memory. `nvlink`: GB/s of one GPU, both directions together.
    """

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
    """Streaming multiprocessors, which run at the same time."""
    source: str

    @property
    def memory_bytes(self) -> int:
        """The bytes that the driver reports: less than in the card's name, because units differ and some memory is reserved."""
        return int(self.memory_gb * (LISTED_SHARE_WITH_ECC if self.name in _CARDS_WITHOUT_ECC_MEMORY else LISTED_SHARE) * 2**30)

    def mig_slice(self, product: str, memory_bytes: int) -> Card:
        """Returns a slice of this card.

        "NVIDIA A100-SXM4-40GB MIG 1g.5gb" has one seventh of the processors, and equal shares of bandwidth and memory.
        """
        memory_share = memory_bytes / self.memory_bytes
        sevenths = re.search(r"MIG (\d)[cg]\b", product)
        share = int(sevenths[1]) / 7 if sevenths else memory_share
        rates = {rate: getattr(self, rate) * share for rate in ("bf16", "fp16", "tf32", "fp32")}
        return replace(
            self, memory_gb=self.memory_gb * memory_share, bandwidth=self.bandwidth * min(1.0, memory_share), nvlink=0.0,
            processors=max(1, round(self.processors * share)), **rates,
        )  # fmt: skip


_PASCAL, _VOLTA, _TURING, _AMPERE, _GA10X, _ADA, _HOPPER, _BLACKWELL = (6, 0), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0)
_GP10X, _GB20X = (6, 1), (12, 0)

CARDS = (
    Card("P100", 16, 732, 0, 21.2, 0, 10.6, 160, _PASCAL, 56, "Tesla P100 datasheet, SXM2"),
    Card("P100PCIe", 16, 732, 0, 18.7, 0, 9.3, 0, _PASCAL, 56, "Tesla P100 datasheet, PCIe"),
    Card("P100PCIe", 12, 549, 0, 18.7, 0, 9.3, 0, _PASCAL, 56, "Tesla P100 datasheet, PCIe"),
    Card("P40", 24, 346, 0, 0, 0, 12, 0, _GP10X, 30, "Tesla P40 datasheet"),
    Card("P4", 8, 192, 0, 0, 0, 5.5, 0, _GP10X, 20, "Tesla P4 datasheet"),
    Card("V100", 16, 900, 0, 125, 0, 15.7, 300, _VOLTA, 80, "V100 datasheet, SXM2"),
    Card("V100", 32, 900, 0, 125, 0, 15.7, 300, _VOLTA, 80, "V100 datasheet, SXM2"),
    Card("V100PCIe", 16, 900, 0, 112, 0, 14, 0, _VOLTA, 80, "V100 datasheet, PCIe"),
    Card("V100PCIe", 32, 900, 0, 112, 0, 14, 0, _VOLTA, 80, "V100 datasheet, PCIe"),
    Card("T4", 16, 320, 0, 65, 0, 8.1, 0, _TURING, 40, "T4 datasheet"),
    Card("A2", 16, 200, 18, 18, 9, 4.5, 0, _GA10X, 10, "A2 datasheet"),
    Card("A10", 24, 600, 125, 125, 62.5, 31.2, 0, _GA10X, 72, "A10 datasheet"),
    Card("A10G", 24, 600, 70, 70, 35, 31.5, 0, _GA10X, 80, "A10G datasheet"),
    Card("A16", 16, 200, 18, 18, 9, 4.5, 0, _GA10X, 10, "A16 datasheet, one of its four GPUs"),
    Card("A30", 24, 933, 165, 165, 82, 10.3, 200, _AMPERE, 56, "A30 datasheet"),
    Card("A40", 48, 696, 149.7, 149.7, 74.8, 37.4, 112.5, _GA10X, 84, "A40 datasheet"),
    Card("A100", 40, 1555, 312, 312, 156, 19.5, 600, _AMPERE, 108, "A100 datasheet, SXM4"),
    Card("A100", 80, 2039, 312, 312, 156, 19.5, 600, _AMPERE, 108, "A100 datasheet, SXM4"),
    Card("A100PCIe", 40, 1555, 312, 312, 156, 19.5, 0, _AMPERE, 108, "A100 datasheet, PCIe without a bridge"),
    Card("A100PCIe", 80, 1935, 312, 312, 156, 19.5, 0, _AMPERE, 108, "A100 datasheet, PCIe without a bridge"),
    Card("A800", 80, 2039, 312, 312, 156, 19.5, 400, _AMPERE, 108, "A800 datasheet, SXM4"),
    Card("L4", 24, 300, 121, 121, 60, 30.3, 0, _ADA, 58, "L4 datasheet"),
    Card("L20", 48, 864, 119.5, 119.5, 59.8, 59.8, 0, _ADA, 92, "L20 datasheet"),
    Card("L40", 48, 864, 181, 181, 90.5, 90.5, 0, _ADA, 142, "L40 datasheet"),
    Card("L40S", 48, 864, 362, 362, 183, 91.6, 0, _ADA, 142, "L40S datasheet"),
    Card("H100", 80, 3350, 989, 989, 494, 67, 900, _HOPPER, 132, "H100 datasheet, SXM5"),
    Card("H100NVL", 94, 3900, 835, 835, 417, 60, 600, _HOPPER, 132, "H100 datasheet, NVL"),
    Card("H100PCIe", 80, 2000, 756, 756, 378, 51, 600, _HOPPER, 114, "H100 datasheet, PCIe"),
    Card("H800", 80, 3350, 989, 989, 494, 67, 400, _HOPPER, 132, "H800 datasheet, SXM5"),
    Card("H20", 96, 4000, 148, 148, 74, 44, 900, _HOPPER, 78, "H20 datasheet"),
    Card("H200", 141, 4800, 989, 989, 494, 67, 900, _HOPPER, 132, "H200 datasheet, SXM"),
    Card("H200NVL", 141, 4800, 835, 835, 417, 60, 900, _HOPPER, 132, "H200 datasheet, NVL"),
    Card("GH200", 96, 4000, 989, 989, 494, 67, 900, _HOPPER, 132, "GH200 datasheet, HBM3"),
    Card("GH200", 144, 4900, 989, 989, 494, 67, 900, _HOPPER, 132, "GH200 datasheet, HBM3e"),
    Card("B200", 180, 7700, 2250, 2250, 1125, 75, 1800, _BLACKWELL, 148, "DGX B200 datasheet, a GPU's share"),
    Card("GB200", 186, 8000, 2500, 2500, 1250, 80, 1800, _BLACKWELL, 152, "GB200 NVL72 datasheet, a GPU's share"),
    Card("GTX1050", 2, 112, 0, 0, 0, 1.9, 0, _GP10X, 5, "GTX 1050 specifications"),
    Card("GTX1050Ti", 4, 112, 0, 0, 0, 2.1, 0, _GP10X, 6, "GTX 1050 Ti specifications"),
    Card("GTX1060", 3, 192, 0, 0, 0, 3.9, 0, _GP10X, 9, "GTX 1060 specifications"),
    Card("GTX1060", 6, 192, 0, 0, 0, 4.4, 0, _GP10X, 10, "GTX 1060 specifications"),
    Card("GTX1070", 8, 256, 0, 0, 0, 6.5, 0, _GP10X, 15, "GTX 1070 specifications"),
    Card("GTX1070Ti", 8, 256, 0, 0, 0, 8.2, 0, _GP10X, 19, "GTX 1070 Ti specifications"),
    Card("GTX1080", 8, 320, 0, 0, 0, 8.9, 0, _GP10X, 20, "GTX 1080 whitepaper"),
    Card("GTX1080Ti", 11, 484, 0, 0, 0, 11.3, 0, _GP10X, 28, "GTX 1080 Ti specifications"),
    Card("TITANXp", 12, 547, 0, 0, 0, 12.1, 0, _GP10X, 30, "TITAN Xp specifications"),
    Card("P5000", 16, 288, 0, 0, 0, 8.9, 0, _GP10X, 20, "Quadro P5000 datasheet"),
    Card("P6000", 24, 432, 0, 0, 0, 12, 0, _GP10X, 30, "Quadro P6000 datasheet"),
    Card("TITANV", 12, 653, 0, 110, 0, 13.8, 0, _VOLTA, 80, "TITAN V specifications"),
    Card("GV100", 32, 870, 0, 118.5, 0, 14.8, 200, _VOLTA, 80, "Quadro GV100 datasheet"),
    Card("GTX1650", 4, 128, 0, 6, 0, 3, 0, _TURING, 14, "GTX 1650 specifications"),
    Card("GTX1650SUPER", 4, 192, 0, 8.8, 0, 4.4, 0, _TURING, 20, "GTX 1650 SUPER specifications"),
    Card("GTX1660", 6, 192, 0, 10, 0, 5, 0, _TURING, 22, "GTX 1660 specifications"),
    Card("GTX1660SUPER", 6, 336, 0, 10, 0, 5, 0, _TURING, 22, "GTX 1660 SUPER specifications"),
    Card("GTX1660Ti", 6, 288, 0, 10.9, 0, 5.4, 0, _TURING, 24, "GTX 1660 Ti specifications"),
    Card("RTX2060", 6, 336, 0, 25.8, 0, 6.5, 0, _TURING, 30, "Turing whitepaper"),
    Card("RTX2060SUPER", 8, 448, 0, 28.7, 0, 7.2, 0, _TURING, 34, "Turing whitepaper's rates at its clock"),
    Card("RTX2070", 8, 448, 0, 29.9, 0, 7.5, 0, _TURING, 36, "Turing whitepaper"),
    Card("RTX2070SUPER", 8, 448, 0, 36.2, 0, 9.1, 50, _TURING, 40, "Turing whitepaper's rates at its clock"),
    Card("RTX2080", 8, 448, 0, 40.3, 0, 10.1, 50, _TURING, 46, "Turing whitepaper"),
    Card("RTX2080SUPER", 8, 496, 0, 44.6, 0, 11.2, 50, _TURING, 48, "Turing whitepaper's rates at its clock"),
    Card("RTX2080Ti", 11, 616, 0, 53.8, 0, 13.4, 100, _TURING, 68, "Turing whitepaper"),
    Card("TITANRTX", 24, 672, 0, 130.5, 0, 16.3, 100, _TURING, 72, "TITAN RTX specifications"),
    Card("RTX4000", 8, 416, 0, 57, 0, 7.1, 0, _TURING, 36, "Quadro RTX 4000 datasheet"),
    Card("RTX5000", 16, 448, 0, 89.2, 0, 11.2, 50, _TURING, 48, "Quadro RTX 5000 datasheet"),
    Card("RTX6000", 24, 672, 0, 130.5, 0, 16.3, 100, _TURING, 72, "Quadro RTX 6000 datasheet"),
    Card("RTX8000", 48, 672, 0, 130.5, 0, 16.3, 100, _TURING, 72, "Quadro RTX 8000 datasheet"),
    Card("RTX3050", 8, 224, 18.2, 18.2, 9.1, 9.1, 0, _GA10X, 20, "GA10x rates at its clock"),
    Card("RTX3060", 12, 360, 25.5, 25.5, 12.7, 12.7, 0, _GA10X, 28, "GA10x rates at its clock"),
    Card("RTX3060Ti", 8, 448, 32.4, 32.4, 16.2, 16.2, 0, _GA10X, 38, "GA10x rates at its clock"),
    Card("RTX3070", 8, 448, 40.6, 40.6, 20.3, 20.3, 0, _GA10X, 46, "GA102 whitepaper"),
    Card("RTX3070Ti", 8, 608, 43.5, 43.5, 21.7, 21.7, 0, _GA10X, 48, "GA10x rates at its clock"),
    Card("RTX3080", 10, 760, 59.5, 59.5, 29.8, 29.8, 0, _GA10X, 68, "GA102 whitepaper"),
    Card("RTX3080", 12, 912, 61.3, 61.3, 30.6, 30.6, 0, _GA10X, 70, "GA10x rates at its clock"),
    Card("RTX3080Ti", 12, 912, 68.2, 68.2, 34.1, 34.1, 0, _GA10X, 80, "GA10x rates at its clock"),
    Card("RTX3090", 24, 936, 71, 71, 35.6, 35.6, 112.5, _GA10X, 82, "GA102 whitepaper"),
    Card("RTX3090Ti", 24, 1008, 80, 80, 40, 40, 112.5, _GA10X, 84, "GA10x rates at its clock"),
    Card("RTXA2000", 6, 288, 31.9, 31.9, 16, 8, 0, _GA10X, 26, "RTX A2000 datasheet"),
    Card("RTXA2000", 12, 288, 31.9, 31.9, 16, 8, 0, _GA10X, 26, "RTX A2000 datasheet"),
    Card("RTXA4000", 16, 448, 76.7, 76.7, 38.3, 19.2, 0, _GA10X, 48, "RTX A4000 datasheet"),
    Card("RTXA4500", 20, 640, 94.6, 94.6, 47.3, 23.7, 112.5, _GA10X, 56, "RTX A4500 datasheet"),
    Card("RTXA5000", 24, 768, 111.1, 111.1, 55.6, 27.8, 112.5, _GA10X, 64, "RTX A5000 datasheet"),
    Card("RTXA5500", 24, 768, 136.4, 136.4, 68.2, 34.1, 112.5, _GA10X, 80, "RTX A5500 datasheet"),
    Card("RTXA6000", 48, 768, 154.8, 154.8, 77.4, 38.7, 112.5, _GA10X, 84, "RTX A6000 datasheet"),
    Card("RTX4060", 8, 272, 30.2, 30.2, 15.1, 15.1, 0, _ADA, 24, "Ada rates at its clock"),
    Card("RTX4060Ti", 8, 288, 44.1, 44.1, 22.1, 22.1, 0, _ADA, 34, "Ada rates at its clock"),
    Card("RTX4060Ti", 16, 288, 44.1, 44.1, 22.1, 22.1, 0, _ADA, 34, "Ada rates at its clock"),
    Card("RTX4070", 12, 504, 58.3, 58.3, 29.1, 29.1, 0, _ADA, 46, "Ada rates at its clock"),
    Card("RTX4070SUPER", 12, 504, 71, 71, 35.5, 35.5, 0, _ADA, 56, "Ada rates at its clock"),
    Card("RTX4070Ti", 12, 504, 80.2, 80.2, 40.1, 40.1, 0, _ADA, 60, "Ada rates at its clock"),
    Card("RTX4070TiSUPER", 16, 672, 88.2, 88.2, 44.1, 44.1, 0, _ADA, 66, "Ada rates at its clock"),
    Card("RTX4080", 16, 717, 97.5, 97.5, 48.7, 48.7, 0, _ADA, 76, "Ada whitepaper"),
    Card("RTX4080SUPER", 16, 736, 104.4, 104.4, 52.2, 52.2, 0, _ADA, 80, "Ada rates at its clock"),
    Card("RTX4090", 24, 1008, 165.2, 165.2, 82.6, 82.6, 0, _ADA, 128, "Ada whitepaper"),
    Card("RTX2000Ada", 16, 224, 48, 48, 24, 12, 0, _ADA, 22, "RTX 2000 Ada datasheet"),
    Card("RTX4000Ada", 20, 360, 106.8, 106.8, 53.4, 26.7, 0, _ADA, 48, "RTX 4000 Ada datasheet"),
    Card("RTX4500Ada", 24, 432, 158.5, 158.5, 79.2, 39.6, 0, _ADA, 60, "RTX 4500 Ada datasheet"),
    Card("RTX5000Ada", 32, 576, 261.1, 261.1, 130.6, 65.3, 0, _ADA, 100, "RTX 5000 Ada datasheet"),
    Card("RTX6000Ada", 48, 960, 364.2, 364.2, 182.1, 91.1, 0, _ADA, 142, "RTX 6000 Ada datasheet"),
    Card("RTX5060", 8, 448, 38.4, 38.4, 19.2, 19.2, 0, _GB20X, 30, "RTX Blackwell rates at its clock"),
    Card("RTX5060Ti", 8, 448, 47.4, 47.4, 23.7, 23.7, 0, _GB20X, 36, "RTX Blackwell rates at its clock"),
    Card("RTX5060Ti", 16, 448, 47.4, 47.4, 23.7, 23.7, 0, _GB20X, 36, "RTX Blackwell rates at its clock"),
    Card("RTX5070", 12, 672, 61.7, 61.7, 30.9, 30.9, 0, _GB20X, 48, "RTX Blackwell whitepaper"),
    Card("RTX5070Ti", 16, 896, 87.9, 87.9, 43.9, 43.9, 0, _GB20X, 70, "RTX Blackwell whitepaper"),
    Card("RTX5080", 16, 960, 112.6, 112.6, 56.3, 56.3, 0, _GB20X, 84, "RTX Blackwell whitepaper"),
    Card("RTX5090", 32, 1792, 209.5, 209.5, 104.8, 104.8, 0, _GB20X, 170, "RTX Blackwell whitepaper"),
    Card("RTXPRO6000", 96, 1792, 503.8, 503.8, 251.9, 126, 0, _GB20X, 188, "RTX PRO 6000 Blackwell Workstation datasheet"),
    # As ROCm lists them: gfx908, gfx90a and gfx942. A board of MI250s is two GPUs to it.
    Card("MI100", 32, 1229, 92.3, 184.6, 0, 23.1, 0, (9, 0), 120, "MI100 datasheet"),
    Card("MI210", 64, 1638, 181, 181, 0, 22.6, 0, (9, 0), 104, "MI210 datasheet"),
    Card("MI250", 64, 1638, 181, 181, 0, 22.6, 0, (9, 0), 104, "MI250 datasheet, one of its two GPUs"),
    Card("MI250X", 64, 1638, 191.5, 191.5, 0, 23.9, 0, (9, 0), 110, "MI250X datasheet, one of its two GPUs"),
    Card("MI300X", 192, 5300, 1307, 1307, 653.7, 163.4, 896, (9, 4), 304, "MI300X datasheet"),
    Card("MI325X", 256, 6000, 1307, 1307, 653.7, 163.4, 896, (9, 4), 304, "MI325X datasheet"),
)  # fmt: skip

LISTED_SHARE = 0.96  # the share of the GB in a card's name that the driver reports
LISTED_SHARE_WITH_ECC = 0.92  # the same for cards whose error correction takes 1/16 of the memory; the smallest share of all cards
_CARDS_WITHOUT_ECC_MEMORY = ("T4", "A2", "A10", "A10G", "A16", "A40", "L4", "L20", "L40", "L40S")
_FAMILIES = (  # (how a plain name begins, compute capability); the first match counts
    (r"(RTX)?PRO\d{4}", _GB20X),
    (r"RTX\d{4}(SFF)?ADA", _ADA),
    (r"RTX50[5-9]0", _GB20X),
    (r"RTX40[5-9]0|L(2|4|20|40)(?!\d)", _ADA),
    (r"RTX30[5-9]0|RTX2050|RTXA\d{3,4}|A(2|10|16|40)(?!\d)", _GA10X),
    (r"RTX20[6-8]0|RTX[34568]000|TITANRTX|GTX16\d0|T(4|400|500|550|600|1000|1200|2000)(?!\d)", _TURING),
    (r"V100|TITANV|GV100", _VOLTA),
    (r"(GT|GTX)10\d0|TITANX|P(4|6|40)(?!\d)|P\d{3,4}(?<!P100)", _GP10X),
    (r"G?P100", _PASCAL),
    (r"A(30|100|800)(?!\d)", _AMPERE),
    (r"G?H(20|100|200|800)(?!\d)", _HOPPER),
    (r"G?B[12]00", _BLACKWELL),
    (r"G?B300", (10, 3)),
    (r"GTX9\d0|M(4|6|40|60)(?!\d)", (5, 2)),
    (r"(JETSON)?(AGX)?ORIN", (8, 7)),
    (r"(JETSON)?(AGX)?XAVIER", (7, 2)),
)
_IGNORED_WORDS = {  # of product names: they do not change the rates
    "", "NVIDIA", "TESLA", "GEFORCE", "QUADRO", "AMD", "INSTINCT", "RADEON", "SXM", "SXM2", "SXM3", "SXM4", "SXM5", "SXM6", "OAM",
    "HBM2", "HBM2E", "HBM3", "HBM3E", "GPU", "GENERATION", "BLACKWELL", "WORKSTATION", "EDITION", "SERVER", "FOUNDERS", "TENSOR", "CORE",
}  # fmt: skip
_WORDS_OF_SLOWER_VARIANTS = {"LAPTOP", "MOBILE", "MAX", "MAXQ", "SFF"}  # they share a name, but have lower rates
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*G(?:I?B)?", re.I)


def find_card(name: str, memory_gb: float | None) -> Card | None:
    """Returns the card with this name and memory (without a memory, the largest one); None if the table has none."""
    cards = _cards_named(name)
    if memory_gb is None:
        return max(cards, key=lambda c: c.memory_gb, default=None)
    return next((c for c in (*cards, *_cards_named(f"{name} Ada")) if abs(c.memory_gb - memory_gb) <= 0.06 * memory_gb), None)


def resized_card(name: str, memory_gb: float) -> Card | None:
    """Returns a card of the table with a memory size that the table does not list for it."""
    nearest = min(_cards_named(name), key=lambda c: abs(c.memory_gb - memory_gb), default=None)
    if nearest is None:
        return None
    return replace(nearest, memory_gb=memory_gb, source=f"the table's {nearest.name} has {nearest.memory_gb:g} GB; its rates are taken")


def card_of_product(product: str, memory_bytes: int) -> Card | None:
    """Returns the card of a driver's product name, such as "NVIDIA A100-SXM4-40GB"."""
    words = _words(product)
    if _WORDS_OF_SLOWER_VARIANTS & set(words):
        return None
    joined = {"".join(words[a:b]) for a in range(len(words)) for b in range(a + 1, len(words) + 1)}
    cards = [c for c in CARDS if _plain(c.name) in joined]
    longest = max((len(c.name) for c in cards), default=0)
    return min((c for c in cards if len(c.name) == longest), key=lambda c: abs(c.memory_bytes - memory_bytes), default=None)


def capability_of(name: str) -> tuple[int, int]:
    """Returns the compute capability that a card's name implies: (7, 5) for "RTX 2070 Laptop"."""
    plain = _plain(name)
    spellings = (plain, f"RTX{plain}", f"GTX{plain}")
    return next(
        (capability for spelling in spellings for family, capability in _FAMILIES if re.match(family, spelling)), UNKNOWN_CAPABILITY
    )


def generic_card(name: str, memory_gb: float, capability: tuple[int, int] | None = None) -> Card:
    """Returns a card that is not in the table, with low rates for its generation."""
    capability = capability_of(name) if capability is None else capability
    if UNKNOWN_CAPABILITY < capability < _VOLTA:
        bandwidth, half, tf32, fp32 = 200, 0, 0, 4
    elif capability < _AMPERE:
        bandwidth, half, tf32, fp32 = 300, 30, 0, 7
    else:
        bandwidth, half, tf32, fp32 = 300, 60, 30, 15
    why = "not in the table: cautious rates" + (", compute capability unknown" if capability == UNKNOWN_CAPABILITY else "")
    bf16 = half if capability >= _AMPERE else 0
    return Card(name or f"{memory_gb:g} GB GPU", memory_gb, bandwidth, bf16, half, tf32, fp32, 0, capability, 60, why)


def unknown_card(name: str) -> Problem:
    """Returns the error for a name without a memory size that is not in the table."""
    names = sorted({c.name for c in CARDS})
    near = difflib.get_close_matches(_plain(name), [_plain(n) for n in names], 3, 0.4)
    listed = [n for n in names if _plain(n) in near] or ["T4", "L4", "RTX4090", "A100", "H100"]
    return Problem(
        f"there is no GPU {name!r} in the table ({'nearest' if near else 'it has such as'}: {', '.join(listed)});"
        f" give its memory to plan with cautious rates: {name}-24GB"
    )


def split_memory(text: str) -> tuple[str, float | None]:
    """Splits "A100-SXM4-80GB" into the card's name and its memory in GB."""
    parts = [p for p in re.split(r"[\s-]+", text) if p]
    sizes = [float(m[1]) for p in parts if (m := _MEMORY.fullmatch(p))]
    return " ".join(p for p in parts if not _MEMORY.fullmatch(p)), sizes[-1] if sizes else None


def _cards_named(name: str) -> list[Card]:
    """Returns the cards with a name; RTX or GTX may be missing ("A6000", "3090", "1080 Ti").

    A variant that the table does not list (PCIe) counts as the card itself.
    """
    plain = _plain(name)
    for spelling in (plain, f"RTX{plain}", f"GTX{plain}", plain.removesuffix("PCIE")):
        if cards := [c for c in CARDS if _plain(c.name) == spelling]:
            return cards
    return []


def _plain(name: str) -> str:
    return "".join(_words(name))


def _words(name: str) -> list[str]:
    """Returns the words of a product name that say which card it is."""
    words = re.split(r"[\s_()-]+", name.upper())
    return [w for w in words if w not in _IGNORED_WORDS and not _MEMORY.fullmatch(w)]
