"""What to train: `Task`, with the settings every task has and the hooks a task may define."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from drivetrain.data import Picture, Rand, Source, Tensors
from drivetrain.outcomes import Problem
from drivetrain.settings import Duration, Range, resolve
from drivetrain.settings_reader.live import settings_of_class

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn

__all__ = ["Picture", "Rand", "Source", "Task", "Tensors", "overrides"]


class Task:
    """What to train. Derive from it, annotate settings, and define `model`, `train_data` and `loss`."""

    epochs: Annotated[int, Range(1)] = 10
    """Passes over the training data."""
    steps: Annotated[int, Range(1)] | None = None
    """Optimizer steps; if set, `epochs` is ignored."""
    global_batch: Annotated[int, Range(1)] = 64
    """Samples in one optimizer step, over all processes: the same on any hardware."""
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
    """The seed of all random numbers: initial weights, data order, augmentation, dropout."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Number format of the arithmetic; with auto the plan chooses, and a resumed run keeps its choice."""
    deterministic: bool = False
    """Only kernels whose results repeat bit for bit (slower on a GPU)."""
    sync_batchnorm: bool = False
    """Share BatchNorm statistics between GPUs, so that they see the global batch."""
    start: str | None = None
    """Begin from the weights of this run or .safetensors file."""
    best: str | None = None
    """Keep the checkpoint with the best value of this metric: max:NAME, min:NAME or NAME (then smaller is better for names with loss, perplexity or error)."""
    patience: Annotated[int, Range(0)] = 0
    """End the run after so many evaluations in a row without a better value of `best`; 0 never ends it early."""
    log_every: Duration = 50
    """Steps (or 1ep, 10min) between logged rows."""
    eval_every: Duration = "1ep"
    """Steps (or 1ep, 10min) between evaluations; the end always evaluates."""
    eval_first: bool = False
    """Evaluate before the first step, too."""
    save_every: Duration = "1ep"
    """Steps (or 1ep, 10min) between checkpoints; the end always saves."""
    keep: Annotated[int, Range(1)] = 2
    """Number of checkpoints to keep, besides the best one."""

    search: ClassVar[dict[str, str]] = {}
    """What `drivetrain tune` searches: setting -> `LOW..HIGH`, `LOW..HIGH,log` or `A|B|C`."""
    tune_metric: ClassVar[str] = "loss"
    """The metric that `tune` judges trials by, if neither `best` nor --metric names one."""
    tune_population: ClassVar[str] = ""
    """The module that trains many trials of this task as one program, for `drivetrain tune --population`; empty: none.
    It implements `drivetrain.processes.population.PopulationRules`."""

    def __init__(self, **settings: Any) -> None:
        self.run_folder: Path | None = None
        """The folder of the run that this task trains, evaluates or predicts with; None while a plan is made. drivetrain sets it."""
        self._passed = frozenset(settings)
        for name, value in resolve(settings_of_class(type(self)), settings, type(self).__name__).items():
            setattr(self, name, value)

    def settings(self) -> dict[str, Any]:
        """Returns the values of all settings."""
        return {name: getattr(self, name) for name in settings_of_class(type(self))}

    def chosen_settings(self) -> dict[str, Any]:
        """Returns the settings that were passed to the constructor, or whose values are not the defaults."""
        declared = settings_of_class(type(self))
        return {name: value for name, value in self.settings().items() if name in self._passed or value != declared[name].default}

    # --- hooks every task needs ---

    def model(self) -> nn.Module:
        """Returns the network. It must not depend on ranks or devices."""
        raise Problem(f"{type(self).__name__} has no model(): return the nn.Module to train")

    def train_data(self) -> Any:
        """Returns `Tensors(...)`, any map-style torch Dataset, or a `Source`."""
        raise Problem(f"{type(self).__name__} has no train_data(): return Tensors(...) or a map-style Dataset")

    def loss(self, model: Any, batch: Any) -> Any:
        """Returns the mean over the batch's samples; or `(total, count)`; or a dict of named parts, each in one of these forms.

        A second dict, `return loss, {"kl": values}`, is only logged.
        """
        raise Problem(f"{type(self).__name__} has no loss(model, batch): return the mean loss of the batch's samples")

    # --- hooks of training ---

    def collate(self, samples: list[Any]) -> Any:
        """Returns a batch of samples of a Dataset: any nesting of tuples, lists and dicts. By default torch's `default_collate`."""
        from torch.utils.data import default_collate

        return default_collate(samples)

    def augment(self, batch: Any, rand: Rand) -> Any:
        """Returns the training batch with random changes. Runs on the device; take random numbers from `rand` only."""
        return batch

    def counts(self, batch: Any) -> dict[str, Any] | None:
        """Returns the count of each part: name -> count. Only for a loss with several parts whose counts differ."""
        return None

    def optimizer(self, model: Any) -> torch.optim.Optimizer | None:
        """Returns your own optimizer, whose learning rates are the peak rates; None uses the one that `optim` names."""
        return None

    def schedule(self, step: int, steps: int) -> float | None:
        """Returns the factor of the peak learning rate at a step; None uses `warmup` and `decay`."""
        return None

    # --- hooks of evaluation ---

    def eval_data(self) -> Any:
        """Returns `Tensors(...)` or a Dataset; None: no evaluation."""
        return None

    def metrics(self, model: Any, batch: Any) -> dict[str, Any]:
        """Returns name -> per-sample values, or `(total, count)`; by default the loss.

        Fractions and booleans are averaged; whole numbers and rows of several values only reach `summary`.
        """
        value = self.loss(model, batch)
        if isinstance(value, tuple) and isinstance(value[1], dict):
            value = value[0]
        return dict(value) if isinstance(value, dict) else {"loss": value}

    def summary(self, values: dict[str, Tensor]) -> dict[str, Any]:
        """Returns further metrics, computed from the per-sample values of all evaluation data, in the order of the data.

        Numbers are logged. `eval` draws a square matrix called `confusion`; the attribute `classes`, if the task has it, gives the names.
        """
        return {}

    def resample_groups(self, values: dict[str, Tensor]) -> Tensor | tuple[Tensor, Tensor] | None:
        """Returns a whole number for each sample, its group; None: every sample is a group. The bootstrap draws whole groups.

        Samples that depend on each other belong to one group: those of one patient, for example. With a second tensor, rows of whole
        numbers that name what was evaluated, runs are compared by these rows, and their samples may differ.
        """
        return None

    def remarks(self, model: Any) -> Sequence[str | Picture]:
        """Returns lines for the log and `Picture`s after an evaluation: samples of what the model generates, for example.

        Runs on rank 0; with a sharded model on every rank, where all ranks must call the model equally often.
        """
        return []

    # --- hooks of a trained model ---

    def summary_fields(self) -> dict[str, Any]:
        """Returns further lines of the run's `summary.txt`: name -> value, such as {"Classes": 10}."""
        return {}

    def predict(self, model: Any, given: str) -> Iterator[str]:
        """Yields the model's answer to an input of `drivetrain predict`, piece by piece."""
        raise Problem(f"{type(self).__name__} has no predict(model, given): yield pieces of text")

    def exports(self, model: Any) -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
        """Returns the graphs that `export` writes: name -> (a module that returns named tensors, example inputs by name).

        By default: the model, with the inputs that `metrics` passes to it. The exported graphs accept any number of rows.
        """
        return {}

    def model_files(
        self, tensors: dict[str, Tensor], folder: Path, facts: dict[str, Any], merge: nn.Module | None = None
    ) -> list[str] | None:
        """Writes the weights in a format of other programs and returns the files' names; None: this task has no such format.

        Called when a run finishes, to add files to its weights, and by `export`, which writes graphs if this returns None.
        `facts` describe the run: name, steps, metrics. With `export --merge`, `merge` is the model to write.
        """
        return None


def overrides(task: Task, hook: str) -> bool:
    """Whether a task or its class replaces a hook of `Task`."""
    return hook in vars(task) or getattr(type(task), hook) is not getattr(Task, hook)
