"""What a task asks of any machine: its parameters, and how memory and work grow with the micro-batch.

Made by `engine.trace` without a GPU; everything here is arithmetic, so that a plan for any machine follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

FORMAT = 6
REAL_LIMIT = 200_000_000  # parameters of a model that is run with values where shapes do not suffice
PROCESSORS, THREADS = 132, 2048  # of a GPU, and threads on each, that sums are divided over


class Work(NamedTuple):
    """Like operations of one micro-batch; each figure at 0 samples and its growth with every sample."""

    times: int
    kind: str
    """What its speed goes by: gemm, conv, grouped, attention, ... (predict.py has a rule for each)."""
    dtype: str
    flops: tuple[float, float]
    bytes: tuple[float, float]
    tiles: tuple[float, float]
    """Pieces of the output that a GPU can work on at once."""
    depth: tuple[float, float]
    """Terms of each sum: further pieces, where there are too few of the output."""


class Line(NamedTuple):
    """Bytes that are needed at one moment of a micro-batch."""

    fixed: float
    per_sample: float
    width: int = 0
    """Where it is a sum over many rows: columns,"""
    rows: float = 0.0
    """and rows a sample."""

    def at(self, samples: float) -> float:
        return self.fixed + self.per_sample * samples + staging(self.width, self.rows * samples)


def staging(width: int, rows: float) -> float:
    """Bytes that torch takes on a GPU for a moment to sum many rows (a bias's gradient): each part of a sum has a place for
    every column of its block, and a long sum is cut into as many parts as keep the GPU busy."""
    if not width:
        return 0.0
    together = math.gcd(4, width)
    threads = 512 // together
    across = min(32, 2 ** int(math.log2(max(1, width // together))))
    each, blocks, most = rows * across / threads, math.ceil(width / together / across), PROCESSORS * THREADS // threads
    if each < 256 or blocks > most:
        return 0.0
    parts = max(min(math.ceil(most / blocks), math.ceil(each / 16)), math.ceil(each / 256))
    return 4.0 * width * across * together * parts if parts > 1 else 0.0


@dataclass(frozen=True)
class Pass:
    """Forward and backward of one micro-batch."""

    with_gradients: tuple[Line, ...]
    """Activations and the gradients made so far, at the moments that can be the highest."""
    activations: tuple[Line, ...]
    """Activations alone."""
    weight_copies: float
    """Of the activations: half-precision copies of weights, which sharded parameters do not need beside them."""
    multiplies: bool
    """Whether there are matrix products for which a library keeps room of its own."""
    work: tuple[Work, ...]

    def peak(self, samples: float, gradients: bool) -> float:
        return max((line.at(samples) for line in (self.with_gradients if gradients else self.activations)), default=0.0)


@dataclass(frozen=True)
class Profile:
    parameters: int
    """0 where not even the model is known."""
    parameter_bytes: int
    trained_bytes: int
    trained: int
    largest_bytes: int
    """The largest trained parameter."""
    optimizer_bytes: int
    buffer_bytes: int
    blocks: int
    """Repeated blocks, and the bytes of the largest; 0 where the model is not made of such."""
    block_bytes: int
    samples: int
    sample_bytes: int
    data_bytes: int
    """Of a data set that can live on the device; 0 where a loader reads it."""
    precision: str
    traced: str
    """How: "fake", on tensors without values, or "real"; else why there is no pass."""
    plain: Pass | None = None
    checkpointed: Pass | None = None
    evaluated: tuple[Line, ...] = ()
    """Bytes of a forward pass without gradients."""
    batchnorm: bool = False
    conv2d: bool = True
    notes: list[str] = field(default_factory=list)
    format: int = FORMAT

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of_sizes(sizes: Mapping[str, Any], traced: str) -> Profile:
        """A profile without passes, of a task of which only sizes are known, or nothing at all."""
        return Profile(**(_NO_SIZES | dict(sizes)), traced=traced)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Profile:
        known = {f.name for f in fields(Profile)}
        kept = {k: v for k, v in values.items() if k in known}
        for name in ("plain", "checkpointed"):
            if kept.get(name):
                kept[name] = _pass(kept[name])
        kept["evaluated"] = tuple(Line(*line) for line in kept.get("evaluated", ()))
        return Profile(**kept)


_NO_SIZES: dict[str, Any] = {
    "parameters": 0, "parameter_bytes": 0, "trained_bytes": 0, "trained": 0, "largest_bytes": 0, "optimizer_bytes": 0, "buffer_bytes": 0,
    "blocks": 0, "block_bytes": 0, "samples": 0, "sample_bytes": 0, "data_bytes": 0, "precision": "fp32",
}  # fmt: skip


def _pass(values: Mapping[str, Any]) -> Pass:
    lines = {name: tuple(Line(*line) for line in values[name]) for name in ("with_gradients", "activations")}
    work = tuple(Work(w[0], w[1], w[2], *(tuple(pair) for pair in w[3:])) for w in values["work"])
    return Pass(lines["with_gradients"], lines["activations"], values["weight_copies"], values["multiplies"], work)
