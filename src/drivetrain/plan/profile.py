"""The profile of a task: its parameters, and how memory and work grow with the micro-batch. Independent of any machine.

`engine.measure` creates it without a GPU; `predict_memory` and `predict_time` use it to predict for any machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

PROFILE_FORMAT = 6
MAX_PARAMETERS_WITH_VALUES = 200_000_000  # of a model that runs on real tensors because it does not run on fake ones
GPU_PROCESSORS, THREADS_PER_PROCESSOR = 132, 2048  # torch divides a sum over them


class Work(NamedTuple):
    """Operations of one kind in one micro-batch. Each pair is (value at 0 samples, increase with every sample)."""

    num_calls: int
    kind: str
    """What its speed depends on: gemm, conv, grouped, attention, ... (predict_time.py has a rule for each)."""
    dtype: str
    flops: tuple[float, float]
    bytes: tuple[float, float]
    tiles: tuple[float, float]
    """Pieces of the output, which a GPU computes in parallel."""
    depth: tuple[float, float]
    """Terms of each sum. Long sums are divided too where the output has too few pieces."""


class Line(NamedTuple):
    """Bytes that are allocated at one point of a micro-batch, as a linear function of its samples."""

    fixed: float
    per_sample: float
    width: int = 0
    """The columns of a sum over many rows that runs at this point; 0: none."""
    rows: float = 0.0
    """The rows of that sum per sample."""

    def at(self, samples: float) -> float:
        return self.fixed + self.per_sample * samples + reduction_buffer_bytes(self.width, self.rows * samples)


def reduction_buffer_bytes(width: int, rows: float) -> float:
    """Returns the bytes that torch allocates on a GPU while it sums many rows (a bias's gradient).

    A long sum is cut into as many parts as keep the GPU busy, and each part has a buffer for every column of its block.
    """
    if not width:
        return 0.0
    vector = math.gcd(4, width)
    threads = 512 // vector
    threads_across = min(32, 2 ** int(math.log2(max(1, width // vector))))
    rows_per_thread = rows * threads_across / threads
    blocks = math.ceil(width / vector / threads_across)
    max_blocks = GPU_PROCESSORS * THREADS_PER_PROCESSOR // threads
    if rows_per_thread < 256 or blocks > max_blocks:
        return 0.0
    parts = max(min(math.ceil(max_blocks / blocks), math.ceil(rows_per_thread / 16)), math.ceil(rows_per_thread / 256))
    return 4.0 * width * threads_across * vector * parts if parts > 1 else 0.0


@dataclass(frozen=True)
class Pass:
    """Forward and backward of one micro-batch."""

    with_gradients: tuple[Line, ...]
    """Activations and the gradients that exist so far, at each point that can be the peak."""
    activations: tuple[Line, ...]
    """Activations alone."""
    weight_copies: float
    """Bytes of the activations that are half-precision copies of weights. Sharded parameters need none."""
    multiplies: bool
    """Whether there are matrix products, for which a library allocates a workspace."""
    work: tuple[Work, ...]

    def peak(self, samples: float, gradients: bool) -> float:
        return max((line.at(samples) for line in (self.with_gradients if gradients else self.activations)), default=0.0)


@dataclass(frozen=True)
class Profile:
    parameters: int
    """0 if even the model is unknown."""
    parameter_bytes: int
    trained_bytes: int
    trained: int
    """The number of trained parameters."""
    largest_bytes: int
    """Of the largest trained parameter."""
    optimizer_bytes: int
    buffer_bytes: int
    blocks: int
    """The number of repeated blocks; 0 if the model has none."""
    block_bytes: int
    """Of the largest block."""
    samples: int
    sample_bytes: int
    data_bytes: int
    """Of a data set that can be stored on the device; 0 if a dataloader reads it."""
    precision: str
    traced: str
    """How the passes were traced: "fake" (tensors without values) or "real". Without passes: the reason."""
    plain: Pass | None = None
    checkpointed: Pass | None = None
    """The pass with activation checkpointing."""
    evaluated: tuple[Line, ...] = ()
    """Bytes of a forward pass without gradients."""
    batchnorm: bool = False
    conv2d: bool = True
    notes: list[str] = field(default_factory=list)
    format: int = PROFILE_FORMAT

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of_sizes(sizes: Mapping[str, Any], traced: str) -> Profile:
        """Returns a profile without passes, for a task with only some known sizes, or none."""
        return Profile(**(_NO_SIZES | dict(sizes)), traced=traced)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Profile:
        names = {f.name for f in fields(Profile)}
        arguments = {k: v for k, v in values.items() if k in names}
        for name in ("plain", "checkpointed"):
            if arguments.get(name):
                arguments[name] = _pass_from_json(arguments[name])
        arguments["evaluated"] = tuple(Line(*line) for line in arguments.get("evaluated", ()))
        return Profile(**arguments)


_NO_SIZES: dict[str, Any] = {
    "parameters": 0, "parameter_bytes": 0, "trained_bytes": 0, "trained": 0, "largest_bytes": 0, "optimizer_bytes": 0, "buffer_bytes": 0,
    "blocks": 0, "block_bytes": 0, "samples": 0, "sample_bytes": 0, "data_bytes": 0, "precision": "fp32",
}  # fmt: skip


def _pass_from_json(values: Mapping[str, Any]) -> Pass:
    lines = {name: tuple(Line(*line) for line in values[name]) for name in ("with_gradients", "activations")}
    work = tuple(Work(w[0], w[1], w[2], *(tuple(pair) for pair in w[3:])) for w in values["work"])
    return Pass(lines["with_gradients"], lines["activations"], values["weight_copies"], values["multiplies"], work)
