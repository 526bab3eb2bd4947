"""Small tasks, each of which uses one feature of tasks, and functions to train them."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain.data import Source, Tensors
from drivetrain.engine.group import Group
from drivetrain.engine.log.observe import Observer, Observers
from drivetrain.engine.loop import Training
from drivetrain.hardware import Hardware
from drivetrain.plan.choose import choose
from drivetrain.runs import Run
from drivetrain.task import Task
from drivetrain.watch.files import MetricsFile

HARDWARE = Hardware(2, 2**34, gpu_note="a test")


def blobs(samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns points around four centres, which a small net learns to classify in a few steps."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (samples,), generator=generator)
    centres = torch.tensor([[2.0, 0, 0, 1], [0, 2, 1, 0], [-2, 0, 1, 1], [0, -2, 0, 1]])
    return centres[labels] + 0.7 * torch.randn(samples, 4, generator=generator), labels


class Plain(Task):
    """A small net; 101 samples, so that the last batch is partial."""

    epochs: int = 2
    global_batch: int = 16
    learning_rate: float = 0.05
    log_every: int = 1
    samples: int = 101
    dropout: float = 0.0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(16, 4))

    def train_data(self) -> Any:
        return Tensors(*blobs(self.samples))

    def eval_data(self) -> Any:
        return Tensors(*blobs(37, seed=1))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        x, y = batch
        logits = model(x)
        return {"accuracy": (logits.argmax(-1) == y).float(), "loss": F.cross_entropy(logits, y, reduction="none")}


class Augmented(Plain):
    """Dropout and augmentation with random numbers keyed by sample."""

    dropout: float = 0.3

    def augment(self, batch: Any, rand: Any) -> Any:
        x, y = batch
        return x + 0.3 * rand.normal(4) * rand.uniform(1), y


class BatchNormTask(Plain):
    """BatchNorm, whose statistics a forward pass changes, and dropout."""

    samples: int = 96

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 4))


class DictDataset(torch.utils.data.Dataset[Any]):
    """A map-style data set whose samples are dicts with random noise."""

    def __init__(self, samples: int, noise: float) -> None:
        self.x, self.y = blobs(samples)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return {"inputs": {"x": self.x[i] + self.noise * torch.randn(4)}, "y": self.y[i], "id": i}


class LoaderTask(Plain):
    """Trains on a map-style data set with nested dict batches."""

    noise: float = 0.2

    def train_data(self) -> Any:
        return DictDataset(self.samples, self.noise)

    def eval_data(self) -> Any:
        return DictDataset(37, self.noise)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch["inputs"]["x"]), batch["y"])

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": F.cross_entropy(model(batch["inputs"]["x"]), batch["y"], reduction="none")}


class TokenMean(Plain):
    """A loss that is a mean over tokens; samples have different numbers of tokens."""

    def train_data(self) -> Any:
        x, y = blobs(self.samples)
        return Tensors(x=x, y=y, tokens=torch.arange(len(x)) % 7)  # some samples have no token

    def loss(self, model: nn.Module, batch: Any) -> Any:
        losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return (losses * batch["tokens"]).sum(), batch["tokens"].sum()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        x, y = batch
        return {"nll": (F.cross_entropy(model(x), y, reduction="sum"), torch.tensor(len(x)))}


class LossParts(Plain):
    """A loss with several parts, each with its own count, and a metric that is only logged."""

    def train_data(self) -> Any:
        x, y = blobs(self.samples)
        return Tensors(x=x, y=y, marked=(torch.arange(len(x)) % 3 == 0))

    def counts(self, batch: Any) -> dict[str, Any]:
        return {"marked": batch["marked"].sum()}

    def loss(self, model: nn.Module, batch: Any) -> Any:
        logits = model(batch["x"])
        losses = F.cross_entropy(logits, batch["y"], reduction="none")
        penalty = logits.pow(2).mean(-1).mean() * 0.1
        return (
            {"all": losses.mean(), "marked": ((losses * batch["marked"]).sum(), batch["marked"].sum()), "penalty": penalty},
            {"confidence": logits.softmax(-1).amax(-1)},
        )

    def eval_data(self) -> Any:
        return None


class RandomWalks(Source):
    """A Source whose state continues from epoch to epoch: the collected data depends on the state and on the model."""

    groups, passes = 6, 2

    def __init__(self) -> None:
        self.positions: Tensor | None = None

    def __len__(self) -> int:
        return self.groups * 8

    def collect(self, model: nn.Module, rand: Any, total: Any) -> Tensors:
        if self.positions is None:
            self.positions = rand.normal(4)
        rows = []
        for _ in range(8):
            self.positions = 0.9 * self.positions + 0.3 * rand.normal(4) + 0.1 * model(self.positions).tanh()
            rows.append(self.positions)
        x = torch.stack(rows, 1).reshape(-1, 4)
        mean = total(x.sum(0)) / len(self)
        return Tensors(x, (x - mean).argmax(-1))

    def state(self) -> dict[str, Tensor]:
        assert self.positions is not None
        return {"positions": self.positions}

    def load(self, state: dict[str, Tensor]) -> None:
        self.positions = state["positions"]


class RandomWalkTask(Plain):
    epochs: int = 4
    global_batch: int = 12

    def train_data(self) -> Any:
        return RandomWalks()


class CountingSGD(torch.optim.SGD):
    """Counts steps in its parameter groups and has no fused kernel."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-group["lr"] / group["count"] ** 0.5)


