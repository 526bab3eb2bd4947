"""What to train: `Task`, the data forms `Tensors` and `Source`, and the settings every task has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from drivetrain.outcomes import Problem
from drivetrain.settings import Duration, Range, resolve
from drivetrain.source import of_class

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch
    from torch import Tensor, nn


class Rand(Protocol):
    """Random numbers keyed by (seed, epoch, sample): the same whatever rank, worker or batch asks."""

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
    """A data set held as tensors or arrays: `Tensors(x, y)` gives tuples, `Tensors(image=x, label=y)` dicts."""

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
        """The samples at an index, a slice or a tensor of indices, in the form of a batch."""
        return self.batch([column[index] for column in self.columns])

    def batch(self, columns: Sequence[Any]) -> Any:
        if self.names is not None:
            return dict(zip(self.names, columns, strict=True))
        return tuple(columns) if len(columns) > 1 else columns[0]


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


class Source:
    """Data made by the model itself, for on-policy learning.

    `len(source)` samples an epoch come from `groups` equal groups (environments). At the start of each
    epoch the engine calls `collect` and then goes `passes` times over what it gave. Samples of one
    group stand together: sample `t` of group `g` is row `g * (len / groups) + t` of this rank's rows.
    """

    groups: int = 1
    passes: int = 1
    pure: bool = False
    """Whether `collect` follows from the model, `rand` and `state` alone, by work on tensors: then a GPU replays it as one graph.
    Its `state` is empty before the first collection."""
    limits: Mapping[str, float] = MappingProxyType({})
    """Metric of the loss -> limit. A step whose mean of that metric is above the limit changes nothing, nor does any later step of the epoch."""
    group_bytes: int = 0
    """Bytes that a group takes in a collection, at least; 0 where that is not known before."""

    @property
    def speeds(self) -> dict[str, float]:
        """What else rows tell a speed of: NAME -> how many of it one sample that is learned from stands for. Logged as
        `NAME_per_second`, that many times `samples_per_second`."""
        return {}

    def __len__(self) -> int:
        raise NotImplementedError

    def collect(self, model: nn.Module, rand: Rand, total: Callable[[Tensor], Tensor]) -> Tensors:
        """This rank's groups (their numbers are `rand.ids`), with `total` to sum a tensor over ranks."""
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """Everything the next `collect` needs, as tensors whose rows are this rank's groups."""
        return {}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take back what `state` gave (rows of this rank's groups)."""

    def fault(self) -> str:
        """Why what was collected is not all numbers, where that is known; asked once a loss is not a number."""
        return ""

    def stepper(self, model: nn.Module, context: StepperContext) -> EpochStepper | None:
        """Returns code that takes whole epochs by itself, where the family has any; it tells `context.notice` why it has none."""
        return None


class Task:
    """What to train. Derive from it, annotate settings, write `model`, `train_data` and `loss`."""

    epochs: Annotated[int, Range(1)] = 10
    """Passes over the training data."""
    steps: Annotated[int, Range(1)] | None = None
    """Optimizer steps; given, it wins over epochs."""
    global_batch: Annotated[int, Range(1)] = 64
    """Samples in one optimizer step, over all processes: the plan keeps it, whatever the hardware."""
    learning_rate: Annotated[float, Range(0)] = 1e-3
    """The optimizer's peak learning rate."""
    weight_decay: Annotated[float, Range(0)] = 0.01
    """Weight decay of the optimizer."""
    clip: Annotated[float, Range(0)] = 0.0
    """Largest norm of the gradients; 0 does not clip."""
    warmup: Duration = 0
    """Steps (or epochs, 1ep) over which the learning rate rises to its peak."""
    optim: Literal["adamw", "adam", "sgd"] = "adamw"
    """The optimizer; adam and adamw with torch's own betas, sgd with `momentum`."""
    momentum: Annotated[float, Range(0, 1)] = 0.9
    """Momentum of optim=sgd; 0 is plain gradient descent. The others do not use it."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Every random choice follows from it: initial weights, order, augmentation, dropout."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Number format of the arithmetic; auto lets the plan choose, and it stays so on resume."""
    deterministic: bool = False
    """Only kernels whose results repeat bit for bit (slower on a GPU)."""
    sync_batchnorm: bool = False
    """Share BatchNorm statistics between GPUs, so that they see the global batch."""
    start: str | None = None
    """Begin from the weights of this run or .safetensors file."""
    best: str | None = None
    """Keep the checkpoint with the best value of this metric (max:NAME or min:NAME; accuracies rise, losses fall)."""
    patience: Annotated[int, Range(0)] = 0
    """Evaluations in a row without a better value of `best` after which the run ends; 0 goes on to the end."""
    log_every: Duration = 50
    """Steps between logged rows."""
    eval_every: Duration = "1ep"
    """Steps (or 1ep, 10min) between evaluations; the end always evaluates."""
    eval_first: bool = False
    """Also evaluate before the first step."""
    save_every: Duration = "1ep"
    """Steps (or 1ep, 10min) between checkpoints; the end always saves."""
    keep: Annotated[int, Range(1)] = 2
    """Checkpoints kept, besides the best one."""

    search: ClassVar[dict[str, str]] = {}
    """What `drivetrain tune` searches: setting -> `LOW..HIGH`, `LOW..HIGH,log` or `A|B|C`."""

    def __init__(self, **settings: Any) -> None:
        known = of_class(type(self))
        self._given = frozenset(settings)
        for name, value in resolve(known, settings, type(self).__name__).items():
            setattr(self, name, value)

    def settings(self) -> dict[str, Any]:
        """The values of all settings."""
        return {name: getattr(self, name) for name in of_class(type(self))}

    def model(self) -> nn.Module:
        """The network; nothing in it knows ranks or devices."""
        raise Problem(f"{type(self).__name__} has no model(): return the nn.Module to train")

    def train_data(self) -> Any:
        """`Tensors(...)`, any map-style torch Dataset, or a `Source`."""
        raise Problem(f"{type(self).__name__} has no train_data(): return Tensors(...) or a map-style Dataset")

    def eval_data(self) -> Any:
        """Like `train_data`; None evaluates nothing."""
        return None

    def loss(self, model: Any, batch: Any) -> Any:
        """The mean over the batch's samples; or `(total, count)`; or a dict of named parts of these forms.

        A second dict, `return loss, {"kl": values}`, is only logged.
        """
        raise Problem(f"{type(self).__name__} has no loss(model, batch): return the mean loss of the batch's samples")

    def counts(self, batch: Any) -> dict[str, Any] | None:
        """Only for losses with several parts that have counts of their own: name -> count."""
        return None

    def metrics(self, model: Any, batch: Any) -> dict[str, Any]:
        """Name -> per-sample values, or `(total, count)`. Numbers with a fraction (and booleans) are averaged;
        whole numbers and rows of several values only reach `summary`. By default the loss."""
        value = self.loss(model, batch)
        if isinstance(value, tuple) and isinstance(value[1], dict):
            value = value[0]
        return dict(value) if isinstance(value, dict) else {"loss": value}

    def remarks(self, model: Any) -> list[str]:
        """What is said after an evaluation: samples of what the model makes, for example. Rank 0's is told; a sharded model's
        is asked for on every rank, and must call the model equally often on each."""
        return []

    def model_files(
        self, tensors: dict[str, Tensor], folder: Path, facts: dict[str, Any], merge: nn.Module | None = None
    ) -> list[str] | None:
        """Writes the weights as files that other programs know, and returns the files' names; None: this task has no such form.

        Called when a run finishes, for files beside its weights, and by `export`, which writes graphs where this returns None.
        `facts` tell about the run (name, steps, metrics). With `export --merge`, `merge` is the model to write whole.
        """
        return None

    def predict(self, model: Any, given: str) -> Iterator[str]:
        """What the trained model makes of an input on the command line, piece by piece."""
        raise Problem(f"{type(self).__name__} has no predict(model, given): yield pieces of text")

    def summary(self, values: dict[str, Tensor]) -> dict[str, Any]:
        """Further figures from all per-sample values of the evaluation data, in its order.
        Numbers are logged; a square matrix called `confusion` is drawn by `eval`."""
        return {}

    def augment(self, batch: Any, rand: Rand) -> Any:
        """A changed batch, on the device; random numbers from `rand` alone."""
        return batch

    def exports(self, model: Any) -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
        """What `export` writes: name -> (a module that gives named tensors, its inputs by name; how many rows stays free).
        By default the model with what `metrics` hands it."""
        return {}

    def optimizer(self, model: Any) -> torch.optim.Optimizer | None:
        """An optimizer of your own (its learning rates are the peak); None takes the one `optim` names."""
        return None

    def schedule(self, step: int, steps: int) -> float | None:
        """The factor of the peak rate at a step; None takes `warmup` and `decay`."""
        return None


def overrides(task: Task, hook: str) -> bool:
    """Whether a task has its own version of a hook."""
    return getattr(type(task), hook, None) is not getattr(Task, hook, None)
