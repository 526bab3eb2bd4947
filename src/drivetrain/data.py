"""The data that a task may return: `Tensors`, or a `Source` for on-policy learning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from drivetrain.outcomes import Problem

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor, nn


class Rand(Protocol):
    """Random numbers keyed by (seed, epoch, sample index): the same for any rank, loader worker and micro-batch."""

    def uniform(self, k: int = 1) -> Tensor:
        """[samples, k] numbers in [0, 1)."""
        ...

    def normal(self, k: int = 1) -> Tensor:
        """[samples, k] numbers from the standard normal distribution."""
        ...

    def __len__(self) -> int:
        """The number of samples (for a `Source`: of this rank's groups)."""
        ...

    @property
    def ids(self) -> Tensor:
        """The samples' indices in the data set (for a `Source`: this rank's groups), on the device."""
        ...


class Tensors:
    """A data set held as tensors or arrays: batches of `Tensors(x, y)` are tuples, those of `Tensors(image=x, label=y)` dicts."""

    def __init__(self, *columns: Any, **named: Any) -> None:
        if bool(columns) == bool(named):
            raise Problem("Tensors takes columns by position or by name: Tensors(x, y) or Tensors(image=x, label=y)")
        self.names: tuple[str, ...] | None = tuple(named) or None
        self.columns: list[Any] = list(columns or named.values())
        lengths = {len(c) for c in self.columns}
        if len(lengths) != 1:
            raise Problem(f"the columns of Tensors have different lengths: {[len(c) for c in self.columns]}")

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: Any) -> Any:
        """Returns the samples at an index, a slice or a tensor of indices, as a batch."""
        return self.batch([column[index] for column in self.columns])

    def batch(self, columns: Sequence[Any]) -> Any:
        """Returns a batch of these columns: a dict, a tuple, or the only column itself."""
        if self.names is not None:
            return dict(zip(self.names, columns, strict=True))
        return tuple(columns) if len(columns) > 1 else columns[0]


class Source:
    """Data that the model itself makes, for on-policy learning.

    An epoch has `len(source)` samples, from `groups` equal groups (environments). At the start of each epoch the engine calls
    `collect` and then goes `passes` times over the collected samples. The samples of a group are consecutive: sample `t` of
    group `g` is row `g * (len / groups) + t` of this rank's rows.
    """

    groups: int = 1
    """Equal groups of samples, over all ranks: environments, for example."""
    passes: int = 1
    """Passes over the collected samples in an epoch."""
    pure: bool = False
    """Whether `collect` depends on the model, `rand` and `state` alone and only computes with tensors: a GPU then replays it as one
    CUDA graph. Its `state` is empty before the first collection."""
    limits: Mapping[str, float] = MappingProxyType({})
    """Metric of the loss -> limit. A step whose mean of that metric is above the limit changes nothing, nor does any later step of the epoch."""
    group_bytes: int = 0
    """The least memory that a group takes in a collection; 0 where it is not known before."""

    @property
    def speeds(self) -> dict[str, float]:
        """Further speeds to log: NAME -> how many of it one sample stands for. `NAME_per_second` is that many times
        `samples_per_second`."""
        return {}

    def __len__(self) -> int:
        raise NotImplementedError

    def collect(self, model: nn.Module, rand: Rand, total: Callable[[Tensor], Tensor]) -> Tensors:
        """Returns the samples of this rank's groups, whose numbers are `rand.ids`; `total` sums a tensor over the ranks."""
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """Returns all that the next `collect` needs, as tensors whose rows are this rank's groups."""
        return {}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restores what `state` returned, with the rows of this rank's groups."""

    def fault(self) -> str:
        """Returns why the collected samples are not all finite, where that is known. Called when a loss is not a number."""
        return ""

    def stepper(self, model: nn.Module, context: StepperContext) -> EpochStepper | None:
        """Returns code that takes whole epochs by itself, if the family has any. If it has none, it may pass the reason to `context.notice`."""
        return None


@dataclass(frozen=True)
class StepperContext:
    """What the engine hands to an `EpochStepper`."""

    device: torch.device
    optimizer: torch.optim.Optimizer
    learning_rates: Tensor
    """The learning rate of each step of the run."""
    metric_ring: Tensor
    """Where a step writes its metrics: in row (step number modulo the number of rows), the gradient norm in column 0."""
    first_metric: int
    """The column of the first metric: sums as `loss` gives them, then their counts."""
    random_keys: Callable[[int], list[int]]
    """The keys of an epoch's random numbers: of the first `rand.uniform` of its collection, then of the order in each pass."""
    record: Callable[[Callable[[], object]], Callable[[], None]]
    """Captures device work as a CUDA graph and returns the function that replays it."""
    host_waits: Callable[[], AbstractContextManager[list[str]]]
    """Lists the code lines inside the `with` block where the host waits for the device, which a CUDA graph cannot do."""
    notice: Callable[[str], None]
    """Tells the user a sentence."""


class EpochStepper(Protocol):
    """Takes all optimizer steps of an epoch of a `Source` on one GPU, with the same results as the engine's own steps."""

    collects: bool
    """Whether it also collects the epoch's samples."""

    def __call__(self, epoch: int, first_step: int, samples: Any) -> None:
        """Takes the steps of an epoch on its samples (None where it collects them itself)."""
        ...
