"""What a task may return: `Tensors`, a `Source` for on-policy learning, and a `Picture` after an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from drivetrain.outcomes import Problem

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch
    from torch import Tensor, nn


class Rand(Protocol):
    """Random numbers keyed by (seed, epoch, sample index): the same for any rank, loader worker and micro-batch."""

    def uniform(self, k: int = 1) -> Tensor:
        """Returns [samples, k] numbers in [0, 1)."""
        ...

    def normal(self, k: int = 1) -> Tensor:
        """Returns [samples, k] numbers from the standard normal distribution."""
        ...

    def __len__(self) -> int:
        """Returns the number of samples (for a `Source`: of this rank's groups)."""
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


@dataclass(frozen=True)
class Picture:
    """A picture that `remarks` may return after an evaluation: a PNG file in the run's `media/`, and an image in TensorBoard."""

    name: str
    """The beginning of the file's name: letters, digits, - and _."""
    image: Any
    """A uint8 tensor or array of shape [height, width, 3] (RGB) or [height, width] (grey)."""
    page: str = ""
    """An HTML page that shows the same, written beside the PNG file; empty: none."""


class Source:
    """Training data that the model itself produces, for on-policy learning.

    An epoch has `len(source)` samples, from `groups` groups (environments) of equal size. At the start of each epoch the engine
    calls `collect`; then it trains `passes` times on the collected samples. The samples of a group are consecutive: sample `t`
    of group `g` is row `g * (len / groups) + t` of this rank's rows.
    """

    groups: int = 1
    """Number of groups over all ranks, for example environments."""
    passes: int = 1
    """Passes over the collected samples in an epoch."""
    pure: bool = False
    """Whether `collect` depends only on the model, `rand` and `state`, and only computes with tensors: a GPU then replays it as one
    CUDA graph. `state` must be empty before the first collection."""
    limits: Mapping[str, float] = MappingProxyType({})
    """Metric of the loss -> limit. Once a step's mean of the metric is above the limit, this and all later steps of the epoch change nothing."""
    group_bytes: int = 0
    """Bytes that a collection needs at least for each group; 0 if unknown."""

    @property
    def speeds(self) -> dict[str, float]:
        """Further speeds to log: NAME -> units per sample. `NAME_per_second` is this number times `samples_per_second`."""
        return {}

    def __len__(self) -> int:
        raise NotImplementedError

    def collect(self, model: nn.Module, rand: Rand, total: Callable[[Tensor], Tensor]) -> Tensors:
        """Returns the samples of this rank's groups (numbers `rand.ids`); `total` sums a tensor over the ranks."""
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """Returns the state that the next `collect` needs: tensors with a row for each of this rank's groups."""
        return {}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restores a state of `state()`; its rows are this rank's groups."""

    def write_files(self, state: dict[str, Tensor], folder: Path) -> None:
        """Writes the files that a finished run hands on besides its weights, into its folder `data`; by default none.

        Called in one process, with the `state()` of all groups.
        """

    def fault(self) -> str:
        """Returns why collected samples are not finite; empty if unknown. Called when a loss is NaN."""
        return ""

    def stepper(self, model: nn.Module, context: StepperContext) -> EpochStepper | None:
        """Returns the family's own code for the steps of an epoch, or None. It may pass the reason for None to `context.notice`."""
        return None


@dataclass(frozen=True)
class StepperContext:
    """What the engine passes to an `EpochStepper`."""

    device: torch.device
    optimizer: torch.optim.Optimizer
    learning_rates: Tensor
    """The learning rate of each step of the run."""
    metric_ring: Tensor
    """Where a step writes its metrics: in row (step number modulo the number of rows), the gradient norm in column 0."""
    first_metric: int
    """The column of the first metric. The sums of all metrics come first, as `loss` returns them; then their counts."""
    random_keys: Callable[[int], list[int]]
    """The keys of an epoch's random numbers: of the first `rand.uniform` of its collection, then of the order in each pass."""
    record: Callable[[Callable[[], object]], Callable[[], None]]
    """Captures device work as a CUDA graph and returns the function that replays it."""
    host_waits: Callable[[], AbstractContextManager[list[str]]]
    """Lists the code lines inside the `with` block where the host waits for the device: a CUDA graph cannot contain them."""
    notice: Callable[[str], None]
    """Prints a sentence for the user."""


class EpochStepper(Protocol):
    """Takes all optimizer steps of a `Source`'s epoch on one GPU, with the same results as the engine's own steps."""

    collects: bool
    """Whether it also collects the epoch's samples."""

    def __call__(self, epoch: int, first_step: int, samples: Any) -> None:
        """Takes the steps of an epoch on its samples (None if it collects them itself)."""
        ...