class OwnOptimizer(Plain):
    """Two parameter groups with different learning rates, an optimizer that keeps state in its groups, and a schedule."""

    kind: str = "rmsprop"

    def optimizer(self, model: Any) -> Any:
        groups = [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[3].parameters(), "lr": 0.01}]
        return torch.optim.RMSprop(groups) if self.kind == "rmsprop" else CountingSGD(groups)

    def schedule(self, step: int, steps: int) -> float:
        return 1.0 - 0.5 * step / steps


class AugmentsInPlace(LossParts):
    """Augments its batch in place, so that a second call would change the result."""

    def augment(self, batch: Any, rand: Any) -> Any:
        batch["x"].add_(rand.normal(4))
        return batch


class Float64(Plain):
    def model(self) -> nn.Module:
        return super().model().double()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, (batch[0].double(), batch[1]))

    def eval_data(self) -> Any:
        return None


class CustomBatch:
    """A batch class of the user's own, as some libraries have."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device: torch.device) -> CustomBatch:
        return CustomBatch(self.x.to(device), self.y.to(device))


class UnusualModel(Plain):
    """A sparse embedding, an LSTM, tied weights, a frozen module, an unused one, and batches of a custom class."""

    learning_rate: float = 0.02

    def model(self) -> nn.Module:
        net = nn.ModuleDict({
            "embed": nn.Embedding(11, 8, sparse=True), "rnn": nn.LSTM(8, 8, batch_first=True), "frozen": nn.Linear(8, 8),
            "head": nn.Linear(8, 11, bias=False), "tied": nn.Linear(8, 11, bias=False), "unused": nn.Linear(3, 3),
        })  # fmt: skip
        net["tied"].weight = net["head"].weight
        net["frozen"].requires_grad_(False)
        return net

    def train_data(self) -> Any:
        starts = torch.arange(self.samples) % 11
        return torch.utils.data.TensorDataset((starts[:, None] + torch.arange(6)) % 11, starts)

    def collate(self, samples: list[Any]) -> CustomBatch:
        return CustomBatch(torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples]))

    def eval_data(self) -> Any:
        return self.train_data()

    def loss(self, model: Any, batch: Any) -> Any:
        hidden, _ = model["rnn"](model["embed"](batch.x[:, :-1]))
        logits = model["head"](hidden) + model["tied"](model["frozen"](hidden))
        return F.cross_entropy(logits.transpose(1, 2), batch.x[:, 1:])

    def metrics(self, model: Any, batch: Any) -> dict[str, Any]:
        return {"loss": self.loss(model, batch)}


class HostRandomness(Plain):
    """Draws from Python's and numpy's generators inside the loss."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch) * (1 + random.random() + np.random.rand())


class UnkeyedRandomWalks(RandomWalks):
    """Draws from torch's generator instead of `rand`."""

    def collect(self, model: nn.Module, rand: Any, total: Any) -> Tensors:
        data = super().collect(model, rand, total)
        data.columns[0] = data.columns[0] + torch.randn_like(data.columns[0])
        return data


class UnkeyedRandomTask(RandomWalkTask):
    def train_data(self) -> Any:
        return UnkeyedRandomWalks()


class MovingAverageTeacher(Plain):
    """A teacher that is a moving average of the net, updated in the loss."""

    def model(self) -> nn.Module:
        return nn.ModuleDict({"net": super().model(), "teacher": super().model().requires_grad_(False)})

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        with torch.no_grad():
            for average, parameter in zip(model["teacher"].parameters(), model["net"].parameters(), strict=True):
                average.data.mul_(0.9).add_(parameter.data, alpha=0.1)
        logits = model["net"](x)
        return F.cross_entropy(logits, y) + F.mse_loss(logits, model["teacher"](x))

    def metrics(self, model: Any, batch: Any) -> dict[str, Any]:
        x, y = batch
        return {"loss": F.cross_entropy(model["net"](x), y, reduction="none")}


class CountsOnRank0(Plain):
    """Only rank 0 counts calls in a Python attribute."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if os.environ.get("RANK") == "0":
            self.calls = getattr(self, "calls", 0) + 1
        return super().loss(model, batch)


class AdamWSubclass(torch.optim.AdamW):
    """A subclass of a fused optimizer that deletes the attributes its kernel reads."""

    def step(self, closure: Any = None) -> Any:
        for name in ("grad_scale", "found_inf"):
            if hasattr(self, name):
                delattr(self, name)
        return super().step(closure)


class SubclassedOptimizer(Plain):
    derived: bool = True

    def optimizer(self, model: Any) -> Any:
        kind = AdamWSubclass if self.derived else torch.optim.AdamW
        return kind(model.parameters(), lr=self.learning_rate, weight_decay=0.01, fused=True)


class ChangingColumns(RandomWalks):
    """Collects columns of different width and order in each epoch."""

    def collect(self, model: nn.Module, rand: Any, total: Any) -> Tensors:
        data = super().collect(model, rand, total)
        self.num_epochs = getattr(self, "num_epochs", 0) + 1
        x, y = data.columns
        padded = torch.cat([x, torch.zeros(len(x), self.num_epochs % 3, device=x.device)], 1)
        return Tensors(x=padded, y=y) if self.num_epochs % 2 else Tensors(y=y, x=padded)


class ChangingColumnsTask(RandomWalkTask):
    def train_data(self) -> Any:
        return ChangingColumns()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch["x"][:, :4]), batch["y"])


class Exploding(Plain):
    """The loss is `spike` times larger; from call number `nan_from` on (0: never) it is NaN."""

    spike: float = 1.0
    nan_from: int = 0

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self._calls = getattr(self, "_calls", 0) + 1
        value = super().loss(model, batch)
        is_nan = self.nan_from and self._calls >= self.nan_from
        return value * (float("nan") if is_nan else self.spike)


TASKS = {
    t.__name__: t
    for t in (
        Plain,
        Augmented,
        BatchNormTask,
        LoaderTask,
        TokenMean,
        LossParts,
        RandomWalkTask,
        OwnOptimizer,
        AugmentsInPlace,
        Float64,
        UnusualModel,
        HostRandomness,
        UnkeyedRandomTask,
        Exploding,
        MovingAverageTeacher,
        CountsOnRank0,
        SubclassedOptimizer,
        ChangingColumnsTask,
    )
}


def training(
    name: str, folder: str, group: Group, settings: dict[str, Any], pins: dict[str, Any] | None = None, stop: Observer | None = None
) -> Training:
    """Returns a training on the CPU; `stop` is told of every observation point, and becomes true to stop the training."""
    task = TASKS[name](**settings)
    plan = choose(
        task.settings(), HARDWARE, device="cpu", world_size=group.size, local_procs=group.size, pins={"threads": 1} | (pins or {})
    )
    run = Run(folder)
    observers: list[Observer] = [MetricsFile(run)] if group.is_main else []
    if stop is None:
        return Training(task, plan, run, group, Observers(observers), False)
    return Training(task, plan, run, group, Observers([*observers, stop]), stop)


def train(
    name: str, folder: str, settings: dict[str, Any], pins: dict[str, Any] | None, stop_after: int | None, group: Group
) -> list[dict[str, Any]]:
    """Trains or resumes in a folder; returns rank 0's metrics without times."""
    job = training(name, folder, group, settings, pins)
    job.run_to_end(stop_after)
    job.setup.observer.close()
    return rows(folder) if group.is_main else []


def rows(folder: str | Path) -> list[dict[str, Any]]:
    """Returns the metrics of a run without those that depend on the machine: times, speeds and memory."""

    def is_reproducible(name: str) -> bool:
        return name not in ("time", "memory_bytes") and not name.endswith("_per_second")

    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if is_reproducible(name)} for line in lines]


def weights(folder: str | Path) -> bytes:
    return (Path(folder) / "model" / "model.safetensors").read_bytes()
